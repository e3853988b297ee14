#include "dist/strategies/weight_sums.h"

#include <algorithm>
#include <utility>

#include "dist/strategies/gradient_buckets.h"

namespace tandem {

WeightSums::WeightSums(std::unique_ptr<Communicator> communicator, std::string name, const LocalSgdOptions& options)
    : Replicas(std::move(communicator), std::move(name), false),
      options_(options),
      reducer_(*communicator_, options.deadline) {}

void WeightSums::begin(FlatParameters& flat, Optimizer& optimizer) {
  flat_ = &flat;
  optimizer_ = &optimizer;
  optimizer.gradients_are_shares_of(size());
  compare_layouts(flat);
  all_.begin(flat.backend(), options_.deadline, options_.nccl);
  broadcast(flat, all_.data());
}

void WeightSums::begin_epoch(std::int64_t epoch, const RunPlan& run) {
  Strategy::begin_epoch(epoch, run);
  if (!std::exchange(planned_, true)) steps_ = run.done;
}

EpochEnd WeightSums::end_epoch(const EpochEnd& mine) {
  flush();
  if (size() > 1 && not_finite_ < 0) compare_weights();
  return Strategy::end_epoch(mine);
}

Measures WeightSums::end() {
  if (flat_) {
    flush();
    if (not_finite_ < 0) compare_weights();
    optimizer_ = nullptr;
    flat_ = nullptr;
    all_.end();
    sum_ = {};
    planned_ = false;
  }
  return measured(reducer_, all_.sent_bytes(), bucket_);
}

Strategy::ClockOffset WeightSums::watch(Trace& trace) {
  const ClockOffset offset = Replicas::watch(trace);
  reducer_.watch(trace);
  return offset;
}

Tensor WeightSums::vector(std::shared_ptr<void> memory) {
  return Replicas::vector(*flat_, flat_->values.dtype(), std::move(memory));
}

void WeightSums::start(Range range) {
  constexpr const char* name = "sum of weights";  // on the trace
  tell(*optimizer_);                              // waits for the device: what is to be summed is there
  for (const Range& r : cut(range.length(), sum_.dtype(), options_.bucket_bytes)) {
    Tensor part = sum_.range(range.begin + r.begin, {r.length()});
    bucket_ = std::max(bucket_, r.length() * 4);
    reducer_.add({.over = all_.data(),
                  .after = nullptr,
                  .begin = [data = buffer(part)](Communicator& c) { return c.all_reduce(data); },
                  .name = name});
  }
  reducer_.add({.over = all_.flags(),
                .after = nullptr,
                .begin =
                    [this](Communicator& c) {
                      return c.all_reduce({told_, 2, DType::f32}, Combine::max);
                    },
                .name = name});
  under_way_ = true;
}

void WeightSums::drain() {
  if (!under_way_) return;
  reducer_.waits();
  reducer_.finish();
  under_way_ = false;
  hear();
}

void WeightSums::compare_weights() {
  flat_->backend().synchronize();
  compare_parameters(*flat_, steps_);
}

}  // namespace tandem
