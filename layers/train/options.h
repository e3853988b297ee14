// The options that every training program shares, their defaults and their checks.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "datasets/dataset.h"
#include "layers/optim/optimizer.h"
#include "layers/train/fit.h"

namespace tandem {

struct Options {
  std::string data = {};  // folder with the data sets, or "synthetic"; empty: $TANDEM_DATA, then data/
  // Programs that accept any data set set a default here, and then have --data-set, --size and --skip-broken.
  std::string data_set = {};
  FolderOptions folder = {};
  std::string model = "smallcnn";
  FitOptions fit = {.epochs = 8};  // without schedule and settings, which fit_options() sets
  // Pictures per step, of which each rank has its share; asynchronous: per push of a worker. 0: --batch auto
  int batch = 128;
  bool chooses_batch = false;  // the program calls choose_batch() (layers/train/choose_batch.h), so --batch may be auto
  int batch_per_rank = 0;      // above 0: pictures on each rank, instead of batch
  double learning_rate = 0.05;
  std::string schedule = "one-cycle";
  std::string optimizer = "sgd";  // sgd, lars, adamw, adam, rmsprop
  double momentum = 0.9, weight_decay = 5e-4, label_smoothing = 0, clip = 0;
  bool nesterov = true, augment = false;
  std::string partition = "shared";        // of the training pictures among the workers (datasets/partition.h)
  int cutout = 0;                          // side of the square in pixels; 0: none
  double mixup = 0;                        // α; 0: none
  std::vector<float> mean = {}, std = {};  // per channel, or one for all; empty: those of the data set
  std::string device = "cpu";              // cpu, reference, cuda, cuda:1
  DType dtype = DType::f32;                // of activations; parameters stay f32
  int threads = 0;                         // 0: default_threads() (core/team.h)
  int val = 0;                             // training pictures held back for validation
  bool deterministic = false, exact_conv = false, tf32 = false;
  std::set<std::string> given = {};        // the names that were on the command line
  std::vector<std::string> accepted = {};  // the names that the program has; empty: all
};

// The options of fit(): options.fit, with the schedule and with the other settings that affect the run.
FitOptions fit_options(const Options& options);

struct OptionSpec {
  std::string name, help, fallback;             // "--batch", its description, the default as text
  std::function<void(const std::string&)> set;  // throws UsageError on a bad value
  bool flag = false;                            // takes no value
  bool repeats = false;                         // may be given again
  std::function<std::string()> value = {};      // the field's value as text
  // An option that affects what a step computes is a part of the run's identity: one of FitOptions in every run, others
  // in the runs of programs that have them.
  enum class Decides { nothing, program, fit } decides = Decides::nothing;
};

// The one table of the options that training programs share: name, field, default, text, and whether it changes what a
// step computes. The parser, --help, the run's identity in checkpoints and the start line of the metrics are made from
// it. The rows read and write `options`, which must outlive them; the defaults are its present values.
std::vector<OptionSpec> option_table(Options& options);

// The options that affect what a step computes, as text: those of this kind that the program has.
Settings settings_of(const Options& options, OptionSpec::Decides kind);

// Reads argv; options that are not given have the values of `defaults`. --help prints and exits with 0. Throws
// UsageError. With several ranks only rank 0 keeps its standard output, since all print the same.
// `only`: the options that this program accepts (empty: all), so that no option is accepted and ignored. `own`: further
// options of the program.
Options parse_options(int argc, char** argv, const std::string& description, const Options& defaults = {},
                      const std::vector<std::string>& only = {}, const std::vector<OptionSpec>& own = {});

// Throws UsageError for the first line of a table (option_checks.cpp) that applies: options that contradict each other
// or have no effect together, and files that would overwrite each other. parse_options calls it.
void check_options_agree(const Options& options);

// The index of the host's GPU that `--device cuda` means: one GPU per rank, assigned cyclically if there are more
// ranks.
int device_of_rank(int local_rank, int devices);
// The number of CPU backend threads of a rank that shares its host's cores with other ranks; `allowed`: the number of
// cores to which its launcher has bound it.
int threads_of_rank(int local_size, int cores, int allowed);
// The backend that the options select. Throws UsageError with the cause when it is not available.
std::unique_ptr<Backend> make_backend(const Options& options);

// The optimizer that the options select.
std::unique_ptr<Optimizer> make_optimizer(const Options& options);

// Runs body and prints an exception as one line on stderr. Returns the exit status: 2 for a UsageError or a file that
// cannot be read, 1 for a failed run, 128 + the signal that stopped the training (130 after Ctrl-C, 143 after SIGTERM).
int run_program(int argc, char** argv, const std::function<void()>& body);

// --help prints and exits with 0. Throws UsageError. Words that belong to no option go to `words`, or are refused.
void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs,
                        std::vector<std::string>* words = nullptr);

}  // namespace tandem
