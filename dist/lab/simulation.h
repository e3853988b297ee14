// A simulated run (simulator.h): the virtual clock, the workers' batches and gradients, and evaluations. A Method
// (simulated_methods.cpp) handles the end of a worker's step.
#pragma once
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "dist/lab/simulator.h"
#include "dist/server/shard_service.h"
#include "layers/train/metrics.h"
#include "layers/train/own_part.h"

namespace tandem {

class Simulation;

// The user's own rule, or the one with this name.
inline std::shared_ptr<const Rule> rule_of(const SimulatorOptions& options, const std::string& name) {
  return options.rule ? options.rule : make_rule(name);
}

// Handles the end of a worker's step. A method changes its state only in these calls.
class Method {
 public:
  virtual ~Method() = default;
  virtual double way_there() const { return 0; }      // seconds from the end of a worker's gradient to its arrival
  virtual bool begin() { return false; }              // starts the workers; false: all are to start
  virtual void arrived(int worker) = 0;               // a gradient has arrived
  virtual void visited(int worker) { (void)worker; }  // the visit that Simulation::visit() scheduled
  virtual const Tensor& weights() = 0;                // the weights to evaluate
  virtual std::vector<std::int64_t> delays() const { return {}; }  // SimulatorReport::delays
  virtual const ShardCounts* counts() const { return nullptr; }    // of a server; null: there is none
};

class Simulation {
 public:
  // vectors: the number of vectors as long as the weights that the strategy keeps for each worker.
  Simulation(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
             const SimulatorOptions& options, int vectors);

  // ---- what methods ask ---------------------------------------------------------------------------------------------
  int workers() const { return int(machines_.size()); }
  int active() const { return active_; }  // workers whose step is in progress, or which wait
  OwnPart* part(int worker) { return machines_[std::size_t(worker)].part.get(); }  // null: draws from all pictures
  bool over() const { return applied_ + computed_ >= batches_; }
  bool is_active(int worker) const { return !machines_[std::size_t(worker)].left; }
  double now() const { return now_; }
  double momentum() const { return given_.momentum; }
  std::shared_ptr<const Rule> rule(const std::string& name) const { return rule_of(options_, name); }
  void clip(double norm) { decays_.clip_norm = norm; }  // for gradients; 0: no clipping
  const FlatParameters& flat() const { return flat_; }
  bool past_first_decay() const;
  double rate() const {
    return given_.learning_rate * options_.schedule.factor(double(applied_), double(batches_), double(per_epoch_));
  }
  // Seconds in which a vector goes to the servers, or comes back; 1/K of it stays on the machine.
  double one_way() const { return lasts(1, 1); }
  // By recursive halving and doubling: the minimum number of messages, and as few bytes as a ring.
  double all_reduce() const { return lasts(2 * std::ceil(std::log2(workers())), 2); }

  // Computes the gradient of this worker's batch at `weights`; `change` is called before weight decay is added. False:
  // it is not finite, and was counted.
  bool gradient(int worker, const Tensor& weights, const std::function<void(Tensor& g)>& change = {});
  // Of this worker in a sum that is divided by their number: n·p_i with parts, else 1.
  double weight(int worker) { return part(worker) ? workers() * part(worker)->weight() : 1; }
  Tensor& computed() { return flat_.gradients; }

  // Records the delay of the gradient that was computed last, before it is pushed.
  void look(const Shard& shard, int worker);

  // At time `at` the worker begins its next step, with the current running statistics. If no batch is left, it leaves.
  void start(int worker, double at);
  void begin_step(int worker, double at);                                             // also if no batch is left
  void again(int worker) { again_.push_back(machines_[std::size_t(worker)].lease); }  // its batch is trained once more
  void visit(int worker, double at) { events_.push({at, worker, true}); }

  // The gradients that were computed now count as so many epochs of all workers.
  void counts_as(std::int64_t epochs) { computed_ = epochs * per_epoch_; }

  // ---- the run ------------------------------------------------------------------------------------------------------
  SimulatorReport run(Method& method);

 private:
  struct Machine {
    std::int64_t lease = 0;
    std::unique_ptr<OwnPart> part = nullptr;
    std::uint32_t steps = 0;
    Tensor buffers;  // the running statistics that it received
    bool left = false;
  };
  struct Event {
    double at;
    int worker;
    bool visit;
    bool operator<(const Event& o) const {  // the earliest is on top of the queue
      return at != o.at ? at > o.at : worker > o.worker;
    }
  };
  struct Evaluations {
    std::optional<Evaluation> validation, test;
  };

  double lasts(double latencies, double vectors) const;

  void show() {  // copies the trained weights to the model
    flat_.values.copy_from(method_->weights());
    flat_.buffers.copy_from(buffers_);
    flat_.count_writes(flat_.all());
    model_.eval();
  }

  std::int64_t ended_epochs() const { return applied_ / per_epoch_; }
  std::int64_t reported_epochs() const { return report_.epochs.empty() ? 0 : report_.epochs.back().epoch; }
  // How many evaluations should have been made by now. If one update passes several moments, they count as one.
  double evaluation_moments() const {
    const double at = double(applied_) / (options_.evaluate_every * double(per_epoch_));
    return std::floor(at + 1e-9) + (applied_ >= batches_);
  }
  bool evaluation_is_due() const { return evaluation_moments() > evaluated_; }

  // Evaluates the model after show().
  Evaluations evaluate_now(MetricsFile& metrics);

  void end_epoch(MetricsFile& metrics, const Evaluations& v);

  void end(MetricsFile& metrics);

  Settings describe() const;

  Module& model_;
  const Loss& loss_;
  const FitData& data_;
  const SimulatorOptions& options_;
  FlatParameters flat_;
  SGD decays_;  // makes no steps: it clips, adds weight decay, and finds values that are not finite
  SGDOptions given_;
  std::optional<Counters> counters_;
  Tensor correct_, buffers_;
  std::vector<Machine> machines_;
  int active_, in_a_row_ = 0;
  Method* method_ = nullptr;
  std::priority_queue<Event> events_;
  double now_ = 0, epoch_began_ = 0, loss_sum_ = 0, seen_ = 0, evaluated_ = 0;
  std::deque<std::int64_t> again_;  // leases
  std::int64_t per_epoch_ = 0, batches_ = 0, next_lease_ = 0, applied_ = 0, computed_ = 0, pushes_ = 0, looks_ = 0;
  SimulatorReport report_;
};

std::unique_ptr<Method> make_method(Simulation& s, const std::string& strategy);
// The number of vectors as long as the weights that a strategy keeps for each worker. Throws UsageError for an unknown
// strategy.
int vectors_of_a_worker(const SimulatorOptions& options);

}  // namespace tandem
