#include "dist/strategies/gradient_buckets.h"

#include <algorithm>

#include "core/backend.h"
#include "dist/collectives/algorithms.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/replicas.h"

namespace tandem {

// Gradients in bf16.
struct Narrow : Compression {
  std::vector<bf16> values;
  explicit Narrow(std::int64_t length) : values(std::size_t(length)) {}
  Work begin(Communicator& over, const float* gradients) override {
    narrow(values.data(), gradients, std::int64_t(values.size()));
    return over.all_reduce(buffer(values));
  }
  void end(float* gradients) override { widen(gradients, values.data(), std::int64_t(values.size())); }
};

std::vector<Range> cut(const Range& whole, DType dtype, std::int64_t bytes) {
  const auto size = std::int64_t(size_of(dtype));
  if (bytes <= 0) bytes = std::clamp<std::int64_t>(whole.length() * size / 8, 256 << 10, 4 << 20);
  const std::int64_t length = std::max<std::int64_t>(1, bytes / size / FlatParameters::cut) * FlatParameters::cut;
  std::vector<Range> ranges;
  for (std::int64_t begin = whole.begin; begin < whole.end; begin += length)
    ranges.push_back({begin, std::min(whole.end, begin + length)});
  return ranges;
}

// Like cut(), but splits no parameter: a range has about `bytes` or more; the last may have less.
static std::vector<Range> cut_between_parameters(const FlatParameters& flat, const Range& trained, std::int64_t bytes) {
  const std::int64_t length = cut(trained, flat.gradients.dtype(), bytes)[0].length();
  std::vector<Range> ranges;
  std::int64_t begin = trained.begin;
  for (const ParameterRange& p : flat.parameter_ranges())
    if (p.local_begin - begin >= length && p.local_begin < trained.end) {
      ranges.push_back({begin, p.local_begin});
      begin = p.local_begin;
    }
  ranges.push_back({begin, trained.end});
  return ranges;
}

static std::vector<Range> ranges_of_buckets(const FlatParameters& flat, const std::vector<Range>& ranges,
                                            const AllReduceOptions& o) {
  std::vector<Range> all;
  for (const Range& trained : ranges) {
    const auto some = o.power_sgd > 0 ? cut_between_parameters(flat, trained, o.bucket_bytes)
                                      : cut(trained, flat.gradients.dtype(), o.bucket_bytes);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// The range's parameters with more elements than their two factors, as matrices: the first size by all others.
static std::vector<PowerSgd::Matrix> matrices(const FlatParameters& flat, const Range& range, std::int64_t rank) {
  std::vector<PowerSgd::Matrix> all;
  for (const ParameterRange& p : flat.parameter_ranges()) {
    if (p.frozen || p.local_begin < range.begin || p.local_begin >= range.end || p.shape.rank() < 2) continue;
    const std::int64_t rows = p.shape[0], columns = p.length / rows;
    if (rank * (rows + columns) < rows * columns) all.push_back({p.local_begin - range.begin, rows, columns});
  }
  return all;
}

GradientBuckets::GradientBuckets(FlatParameters& flat, const std::vector<Range>& ranges, DataAndFlags& between,
                                 Reducer& reducer, const AllReduceOptions& options)
    : flat_(flat),
      between_(between),
      reducer_(reducer),
      on_device_(flat.backend().asynchronous()),
      ranges_(ranges),
      final_(flat, ranges_of_buckets(flat, ranges, options)),
      buckets_(final_.size()) {
  Backend& backend = flat.backend();
  if ((options.top_k > 0 || options.power_sgd > 0) && (on_device_ || flat.gradients.dtype() != DType::f32))
    refuse("wire=", options.top_k > 0 ? "topk" : "powersgd", " is for f32 gradients in the host's memory, not on ",
           backend.description(), ": leave it out, or choose bf16");
  if (on_device_ && options.wire == DType::bf16) narrow_ = Tensor::zeros(backend, {flat.numel()}, DType::bf16);
  for (std::size_t i = 0; i < buckets_.size(); i++) {
    Bucket& b = buckets_[i];
    const std::int64_t length = final_[i].length(), rank = options.power_sgd;
    if (options.top_k > 0)
      b.compression = std::make_unique<TopK>(options.top_k, length);
    else if (rank > 0)
      b.compression = std::make_unique<PowerSgd>(rank, matrices(flat, final_[i], rank), length);
    else if (options.wire == DType::bf16 && !on_device_ && flat.gradients.dtype() == DType::f32)
      b.compression = std::make_unique<Narrow>(length);
    if (on_device_) b.final = backend.new_event();
  }
}

void GradientBuckets::rewind(bool made) {
  for (Bucket& b : buckets_) {
    b.launched = false;
    if (b.compression) b.compression->finish_step(made);
  }
  final_.restart();
  next_ = 0;
  armed_ = made;
}

void GradientBuckets::ready(const ParameterRange& parameter) {
  for (std::size_t b : final_.ready(parameter)) {
    if (!ordered_) order_.push_back(std::int32_t(b));
    if (on_device_) pack(b);
  }
  if (on_device_ || !armed_ || !ordered_) return;
  while (next_ < order_.size() && final_.complete(std::size_t(order_[next_]))) launch(std::size_t(order_[next_++]));
}

void GradientBuckets::pack_rest() {
  if (!on_device_) return;
  for (std::size_t b = 0; b < buckets_.size(); b++)
    if (final_.empty(b)) pack(b);
}

// Queues, and perhaps records, the conversion of a bucket's gradients for sending and the event that they are complete.
void GradientBuckets::pack(std::size_t bucket) {
  if (narrow_.defined()) part(narrow_, final_[bucket]).copy_from(part(flat_.gradients, final_[bucket]));
  flat_.backend().queue().mark(*buckets_[bucket].final);
}

void GradientBuckets::flush() {
  for (std::int32_t b : order_) launch(std::size_t(b));
}

void GradientBuckets::launch(std::size_t bucket) {
  Bucket& b = buckets_[bucket];
  if (std::exchange(b.launched, true)) return;
  Tensor sent = part(narrow_.defined() ? narrow_ : flat_.gradients, final_[bucket]);
  const Buffer data = buffer(sent);
  if (b.compression) {
    auto* wide = static_cast<float*>(data.data);
    reducer_.add({between_.data(), nullptr, [&b, wide](Communicator& over) { return b.compression->begin(over, wide); },
                  [&b, wide] { b.compression->end(wide); }});
  } else {
    reducer_.add({between_.data(), b.final.get(), [data](Communicator& over) { return over.all_reduce(data); }});
  }
}

void GradientBuckets::arrived() {
  if (!narrow_.defined()) return;
  for (const Range& r : ranges_) part(flat_.gradients, r).copy_from(part(narrow_, r));
}

void GradientBuckets::agree() {
  if (ordered_) return;
  for (std::int32_t b = 0; b < std::int32_t(buckets_.size()); b++)
    if (std::ranges::count(order_, b) == 0) order_.push_back(b);
  order_.resize(buckets_.size());
  between_.flags().broadcast(buffer(order_), 0).wait();
  ordered_ = true;
}

}  // namespace tandem
