// Replicas: the common base of strategies under which every rank has the whole model and a share of every batch. They
// begin with rank 0's weights, compare values that must be equal on all ranks, evaluate together, and determine which
// rank writes a checkpoint when a rank is lost.
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
  // Refuses statistics over all ranks' pictures (--sync-bn), unless a strategy supports them.
  void prepare(Module& model, Task& task, const PrepareOptions& options) override;
  // The result of agree(), if each rank makes its own steps.
  std::optional<std::string> not_finite(const StepState& state) const override;
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

  // For strategies under which each rank makes its own steps: shares state between the ranks, after the same step of
  // all. Afterwards over() is true on all ranks if one was asked to stop, and not_finite() names the first rank whose
  // step was not finite. Returns true if there is no such rank. One all-reduce; or call write_flags(), an all-reduce
  // (max) of step_flags_, and read_flags().
  bool agree(const Optimizer& optimizer);
  void write_flags(const Optimizer& optimizer);  // waits for the device
  void read_flags();
  // Sets the weights of all ranks to their mean, in memory of the host.
  void take_mean_of_all(FlatParameters& flat);

  // Called before the caller's thread uses communicator_: completes a Reducer's operations on it.
  virtual void drain() {}

  // Copies rank 0's weights to all ranks, and the slices of the first rank with the same slice. `over`, `over_slices`
  // (same_slice_): communicators for the memory of the weights.
  void broadcast(FlatParameters& flat, Communicator& over, Communicator* over_slices = nullptr);
  // Memory that the ranks share, if they share memory; null: any memory can be used. All ranks call it.
  std::shared_ptr<void> shared_memory(const Backend& backend, std::size_t bytes) {
    return backend.on_device() ? nullptr : communicator_->allocate(bytes);
  }

  // Throws Error that names the first rank whose number differs from rank 0's.
  void compare(Communicator& over, std::uint64_t mine, const std::string& what);
  // Throws Error unless all ranks have the same model. If layers are divided over ranks, determines which slices belong
  // together.
  void compare_layouts(const FlatParameters& flat, std::uint64_t kind = 0);
  void compare_parameters(const FlatParameters& flat, std::int64_t steps);
  // If layers are divided over ranks: measures the gradients after all have arrived, and adds the norms over the
  // slices. Otherwise does nothing: the optimizer measures.
  void measure_slices(Optimizer& optimizer);

  // For measures(): `sent` bytes in total, in exchanges of at most `bucket` bytes.
  static Measures measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket);

  // maxima over all ranks: size() − rank if its step was not finite; 1 if a rank wants to stop
  float step_flags_[2] = {0, 0};
  int not_finite_ = -1;  // the first rank with such a step, as agreed by all ranks
  std::shared_ptr<Communicator> communicator_;
  // Null unless layers are divided over ranks. The ranks that together hold one whole model, in the order of their
  // slices; and the ranks that have the same slice.
  std::shared_ptr<Communicator> slices_, same_slice_;
};

}  // namespace tandem
