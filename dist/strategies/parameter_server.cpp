#include "dist/strategies/parameter_server.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

#include "core/backend.h"
#include "core/clock.h"
#include "core/elementwise.h"
#include "core/machine.h"
#include "core/trace/trace.h"
#include "dist/server/rules.h"
#include "dist/strategies/final_ranges.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

// The shortest correct version of bsp. Rank 0 is the only server: it receives every rank's gradient, adds them in the order of
// ranks, makes the step and broadcasts the new weights.
class NaiveServer : public Replicas {
 public:
  explicit NaiveServer(std::unique_ptr<Communicator> communicator) : Replicas(std::move(communicator), "naive-server", true) {}
  void begin(FlatParameters& flat, Optimizer&) override {
    flat_ = &flat;
    compare_layouts(flat);
    broadcast(flat, *communicator_);
  }
  void exchange(const Tensor& loss) override {
    loss_ = loss.clone();  // the loss goes with the gradient: where one is not finite, no step is made
    for (Tensor* mine : {&flat_->gradients, &loss_}) {
      if (rank() > 0) communicator_->send(0, buffer(*mine)).wait();
      for (int r = 1; rank() == 0 && r < size(); r++) {
        Tensor theirs = Tensor::like(*mine);
        communicator_->recv(r, buffer(theirs)).wait();
        add_into(*mine, theirs);
      }
    }
    float stop = stop_requested_;
    communicator_->all_reduce({&stop, 1, DType::f32}).wait();
    stop_ = stop > 0;
  }
  void update(Optimizer& optimizer) override {
    if (rank() == 0) optimizer.update(&loss_);
    communicator_->broadcast(buffer(flat_->values), 0).wait();
    flat_->count_writes(flat_->all());
  }

 private:
  FlatParameters* flat_ = nullptr;
};

// One of the flat vectors as the member wants it: in the host's memory.
struct OnHost {
  std::shared_ptr<void> pinned;  // null: the vector lies there already
  Buffer of(Tensor& t) {
    if (!t.backend().on_device()) return buffer(t);
    if (!pinned) pinned = t.backend().pinned(t.bytes());
    return {pinned.get(), t.numel(), t.dtype()};
  }
  Buffer download(Tensor& t) {
    const Buffer b = of(t);
    if (pinned) t.backend().download(b.data, t.raw(), t.bytes());
    return b;
  }
  void upload(Tensor& t) {
    if (pinned) t.backend().upload(t.raw_write(), pinned.get(), t.bytes());
  }
};

class ParameterServer;

// The batches of the leases that this rank draws: a lease is a share of a step's batches, and a step has as many of them as
// it has shares (with bsp one for each worker, otherwise one).
class LeasedBatches : public BatchSource {
 public:
  LeasedBatches(ParameterServer& strategy, BatchSource& all, int shares, int accumulate)
      : strategy_(strategy), all_(all), shares_(shares), accumulate_(accumulate), per_epoch_(all.batches_per_epoch()) {}
  void share(int, int) override {}
  bool grows_with_ranks() const override { return all_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return per_epoch_; }
  std::int64_t pictures_per_epoch() const override { return all_.pictures_per_epoch(); }
  void start(std::int64_t epoch, std::int64_t first) override;
  bool next(Batch& batch) override;
  void look_ahead();  // has the next batch made, once it is known which one that is; waits for nothing
  Batch make(std::int64_t epoch, std::int64_t index) override { return all_.make(epoch, index); }
  std::map<std::string, std::string> description() const override { return all_.description(); }

  std::int64_t leases_per_epoch() const { return (per_epoch_ + accumulate_ - 1) / accumulate_ * shares_; }
  std::optional<std::int64_t> epoch() const {  // of the next batch; nothing: it is not drawn yet, or there is none
    return lease_ ? std::optional(*lease_ / leases_per_epoch()) : std::nullopt;
  }

 private:
  struct Place {
    std::int64_t share, epoch, index;
  };
  Place place(std::int64_t lease, std::int64_t k) const {  // of its k-th batch
    return {lease % shares_, lease / leases_per_epoch(), lease % leases_per_epoch() / shares_ * accumulate_ + k};
  }

  ParameterServer& strategy_;
  BatchSource& all_;
  std::int64_t shares_, accumulate_, per_epoch_, epoch_ = 0, share_ = 0;
  std::optional<std::int64_t> lease_;
  std::int64_t next_ = 0;  // of the lease's batches
  bool ahead_ = false;     // the next batch is being made
};

class ParameterServer : public Strategy {
 public:
  ParameterServer(std::unique_ptr<Channel> channel, const ParameterServerOptions& options)
      : options_(options), server_node_(std::move(channel), options.deadline, options.tells, options.patience) {
    check_servers(options.servers, server_node_.size());
    std::string name = options_.how.text();
    if (options_.servers) name += ", " + std::to_string(options_.servers) + " of them serve";
    name += (options_.pipeline ? ", pipelined" : "") + std::string(options_.wire == DType::bf16 ? " (bf16)" : "");
    const int shares = synchronous() ? server_node_.size() - options_.servers : 1;
    ranks_ = {.strategy = name,
              .rank = server_node_.rank(),
              .size = server_node_.size(),
              .where = server_node_.where(),
              .batch_shares = shares,
              .per_step = shares,
              .evaluation_shares = 1,
              .evaluates = server_node_.rank() == 0};
  }

  int workers() const { return size() - options_.servers; }
  bool trains() const { return rank() < workers(); }
  bool synchronous() const { return options_.how.kind == Asynchrony::Kind::bsp; }
  std::vector<std::string> gather(const std::string& mine) override { return server_node_.gather(mine); }

  BatchSource& batches(BatchSource& train, int accumulate) override {
    train.share(0, ranks_.per_step);
    leased_ = std::make_unique<LeasedBatches>(*this, train, ranks_.per_step, accumulate);
    return *leased_;
  }
  std::int64_t steps(std::int64_t known) const override {
    return leased_ ? (first_lease_ + server_node_.leases_done()) / ranks_.per_step : known;
  }
  // Rank 0 reports what all ranks have trained since its last report, and in how much time.
  EpochEnd end_epoch(const EpochEnd& mine) override {
    EpochEnd end = mine;
    if (leased_) end.epochs = std::max(mine.epochs, over_ ? plan_.epochs : leased_->epoch().value_or(0));
    end.steps = over_ ? steps(mine.steps) : std::int64_t(double(end.epochs) * plan_.steps_per_epoch);
    if (rank() > 0) return end;
    end.trained = server_node_.trained();
    const auto now = Clock::now();
    if (end.trained.samples > mine.trained.samples) end.seconds = std::chrono::duration<double>(now - reported_).count();
    reported_ = now;
    return end;
  }
  bool over(std::int64_t) const override { return over_; }
  bool saves_after_failure() override { return server_node_.is_first_of_what_is_left(); }

  void prepare(Module&, Task&, const PrepareOptions& options) override {
    if (options.sync_batch_norm && size() > 1)
      refuse("--sync-bn: under ", options_.how.text(), " ranks run the model when they like, and have no batch in common: "
             "leave it out, or choose --strategy all-reduce");
  }
  ClockOffset watch(Trace& trace) override {
    trace_ = &trace;
    return {};
  }

  // Where ranks of a host can see it, gradients are pushed without a copy.
  FlatMemory memory() override {
    return [this](Backend& backend, std::int64_t numel) {
      if (backend.on_device()) return Tensor::zeros(backend, {numel}, DType::f32);
      auto block = server_node_.memory(std::size_t(numel) * sizeof(float));
      void* at = block.get();
      return Tensor::wrap(backend, at, {numel}, DType::f32, std::move(block));
    };
  }
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    use(optimizer);
    begun_ = over_ = false;
    reported_ = Clock::now();
    std::ostringstream layout;
    layout << flat.layout_hash();
    const auto all = server_node_.gather(layout.str());
    for (std::size_t r = 1; r < all.size(); r++)
      if (!all[r].empty() && all[r] != all[0])
        fail("rank 0 and rank ", r, " do not train the same model: start all ranks with the same program and options");
    if (!leased_ && options_.servers)
      refuse("--servers ", options_.servers, ": in a loop of one's own every rank trains its share, and none only serves: leave it out, "
             "or train by fit()");
    if (leased_ && !flat.backend().asynchronous()) {
      const std::int64_t bytes = std::clamp<std::int64_t>(std::int64_t(flat.gradients.bytes()) / 64, 64 << 10, 1 << 20);
      final_.emplace(flat, cut(flat.numel(), flat.gradients.dtype(), bytes));
      flat.on_gradient([this](const ParameterRange& parameter) {
        leased_->look_ahead();
        if (!early_) return;
        for (const Range& part : final_->ready(parameter)) part_is_final(part);
      });
    }
    if (leased_ || size() == 1) return;  // the first pull brings rank 0's weights
    // A loop of the user's own computes its first gradient before anything is pulled.
    for (auto [vector, host] : {std::pair(&flat.values, &values_), std::pair(&flat.buffers, &buffers_)}) {
      if (vector->numel() == 0) continue;
      const Buffer b = host->download(*vector);
      const std::string text(static_cast<const char*>(b.data), rank() == 0 ? b.bytes() : 0);
      const std::string first = server_node_.gather(text)[0];
      std::memcpy(b.data, first.data(), first.size());
      host->upload(*vector);
    }
    flat.count_writes(flat.all());
  }
  void use(Optimizer& optimizer) {
    const auto* sgd = dynamic_cast<const SGD*>(&optimizer);
    if (!sgd)
      refuse("--optimizer ", optimizer.name(), ": the parameter server's rules (", options_.how.text(),
             ") are of SGD. Choose --optimizer sgd, or a strategy whose ranks make their own steps: all-reduce, local-sgd:8");
    if (rank() == 0 && size() > 1) note_what_does_not_hold(sgd->options(), optimizer.clip_norm);
    // A loop of the user's own weighs its loss with its share of a batch of all ranks, and a push is a batch of its own.
    optimizer.gradients_are_shares_of(leased_ ? 1 : workers());
    momentum_ = sgd->options().momentum;
    optimizer_ = &optimizer;
  }

  // ---- the batches' side ------------------------------------------------------------------------------------------------
  void start_at(std::int64_t lease) {
    told_ = {};
    if (begun_) return;
    first_lease_ = lease;
    std::int64_t end = plan_.epochs * leased_->leases_per_epoch();
    if (plan_.stop_after > 0) end = std::min(end, std::max(lease, plan_.stop_after * ranks_.per_step));
    end_lease_ = end;
    begin_exchange(WorkLeases(std::min(lease, end), end));
  }
  // The next lease, or nothing once the run is over: then this rank has the last weights.
  std::optional<std::int64_t> draw() {
    if (over_) return {};
    if (stop_requested_) server_node_.stop();
    auto t = server_node_.lease(plan_.asked_to_stop);
    if (!t) finish();
    if (t) last_lease_ = *t;
    return t;
  }
  // What draw() will give, as far as it is known; with bsp it is foreseen, and another one only after a loss.
  std::optional<std::int64_t> next_lease() const {
    if (!synchronous()) return server_node_.next_lease();
    const std::int64_t next = last_lease_ + ranks_.per_step;
    return next < end_lease_ ? std::optional(next) : std::nullopt;
  }

  // Pushes the gradients and takes the new weights: the servers make the step.
  void exchange(const Tensor& loss) override {
    Optimizer& optimizer = *optimizer_;
    learning_rate_ = optimizer.learning_rate();
    if (!leased_ && !begun_) begin_exchange(WorkLeases(0, INT64_MAX / 2));
    if (leased_) leased_->look_ahead();
    const bool finite = finish_gradients(loss);
    if (finite) {
      in_a_row_ = 0;
    } else if (++in_a_row_ >= longest_row || optimizer.if_not_finite == IfNotFinite::fail) {
      early_ = false;  // a backward that looks for the cause may follow
      return;
    } else if (optimizer.if_not_finite == IfNotFinite::wait) {
      optimizer.clear_not_finite();
    }
    if (!leased_ && !server_node_.lease()) fail("the other ranks have ended");
    keep_pace();
    MetricSums sums;
    if (plan_.running_sums) {
      const MetricSums now = plan_.running_sums();
      sums = {now.loss - told_.loss, now.correct - told_.correct, now.samples - told_.samples};
      told_ = now;
    }
    const std::int64_t samples = finite ? std::max<std::int64_t>(1, samples_) : 0;
    samples_ = 0;
    const std::int64_t began = trace_ ? trace_->now() : 0;
    if (options_.pipeline) {
      push_behind(samples, sums);
    } else {
      server_node_.push(gradients_.download(flat_->gradients), buffers_.download(flat_->buffers), samples, sums);
      pull();
    }
    if (trace_ && trace_->recording())
      trace_->lane("push and pull").add({.name = "push and pull", .kind = "wait", .begin = began, .end = trace_->now()});
    early_ = pushes_early();
    step_began_ = Clock::now();
  }
  void update(Optimizer&) override {}
  void trains_samples(std::int64_t n) { samples_ += n; }

  // ---- for evaluation, checkpoints, the end -------------------------------------------------------------------------------
  void synchronize(Shared what, FlatParameters&, Optimizer& optimizer) override {
    if (what != Shared::optimizer) return;
    for (auto& [name, vector] : optimizer.vectors()) {
      if (name != "velocity") continue;
      OnHost host;
      const Buffer b = host.of(vector);
      if (server_node_.velocity(b)) host.upload(vector);
    }
  }
  Measures end() override {
    if (begun_ && !over_) {
      // Other ranks' ends are their own matter in a loop of the user's own; fit() ends all of them.
      if (leased_) server_node_.stop();
      finish();
    }
    if (flat_) std::exchange(flat_, nullptr)->on_gradient(nullptr);
    return measures();
  }

 private:
  Measures measures() const {
    const ServerNode::Counts c = server_node_.counts();
    Measures all{{"sent_bytes", double(c.bytes)},     {"early_bytes", double(c.early_bytes)},
                 {"exchanges", double(c.exchanges)},  {"refused", double(c.refused)},
                 {"exposed_seconds", c.waited},       {"shard_version", double(c.shard.version)}};
    if (c.taken_over) all.push_back({"adopted_shards", double(c.taken_over)});
    double pushes = 0, sum = 0;
    for (std::size_t d = 0; d < c.shard.delays.size(); d++)
      pushes += double(c.shard.delays[d]), sum += double(d) * double(c.shard.delays[d]);
    if (pushes > 0) all.push_back({"mean_delay", sum / pushes});
    // The histogram of delays: by one up to 15, then by powers of two.
    for (std::size_t d = 0; d < c.shard.delays.size();) {
      const std::size_t end = d < 16 ? d + 1 : 2 * d;
      double count = 0;
      for (std::size_t k = d; k < std::min(end, c.shard.delays.size()); k++) count += double(c.shard.delays[k]);
      if (count > 0)
        all.push_back({"delay_" + std::to_string(d) + (end > d + 1 ? "_to_" + std::to_string(end - 1) : ""), count});
      d = end;
    }
    return all;
  }

  // A range that is final is weighed, gets its weight decay and is sent, while backward goes on. The servers keep it until the
  // whole gradient is known to be finite: push() says so. Not where a range alone does not say what is sent of it (clipping);
  // not where a push is answered with what the one before it made; and not on a device, where backward only queues its work.
  bool pushes_early() const {
    return leased_ && final_ && !options_.pipeline && !optimizer_->needs_whole_gradient() && server_node_.pushes_parts();
  }
  void part_is_final(Range part) {
    optimizer_->measure(part, std::exchange(measured_, true));
    optimizer_->finish_gradients(part);
    server_node_.push_part(gradients_.of(flat_->gradients), part);
  }
  // After backward: they become what is pushed. False: they, or the loss, are not finite.
  bool finish_gradients(const Tensor& loss) {
    if (!early_) optimizer_->measure(flat_->all(), false);
    if (early_)
      for (const Range& part : final_->rest()) part_is_final(part);
    measured_ = false;
    optimizer_->check_gradients(&loss);
    const bool finite = optimizer_->read_state().not_finite == 0;
    if (finite && !early_) optimizer_->finish_gradients(flat_->all());
    return finite;
  }

  static constexpr int longest_row = 20;  // of gradients that are not finite: then the run has diverged

  void note_what_does_not_hold(const SGDOptions& o, double clip) const {
    const std::string how = options_.how.text();
    const Rule::Keeps keeps = make_rule(options_.how.rule)->keeps();
    if (o.momentum > 0 && !keeps.velocity && !keeps.own)
      std::fprintf(stderr, "note: %s has no momentum: %g is not used\n", how.c_str(), o.momentum);
    else if (o.nesterov)
      std::fprintf(stderr, "note: under %s the momentum is the update rule's, not Nesterov's\n", how.c_str());
    if (clip > 0 && synchronous() && workers() > 1)
      std::fprintf(stderr, "note: --clip: under %s each rank clips the gradient of its share, not their mean\n", how.c_str());
    if (flat_->values.backend().deterministic() && !synchronous() && workers() > 1)
      std::fprintf(stderr, "note: --deterministic: each gradient is, but not the order in which they arrive (%s)\n", how.c_str());
  }
  void begin_exchange(WorkLeases leases) {
    std::vector<float> scales(std::size_t(flat_->numel() / FlatParameters::alignment));
    for (const ParameterRange& s : flat_->parameter_ranges())
      for (std::int64_t i = s.local_begin; i < s.local_begin + s.length; i += FlatParameters::alignment)
        scales[std::size_t(i / FlatParameters::alignment)] = s.frozen ? 0 : float(s.learning_rate_scale);
    ServerOptions o{.how = options_.how,
                    .servers = options_.servers,
                    .momentum = momentum_,
                    .pipeline = options_.pipeline,
                    .wire = options_.wire,
                    .snapshots = options_.snapshots,
                    .memory = available_memory() / std::uint64_t(std::max(1, local_size_from_environment()))};
    if (leased_ && plan_.learning_rate) {
      o.learning_rate = [rate = plan_.learning_rate, first = first_lease_, per_step = ranks_.per_step](
                            std::int64_t pushes) { return rate(double((first + pushes) / per_step)); };
    } else {
      o.learning_rate = [this](std::int64_t) { return learning_rate_.load(); };
    }
    OnHost velocity;
    Buffer v;
    if (plan_.resumed || !leased_)  // a loop of the user's own does not say: zeros where it begins
      for (auto& [name, vector] : optimizer_->vectors())
        if (name == "velocity") v = velocity.download(vector);
    server_node_.begin(values_.download(flat_->values), buffers_.download(flat_->buffers), std::move(scales), std::move(o),
                       std::move(leases), v);
    begun_ = true;
    if (trains()) pull();
    early_ = pushes_early();
    step_began_ = Clock::now();
  }
  void pull() {
    server_node_.pull(values_.of(flat_->values), buffers_.of(flat_->buffers));
    take();
  }
  void take() {
    values_.upload(flat_->values);
    buffers_.upload(flat_->buffers);
    flat_->count_writes(flat_->all());
  }
  void finish() {
    server_node_.finish(values_.of(flat_->values), buffers_.of(flat_->buffers));
    over_ = true;
    if (trains()) take();
  }
  // Two pushes may have their gradients about: the one under way, and the one that is being computed.
  void push_behind(std::int64_t samples, const MetricSums& sums) {
    const Buffer g = gradients_.download(flat_->gradients), s = buffers_.download(flat_->buffers);
    outbox_[turn_].assign(static_cast<const std::byte*>(g.data), static_cast<const std::byte*>(g.data) + g.bytes());
    outbox_buffers_.assign(static_cast<const std::byte*>(s.data), static_cast<const std::byte*>(s.data) + s.bytes());
    if (std::exchange(behind_, true)) pull();
    server_node_.push({outbox_[turn_].data(), g.count, g.dtype}, {outbox_buffers_.data(), s.count, s.dtype}, samples, sums);
    turn_ = 1 - turn_;
  }
  void keep_pace() {
    const StragglerEmulation& p = options_.stragglers;
    if (p.mean <= 0) return;
    const auto slow = p.slower.find(rank());
    const double takes = p.mean * (slow == p.slower.end() ? 1 : slow->second) *
                         gamma_draw(p.shape, Philox(1, Stream::step_time, std::uint32_t(rank()), paced_++));
    for (double left; (left = takes - seconds_since(step_began_)) > 0;) {
      if (server_node_.stopped() || (plan_.asked_to_stop && plan_.asked_to_stop())) return;
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.1)));
    }
  }

  ParameterServerOptions options_;
  ServerNode server_node_;
  std::unique_ptr<LeasedBatches> leased_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  Trace* trace_ = nullptr;
  double momentum_ = 0;
  std::atomic<double> learning_rate_ = 0;  // of a loop of the user's own
  OnHost values_, gradients_, buffers_;
  std::vector<std::byte> outbox_[2], outbox_buffers_;
  std::optional<FinalRanges> final_;  // on the host, under fit()
  bool early_ = false;                // this step's gradient is pushed while it is computed
  bool measured_ = false;             // some of it is
  int turn_ = 0, in_a_row_ = 0;
  bool begun_ = false, over_ = false, behind_ = false;
  std::int64_t samples_ = 0, first_lease_ = 0, end_lease_ = 0, last_lease_ = 0;
  MetricSums told_;
  std::uint32_t paced_ = 0;
  Clock::time_point step_began_, reported_;
};

void LeasedBatches::start(std::int64_t epoch, std::int64_t first) {
  epoch_ = epoch;
  strategy_.start_at(epoch * leases_per_epoch() + (first + accumulate_ - 1) / accumulate_ * shares_);
}

bool LeasedBatches::next(Batch& batch) {
  if (!lease_) {
    lease_ = strategy_.draw();
    next_ = 0;
  }
  if (!lease_ || *lease_ / leases_per_epoch() > epoch_) return false;
  const Place p = place(*lease_, next_);
  if (p.share != std::exchange(share_, p.share)) all_.share(int(share_), int(shares_));
  batch = all_.make(p.epoch, p.index);
  batch.global = 0;
  ahead_ = false;
  strategy_.trains_samples(batch.size());
  if (++next_ == accumulate_ || p.index + 1 == per_epoch_) lease_.reset();
  look_ahead();
  return true;
}

void LeasedBatches::look_ahead() {
  if (ahead_) return;
  const auto lease = lease_ ? lease_ : strategy_.next_lease();
  if (!lease) return;
  const Place p = place(*lease, lease_ ? next_ : 0);
  ahead_ = true;
  if (p.share == share_) all_.make_ahead(p.epoch, p.index);  // otherwise that of a rank that was lost
}

}  // namespace

void check_servers(int servers, int ranks) {
  if (servers >= ranks) refuse("--servers ", servers, ": there are ", ranks, " ranks, and one at least must train");
}

std::unique_ptr<Strategy> parameter_server(std::unique_ptr<Channel> channel, const ParameterServerOptions& options) {
  return std::make_unique<ParameterServer>(std::move(channel), options);
}

std::unique_ptr<Strategy> naive_server(std::unique_ptr<Communicator> communicator) {
  return std::make_unique<NaiveServer>(std::move(communicator));
}

}  // namespace tandem
