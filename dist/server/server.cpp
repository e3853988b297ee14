#include "dist/server/server.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/text.h"
#include "dist/server/coordinator.h"
#include "dist/server/deferred_queue.h"
#include "dist/server/fail_over.h"
#include "dist/server/send_queue.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "dist/server/shard_server.h"
#include "dist/server/worker.h"

namespace tandem {
namespace {

std::string shown(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", v);
  return text;
}
std::string text_of(const std::vector<std::byte>& message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}
template <class T>
std::vector<T> numbers_in(const std::vector<std::byte>& message) {
  std::vector<T> all(message.size() / sizeof(T));
  if (!all.empty()) std::memcpy(all.data(), message.data(), all.size() * sizeof(T));
  return all;
}

}  // namespace

// Two threads. The training thread calls the first part, which gives commands to the member's thread and waits for
// their results. The member's thread sends and receives messages and passes each to the object that handles it. Both
// threads use the data that `mutex_` protects. begin() creates its objects before it gives the member's thread a
// command that uses them.
class ServerNode::Thread {
 public:
  Thread(std::unique_ptr<Channel> channel, double deadline, Tells tells, double patience)
      : channel_(std::move(channel)),
        deadline_(deadline),
        patience_(patience),
        tells_(std::move(tells)),
        send_queue_(*channel_) {
    if (rank() == 0)
      coordinator_ = std::make_unique<Coordinator>(
          size(), [this](int to, const MessageHeader& n, const std::shared_ptr<const std::string>& text) {
            send_queue_.send(to, n, text ? std::as_bytes(std::span(*text)) : std::span<const std::byte>(), text);
          });
    channel_->on_message(
        {.place = [this](int from, const MessageHeader& n, std::size_t bytes) { return place(from, n, bytes); },
         .arrived = [this](int from, const MessageHeader& n, std::span<std::byte> b) { placed(from, n, b.size()); },
         .unplaced = [this](int from, const MessageHeader& n,
                            std::vector<std::byte> b) { unplaced(from, n, std::move(b)); },
         .lost =
             [this](int rank, const std::string& why) {
               tell_person(why + ": the others go on without it");
               lost(rank);
             },
         .returned =
             [this](int rank, std::uint64_t) {
               tell_person(channel_->where(rank) + " is back");
               returned(rank);
             }});
    thread_ = std::thread([this] { run(); });
  }
  ~Thread() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    channel_->wake();
    thread_.join();
  }

  // ---- the training thread ------------------------------------------------------------------------------------------
  int rank() const { return channel_->rank(); }
  int size() const { return channel_->size(); }
  std::string where() const { return channel_->where(rank()); }
  int workers() const { return layout_ ? layout_->workers() : size(); }
  bool trains() const { return rank() < workers(); }
  // With bsp the leases of a step are drawn together: workers without a lease would wait for one that held an extra
  // lease.
  bool synchronous() const { return layout_->options.how.kind == Asynchrony::Kind::bsp; }
  bool quorum() const { return layout_->options.how.kind == Asynchrony::Kind::quorum; }
  std::shared_ptr<void> memory(std::size_t bytes) { return send_queue_.share(bytes); }

  std::vector<std::string> gather(const std::string& mine) {
    const std::uint64_t k = ++gatherings_;
    tell([this, k, mine] {
      const auto text = std::make_shared<std::string>(mine);
      MessageHeader n = header(What::say);
      n[word::number] = k;
      send_queue_.send(0, n, std::as_bytes(std::span(*text)), text);
    });
    std::vector<std::string> all;
    wait(
        "what all ranks say", [&] { return heard_.count(k) > 0; },
        [&] { all = std::move(heard_.extract(k).mapped()); });
    return all;
  }

  void begin(Buffer parameters, Buffer buffers, std::vector<float> scales, ServerOptions options, WorkLeases leases,
             Buffer velocity) {
    layout_ =
        std::make_unique<ServerLayout>(std::move(options), size(), parameters.dtype, parameters.count, buffers.count);
    check_snapshots();
    scales.resize(std::size_t(layout_->whole() / 64), 1.f);
    worker_ = std::make_unique<Worker>(*layout_, send_queue_);
    shard_server_ = std::make_unique<ShardServer>(*layout_, send_queue_, std::move(scales));
    fail_overs_ = std::make_unique<FailOvers>(*layout_, send_queue_);
    std::vector<std::byte> v;
    if (rank() == 0) {
      worker_->keep_first(parameters, buffers);
      if (velocity.count) {
        v.resize(layout_->bytes(layout_->whole()));
        std::memcpy(v.data(), velocity.data, velocity.bytes());
      }
    }
    tell([this, leases, v = std::move(v)]() mutable {
      // A rejoined rank does not know the current owners of the shards.
      if (send_queue_.incarnation() > 0) return send_queue_.send(0, header(What::ask_owners));
      if (coordinator_) {
        coordinator_->begin(workers(), layout_->options.how.kind == Asynchrony::Kind::bsp, std::move(leases));
        worker_->send_first(std::move(v));
      }
      shard_server_->begin();
      ready();
      exchange();
    });
    // begin() does not wait for the weights: pull() does.
  }

  std::optional<std::int64_t> lease(const std::function<bool()>& asked_to_stop) {
    const double begin = now();
    bool told = false;
    holds_ = {};
    wait(
        "a lease", [&] { return over_ || (trains() && drawn_); },
        [&] { holds_ = over_ ? std::nullopt : std::exchange(drawn_, {}), lease_count_ = drawn_count_; },
        [&] {
          if (asked_to_stop && asked_to_stop() && !std::exchange(told, true)) {
            commands_.push_back([this] { send_queue_.send(0, header(What::stop_all)); });
            channel_->wake();
          }
        });
    waited_ += now() - begin;
    // Requests the next lease now, so that its batch can be made meanwhile.
    if (holds_ && !synchronous()) tell([this] { worker_->ask_for_lease(); });
    return holds_;
  }
  std::int64_t lease_count() const { return lease_count_; }
  std::optional<std::int64_t> next_lease() const {
    std::lock_guard lock(mutex_);
    return drawn_;
  }

  void push_part(Buffer gradient, Range part) {
    tell([this, at = gradient.data, part] {
      const std::int64_t before = send_queue_.bytes_sent();
      worker_->send_early(at, part);
      counts_.early_bytes += send_queue_.bytes_sent() - before;
    });
  }
  bool pushes_parts() const {
    std::lock_guard lock(mutex_);
    return pushes_parts_;
  }

  void push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums) {
    require(gradient.dtype == layout_->dtype && gradient.count == layout_->parameters, "push: a gradient of ",
            gradient.count, " ", name_of(gradient.dtype), ", and the servers have ", layout_->parameters, " ",
            name_of(layout_->dtype));
    require(holds_.has_value(), "push: no lease was drawn for it");
    {
      std::lock_guard lock(mutex_);
      require(!waiting_, "push before the answer to the last one: pull() first");
      waiting_ = true;
    }
    worker_->keep_buffers(buffers);
    const Worker::Exchange x{
        .gradient = gradient.data, .samples = samples, .lease = *std::exchange(holds_, {}), .sums = sums};
    tell([this, x] {
      worker_->start(x);
      pushed_at_ = now();
      if (synchronous()) worker_->ask_for_lease();
    });
  }
  void ask() {
    wait(
        "the answer to a push", [&] { return !waiting_; }, [&] { waiting_ = true; });
    tell([this] { worker_->start({}); });
  }
  bool pull(Buffer parameters, Buffer buffers) {
    const double begin = now();
    Worker::Exchange x;
    wait(
        "the answer to a push", [&] { return !waiting_; }, [&] { x = answered_; });
    waited_ += now() - begin;
    worker_->copy_answer(x.half(), parameters, buffers);
    return x.verdict == Verdict::taken;
  }

  void leave() {
    if (!trains()) return;
    tell([this] {
      send_queue_.send(0, header(What::leaves));
      worker_->be_idle();
    });
  }
  // It waits for all ranks twice: until no more pushes are applied, so that the weights are the last ones; then until
  // all ranks have received them, because others may receive them from this rank.
  void finish(Buffer parameters, Buffer buffers) {
    leave();
    wait("the others to end", [&] { return over_; });
    if (trains()) {
      ask();
      pull(parameters, buffers);
    }
    tell([this] {
      send_queue_.forgive();
      send_queue_.send(0, header(What::bye));
    });
    wait("the others to end", [&] { return ended_; });
  }
  void stop() {
    tell([this] { send_queue_.send(0, header(What::stop_all)); });
  }
  bool is_first_of_what_is_left() const {
    std::lock_guard lock(mutex_);
    // After a failure the member's thread has ended, and this thread may use the channel.
    if (!failed_ || rank() == 0 || !trains()) return false;
    const std::vector<bool> living = channel_->living();
    return std::find(living.begin() + 1, living.end(), true) - living.begin() >= rank();
  }
  bool stopped() const {
    std::lock_guard lock(mutex_);
    return stopped_;
  }
  MetricSums trained() {
    std::lock_guard lock(mutex_);
    return std::exchange(sums_, {});
  }
  std::int64_t leases_done() const {
    std::lock_guard lock(mutex_);
    return leases_done_;
  }
  bool velocity(Buffer into) {
    const Rule::Keeps keeps = make_rule(layout_->options.how.rule)->keeps();
    if (!keeps.velocity && !keeps.own) return false;
    tell([this, into] { worker_->ask_velocity(into.data); });
    wait(
        "the servers' velocity", [&] { return velocity_here_; }, [&] { velocity_here_ = false; });
    return true;
  }
  Counts counts() {
    Counts c;
    ask_thread([&] {
      c = counts_;
      if (const ShardService* first = shard_server_ ? shard_server_->first() : nullptr) c.shard = first->counts();
    });
    c.bytes = send_queue_.bytes_sent();
    c.waited = waited_;
    return c;
  }
  std::vector<ShardEvent> events() {
    std::vector<ShardEvent> all;
    ask_thread([&] {
      if (const ShardService* first = shard_server_->first()) all = first->events();
    });
    return all;
  }

 private:
  // Checks the memory that the snapshots will need, before any of it is allocated.
  void check_snapshots() const {
    const ServerOptions& o = layout_->options;
    const double bytes = double(layout_->snapshot_bytes()), need = double(layout_->snapshot_memory());
    if (o.memory > 0 && need > double(o.memory))
      refuse(where(), ": snapshots of what ", o.how.rule, " keeps of ", workers(), " workers need ",
             readable_bytes(need), ", and there are ", readable_bytes(double(o.memory)),
             ". Choose a rule that keeps less (asgd-m has one velocity, asgd none), start fewer "
             "workers, or do without: TANDEM_SNAPSHOTS=0, and the velocities of a lost rank are lost");
    if (rank() == 0 && tells_ && bytes > 0)
      tells_("every " + shown(o.snapshots) + " s a rank sends its successor a snapshot of " + readable_bytes(bytes) +
             ", " + readable_bytes(bytes / o.snapshots) + "/s; they take " + readable_bytes(need) +
             " of memory on each");
  }

  // ---- between the threads ------------------------------------------------------------------------------------------
  void tell(std::function<void()> command) {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    channel_->wake();
  }
  // Runs `question` on the member's thread, or on this thread if the member's thread has ended.
  void ask_thread(const std::function<void()>& question) {
    bool answered = false;
    tell([&] { question(), change([&] { answered = true; }); });
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return answered || failed_; });
    }
    if (!answered) question();
  }
  // Waits without limit while other ranks live and one of them works. Rank 0 detects when that is not so
  // (look_for_standstill()). `meanwhile` is called periodically.
  void wait(
      const char* what, const std::function<bool()>& done, const std::function<void()>& then = [] {},
      const std::function<void()>& meanwhile = {}) {
    std::unique_lock lock(mutex_);
    const auto ready = [&] { return done() || failed_; };
    if (!ready()) waits_ = {what, waits_.number + 1};
    while (!changed_.wait_for(lock, std::chrono::milliseconds(100), ready))
      if (meanwhile) meanwhile();
    waits_.what.clear();
    if (failed_) std::rethrow_exception(failed_);
    then();
  }
  template <class F>
  void change(const F& f) {
    std::lock_guard lock(mutex_);
    f();
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
          if (end_ && leaves_at == 0) leaves_at = now() + (ended_ ? patience : 0), ends = ended_;
          if (end_ && !ends && (send_queue_.empty() || now() >= leaves_at)) return;
          commands.swap(commands_);
        }
        for (auto& c : commands) c();
        if (ends) tell_what_it_waits_for("nothing any more: it has ended");
        const bool some = channel_->progress();
        send_queue_.let_go();
        if (ready_)
          for (FailOvers::TakenOver& a : fail_overs_->finished()) shard_server_->take_over(std::move(a));
        if (ready_ && quorum()) shard_server_->look_at_clock(), worker_->tell_blocked(now());
        if (now() >= next_look_) next_look_ = now() + look_around();
        if (!some) channel_->rest();
      }
    } catch (...) {
      change([&] { failed_ = std::current_exception(); });
    }
  }

  // Only until the run is over: after that it is normal that ranks leave.
  void tell_person(const std::string& what) const {
    if (coordinator_ && tells_ && !over_heard_) tells_(what);
  }
  void tell_refusals() const {
    std::string all;
    std::int64_t sum = 0;
    for (const auto& [worker, count] : refused_) {
      all += (all.empty() ? "" : ", ") + channel_->where(worker) + " " + std::to_string(count);
      sum += count;
    }
    if (sum > 0)
      tell_person(std::to_string(sum) + " of " + std::to_string(coordinator_->leases_done()) +
                  " gradients were not finite, and refused (" + all + "). A smaller --lr usually helps");
  }

  double look_around() {  // returns the seconds until the next call
    const double seldom = std::min({0.5, deadline_ / 4, patience_ / 4});
    tell_what_it_waits_for();
    if (coordinator_) look_for_standstill();
    if (ready_) shard_server_->look(patience_);
    const double every = ready_ ? layout_->options.snapshots : 0;
    if (every <= 0 || over_heard_) return seldom;
    if (snapshot_began_ > 0 && !shard_server_->snapshot_under_way()) {  // it takes at most 1/10 of the link's time
      next_snapshot_ = std::max(next_snapshot_, now() + 9 * (now() - snapshot_began_));
      snapshot_began_ = 0;
    }
    if (now() >= next_snapshot_ && snapshot_began_ == 0 && std::exchange(next_snapshot_, now() + every) > 0) {
      shard_server_->send_snapshots(layout_->successor(rank(), send_queue_.living()));
      snapshot_began_ = now();
    }
    return std::min(seldom, every);
  }
  // Reports to rank 0 when this rank's training thread has waited from one look to the next, and when it no longer
  // waits.
  void tell_what_it_waits_for(const std::string& for_good = {}) {
    Waits w;
    {
      std::lock_guard lock(mutex_);
      w = waits_;
    }
    const bool still = !w.what.empty() && w.number == looked_at_wait_;
    looked_at_wait_ = w.number;
    const auto text = std::make_shared<std::string>(still ? w.what + (ready_ ? worker_->missing() : "") : for_good);
    if (*text == told_wait_.what && (text->empty() || w.number == told_wait_.number)) return;
    told_wait_ = {*text, w.number};
    send_queue_.send(0, header(What::waits_for), std::as_bytes(std::span(*text)), text);
  }
  // At rank 0. A rank that works has no time limit. If no rank works, no progress is possible.
  void look_for_standstill() {
    const auto w = coordinator_->waiting([this](int r) { return channel_->where(r); });
    const double for_seconds = now() - w.since;
    char text[64];
    if (!w.waits.empty() && w.works.empty() && for_seconds > deadline_) {
      std::snprintf(text, sizeof text, "for %g s every rank has waited: ", deadline_);
      channel_->fail(-1, text + w.waits);
    }
    const bool stands_still = !w.waits.empty() && !w.works.empty() && for_seconds > patience_;
    if (!stands_still || std::exchange(warned_, stands_still)) return void(warned_ = stands_still);
    std::snprintf(text, sizeof text, "no progress for %g s: ", patience_);
    if (tells_) tells_(text + w.works + " keeps the others waiting: " + w.waits);
  }

  void exchange() {
    if (!trains()) return;
    worker_->start({});
    worker_->ask_for_lease();
  }
  void ready() {
    ready_ = true;
    next_look_ = 0;
    deferred_.handle();
  }
  // Messages and losses that concern shards wait until this rank has begun.
  void when_ready(int from, std::function<void()> f) {
    if (ready_) return f();
    deferred_.keep(from, std::move(f));
  }

  void answered() {
    const Worker::Exchange& x = worker_->exchange();
    std::array<double, 4> sums{};
    if (x.verdict == Verdict::taken) sums = {x.sums.loss, x.sums.correct, x.sums.samples};
    if (quorum()) sums[3] = now() - pushed_at_;
    if (x.gradient && coordinator_) {
      done(rank(), x.lease, sums, x.verdict);  // called directly: it is counted when pull() returns
    } else if (x.gradient) {
      MessageHeader n = header(What::done);
      n[word::number] = std::uint64_t(x.lease);
      n[word::verdict] = std::uint64_t(x.verdict);
      const auto keep = std::make_shared<std::array<double, 4>>(sums);
      send_queue_.send(0, n, std::as_bytes(std::span(*keep)), keep);
    }
    change([&] {
      waiting_ = false;
      answered_ = x;
      pushes_parts_ = worker_->sends_parts();
    });
    counts_.exchanges++, counts_.refused += x.verdict == Verdict::refused,
        counts_.dropped += x.verdict == Verdict::dropped;
  }
  void done(int worker, std::int64_t lease, const std::array<double, 4>& sums, Verdict verdict) {
    if (verdict == Verdict::dropped) return coordinator_->again(lease, now());
    if (!coordinator_->done(lease, now(), sums[3])) return;
    if (const double away = coordinator_->back_after(worker, now()); away > 0)
      tell_person(channel_->where(worker) + " works again, " + shown(away) + " s after it was lost");
    if (verdict == Verdict::refused && refused_[worker]++ == 0)
      tell_person("a gradient of " + channel_->where(worker) +
                  " is not finite: it is refused, as all that are so will be");
    change([&] {
      sums_.loss += sums[0];
      sums_.correct += sums[1];
      sums_.samples += sums[2];
      leases_done_ = coordinator_->leases_done();
    });
  }

  // ---- losses -------------------------------------------------------------------------------------------------------
  void lost(int rank) {
    deferred_.forget(rank);
    when_ready(DeferredQueue::nobody, [this, rank, generation = channel_->generation(), living = send_queue_.living()] {
      shard_server_->lost(rank);
      fail_overs_->lost(rank);
      if (generation <= generation_) return;
      generation_ = generation;
      for (int s = 0; s < layout_->shards(); s++)
        if (layout_->owner[std::size_t(s)] == rank) change_owner(s, layout_->successor(rank, living));
    });
    if (coordinator_) coordinator_->lost(rank, now());
    begin_again();
  }
  void change_owner(int s, int to) {
    layout_->owner[std::size_t(s)] = to;
    if (to == rank()) take_over(s);
    worker_->owner_changed(s);
  }
  void take_over(int s) {
    fail_overs_->begin(s);
    counts_.taken_over++;
  }
  void returned(int rank) {
    when_ready(DeferredQueue::nobody, [this, rank, generation = channel_->generation()] {
      shard_server_->returned(rank);
      generation_ = std::max(generation_, generation);
    });
    if (coordinator_) coordinator_->returned(rank);
    begin_again();
  }

  // ---- received messages --------------------------------------------------------------------------------------------
  std::size_t element(const MessageHeader& n) const {
    return size_of(what_of(n) == What::push_part ? layout_->pushed_as(int(n[word::shard])) : layout_->dtype);
  }
  // Checks that a message about a shard fits this rank's layout, and that its sender may send it.
  void check(int from, const MessageHeader& n, std::size_t bytes) const {
    const bool of_workers = n[word::what] <= std::uint64_t(What::idle);
    if (n[word::what] == 0 || n[word::shard] >= std::uint64_t(layout_->shards()) || (of_workers && from >= workers()))
      fail(channel_->where(from), " sends what is no message");
    const What what = what_of(n);
    const auto length = std::uint64_t(layout_->length(int(n[word::shard])));
    const bool table = what == What::answer_end || what == What::answer_here || what == What::offer;
    const bool fits = table ? bytes == std::size_t(workers()) * sizeof(ExchangeId)
                            : n[word::first] <= length && bytes / element(n) <= length - n[word::first];
    if (!fits) fail(channel_->where(from), " does not train the same model");
  }

  // The memory for the bytes of a message. Nothing for texts and tables, for messages that arrive before this rank is
  // ready, and for messages that are no longer expected.
  std::optional<std::span<std::byte>> place(int from, const MessageHeader& n, std::size_t bytes) {
    if (bytes == 0) return std::span<std::byte>();
    if (!about_a_shard(n) || !ready_) return {};
    check(from, n, bytes);
    switch (what_of(n)) {
      case What::push_part:
      case What::first_part: return shard_server_->place(from, n, bytes);
      case What::answer_part:
      case What::velocity_part: return worker_->place(n, bytes);
      case What::copy_part:
      case What::snapshot_part: return fail_overs_->place(from, n, bytes);
      default: return {};
    }
  }

  // A message without bytes, or a part of a vector that is in its place.
  void placed(int from, const MessageHeader& n, std::size_t bytes) {
    if (!about_a_shard(n) || !ready_) return unplaced(from, n, {});
    check(from, n, bytes);
    const int s = int(n[word::shard]);
    const auto numel = std::int64_t(bytes / element(n));
    switch (what_of(n)) {
      case What::push_part: return shard_server_->push_part(from, n, numel);
      case What::push: return shard_server_->push(from, n);
      case What::push_here:
      case What::pull: return shard_server_->request(from, n);
      case What::blocked:
      case What::idle: return shard_server_->idle(from, n);
      case What::first_part: return shard_server_->first_part(n, numel);
      case What::velocity_wanted: return shard_server_->velocity_wanted(from, s);

      case What::answer_part: return worker_->answer_part(n, numel) ? answered() : void();
      case What::velocity_part:
        return worker_->velocity_part(s, numel) ? change([&] { velocity_here_ = true; }) : void();
      case What::copy_wanted: return worker_->copy_wanted(from, s);
      case What::copy_part: return fail_overs_->copy_part(from, n, numel);
      case What::snapshot_part: return fail_overs_->snapshot_part(n, numel);
      default: return;
    }
  }

  void unplaced(int from, const MessageHeader& n, std::vector<std::byte> message) {
    if (!about_a_shard(n)) return arrived(from, n, message);
    if (!ready_)
      return deferred_.keep(from, [this, from, n, message = std::move(message)] { come_again(from, n, message); });
    check(from, n, message.size());
    switch (what_of(n)) {
      case What::answer_end:
      case What::answer_here: return worker_->answer_ended(n, numbers_in<ExchangeId>(message)) ? answered() : void();
      case What::offer: return fail_overs_->offered(from, n, numbers_in<ExchangeId>(message));
      case What::push_part:
      case What::first_part: return come_again(from, n, message);  // it began to arrive before this rank was ready
      default: return;
    }
  }
  // A message that had no place when it arrived. A part that still has none is no longer expected, and is dropped.
  void come_again(int from, const MessageHeader& n, const std::vector<std::byte>& message) {
    const auto at = place(from, n, message.size());
    const bool part = what_of(n) == What::push_part || what_of(n) == What::first_part;
    if (!at) return part ? void() : unplaced(from, n, message);
    if (!message.empty()) std::memcpy(at->data(), message.data(), message.size());
    placed(from, n, message.size());
  }

  void arrived(int from, const MessageHeader& n, const std::vector<std::byte>& message) {
    const auto number = std::int64_t(n[word::number]);
    const bool to_rank_0 = n[word::what] < std::uint64_t(What::heard);
    require(!to_rank_0 || coordinator_, channel_->where(from), " takes ", where(), " for rank 0");
    switch (what_of(n)) {
      case What::say: return coordinator_->says(from, n[word::number], text_of(message));
      case What::want: return coordinator_->wants(from, n[word::request]);
      case What::done: {
        const std::vector<double> sums = numbers_in<double>(message);
        require(sums.size() == 4, channel_->where(from), " sends a score of ", sums.size(), " numbers");
        return done(from, number, {sums[0], sums[1], sums[2], sums[3]}, verdict_of(n));
      }
      case What::stop_all: return coordinator_->stop();
      case What::leaves: return coordinator_->leaves(from);
      case What::bye: return coordinator_->says_bye(from);
      case What::waits_for: return coordinator_->waits_for(from, text_of(message), now());
      case What::ask_owners:
        return when_ready(from, [this, from] {
          const auto owners = std::make_shared<std::vector<int>>(layout_->owner);
          MessageHeader n = header(What::owners);
          n[word::number] = generation_;
          send_queue_.send(from, n, std::as_bytes(std::span(*owners)), owners);
        });

      case What::heard: return change([&] { heard_[n[word::number]] = unbundle(text_of(message)); });
      case What::owners:
        owners_ = {n[word::number], numbers_in<int>(message)};
        require(owners_->second.size() == std::size_t(layout_->shards()), "rank 0 does not train the same model");
        return begin_again();
      case What::lease_is: {
        if (!worker_->awaits(n)) return;
        return change([&] {
          leases_done_ = std::max(leases_done_, std::int64_t(n[word::leases_done]));
          if (n[word::number] != word::none) drawn_ = number, drawn_count_ = std::int64_t(n[word::count]);
        });
      }
      case What::over:
        tell_refusals();
        over_heard_ = true;
        return change([&] {
          over_ = true;
          stopped_ = number != 0;
          leases_done_ = std::max(leases_done_, std::int64_t(n[word::leases_done]));
        });
      case What::end: return change([&] { ended_ = true; });
      default: fail(channel_->where(from), " sends what is no message of a parameter server");
    }
  }
  // This rank has rejoined, and rank 0 has sent the owners of the shards in a generation. Once this rank's channel has
  // reported that generation, it can reach the owners; later losses change the owners. The shards that it owns itself
  // belonged to lost ranks and were assigned to it meanwhile. It has no copies, and finally reports that to all owners:
  // a fail-over waits for this report.
  void begin_again() {
    if (!owners_ || channel_->generation() < owners_->first) return;
    const auto [generation, owner] = *std::exchange(owners_, {});
    generation_ = generation;
    layout_->owner = owner;
    for (int s = 0; s < layout_->shards(); s++)
      if (owner[std::size_t(s)] == rank()) take_over(s);
    ready();
    for (int s = 0; s < layout_->shards(); s++) worker_->owner_changed(s);
    exchange();
  }

  const std::unique_ptr<Channel> channel_;
  const double deadline_, patience_;
  const Tells tells_;

  // Created by begin(). `send_queue_` is destroyed before them, because their memory has the data that it sends.
  std::unique_ptr<ServerLayout> layout_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<ShardServer> shard_server_;
  std::unique_ptr<FailOvers> fail_overs_;
  std::unique_ptr<Coordinator> coordinator_;  // at rank 0, from the beginning
  SendQueue send_queue_;

  // Used by the member's thread.
  Counts counts_;           // without `shard`, `bytes` and `waited`
  DeferredQueue deferred_;  // when_ready()
  bool ready_ = false;      // the owners of the shards are known, and this rank takes part
  bool over_heard_ = false;
  std::map<int, std::int64_t> refused_;  // at rank 0: refused leases, by worker
  std::uint64_t generation_ = 0;         // the membership's generation that layout_->owner belongs to
  std::optional<std::pair<std::uint64_t, std::vector<int>>> owners_;  // as sent by rank 0: generation, owners by shard
  double pushed_at_ = 0;
  double next_look_ = 0, next_snapshot_ = 0, snapshot_began_ = 0;
  struct Waits {
    std::string what = {};     // empty: the training thread works
    std::uint64_t number = 0;  // number of the wait
  } told_wait_;
  std::uint64_t looked_at_wait_ = 0;  // the number of the wait at the last look
  bool warned_ = false;               // of the current standstill

  // Used by the training thread.
  std::optional<std::int64_t> holds_;  // a lease
  std::int64_t lease_count_ = 1;
  std::uint64_t gatherings_ = 0;
  double waited_ = 0;  // seconds

  // Used by both threads.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;               // for the member's thread
  std::map<std::uint64_t, std::vector<std::string>> heard_;  // by gathering
  std::optional<std::int64_t> drawn_;                        // the next lease
  std::int64_t drawn_count_ = 1;
  bool pushes_parts_ = false;  // Worker::sends_parts(), at the last answer
  bool waiting_ = true;        // for an answer; begin() requests the first
  Worker::Exchange answered_;  // the last exchange that was answered
  bool velocity_here_ = false;
  bool over_ = false, stopped_ = false, ended_ = false;  // as reported by rank 0
  bool end_ = false;                                     // this object is being destroyed
  std::int64_t leases_done_ = 0;
  MetricSums sums_;
  Waits waits_;
  std::exception_ptr failed_;
  std::thread thread_;  // the last member: the thread uses the others
};

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

Measures measures_of_delays(const ShardCounts& shard) {
  Measures all;
  const auto& delays = shard.delays;
  double pushes = 0, sum = 0;
  for (std::size_t d = 0; d < delays.size(); d++) pushes += double(delays[d]), sum += double(d) * double(delays[d]);
  if (pushes > 0) all.push_back({"mean_delay", sum / pushes}), all.push_back({"participation", shard.participation()});
  for (std::size_t d = 0; d < delays.size();) {  // by one up to 15, then by powers of two
    const std::size_t end = d < 16 ? d + 1 : 2 * d;
    double count = 0;
    for (std::size_t k = d; k < std::min(end, delays.size()); k++) count += double(delays[k]);
    if (count > 0)
      all.push_back({"delay_" + std::to_string(d) + (end > d + 1 ? "_to_" + std::to_string(end - 1) : ""), count});
    d = end;
  }
  return all;
}

ServerNode::ServerNode(std::unique_ptr<Channel> channel, double deadline, Tells tells, double patience)
    : thread_(std::make_unique<Thread>(std::move(channel), deadline, std::move(tells), patience)) {}
ServerNode::~ServerNode() = default;
int ServerNode::rank() const { return thread_->rank(); }
int ServerNode::size() const { return thread_->size(); }
std::string ServerNode::where() const { return thread_->where(); }
bool ServerNode::trains() const { return thread_->trains(); }
int ServerNode::workers() const { return thread_->workers(); }
std::shared_ptr<void> ServerNode::memory(std::size_t bytes) { return thread_->memory(bytes); }
std::vector<std::string> ServerNode::gather(const std::string& mine) { return thread_->gather(mine); }
void ServerNode::begin(Buffer parameters, Buffer buffers, std::vector<float> scales, ServerOptions options,
                       WorkLeases leases, Buffer velocity) {
  thread_->begin(parameters, buffers, std::move(scales), std::move(options), std::move(leases), velocity);
}
std::optional<std::int64_t> ServerNode::lease(const std::function<bool()>& asked_to_stop) {
  return thread_->lease(asked_to_stop);
}
void ServerNode::leave() { thread_->leave(); }
std::int64_t ServerNode::lease_count() const { return thread_->lease_count(); }
std::optional<std::int64_t> ServerNode::next_lease() const { return thread_->next_lease(); }
void ServerNode::push_part(Buffer gradient, Range part) { thread_->push_part(gradient, part); }
bool ServerNode::pushes_parts() const { return thread_->pushes_parts(); }
void ServerNode::push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums) {
  thread_->push(gradient, buffers, samples, sums);
}
bool ServerNode::pull(Buffer parameters, Buffer buffers) { return thread_->pull(parameters, buffers); }
void ServerNode::finish(Buffer parameters, Buffer buffers) { thread_->finish(parameters, buffers); }
void ServerNode::ask() { thread_->ask(); }
void ServerNode::stop() { thread_->stop(); }
bool ServerNode::is_first_of_what_is_left() const { return thread_->is_first_of_what_is_left(); }
bool ServerNode::stopped() const { return thread_->stopped(); }
MetricSums ServerNode::trained() { return thread_->trained(); }
std::int64_t ServerNode::leases_done() const { return thread_->leases_done(); }
bool ServerNode::velocity(Buffer into) { return thread_->velocity(into); }
ServerNode::Counts ServerNode::counts() const { return thread_->counts(); }
std::vector<ShardEvent> ServerNode::events() const { return thread_->events(); }

}  // namespace tandem
