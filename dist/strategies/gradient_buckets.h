// Sums the gradients of some ranges of the parameters over the ranks of a communicator while backward still runs.
//
// The ranges are divided into buckets. A Reducer's thread sums each bucket as soon as backward has finished it. The
// order is the same on all ranks: the order in which rank 0's first backward finished the buckets. Nothing is packed or
// copied. On a device the buckets are in its memory, and an event after each bucket signals that it is finished.
//
// Per step: ready() from the gradient hook, then flush(), then Reducer::wait or finish, then arrived(), then rewind().
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/algorithms.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/final_ranges.h"
#include "dist/strategies/power_sgd.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/top_k.h"
#include "layers/optim/flat_parameters.h"

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

// Divides a range into ranges of `bytes` bytes. 0: an eighth of the range, between 256 KiB and 4 MiB.
inline std::vector<Range> cut(const Range& whole, DType dtype, std::int64_t bytes) {
  const auto size = std::int64_t(size_of(dtype));
  if (bytes <= 0) bytes = std::clamp<std::int64_t>(whole.length() * size / 8, 256 << 10, 4 << 20);
  const std::int64_t length = std::max<std::int64_t>(1, bytes / size / FlatParameters::cut) * FlatParameters::cut;
  std::vector<Range> ranges;
  for (std::int64_t begin = whole.begin; begin < whole.end; begin += length)
    ranges.push_back({begin, std::min(whole.end, begin + length)});
  return ranges;
}

// PowerSGD's buckets split no parameter: each has about `bucket_bytes` or more; the last of a range may have less.
inline std::vector<Range> ranges_of_buckets(const FlatParameters& flat, const std::vector<Range>& ranges,
                                            const AllReduceOptions& o) {
  std::vector<Range> all;
  for (const Range& trained : ranges) {
    const std::vector<Range> even = cut(trained, flat.gradients.dtype(), o.bucket_bytes);
    if (o.power_sgd == 0) all.insert(all.end(), even.begin(), even.end());
    std::int64_t begin = trained.begin;
    for (const ParameterRange& p : flat.parameter_ranges())
      if (o.power_sgd > 0 && p.local_begin - begin >= even[0].length() && p.local_begin < trained.end) {
        all.push_back({begin, p.local_begin});
        begin = p.local_begin;
      }
    if (o.power_sgd > 0) all.push_back({begin, trained.end});
  }
  return all;
}

// The range's parameters with more elements than their two factors, as matrices: the first size is the number of rows.
inline std::vector<PowerSgd::Matrix> matrices(const FlatParameters& flat, const Range& range, std::int64_t rank) {
  std::vector<PowerSgd::Matrix> all;
  for (const ParameterRange& p : flat.parameter_ranges()) {
    if (p.frozen || p.local_begin < range.begin || p.local_begin >= range.end || p.shape.rank() < 2) continue;
    const std::int64_t rows = p.shape[0], columns = p.length / rows;
    if (rank * (rows + columns) < rows * columns) all.push_back({p.local_begin - range.begin, rows, columns});
  }
  return all;
}

class GradientBuckets {
 public:
  // between: the ranks; it has begun. All arguments must outlive the buckets. From the first ready() on, `reducer` uses
  // between.data().
  GradientBuckets(FlatParameters& flat, const std::vector<Range>& ranges, DataAndFlags& between, Reducer& reducer,
                  const AllReduceOptions& options)
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

  std::int64_t largest() const { return buckets_.empty() ? 0 : final_[0].length() * 4; }  // bytes in f32

  // The gradient of this segment is final, or queued on a device. Backward calls it in its thread, once per segment. A
  // repeated segment means that another backward has begun.
  void ready(const ParameterRange& parameter) {
    for (std::size_t b : final_.ready(parameter)) {
      if (!ordered_) order_.push_back(std::int32_t(b));
      if (on_device_) pack(b);
    }
    if (on_device_ || !armed_ || !ordered_) return;
    while (next_ < order_.size() && final_.complete(std::size_t(order_[next_]))) launch(std::size_t(order_[next_++]));
  }

  // Call after backward. On a device: queues the buckets without segments. The event for the end of backward must come
  // after it.
  void pack_rest() {
    if (!on_device_) return;
    for (std::size_t b = 0; b < buckets_.size(); b++)
      if (final_.empty(b)) pack(b);
  }

  // The ranks agree on the bucket order, before the first flush(). They must have no operation in progress.
  void agree() {
    if (ordered_) return;
    for (std::int32_t b = 0; b < std::int32_t(buckets_.size()); b++)
      if (std::ranges::count(order_, b) == 0) order_.push_back(b);
    order_.resize(buckets_.size());
    between_.flags().broadcast(buffer(order_), 0).wait();
    ordered_ = true;
  }

  // Adds the buckets that ready() has not added to the reducer.
  void flush() {
    for (std::int32_t b : order_) launch(std::size_t(b));
  }

  // All sums have arrived: they become the gradients.
  void arrived() {
    if (!narrow_.defined()) return;
    for (const Range& r : ranges_) part(flat_.gradients, r).copy_from(part(narrow_, r));
  }

  // Call before the next step. made: true if the gradients were used. Otherwise the next backward only searches for the
  // cause, and sends nothing.
  void rewind(bool made) {
    for (Bucket& b : buckets_) {
      b.launched = false;
      if (b.compression) b.compression->finish_step(made);
    }
    final_.restart();
    next_ = 0;
    armed_ = made;
  }

 private:
  struct Bucket {
    bool launched = false;
    std::unique_ptr<Compression> compression = {};  // null: the gradients are sent as they are
    std::unique_ptr<Event> final = {};              // on a device: signals that the bucket is final
  };
  // Queues, and perhaps records, the conversion of a bucket's gradients for sending and the event that they are
  // complete.
  void pack(std::size_t bucket) {
    if (narrow_.defined()) part(narrow_, final_[bucket]).copy_from(part(flat_.gradients, final_[bucket]));
    flat_.backend().queue().mark(*buckets_[bucket].final);
  }

  void launch(std::size_t bucket) {
    Bucket& b = buckets_[bucket];
    if (std::exchange(b.launched, true)) return;
    Tensor sent = part(narrow_.defined() ? narrow_ : flat_.gradients, final_[bucket]);
    const Buffer data = buffer(sent);
    Reducer::Exchange exchange{between_.data(), b.final.get(), [data](Communicator& c) { return c.all_reduce(data); }};
    if (auto* const c = b.compression.get()) {
      exchange.begin = [c, data](Communicator& over) { return c->begin(over, static_cast<float*>(data.data)); };
      exchange.end = [c, data] { c->end(static_cast<float*>(data.data)); };
    }
    reducer_.add(std::move(exchange));
  }

  FlatParameters& flat_;
  DataAndFlags& between_;
  Reducer& reducer_;
  const bool on_device_;
  const std::vector<Range> ranges_;
  Tensor narrow_;  // on a device: the gradients in bf16, if they are sent so
  FinalRanges final_;
  std::vector<Bucket> buckets_;
  // The order in which buckets are sent. Until the ranks agree on one: the buckets that the first backward has
  // finished.
  std::vector<std::int32_t> order_;
  bool ordered_ = false, armed_ = true;
  std::size_t next_ = 0;
};

}  // namespace tandem
