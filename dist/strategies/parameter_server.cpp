#include "dist/strategies/parameter_server.h"

#include <atomic>
#include <chrono>

#include "core/backend.h"
#include "core/clock.h"
#include "core/machine.h"
#include "core/text.h"
#include "core/trace/trace.h"
#include "dist/server/rules.h"
#include "dist/server/server_layout.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/leased_batches.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/served_vectors.h"

namespace tandem {
namespace {

// "its 600 pictures, of classes 0, 4"
std::string described(const Parts& parts, int worker) {
  std::vector<std::string> classes;
  for (std::size_t c = 0; c < parts.pictures[worker].size(); c++)
    if (parts.pictures[worker][c] > 0) classes.push_back(std::to_string(c));
  return "its " + counted(parts.of(worker), "picture") + ", of classes " + listed(classes);
}

class ParameterServer : public Strategy {
 public:
  ParameterServer(std::unique_ptr<Channel> channel, const ParameterServerOptions& options,
                  std::unique_ptr<MachineShare> machine = {})
      : options_(options), server_node_(std::move(channel), options.deadline, options.notify, options.patience) {
    check_servers(options.servers, server_node_.size());
    std::string name = (options_.classifier ? options_.classifier->name() + "+"
                        : machine           ? "machines+"
                        : round()           ? round()->name() + "+"
                                            : "") +
                       options_.how.text();
    if (options_.servers) name += ", " + std::to_string(options_.servers) + " of them serve";
    if (options_.wire == DType::bf16) name += " (bf16)";
    if (machine) machine_ = std::move(*machine);
    const int shares = int(leases_per_step()) * machine_.size();
    ranks_ = {.strategy = name,
              .rank = machine_.rank(),
              .size = machine_.job_size(),
              .where = server_node_.where(),
              .batch_shares = shares,
              .per_step = shares,
              .synchronous = synchronous(),
              .evaluation_shares = machine_.size(),
              .evaluation_share = machine_.place(),
              .evaluates = machine_.holds(0)};
  }

  int workers() const { return server_node_.size() - options_.servers; }
  bool trains() const { return server_node_.rank() < workers(); }
  bool synchronous() const { return options_.how.kind == Asynchrony::Kind::bsp; }
  std::int64_t leases_per_step() const { return synchronous() ? workers() : 1; }
  std::vector<std::string> gather(const std::string& mine, Among among = Among::all) override {
    if (among == Among::evaluating) return machine_.gather(mine);
    return machine_.gather(mine, [this](const std::string& text) { return server_node_.gather(text); });
  }

  BatchSource& batches(BatchSource& train, int accumulate) override {
    BatchSource* own = own_part(train, 1,
                                {.worker = trains() ? server_node_.rank() : 0,
                                 .workers = workers(),
                                 .place = machine_.place(),
                                 .places = machine_.size(),
                                 .shares = int(leases_per_step())});
    leased_ =
        std::make_unique<LeasedBatches>(own ? *own : train, server_node_, machine_,
                                        LeasedBatches::Options{.shares = int(leases_per_step()),
                                                               .accumulate = accumulate,
                                                               .synchronous = synchronous(),
                                                               .start = [this](std::int64_t first) { start_at(first); },
                                                               .asked_to_stop = [this] { return asked_to_stop(); }});
    return *leased_;
  }
  std::int64_t steps(std::int64_t known) const override {
    if (!leased_) return known;
    // `known` includes the steps of a round that is not pushed yet
    return round() ? std::max(known, leased_->steps(known)) : leased_->steps(known);
  }
  // Rank 0 reports the training of all ranks since its last report, and the time that it took.
  EpochEnd end_epoch(const EpochEnd& mine) override {
    EpochEnd end = mine;
    if (leased_ && leased_->over()) end_run();
    if (leased_) leased_->share_done();
    if (leased_) end.epochs = std::max(mine.epochs, over_ ? plan_.epochs : leased_->epoch().value_or(0));
    end.steps = over_ ? steps(mine.steps) : std::int64_t(double(end.epochs) * plan_.steps_per_epoch);
    if (machine_.size() > 1 && machine_.holds(0)) vectors_.velocity(velocity());
    if (rank() > 0) return end;
    end.trained = server_node_.trained();
    const auto now = Clock::now();
    if (end.trained.samples > mine.trained.samples)
      end.seconds = std::chrono::duration<double>(now - reported_).count();
    reported_ = now;
    return end;
  }
  bool over(std::int64_t) const override { return over_; }
  bool saves_after_failure() override { return machine_.leads() && server_node_.is_first_survivor(); }

  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    Strategy::prepare(model, task, options);
    if (options_.classifier) options_.classifier->prepare(model, task);
  }
  ClockOffset watch(Trace& trace) override {
    trace_ = &trace;
    return {};
  }

  FlatMemory memory() override { return vectors_.memory(); }
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    if (options_.classifier) options_.classifier->begin(flat.backend(), options_.deadline);
    if (machine_.size() > 1) machine_.begin(flat.backend(), options_.deadline);
    begun_ = over_ = false;
    reported_ = Clock::now();
    const auto all =
        gather(std::to_string(flat.layout_hash(OwnerClass::replicated)) + " " + std::to_string(flat.slice().count));
    for (std::size_t r = 1; r < all.size(); r++)
      if (!all[r].empty() && all[r] != all[0])
        fail("rank 0 and rank ", r, " do not train the same model: start all ranks with the same program and options");
    if (!leased_ && options_.servers)
      refuse("--servers ", options_.servers,
             ": in a loop of one's own every rank trains its share, and none only serves: leave it out, "
             "or train by fit()");
    vectors_.bind(flat, optimizer, leased_ && !round());
    use(optimizer);
    flat.on_gradient([this](const ParameterRange& parameter) {
      if (leased_) leased_->look_ahead();
      vectors_.ready(parameter);
    });
    if (!leased_ && size() > 1) vectors_.broadcast_first();  // otherwise the first pull receives rank 0's weights
  }
  void use(Optimizer& optimizer) {
    optimizer_ = &optimizer;
    if (round()) {
      if (!leased_) refuse(name(), ": a round's batches are leased: train by fit(), or choose ", round()->name());
      optimizer.gradients_are_shares_of(1);
      return vectors_.begin_rounds();
    }
    if (const double clip = make_rule(options_.how.rule)->clip(); clip > 0) {
      if (optimizer.clip_norm > 0 && optimizer.clip_norm != clip)
        refuse("--clip ", optimizer.clip_norm, ": ", options_.how.text(), " clips to ", clip,
               ": leave one of them out");
      optimizer.clip_norm = clip;
    }
    served_sgd(optimizer, options_.how);  // refuses others
    if (rank() == 0 && size() > 1)
      note_ineffective_options(options_.how, optimizer, workers(), flat_->backend().deterministic());
    // A user's own loop scales its loss by its share of a batch of all ranks, but a push is a whole batch.
    optimizer.gradients_are_shares_of(leased_ ? 1 : workers());
  }

  // ---- batches and steps --------------------------------------------------------------------------------------------
  void start_at(std::int64_t lease) {
    sent_sums_ = {};
    if (begun_) return;
    std::int64_t end = plan_.epochs * leased_->leases_per_epoch();
    if (plan_.stop_after > 0) end = std::min(end, std::max(lease, plan_.stop_after * leases_per_step()));
    begin_exchange(leased_->leases(lease, end, round() ? round()->every.steps : 1));
  }
  bool asked_to_stop() const { return stop_requested_ || (plan_.asked_to_stop && plan_.asked_to_stop()); }

  // Pushes the gradients and pulls the new weights: the servers make the step. If a worker makes rounds of its own
  // steps, finish() does this.
  void exchange(const Tensor& loss) override {
    if (options_.classifier) options_.classifier->step();
    learning_rate_ = optimizer_->learning_rate();
    if (!leased_ && !begun_) begin_exchange(WorkLeases::endless());
    if (leased_) leased_->look_ahead();
    if (round()) return;
    // Combines the gradients and counts of a machine's ranks.
    MachineShare::Step step = trained();
    step.stops = !machine_.leads() && asked_to_stop();
    if (leased_) leased_->announce(step);
    const bool finite = vectors_.combine(step, loss);
    if (step.stops > 0) stop_requested_ = true;
    if (leased_) leased_->receive(step);
    if (!goes_on(finite)) return;
    if (!leased_ && !server_node_.lease()) fail("the other ranks have ended");
    push_and_pull(step, finite);
    vectors_.step_begins();
  }
  void update(Optimizer& optimizer, const Tensor& loss) override {
    if (round()) optimizer.update(&loss);
  }
  void finish(Optimizer& optimizer) override {
    if (!round() || !goes_on(optimizer.read_state().not_finite == 0)) return;
    if (leased_->lease_ends()) push_and_pull(trained(), vectors_.finish_round());
    vectors_.step_begins();
  }

  // The samples and metric sums of this worker since its last push.
  MachineShare::Step trained() {
    MachineShare::Step step{.samples = double(leased_ ? leased_->take_samples() : 0)};
    if (plan_.running_sums) {
      const MetricSums now = plan_.running_sums();
      step.sums = {now.loss - sent_sums_.loss, now.correct - sent_sums_.correct, now.samples - sent_sums_.samples};
      sent_sums_ = now;
    }
    return step;
  }
  // False: the run has diverged, or must stop at a non-finite gradient.
  bool goes_on(bool finite) {
    in_a_row_ = finite ? 0 : in_a_row_ + 1;
    if (finite) return true;
    if (in_a_row_ >= most_in_a_row || optimizer_->if_not_finite == IfNotFinite::fail) return false;
    if (optimizer_->if_not_finite == IfNotFinite::wait) optimizer_->clear_not_finite();
    return true;
  }
  void push_and_pull(const MachineShare::Step& step, bool finite) {
    const std::int64_t samples = finite ? std::max<std::int64_t>(1, std::int64_t(step.samples)) : 0;
    const std::int64_t began = trace_ ? trace_->now() : 0;
    vectors_.push(samples, step.sums);
    vectors_.pull();
    if (trace_ && trace_->recording())
      trace_->lane("push and pull")
          .add({.name = "push and pull", .kind = "wait", .begin = began, .end = trace_->now()});
  }

  // ---- evaluation, checkpoints, end ---------------------------------------------------------------------------------
  void synchronize(Shared what, FlatParameters&, Optimizer& optimizer) override {
    if (what != Shared::optimizer) return;
    require(&optimizer == optimizer_, "synchronize() of another optimizer than begin() was given");
    if (machine_.size() > 1 && !leased_) fail(name(), ": a loop of one's own does not get the servers' velocity");
    if (machine_.size() == 1) vectors_.velocity(velocity());  // otherwise end_epoch() did, on all ranks of the machine
  }
  void saved(StrategyState& state) override {
    if (vectors_.momentum().defined()) state.vector("momentum", vectors_.momentum());
  }
  Measures end() override {
    if (begun_ && !over_) {
      // fit() ends the run of all ranks. In a user's own loop each rank ends by itself.
      if (leased_) server_node_.stop();
      end_run();
    }
    if (flat_) std::exchange(flat_, nullptr)->on_gradient(nullptr);
    if (options_.classifier) options_.classifier->end();
    machine_.end();
    return server_node_.counts().measures();
  }

 private:
  static constexpr int most_in_a_row = 20;  // non-finite gradients in a row: then the run has diverged

  // This rank's tensor for the velocity: the optimizer's, or with rounds that for the servers' m. Undefined: none.
  Tensor velocity() {
    if (round()) return vectors_.momentum();
    for (auto& [name, vector] : optimizer_->vectors())
      if (name == "velocity") return vector;
    return {};
  }

  const std::optional<RoundSteps>& round() const { return options_.round; }  // several steps per push

  void begin_exchange(WorkLeases leases) {
    ServerOptions o = options_;
    o.momentum = round() ? round()->momentum : served_sgd(*optimizer_, o.how).momentum;
    o.memory = available_memory() / std::uint64_t(std::max(1, local_size_from_environment()));
    if (own_part_) o.data_of = [parts = own_part_->parts(0)](int worker) { return described(parts, worker); };
    o.learning_rate = [this](std::int64_t) { return learning_rate_.load(); };
    if (leased_ && plan_.learning_rate) o.learning_rate = leased_->of_pushes(plan_.learning_rate);
    if (round()) o.learning_rate = [rate = round()->learning_rate](std::int64_t) { return rate; };
    // A user's own loop does not report whether it resumes: its velocity is always used. It is zero in a new run.
    vectors_.begin(std::move(o), std::move(leases), rule_blocks(*flat_, !round()),
                   plan_.resumed || !leased_ ? velocity() : Tensor());
    begun_ = true;
    if (trains()) vectors_.pull();
    vectors_.step_begins();
  }
  void end_run() {
    if (std::exchange(over_, true)) return;
    vectors_.finish(trains());
    if (leased_) leased_->share_done();
  }

  ParameterServerOptions options_;
  ServerNode server_node_;
  MachineShare machine_{alone(), {server_node_.rank()}, server_node_.size()};  // a worker: of one rank, or of several
  ServedVectors vectors_{server_node_, machine_};
  std::unique_ptr<LeasedBatches> leased_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  Trace* trace_ = nullptr;
  std::atomic<double> learning_rate_ = 0;  // of a user's own loop
  int in_a_row_ = 0;
  bool begun_ = false, over_ = false;
  MetricSums sent_sums_;
  Clock::time_point reported_;
};

}  // namespace

std::unique_ptr<Strategy> parameter_server(std::unique_ptr<Channel> channel, const ParameterServerOptions& options,
                                           std::unique_ptr<MachineShare> machine) {
  if (machine && options.servers)
    refuse(options.classifier ? "hybrid+" : "machines+", options.how.text(),
           ": with a machine as one worker all ranks serve: leave out --servers");
  return std::make_unique<ParameterServer>(std::move(channel), options, std::move(machine));
}

}  // namespace tandem
