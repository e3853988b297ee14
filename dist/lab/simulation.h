// A simulated run (simulator.h): the virtual clock, the workers' batches and gradients, and evaluations. A class that
// derives from it (simulator.cpp) handles the end of a worker's step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
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
#include "core/text.h"
#include "dist/lab/simulator.h"
#include "dist/server/shard_service.h"
#include "dist/server/straggler_emulation.h"
#include "dist/server/work_leases.h"
#include "dist/strategies/federated.h"
#include "layers/train/metrics.h"
#include "layers/train/own_part.h"

namespace tandem {

// The user's own rule, or the one with this name.
inline std::shared_ptr<const Rule> rule_of(const SimulatorOptions& options, const std::string& name) {
  return options.rule ? options.rule : make_rule(name);
}

struct SimulatedRun {
  Module& model;
  const Loss& loss;
  const SGDOptions& sgd;
  Backend& backend;
  const FitData& data;
  const SimulatorOptions& options;
  int vectors;  // as long as the weights, which the strategy keeps for each worker
};

class Simulation {
 public:
  explicit Simulation(const SimulatedRun& run)
      : run_(run),
        flat_(run.model, run.backend, run.options.seed),
        decays_({.learning_rate = run.sgd.learning_rate, .weight_decay = run.sgd.weight_decay}),
        correct_(Tensor::zeros(run.backend, {1}, DType::i32)),
        active_(run.options.cluster.workers) {
    decays_.bind(flat_, run.options.seed);
    counters_.emplace(decays_.state());
    const double bytes = double(run.vectors * flat_.values.bytes() + flat_.buffers.bytes()) * active_;
    if (const auto has = double(available_memory()); bytes > has)
      refuse(active_, " workers with ", run.options.strategy, " keep ", readable_bytes(bytes), ", ", run.vectors,
             " vectors of ", flat_.parameters(), " parameters each, and this machine has ", readable_bytes(has),
             " left: choose fewer workers or a smaller model");
    machines_.resize(std::size_t(active_));
    for (Machine& m : machines_) m.buffers = flat_.buffers.clone();
    buffers_ = flat_.buffers.clone();
    const auto rounds = Federated::parse(run.options.strategy);
    OwnPartOptions own{
        .workers = active_, .epochs = rounds ? rounds->epochs : 0, .sample = rounds ? rounds->sample : 1};
    for (Machine& m : machines_) {
      m.part = OwnPart::of(run.data.train, own);
      if (m.part && !rounds) m.part->start(0, 0);
      own.worker++;
    }
    per_epoch_ = part(0) ? part(0)->batches_per_epoch() : run.data.train.batches_per_epoch();
    batches_ = per_epoch_ * run.options.epochs;
    leases_ = WorkLeases(0, batches_);
  }
  virtual ~Simulation() = default;

  // ---- the run ------------------------------------------------------------------------------------------------------
  SimulatorReport run() {
    const std::string name = run_of(describe());
    MetricsFile metrics(run_.options.metrics, false, name);
    metrics.write(
        {{"event", std::string("start")},
         {"run", name},
         {"strategy", run_.options.strategy},
         {"parameters", flat_.parameters()},
         {"epochs", std::int64_t(run_.options.epochs)},
         {"batches_per_epoch", per_epoch_},
         {"ranks", std::int64_t(workers())},
         {"learning_rate", run_.sgd.learning_rate},
         {"seed", std::int64_t(run_.options.seed)},
         {"pictures_of_workers", run_.data.train.parts(workers()).pictures}});  // [] where all draw from all pictures
    for (int m = 0, begun = begin(); m < workers() && !begun; m++) start(m, 0);
    while (!events_.empty() && !report_.diverged && !report_.reached) {
      const Event e = events_.top();
      events_.pop();
      now_ = e.at;
      if (e.visit)
        visited(e.worker);
      else
        arrived(e.worker);
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

 protected:
  // ---- what follows a worker's step: a method changes its state only in these calls ---------------------------------
  virtual double way_there() const { return 0; }      // seconds from the end of a worker's gradient to its arrival
  virtual bool begin() { return false; }              // starts the workers; false: run() starts all
  virtual void arrived(int worker) = 0;               // a gradient has arrived
  virtual void visited(int worker) { (void)worker; }  // the visit that visit() scheduled
  virtual const Tensor& weights() = 0;                // the weights to evaluate
  virtual std::vector<std::int64_t> delays() const { return {}; }  // SimulatorReport::delays
  virtual const ShardCounts* counts() const { return nullptr; }    // of a server; null: there is none

  // ---- for the methods ----------------------------------------------------------------------------------------------
  int workers() const { return int(machines_.size()); }
  OwnPart* part(int worker) { return machines_[std::size_t(worker)].part.get(); }  // null: draws from all pictures
  bool over() const { return applied_ + computed_ >= batches_; }
  bool past_first_decay() const {
    const auto& s = run_.options.schedule;
    const double epochs = s.every > 0 ? s.every : !s.milestones.empty() ? s.milestones[0] : run_.options.epochs / 2.0;
    return double(applied_) >= epochs * double(per_epoch_);
  }
  double rate() const {
    return run_.sgd.learning_rate *
           run_.options.schedule.factor(double(applied_), double(batches_), double(per_epoch_));
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
    const std::int64_t in_epoch = run_.data.train.batches_per_epoch();
    const Batch batch = m.part ? m.part->following() : run_.data.train.make(m.lease / in_epoch, m.lease % in_epoch);
    counters_->batch(batch);
    decays_.epoch(std::uint32_t(batch.epoch));
    run_.model.train();
    Variable l = batch_loss(run_.loss, run_.model(Variable(batch.images)), batch, &correct_);
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
  // The weight of this worker in a sum that is divided by the number of workers n: n·p_i with parts, else 1.
  double weight(int worker) { return part(worker) ? workers() * part(worker)->weight() : 1; }

  // Records the delay of the gradient that was computed last, before it is pushed.
  void look(const Shard& shard, int worker) {
    if (pushes_++ % 16 != 0) return;  // it costs as much as the push itself
    report_.gap += shard.gap(worker);
    report_.correction += shard.correction(worker, flat_.gradients);
    looks_++;
  }

  // At time `at` the worker begins its next step, with the current running statistics. If no batch is left, it leaves.
  void start(int worker, double at) {
    Machine& m = machines_[std::size_t(worker)];
    leases_.done(m.lease);
    m.lease = leases_.draw(worker).value_or(none);
    m.left = m.lease == none;
    active_ -= m.left;
    if (!m.left) begin_step(worker, at);
  }
  // The same, also if no batch is left.
  void begin_step(int worker, double at) {
    Machine& m = machines_[std::size_t(worker)];
    m.buffers.copy_from(buffers_);
    events_.push({at + steps_.step_time(worker, m.steps++, run_.options.seed) + way_there(), worker, false});
  }
  // The worker's batch will be trained again.
  void again(int worker) { leases_.again(std::exchange(machines_[std::size_t(worker)].lease, none)); }
  void visit(int worker, double at) { events_.push({at, worker, true}); }

  static constexpr std::int64_t none = -1;
  struct Machine {
    std::int64_t lease = none;
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
    const VirtualCluster& c = run_.options.cluster;
    const double bytes = vectors * double(flat_.values.bytes()) * (workers() - 1) / workers();
    return workers() == 1 ? 0 : latencies * c.latency + (c.bandwidth > 0 ? bytes / c.bandwidth : 0);
  }

  void show() {  // copies the trained weights to the model
    flat_.values.copy_from(weights());
    flat_.buffers.copy_from(buffers_);
    flat_.count_writes(flat_.all());
    run_.model.eval();
  }

  std::int64_t ended_epochs() const { return applied_ / per_epoch_; }
  std::int64_t reported_epochs() const { return report_.epochs.empty() ? 0 : report_.epochs.back().epoch; }
  // How many evaluations should have been made by now. If one update passes several moments, they count as one.
  double evaluation_moments() const {
    const double at = double(applied_) / (run_.options.evaluate_every * double(per_epoch_));
    return std::floor(at + 1e-9) + (applied_ >= batches_);
  }
  bool evaluation_is_due() const { return evaluation_moments() > evaluated_; }

  // Evaluates the model after show().
  void evaluate_now(MetricsFile& metrics, EpochReport& e) {
    evaluated_ = evaluation_moments();
    const auto evaluate_on = [&](BatchSource* data, std::optional<double>& loss, std::optional<double>& accuracy) {
      if (!data) return;
      const Evaluation found = evaluate(run_.model, *data);
      loss = found.loss;
      accuracy = found.accuracy;
      report_.reached = found.accuracy >= run_.options.until;
      report_.class_accuracy = found.class_accuracy;
    };
    evaluate_on(run_.data.validation, e.validation_loss, e.validation_accuracy);
    evaluate_on(run_.data.test, e.test_loss, e.test_accuracy);  // it counts if there are both
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
    if (run_.options.progress) std::fprintf(stderr, "%s\n", line_of(e, run_.options.epochs).c_str());
    report_.epochs.push_back(e);
    loss_sum_ = seen_ = 0;
    correct_.fill(0);
    epoch_began_ = now_;
  }

  void end(MetricsFile& metrics) {
    report_.seconds = now_;
    report_.delays = delays();
    if (const ShardCounts* c = counts()) {
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
    if (const ShardCounts* c = counts())
      for (const auto& [name, value] : measures_of_delays(*c)) end.push_back({name, value});
    if (!report_.epochs.empty() && report_.epochs.back().test_accuracy)
      end.push_back({"test_accuracy", *report_.epochs.back().test_accuracy});
    metrics.write(end);
  }

  // The settings whose hash names the run in the metrics.
  Settings describe() const {
    const auto text = [](auto... values) { return (... + (" " + digits(double(values), 17))).substr(1); };
    const auto& [workers, compute, shape, slower, latency, bandwidth] = run_.options.cluster;
    Settings run = run_.options.settings;
    run.push_back({"strategy", run_.options.strategy});
    if (run_.options.rule) run.push_back({"rule", run_.options.rule->name()});
    run.push_back({"cluster", text(workers, compute, shape, latency, bandwidth)});
    for (const auto& [worker, factor] : slower) run.push_back({"slow worker", text(worker, factor)});
    run.push_back({"epochs", text(run_.options.epochs)});
    run.push_back({"seed", std::to_string(run_.options.seed)});
    run.push_back({"evaluations", text(run_.options.evaluate_every, run_.options.until)});
    run.push_back({"rates", text(run_.sgd.learning_rate, run_.sgd.momentum, run_.sgd.weight_decay)});
    return run;
  }

  const SimulatedRun run_;
  const StragglerEmulation steps_{run_.options.cluster.compute, run_.options.cluster.shape,
                                  run_.options.cluster.slower};
  FlatParameters flat_;
  SGD decays_;  // makes no steps: it clips, adds weight decay, and finds values that are not finite
  std::optional<Counters> counters_;
  Tensor correct_, buffers_;
  std::vector<Machine> machines_;
  int active_, in_a_row_ = 0;  // active_: workers whose step is in progress, or which wait
  std::priority_queue<Event> events_;
  double now_ = 0, epoch_began_ = 0, loss_sum_ = 0, seen_ = 0, evaluated_ = 0;
  WorkLeases leases_;
  std::int64_t per_epoch_ = 0, batches_ = 0, applied_ = 0, computed_ = 0, pushes_ = 0, looks_ = 0;
  SimulatorReport report_;
};

}  // namespace tandem
