#include "dist/strategies/gradient_buckets.h"

#include <algorithm>
#include <numeric>

#include "core/backend.h"
#include "dist/collectives/algorithms.h"
#include "dist/collectives/on_devices.h"

namespace tandem {

std::vector<Range> cut(std::int64_t numel, DType dtype, std::int64_t bytes) {
  const auto size = std::int64_t(size_of(dtype));
  if (bytes <= 0) bytes = std::clamp<std::int64_t>(numel * size / 8, 256 << 10, 4 << 20);
  const std::int64_t length = std::max<std::int64_t>(1, bytes / size / FlatParameters::cut) * FlatParameters::cut;
  std::vector<Range> ranges;
  for (std::int64_t begin = 0; begin < numel; begin += length)
    ranges.push_back({begin, std::min(numel, begin + length)});
  return ranges;
}

// Like cut(), but splits no parameter: a range has about `bytes` or more; the last may have less.
static std::vector<Range> cut_between_parameters(const FlatParameters& flat, const Range& trained, std::int64_t bytes) {
  const std::int64_t length = cut(trained.length(), flat.gradients.dtype(), bytes)[0].length();
  std::vector<Range> ranges;
  std::int64_t begin = trained.begin;
  for (const ParameterRange& p : flat.parameter_ranges())
    if (p.local_begin - begin >= length && p.local_begin < trained.end)
      ranges.push_back({begin, p.local_begin}), begin = p.local_begin;
  ranges.push_back({begin, trained.end});
  return ranges;
}

GradientBuckets::GradientBuckets(FlatParameters& flat, const std::vector<Range>& ranges,
                                 std::shared_ptr<Communicator> communicator, Reducer& reducer,
                                 const BucketOptions& options)
    : flat_(flat), communicator_(std::move(communicator)), reducer_(reducer), wire_(options.wire), ranges_(ranges) {
  Backend& backend = flat.backend();
  if ((options.top_k > 0 || options.power_sgd > 0) && (backend.asynchronous() || flat.gradients.dtype() != DType::f32))
    refuse("TANDEM_WIRE=", options.top_k > 0 ? "topk" : "powersgd",
           " is for f32 gradients in the host's memory, not on ", backend.description(),
           ": leave it out, or choose bf16");
  if (backend.asynchronous()) {
    device_ = on_devices(communicator_, backend, options.deadline, options.nccl ? *options.nccl : installed_nccl());
    if (wire_ == DType::bf16) narrow_ = Tensor::zeros(backend, {flat.numel()}, DType::bf16);
    backend.synchronize();
  }
  for (const Range& trained : ranges)
    if (options.power_sgd > 0)
      for (const Range& range : cut_between_parameters(flat, trained, options.bucket_bytes))
        buckets_.push_back({.range = range});
    else
      for (const Range& range : cut(trained.length(), flat.gradients.dtype(), options.bucket_bytes))
        buckets_.push_back({.range = {trained.begin + range.begin, trained.begin + range.end}});
  of_parameter_.resize(flat.parameter_ranges().size());
  for (std::size_t s = 0; s < of_parameter_.size(); s++) {
    const ParameterRange& parameter = flat.parameter_ranges()[s];
    if (parameter.frozen) continue;
    for (std::size_t b = 0; b < buckets_.size(); b++) {
      const Range& range = buckets_[b].range;
      if (range.end <= parameter.local_begin || range.begin >= parameter.local_begin + parameter.length) continue;
      buckets_[b].parameters.push_back(s);
      of_parameter_[s].push_back(b);
    }
  }
  for (Bucket& b : buckets_) {
    if (options.top_k > 0) b.top_k = std::make_unique<TopK>(options.top_k, b.range.length());
    if (options.power_sgd > 0)
      b.power_sgd =
          std::make_unique<PowerSgd>(options.power_sgd, matrices(b.range, options.power_sgd), b.range.length());
    if (device_) b.final = backend.new_event();
  }
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  restart();
}

// The range's parameters with more elements than their two factors, as matrices: the first size by all others.
std::vector<PowerSgd::Matrix> GradientBuckets::matrices(const Range& range, std::int64_t rank) const {
  std::vector<PowerSgd::Matrix> all;
  for (const ParameterRange& p : flat_.parameter_ranges()) {
    if (p.frozen || p.local_begin < range.begin || p.local_begin >= range.end || p.shape.rank() < 2) continue;
    const std::int64_t rows = p.shape[0], columns = p.length / rows;
    if (PowerSgd::is_shorter(rank, rows, columns)) all.push_back({p.local_begin - range.begin, rows, columns});
  }
  return all;
}

void GradientBuckets::rewind(bool made) {
  for (Bucket& b : buckets_) {
    b.launched = false;
    if (b.top_k) b.top_k->finish_step(made);
    if (b.power_sgd) b.power_sgd->finish_step(made);
  }
  restart();
  armed_ = made;
}

void GradientBuckets::restart() {
  for (Bucket& b : buckets_) b.missing = b.parameters.size();
  seen_.assign(of_parameter_.size(), false);
  next_ = 0;
}

void GradientBuckets::ready(std::size_t parameter) {
  if (seen_[parameter]) restart();
  seen_[parameter] = true;
  for (std::size_t b : of_parameter_[parameter]) {
    if (--buckets_[b].missing > 0) continue;
    if (!ordered_) finished_.push_back(std::int32_t(b));
    if (device_) pack(buckets_[b]);
  }
  if (device_ || !armed_ || !ordered_) return;
  while (next_ < order_.size() && buckets_[order_[next_]].missing == 0) launch(buckets_[order_[next_++]]);
}

void GradientBuckets::pack_rest() {
  if (!device_) return;
  for (Bucket& b : buckets_)
    if (b.parameters.empty()) pack(b);
}

// Queues, and perhaps records, the conversion of a bucket's gradients for sending and the event that they are complete.
void GradientBuckets::pack(Bucket& b) {
  if (narrow_.defined()) narrow_.range(b.range.begin, {b.range.length()}).copy_from(gradients(b));
  flat_.backend().queue().mark(*b.final);
}

void GradientBuckets::flush() {
  for (std::size_t b : order_) launch(buckets_[b]);
}

void GradientBuckets::launch(Bucket& b) {
  if (std::exchange(b.launched, true)) return;
  Tensor part = narrow_.defined() ? narrow_.range(b.range.begin, {b.range.length()}) : gradients(b);
  const Buffer data = buffer(part);
  auto* wide = static_cast<float*>(data.data);
  if (b.top_k) {
    reducer_.add({over(), nullptr, [&b, wide](Communicator& over) { return b.top_k->begin(over, wide); },
                  [&b, wide] { b.top_k->end(wide); }});
  } else if (b.power_sgd) {
    reducer_.add({over(), nullptr, [&b, wide](Communicator& over) { return b.power_sgd->begin(over, wide); },
                  [&b, wide] { b.power_sgd->end(wide); }});
  } else if (device_ || wire_ == DType::f32 || data.dtype != DType::f32) {
    reducer_.add({over(), b.final.get(), [data](Communicator& over) { return over.all_reduce(data); }});
  } else {
    b.narrow.resize(std::size_t(data.count));
    reducer_.add({over(), nullptr,
                  [&b, wide](Communicator& over) {
                    tandem::narrow(b.narrow.data(), wide, std::int64_t(b.narrow.size()));
                    return over.all_reduce(buffer(b.narrow));
                  },
                  [&b, wide] { widen(wide, b.narrow.data(), std::int64_t(b.narrow.size())); }});
  }
}

void GradientBuckets::arrived() {
  if (!narrow_.defined()) return;
  for (const Range& r : ranges_)
    flat_.gradients.range(r.begin, {r.length()}).copy_from(narrow_.range(r.begin, {r.length()}));
}

void GradientBuckets::agree() {
  if (ordered_) return;
  for (std::size_t b = 0; b < buckets_.size(); b++)
    if (std::find(finished_.begin(), finished_.end(), std::int32_t(b)) == finished_.end())
      finished_.push_back(std::int32_t(b));
  finished_.resize(buckets_.size());
  communicator_->broadcast(buffer(finished_), 0).wait();
  for (std::size_t i = 0; i < order_.size(); i++) order_[i] = std::size_t(finished_[i]);
  ordered_ = true;
}

}  // namespace tandem
