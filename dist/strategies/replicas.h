// Replicas: the common base of strategies under which every rank has the whole model and a share of every batch. They
// begin with rank 0's weights, compare values that must be equal on all ranks, evaluate together, and determine which
// rank writes a checkpoint when a rank is lost.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/communicator.h"
#include "layers/train/strategy.h"

namespace tandem {

class Reducer;

inline Tensor part(const Tensor& vector, Range range) { return vector.range(range.begin, {range.length()}); }

// A vector in host memory, for exchanges.
struct OnHost {
  std::shared_ptr<void> pinned = nullptr;  // null: the vector is already in host memory
  Buffer of(Tensor& t);
  // Of the whole vector, or of these ranges.
  Buffer download(Tensor& t) { return download(t, {{0, t.numel()}}); }
  Buffer download(Tensor& t, const std::vector<Range>& ranges);
  void upload(Tensor& t) { upload(t, {{0, t.numel()}}); }
  void upload(Tensor& t, const std::vector<Range>& ranges);
};

// Every rank's text, in the order of ranks, or its numbers, as many on each rank. All ranks call it, and it waits for
// all.
std::vector<double> gather_numbers(Communicator& over, const std::vector<double>& mine);
std::vector<std::string> gather_texts(Communicator& over, const std::string& mine);
// Where the ranks' pieces begin, one after the other in the order of ranks; this rank's has `mine` elements.
Cuts gather_cuts(Communicator& over, std::int64_t mine);

// Adds up the measured norms of gradients of which each rank has a part.
void add_norms(Communicator& over, Optimizer& optimizer);

// Vectors in the zeroed memory of the host that `allocate` returns; in any memory if it returns null, or for a device.
FlatMemory memory_from(std::function<std::shared_ptr<void>(std::size_t bytes)> allocate);

class Replicas : public Strategy {
 public:
  // Averages: the mean of all ranks' weights, if they differ. Buffers: statistics that differ are combined to those
  // over all pictures: the mean of means, and the mean of variances plus the variance of means.
  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override;
  std::vector<std::string> gather(const std::string& mine, Among among = Among::all) override;
  ClockOffset watch(Trace& trace) override;
  // True on the lowest rank of the majority; of two halves, the half with rank 0 counts as the majority.
  bool saves_after_failure() override;

  // A vector as long as the parameters. A failed run may leave this strategy without its backend. So on the host the
  // vector has its own memory, or is in `memory`.
  static Tensor vector(const FlatParameters& flat, DType dtype, std::shared_ptr<void> memory = nullptr);

 protected:
  // synchronous: the gradients of all ranks make one step; otherwise each rank makes its own steps.
  Replicas(std::unique_ptr<Communicator> communicator, std::string name, bool synchronous);

  // Called before the caller's thread uses communicator_: completes a Reducer's operations on it.
  virtual void drain() {}

  // Copies rank 0's weights to all ranks, and the slices of the first rank with the same slice. `over`, `over_slices`
  // (same_slice_): communicators for the memory of the weights.
  void broadcast(FlatParameters& flat, Communicator& over, Communicator* over_slices = nullptr);

  // Throws Error that names the first rank whose number differs from rank 0's.
  void compare(Communicator& over, std::uint64_t mine, const std::string& what);
  // Throws Error unless all ranks have the same model. If layers are divided over ranks, determines which slices belong
  // together.
  void compare_layouts(const FlatParameters& flat, std::uint64_t kind = 0);
  void compare_parameters(const FlatParameters& flat, std::int64_t steps);
  // For measures(): `sent` bytes in total, in exchanges of at most `bucket` bytes.
  static Measures measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket);

  std::shared_ptr<Communicator> communicator_;
  // Null unless layers are divided over ranks. The ranks that together hold one whole model, in the order of their
  // slices; and the ranks that have the same slice.
  std::shared_ptr<Communicator> slices_, same_slice_;
};

}  // namespace tandem
