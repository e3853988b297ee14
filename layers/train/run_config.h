// RunConfig: everything that describes a run. option_table.cpp describes each field once more, by its option's name,
// its text and its range; the command line, --help, the identity in checkpoints, the comparison between ranks and the
// first line of the metrics are made from that description.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autograd/memory_choice.h"
#include "core/dtype.h"
#include "datasets/dataset.h"
#include "layers/optim/schedule.h"
#include "layers/train/callback.h"
#include "layers/train/checkpoint.h"
#include "layers/train/profiler.h"

namespace tandem {

struct ImportExportFiles {  // empty: none
  std::string import_torch = {}, export_torch = {}, export_onnx = {};
  std::string tensorboard = {};  // a folder
};

// The options on a command line: the first value of each, by the option's name.
using GivenOptions = std::map<std::string, std::string>;

// fit() reads the fields marked with *. Programs make the data, the model, the optimizer and the backend, which they
// pass to fit(), from the others.
struct RunConfig {
  // ---- data and model
  std::string data = {};  // folder with the data sets, or "synthetic"; empty: $TANDEM_DATA, then data/
  // Programs that accept any data set set a default here, and then have --data-set, --size and --skip-broken.
  std::string data_set = {};
  FolderOptions folder = {};
  std::string model = "smallcnn";

  // ---- training
  int epochs = 1;  // *
  // Pictures per step, of which each rank has its share; asynchronous: per push of a worker. 0: --batch auto
  int batch = 128;
  bool chooses_batch = false;  // the program calls choose_batch() (layers/train/tuner.h), so --batch may be auto
  int batch_per_rank = 0;      // above 0: pictures on each rank, instead of batch
  double learning_rate = 0.05;
  std::string schedule = {};  // * (layers/optim/schedule.h); empty: constant, and in programs one-cycle
  // * How the learning rate is scaled if the batch grows with the ranks (LoaderOptions::batch_per_rank). The rate rises
  // over the first five epochs, or a tenth of a shorter run, unless the schedule has a warm-up (Goyal et al. 2017).
  RateScale lr_scale = RateScale::clipped;
  std::string optimizer = "sgd";  // sgd, lars, adamw, adam, rmsprop
  double momentum = 0.9, weight_decay = 5e-4, label_smoothing = 0, clip = 0;
  bool nesterov = true, augment = false, reflect = false;
  std::string partition = "shared";        // of the training pictures among workers (datasets/partition.h)
  int cutout = 0;                          // side of the square in pixels; 0: none
  double mixup = 0;                        // α; 0: none
  std::vector<float> mean = {}, std = {};  // per channel, or one for all; empty: those of the data set

  // ---- machine
  std::string device = "cpu";  // cpu, reference, cuda, cuda:1
  DType dtype = DType::f32;    // of activations; parameters stay f32
  int threads = 0;             // 0: default_threads() (core/team.h)
  int val = 0;                 // training pictures held back for validation
  bool deterministic = false, exact_conv = false, tf32 = false;

  // ---- the run: all of these are *
  std::uint64_t seed = 1;
  std::string metrics = {};    // file for JSON lines; empty: none
  bool progress = true;        // on stderr: one line that is updated on a terminal, else one line per epoch
  std::int64_t log_every = 0;  // steps between two "step" lines in the metrics; 0: none
  ProfilerOptions profiler = {};
  // Trains on the first batch only until its loss is near zero: a test that the model can learn. Throws Error when it
  // does not learn, or when there are too few steps to decide.
  bool overfit_batch = false;
  ImportExportFiles import_export = {};

  // Bytes of the device's memory that the run may take; 0: all. With a budget, tensors that a step saves for backward
  // are kept, swapped to `scratch` or recomputed, as `swap` allows (autograd/memory_plan.h). A budget that is too small
  // is refused after the second step's passes, with the smallest sufficient one. scratch: a folder (empty: $TMPDIR,
  // then /tmp); on a GPU the kind of host memory, "pinned" (also empty) or "unified".
  std::size_t memory_budget = 0;
  SwapMode swap = SwapMode::automatic;
  std::string scratch = {};
  int accumulate = 1;            // batches per step (layers/optim/accumulation.h)
  bool sync_batch_norm = false;  // statistics over the pictures of all ranks
  // Decay of a moving average of the weights (layers/optim/ema.h), which is then evaluated; 0: none
  double ema = 0;
  int patience = 0;  // stop after this many epochs without a better validation; 0: never
  // Folder for last.safetensors, written after every epoch and when the run is stopped, and best.safetensors, written
  // after an epoch that was the best so far: by validation accuracy, or without validation by training loss. The folder
  // is refused when it has checkpoints of another run, or while another process writes there.
  std::string checkpoint = {};
  bool evaluate = false;  // no training: report the results of the weights of `resume` or `import_export.import_torch`
                          // on the test data
  std::string resume = {};  // a checkpoint, or a folder with last.safetensors, in which checkpoints are then written
  std::int64_t stop_after = 0;  // stop at this step of the run; 0: never. If the step is over, nothing is trained
  std::vector<std::shared_ptr<Callback>> callbacks = {};  // of the program (layers/train/callback.h)
  Settings settings = {};                                 // of the program, stored in checkpoints besides the options

  GivenOptions given = {};
  std::vector<std::string> accepted = {};  // the names of the options that the program has
};

struct OptionSpec {
  std::string name, help, fallback;             // "--batch", its description, the default as text
  std::function<void(const std::string&)> set;  // throws UsageError on a bad value
  bool flag = false;                            // takes no value
  bool repeats = false;                         // may be given again
  std::function<std::string()> value = {};      // the field's value as text
  // An option that affects what a step computes is a part of the run's identity. fit: in every run, because fit() reads
  // it. program: in the runs of programs that have the option.
  enum class Decides { nothing, program, fit } decides = Decides::nothing;
};

// The one table of the options that training programs share: name, field, default, text, and whether it changes what a
// step computes. The parser, --help, the run's identity in checkpoints and the start line of the metrics are made from
// it. The rows read and write `config`, which must outlive them; the defaults are its present values.
std::vector<OptionSpec> option_table(RunConfig& config);

// The options that affect what a step computes, as text: those that fit() reads, or the others that the program has.
Settings settings_of(const RunConfig& config, OptionSpec::Decides kind);

}  // namespace tandem
