// The tuner: finds the minibatch size that trains fastest per sample within a memory budget, and a learning rate for it
// (patent CN109902818A; its authors' paper AccUDNN, arXiv 1901.06773).
//
// One iteration is recorded at two small minibatches (autograd/memory_plan.h). Bytes and seconds of every event and
// every saved tensor are assumed to be linear functions of the minibatch size through these two points (our choice). So
// a plan for any minibatch size is made and simulated without running it:
//   t(b) = T_fwd + T_bwd + recomputing + stalls + exposed exchange,   b* = argmin t(b)/b over what fits the budget.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/memory_plan.h"
#include "layers/train/metrics.h"
#include "layers/train/options.h"

namespace tandem {

// The workload that is recorded: a model on random pictures.
struct Workload {
  std::string model;
  int classes = 10, channels = 3, side = 32;
  DType dtype = DType::f32;
};

struct RecordedStep {
  std::int64_t batch = 0;
  IterationRecord record = {};
  std::size_t parameter_bytes = 0;
  double update = 0;  // seconds of the optimizer's update; 0 on a virtual clock
};
// Runs some steps at this minibatch size, without a memory limit, and records the median time of each event. mover:
// provides the clock (simulated_mover()); null: the real clock. Memory of the backend that other objects use counts as
// the workload's.
RecordedStep record_step(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                         int steps = 5);
// The record at another minibatch size, from two records of the same workload. Throws Error if their operations differ.
IterationRecord at_batch(const RecordedStep& small, const RecordedStep& large, std::int64_t batch);

// The bytes that ranks exchange in a step. With a parameter server a rank pushes M(n−1)/n bytes while backward runs,
// and then waits for as many; a ring all-reduce sends twice as many, all of them while backward runs.
struct ExchangeModel {
  int ranks = 1;
  double link = 0;  // bytes per second of a rank; 0: no limit
  bool server = true;
  double exposed(double parameter_bytes, double backward_seconds) const;
};

struct TunedBatch {
  std::int64_t batch = 0;
  IterationRecord record;
  MemoryChoice choice;
  double exposed = 0, update = 0;       // seconds of exchange without overlap; seconds of the optimizer's update
  std::size_t least = 0;                // bytes of the smallest budget
  std::optional<double> measured = {};  // seconds of a step without the update
  bool fits() const { return choice.fits; }
  // Seconds per sample, as predicted
  double predicted_sample() const { return (choice.forecast.seconds + update + exposed) / double(batch); }
  // Seconds per sample, from the measured time if there is one. accumulate: the minibatches of a step, which share one
  // update and one exchange.
  double per_sample(std::int64_t accumulate = 1) const {
    return (measured.value_or(choice.forecast.seconds) + (update + exposed) / double(accumulate)) / double(batch);
  }
};

struct TunerOptions {
  std::size_t budget = 0;  // bytes of the device, including the weights
  // Minibatch sizes to try; if this and multiples are empty: 8, 12, 16, 24, … until two in a row do not fit
  std::vector<std::int64_t> batches = {};
  std::vector<double> multiples = {};  // to try in addition: these multiples of largest_kept()
  std::int64_t most = 0;               // samples of the largest minibatch to try if none are given; 0: no limit
  MemoryMeans means = {};
  ExchangeModel exchange = {};
};
std::size_t peak_kept(const IterationRecord& record);  // bytes, with all tensors kept
// The largest minibatch that needs no plan: with all tensors kept it fits the budget. 0: not even one sample fits.
std::int64_t largest_kept(const RecordedStep& small, const RecordedStep& large, std::size_t budget);
// One row for each minibatch. Throws UsageError when not even the smallest fits; the message has the budget it needs.
std::vector<TunedBatch> tune(const RecordedStep& small, const RecordedStep& large, const TunerOptions& options);
// The row that is fastest per sample, among the rows of at most `cap` samples (0: any). Among rows that differ by less
// than half a percent, the one with the smaller minibatch.
const TunedBatch& fastest(const std::vector<TunedBatch>& rows, double cap = 0);
// The largest smaller minibatch that divides the minibatch of `whole` and needs no plan. Several of them, accumulated,
// make a step of as many samples; batch norm then sees fewer samples at a time. rows: by increasing minibatch. Null if
// there is none.
const TunedBatch* part_of(const TunedBatch& whole, const std::vector<TunedBatch>& rows);

// Seconds of a step at this minibatch under a plan: the median of the last steps. Throws what MemoryPlan throws.
double measure_batch(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                     const MemoryPlanOptions& options, int steps = 9);
// Measures the speed of copies during this workload, and how much they slow it down. Runs some steps under a plan that
// swaps half of the tensors of `recorded` that can be swapped.
MemoryMeans measure_means(const Workload& w, const RecordedStep& recorded, Backend& backend,
                          std::unique_ptr<Mover> mover);

// The noise of the gradient (McCandlish et al. 2018): E|g_b|² = |G|² + tr(Σ)/b, so two minibatch sizes determine |G|²
// and tr(Σ). A minibatch above tr(Σ)/|G|² samples has little further benefit.
struct GradientNoise {
  double gradient = 0, trace = 0;  // |G|², tr(Σ)
  double scale() const;            // samples; infinite where |G|² is not above 0
};
// From two minibatch sizes and the squared norms of their gradients
GradientNoise gradient_noise(double small, double small_norm, double large, double large_norm);
// Measured with `pieces` minibatches of the source at the present weights: from their gradients and the gradient of
// all.
GradientNoise measure_noise(Module& model, const Task& task, FlatParameters& flat, BatchSource& source,
                            int pieces = 16);

// The learning rate for a minibatch that is `times` as large as the one that `rate` was chosen for.
enum class RateRule {
  linear,       // rate · times, after 5 epochs of warm-up (Goyal et al. 2017)
  square_root,  // rate · √times
  lars,         // rate · times, with the optimizer lars: each step's length is proportional to the weights' norm
  adascale  // rate · gain, gain = (σ² + μ²)/(σ²/times + μ²), with σ² = tr(Σ)/base and μ² = |G|² (Johnson et al. 2020)
};
const char* name_of(RateRule rule);
double matched_rate(RateRule rule, double rate, double times, double base_batch, const GradientNoise& noise);

// Lines of metrics (examples/report.py draws them): a "minibatch" line for each row; for the chosen row its seconds
// with a "budget" and some means, and the "memory" in each event of an iteration, as the sum of the bytes rest, kept,
// recomputed and swapped.
std::vector<MetricFields> tuner_lines(const std::vector<TunedBatch>& rows, const TunedBatch& chosen,
                                      const MemoryMeans& means);

// ---- with a program's options and data (choose_batch.cpp) ----------------------------------------------------------
struct TuneRequest {
  TunerOptions tuner = {};        // budget 0: the free memory; rates of copies are measured
  bool simulated = false;         // simulates an H200 with a virtual clock; the gradient noise is then not measured
  bool measure = false;           // also runs the plans; not on a simulated device
  std::int64_t base_batch = 128;  // for which the options' learning rate was chosen
  RateRule rule = RateRule::linear;
  int noise_steps = 200;  // of 16 pictures, before the gradient noise is measured. The noise grows during training, so
                          // few steps give a low cap
};

struct Tuned {
  std::vector<TunedBatch> rows = {};
  std::size_t best = 0;                     // the row that was chosen
  TunerOptions tuner = {};                  // with the budget and the rates that were used
  std::optional<GradientNoise> noise = {};  // after noise_steps
  std::int64_t batch = 0;                   // of a step of all ranks; with a parameter server: of a push
  double rate = 0;                          // the learning rate for this batch
  std::string schedule = {};                // with a warm-up if the rate increases and the schedule has none
};

// Takes model, type, seed, learning rate, schedule, epochs, budget, swap and scratch folder from the options. Throws
// UsageError if no batch fits, and if the rule is not compatible with the options.
Tuned tune_for(const RunConfig& options, const Dataset& data, Backend& backend, const TuneRequest& request = {});

// If options.batch is 0 (--batch auto): chooses batch, learning rate and schedule, and prints them on stderr.
void choose_batch(RunConfig& options, const Dataset& data, Backend& backend);

}  // namespace tandem
