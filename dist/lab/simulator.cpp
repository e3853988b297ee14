#include "dist/lab/simulator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "core/backend.h"
#include "core/clock.h"
#include "core/machine.h"
#include "core/math.h"
#include "core/memory.h"
#include "core/random.h"
#include "core/text.h"
#include "dist/lab/simulation.h"
#include "dist/server/server.h"
#include "dist/server/straggler_emulation.h"
#include "dist/strategies/federated.h"

namespace tandem {

Simulation::Simulation(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
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
    refuse(active_, " workers with ", options.strategy, " keep ", readable_bytes(bytes), ", ", vectors, " vectors of ",
           flat_.parameters(), " parameters each, and this machine has ", readable_bytes(has),
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

bool Simulation::past_first_decay() const {
  const auto& s = options_.schedule;
  const double epochs = s.every > 0 ? s.every : !s.milestones.empty() ? s.milestones[0] : options_.epochs / 2.0;
  return double(applied_) >= epochs * double(per_epoch_);
}

bool Simulation::gradient(int worker, const Tensor& weights, const std::function<void(Tensor& g)>& change) {
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

void Simulation::look(const Shard& shard, int worker) {
  if (pushes_++ % 16 != 0) return;  // it costs as much as the push itself
  report_.gap += shard.gap(worker);
  report_.correction += shard.correction(worker, computed());
  looks_++;
}

void Simulation::start(int worker, double at) {
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

void Simulation::begin_step(int worker, double at) {
  Machine& m = machines_[std::size_t(worker)];
  m.buffers.copy_from(buffers_);
  const VirtualCluster& c = options_.cluster;
  const auto slow = c.slower.find(worker);
  const double took = c.compute * (slow == c.slower.end() ? 1 : slow->second) *
                      gamma_draw(c.shape, Philox(options_.seed, Stream::step_time, std::uint32_t(worker), m.steps++));
  events_.push({at + took + method_->way_there(), worker, false});
}

SimulatorReport Simulation::run(Method& method) {
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
    if (epoch_ends || evaluates) show();
    const Evaluations v = evaluates ? evaluate_now(metrics) : Evaluations{};
    if (epoch_ends) end_epoch(metrics, v);
  }
  end(metrics);
  return std::move(report_);
}

double Simulation::lasts(double latencies, double vectors) const {
  const VirtualCluster& c = options_.cluster;
  const double bytes = vectors * double(flat_.values.bytes()) * (workers() - 1) / workers();
  return workers() == 1 ? 0 : latencies * c.latency + (c.bandwidth > 0 ? bytes / c.bandwidth : 0);
}

Simulation::Evaluations Simulation::evaluate_now(MetricsFile& metrics) {
  evaluated_ = evaluation_moments();
  Evaluations v;
  if (data_.validation) v.validation = evaluate(model_, *data_.validation);
  if (data_.test) v.test = evaluate(model_, *data_.test);
  if (!v.validation && !v.test) return v;
  report_.reached = (v.test ? v.test : v.validation)->accuracy >= options_.until;
  const double epoch = double(applied_) / double(per_epoch_);
  report_.evaluations.push_back({.epoch = epoch, .seconds = now_});
  MetricFields fields{{"event", std::string("evaluation")}, {"epoch", epoch}, {"seconds", now_}};
  const auto add = [&](const std::optional<Evaluation>& e, const char* name, std::optional<double>& accuracy) {
    if (e) fields.push_back({name, *(accuracy = e->accuracy)});
  };
  add(v.validation, "validation_accuracy", report_.evaluations.back().validation_accuracy);
  add(v.test, "test_accuracy", report_.evaluations.back().test_accuracy);
  report_.class_accuracy = (v.test ? v.test : v.validation)->class_accuracy;
  fields.push_back({"class_accuracy", report_.class_accuracy});
  // Only if no epoch ends now: the line of an epoch has them
  if (ended_epochs() == reported_epochs()) metrics.write(fields);
  return v;
}

void Simulation::end_epoch(MetricsFile& metrics, const Evaluations& v) {
  EpochReport e{.epoch = int(ended_epochs()),
                .first = int(reported_epochs()) + 1,
                .train_loss = loss_sum_ / seen_,
                .learning_rate = rate(),
                .train_accuracy = correct_.item() / seen_,
                .images_per_second = seen_ / std::max(1e-12, now_ - epoch_began_),
                .seconds = now_ - epoch_began_};
  if (v.validation) {
    e.validation_loss = v.validation->loss;
    e.validation_accuracy = v.validation->accuracy;
  }
  if (v.test) {
    e.test_loss = v.test->loss;
    e.test_accuracy = v.test->accuracy;
  }
  e.class_accuracy = report_.class_accuracy;
  metrics.write(fields_of(e));
  if (options_.progress) std::fprintf(stderr, "%s\n", line_of(e, options_.epochs).c_str());
  report_.epochs.push_back(e);
  loss_sum_ = seen_ = 0;
  correct_.fill(0);
  epoch_began_ = now_;
}

void Simulation::end(MetricsFile& metrics) {
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
Settings Simulation::describe() const {
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

void check_simulation(const SimulatorOptions& options) {
  const VirtualCluster& c = options.cluster;
  if (c.workers < 1) refuse("a simulation of ", c.workers, " workers");
  check_shape(c.shape);
  constexpr double longest = 1e9;  // seconds, so that no sum of them is infinite
  if (!(c.compute >= 0 && c.compute <= longest && c.latency >= 0 && c.latency <= longest))
    refuse("steps of ", c.compute, " s and messages of ", c.latency, " s: expected 0 to 1e9");
  if (c.bandwidth != 0 && !(c.bandwidth >= 1))
    refuse("links of ", c.bandwidth, " bytes a second: expected 0 (no limit), or 1 and more");
  for (const auto& [worker, factor] : c.slower)
    if (worker < 0 || worker >= c.workers)
      refuse("worker ", worker, " is to be slower: there are workers 0 to ", c.workers - 1);
  if (!(options.evaluate_every > 0))
    refuse("an evaluation every ", options.evaluate_every, " epochs: expected a number above 0");
  vectors_of_a_worker(options);
}

SimulatorReport simulate(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
                         const SimulatorOptions& options) {
  check_simulation(options);
  if (sgd.nesterov) refuse("Nesterov's momentum needs the next weights at once: the update rules have none");
  Simulation simulation(model, loss, sgd, backend, data, options, vectors_of_a_worker(options));
  const auto method = make_method(simulation, options.strategy);
  return simulation.run(*method);
}

}  // namespace tandem
