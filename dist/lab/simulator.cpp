#include "dist/lab/simulator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <numeric>
#include <queue>

#include "core/backend.h"
#include "core/clock.h"
#include "core/elementwise.h"
#include "core/files/archive.h"
#include "core/machine.h"
#include "core/math.h"
#include "core/memory.h"
#include "core/random.h"
#include "core/text.h"
#include "dist/server/asynchrony.h"
#include "dist/strategies/outer.h"
#include "dist/server/straggler_emulation.h"
#include "dist/server/shard_service.h"
#include "dist/server/server.h"
#include "dist/server/server_layout.h"
#include "layers/train/metrics.h"

namespace tandem {
namespace {

class Simulation;

// What happens when a worker's step has ended. Everything that a method changes it changes in these calls.
class Method {
 public:
  virtual ~Method() = default;
  virtual double way_there() const { return 0; }      // seconds from a worker's gradient to its arrival
  virtual void arrived(int worker) = 0;               // a gradient
  virtual void visited(int worker) { (void)worker; }  // what Simulation::visit() asked for
  virtual const Tensor& weights() = 0;                // as they are to be evaluated
  virtual std::vector<std::int64_t> delays() const { return {}; }  // SimulatorReport::delays
  virtual const ShardCounts* counts() const { return nullptr; }    // of a server
  virtual void archive(Archive& a) = 0;
};

class Simulation {
 public:
  // vectors: as long as the weights, that the strategy keeps for each worker.
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
    batches_ = data.train.batches_per_epoch() * options.epochs;
    run_ = describe();
  }

  // ---- what methods ask ----------------------------------------------------------------------------------------------
  int workers() const { return int(machines_.size()); }
  int active() const { return active_; }  // workers whose step is under way, or who wait
  bool is_active(int worker) const { return !machines_[std::size_t(worker)].left; }
  double now() const { return now_; }
  double momentum() const { return given_.momentum; }
  void clip(double norm) { decays_.clip_norm = norm; }  // gradients; 0: they are not
  const FlatParameters& flat() const { return flat_; }
  bool past_first_decay() const {
    const auto& s = options_.schedule;
    const double epochs = s.every > 0 ? s.every : !s.milestones.empty() ? s.milestones[0] : options_.epochs / 2.0;
    return double(applied_) >= epochs * double(data_.train.batches_per_epoch());
  }
  double rate() const {
    return given_.learning_rate *
           options_.schedule.factor(double(applied_), double(batches_), double(data_.train.batches_per_epoch()));
  }
  // Seconds in which a vector goes to the servers, or comes back; 1/K of it stays on the machine.
  double one_way() const { return lasts(1, 1); }
  double all_reduce() const { return lasts(2 * (workers() - 1), 2); }

  // Computes the gradient of this worker's batch at `weights`. False: it is not finite, and was counted.
  bool gradient(int worker, const Tensor& weights) {
    Machine& m = machines_[std::size_t(worker)];
    flat_.values.copy_from(weights);
    flat_.count_writes(flat_.all());
    flat_.buffers.copy_from(m.buffers);
    const auto began = Clock::now();
    const Batch batch =
        data_.train.make(m.lease / data_.train.batches_per_epoch(), m.lease % data_.train.batches_per_epoch());
    counters_->batch(batch);
    decays_.epoch(std::uint32_t(batch.epoch));
    model_.train();
    Variable l = batch_loss(loss_, model_(Variable(batch.images)), batch, &correct_);
    flat_.zero_gradients();
    flat_.backward(l);
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
    // Running statistics: the difference that this batch made, averaged in.
    float *all = buffers_.write<float>(), share = 1 / float(workers());
    const float *after = flat_.buffers.data<float>(), *before = m.buffers.data<float>();
    for (std::int64_t i = 0; i < buffers_.numel(); i++) all[i] += share * (after[i] - before[i]);
    return true;
  }
  Tensor& computed() { return flat_.gradients; }

  // How late the gradient is that was computed last, before it is pushed.
  void look(const Shard& shard, int worker) {
    if (pushes_++ % 16 != 0) return;  // it costs as much as the push itself
    report_.gap += shard.gap(worker);
    report_.correction += shard.correction(worker, computed());
    looks_++;
  }

  // A worker begins its next step then, with the running statistics of now; where no batch is left it leaves.
  void start(int worker, double at) {
    Machine& m = machines_[std::size_t(worker)];
    if (again_.empty() && next_lease_ == batches_) {
      m.left = true;
      active_--;
      return;
    }
    m.lease = again_.empty() ? next_lease_++ : again_.front();
    if (!again_.empty()) again_.pop_front();
    m.buffers.copy_from(buffers_);
    const VirtualCluster& c = options_.cluster;
    const auto slow = c.slower.find(worker);
    const double took = c.compute * (slow == c.slower.end() ? 1 : slow->second) *
                        gamma_draw(c.shape, Philox(options_.seed, Stream::step_time, std::uint32_t(worker), m.steps++));
    events_.push({at + took + method_->way_there(), worker, false});
  }
  void again(int worker) { again_.push_back(machines_[std::size_t(worker)].lease); }  // its batch is trained once more
  void visit(int worker, double at) { events_.push({at, worker, true}); }

  // ---- the run ---------------------------------------------------------------------------------------------------------
  SimulatorReport run(Method& method) {
    method_ = &method;
    const bool goes_on = goes_on_from_checkpoint();
    MetricsFile metrics(options_.metrics, goes_on, run_of(run_));
    begin(metrics, goes_on);
    while (!events_.empty() && !report_.diverged && !report_.reached) {
      const Event e = events_.top();
      events_.pop();
      now_ = e.at;
      if (e.visit)
        method.visited(e.worker);
      else
        method.arrived(e.worker);
      applied_ += std::exchange(computed_, 0);  // only now: what was computed together has one learning rate
      const bool epoch_ends = ended_epochs() > std::int64_t(report_.epochs.size()), evaluates = evaluation_is_due();
      if (epoch_ends || evaluates) show();
      const Evaluations v = evaluates ? evaluate_now(metrics) : Evaluations{};
      while (ended_epochs() > std::int64_t(report_.epochs.size())) end_epoch(metrics, v);
      if (epoch_ends) save();
    }
    end(metrics);
    return std::move(report_);
  }

 private:
  struct Machine {
    std::int64_t lease = 0;
    std::uint32_t steps = 0;
    Tensor buffers;  // as it was sent them
    bool left = false;
    void archive(Archive& a) { a(lease, steps, buffers, left); }
  };
  struct Event {
    double at;
    int worker;
    bool visit;
    bool operator<(const Event& o) const {  // the earliest is on top of the queue
      return at != o.at ? at > o.at : worker > o.worker;
    }
  };
  struct Events : std::priority_queue<Event> {
    void archive(Archive& a) { a(c); }
  };
  struct Evaluations {
    std::optional<Evaluation> validation, test;
  };

  double lasts(double latencies, double vectors) const {
    const VirtualCluster& c = options_.cluster;
    const double bytes = vectors * double(flat_.values.bytes()) * (workers() - 1) / workers();
    return workers() == 1 ? 0 : latencies * c.latency + (c.bandwidth > 0 ? bytes / c.bandwidth : 0);
  }

  void show() {  // the trained weights are the model's
    flat_.values.copy_from(method_->weights());
    flat_.buffers.copy_from(buffers_);
    flat_.count_writes(flat_.all());
    model_.eval();
  }

  std::int64_t ended_epochs() const { return applied_ / data_.train.batches_per_epoch(); }
  // How many evaluations are to have been made by now; where one update passes several moments, they are one.
  double evaluation_moments() const {
    const double at = double(applied_) / (options_.evaluate_every * double(data_.train.batches_per_epoch()));
    return std::floor(at + 1e-9) + (applied_ >= batches_);
  }
  bool evaluation_is_due() const { return evaluation_moments() > evaluated_; }

  // Of the model as show() left it.
  Evaluations evaluate_now(MetricsFile& metrics) {
    evaluated_ = evaluation_moments();
    Evaluations v;
    if (data_.validation) v.validation = evaluate(model_, *data_.validation);
    if (data_.test) v.test = evaluate(model_, *data_.test);
    if (!v.validation && !v.test) return v;
    report_.reached = (v.test ? v.test : v.validation)->accuracy >= options_.until;
    const double epoch = double(applied_) / double(data_.train.batches_per_epoch());
    report_.evaluations.push_back({.epoch = epoch, .seconds = now_});
    MetricFields fields{{"event", std::string("evaluation")}, {"epoch", epoch}, {"seconds", now_}};
    const auto add = [&](const std::optional<Evaluation>& e, const char* name, std::optional<double>& accuracy) {
      if (e) fields.push_back({name, *(accuracy = e->accuracy)});
    };
    add(v.validation, "validation_accuracy", report_.evaluations.back().validation_accuracy);
    add(v.test, "test_accuracy", report_.evaluations.back().test_accuracy);
    if (ended_epochs() == std::int64_t(report_.epochs.size())) metrics.write(fields);  // no epoch ends here, whose line has them
    return v;
  }

  void end_epoch(MetricsFile& metrics, const Evaluations& v) {
    EpochReport e{.epoch = int(report_.epochs.size()) + 1,
                  .train_loss = loss_sum_ / seen_,
                  .learning_rate = rate(),
                  .train_accuracy = correct_.item() / seen_,
                  .images_per_second = seen_ / std::max(1e-12, now_ - epoch_began_),
                  .seconds = now_ - epoch_began_};
    if (v.validation) e.validation_loss = v.validation->loss, e.validation_accuracy = v.validation->accuracy;
    if (v.test) e.test_loss = v.test->loss, e.test_accuracy = v.test->accuracy;
    metrics.write(fields_of(e));
    if (options_.progress) std::fprintf(stderr, "%s\n", line_of(e, options_.epochs).c_str());
    report_.epochs.push_back(e);
    loss_sum_ = seen_ = 0;
    correct_.fill(0);
    epoch_began_ = now_;
  }

  void begin(MetricsFile& metrics, bool goes_on) {
    if (goes_on && options_.progress)
      std::fprintf(stderr, "%s: goes on after epoch %zu\n", options_.checkpoint.c_str(), report_.epochs.size());
    if (goes_on && metrics_bytes() > metrics_bytes_)  // what was written after the checkpoint is written again
      std::filesystem::resize_file(options_.metrics, metrics_bytes_);
    if (metrics_bytes() == 0)
      metrics.write({{"event", std::string("start")},
                     {"run", run_of(run_)},
                     {"strategy", options_.strategy},
                     {"parameters", flat_.parameters()},
                     {"epochs", std::int64_t(options_.epochs)},
                     {"batches_per_epoch", data_.train.batches_per_epoch()},
                     {"ranks", std::int64_t(workers())},
                     {"learning_rate", given_.learning_rate},
                     {"seed", std::int64_t(options_.seed)}});
    for (int m = 0; !goes_on && m < workers(); m++) start(m, 0);
  }

  void end(MetricsFile& metrics) {
    report_.seconds = now_;
    report_.delays = method_->delays();
    if (const ShardCounts* c = method_->counts()) {
      report_.dropped = std::accumulate(c->dropped.begin(), c->dropped.end(), std::int64_t{0});
      report_.participation = c->participation();
    }
    if (looks_) report_.gap /= double(looks_), report_.correction /= double(looks_);
    show();
    MetricFields end{{"event", std::string("end")},
                     {"steps", applied_},
                     {"seconds", now_},
                     {"stopped", std::int64_t(report_.diverged)},
                     {"reason", std::string(report_.diverged ? "diverged" : report_.reached ? "target reached" : "finished")},
                     {"refused", report_.refused},
                     {"dropped", report_.dropped},
                     {"gap", report_.gap},
                     {"correction", report_.correction}};
    if (const ShardCounts* c = method_->counts())
      for (const auto& [name, value] : measures_of_delays(*c)) end.push_back({name, value});
    if (!report_.epochs.empty() && report_.epochs.back().test_accuracy)
      end.push_back({"test_accuracy", *report_.epochs.back().test_accuracy});
    metrics.write(end);
    if (!options_.checkpoint.empty()) std::filesystem::remove(options_.checkpoint);
  }

  // ---- the checkpoint --------------------------------------------------------------------------------------------------
  // What decides how the run goes, so that another run's checkpoint is known.
  Settings describe() const {
    const auto text = [](auto... values) { return (... + (" " + digits(double(values), 17))).substr(1); };
    const auto& [workers, compute, shape, slower, latency, bandwidth] = options_.cluster;
    const Schedule& s = options_.schedule;
    Checksum first;
    first.add(flat_.values.raw(), flat_.values.bytes());
    first.add(flat_.buffers.raw(), flat_.buffers.bytes());
    Settings run{{"strategy", options_.strategy},
                 {"workers", text(workers)},
                 {"time of a step", text(compute, shape)},
                 {"link", text(latency, bandwidth)},
                 {"epochs", text(options_.epochs)},
                 {"seed", std::to_string(options_.seed)},
                 {"learning rate, momentum, weight decay", text(given_.learning_rate, given_.momentum, given_.weight_decay, given_.decay_everything)},
                 {"schedule", text(int(s.kind), s.every, s.gamma, s.warmup, s.rise, s.start, s.finish)},
                 {"evaluations", text(options_.evaluate_every, options_.until, data_.validation != nullptr, data_.test != nullptr)},
                 {"parameters", text(flat_.parameters())},
                 {"layers", hex(flat_.layout_hash())},
                 {"first weights", hex(first.value())},
                 {"batches, pictures of an epoch", text(data_.train.batches_per_epoch(), data_.train.pictures_per_epoch())}};
    for (const auto& [worker, factor] : slower) run.push_back({"slow worker", text(worker, factor)});
    for (const double m : s.milestones) run.push_back({"milestone", text(m)});
    run.insert(run.end(), options_.settings.begin(), options_.settings.end());
    for (const auto& described : data_.train.description()) run.push_back(described);
    return run;
  }

  // Everything that changes while the run goes on.
  void archive(Archive& a) {
    StepState steps = decays_.read_state();
    a(steps, correct_, buffers_, machines_, active_, in_a_row_, events_, now_, epoch_began_, loss_sum_, seen_, again_, next_lease_,
      applied_, pushes_, looks_, evaluated_, metrics_bytes_);
    a(report_.epochs, report_.evaluations, report_.gap, report_.correction, report_.refused);
    if (a.reads()) decays_.resume_at(steps);
    method_->archive(a);
    a.finish();
  }

  std::uintmax_t metrics_bytes() const {
    std::error_code none;
    return std::filesystem::is_regular_file(options_.metrics, none) ? std::filesystem::file_size(options_.metrics) : 0;
  }

  // The first two fields are for the comparison: the program and where it runs, and the run.
  void save() {
    if (options_.checkpoint.empty() || events_.empty() || report_.diverged) return;
    Archive a(options_.checkpoint, flat_.backend(), Archive::Mode::write);
    Settings here = surroundings(flat_.backend()), run = run_;
    metrics_bytes_ = metrics_bytes();
    a(here, run);
    archive(a);
  }

  bool goes_on_from_checkpoint() {
    const std::string& file = options_.checkpoint;
    if (file.empty()) return false;
    if (!std::filesystem::exists(file)) {
      AtomicFile can_be_written(file);
      return false;
    }
    Archive a(file, flat_.backend(), Archive::Mode::read);
    Settings here, run;
    a(here);
    if (here != surroundings(flat_.backend()))
      refuse(file, ": was written by another program, or on another device. Remove it to begin the run anew");
    a(run);
    const auto differs = std::mismatch(run.begin(), run.end(), run_.begin(), run_.end());
    const auto shown = [](const Settings& s, auto at) { return at == s.end() ? "nothing more" : at->first + " " + at->second; };
    if (run != run_)
      refuse(file, ": is the checkpoint of another run: it has '", shown(run, differs.first), "', this one '", shown(run_, differs.second),
             "'. Remove it, or name another file");
    archive(a);
    return true;
  }

  Module& model_;
  const Loss& loss_;
  const FitData& data_;
  const SimulatorOptions& options_;
  FlatParameters flat_;
  SGD decays_;  // makes no steps: clips, adds weight decay, and looks for what is not finite
  SGDOptions given_;
  std::optional<Counters> counters_;
  Tensor correct_, buffers_;
  std::vector<Machine> machines_;
  int active_, in_a_row_ = 0;
  Method* method_ = nullptr;
  Events events_;
  double now_ = 0, epoch_began_ = 0, loss_sum_ = 0, seen_ = 0, evaluated_ = 0;
  Settings run_;
  std::uintmax_t metrics_bytes_ = 0;  // when the checkpoint was written
  std::deque<std::int64_t> again_;  // leases
  std::int64_t batches_ = 0, next_lease_ = 0, applied_ = 0, computed_ = 0, pushes_ = 0, looks_ = 0;
  SimulatorReport report_;
};

// ---- by servers, or by all-reduce --------------------------------------------------------------------------------------
// A shard of the whole vector, in the server's own hands: it says whose push is applied when, and who may go on.
class ByServers : public Method {
 public:
  ByServers(Simulation& s, const Asynchrony& how, bool ring)
      : s_(s),
        synchronous_(how.kind == Asynchrony::Kind::bsp),
        of_means_(how.of_means()),
        ring_(ring),
        rule_(make_rule(how.rule)),
        service_(*rule_, s.flat().values, learning_rate_scales(s.flat()), s.workers(),
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
    const ShardCounts& c = service_.counts();  // of gradients that make an update together, one counts
    return synchronous_ && c.version ? std::vector<std::int64_t>{std::int64_t(c.version)} : c.delays;
  }

  const ShardCounts* counts() const override { return &service_.counts(); }

  void arrived(int worker) override {
    waits_[std::size_t(worker)] = true;
    // Together, all gradients are computed at the end: with one learning rate, and in the order of the workers.
    if (synchronous_ && std::count(waits_.begin(), waits_.end(), true) < s_.active()) return;
    for (int m = 0; m < s_.workers(); m++)
      if (waits_[std::size_t(m)]) push(m);
    waits_.assign(waits_.size(), false);
    answer();
  }
  void visited(int) override { answer(); }  // a grace time is over
  void archive(Archive& a) override { a(service_, exchanges_, sent_, waits_, looks_at_); }

 private:
  void answer() {
    for (auto answers = service_.answers(s_.now()); !answers.empty(); answers = service_.answers(s_.now()))
      for (const auto& a : answers) {
        s_.start(a.worker, s_.now() + (ring_ ? s_.all_reduce() : s_.one_way()));
        if (!s_.is_active(a.worker)) service_.lost(a.worker);  // it holds nobody back
      }
    if (service_.due() == looks_at_) return;
    looks_at_ = service_.due();
    if (std::isfinite(looks_at_)) s_.visit(0, looks_at_);
  }
  void push(int m) {
    if (service_.drops(m)) {  // nobody looks at this gradient: it need not be computed
      s_.again(m);
      service_.push(m, ++exchanges_[std::size_t(m)], s_.computed(), 1, sent_[std::size_t(m)]);
      return;
    }
    const bool finite = s_.gradient(m, sent_[std::size_t(m)]);
    if (finite && !synchronous_) s_.look(service_.shard(), m);
    service_.push(m, ++exchanges_[std::size_t(m)], of_means_ ? s_.computed().clone() : s_.computed(), finite,
                 sent_[std::size_t(m)]);
  }

  Simulation& s_;
  bool synchronous_, of_means_, ring_;
  double looks_at_ = 0;  // ShardService::due(), for which a visit is under way
  std::unique_ptr<Rule> rule_;
  ShardService service_;
  std::vector<ExchangeId> exchanges_;  // of each worker, the last
  std::vector<Tensor> sent_;           // the weights that it was sent
  std::vector<std::uint8_t> waits_;
};

// ---- by workers that make steps of their own ---------------------------------------------------------------------------
// Each worker has weights and a velocity, makes `steps` SGD steps, and then exchanges what came of them:
//   local-sgd       all wait for each other, and go on from the mean of their weights (Stich 2018)
//   outer           as local-sgd, but the way to the mean is a gradient for SGD with Nesterov's momentum (Douillard et al. 2023)
//   post-local-sgd  as local-sgd, but with one step between exchanges until the first decay of the learning rate (Lin et al. 2018)
//   cocod-sgd       as local-sgd, but the mean is made while the next steps run; what they changed is added to it (Shen et al. 2019)
//   easgd           nobody waits: worker and centre are drawn to each other, x −= α(x − z), z += α(x − z), α = 0.9/K
//                   (Zhang, Choromanska and LeCun 2015)
class Local : public Method {
 public:
  using Kind = LocalSteps::Kind;
  Local(Simulation& s, Kind kind, std::int64_t steps, std::optional<OuterSteps> outer = {})
      : s_(s),
        kind_(kind),
        steps_(steps),
        outer_(outer),
        rule_(make_rule("asgd-m")),
        centre_(s.flat().values.clone()),
        mean_(Tensor::like(centre_)),
        scales_(learning_rate_scales(s.flat())),
        workers_(std::size_t(s.workers())) {
    if (outer_) outer_velocity_ = Tensor::zeros(centre_.backend(), centre_.shape());
    for (Worker& w : workers_) {
      w.x = centre_.clone();
      w.velocity = Tensor::zeros(centre_.backend(), centre_.shape());
      if (kind == Kind::cocod) w.exchanged = centre_.clone();
    }
  }

  void arrived(int worker) override {
    Worker& w = workers_[std::size_t(worker)];
    if (s_.gradient(worker, w.x))
      rule_->push({.w = w.x.write<float>(),
                   .g = s_.computed().data<float>(),
                   .velocity = w.velocity.write<float>(),
                   .scales = scales_.data()},
                  centre_.numel(), Hyper{.learning_rate = s_.rate(), .momentum = s_.momentum()});
    const std::int64_t until = kind_ == Kind::post_local && !s_.past_first_decay() ? 1 : steps_;
    if (++w.made < until) {
      s_.start(worker, s_.now());
      if (!s_.is_active(worker)) average_when_all_wait();
      return;
    }
    w.made = 0;
    if (kind_ == Kind::elastic) return s_.visit(worker, s_.now() + s_.one_way());
    w.waits = true;
    average_when_all_wait();
  }

  void visited(int worker) override {
    float *x = workers_[std::size_t(worker)].x.write<float>(), *z = centre_.write<float>();
    const float alpha = 0.9f / float(s_.workers());
    for (std::int64_t i = 0; i < centre_.numel(); i++) {
      const float d = alpha * (x[i] - z[i]);
      x[i] -= d, z[i] += d;
    }
    s_.start(worker, s_.now() + s_.one_way());
  }

  const Tensor& weights() override {
    if (kind_ == Kind::elastic) return centre_;
    average([](const Worker& w) -> const Tensor& { return w.x; });
    return mean_;
  }
  void archive(Archive& a) override { a(centre_, outer_velocity_, workers_, mean_ready_); }

 private:
  struct Worker {
    Tensor x, velocity;
    Tensor exchanged;  // x as it went into the mean that is under way
    std::int64_t made = 0;
    bool waits = false;
    void archive(Archive& a) { a(x, velocity, exchanged, made, waits); }
  };
  template <class Of>
  void average(const Of& of) {
    mean_.fill(0);
    for (const Worker& w : workers_) add_into(mean_, of(w));
    float* m = mean_.write<float>();
    for (std::int64_t i = 0; i < mean_.numel(); i++) m[i] /= float(workers_.size());
  }
  void outer_step() {  // Δ = θ − mean; m = β·m + Δ; θ = θ − γ(Δ + β·m)
    float *theta = centre_.write<float>(), *m = outer_velocity_.write<float>(), *mean = mean_.write<float>();
    const float beta = float(outer_->momentum), gamma = float(outer_->learning_rate);
    for (std::int64_t i = 0; i < centre_.numel(); i++) {
      const float d = theta[i] - mean[i];
      m[i] = beta * m[i] + d;
      theta[i] = mean[i] = theta[i] - gamma * (d + beta * m[i]);
    }
  }
  void average_when_all_wait() {
    if (kind_ == Kind::elastic || s_.active() == 0) return;
    if (std::count_if(workers_.begin(), workers_.end(), [](const Worker& w) { return w.waits; }) < s_.active()) return;
    double at = s_.now() + s_.all_reduce();
    if (kind_ == Kind::cocod) {  // the mean of what they had the last time, and what each has done since
      average([](const Worker& w) -> const Tensor& { return w.exchanged; });
      for (Worker& w : workers_) {
        float *x = w.x.write<float>(), *sent = w.exchanged.write<float>();
        const float* m = mean_.data<float>();
        for (std::int64_t i = 0; i < mean_.numel(); i++) sent[i] = x[i] = m[i] + (x[i] - sent[i]);
      }
      at = std::max(s_.now(), mean_ready_);
      mean_ready_ = at + s_.all_reduce();
    } else {
      average([](const Worker& w) -> const Tensor& { return w.x; });
      if (outer_) outer_step();
      for (Worker& w : workers_) w.x.copy_from(mean_);
    }
    for (int m = 0; m < s_.workers(); m++) {
      if (!workers_[std::size_t(m)].waits) continue;
      workers_[std::size_t(m)].waits = false;
      s_.start(m, at);
    }
  }

  Simulation& s_;
  Kind kind_;
  std::int64_t steps_;
  std::optional<OuterSteps> outer_;
  std::unique_ptr<Rule> rule_;
  Tensor centre_, mean_, outer_velocity_;
  std::vector<float> scales_;
  std::vector<Worker> workers_;
  double mean_ready_ = 0;
};

// Vectors as long as the weights that a strategy keeps for each worker.
int vectors_of_a_worker(const std::string& text) {
  if (const auto local = LocalSteps::parse(text)) return local->kind == Local::Kind::cocod ? 3 : 2;
  if (text.find('+') == text.npos && OuterSteps::parse(text)) return 2;
  const auto how = Asynchrony::parse(text == "all-reduce" ? "bsp" : text);
  const auto keeps = make_rule(how.rule)->keeps();
  // What it was sent, always; with bsp and a quorum its gradient, until enough are there.
  return 1 + how.of_means() + keeps.square_avg + keeps.own;
}

std::unique_ptr<Method> make_method(Simulation& s, const std::string& text) {
  if (text == "all-reduce") return std::make_unique<ByServers>(s, Asynchrony::parse("bsp"), true);
  if (const auto local = LocalSteps::parse(text)) {
    if (local->every.alpha > 0) refuse(text, ": the simulator's workers make a fixed number of steps between exchanges: give that");
    return std::make_unique<Local>(s, local->kind, local->every.steps);
  }
  if (const auto outer = OuterSteps::parse(text)) {
    if (outer->every.alpha > 0 || outer->stream > 1) refuse(text, ": the simulator's outer optimizer has a fixed H and one fragment: give that");
    return std::make_unique<Local>(s, Local::Kind::local, outer->every.steps, outer);
  }
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
  if (c.bandwidth != 0 && !(c.bandwidth >= 1)) refuse("links of ", c.bandwidth, " bytes a second: expected 0 (no limit), or 1 and more");
  for (const auto& [worker, factor] : c.slower)
    if (worker < 0 || worker >= c.workers)
      refuse("worker ", worker, " is to be slower: there are workers 0 to ", c.workers - 1);
  if (!(options.evaluate_every > 0)) refuse("an evaluation every ", options.evaluate_every, " epochs: expected a number above 0");
  vectors_of_a_worker(options.strategy);
}

SimulatorReport simulate(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
                         const SimulatorOptions& options) {
  check_simulation(options);
  if (sgd.nesterov) refuse("Nesterov's momentum needs the next weights at once: the update rules have none");
  Simulation simulation(model, loss, sgd, backend, data, options, vectors_of_a_worker(options.strategy));
  const auto method = make_method(simulation, options.strategy);
  return simulation.run(*method);
}

}  // namespace tandem
