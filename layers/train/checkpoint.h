// Checkpoints: what a run needs to go on as if nothing had happened, in one safetensors file that other tools can read.
//
//   conv1.weight …                      parameters and running statistics, by their names
//   optimizer/velocity/conv1.weight …   what the optimizer remembers
//   average/conv1.weight …              the moving average, where there is one
//   strategy/momentum/conv1.weight …    what the strategy remembers, where it does; one that finds none of it in the
//   file begins anew metadata                            position, settings, the loss scale of f16, the layout's hash,
//   a checksum over all of it
//
// Random numbers need nothing: they are functions of counters. A file is replaced as a whole or not at all. Layers that
// are cut over ranks are whole in the file, which any number of ranks can read.
#pragma once
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "layers/optim/ema.h"
#include "layers/train/strategy.h"

namespace tandem {

// What a checkpoint holds the state of.
struct Training {
  FlatParameters& flat;
  Optimizer& optimizer;
  Ema* ema = nullptr;
  Strategy* strategy = nullptr;  // its state; needed to save a model whose layers are cut over ranks
};

// How far a run has come.
struct RunPosition {
  std::int64_t epoch = 0, batch = 0;  // the next batch to train on, both from 0
  std::int64_t batches = 0;           // in an epoch
  std::int64_t step = 0;              // optimizer steps done
  MetricSums running_sums = {};       // of the running epoch, over all ranks
  std::string run = {};               // which run this is (run_of)
  bool ended = false;                 // before its last epoch, since validation no longer became better
  // The best epoch so far (from 1; 0: none yet) and its merit: the larger, the better.
  std::int64_t best_epoch = 0;
  std::pair<double, double> best = {-std::numeric_limits<double>::infinity(), 0};
};

// What else decides how a run goes, as text: {"--lr", "0.1"}. Where it differs, a resumed run is another one.
using Settings = std::vector<std::pair<std::string, std::string>>;

// Throws UsageError when the file cannot be made, Error when the disk is full; the file that was there is then
// unchanged. Where layers are cut over ranks all ranks call it, those that do not write with an empty file name.
void save_checkpoint(const std::string& file, const Training& training, const RunPosition& position,
                     const Settings& settings = {});

// The training is then where it was when the file was written, bit for bit. `differences`, if given, gets a line for
// every setting that is not what it was. Throws UsageError, and changes nothing, when the file is damaged or of another
// model or optimizer.
RunPosition load_checkpoint(const std::string& file, const Training& training, const Settings& settings = {},
                            std::vector<std::string>* differences = nullptr);

// A line for each of these settings that is not what the file records.
std::vector<std::string> differences_from(const std::string& file, const Settings& settings);

// How far the run had come that wrote the file. Throws UsageError when it is damaged.
RunPosition position_in(const std::string& file);

// Only the weights and running statistics, for using a trained model: the moving average where the file has one.
void load_weights(const std::string& file, FlatParameters& flat);

// What the metadata of a checkpoint call it, so that other readers can tell.
inline constexpr const char* checkpoint_format = "tandem checkpoint";

// A name for the run that these settings describe: the same for the same settings, and so in every part of a run.
std::string run_of(const Settings& settings);

// This machine and program, as far as the last bits of results depend on them.
Settings surroundings(const Backend& backend);

}  // namespace tandem
