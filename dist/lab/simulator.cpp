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
class ByServers : public Simulation {
 public:
  ByServers(const SimulatedRun& run, const Asynchrony& how, bool ring)
      : Simulation(run),
        synchronous_(how.kind == Asynchrony::Kind::bsp),
        of_means_(how.of_means()),
        ring_(ring),
        rule_(rule_of(run.options, how.rule)),
        service_(*rule_, flat_.values, rule_blocks(flat_), workers(),
                 {.how = how, .momentum = run_.sgd.momentum, .learning_rate = [this](std::int64_t) { return rate(); }}),
        exchanges_(std::size_t(workers())),
        sent_(std::size_t(workers())),
        waits_(std::size_t(workers())) {
    decays_.clip_norm = rule_->clip();
    for (int m = 0; m < workers(); m++) {
      sent_[std::size_t(m)] = Tensor::like(flat_.values);
      service_.pull(m, ++exchanges_[std::size_t(m)], sent_[std::size_t(m)]);
    }
    service_.answers();
  }
  double way_there() const override { return ring_ ? 0 : one_way(); }
  const Tensor& weights() override { return service_.shard().values(); }
  std::vector<std::int64_t> delays() const override {
    const ShardCounts& c = service_.counts();  // one delay is counted per update
    return synchronous_ && c.version ? std::vector<std::int64_t>{std::int64_t(c.version)} : c.delays;
  }

  const ShardCounts* counts() const override { return &service_.counts(); }

  void arrived(int worker) override {
    waits_[std::size_t(worker)] = true;
    // Synchronous gradients are all computed at the end: with one learning rate, and in the order of the workers.
    if (synchronous_ && std::count(waits_.begin(), waits_.end(), true) < active_) return;
    for (int m = 0; m < workers(); m++)
      if (waits_[std::size_t(m)]) push(m);
    waits_.assign(waits_.size(), false);
    answer();
  }
  void visited(int) override { answer(); }  // a grace time is over

 private:
  void answer() {
    for (auto answers = service_.answers(now_); !answers.empty(); answers = service_.answers(now_))
      for (const auto& a : answers) {
        start(a.worker, now_ + (ring_ ? all_reduce() : one_way()));
        if (machines_[std::size_t(a.worker)].left) service_.lost(a.worker);  // then no worker waits for it
      }
    if (service_.due() == looks_at_) return;
    looks_at_ = service_.due();
    if (std::isfinite(looks_at_)) visit(0, looks_at_);
  }
  void push(int m) {
    if (service_.drops(m)) {  // this gradient is not used, so it is not computed
      again(m);
      service_.push(m, ++exchanges_[std::size_t(m)], flat_.gradients, 1, sent_[std::size_t(m)]);
      return;
    }
    const bool finite = gradient(m, sent_[std::size_t(m)]);
    if (synchronous_) add_scaled(flat_.gradients, flat_.gradients, weight(m) - 1);
    if (finite && !synchronous_) look(service_.shard(), m);
    service_.push(m, ++exchanges_[std::size_t(m)], of_means_ ? flat_.gradients.clone() : flat_.gradients, finite,
                  sent_[std::size_t(m)]);
  }

  bool synchronous_, of_means_, ring_;
  double looks_at_ = 0;  // the ShardService::due() for which a visit is queued
  std::shared_ptr<const Rule> rule_;
  ShardService service_;
  std::vector<ExchangeId> exchanges_;  // the last of each worker
  std::vector<Tensor> sent_;           // the weights sent to each worker
  std::vector<std::uint8_t> waits_;
};

// ---- workers that make their own steps ------------------------------------------------------------------------------
// A RoundMethod (rounds.h) determines what workers send and how they use the sum. Running statistics are averaged step
// by step, as under the other methods.
class OwnSteps : public Simulation {
 protected:
  explicit OwnSteps(const SimulatedRun& run)
      : Simulation(run), workers_(std::size_t(workers())), sum_(flat_.values.clone()) {
    for (Worker& w : workers_) {
      w.x = sum_.clone();
      w.velocity = Tensor::zeros(sum_.backend(), sum_.shape());
    }
  }
  struct Worker {
    Tensor x, velocity;
    Tensor sent = {};  // x as it was sent for the sum in flight, if the worker continues meanwhile
    std::shared_ptr<RoundMethod> method = nullptr;
    std::int64_t made = 0;
    bool waits = false;
  };
  // A step of SGD with momentum.
  void step(Worker& w) {
    const auto worker = int(&w - workers_.data());
    if (!gradient(worker, w.x, [&](Tensor& g) { w.method->before_update(w.x, g); })) return;
    rule_->push({.w = w.x.write<float>(),
                 .g = flat_.gradients.data<float>(),
                 .velocity = w.velocity.write<float>(),
                 .blocks = blocks_.data()},
                w.x.numel(), Hyper{.learning_rate = rate(), .momentum = run_.sgd.momentum});
    w.method->after_update(w.x, rate());
  }
  Exchanged exchanged(Worker& w) const {
    return {
        .range = {0, sum_.numel()}, .x = w.x, .sent = w.sent.defined() ? w.sent : w.x, .sum = sum_, .ranks = workers()};
  }

  std::vector<Worker> workers_;
  Tensor sum_;

 private:
  const std::unique_ptr<Rule> rule_ = make_rule("asgd-m");
  const std::vector<RuleBlock> blocks_ = rule_blocks(flat_);
};

// Each worker has weights and a velocity, makes H SGD steps, and then exchanges the result. Under easgd no worker
// waits: when a worker arrives, it and the centre are pulled to each other, with α = 0.9/K (Zhang, Choromanska and
// LeCun 2015, the asynchronous form).
class Local : public OwnSteps {
 public:
  Local(const SimulatedRun& run, const RoundSteps& how) : OwnSteps(run), how_(how), method_(how.method()) {
    method_->allocate(flat_);
    method_->start(sum_);
    for (Worker& w : workers_) {
      w.method = method_;
      if (how_.kind == "cocod-sgd") w.sent = sum_.clone();
    }
  }

  void arrived(int worker) override {
    Worker& w = workers_[std::size_t(worker)];
    step(w);
    const std::int64_t until = how_.kind == "post-local-sgd" && !past_first_decay() ? 1 : how_.every.steps;
    if (++w.made < until) {
      start(worker, now_);
      if (machines_[std::size_t(worker)].left) average_when_all_wait();
      return;
    }
    w.made = 0;
    if (method_->centre()) return visit(worker, now_ + one_way());
    w.waits = true;
    average_when_all_wait();
  }

  void visited(int worker) override {
    Exchanged e = exchanged(workers_[std::size_t(worker)]);
    method_->send(e);
    method_->merge(e);
    start(worker, now_ + one_way());
  }

  const Tensor& weights() override {
    if (method_->centre() != nullptr) return *method_->centre();
    add_up(&Worker::x);
    join_mean(sum_, sum_, sum_, workers());
    return sum_;
  }

 private:
  void add_up(Tensor Worker::*what) {
    sum_.fill(0);
    for (int m = 0; m < workers(); m++) add_scaled(sum_, workers_[std::size_t(m)].*what, weight(m));
  }
  void average_when_all_wait() {
    if (method_->centre() || active_ == 0) return;
    if (std::ranges::count(workers_, true, &Worker::waits) < active_) return;
    const bool late = how_.kind == "cocod-sgd";  // the sum of the last exchange, plus each worker's change since
    const double at = late ? std::max(now_, sum_ready_) : now_ + all_reduce();
    sum_ready_ = at + all_reduce();
    add_up(late ? &Worker::sent : &Worker::x);
    for (Worker& w : workers_) {
      Exchanged e = exchanged(w);
      if (late || &w == &workers_[0])
        method_->merge(e);
      else
        w.x.copy_from(workers_[0].x);
      if (late) w.sent.copy_from(w.x);
    }
    for (int m = 0; m < workers(); m++)
      if (std::exchange(workers_[std::size_t(m)].waits, false)) start(m, at);
  }

  const RoundSteps how_;
  const std::shared_ptr<RoundMethod> method_;  // one for all workers: its vectors are the same on all
  double sum_ready_ = 0;
};

// ---- rounds over own epochs -----------------------------------------------------------------------------------------
// federated.h: the workers that take part in a round begin it together, and the next one begins when all have ended it.
class OwnEpochs : public OwnSteps {
 public:
  OwnEpochs(const SimulatedRun& run, const Federated& how) : OwnSteps(run), epochs_(how.epochs), theta_(sum_.clone()) {
    note_whole_rounds(how.name(), epochs_, run.options.epochs);
    for (int m = 0; m < workers(); m++) {
      RoundMethod& method = *(workers_[std::size_t(m)].method = how.method());
      method.join(part(m), sgd_);
      method.allocate(flat_);
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
    computed_ = 0;
    if (part(worker)->more()) return begin_step(worker, now_);
    if (--under_way_ > 0) return;
    merge();
    computed_ = epochs_ * per_epoch_;
    if (!over()) begin_round();
  }

 private:
  void begin_round() {
    for (int m = 0; m < workers(); m++) {
      Worker& w = workers_[std::size_t(m)];
      part(m)->start(begun_, 0);
      w.method->begin_epoch(begun_, {});
      w.velocity.fill(0);
      if (!part(m)->more()) continue;
      under_way_++;
      begin_step(m, begun_ > 0 ? now_ + all_reduce() : 0);
    }
    begun_ += epochs_;
  }

  void merge() {
    for (bool again = true; again;) {
      sum_.fill(0);
      for (Worker& w : workers_) {
        again = w.method->end({}).again;
        Exchanged e{.x = w.x, .sum = theta_};  // theta_ receives what this worker sends
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
  SGD sgd_{{.momentum = run_.sgd.momentum}};  // only describes the steps
  int under_way_ = 0;                         // workers that have not ended the round
  std::int64_t begun_ = 0;                    // epochs
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
    return rounds->kind == "cocod-sgd" ? 3 : 2;
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
  const SimulatedRun run{model, loss, sgd, backend, data, options, vectors_of_a_worker(options)};
  const std::string& text = options.strategy;
  if (text == "all-reduce") return ByServers(run, Asynchrony::parse("bsp"), true).run();
  if (const auto how = RoundSteps::parse(text)) return Local(run, *how).run();
  if (const auto how = Federated::parse(text)) return OwnEpochs(run, *how).run();
  return ByServers(run, Asynchrony::parse(text), false).run();
}

}  // namespace tandem
