// Checkpoints: the complete state from which a run can continue as if it had not stopped, in one safetensors file that
// other tools can read.
//
//   conv1.weight …                      parameters and running statistics, by their names
//   optimizer/velocity/conv1.weight …   the optimizer's state
//   average/conv1.weight …              the moving average, if there is one
//   strategy/momentum/conv1.weight …    the strategy's state, if any; if the file lacks it, the initial state stays
//   metadata                            position, settings, the loss scale of f16, the layout's hash, a checksum of all
//
// Random numbers need no state: they are functions of counters. A file is replaced as a whole or not at all. Layers
// that are divided among ranks are whole in the file, which any number of ranks can read.
#pragma once
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/files/files.h"
#include "layers/optim/ema.h"
#include "layers/train/strategy.h"

namespace tandem {

// The objects whose state a checkpoint stores.
struct Training {
  FlatParameters& flat;
  Optimizer& optimizer;
  Ema* ema = nullptr;
  Strategy* strategy = nullptr;  // its state; needed to save a model whose layers are divided among ranks
};

// The position of a run: its progress so far.
struct RunPosition {
  std::int64_t epoch = 0, batch = 0;  // the next batch to train on, both from 0
  std::int64_t batches = 0;           // in an epoch
  std::int64_t step = 0;              // optimizer steps done
  MetricSums running_sums = {};       // of the current epoch, over all ranks
  std::string run = {};               // name of the run (run_of)
  bool ended = false;                 // before its last epoch, since validation no longer improved
  // The best epoch so far (from 1; 0: none yet) and its score: the larger, the better.
  std::int64_t best_epoch = 0;
  std::pair<double, double> best = {-std::numeric_limits<double>::infinity(), 0};
};

// The other settings that affect a run, as text: {"--lr", "0.1"}. If they differ, a resumed run is a different run.
using Settings = std::vector<std::pair<std::string, std::string>>;

// Throws UsageError when the file cannot be made, Error when the disk is full; an existing file is then unchanged.
// Where layers are divided among ranks all ranks call it; ranks that do not write pass an empty file name.
void save_checkpoint(const std::string& file, const Training& training, const RunPosition& position,
                     const Settings& settings = {});

// Restores the state of training from when the file was written, bit for bit. `differences`, if given, gets a line for
// every setting that has changed. Throws UsageError, and changes nothing, when the file is damaged or is of another
// model or optimizer.
RunPosition load_checkpoint(const std::string& file, const Training& training, const Settings& settings = {},
                            std::vector<std::string>* differences = nullptr);

// A line for each of these settings that differs from the file.
std::vector<std::string> differences_from(const std::string& file, const Settings& settings);

// The position of the run that wrote the file. Throws UsageError when the file is damaged.
RunPosition position_in(const std::string& file);

// Loads only the weights and running statistics, for using a trained model: the moving average if the file has one.
void load_weights(const std::string& file, FlatParameters& flat);

// The format name in the metadata of a checkpoint, by which other readers identify it.
inline constexpr const char* checkpoint_format = "tandem checkpoint";

// A name for the run with these settings: equal for equal settings, and so for every part of a resumed run.
std::string run_of(const Settings& settings);

// The properties of this machine and program on which the last bits of results depend.
Settings surroundings(const Backend& backend);

// The files of a run: last.safetensors and best.safetensors in a folder.
class CheckpointFiles {
 public:
  // folder, resume: as in RunConfig. If resume is "auto" or the folder, the run continues from the last checkpoint in
  // it, or else from the best, or else begins. writes: this rank writes. Throws UsageError when there is nothing to
  // resume, or the folder has checkpoints of another run.
  CheckpointFiles(const std::string& folder, const std::string& resume, bool writes);
  // Creates the folder, takes its lock and tries to write, so that an error shows before the training.
  void begin();
  bool resumes() const { return !from_.empty(); }
  const std::string& from() const { return from_; }
  bool writes() const { return wanted() && writes_; }
  bool wanted() const { return !folder_.empty(); }  // on any rank
  std::string last() const;
  std::string best() const;
  RunPosition load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                   std::vector<std::string>& differences) const;
  // After rank 0 was lost: whether this rank may write its state to the folder. It may when the folder has no
  // checkpoint, or an older one of the same run. It does not take the lock: rank 0 may still hold it, and has no newer
  // state.
  bool take_over(const RunPosition& at);
  // The checkpoint from which a failed run can continue, for its error message. saved_at: the step of last(); −1: not
  // written by this run.
  std::string kept(std::int64_t saved_at) const;

 private:
  void check_foreign_files() const;
  std::string from_, folder_, option_;
  bool writes_, automatic_;
  FileLock lock_;
};

}  // namespace tandem
