// A shard: a range of the flat parameter vector, its update rule, and the rule's state. It has no network code: the
// server and the simulator each have shards, and make the same pushes and pulls.
//
// A worker's gradient was computed at the weights of its last pull; τ is the number of updates between that pull and
// the push. One thread at a time.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/tensor.h"
#include "dist/server/rules.h"

namespace tandem {

class Shard {
 public:
  // first: the initial weights, f32 or f64, in host memory; their number is a multiple of 64. blocks: one per
  // 64 weights. The rule must outlive the shard.
  Shard(const Rule& rule, const Tensor& first, std::vector<RuleBlock> blocks, int workers);

  // Copies the current weights to `into`, which must not change until this worker's next pull. Returns `into`.
  const Tensor& pull(int worker, const Tensor& into);
  // Applies a gradient, and returns its τ. into: also pulls, in the same pass over the memory.
  std::int64_t push(int worker, const Tensor& gradient, double learning_rate, double momentum,
                    const Tensor* into = nullptr);

  const Tensor& values() const { return values_; }
  std::int64_t delay(int worker) const {  // the τ of a push at this moment
    const Worker& w = workers_[std::size_t(worker)];
    return std::int64_t(version_ - w.version);
  }
  const Tensor& sent(int worker) const { return workers_[std::size_t(worker)].sent; }  // by its last pull
  std::uint64_t version() const { return version_; }                                   // updates applied
  double correction(int worker, const Tensor& gradient) const;  // ‖c‖/‖g‖ of the next push; f32
  double gap(int worker) const;                                 // ‖w − w_sent‖/√P

  // The rule's state for snapshots, in the same order for all shards of a rule.
  std::vector<Tensor> kept() const;
  // The shard's velocity, or this worker's if each worker has its own; undefined if the rule has none.
  const Tensor& velocity(int worker) const {
    const Tensor& own = workers_[std::size_t(worker)].own;
    return own.defined() ? own : velocity_;
  }
  void go_on_with(const Tensor& velocity);  // velocity: as returned by velocity(0)
  // Continues another shard, whose values this shard has. Sets all delays to 0.
  void go_on_at(std::uint64_t version);
  void forget(int worker);  // a new process has this number: resets its state

 private:
  struct Worker {
    Tensor sent, square_avg, own;
    std::uint64_t version = 0;
  };
  template <class T>
  RuleVectors<T> vectors(Worker& worker, const Tensor& gradient) const;
  void was_sent(Worker& worker, const Tensor& at);

  const Rule& rule_;
  mutable Tensor values_, velocity_;
  std::vector<RuleBlock> blocks_;
  mutable std::vector<Worker> workers_;
  std::uint64_t version_ = 0;
  double mean_delay_;          // τ̄ = 0.98·τ̄ + 0.02·τ, initially workers − 1
  std::optional<Hyper> last_;  // of the last push
};

}  // namespace tandem
