// The tuner: which minibatch trains fastest per sample within a budget of memory, and which learning rate goes with it
// (patent CN109902818A; its authors' paper AccUDNN, arXiv 1901.06773).
//
// One iteration is recorded at two small minibatches (autograd/memory_plan.h). Bytes and seconds of every event and
// every saved tensor are taken to be straight lines in the minibatch through these two points (our choice). So a plan
// for any minibatch is made and simulated without running it:
//   t(b) = T_fwd + T_bwd + recomputing + stalls + exposed exchange,   b* = argmin t(b)/b over what fits the budget.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/memory_plan.h"
#include "core/batch.h"
#include "layers/module.h"
#include "layers/train/metrics.h"
#include "layers/train/task.h"

namespace tandem {

class FlatParameters;

// A model on random pictures: the workload that is recorded.
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
// Runs some steps at this minibatch, each on a budget without end, and keeps of each event the median time. mover:
// gives the clock (simulated_mover()); null: the real one. Memory of the backend that others hold counts as the
// workload's.
RecordedStep record_step(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                         int steps = 5);
// The record at another minibatch, from two of the same workload. Throws Error where they are not of the same
// operations.
IterationRecord at_batch(const RecordedStep& small, const RecordedStep& large, std::int64_t batch);

// What ranks exchange in a step. Under a parameter server a rank pushes M(n−1)/n bytes, while backward goes on, and
// then waits for as many; a ring all-reduce sends twice as many, all of it while backward goes on.
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
  double exposed = 0, update = 0;       // seconds of exchange that nothing hides; of the optimizer's update
  std::size_t least = 0;                // bytes of the smallest budget
  std::optional<double> measured = {};  // seconds of a step
  bool fits() const { return choice.fits; }
  double per_sample() const { return (choice.forecast.seconds + update + exposed) / double(batch); }
};

struct TunerOptions {
  std::size_t budget = 0;  // bytes of the device, weights and all
  // To try; none here and in multiples: 8, 12, 16, 24, … until two in a row do not fit
  std::vector<std::int64_t> batches = {};
  std::vector<double> multiples = {};  // to try besides: times the largest minibatch that fits with all tensors kept
  std::int64_t most = 0;               // samples, the largest that is tried when none are given; 0: any
  MemoryMeans means = {};
  ExchangeModel exchange = {};
};
std::size_t peak_kept(const IterationRecord& record);  // bytes, with all tensors kept
// The largest minibatch that needs no plan: its tensors all stay within the budget. 0: not even one sample.
std::int64_t largest_kept(const RecordedStep& small, const RecordedStep& large, std::size_t budget);
// One row for each minibatch. Throws UsageError when not even the smallest fits, with the budget that it needs.
std::vector<TunedBatch> tune(const RecordedStep& small, const RecordedStep& large, const TunerOptions& options);
// The row that is fastest per sample, among those of at most `cap` samples (0: any). Within half a percent the smaller
// one.
const TunedBatch& fastest(const std::vector<TunedBatch>& rows, double cap = 0);

// Seconds of a step at this minibatch under a plan: the median of the last steps. Throws what MemoryPlan throws.
double measure_batch(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                     const MemoryPlanOptions& options, int steps = 9);
// How fast copies are beside this workload, and how much they slow it down: from some steps under a plan that swaps
// half of what can be swapped of `recorded`.
MemoryMeans measure_means(const Workload& w, const RecordedStep& recorded, Backend& backend,
                          std::unique_ptr<Mover> mover);

// How noisy the gradient is (McCandlish et al. 2018): E|g_b|² = |G|² + tr(Σ)/b, so two sizes of minibatch give both. A
// minibatch above tr(Σ)/|G|² samples brings little.
struct GradientNoise {
  double gradient = 0, trace = 0;  // |G|², tr(Σ)
  double scale() const;            // samples; infinite where |G|² is not above 0
};
// Sizes and squared norms
GradientNoise gradient_noise(double small, double small_norm, double large, double large_norm);
// From `pieces` minibatches of the source at the present weights: their gradients, and the gradient of all.
GradientNoise measure_noise(Module& model, const Task& task, FlatParameters& flat, BatchSource& source,
                            int pieces = 16);

// The learning rate for a minibatch that is `times` as large as the one that `rate` was chosen for.
enum class RateRule {
  linear,       // rate · times, after 5 epochs of warm-up (Goyal et al. 2017)
  square_root,  // rate · √times
  lars,         // rate · times, with the optimizer lars: each step's length is a share of the weights' norm
  adascale  // rate · gain, gain = (σ² + μ²)/(σ²/times + μ²), with σ² = tr(Σ)/base and μ² = |G|² (Johnson et al. 2020)
};
std::optional<RateRule> rate_rule_in(const std::string& text);
const char* name_of(RateRule rule);
double matched_rate(RateRule rule, double rate, double times, double base_batch, const GradientNoise& noise);

// Lines of metrics (examples/report.py draws them): a "minibatch" for each row; for the chosen one its seconds with a
// "budget" and some means, and the "memory" in each event of an iteration, of which rest, kept, recomputed and swapped
// are bytes that add up.
std::vector<MetricFields> tuner_lines(const std::vector<TunedBatch>& rows, const TunedBatch& chosen,
                                      const MemoryMeans& means);

}  // namespace tandem
