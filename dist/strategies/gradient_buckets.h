// The gradients of some ranges of the parameters, summed over the ranks of a communicator while backward still runs.
//
// The ranges are cut into buckets. A Reducer's thread sums each bucket as soon as backward has finished it, in an order
// that is the same on all ranks: the one in which rank 0's first backward finished them. Nothing is packed or copied.
// On a device the buckets lie in its memory, and an event behind each tells the thread that it is finished.
//
// Per step: ready() from the gradient hook, then flush(), then Reducer::wait or finish, then arrived(), then rewind().
#pragma once
#include <memory>
#include <vector>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "dist/strategies/power_sgd.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/top_k.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

struct BucketOptions {
  std::int64_t bucket_bytes = 0;  // 0: an eighth of the vector, between 256 KiB and 4 MiB
  DType wire = DType::f32;        // bf16: gradients travel rounded, in half the bytes
  double top_k = 0;  // the share of a bucket that travels, its largest (top_k.h; on the host, in f32); 0: all
  // The rank of the products that travel (power_sgd.h; on the host, in f32); 0: gradients do
  std::int64_t power_sgd = 0;
  double deadline = 300;              // seconds that a device may need for anything
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};

// Ranges of [0, elements), as long as `bytes`, or an eighth of the vector, between 256 KiB and 4 MiB, where that is 0.
std::vector<Range> cut(std::int64_t numel, DType dtype, std::int64_t bytes);

class GradientBuckets {
 public:
  // Collective. All of it must outlive the buckets; `reducer` uses the communicator from the first ready() on.
  GradientBuckets(FlatParameters& flat, const std::vector<Range>& ranges, std::shared_ptr<Communicator> communicator,
                  Reducer& reducer, const BucketOptions& options);

  Communicator& over() { return device_ ? *device_ : *communicator_; }  // on the memory of the parameters
  std::int64_t largest() const { return buckets_.empty() ? 0 : buckets_[0].range.length() * 4; }  // bytes in f32

  // The gradient of this segment is final, or queued on a device. Called by backward in its thread, once for every
  // segment: one that comes again begins another backward.
  void ready(std::size_t parameter);
  // Called after backward. On a device: queues the buckets without segments. The event for the end of backward comes
  // after it.
  void pack_rest();
  void agree();    // on the order of buckets, before the first flush(). Nothing may be under way over the communicator
  void flush();    // adds the buckets to the reducer that ready() has not added
  void arrived();  // all sums are there: they become the gradients
  // Before the next step. made: whether the gradients were used; otherwise the next backward is repeated to find a
  // cause, and sends nothing.
  void rewind(bool made);

 private:
  struct Bucket {
    Range range;
    std::vector<std::size_t> parameters = {};
    std::size_t missing = 0;  // segments whose gradient is not final yet
    bool launched = false;
    std::vector<bf16> narrow = {};     // as it travels
    std::unique_ptr<TopK> top_k = {};  // or what of it does
    std::unique_ptr<PowerSgd> power_sgd = {};
    std::unique_ptr<Event> final = {};  // on a device: it is there
  };
  std::vector<PowerSgd::Matrix> matrices(const Range& range, std::int64_t rank) const;
  void restart();
  void pack(Bucket& b);
  void launch(Bucket& b);
  Tensor gradients(const Bucket& b) { return flat_.gradients.range(b.range.begin, {b.range.length()}); }

  FlatParameters& flat_;
  std::shared_ptr<Communicator> communicator_;
  Reducer& reducer_;
  const DType wire_;
  const std::vector<Range> ranges_;
  std::unique_ptr<Communicator> device_;  // on the device's memory
  Tensor narrow_;                         // on a device: the gradients in bf16, when they travel so
  std::vector<Bucket> buckets_;
  std::vector<std::vector<std::size_t>> of_parameter_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> finished_;  // buckets in the order in which the first backward finished them
  bool ordered_ = false, armed_ = true;
  std::vector<bool> seen_;  // segments whose gradient came in this backward
  std::size_t next_ = 0;
};

}  // namespace tandem
