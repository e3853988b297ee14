// Sums the gradients of some ranges of the parameters over the ranks of a communicator while backward still runs.
//
// The ranges are divided into buckets. A Reducer's thread sums each bucket as soon as backward has finished it. The
// order is the same on all ranks: the order in which rank 0's first backward finished the buckets. Nothing is packed or
// copied. On a device the buckets are in its memory, and an event after each bucket signals that it is finished.
//
// Per step: ready() from the gradient hook, then flush(), then Reducer::wait or finish, then arrived(), then rewind().
#pragma once
#include <memory>
#include <vector>

#include "dist/collectives/on_devices.h"
#include "dist/strategies/final_ranges.h"
#include "dist/strategies/power_sgd.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/top_k.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

struct AllReduceOptions;

// Divides a range into ranges of `bytes` bytes. 0: an eighth of the range, between 256 KiB and 4 MiB.
std::vector<Range> cut(const Range& whole, DType dtype, std::int64_t bytes);

class GradientBuckets {
 public:
  // between: the ranks; it has begun. All arguments must outlive the buckets. From the first ready() on, `reducer` uses
  // between.data().
  GradientBuckets(FlatParameters& flat, const std::vector<Range>& ranges, DataAndFlags& between, Reducer& reducer,
                  const AllReduceOptions& options);

  std::int64_t largest() const { return buckets_.empty() ? 0 : final_[0].length() * 4; }  // bytes in f32

  // The gradient of this segment is final, or queued on a device. Backward calls it in its thread, once per segment. A
  // repeated segment means that another backward has begun.
  void ready(const ParameterRange& parameter);
  // Call after backward. On a device: queues the buckets without segments. The event for the end of backward must come
  // after it.
  void pack_rest();
  // the ranks agree on the bucket order, before the first flush(). The ranks must have no operation in progress
  void agree();
  void flush();    // adds the buckets that ready() has not added to the reducer
  void arrived();  // all sums have arrived: they become the gradients
  // Call before the next step. made: true if the gradients were used. Otherwise the next backward is repeated to find a
  // cause, and sends nothing.
  void rewind(bool made);

 private:
  struct Bucket {
    bool launched = false;
    std::unique_ptr<Compression> compression = {};  // null: the gradients are sent as they are
    std::unique_ptr<Event> final = {};              // on a device: signals that the bucket is final
  };
  void pack(std::size_t bucket);
  void launch(std::size_t bucket);

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
