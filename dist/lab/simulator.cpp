// The methods of a simulated run: what follows a worker's step under servers, under all-reduce, or if workers make
// their own steps.
#include <algorithm>
#include <cmath>

#include "core/backend.h"
#include "core/elementwise.h"
#include "core/text.h"
#include "dist/lab/simulation.h"
#include "dist/server/asynchrony.h"
#include "dist/server/server_layout.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/federated.h"
#include "dist/strategies/local_steps.h"

namespace tandem {
namespace {

// ---- servers, or all-reduce -----------------------------------------------------------------------------------------
// One shard of the whole vector. The server's code determines when each push is applied, and which workers continue.
class ByServers : public Method {
 public:
  ByServers(Simulation& s, const Asynchrony& how, bool ring)
      : s_(s),
        synchronous_(how.kind == Asynchrony::Kind::bsp),
        of_means_(how.of_means()),
        ring_(ring),
        rule_(s.rule(how.rule)),
        service_(*rule_, s.flat().values, rule_blocks(s.flat()), s.workers(),
                 {.how = how, .momentum = s.momentum(), .learning_rate = [&s](std::int64_t) { return s.rate(); }}),
        exchanges_(std::size_t(s.workers())),
        sent_(std::size_t(s.workers())),
        waits_(std::size_t(s.workers())) {
    s.clip(rule_->clip());
    for (int m = 0; m < s.workers(); m++) {
      sent_[std::size_t(m)] = Tensor::like(s.flat().values);
      service_.pull(m, ++exchanges_[std::size_t(m)], sent_[std::size_t(m)]);
    }
    service_.answers();
  }
  double way_there() const override { return ring_ ? 0 : s_.one_way(); }
  const Tensor& weights() override { return service_.shard().values(); }
  std::vector<std::int64_t> delays() const override {
    const ShardCounts& c = service_.counts();  // one delay is counted per update
    return synchronous_ && c.version ? std::vector<std::int64_t>{std::int64_t(c.version)} : c.delays;
  }

  const ShardCounts* counts() const override { return &service_.counts(); }

  void arrived(int worker) override {
    waits_[std::size_t(worker)] = true;
    // Synchronous gradients are all computed at the end: with one learning rate, and in the order of the workers.
    if (synchronous_ && std::count(waits_.begin(), waits_.end(), true) < s_.active()) return;
    for (int m = 0; m < s_.workers(); m++)
      if (waits_[std::size_t(m)]) push(m);
    waits_.assign(waits_.size(), false);
    answer();
  }
  void visited(int) override { answer(); }  // a grace time is over

 private:
  void answer() {
    for (auto answers = service_.answers(s_.now()); !answers.empty(); answers = service_.answers(s_.now()))
      for (const auto& a : answers) {
        s_.start(a.worker, s_.now() + (ring_ ? s_.all_reduce() : s_.one_way()));
        if (!s_.is_active(a.worker)) service_.lost(a.worker);  // then no worker waits for it
      }
    if (service_.due() == looks_at_) return;
    looks_at_ = service_.due();
    if (std::isfinite(looks_at_)) s_.visit(0, looks_at_);
  }
  void push(int m) {
    if (service_.drops(m)) {  // this gradient is not used, so it is not computed
      s_.again(m);
      service_.push(m, ++exchanges_[std::size_t(m)], s_.computed(), 1, sent_[std::size_t(m)]);
      return;
    }
    const bool finite = s_.gradient(m, sent_[std::size_t(m)]);
    if (synchronous_) add_scaled(s_.computed(), s_.computed(), s_.weight(m) - 1);
    if (finite && !synchronous_) s_.look(service_.shard(), m);
    service_.push(m, ++exchanges_[std::size_t(m)], of_means_ ? s_.computed().clone() : s_.computed(), finite,
                  sent_[std::size_t(m)]);
  }

  Simulation& s_;
  bool synchronous_, of_means_, ring_;
  double looks_at_ = 0;  // the ShardService::due() for which a visit is queued
  std::shared_ptr<const Rule> rule_;
  ShardService service_;
  std::vector<ExchangeId> exchanges_;  // the last of each worker
  std::vector<Tensor> sent_;           // the weights sent to each worker
  std::vector<std::uint8_t> waits_;
};

// ---- workers that make their own steps ------------------------------------------------------------------------------
// What workers send and how they use its sum is that of a RoundMethod (rounds.h). Running statistics are averaged step
// by step, as under the other methods.
class OwnSteps : public Method {
 protected:
  explicit OwnSteps(Simulation& s) : s_(s), workers_(std::size_t(s.workers())), sum_(s.flat().values.clone()) {
    for (Worker& w : workers_) {
      w.x = sum_.clone();
      w.velocity = Tensor::zeros(sum_.backend(), sum_.shape());
    }
  }
  struct Worker {
    Tensor x, velocity;
    Tensor sent = {};  // x as it was sent for the sum in flight, if it travels while the worker goes on
    std::shared_ptr<RoundMethod> method = nullptr;
    std::int64_t made = 0;
    bool waits = false;
  };
  // A step of SGD with momentum.
  void step(Worker& w) {
    const auto worker = int(&w - workers_.data());
    if (!s_.gradient(worker, w.x, [&](Tensor& g) { w.method->before_update(w.x, g); })) return;
    rule_->push({.w = w.x.write<float>(),
                 .g = s_.computed().data<float>(),
                 .velocity = w.velocity.write<float>(),
                 .blocks = blocks_.data()},
                w.x.numel(), Hyper{.learning_rate = s_.rate(), .momentum = s_.momentum()});
    w.method->after_update(w.x, s_.rate());
  }
  Exchanged exchanged(Worker& w) const {
    return {.range = {0, sum_.numel()},
            .x = w.x,
            .sent = w.sent.defined() ? w.sent : w.x,
            .sum = sum_,
            .ranks = s_.workers()};
  }

  Simulation& s_;
  std::vector<Worker> workers_;
  Tensor sum_;

 private:
  const std::unique_ptr<Rule> rule_ = make_rule("asgd-m");
  const std::vector<RuleBlock> blocks_ = rule_blocks(s_.flat());
};

// Each worker has weights and a velocity, makes H SGD steps, and then exchanges the result. Under easgd no worker
// waits: when a worker arrives, it and the centre are pulled to each other, with α = 0.9/K (Zhang, Choromanska and
// LeCun 2015, the asynchronous form).
class Local : public OwnSteps {
 public:
  using Kind = RoundSteps::Kind;
  Local(Simulation& s, const RoundSteps& how) : OwnSteps(s), how_(how), method_(round_method(how)) {
    method_->allocate(s.flat());
    method_->start(sum_);
    for (Worker& w : workers_) {
      w.method = method_;
      if (how_.kind == Kind::cocod) w.sent = sum_.clone();
    }
  }

  void arrived(int worker) override {
    Worker& w = workers_[std::size_t(worker)];
    step(w);
    const std::int64_t until = how_.kind == Kind::post_local && !s_.past_first_decay() ? 1 : how_.every.steps;
    if (++w.made < until) {
      s_.start(worker, s_.now());
      if (!s_.is_active(worker)) average_when_all_wait();
      return;
    }
    w.made = 0;
    if (how_.kind == Kind::elastic) return s_.visit(worker, s_.now() + s_.one_way());
    w.waits = true;
    average_when_all_wait();
  }

  void visited(int worker) override {
    Exchanged e = exchanged(workers_[std::size_t(worker)]);
    method_->send(e);
    method_->merge(e);
    s_.start(worker, s_.now() + s_.one_way());
  }

  const Tensor& weights() override {
    if (method_->centre() != nullptr) return *method_->centre();
    add_up(&Worker::x);
    join_mean(sum_, sum_, sum_, s_.workers());
    return sum_;
  }

 private:
  void add_up(Tensor Worker::*what) {
    sum_.fill(0);
    for (int m = 0; m < s_.workers(); m++) add_scaled(sum_, workers_[std::size_t(m)].*what, s_.weight(m));
  }
  void average_when_all_wait() {
    if (how_.kind == Kind::elastic || s_.active() == 0) return;
    if (std::ranges::count(workers_, true, &Worker::waits) < s_.active()) return;
    const bool late = how_.kind == Kind::cocod;  // the sum of the last exchange, plus each worker's change since
    const double at = late ? std::max(s_.now(), sum_ready_) : s_.now() + s_.all_reduce();
    sum_ready_ = at + s_.all_reduce();
    add_up(late ? &Worker::sent : &Worker::x);
    for (Worker& w : workers_) {
      Exchanged e = exchanged(w);
      if (late || &w == &workers_[0])
        method_->merge(e);
      else
        w.x.copy_from(workers_[0].x);
      if (late) w.sent.copy_from(w.x);
    }
    for (int m = 0; m < s_.workers(); m++)
      if (std::exchange(workers_[std::size_t(m)].waits, false)) s_.start(m, at);
  }

  const RoundSteps how_;
  const std::shared_ptr<RoundMethod> method_;  // one for all workers: its vectors are the same on all
  double sum_ready_ = 0;
};

// ---- rounds over own epochs -----------------------------------------------------------------------------------------
// federated.h: the workers that take part in a round begin it together, and the next one begins when all have ended it.
class OwnEpochs : public OwnSteps {
 public:
  OwnEpochs(Simulation& s, const Federated& how) : OwnSteps(s), epochs_(how.epochs), theta_(sum_.clone()) {
    for (int m = 0; m < s.workers(); m++) {
      RoundMethod& method = *(workers_[std::size_t(m)].method = federated_method(how));
      method.join(s.part(m), sgd_);
      method.allocate(s.flat());
      method.equal(theta_);
    }
  }
  const Tensor& weights() override { return theta_; }
  bool begin() override {
    begin_round();
    return true;
  }

  void arrived(int worker) override {
    step(workers_[std::size_t(worker)]);
    s_.counts_as(0);
    if (s_.part(worker)->more()) return s_.begin_step(worker, s_.now());
    if (--under_way_ > 0) return;
    merge();
    s_.counts_as(epochs_);
    if (!s_.over()) begin_round();
  }

 private:
  void begin_round() {
    for (int m = 0; m < s_.workers(); m++) {
      Worker& w = workers_[std::size_t(m)];
      s_.part(m)->start(begun_, 0);
      w.method->begin_epoch(begun_, {});
      w.velocity.fill(0);
      if (!s_.part(m)->more()) continue;
      under_way_++;
      s_.begin_step(m, begun_ > 0 ? s_.now() + s_.all_reduce() : 0);
    }
    begun_ += epochs_;
  }

  void merge() {
    for (bool again = true; again;) {
      sum_.fill(0);
      for (Worker& w : workers_) {
        again = w.method->end({}).again;
        Exchanged e{.x = w.x, .sum = theta_};  // as a place for what this worker sends
        w.method->send(e);
        add_into(sum_, theta_);
      }
      for (Worker& w : workers_) {
        Exchanged e = exchanged(w);
        w.method->merge(e);
      }
    }
    theta_.copy_from(workers_[0].x);
    for (Worker& w : workers_) w.method->equal(theta_);
  }

  const std::int64_t epochs_;
  Tensor theta_;
  SGD sgd_{{.momentum = s_.momentum()}};  // only describes the steps
  int under_way_ = 0;                     // workers that have not ended the round
  std::int64_t begun_ = 0;                // epochs
};

// The number of vectors as long as the weights that a strategy keeps for each worker. Throws UsageError for an unknown
// strategy.
int vectors_of_a_worker(const SimulatorOptions& options) {
  const std::string& text = options.strategy;
  const auto rounds = text.find('+') == text.npos ? RoundSteps::parse(text) : std::nullopt;
  const auto federated = Federated::parse(text);
  if (options.rule && (rounds || federated)) refuse(text, " has no server that a rule could work for");
  if (rounds) {
    if (rounds->every.alpha > 0 || rounds->stream > 1)
      refuse(text,
             ": the simulator's workers make a fixed number of steps between exchanges of the whole vector: "
             "give H alone");
    return rounds->kind == Local::Kind::cocod ? 3 : 2;
  }
  if (federated)
    return 3 + 3 * (federated->kind == Federated::Kind::scaffold) + 2 * (federated->server != Federated::Server::none);
  if (text != "all-reduce" && !Asynchrony::is_one(text))
    refuse("the simulator has no strategy '", text,
           "': choose all-reduce, local-sgd:STEPS, post-local-sgd:STEPS, cocod-sgd:STEPS, easgd:STEPS, ",
           "outer:H=STEPS, fedavg, fedprox, scaffold or fednova with epochs=EPOCHS, ", listed(Asynchrony::names()));
  const auto how = Asynchrony::parse(text == "all-reduce" ? "bsp" : text);
  how.check_workers(text, options.cluster.workers);
  const auto keeps = rule_of(options, how.rule)->keeps();
  // Always the weights sent to the worker. With bsp and a quorum also its gradient, until enough have arrived.
  return 1 + how.of_means() + keeps.square_avg + keeps.own;
}

std::unique_ptr<Method> make_method(Simulation& s, const std::string& text) {
  if (text == "all-reduce") return std::make_unique<ByServers>(s, Asynchrony::parse("bsp"), true);
  if (const auto how = RoundSteps::parse(text)) return std::make_unique<Local>(s, *how);
  if (const auto how = Federated::parse(text)) return std::make_unique<OwnEpochs>(s, *how);
  return std::make_unique<ByServers>(s, Asynchrony::parse(text), false);
}

}  // namespace

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
