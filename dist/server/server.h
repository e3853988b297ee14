// The parameter server. The flat vector is divided evenly over the memories of all servers, by elements and not by
// tensors, so that all servers have the same load. The CPU of each server updates its shard. Workers push a gradient
// and receive the weights: push and pull are one exchange, and an answer confirms that the push was applied.
//
// A server node is one rank: a server, a worker, or both. Its one thread, the member's, sends and receives the
// messages, passes each to the object that handles it, and applies the pushes. The training thread calls the public
// functions, which post commands to the member's thread and wait for their results. So its evaluation never delays a
// shard.
//
//   ServerNode node(std::move(channel));
//   node.begin(weights, statistics, scales, options, leases);
//   node.pull(weights, statistics);                        // rank 0's, the same on all ranks
//   while (auto lease = node.lease()) {                    // the next batch; with bsp it is requested already
//     …
//     node.push_part(gradients, range);                    // optional: this range is final already
//     node.push(gradients, statistics, samples, score);    // returns at once: keep the data unchanged until pull()
//     node.pull(weights, statistics);                      // the weights after it
//   }
//   node.finish(weights, statistics);                      // the last weights, the same on all ranks
//
// A gradient is staged until all parts of a shard's range have arrived and push() was called. Then it is applied as a
// whole. An answer contains one version of a shard. Ranks of one host read gradients in place and write answers in
// place.
//
// When a rank is lost, the others continue. Its leases are drawn again. Its shard moves to the next server, which asks
// all ranks for the newest copy that any of them received. Unanswered pushes are sent again; the table that belongs to
// the copy shows whether the copy already contains them. So a push that was confirmed to a live worker is applied
// exactly once. The rule's vectors (velocities) come from a snapshot that owners send to their successors every few
// seconds, in at most a tenth of the time. Later changes of them are lost.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dist/job/frames.h"
#include "dist/job/membership.h"
#include "dist/server/channel.h"
#include "dist/server/coordinator.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "dist/server/shard_server.h"
#include "dist/server/work_leases.h"
#include "dist/server/worker.h"
#include "layers/train/strategy.h"

namespace tandem {

class ServerNode {
 public:
  struct Counts {
    ShardCounts shard;  // of the first shard that this rank holds; empty if it holds none
    // Bytes sent; exchanges of this worker; exchanges with a gradient that was not finite; with one that was too late
    std::int64_t bytes = 0, exchanges = 0, refused = 0, dropped = 0;
    std::int64_t early_bytes = 0;  // sent by push_part()
    double waited = 0;             // seconds that this worker waited for answers and leases
    std::int64_t taken_over = 0;   // shards taken over from lost ranks

    // By name, including the histogram of delays.
    Measures measures() const {
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
  };

  // deadline: seconds after which it is an error that all ranks wait for each other; a rank waits without limit for a
  // rank that is alive and works. user: called at rank 0 by the member's thread with messages for the user: lost and
  // rejoined ranks, ranks whose gradients are refused, and ranks for which the others have waited `patience` seconds.
  using Notify = std::function<void(const std::string&)>;
  explicit ServerNode(std::unique_ptr<Channel> channel, double deadline = 300, Notify user = {}, double patience = 30)
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
  ~ServerNode() {
    locked([&] { end_ = true; });
    channel_->wake();
    thread_.join();
  }
  int rank() const { return channel_->rank(); }
  int size() const { return channel_->size(); }
  std::string where() const { return channel_->where(rank()); }
  bool trains() const { return rank() < workers(); }  // after begin(): this rank is a worker
  int workers() const { return layout_ ? layout_->workers() : size(); }

  // Zeroed memory. Gradients in it are pushed to ranks of this host without a copy.
  std::shared_ptr<void> memory(std::size_t bytes) { return channel_->share(bytes); }
  // Every rank's text, in the order of ranks; empty for lost ranks. All ranks call it.
  std::vector<std::string> gather(const std::string& mine) {
    const std::uint64_t k = ++gatherings_;
    post([this, k, mine] { send(*channel_, 0, message::Say{k}, mine); });
    std::vector<std::string> all;
    wait(
        "what all ranks say", [&] { return gathered_.count(k) > 0; },
        [&] { all = std::move(gathered_.extract(k).mapped()); });
    return all;
  }

  // Vectors in host memory, f32 or f64; training begins with those of rank 0. scales: learning-rate factors, one per 64
  // elements. The member's thread calls learning_rate. Rank 0's leases are used. velocity: at rank 0, the result of
  // velocity(), to resume training; none: zero.
  void begin(Buffer parameters, Buffer buffers, std::vector<float> scales, ServerOptions options, WorkLeases leases,
             Buffer velocity = {}) {
    layout_ =
        std::make_unique<ServerLayout>(std::move(options), size(), parameters.dtype, parameters.count, buffers.count);
    check_snapshots();
    scales.resize(std::size_t(layout_->whole() / 64), 1.f);
    worker_ = std::make_unique<Worker>(*layout_, *channel_);
    shard_server_ = std::make_unique<ShardServer>(*layout_, *channel_, std::move(scales));
    if (rank() == 0) worker_->keep_first(parameters, buffers, velocity);
    post([this, leases]() mutable {
      // A rejoined rank does not know the current owners of the shards.
      if (channel_->incarnation() > 0) return send(*channel_, 0, message::AskOwners{});
      if (coordinator_) {
        coordinator_->begin(workers(), synchronous(), std::move(leases));
        worker_->send_first();
      }
      ready();
    });
    // begin() does not wait for the weights: pull() does.
  }
  // Waits for the next step of this worker. Nothing: the run is over. A rank that only serves stays in this call. It
  // polls asked_to_stop and calls stop() if that is true.
  std::optional<std::int64_t> lease(const std::function<bool()>& asked_to_stop = {}) {
    const double begin = now();
    bool stops = false;
    holds_ = {};
    wait(
        "a lease", [&] { return over_ || (trains() && next_lease_); },
        [&] {
          holds_ = over_ ? std::nullopt : std::exchange(next_lease_, {});
          lease_count_ = next_count_;
        },
        [&] {
          if (!stops && asked_to_stop && (stops = asked_to_stop())) stop();
        });
    waited_ += now() - begin;
    // Requests the next lease now, so that its batch can be prepared meanwhile.
    if (holds_ && !synchronous()) post([this] { worker_->ask_for_lease(); });
    return holds_;
  }
  // Consecutive leases under the number of the last one (WorkLeases).
  std::int64_t lease_count() const { return lease_count_; }
  // The lease that lease() will return, if it is known; does not wait
  std::optional<std::int64_t> next_lease() const {
    return locked([&] { return next_lease_; });
  }
  // The range [begin, end) of the next pushed gradient is final and must stay unchanged until pull(). It is sent now.
  // If the gradient is not pushed, the next call of ask(), push() or finish() discards the range.
  void push_part(Buffer gradient, Range part) {
    post([this, at = gradient.data, part] {
      const std::int64_t before = channel_->bytes_sent();
      worker_->push_part(at, part);
      counts_.early_bytes += channel_->bytes_sent() - before;
    });
  }
  // push_part() is useful: an owner does not reach this rank's memory
  bool pushes_parts() const { return pushes_parts_; }
  // Pushes for the lease that was drawn last. buffers: the running statistics after its batches.
  void push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums) {
    require(gradient.dtype == layout_->dtype && gradient.count == layout_->parameters, "push: a gradient of ",
            gradient.count, " ", name_of(gradient.dtype), ", and the servers have ", layout_->parameters, " ",
            name_of(layout_->dtype));
    require(holds_.has_value(), "push: no lease was drawn for it");
    require(!locked([&] { return std::exchange(waiting_, true); }),
            "push before the answer to the last one: pull() first");
    worker_->keep_buffers(buffers);
    const Worker::Exchange x{
        .gradient = gradient.data, .samples = samples, .lease = *std::exchange(holds_, {}), .sums = sums};
    post([this, x] {
      worker_->start(x);
      pushed_at_ = now();
      if (synchronous()) worker_->ask_for_lease();
    });
  }
  // Requests the weights without a push.
  void ask() {
    wait(
        "the answer to a push", [&] { return !waiting_; }, [&] { waiting_ = true; });
    post([this] { worker_->start({}); });
  }
  // The answer to the last push, to ask() or to begin(). True if all owners took the gradient. False if it was not
  // finite, if with bsp another gradient of the same step was not finite, or if it was too late for an owner (Verdict).
  bool pull(Buffer parameters, Buffer buffers) {
    const double begin = now();
    wait("the answer to a push", [&] { return !waiting_; });
    waited_ += now() - begin;
    worker_->copy_answers(parameters, buffers);
    return locked([&] { return verdict_; }) == Verdict::taken;
  }
  // Stops this worker. Its unfinished leases are given to other workers. The run ends when all workers have stopped.
  void leave() {
    if (!trains()) return;
    post_message(message::Leaves{});
    post([this] { worker_->be_idle(); });
  }
  // Calls leave(), waits for the others, and returns the last weights.
  // It waits for all ranks twice: until no more pushes are applied, so that the weights are the last ones; then until
  // all ranks have received them, because others may receive them from this rank.
  void finish(Buffer parameters, Buffer buffers) {
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
  // After a call threw because rank 0 is lost: true if this is the lowest live worker, as far as this rank knows.
  bool is_first_survivor() const {
    // After a failure the member's thread has ended, and this thread may use the channel.
    if (!locked([&] { return failed_; }) || rank() == 0 || !trains()) return false;
    const std::vector<bool> living = channel_->living();
    return std::find(living.begin() + 1, living.end(), true) - living.begin() >= rank();
  }
  void stop() { post_message(message::StopAll{}); }  // no worker draws more leases; any rank may call it
  bool stopped() const { return stopped_; }

  // The metric sums of all workers' training since the last call; only rank 0 has them.
  MetricSums trained() {
    return locked([&] { return std::exchange(sums_, {}); });
  }
  // The leases that all workers have done. Rank 0 knows the exact number, other ranks that of their last lease.
  std::int64_t leases_done() const { return leases_done_; }
  // Writes the velocity of all shards at rank 0, for checkpoints (rank 0's, if each worker has its own). False if the
  // rule keeps none.
  bool velocity(Buffer into) {
    const Rule::Keeps keeps = make_rule(layout_->options.how.rule)->keeps();
    if (!keeps.velocity && !keeps.own) return false;
    post([this, into] { worker_->ask_velocity(into.data); });
    wait(
        "the servers' velocity", [&] { return velocity_here_; }, [&] { velocity_here_ = false; });
    return true;
  }
  // Reads them on the member's thread.
  Counts counts() {
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
  // Of this rank's first shard, if recorded.
  std::vector<ShardEvent> events() {
    std::vector<ShardEvent> all;
    read([&] {
      if (const ShardService* first = shard_server_->first()) all = first->events();
    });
    return all;
  }

 private:
  struct Waits {
    std::string what = {};  // empty: the training thread works
    double since = 0;
  };

  // ---- between the threads ------------------------------------------------------------------------------------------
  // With bsp the leases of a step are assigned together: workers without a lease would wait for one that held an extra
  // lease.
  bool synchronous() const { return layout_->options.how.kind == Asynchrony::Kind::bsp; }
  bool quorum() const { return layout_->options.how.kind == Asynchrony::Kind::quorum; }
  // Checks the memory that the snapshots will need, before any of it is allocated.
  void check_snapshots() const {
    const ServerOptions& o = layout_->options;
    const double bytes = double(layout_->snapshot_bytes()), need = double(layout_->snapshot_memory());
    if (o.memory > 0 && need > double(o.memory))
      refuse(where(), ": snapshots of what ", o.how.rule, " keeps of ", workers(), " workers need ",
             readable_bytes(need), ", and there are ", readable_bytes(double(o.memory)),
             ". Choose a rule that keeps less (asgd-m has one velocity, asgd none), start fewer "
             "workers, or do without: snapshots=0, and the velocities of a lost rank are lost");
    if (rank() == 0 && notify_ && bytes > 0)
      notify_("every " + digits(o.snapshots, 3) + " s a rank sends its successor a snapshot of " +
              readable_bytes(bytes) + ", " + readable_bytes(bytes / o.snapshots) + "/s; they take " +
              readable_bytes(need) + " of memory on each");
  }
  void post(std::function<void()> command) {
    locked([&] { commands_.push_back(std::move(command)); });
    channel_->wake();
  }
  template <class M>
  void post_message(const M& m) {
    post([this, m] { send(*channel_, 0, m); });
  }
  // Runs f on the member's thread, or on this thread if the member's thread has ended.
  void read(const std::function<void()>& f) {
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
  void wait(
      const char* what, const std::function<bool()>& done, const std::function<void()>& then = [] {},
      const std::function<void()>& meanwhile = {}) {
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
  template <class F>
  std::invoke_result_t<const F&> locked(const F& f) const {
    std::lock_guard lock(mutex_);
    return f();
  }
  void change(const std::function<void()>& f) {
    locked(f);
    changed_.notify_all();
  }

  // ---- the member's thread ------------------------------------------------------------------------------------------
  void run() {
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
  double look_around() {  // returns the seconds until the next call
    const double seldom = std::min({0.5, deadline_ / 4, patience_ / 4});
    report_waiting();
    if (coordinator_) look_for_standstill();
    const double every = ready_ ? layout_->options.snapshots : 0;
    if (every <= 0 || over_received_) return seldom;
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
  // Only until the run is over: after that it is normal that ranks leave.
  void notify(const std::string& what) const {
    if (coordinator_ && notify_ && !over_received_) notify_(what);
  }
  // ServerOptions::data_of; empty: none of its own
  std::string data_of(int rank, const std::string& before) const {
    const bool parts = ready_ && layout_->options.data_of && rank < workers();
    return parts ? before + layout_->options.data_of(rank) : "";
  }
  void report_refusals() const {
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
  // Reports to rank 0 when this rank's training thread has waited from one look to the next, and when it no longer
  // waits.
  void report_waiting(const std::string& at_the_end = {}) {
    const Waits w = locked([&] { return waits_; });
    const bool still = !w.what.empty() && w.since < std::exchange(looked_at_, now());
    const std::string text = still ? w.what + (ready_ ? worker_->missing() : "") : at_the_end;
    if (text == reported_wait_.what && (text.empty() || w.since == reported_wait_.since)) return;
    reported_wait_ = {text, w.since};
    send(*channel_, 0, message::WaitsFor{}, text);
  }
  // At rank 0. A rank that works has no time limit. If no rank works, no progress is possible.
  void look_for_standstill() {
    const Coordinator::Waiting w = coordinator_->waiting();
    const double for_seconds = now() - w.since;
    if (!w.waits.empty() && w.works.empty() && for_seconds > deadline_)
      channel_->fail(-1, "for " + digits(deadline_, 6) + " s every rank has waited: " + w.waits);
    const bool stands_still = !w.waits.empty() && !w.works.empty() && for_seconds > patience_;
    if (stands_still && !warned_ && notify_)
      notify_("no progress for " + digits(patience_, 6) + " s: " + w.works + " keeps the others waiting: " + w.waits);
    warned_ = stands_still;
  }

  // The memory for the bytes of a message. Nothing for texts and copies, for messages that arrive before this rank is
  // ready, and for messages that are no longer expected.
  std::optional<std::span<std::byte>> place(int from, const MessageHeader& header, std::size_t bytes) {
    const Message message = unpacked(header);
    if (bytes == 0 || is_early(from, message)) return {};
    using Place = std::optional<std::span<std::byte>>;
    return std::visit(Overloaded{[&](const message::Push& m) { return shard_server_->place(from, m, bytes); },
                                 [&](const message::Answer& m) { return worker_->place(m, bytes); },
                                 [&](const message::Velocity& m) { return worker_->place(m, bytes); },
                                 [](const auto&) { return Place(); }},
                      message);
  }
  // shared: the bytes are the sender's memory; otherwise they are where place() said, or valid only during the call.
  void arrived(int from, const MessageHeader& header, std::span<std::byte> bytes, bool shared) {
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
  bool is_early(int from, const Message& message) const {
    using namespace message;
    return std::visit(
        [&]<class M>(const M& m) {
          if constexpr (AboutAShard<M>) {
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
  void handle(int from, const Message& message, std::span<std::byte> bytes, bool shared) {
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
                     handle_deferred();  // of this shard
                   },

                   [&](const Answer& m) { answered(m, bytes); },
                   [&](const Velocity& m) {
                     if (worker_->velocity_arrived(m)) change([&] { velocity_here_ = true; });
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
                       if (m.count == 0) return;
                       next_lease_ = m.lease;
                       next_count_ = m.count;
                     });
                   },
                   [&](const Over& m) {
                     report_refusals();
                     over_received_ = true;
                     change([&] {
                       over_ = true;
                       stopped_ = m.stopped;
                       leases_done_ = std::max(leases_done_.load(), m.leases_done);
                     });
                   },
                   [&](const End&) { change([&] { ended_ = true; }); }},
        message);
  }
  Coordinator& coordinator(int from) {
    require(coordinator_ != nullptr, channel_->where(from), " takes ", where(), " for rank 0");
    return *coordinator_;
  }
  void defer(int from, std::function<void()> f) { deferred_.push_back({from, std::move(f)}); }
  void handle_deferred() {
    for (auto& [from, f] : std::exchange(deferred_, {})) f();
  }

  void ready() {
    ready_ = true;
    next_look_ = 0;
    handle_deferred();
    if (channel_->incarnation() > 0)
      for (std::uint64_t s = 0; s < layout_->owner.size(); s++) worker_->owner_changed(s);
    if (!trains()) return;
    worker_->start({});
    worker_->ask_for_lease();
  }
  void answered(const message::Answer& answer, std::span<std::byte> bytes) {
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
      coordinator_ ? done(rank(), d) : send(*channel_, 0, d);  // called directly: it is counted when pull() returns
    }
    change([&] {
      waiting_ = false;
      verdict_ = x.verdict;
      pushes_parts_ = worker_->sends_parts();
    });
    counts_.exchanges++;
    counts_.refused += x.verdict == Verdict::refused;
    counts_.dropped += x.verdict == Verdict::dropped;
  }
  void done(int worker, const message::Done& d) {
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
  // They wait, like messages about shards, until this rank has begun. The messages of a lost rank are deleted: it may
  // rejoin, and would receive answers to the requests of its previous process.
  void lost(int rank) {
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
  void returned(int rank) {
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
  // belonged to lost ranks and were assigned to it meanwhile. It has no copies, and finally reports that to all owners:
  // a fail-over waits for this report.
  void rejoin() {
    if (!owners_ || channel_->generation() < owners_->first) return;
    std::tie(generation_, layout_->owner) = *std::exchange(owners_, {});
    for (std::uint64_t s = 0; s < layout_->owner.size(); s++)
      if (layout_->owner[s] == rank()) shard_server_->take_over(s);
    ready();
  }

  const double deadline_, patience_;
  const Notify notify_;

  std::unique_ptr<ServerLayout> layout_;  // it and the next three: created by begin()
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<ShardServer> shard_server_;
  std::unique_ptr<Coordinator> coordinator_;  // at rank 0, from the beginning
  std::unique_ptr<Channel> channel_;          // destroyed before the objects whose memory it sends

  // Used by the member's thread.
  Counts counts_;  // exchanges, refused, dropped, early_bytes
  static constexpr int nobody = -1;
  // Messages, losses and returns that are handled later, in their order, with the rank that sent the message.
  std::vector<std::pair<int, std::function<void()>>> deferred_;
  bool ready_ = false;  // the owners of the shards are known, and this rank takes part
  bool over_received_ = false;
  std::map<int, std::int64_t> refused_;  // at rank 0: refused leases, by worker
  std::uint64_t generation_ = 0;         // the membership's generation that layout_->owner belongs to
  std::optional<std::pair<std::uint64_t, std::vector<int>>> owners_;  // as sent by rank 0: generation, owners by shard
  double pushed_at_ = 0;
  double next_look_ = 0, next_snapshot_ = 0, snapshot_began_ = 0;
  Waits reported_wait_;
  double looked_at_ = 0;  // when the training thread was last found waiting
  bool warned_ = false;   // of the current standstill

  // Used by the training thread.
  std::optional<std::int64_t> holds_;  // a lease
  std::int64_t lease_count_ = 1;
  std::uint64_t gatherings_ = 0;
  double waited_ = 0;  // seconds

  // Used by both threads.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;                  // for the member's thread
  std::map<std::uint64_t, std::vector<std::string>> gathered_;  // by gathering
  std::optional<std::int64_t> next_lease_;
  std::int64_t next_count_ = 1;
  std::atomic<bool> pushes_parts_{false};  // Worker::sends_parts(), at the last answer
  bool waiting_ = true;                    // for an answer; begin() requests the first
  Verdict verdict_ = Verdict::taken;       // of the last exchange that was answered
  bool velocity_here_ = false;
  bool over_ = false, ended_ = false;  // as reported by rank 0, and the next two
  std::atomic<bool> stopped_{false};
  std::atomic<std::int64_t> leases_done_{0};
  bool end_ = false;  // this object is being destroyed
  MetricSums sums_;
  Waits waits_;
  std::exception_ptr failed_;
  std::thread thread_;  // the last member: the thread uses the others
};

}  // namespace tandem
