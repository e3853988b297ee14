// WeightSums: what strategies share whose ranks make steps of their own and add their weights up now and then. A range
// of sum_ is summed over all ranks in buckets by the thread of a Reducer, on the host or on devices, while the next
// steps run or while the step waits. With each sum all ranks learn what they must know of each other: Replicas::tell()
// and hear().
#pragma once
#include <memory>

#include "dist/collectives/on_devices.h"
#include "dist/strategies/local_sgd.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/replicas.h"

namespace tandem {

class WeightSums : public Replicas {
 public:
  void begin(FlatParameters& flat, Optimizer& optimizer) override;
  void begin_epoch(std::int64_t epoch, const RunPlan& run) override;
  EpochEnd end_epoch(const EpochEnd& mine) override;
  Measures end() override;
  ClockOffset watch(Trace& trace) override;

 protected:
  WeightSums(std::unique_ptr<Communicator> communicator, std::string name, const LocalSgdOptions& options);
  // Gives all ranks the same weights, which are evaluated and saved.
  virtual void flush() = 0;

  // As long as the parameters and of their type.
  Tensor vector(std::shared_ptr<void> memory = nullptr);
  bool bad() const { return optimizer_->read_state().not_finite == 1; }  // waits for the device

  // Sums over all ranks: this range of sum_, and what this rank has to tell.
  void start(Range range);
  void drain() override;  // waits for it, and hears
  bool under_way() const { return under_way_; }

  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  Tensor sum_;  // over ranks; weights change only when all of it has arrived. Derived classes make it, in begin()
  std::int64_t steps_ = 0;  // of the run
  bool planned_ = false;    // the run's plan is known

 private:
  void compare_weights();

  LocalSgdOptions options_;
  DataAndFlags all_{communicator_};
  std::int64_t bucket_ = 0;  // bytes in f32, of the largest
  bool under_way_ = false;
  Reducer reducer_;  // last: its thread ends first
};

}  // namespace tandem
