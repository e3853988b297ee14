#include "dist/server/server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <tuple>

#include "core/text.h"
#include "dist/job/frames.h"
#include "dist/job/membership.h"
#include "dist/server/coordinator.h"
#include "dist/server/shard_server.h"
#include "dist/server/worker.h"

namespace tandem {
ServerNode::ServerNode(std::unique_ptr<Channel> channel, double deadline, Notify user, double patience)
    : deadline_(deadline), patience_(patience), notify_(std::move(user)), channel_(std::move(channel)) {
  if (rank() == 0) coordinator_ = std::make_unique<Coordinator>(*channel_);
  channel_->on_message(
      {.place = [this](int from, const MessageHeader& h, std::size_t bytes) { return place(from, h, bytes); },
       .arrived = [this](int from, const MessageHeader& h, std::span<std::byte> b) { arrived(from, h, b, false); },
       .shared = [this](int from, const MessageHeader& h, std::span<std::byte> b) { arrived(from, h, b, true); },
       .lost =
           [this](int rank, const std::string& why) {
             notify(why + ": the others go on without it" + data_of(rank, " and without "));
             lost(rank);
           },
       .returned =
           [this](int rank, std::uint64_t) {
             notify(channel_->where(rank) + " is back" + data_of(rank, ", with "));
             returned(rank);
           }});
  thread_ = std::thread([this] { run(); });
}
ServerNode::~ServerNode() {
  locked([&] { end_ = true; });
  channel_->wake();
  thread_.join();
}

// ---- the training thread --------------------------------------------------------------------------------------------
std::vector<std::string> ServerNode::gather(const std::string& mine) {
  const std::uint64_t k = ++gatherings_;
  post([this, k, mine] { send(*channel_, 0, message::Say{k}, mine); });
  std::vector<std::string> all;
  wait(
      "what all ranks say", [&] { return gathered_.count(k) > 0; },
      [&] { all = std::move(gathered_.extract(k).mapped()); });
  return all;
}

void ServerNode::begin(Buffer parameters, Buffer buffers, std::vector<RuleBlock> blocks, ServerOptions options,
                       WorkLeases leases, Buffer velocity) {
  layout_ =
      std::make_unique<ServerLayout>(std::move(options), size(), parameters.dtype, parameters.count, buffers.count);
  check_snapshots();
  blocks.resize(std::size_t(layout_->whole() / 64));
  worker_ = std::make_unique<Worker>(*layout_, *channel_);
  shard_server_ = std::make_unique<ShardServer>(*layout_, *channel_, std::move(blocks));
  if (rank() == 0) worker_->keep_first(parameters, buffers, velocity);
  post([this, leases]() mutable {
    // A rejoined rank must first receive the current owners of the shards.
    if (channel_->incarnation() > 0) return send(*channel_, 0, message::AskOwners{});
    if (coordinator_) {
      coordinator_->begin(workers(), synchronous(), std::move(leases));
      worker_->send_first();
    }
    ready();
  });
  // begin() does not wait for the weights: pull() does.
}

std::optional<std::int64_t> ServerNode::lease(const std::function<bool()>& asked_to_stop) {
  const double begin = now();
  bool stops = false;
  const auto look = [&] {
    if (!stops && asked_to_stop && (stops = asked_to_stop())) stop();
  };
  look();
  holds_ = {};
  wait(
      "a lease", [&] { return over_ || (trains() && next_lease_); },
      [&] { holds_ = over_ ? std::nullopt : std::exchange(next_lease_, {}); }, look);
  waited_ += now() - begin;
  // Requests the next lease now, so that its batch can be prepared meanwhile.
  if (holds_ && !synchronous()) post([this] { worker_->ask_for_lease(); });
  return lease_of(holds_);
}

void ServerNode::push_part(Buffer gradient, Range part) {
  post([this, at = gradient.data, part] {
    const std::int64_t before = channel_->bytes_sent();
    worker_->push_part(at, part);
    counts_.early_bytes += channel_->bytes_sent() - before;
  });
}

void ServerNode::push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums) {
  require(gradient.dtype == layout_->dtype && gradient.count == layout_->parameters, "push: a gradient of ",
          gradient.count, " ", name_of(gradient.dtype), ", and the servers have ", layout_->parameters, " ",
          name_of(layout_->dtype));
  require(holds_.has_value(), "push: no lease was drawn for it");
  require(!locked([&] { return std::exchange(waiting_, true); }),
          "push before the answer to the last one: pull() first");
  worker_->keep_buffers(buffers);
  const Worker::Exchange x{
      .gradient = gradient.data, .samples = samples, .lease = std::exchange(holds_, {})->lease, .sums = sums};
  post([this, x] {
    worker_->start(x);
    pushed_at_ = now();
    if (synchronous()) worker_->ask_for_lease();
  });
}
void ServerNode::ask() {
  wait(
      "the answer to a push", [&] { return !waiting_; }, [&] { waiting_ = true; });
  post([this] { worker_->start({}); });
}
bool ServerNode::pull(Buffer parameters, Buffer buffers) {
  const double begin = now();
  wait("the answer to a push", [&] { return !waiting_; });
  waited_ += now() - begin;
  worker_->copy_answers(parameters, buffers);
  return worker_->exchange().verdict == Verdict::taken;
}

void ServerNode::leave() {
  if (!trains()) return;
  post_message(message::Leaves{});
  post([this] { worker_->be_idle(); });
}
// It waits for all ranks twice: until no more pushes are applied, so that the weights are the last ones; then until all
// ranks have received them, because others may receive them from this rank.
void ServerNode::finish(Buffer parameters, Buffer buffers) {
  leave();
  wait("the others to end", [&] { return over_; });
  if (trains()) {
    ask();
    pull(parameters, buffers);
  }
  post([this] { channel_->tolerate_losses(); });
  post_message(message::Bye{});
  wait("the others to end", [&] { return ended_; });
}
bool ServerNode::is_first_survivor() const {
  // After a failure the member's thread has ended, and this thread may use the channel.
  if (!locked([&] { return failed_; }) || rank() == 0 || !trains()) return false;
  const std::vector<bool> living = channel_->living();
  return std::find(living.begin() + 1, living.end(), true) - living.begin() >= rank();
}
bool ServerNode::velocity(Buffer into) {
  const Rule::Keeps keeps = make_rule(layout_->options.how.rule)->keeps();
  if (!keeps.velocity && !keeps.own) return false;
  post([this, into] { worker_->ask_velocity(into.data); });
  wait(
      "the servers' velocity", [&] { return velocity_here_; }, [&] { velocity_here_ = false; });
  return true;
}
ServerNode::Counts ServerNode::counts() {
  Counts c;
  read([&] {
    c = counts_;
    if (!shard_server_) return;
    c.taken_over = shard_server_->taken_over();
    if (const ShardService* first = shard_server_->first()) c.shard = first->counts();
  });
  c.bytes = channel_->bytes_sent();
  c.waited = waited_;
  return c;
}
std::vector<ShardEvent> ServerNode::events() {
  std::vector<ShardEvent> all;
  read([&] {
    if (const ShardService* first = shard_server_ ? shard_server_->first() : nullptr) all = first->events();
  });
  return all;
}

// Checks the memory that the snapshots will need, before any of it is allocated.
void ServerNode::check_snapshots() const {
  const ServerOptions& o = layout_->options;
  const double bytes = double(layout_->snapshot_bytes()), need = double(layout_->snapshot_memory());
  if (o.memory > 0 && need > double(o.memory))
    refuse(where(), ": snapshots of what ", o.how.rule, " keeps of ", workers(), " workers need ", readable_bytes(need),
           ", and there are ", readable_bytes(double(o.memory)),
           ". Choose a rule that keeps less (asgd-m has one velocity, asgd none), start fewer "
           "workers, or do without: snapshots=0, and the velocities of a lost rank are lost");
  if (rank() == 0 && notify_ && bytes > 0)
    notify_("every " + digits(o.snapshots, 3) + " s a rank sends its successor a snapshot of " + readable_bytes(bytes) +
            ", " + readable_bytes(bytes / o.snapshots) + "/s; they take " + readable_bytes(need) +
            " of memory on each");
}

// ---- between the threads --------------------------------------------------------------------------------------------
void ServerNode::post(std::function<void()> command) {
  locked([&] { commands_.push_back(std::move(command)); });
  channel_->wake();
}
// Runs f on the member's thread, or on this thread if the member's thread has ended.
void ServerNode::read(const std::function<void()>& f) {
  bool done = false;
  post([&] {
    f();
    change([&] { done = true; });
  });
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done || failed_; });
  }
  if (!done) f();
}
// Waits without limit while other ranks live and one of them works. Rank 0 detects when that is not so
// (look_for_standstill()). `meanwhile` is called periodically, without the lock.
void ServerNode::wait(const char* what, const std::function<bool()>& done, const std::function<void()>& then,
                      const std::function<void()>& meanwhile) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return done() || failed_; };
  if (!ready()) waits_ = {what, now()};
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100), ready)) {
    if (!meanwhile) continue;
    lock.unlock();
    meanwhile();
    lock.lock();
  }
  waits_.what.clear();
  if (failed_) std::rethrow_exception(failed_);
  then();
}
void ServerNode::change(const std::function<void()>& f) {
  locked(f);
  changed_.notify_all();
}

// ---- the member's thread --------------------------------------------------------------------------------------------
void ServerNode::run() {
  try {
    // Other ranks may still need messages of this rank: after a successful end it exits when all are sent, or after
    // `patience` seconds.
    constexpr double patience = 10;
    double leaves_at = 0;
    for (;;) {
      std::deque<std::function<void()>> commands;
      bool ends = false;
      {
        std::lock_guard lock(mutex_);
        if (end_ && leaves_at == 0) {
          leaves_at = now() + (ended_ ? patience : 0);
          ends = ended_;
        }
        if (end_ && !ends && (channel_->sent() || now() >= leaves_at)) return;
        commands.swap(commands_);
      }
      for (auto& c : commands) c();
      if (ends) report_waiting("nothing any more: it has ended");
      const bool some = channel_->progress();
      if (ready_ && quorum()) {
        shard_server_->look_at_clock();
        worker_->report_waiting(now());
      }
      if (now() >= next_look_) next_look_ = now() + look_around();
      if (!some) channel_->rest();
    }
  } catch (...) {
    change([&] { failed_ = std::current_exception(); });
  }
}

// Notifies until the run is over; after that it is normal that ranks leave.
void ServerNode::notify(const std::string& what) const {
  if (coordinator_ && notify_ && !over()) notify_(what);
}
std::string ServerNode::data_of(int rank, const std::string& before) const {
  const bool parts = ready_ && layout_->options.data_of && rank < workers();
  return parts ? before + layout_->options.data_of(rank) : "";
}
void ServerNode::report_refusals() const {
  std::string all;
  std::int64_t sum = 0;
  for (const auto& [worker, count] : refused_) {
    all += (all.empty() ? "" : ", ") + channel_->where(worker) + " " + std::to_string(count);
    sum += count;
  }
  if (sum > 0)
    notify(std::to_string(sum) + " of " + std::to_string(coordinator_->leases_done()) +
           " gradients were not finite, and refused (" + all + "). A smaller --lr usually helps");
}

double ServerNode::look_around() {  // returns the seconds until the next call
  const double seldom = std::min({0.5, deadline_ / 4, patience_ / 4});
  report_waiting();
  if (coordinator_) look_for_standstill();
  const double every = ready_ ? layout_->options.snapshots : 0;
  if (every <= 0 || over()) return seldom;
  if (snapshot_began_ > 0 && !shard_server_->snapshot_under_way()) {  // it takes at most 1/10 of the link's time
    next_snapshot_ = std::max(next_snapshot_, now() + 9 * (now() - snapshot_began_));
    snapshot_began_ = 0;
  }
  if (now() >= next_snapshot_ && snapshot_began_ == 0 && std::exchange(next_snapshot_, now() + every) > 0) {
    shard_server_->send_snapshots(layout_->successor(rank(), channel_->living()));
    snapshot_began_ = now();
  }
  return std::min(seldom, every);
}
// Reports to rank 0 when this rank's training thread has waited from one look to the next, and when it no longer waits.
void ServerNode::report_waiting(const std::string& at_the_end) {
  const Waits w = locked([&] { return waits_; });
  const bool still = !w.what.empty() && w.since < std::exchange(looked_at_, now());
  const std::string text = still ? w.what + (ready_ ? worker_->missing() : "") : at_the_end;
  if (text == reported_wait_.what && (text.empty() || w.since == reported_wait_.since)) return;
  reported_wait_ = {text, w.since};
  send(*channel_, 0, message::WaitsFor{}, text);
}
// At rank 0. A rank that works has no time limit. If no rank works, no progress is possible.
void ServerNode::look_for_standstill() {
  const Coordinator::Waiting w = coordinator_->waiting();
  const double for_seconds = now() - w.since;
  if (!w.waits.empty() && w.works.empty() && for_seconds > deadline_)
    channel_->fail(-1, "for " + digits(deadline_, 6) + " s every rank has waited: " + w.waits);
  const bool stands_still = !w.waits.empty() && !w.works.empty() && for_seconds > patience_;
  if (stands_still && !warned_ && notify_)
    notify_("no progress for " + digits(patience_, 6) + " s: " + w.works + " keeps the others waiting: " + w.waits);
  warned_ = stands_still;
}

void ServerNode::ready() {
  ready_ = true;
  next_look_ = 0;
  handle_deferred();
  if (channel_->incarnation() > 0)
    for (std::uint64_t s = 0; s < layout_->owner.size(); s++) worker_->owner_changed(s);
  if (!trains()) return;
  worker_->start({});
  worker_->ask_for_lease();
}
void ServerNode::handle_deferred() {
  for (auto& [from, f] : std::exchange(deferred_, {})) f();
}

void ServerNode::answered(const message::Answer& answer, std::span<std::byte> bytes) {
  if (!worker_->answered(answer, bytes)) return;
  const Worker::Exchange& x = worker_->exchange();
  const bool taken = x.verdict == Verdict::taken;
  if (x.gradient) {
    const message::Done d{.lease = x.lease,
                          .verdict = x.verdict,
                          .loss = taken ? x.sums.loss : 0,
                          .correct = taken ? x.sums.correct : 0,
                          .samples = taken ? x.sums.samples : 0,
                          .waited = quorum() ? now() - pushed_at_ : 0};
    coordinator_ ? done(rank(), d) : send(*channel_, 0, d);  // called directly: pull() returns after the count
  }
  change([&] {
    waiting_ = false;
    pushes_parts_ = worker_->sends_parts();
  });
  counts_.exchanges++;
  counts_.refused += x.verdict == Verdict::refused;
  counts_.dropped += x.verdict == Verdict::dropped;
}
void ServerNode::done(int worker, const message::Done& d) {
  if (d.verdict == Verdict::dropped) return coordinator(worker).again(d.lease, now());
  if (!coordinator(worker).done(d.lease, now(), d.waited)) return;
  if (const double away = coordinator_->back_after(worker, now()); away > 0)
    notify(channel_->where(worker) + " works again, " + digits(away, 3) + " s after it was lost");
  if (d.verdict == Verdict::refused && refused_[worker]++ == 0)
    notify("a gradient of " + channel_->where(worker) + " is not finite: it is refused, as all that are so will be");
  change([&] {
    sums_.loss += d.loss;
    sums_.correct += d.correct;
    sums_.samples += d.samples;
    leases_done_ = coordinator_->leases_done();
  });
}

// ---- losses and returns ---------------------------------------------------------------------------------------------
// Losses and returns are deferred, like messages about shards, until this rank is ready. The messages of a lost rank
// are deleted: it may rejoin, and would receive answers to the requests of its previous process.
void ServerNode::lost(int rank) {
  std::erase_if(deferred_, [&](const auto& d) { return d.first == rank; });
  const auto handle = [this, rank, generation = channel_->generation(), living = channel_->living()] {
    shard_server_->lost(rank);
    if (generation <= generation_) return;
    generation_ = generation;
    for (std::uint64_t s = 0; s < layout_->owner.size(); s++) {
      int& owner = layout_->owner[s];
      if (owner != rank) continue;
      owner = layout_->successor(rank, living);
      if (owner == this->rank()) shard_server_->take_over(s);
      worker_->owner_changed(s);
    }
  };
  ready_ ? handle() : defer(nobody, handle);
  if (coordinator_) coordinator_->lost(rank, now());
  rejoin();
}
void ServerNode::returned(int rank) {
  const auto handle = [this, rank, generation = channel_->generation()] {
    shard_server_->returned(rank);
    generation_ = std::max(generation_, generation);
  };
  ready_ ? handle() : defer(nobody, handle);
  if (coordinator_) coordinator_->returned(rank);
  rejoin();
}
// This rank has rejoined, and rank 0 has sent the owners of the shards in a generation. Once this rank's channel has
// reported that generation, it can reach the owners; later losses change the owners. The shards that it owns itself
// belonged to lost ranks and were assigned to it meanwhile. It has no copies, and finally reports that to all owners: a
// fail-over waits for this report.
void ServerNode::rejoin() {
  if (!owners_ || channel_->generation() < owners_->first) return;
  std::tie(generation_, layout_->owner) = *std::exchange(owners_, {});
  for (std::uint64_t s = 0; s < layout_->owner.size(); s++)
    if (layout_->owner[s] == rank()) shard_server_->take_over(s);
  ready();
}

// ---- received messages ----------------------------------------------------------------------------------------------
// The memory for the bytes of a push or an answer. Nothing for other messages, for messages that arrive before this
// rank is ready, and for messages that are no longer expected.
std::optional<std::span<std::byte>> ServerNode::place(int from, const MessageHeader& header, std::size_t bytes) {
  const Message message = unpacked(header);
  if (bytes == 0 || is_early(from, message)) return {};
  if (const auto* m = std::get_if<message::Push>(&message)) return shard_server_->place(from, *m, bytes);
  if (const auto* m = std::get_if<message::Answer>(&message)) return worker_->place(*m, bytes);
  return {};
}

// shared: the bytes are the sender's memory; otherwise they are where place() said, or valid only during the call.
void ServerNode::arrived(int from, const MessageHeader& header, std::span<std::byte> bytes, bool shared) {
  const Message message = unpacked(header);
  if (!is_early(from, message)) return handle(from, message, bytes, shared);
  std::vector<std::byte> copy;
  if (!shared) copy.assign(bytes.begin(), bytes.end());
  defer(from, [this, from, header, bytes, shared, copy = std::move(copy)]() mutable {
    arrived(from, header, shared ? bytes : copy, shared);
  });
}

// A message about a shard waits until this rank is ready, a request until it serves the shard. Also checks that the
// shard exists, and that the sender of a request is a worker.
bool ServerNode::is_early(int from, const Message& message) const {
  using namespace message;
  return std::visit(
      [&]<class M>(const M& m) {
        if constexpr (requires { m.shard; }) {
          if (!ready_) return true;
          constexpr bool of_worker = std::is_same_v<M, Push> || std::is_same_v<M, Pull> || std::is_same_v<M, Idle>;
          require(m.shard < layout_->owner.size() && (!of_worker || from < workers()), channel_->where(from),
                  " sends what is no message");
          bool request = of_worker || std::is_same_v<M, VelocityWanted>;
          if constexpr (std::is_same_v<M, Push>) request = m.last;
          return request && !shard_server_->serves(m.shard);
        }
        return false;
      },
      message);
}

Coordinator& ServerNode::coordinator(int from) {
  require(coordinator_ != nullptr, channel_->where(from), " takes ", where(), " for rank 0");
  return *coordinator_;
}

void ServerNode::handle(int from, const Message& message, std::span<std::byte> bytes, bool shared) {
  using namespace message;
  std::visit(
      Overloaded{[&](const Push& m) { shard_server_->push(from, m, bytes, shared); },
                 [&](const Pull& m) { shard_server_->pull(from, m); },
                 [&](const Idle& m) { shard_server_->idle(from, m); },
                 [&](const VelocityWanted& m) { shard_server_->velocity_wanted(from, m.shard); },
                 [&](const Snapshot& m) { shard_server_->snapshot(m, bytes); },
                 [&](const Offer& m) { shard_server_->offered(from, m); },
                 [&](const Copy& m) {
                   shard_server_->copied(from, m, bytes);
                   handle_deferred();  // requests for this shard may be among them
                 },

                 [&](const Answer& m) { answered(m, bytes); },
                 [&](const Velocity& m) {
                   if (worker_->velocity_arrived(m, bytes)) change([&] { velocity_here_ = true; });
                 },
                 [&](const CopyWanted& m) { worker_->copy_wanted(from, m.shard); },

                 [&](const Say& m) { coordinator(from).says(from, m.gathering, text_of(bytes)); },
                 [&](const Want& m) { coordinator(from).wants(from, m.request); },
                 [&](const Done& m) { done(from, m); },
                 [&](const StopAll&) { coordinator(from).stop(); },
                 [&](const Leaves&) { coordinator(from).leaves(from); },
                 [&](const Bye&) { coordinator(from).says_bye(from); },
                 [&](const WaitsFor&) { coordinator(from).waits_for(from, text_of(bytes), now()); },
                 [&](const AskOwners&) {
                   const auto reply = [this, from] { send(*channel_, from, Owners{generation_}, layout_->owner); };
                   ready_ ? reply() : defer(from, reply);
                 },

                 [&](const Heard& m) { change([&] { gathered_[m.gathering] = unbundle(text_of(bytes)); }); },
                 [&](const Owners& m) {
                   owners_ = {m.generation, numbers_in<int>(bytes)};
                   require(owners_->second.size() == layout_->owner.size(), "rank 0 does not train the same model");
                   rejoin();
                 },
                 [&](const LeaseIs& m) {
                   if (!worker_->awaits(m)) return;
                   change([&] {
                     leases_done_ = std::max(leases_done_.load(), m.leases_done);
                     if (m.count > 0) next_lease_ = m;
                   });
                 },
                 [&](const Over& m) {
                   report_refusals();
                   change([&] {
                     over_ = true;
                     leases_done_ = std::max(leases_done_.load(), m.leases_done);
                   });
                 },
                 [&](const End&) { change([&] { ended_ = true; }); }},
      message);
}

Measures ServerNode::Counts::measures() const {
  Measures all{{"sent_bytes", double(bytes)},
               {"early_bytes", double(early_bytes)},
               {"exchanges", double(exchanges)},
               {"refused", double(refused)},
               {"dropped", double(dropped)},
               {"exposed_seconds", waited},
               {"shard_version", double(shard.version)}};
  if (taken_over) all.push_back({"adopted_shards", double(taken_over)});
  for (auto& m : measures_of_delays(shard)) all.push_back(std::move(m));
  return all;
}

}  // namespace tandem
