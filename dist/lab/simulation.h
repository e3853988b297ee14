// A simulated run (simulator.h): the virtual clock, the workers' batches and gradients, and evaluations. A Method
// (simulator.cpp) handles the end of a worker's step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/clock.h"
#include "core/machine.h"
#include "core/memory.h"
#include "core/random.h"
#include "core/text.h"
#include "dist/lab/simulator.h"
#include "dist/server/shard_service.h"
#include "dist/server/straggler_emulation.h"
#include "dist/strategies/federated.h"
#include "layers/train/metrics.h"
#include "layers/train/own_part.h"

namespace tandem {

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
             const SimulatorOptions& options, int vectors)
      : model_(model),
        loss_(loss),
        data_(data),
        options_(options),
        flat_(model, backend, options.seed),
        decays_({.learning_rate = sgd.learning_rate, .weight_decay = sgd.weight_decay}),
        given_(sgd),
        correct_(Tensor::zeros(backend, {1}, DType::i32)),
        active_(options.cluster.workers) {
    decays_.bind(flat_, options.seed);
    counters_.emplace(decays_.state());
    const double bytes = double(vectors * flat_.values.bytes() + flat_.buffers.bytes()) * active_;
    if (const auto has = double(available_memory()); bytes > has)
      refuse(active_, " workers with ", options.strategy, " keep ", readable_bytes(bytes), ", ", vectors,
             " vectors of ", flat_.parameters(), " parameters each, and this machine has ", readable_bytes(has),
             " left: choose fewer workers or a smaller model");
    machines_.resize(std::size_t(active_));
    for (Machine& m : machines_) m.buffers = flat_.buffers.clone();
    buffers_ = flat_.buffers.clone();
    const auto rounds = Federated::parse(options.strategy);
    OwnPartOptions own{.workers = active_};
    if (rounds) own.epochs = rounds->epochs, own.sample = rounds->sample;
    for (Machine& m : machines_) {
      m.part = OwnPart::of(data.train, own);
      if (m.part && !rounds) m.part->start(0, 0);
      own.worker++;
    }
    per_epoch_ = part(0) ? part(0)->batches_per_epoch() : data.train.batches_per_epoch();
    batches_ = per_epoch_ * options.epochs;
  }

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
  bool past_first_decay() const {
    const auto& s = options_.schedule;
    const double epochs = s.every > 0 ? s.every : !s.milestones.empty() ? s.milestones[0] : options_.epochs / 2.0;
    return double(applied_) >= epochs * double(per_epoch_);
  }
  double rate() const {
    return given_.learning_rate * options_.schedule.factor(double(applied_), double(batches_), double(per_epoch_));
  }
  // Seconds in which a vector goes to the servers, or comes back; 1/K of it stays on the machine.
  double one_way() const { return lasts(1, 1); }
  // By recursive halving and doubling: the minimum number of messages, and as few bytes as a ring.
  double all_reduce() const { return lasts(2 * std::ceil(std::log2(workers())), 2); }

  // Computes the gradient of this worker's batch at `weights`; `change` is called before weight decay is added. False:
  // it is not finite, and was counted.
  bool gradient(int worker, const Tensor& weights, const std::function<void(Tensor& g)>& change = {}) {
    Machine& m = machines_[std::size_t(worker)];
    flat_.values.copy_from(weights);
    flat_.count_writes(flat_.all());
    flat_.buffers.copy_from(m.buffers);
    const auto began = Clock::now();
    const std::int64_t in_epoch = data_.train.batches_per_epoch();
    const Batch batch = m.part ? m.part->following() : data_.train.make(m.lease / in_epoch, m.lease % in_epoch);
    counters_->batch(batch);
    decays_.epoch(std::uint32_t(batch.epoch));
    model_.train();
    Variable l = batch_loss(loss_, model_(Variable(batch.images)), batch, &correct_);
    flat_.zero_gradients();
    flat_.backward(l);
    if (change) change(flat_.gradients);
    report_.computing += seconds_since(began);
    decays_.measure(flat_.all(), false);
    decays_.check_gradients(&l.value());
    computed_++;
    seen_ += double(batch.size());
    if (decays_.read_state().not_finite) {
      decays_.clear_not_finite();
      report_.refused++;
      report_.diverged = ++in_a_row_ >= 20;
      loss_sum_ = std::nan("");
      return false;
    }
    in_a_row_ = 0;
    loss_sum_ += l.item() * double(batch.size());
    decays_.finish_gradients(flat_.all());
    // Running statistics: adds the change by this batch, divided by the number of workers.
    float *all = buffers_.write<float>(), share = 1 / float(workers());
    const float *after = flat_.buffers.data<float>(), *before = m.buffers.data<float>();
    for (std::int64_t i = 0; i < buffers_.numel(); i++) all[i] += share * (after[i] - before[i]);
    return true;
  }
  // Of this worker in a sum that is divided by their number: n·p_i with parts, else 1.
  double weight(int worker) { return part(worker) ? workers() * part(worker)->weight() : 1; }
  Tensor& computed() { return flat_.gradients; }

  // Records the delay of the gradient that was computed last, before it is pushed.
  void look(const Shard& shard, int worker) {
    if (pushes_++ % 16 != 0) return;  // it costs as much as the push itself
    report_.gap += shard.gap(worker);
    report_.correction += shard.correction(worker, computed());
    looks_++;
  }

  // At time `at` the worker begins its next step, with the current running statistics. If no batch is left, it leaves.
  void start(int worker, double at) {
    Machine& m = machines_[std::size_t(worker)];
    if (again_.empty() && next_lease_ == batches_) {
      m.left = true;
      active_--;
      return;
    }
    m.lease = again_.empty() ? next_lease_++ : again_.front();
    if (!again_.empty()) again_.pop_front();
    begin_step(worker, at);
  }
  // Also if no batch is left.
  void begin_step(int worker, double at) {
    Machine& m = machines_[std::size_t(worker)];
    m.buffers.copy_from(buffers_);
    events_.push({at + steps_.step_time(worker, m.steps++, options_.seed) + method_->way_there(), worker, false});
  }
  void again(int worker) { again_.push_back(machines_[std::size_t(worker)].lease); }  // its batch is trained once more
  void visit(int worker, double at) { events_.push({at, worker, true}); }

  // The gradients that were computed now count as so many epochs of all workers.
  void counts_as(std::int64_t epochs) { computed_ = epochs * per_epoch_; }

  // ---- the run ------------------------------------------------------------------------------------------------------
  SimulatorReport run(Method& method) {
    method_ = &method;
    const std::string name = run_of(describe());
    MetricsFile metrics(options_.metrics, false, name);
    metrics.write(
        {{"event", std::string("start")},
         {"run", name},
         {"strategy", options_.strategy},
         {"parameters", flat_.parameters()},
         {"epochs", std::int64_t(options_.epochs)},
         {"batches_per_epoch", per_epoch_},
         {"ranks", std::int64_t(workers())},
         {"learning_rate", given_.learning_rate},
         {"seed", std::int64_t(options_.seed)},
         {"pictures_of_workers", data_.train.parts(workers()).pictures}});  // [] where all draw from all pictures
    for (int m = 0, begun = method.begin(); m < workers() && !begun; m++) start(m, 0);
    while (!events_.empty() && !report_.diverged && !report_.reached) {
      const Event e = events_.top();
      events_.pop();
      now_ = e.at;
      if (e.visit)
        method.visited(e.worker);
      else
        method.arrived(e.worker);
      applied_ += std::exchange(computed_, 0);  // only now: gradients computed together have one learning rate
      const bool epoch_ends = ended_epochs() > reported_epochs(), evaluates = evaluation_is_due();
      EpochReport report;
      if (epoch_ends || evaluates) show();
      if (evaluates) evaluate_now(metrics, report);
      if (epoch_ends) end_epoch(metrics, report);
    }
    end(metrics);
    return std::move(report_);
  }

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
  double lasts(double latencies, double vectors) const {
    const VirtualCluster& c = options_.cluster;
    const double bytes = vectors * double(flat_.values.bytes()) * (workers() - 1) / workers();
    return workers() == 1 ? 0 : latencies * c.latency + (c.bandwidth > 0 ? bytes / c.bandwidth : 0);
  }

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
  void evaluate_now(MetricsFile& metrics, EpochReport& e) {
    evaluated_ = evaluation_moments();
    const auto evaluate_on = [&](BatchSource* data, std::optional<double>& loss, std::optional<double>& accuracy) {
      if (!data) return;
      const Evaluation found = evaluate(model_, *data);
      loss = found.loss;
      accuracy = found.accuracy;
      report_.reached = found.accuracy >= options_.until;
      report_.class_accuracy = found.class_accuracy;
    };
    evaluate_on(data_.validation, e.validation_loss, e.validation_accuracy);
    evaluate_on(data_.test, e.test_loss, e.test_accuracy);  // it counts if there are both
    if (!e.validation_accuracy && !e.test_accuracy) return;
    const double epoch = double(applied_) / double(per_epoch_);
    report_.evaluations.push_back({epoch, now_, e.validation_accuracy, e.test_accuracy});
    MetricFields fields{{"event", std::string("evaluation")}, {"epoch", epoch}, {"seconds", now_}};
    if (e.validation_accuracy) fields.push_back({"validation_accuracy", *e.validation_accuracy});
    if (e.test_accuracy) fields.push_back({"test_accuracy", *e.test_accuracy});
    fields.push_back({"class_accuracy", report_.class_accuracy});
    // Only if no epoch ends now: the line of an epoch has them
    if (ended_epochs() == reported_epochs()) metrics.write(fields);
  }

  void end_epoch(MetricsFile& metrics, EpochReport& e) {
    e.epoch = int(ended_epochs());
    e.first = int(reported_epochs()) + 1;
    e.train_loss = loss_sum_ / seen_;
    e.train_accuracy = correct_.item() / seen_;
    e.class_accuracy = report_.class_accuracy;
    e.learning_rate = rate();
    e.seconds = now_ - epoch_began_;
    e.images_per_second = seen_ / std::max(1e-12, e.seconds);
    metrics.write(fields_of(e));
    if (options_.progress) std::fprintf(stderr, "%s\n", line_of(e, options_.epochs).c_str());
    report_.epochs.push_back(e);
    loss_sum_ = seen_ = 0;
    correct_.fill(0);
    epoch_began_ = now_;
  }

  void end(MetricsFile& metrics) {
    report_.seconds = now_;
    report_.delays = method_->delays();
    if (const ShardCounts* c = method_->counts()) {
      report_.dropped = std::accumulate(c->dropped.begin(), c->dropped.end(), std::int64_t{0});
      report_.participation = c->participation();
    }
    if (looks_) {
      report_.gap /= double(looks_);
      report_.correction /= double(looks_);
    }
    show();
    MetricFields end{{"event", std::string("end")},
                     {"steps", applied_},
                     {"seconds", now_},
                     {"stopped", std::int64_t(report_.diverged)},
                     {"reason", std::string(report_.diverged  ? "diverged"
                                            : report_.reached ? "target reached"
                                                              : "finished")},
                     {"refused", report_.refused},
                     {"dropped", report_.dropped},
                     {"gap", report_.gap},
                     {"correction", report_.correction}};
    if (const ShardCounts* c = method_->counts())
      for (const auto& [name, value] : measures_of_delays(*c)) end.push_back({name, value});
    if (!report_.epochs.empty() && report_.epochs.back().test_accuracy)
      end.push_back({"test_accuracy", *report_.epochs.back().test_accuracy});
    metrics.write(end);
  }

  // The settings whose hash names the run in the metrics.
  Settings describe() const {
    const auto text = [](auto... values) { return (... + (" " + digits(double(values), 17))).substr(1); };
    const auto& [workers, compute, shape, slower, latency, bandwidth] = options_.cluster;
    Settings run = options_.settings;
    run.push_back({"strategy", options_.strategy});
    if (options_.rule) run.push_back({"rule", options_.rule->name()});
    run.push_back({"cluster", text(workers, compute, shape, latency, bandwidth)});
    for (const auto& [worker, factor] : slower) run.push_back({"slow worker", text(worker, factor)});
    run.push_back({"epochs", text(options_.epochs)});
    run.push_back({"seed", std::to_string(options_.seed)});
    run.push_back({"evaluations", text(options_.evaluate_every, options_.until)});
    run.push_back({"rates", text(given_.learning_rate, given_.momentum, given_.weight_decay)});
    return run;
  }

  Module& model_;
  const Loss& loss_;
  const FitData& data_;
  const SimulatorOptions& options_;
  const StragglerEmulation steps_{options_.cluster.compute, options_.cluster.shape, options_.cluster.slower};
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

}  // namespace tandem
