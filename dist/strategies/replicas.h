// Replicas: what strategies have in common under which every rank has the whole model and a share of every batch. They
// begin with the weights of rank 0, say what must be equal, evaluate together, and know who writes a checkpoint when a rank
// is lost.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/communicator.h"
#include "layers/train/strategy.h"

namespace tandem {

class Reducer;

class Replicas : public Strategy {
 public:
  // Statistics that differ become those over all pictures: the mean of means, and the mean of variances plus the variance
  // of means.
  void synchronize(Shared what, ParameterSpace& space, Optimizer& optimizer) override;
  std::vector<std::string> gather(const std::string& mine) override;
  ClockOffset watch(Trace& trace) override;
  // The lowest rank of those that hold the majority; of two halves the one with rank 0 has it.
  bool saves_after_failure() override;

 protected:
  // steps_together: the gradients of all ranks make one step; otherwise each rank makes steps of its own.
  Replicas(std::unique_ptr<Communicator> communicator, std::string name, bool steps_together);

  // Called before communicator_ is used by the caller's thread: ends what a Reducer has under way there.
  virtual void quiet() {}

  static Buffer whole(Tensor& t) { return {t.raw_write(), t.elements(), t.dtype()}; }
  // The weights of rank 0, on all ranks. `over`: on their memory.
  void spread(ParameterSpace& space, Communicator& over);
  // Where ranks share memory, in it; null: any memory will do. All ranks call it.
  std::shared_ptr<void> shared_memory(const Backend& backend, std::size_t bytes) {
    return backend.on_device() ? nullptr : communicator_->allocate(bytes);
  }
  // Ranges of [0, elements), as long as `bytes`, or an eighth of the vector, between 256 KiB and 4 MiB, where that is 0.
  static std::vector<Range> cut(std::int64_t elements, DType dtype, std::int64_t bytes);

  // Throws Error that names the first rank whose number is not rank 0's.
  void compare(std::uint64_t mine, const std::string& what);
  void compare_layouts(const ParameterSpace& space, std::uint64_t kind = 0);
  void compare_parameters(const ParameterSpace& space, std::int64_t steps);

  // For measures(): `sent` bytes in all, in exchanges of up to `bucket` bytes.
  static Measures measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket);

  std::shared_ptr<Communicator> communicator_;
};

}  // namespace tandem
