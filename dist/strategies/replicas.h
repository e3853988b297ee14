// Replicas: what strategies have in common under which every rank has the whole model and a share of every batch. They
// begin with the weights of rank 0, say what must be equal, evaluate together, and know who writes a checkpoint when a
// rank is lost.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/communicator.h"
#include "layers/train/strategy.h"

namespace tandem {

class Reducer;

// Every rank's text, in the order of ranks. All ranks call it, and it waits for all.
std::vector<std::string> gather_texts(Communicator& over, const std::string& mine);

class Replicas : public Strategy {
 public:
  // Refuses statistics over all ranks' pictures (--sync-bn), unless a strategy has them.
  void prepare(Module& model, Task& task, const PrepareOptions& options) override;
  // As agree() found it, where each rank makes steps of its own.
  std::optional<std::string> not_finite(const StepState& state) const override;
  // Averages: the mean of all ranks' weights, where these differ. Buffers: statistics that differ become those over all
  // pictures: the mean of means, and the mean of variances plus the variance of means.
  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override;
  std::vector<std::string> gather(const std::string& mine, Among among = Among::all) override;
  ClockOffset watch(Trace& trace) override;
  // The lowest rank of those that hold the majority; of two halves the one with rank 0 has it.
  bool saves_after_failure() override;

  // As long as the parameters. A run that failed may leave this strategy without its backend: on the host it lies in
  // memory of its own, or in `memory`.
  static Tensor vector(const FlatParameters& flat, DType dtype, std::shared_ptr<void> memory = nullptr);

 protected:
  // synchronous: the gradients of all ranks make one step; otherwise each rank makes steps of its own.
  Replicas(std::unique_ptr<Communicator> communicator, std::string name, bool synchronous);

  // For strategies under which each rank makes steps of its own: what all must know of each other, after the same step
  // of all. From then on over() is true on all ranks where one was asked to stop, and not_finite() names the first rank
  // whose step was not finite. True: there is none. One all-reduce; or tell(), an all-reduce (max) of told_, hear().
  bool agree(const Optimizer& optimizer);
  void tell(const Optimizer& optimizer);  // waits for the device
  void hear();
  // Sets the weights of all ranks to their mean, in memory of the host.
  void take_mean_of_all(FlatParameters& flat);

  // Called before communicator_ is used by the caller's thread: ends what a Reducer has under way there.
  virtual void drain() {}

  // The weights of rank 0, on all ranks; slices are those of the first rank that has the same. `over`, `over_slices`
  // (same_slice_): on their memory.
  void broadcast(FlatParameters& flat, Communicator& over, Communicator* over_slices = nullptr);
  // Where ranks share memory, in it; null: any memory will do. All ranks call it.
  std::shared_ptr<void> shared_memory(const Backend& backend, std::size_t bytes) {
    return backend.on_device() ? nullptr : communicator_->allocate(bytes);
  }

  // Throws Error that names the first rank whose number is not that of rank 0 there.
  void compare(Communicator& over, std::uint64_t mine, const std::string& what);
  // Throws Error unless all ranks have the same model. Where its layers are cut over ranks, finds whose slices belong
  // together.
  void compare_layouts(const FlatParameters& flat, std::uint64_t kind = 0);
  void compare_parameters(const FlatParameters& flat, std::int64_t steps);
  // Where layers are cut over ranks, once the gradients of all ranks are there: measures them, and adds the norms up
  // over the slices. Otherwise does nothing: the optimizer measures.
  void measure_slices(Optimizer& optimizer);

  // For measures(): `sent` bytes in all, in exchanges of up to `bucket` bytes.
  static Measures measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket);

  float told_[2] = {0, 0};  // the largest of all ranks: ranks − one whose step was not finite; wants to stop
  int not_finite_ = -1;     // the first rank of which all know that
  std::shared_ptr<Communicator> communicator_;
  // Null unless layers are cut over ranks: the ranks that together hold one whole model, in the order of their slices,
  // and those that have the same slice.
  std::shared_ptr<Communicator> slices_, same_slice_;
};

}  // namespace tandem
