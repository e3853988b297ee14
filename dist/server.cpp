#include "dist/server.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/backend.h"
#include "layers/space.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// A note's words. Which of them a message has stands beside its kind.
enum Word : std::size_t { what, shard_of, first_element, number, samples_of, version_of, block_of, offset_of };
enum What : std::uint64_t {
  // between a worker and the owner of a shard
  push_part = 1,  // shard, first, exchange, samples, landing block: of a gradient
  push_here,      // shard, landing block (version_of), exchange, samples, block and offset of the gradient in the worker's memory
  pull_part,      // shard, exchange: the weights, please
  pull_here,      // shard, exchange, landing block
  answer_part,    // shard, first, exchange, pushes applied, version: of the weights
  answer_end,     // shard, exchange, pushes applied, version, refused; which exchanges are in it, of all workers
  answer_here,    // the same, and the weights are in the landing block
  idle,           // shard: nothing will be pushed for now
  // at the beginning, and when an owner is lost
  first_part,     // shard, first, vector (0: weights, 1: velocity): rank 0's
  offer,          // shard, pushes, version + 1: the copy that this rank has, and which exchanges are in it
  copy_wanted,    // shard
  copy_part,      // shard, first
  snapshot_part,  // shard, first, number of the snapshot, vector
  velocity_wanted, velocity_part,  // shard, first
  // with rank 0
  say, heard,     // number of the gathering: texts
  ask_owners, owners,
  want, ticket_is, // a ticket; its number, how many are done
  done,           // ticket; its score
  stop_all, over, // no more tickets; all are done
  leaves,         // this worker trains no more
  bye, end        // this rank has the last weights; all have
};
constexpr std::uint64_t none = UINT64_MAX;
constexpr int statistics_shard_alignment = 64;

std::int64_t rounded_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// w is the mean of what the workers' batches made of it: each has its share of the difference that its batch made.
class Averaging : public Rule {
 public:
  explicit Averaging(double share) : share_(share) {}
  std::string name() const override { return "average"; }
  Keeps keeps() const override { return {.sent = true}; }
  void push(const RuleVectors<float>& x, std::int64_t n, const Hyper&) const override { run(x, n); }
  void push(const RuleVectors<double>& x, std::int64_t n, const Hyper&) const override { run(x, n); }
  double correction(const RuleVectors<float>&, std::int64_t, const Hyper&) const override { return 0; }

 private:
  template <class T>
  void run(const RuleVectors<T>& x, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; i++)  // alone: what it computed, to the bit
      x.w[i] = share_ == 1 ? x.g[i] + (x.w[i] - x.sent[i]) : x.w[i] + T(share_) * (x.g[i] - x.sent[i]);
  }
  double share_;
};

}  // namespace

std::vector<std::int64_t> shard_cuts(std::int64_t elements, int servers) {
  const std::int64_t blocks = (elements + ParameterSpace::cut - 1) / ParameterSpace::cut;
  std::vector<std::int64_t> cuts;
  for (int s = 0; s <= servers; s++) cuts.push_back(std::min(elements, blocks * s / servers * ParameterSpace::cut));
  return cuts;
}

// All of it but what `mutex_` guards, and what only the training thread uses, is the thread's own.
class Member::Thread {
 public:
  Thread(std::unique_ptr<Channel> channel, double deadline)
      : channel_(std::move(channel)),
        deadline_(deadline),
        rank_(channel_->rank()),
        ranks_(channel_->size()),
        incarnation_(channel_->incarnation()),
        host_(reference_backend(1)) {
    channel_->on_message(
        {.place = [this](int from, const Note& n, std::size_t bytes) { return place(from, n, bytes); },
         .arrived = [this](int from, const Note& n, std::span<std::byte> b) { arrived(from, n, b); },
         .lost = [this](int rank, const std::string& why) { lost(rank, why); },
         .returned = [this](int rank, std::uint64_t) { returned(rank); }});
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

  // ---- the training thread's ------------------------------------------------------------------------------------------
  int rank() const { return rank_; }
  int size() const { return ranks_; }
  std::string where() const { return channel_->where(rank_); }
  int workers() const { return ranks_ - options_.servers; }
  bool trains() const { return rank_ < workers(); }

  std::shared_ptr<void> memory(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto block = channel_->share(bytes);
    blocks_.push_back({static_cast<std::byte*>(block.get()), bytes});
    return block;
  }

  std::vector<std::string> gather(const std::string& mine) {
    const std::uint64_t k = ++gatherings_;
    tell([this, k, mine] {
      auto text = std::make_shared<std::string>(mine);
      send(0, {say, 0, 0, k}, bytes_of(*text), text);
    });
    std::vector<std::string> all;
    wait("what all ranks say", [&] { return heard_.count(k) > 0; }, [&] { all = heard_.at(k); });
    return all;
  }

  void begin(Buffer parameters, Buffer statistics, std::vector<float> scales, ServerOptions options, Tickets tickets,
             Buffer velocity) {
    if (options.servers < 0 || options.servers >= ranks_)
      refuse("--servers ", options.servers, ": there are ", ranks_, " ranks, and one at least must train");
    dtype_ = parameters.dtype, size_ = size_of(dtype_);
    options_ = std::move(options);
    const int holders = options_.servers ? options_.servers : ranks_;
    cuts_ = shard_cuts(parameters.count, holders);
    // The running statistics are one more shard, behind the parameters.
    statistics_ = rounded_up(statistics.count, statistics_shard_alignment);
    if (statistics_) cuts_.push_back(parameters.count + statistics_);
    shards_ = int(cuts_.size()) - 1;
    parameters_ = parameters.count;
    landing_ = memory(2 * std::size_t(cuts_.back()) * size_);
    landing_block_ = blocks_.size() - 1;
    statistics_out_ = memory(std::max<std::size_t>(64, std::size_t(statistics_) * size_));
    if (rank_ == 0) {  // its own copy, before anything was pulled
      copy_in(at(landing_half(0), 0), parameters);
      if (statistics_) copy_in(at(landing_half(0), parameters_), statistics);
    }
    auto velocity_in = std::make_shared<std::vector<std::byte>>();
    if (rank_ == 0 && velocity.count) {
      velocity_in->resize(std::size_t(cuts_.back()) * size_);
      copy_in(velocity_in->data(), velocity);
    }
    tell([this, scales, tickets, velocity_in]() mutable {
      scales.resize(std::size_t(cuts_.back() / 64), 1.f);
      scales_ = std::move(scales);
      rule_ = make_rule(options_.how.rule);
      averaging_ = std::make_unique<Averaging>(options_.how.kind == Asynchrony::Kind::bsp ? 1.0 : 1.0 / workers());
      tickets_ = tickets;
      const auto n = std::size_t(shards_);
      complete_.resize(n), answered_.resize(n), landed_.assign(n, 0), tables_.resize(n), served_.resize(n), first_.resize(n);
      adoptions_.resize(n), early_.resize(n), snapshots_.resize(n), requests_.resize(n);
      for (auto& r : requests_) r.resize(std::size_t(workers()));
      for (auto& t : tables_) t.assign(std::size_t(workers()), 0);
      begun_ = true;
      if (incarnation_ > 0) return send(0, {ask_owners}, {});
      for (int s = 0; s < shards_; s++) owner_.push_back(first_owner(s));
      if (rank_ == 0)
        for (int s = 0; s < shards_; s++) {
          complete_[std::size_t(s)] = {.half = 0, .here = true, .applied = std::vector<ExchangeId>(std::size_t(workers()))};
          send_first(s, landing_half(0), 0, landing_);
          if (!velocity_in->empty() && s < parameter_shards()) send_first(s, velocity_in->data(), 1, velocity_in);
        }
      begin_exchanging();
    });
    // The strategy goes on when it pulls; here nobody waits.
  }

  std::optional<std::int64_t> ticket(const std::function<bool()>& asked_to_stop) {
    const double begin = now();
    std::optional<std::int64_t> t;
    bool told = false;
    wait(
        "a ticket", [&] { return over_ || (trains() && drawn_); },
        [&] { t = over_ ? std::nullopt : std::exchange(drawn_, {}); }, [&] {
          if (asked_to_stop && asked_to_stop() && !std::exchange(told, true))
            commands_.push_back([this] { send(0, {stop_all}, {}); }), channel_->wake();
        });
    waited_ += now() - begin;
    holds_ = t;
    return t;
  }

  void push(Buffer gradient, Buffer statistics, std::int64_t samples, const Score& score) {
    require(gradient.dtype == dtype_ && gradient.count == parameters_, "push: a gradient of ", gradient.count, " ",
            name_of(gradient.dtype), ", and the servers have ", parameters_, " ", name_of(dtype_));
    require(holds_.has_value(), "push: no ticket was drawn for it");
    {
      std::lock_guard lock(mutex_);
      require(!waiting_, "push before the answer to the last one: pull() first");
      waiting_ = true;
    }
    copy_in(static_cast<std::byte*>(statistics_out_.get()), statistics);
    const Exchange x{.gradient = static_cast<const std::byte*>(gradient.data),
                     .samples = samples,
                     .ticket = *std::exchange(holds_, {}),
                     .score = score};
    tell([this, x] {
      start(x);
      ask_for_ticket();
    });
  }

  bool pull(Buffer parameters, Buffer statistics) {
    const double begin = now();
    bool taken = true;
    int half = 0;
    wait("the answer to a push", [&] { return !waiting_; }, [&] { half = answer_half_, taken = answer_taken_; });
    waited_ += now() - begin;
    copy_out(parameters, at(landing_half(half), 0));
    if (statistics_) copy_out(statistics, at(landing_half(half), parameters_));
    return taken;
  }

  void leave() {
    if (!trains()) return;
    tell([this] {
      send(0, {leaves}, {});
      tell_idle();
    });
  }
  void finish(Buffer parameters, Buffer statistics) {
    leave();
    wait("the others to end", [&] { return over_; }, [] {}, [] {});
    if (trains()) wait("the answer to a push", [&] { return !waiting_; }, [&] { waiting_ = true; });
    tell([this] {
      if (trains())
        start({});
      else
        send(0, {bye}, {});
    });
    if (trains()) {
      pull(parameters, statistics);
      tell([this] { send(0, {bye}, {}); });
    }
    wait("the others to end", [&] { return ended_; }, [] {}, [] {});
  }
  void stop() {
    tell([this] { send(0, {stop_all}, {}); });
  }
  bool stopped() const {
    std::lock_guard lock(mutex_);
    return stopped_;
  }
  Score trained() {
    std::lock_guard lock(mutex_);
    return std::exchange(score_, {});
  }
  std::int64_t tickets_done() const {
    std::lock_guard lock(mutex_);
    return tickets_done_;
  }
  bool velocity(Buffer into) {
    const Rule::Keeps keeps = make_rule(options_.how.rule)->keeps();
    if (!keeps.velocity && !keeps.own) return false;
    tell([this, into] {
      velocity_into_ = static_cast<std::byte*>(into.data);
      velocity_missing_ = parameters_;
      for (int s = 0; s < parameter_shards(); s++) send(owner(s), {velocity_wanted, std::uint64_t(s)}, {});
    });
    wait("the servers' velocity", [&] { return velocity_here_; }, [&] { velocity_here_ = false; });
    return true;
  }
  Counts counts() const {
    std::lock_guard lock(mutex_);
    Counts c = counts_;
    c.waited = waited_;
    return c;
  }
  std::vector<ShardEvent> events() const {
    std::lock_guard lock(mutex_);
    return events_;
  }

 private:
  // Of this worker, under way: a push, or a pull alone.
  struct Exchange {
    const std::byte* gradient = nullptr;
    std::int64_t samples = 0, ticket = -1;
    Score score = {};
    ExchangeId id = 0;
    bool refused = false;
  };
  struct Request {  // to this rank's shard, by a worker
    What kind = pull_part;
    ExchangeId exchange = 0;
    std::int64_t samples = 0;
    std::uint64_t landing = 0, block = 0, offset = 0;
    bool here() const { return kind == push_here || kind == pull_here; }
    bool pushes() const { return kind == push_part || kind == push_here; }
  };
  struct Staged {  // a worker's gradient for a shard, and the room for two answers
    Tensor gradient, answers[2];
    std::vector<bf16> narrow;
    std::int64_t arrived = 0;
  };
  struct Copy {  // the newest of a shard that this worker was answered with
    int half = 0;
    bool here = false;
    std::uint64_t version = 0;
    std::int64_t pushes = 0;
    std::vector<ExchangeId> applied = {};
  };
  struct Adoption {
    std::map<int, Copy> offers;
    int from = -1;
    std::int64_t arrived = 0;
    Tensor values;
  };
  struct Snapshot {
    std::vector<std::vector<std::byte>> coming, kept;
    std::int64_t missing = 0;
    std::uint64_t number = 0;
  };

  // ---- places ---------------------------------------------------------------------------------------------------------
  std::byte* at(std::byte* vector, std::int64_t element) const { return vector + std::size_t(element) * size_; }
  std::byte* landing_half(int half) const {
    return static_cast<std::byte*>(landing_.get()) + std::size_t(half) * std::size_t(cuts_.back()) * size_;
  }
  void copy_in(std::byte* to, Buffer from) const {
    if (from.count) std::memcpy(to, from.data, from.bytes());
  }
  void copy_out(Buffer to, const std::byte* from) const {
    if (to.count) std::memcpy(to.data, from, to.bytes());
  }
  static std::span<const std::byte> bytes_of(const std::string& s) { return std::as_bytes(std::span(s)); }
  template <class T>
  static std::span<std::byte> room(std::vector<T>& v) {
    return std::as_writable_bytes(std::span(v));
  }
  std::int64_t begin_of(int s) const { return cuts_[std::size_t(s)]; }
  std::int64_t length(int s) const { return cuts_[std::size_t(s) + 1] - cuts_[std::size_t(s)]; }
  int parameter_shards() const { return statistics_ ? shards_ - 1 : shards_; }

  // ---- who owns what ----------------------------------------------------------------------------------------------------
  int first_owner(int s) const {
    if (s >= parameter_shards()) return 0;  // the statistics
    return options_.servers ? workers() + s : s;
  }
  int owner(int s) const { return owner_[std::size_t(s)]; }
  // The next rank that serves; where none is left, the next one at all.
  int successor(int rank) const {
    const std::vector<bool> living = channel_->living();
    for (const bool any : {options_.servers == 0, true})
      for (int k = 1; k < ranks_; k++)
        if (const int r = (rank + k) % ranks_; living[std::size_t(r)] && (any || r >= workers())) return r;
    return rank_;
  }

  // ---- between the threads ----------------------------------------------------------------------------------------------
  void tell(std::function<void()> command) {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    channel_->wake();
  }
  // Throws after the deadline; where others may take as long as they like, while they live, `meanwhile` is called now and then.
  void wait(const char* what, const std::function<bool()>& done, const std::function<void()>& then = [] {},
            const std::function<void()>& meanwhile = {}) {
    std::unique_lock lock(mutex_);
    const auto ready = [&] { return done() || failed_; };
    while (!changed_.wait_for(lock, std::chrono::duration<double>(meanwhile ? 0.1 : deadline_), ready)) {
      if (!meanwhile)
        throw CommunicationError(-1, channel_->where(rank_) + " waited for " + what + " longer than " +
                                         std::to_string(int(deadline_)) + " s" + missing_);
      meanwhile();
    }
    if (failed_) std::rethrow_exception(failed_);
    then();
  }
  template <class F>
  void change(const F& f) {
    std::lock_guard lock(mutex_);
    f();
    changed_.notify_all();
  }

  // ---- the member's thread ----------------------------------------------------------------------------------------------
  void run() {
    try {
      double leaves_at = 0, next_look = 0;
      for (;;) {
        std::deque<std::function<void()>> commands;
        {
          std::lock_guard lock(mutex_);
          if (end_ && leaves_at == 0) leaves_at = now() + (ended_ ? 10 : 0);
          if (end_ && (sends_.empty() || now() >= leaves_at)) return;
          commands.swap(commands_);
        }
        for (auto& c : commands) c();
        const bool some = channel_->progress();
        std::deque<Sending> before;  // done() may bring new messages, and these new answers
        before.swap(sends_);
        for (Sending& s : before)
          if (!s.work.done()) sends_.push_back(std::move(s));
        if (now() >= next_look) {
          next_look = now() + 0.5;
          look_around();
        }
        if (!some) channel_->rest();
      }
    } catch (...) {
      change([&] { failed_ = std::current_exception(); });
    }
  }

  void send(int to, const Note& note, std::span<const std::byte> bytes, std::shared_ptr<void> keep = {}) {
    sends_.push_back({channel_->send(to, note, bytes), std::move(keep)});
    std::lock_guard lock(mutex_);
    counts_.bytes += to == rank_ ? 0 : std::int64_t(bytes.size());
  }
  // A shard's part of a vector that begins at `data`, in messages of `chunk` elements.
  void send_parts(int to, Note note, const std::byte* data, std::int64_t elements, const std::shared_ptr<void>& keep = {}) {
    for (std::int64_t begin = 0; begin < elements; begin += options_.chunk) {
      const std::int64_t n = std::min(options_.chunk, elements - begin);
      note[first_element] = std::uint64_t(begin);
      send(to, note, {data + std::size_t(begin) * size_, std::size_t(n) * size_}, keep);
    }
  }
  void send_first(int s, const std::byte* vector, std::uint64_t which, const std::shared_ptr<void>& keep) {
    send_parts(owner(s), {first_part, std::uint64_t(s), 0, 0, 0, which}, vector + std::size_t(begin_of(s)) * size_, length(s),
               keep);
  }

  // Twice a second.
  void look_around() {
    if (rank_ == 0 && begun_) {
      tickets_.late(now());
      hand_out();
    }
    {
      std::lock_guard lock(mutex_);
      missing_.clear();
      for (int s = 0; s < shards_ && ready_ && missing_answers_ > 0; s++)
        if (!answered_[std::size_t(s)]) missing_ += (missing_.empty() ? ": no answer from " : ", ") + channel_->where(owner(s));
    }
    if (begun_ && options_.snapshots > 0 && now() >= next_snapshot_ && !over_told_) {
      if (next_snapshot_ > 0) send_snapshots();
      next_snapshot_ = now() + options_.snapshots;
    }
  }

  // ---- a worker -------------------------------------------------------------------------------------------------------
  void begin_exchanging() {
    ready_ = true;
    for (int s = 0; s < shards_; s++)
      if (owner(s) == rank_ && length(s) == 0 && incarnation_ == 0) serve(s, tensor(0));
    for (auto& f : std::exchange(before_begin_, {})) f();
    if (!trains()) return;
    start({});
    ask_for_ticket();
  }
  void ask_for_ticket() { send(0, {want, 0, 0, (incarnation_ << 40) | ++asked_}, {}); }
  void start(Exchange x) {
    x.id = (incarnation_ << 40) | ++exchanges_;
    exchange_ = x;
    std::fill(answered_.begin(), answered_.end(), false);
    std::fill(landed_.begin(), landed_.end(), 0);
    missing_answers_ = shards_;
    idle_ = false;
    if (x.gradient && options_.wire == DType::bf16) {
      narrow_.resize(std::size_t(parameters_));
      const auto* wide = reinterpret_cast<const float*>(x.gradient);
      for (std::size_t i = 0; i < narrow_.size(); i++) narrow_[i] = bf16(wide[i]);
    }
    for (int s = 0; s < shards_; s++) send_exchange(s);
  }
  void send_exchange(int s) {
    const int to = owner(s);
    const bool near = !channel_->shared_by(to, 0).empty();
    const bool parameters = s < parameter_shards();
    const std::byte* from = !exchange_.gradient ? nullptr
                            : parameters        ? exchange_.gradient + std::size_t(begin_of(s)) * size_
                                                : static_cast<const std::byte*>(statistics_out_.get());
    Note note{pull_part, std::uint64_t(s), 0, exchange_.id, std::uint64_t(exchange_.samples), landing_block_};
    if (!from) {
      note[what] = near ? pull_here : pull_part;
      return send(to, note, {});
    }
    const bool narrow = parameters && options_.wire == DType::bf16;
    if (near && !narrow)
      if (const auto [block, offset] = block_with(from); block != none) {
        note[what] = push_here, note[block_of] = block, note[offset_of] = offset;
        return send(to, note, {});
      }
    note[what] = push_part, note[block_of] = near;
    if (length(s) == 0) return send(to, note, {});
    if (!narrow) return send_parts(to, note, from, length(s));
    for (std::int64_t begin = 0; begin < length(s); begin += options_.chunk) {
      const std::int64_t n = std::min(options_.chunk, length(s) - begin);
      note[first_element] = std::uint64_t(begin);
      send(to, note, std::as_bytes(std::span(narrow_).subspan(std::size_t(begin_of(s) + begin), std::size_t(n))));
    }
  }
  std::pair<std::uint64_t, std::uint64_t> block_with(const std::byte* p) {
    std::lock_guard lock(mutex_);
    for (std::size_t b = 0; b < blocks_.size(); b++)
      if (p >= blocks_[b].first && p < blocks_[b].first + blocks_[b].second) return {b, std::uint64_t(p - blocks_[b].first)};
    return {none, 0};
  }

  void tell_idle() {
    for (int s = 0; s < shards_; s++) send(owner(s), {idle, std::uint64_t(s), 0, exchange_.id}, {});
  }

  void answered(int s, const Note& n) {
    if (n[number] != exchange_.id || answered_[std::size_t(s)]) return;
    answered_[std::size_t(s)] = true;
    exchange_.refused = exchange_.refused || n[block_of] != 0;
    complete_[std::size_t(s)] = {.half = int(exchange_.id & 1),
                                 .here = true,
                                 .version = n[version_of],
                                 .pushes = std::int64_t(n[samples_of]),
                                 .applied = tables_[std::size_t(s)]};
    if (--missing_answers_ > 0) return;
    if (idle_) tell_idle();
    if (exchange_.gradient && rank_ == 0) {
      if (!exchange_.refused) scores_[0] = {exchange_.score.loss, exchange_.score.correct, exchange_.score.samples};
      was_done(0, exchange_.ticket);
    } else if (exchange_.gradient) {
      auto score = std::make_shared<std::array<double, 3>>();
      if (!exchange_.refused) *score = {exchange_.score.loss, exchange_.score.correct, exchange_.score.samples};
      send(0, {done, 0, 0, std::uint64_t(exchange_.ticket)}, std::as_bytes(std::span(*score)), score);
    }
    change([&] {
      waiting_ = false;
      answer_half_ = int(exchange_.id & 1), answer_taken_ = !exchange_.refused;
      counts_.exchanges++, counts_.refused += exchange_.refused;
    });
  }

  // ---- an owner -------------------------------------------------------------------------------------------------------
  Staged& staged(int s, int worker) { return staged_[{s, worker}]; }
  Tensor tensor(std::int64_t elements) { return Tensor(*host_, {elements}, dtype_); }
  Tensor wrapped(std::byte* data, std::int64_t elements) { return Tensor::wrap(*host_, data, {elements}, dtype_, owner_of_all_); }
  std::byte* in_memory_of(int rank, std::uint64_t block, std::uint64_t offset, std::size_t bytes) {
    const std::span<std::byte> memory = channel_->shared_by(rank, int(block));
    require(offset + bytes <= memory.size(), channel_->where(rank), " names memory that ", channel_->where(rank_),
            " cannot reach");
    return memory.data() + offset;
  }
  // Where the answer to a worker is made.
  Tensor place_for(int s, int worker, ExchangeId exchange) {
    const Request& r = requests_[std::size_t(s)][std::size_t(worker)];
    const std::uint64_t half = exchange & 1;
    if (r.here() || (r.kind == push_part && r.block))
      return wrapped(in_memory_of(worker, r.landing,
                                  (half * std::uint64_t(cuts_.back()) + std::uint64_t(begin_of(s))) * size_,
                                  std::size_t(length(s)) * size_),
                     length(s));
    Tensor& t = staged(s, worker).answers[options_.pipeline ? half : 0];
    if (!t.defined()) t = tensor(length(s));
    return t;
  }
  void serve(int s, const Tensor& first) {
    const bool parameters = s < parameter_shards();
    std::vector<float> scales(std::size_t(length(s) / 64), 1.f);
    if (parameters)
      scales.assign(scales_.begin() + begin_of(s) / 64, scales_.begin() + (begin_of(s) + length(s)) / 64);
    served_[std::size_t(s)] = std::make_unique<Served>(
        parameters ? *rule_ : *averaging_, first, std::move(scales), workers(),
        Served::Options{.how = options_.how,
                        .momentum = options_.momentum,
                        .learning_rate = options_.learning_rate,
                        .pipeline = options_.pipeline,
                        .record = options_.record,
                        .place = [this, s](int worker, ExchangeId exchange) { return place_for(s, worker, exchange); }});
    const std::vector<bool> living = channel_->living();
    for (int m = 0; m < workers(); m++)
      if (!living[std::size_t(m)] || returned_.count(m)) served(s).lost(m);  // until it asks here
  }
  Served& served(int s) { return *served_[std::size_t(s)]; }
  bool serves(int s) const { return served_[std::size_t(s)] != nullptr; }
  void serve_early(int s) {
    for (auto& f : std::exchange(early_[std::size_t(s)], {})) f();
    answer(s);
  }

  void requested(int from, int s, const Request& r) {
    if (!serves(s)) {
      early_[std::size_t(s)].push_back([this, from, s, r] { requested(from, s, r); });
      return;
    }
    if (!channel_->living()[std::size_t(from)]) return;
    const Request before = std::exchange(requests_[std::size_t(s)][std::size_t(from)], r);
    const bool fresh = !r.pushes() ? served(s).pull(from, r.exchange)
                       : r.kind == push_here
                           ? served(s).push(from, r.exchange,
                                            wrapped(in_memory_of(from, r.block, r.offset, std::size_t(length(s)) * size_),
                                                    length(s)),
                                            r.samples)
                           : served(s).push(from, r.exchange, staged(s, from).gradient, r.samples);
    if (!fresh) requests_[std::size_t(s)][std::size_t(from)] = before;
    answer(s);
  }
  void answer(int s) {
    const bool first = s == first_served();
    for (Served::Answer& a : served(s).answers()) {
      const Request& r = requests_[std::size_t(s)][std::size_t(a.worker)];
      const bool here = r.here() || (r.kind == push_part && r.block);
      const ServedCounts& counts = served(s).counts();
      Note note{answer_part, std::uint64_t(s), 0, a.exchange, std::uint64_t(counts.pushes), served(s).shard().version()};
      if (!here)
        send_parts(a.worker, note, static_cast<const std::byte*>(a.weights.raw()), length(s));
      note[what] = here ? answer_here : answer_end;
      note[block_of] = a.refused && s < parameter_shards();
      auto table = std::make_shared<std::vector<ExchangeId>>(served(s).applied());
      send(a.worker, note, std::as_bytes(std::span(*table)), table);
    }
    if (!first) return;
    std::lock_guard lock(mutex_);
    counts_.shard = served(s).counts();
    if (options_.record) events_ = served(s).events();
  }
  int first_served() const {
    for (int s = 0; s < shards_; s++)
      if (serves(s)) return s;
    return -1;
  }

  // ---- snapshots --------------------------------------------------------------------------------------------------------
  void send_snapshots() {
    const int to = successor(rank_);
    if (to == rank_) return;
    snapshot_number_++;
    for (int s = 0; s < shards_; s++) {
      if (!serves(s)) continue;
      std::uint64_t k = 0;
      for (const Tensor& t : served(s).shard().kept()) {
        auto copy = std::make_shared<std::vector<std::byte>>(t.bytes());
        std::memcpy(copy->data(), t.raw(), t.bytes());
        send_parts(to, {snapshot_part, std::uint64_t(s), 0, snapshot_number_, 0, 0, k++}, copy->data(), length(s), copy);
      }
    }
  }
  std::span<std::byte> place_snapshot(int s, const Note& n, std::size_t bytes) {
    Snapshot& p = snapshots_[std::size_t(s)];
    if (p.number != n[number]) p.number = n[number], p.missing = -1;
    if (p.missing < 0) {  // a new one begins
      Shard shape(s < parameter_shards() ? *rule_ : *averaging_, tensor(0), {}, workers());
      p.coming.assign(shape.kept().size(), std::vector<std::byte>(std::size_t(length(s)) * size_));
      p.missing = std::int64_t(p.coming.size()) * length(s);
    }
    if (n[block_of] >= p.coming.size()) return {};
    return std::span(p.coming[n[block_of]]).subspan(n[first_element] * size_, bytes);
  }
  void snapshot_arrived(int s, std::int64_t elements) {
    Snapshot& p = snapshots_[std::size_t(s)];
    if ((p.missing -= elements) == 0) p.kept.swap(p.coming), p.missing = -1, p.number = 0;
  }

  // ---- losses -----------------------------------------------------------------------------------------------------------
  void lost(int rank, const std::string&) {
    if (!ready_) {
      before_begin_.push_back([this, rank] { lost(rank, ""); });
      if (rank_ == 0) lost_to_rank_0(rank);
      return;
    }
    for (int s = 0; s < shards_; s++) {
      if (rank < workers()) staged(s, rank).arrived = 0;
      if (serves(s) && rank < workers()) {
        served(s).lost(rank);
        answer(s);
      }
    }
    replace_owner(rank);
    for (int s = 0; s < shards_; s++) {
      auto& a = adoptions_[std::size_t(s)];
      if (!a) continue;
      a->offers.erase(rank);
      if (a->from == rank) a->from = -1, a->arrived = 0;
      adopt(s);
    }
    for (auto& f : std::exchange(offers_early_, {})) f();
    if (rank_ == 0) lost_to_rank_0(rank);
  }
  void replace_owner(int rank) {
    for (int s = 0; s < int(owner_.size()); s++) {
      if (owner(s) != rank) continue;
      const int to = owner_[std::size_t(s)] = successor(rank);
      if (to == rank_) {
        adoptions_[std::size_t(s)] = std::make_unique<Adoption>();
        std::lock_guard lock(mutex_);
        counts_.adopted++;
      }
      const Copy& mine = complete_[std::size_t(s)];
      auto table = std::make_shared<std::vector<ExchangeId>>(mine.applied);
      table->resize(std::size_t(workers()));
      send(to, {offer, std::uint64_t(s), 0, 0, std::uint64_t(mine.pushes), mine.here ? mine.version + 1 : 0},
           std::as_bytes(std::span(*table)), table);
      if (!ready_) continue;
      if (missing_answers_ > 0 && !answered_[std::size_t(s)]) landed_[std::size_t(s)] = 0, send_exchange(s);
      if (idle_ && missing_answers_ == 0) send(to, {idle, std::uint64_t(s), 0, exchange_.id}, {});
    }
  }
  // Once all who live have said what they have, the newest copy becomes the shard.
  void adopt(int s) {
    Adoption& a = *adoptions_[std::size_t(s)];
    const std::vector<bool> living = channel_->living();
    if (a.from >= 0) return;
    int best = -1;
    for (int r = 0; r < ranks_; r++) {
      if (!living[std::size_t(r)] || returned_.count(r)) continue;
      const auto o = a.offers.find(r);
      if (o == a.offers.end()) return;
      if (o->second.here && (best < 0 || o->second.version > a.offers[best].version)) best = r;
    }
    if (best < 0) fail("nobody has a copy of what ", channel_->where(rank_), " is to go on with");
    a.from = best;
    a.values = tensor(length(s));
    if (length(s) == 0) return adopted(s);
    send(best, {copy_wanted, std::uint64_t(s)}, {});
  }
  void adopted(int s) {
    const std::unique_ptr<Adoption> a = std::move(adoptions_[std::size_t(s)]);
    const Copy& copy = a->offers[a->from];
    serve(s, a->values);
    served(s).go_on(copy.version, copy.pushes, copy.applied);
    std::vector<Tensor> kept = served(s).shard().kept();
    const auto& snapshot = snapshots_[std::size_t(s)].kept;
    if (snapshot.size() == kept.size())
      for (std::size_t k = 0; k < kept.size(); k++) std::memcpy(kept[k].raw_write(), snapshot[k].data(), kept[k].bytes());
    serve_early(s);
  }
  void returned(int rank) {
    if (!ready_) {
      before_begin_.push_back([this, rank] { returned(rank); });
      return;
    }
    returned_.insert(rank);  // it has no copy to offer, until it has pulled
    for (int s = 0; s < shards_; s++) {
      if (rank >= workers()) continue;
      staged(s, rank) = {};
      if (serves(s)) served(s).returned(rank);
    }
  }

  // ---- rank 0 -----------------------------------------------------------------------------------------------------------
  void was_done(int worker, std::int64_t ticket) {
    const Scores v = std::exchange(scores_[worker], {});
    if (tickets_.done(ticket))
      change([&] {
        score_.loss += v[0], score_.correct += v[1], score_.samples += v[2];
        tickets_done_ = tickets_.count_done();
      });
    hand_out();
  }
  void hand_out() {
    if (!begun_) return;
    bool all_left = true;
    int may_want = 0;
    for (int m = 0; m < workers(); m++)
      if (!left_.count(m) && channel_->living()[std::size_t(m)]) all_left = false, may_want++;
    // Who makes a step together draws for it together: the batches of a step are then those of one machine with all of them.
    const bool together = options_.how.kind == Asynchrony::Kind::bsp;
    std::sort(waiting_for_ticket_.begin(), waiting_for_ticket_.end());
    if (together && int(waiting_for_ticket_.size()) < may_want) return;
    for (auto w = waiting_for_ticket_.begin(); w != waiting_for_ticket_.end();) {
      const auto t = tickets_.draw(*w, now());
      if (!t) break;
      send(*w, {ticket_is, 0, 0, std::uint64_t(*t), std::uint64_t(tickets_.count_done()), wanted_[*w]}, {});
      told_idle_.erase(*w);
      w = waiting_for_ticket_.erase(w);
    }
    for (const int w : waiting_for_ticket_)
      if (told_idle_.insert(w).second) send(w, {ticket_is, 0, 0, none, std::uint64_t(tickets_.count_done()), wanted_[w]}, {});
    if (over_told_) return;
    if (!tickets_.over() && !all_left) return;
    over_told_ = true;
    for (int r = 0; r < ranks_; r++)
      if (channel_->living()[std::size_t(r)]) tell_over(r);
    count_byes();
  }
  void tell_over(int rank) {
    send(rank, {over, 0, 0, std::uint64_t(stop_asked_), std::uint64_t(tickets_.count_done())}, {});
  }
  void count_byes() {
    if (!over_told_ || end_told_) return;
    for (int r = 0; r < ranks_; r++)
      if (channel_->living()[std::size_t(r)] && !byes_.count(r)) return;
    end_told_ = true;
    for (int r = 0; r < ranks_; r++)
      if (channel_->living()[std::size_t(r)]) send(r, {end}, {});
  }
  void lost_to_rank_0(int rank) {
    waiting_for_ticket_.erase(std::remove(waiting_for_ticket_.begin(), waiting_for_ticket_.end(), rank),
                              waiting_for_ticket_.end());
    told_idle_.erase(rank), byes_.erase(rank), left_.erase(rank), wanted_.erase(rank);
    if (begun_) {
      tickets_.lost(rank);
      hand_out();
      count_byes();
    }
    for (auto& [k, texts] : said_) answer_gathering(k);
  }
  void answer_gathering(std::uint64_t k) {
    auto& texts = said_[k];
    const std::vector<bool> living = channel_->living();
    if (!gathered_.count(k))
      for (int r = 0; r < ranks_; r++)
        if (living[std::size_t(r)] && !texts.count(r)) return;
    gathered_.insert(k);
    auto all = std::make_shared<std::string>();
    for (int r = 0; r < ranks_; r++) {
      const std::string text = texts.count(r) ? texts[r] : "";
      const std::uint64_t size = text.size();
      all->append(reinterpret_cast<const char*>(&size), sizeof size).append(text);
    }
    for (int r = 0; r < ranks_; r++)
      if (living[std::size_t(r)] && texts.count(r) && told_.insert({k, r}).second) send(r, {heard, 0, 0, k}, bytes_of(*all), all);
  }

  // ---- what arrives -----------------------------------------------------------------------------------------------------
  bool sound(const Note& n) const {
    return !begun_ || n[what] >= say || (n[shard_of] < std::uint64_t(shards_) &&
           n[first_element] <= std::uint64_t(length(int(n[shard_of]))));
  }
  std::span<std::byte> place(int from, const Note& n, std::size_t bytes) {
    if (bytes == 0) return {};
    const auto text = [&](std::string& into) {
      into.resize(bytes);
      return std::as_writable_bytes(std::span(into));
    };
    switch (n[what]) {
      case say: return text(saying_[from]);
      case heard: return text(hearing_);
      case owners: return text(hearing_);
      case done: return bytes == sizeof(Scores) ? std::as_writable_bytes(std::span(scores_[from])) : std::span<std::byte>();
      default: break;
    }
    // What is sent by a rank that has begun may come before this one has: then it waits in memory of its own.
    if (!ready_) return text(waiting_room_.emplace_back(n, std::string()).second);
    if (!sound(n)) return {};
    return place_part(from, n, bytes);
  }
  std::span<std::byte> place_part(int from, const Note& n, std::size_t bytes) {
    const int s = int(n[shard_of]);
    const std::size_t elements = bytes / (n[what] == push_part && narrow(s) ? sizeof(bf16) : size_);
    const bool whole = n[what] == answer_end || n[what] == answer_here || n[what] == offer;
    if (!whole && n[first_element] + elements > std::uint64_t(length(s))) return {};
    auto part = [&](std::byte* of_shard) { return std::span(of_shard + n[first_element] * size_, bytes); };
    switch (n[what]) {
      case push_part: {
        if (from >= workers()) return {};
        Staged& g = staged(s, from);
        if (!g.gradient.defined()) g.gradient = tensor(length(s));
        if (!narrow(s)) return part(static_cast<std::byte*>(g.gradient.raw_write()));
        g.narrow.resize(std::size_t(length(s)));
        return std::as_writable_bytes(std::span(g.narrow).subspan(n[first_element], elements));
      }
      case answer_part:
        if (n[number] != exchange_.id || answered_[std::size_t(s)]) return trash(bytes);
        return part(at(landing_half(int(exchange_.id & 1)), begin_of(s)));
      case answer_end:
      case answer_here:
      case offer: {
        if (bytes != std::size_t(workers()) * sizeof(ExchangeId)) return {};
        return room(tables_in_[{from, s}] = std::vector<ExchangeId>(std::size_t(workers())));
      }
      case first_part: {
        auto& f = first_[std::size_t(s)];
        Tensor& t = n[version_of] ? f.velocity : f.values;
        if (!t.defined()) t = tensor(length(s));
        return part(static_cast<std::byte*>(t.raw_write()));
      }
      case copy_part: {
        auto& a = adoptions_[std::size_t(s)];
        if (!a || a->from != from) return trash(bytes);
        return part(static_cast<std::byte*>(a->values.raw_write()));
      }
      case snapshot_part: return place_snapshot(s, n, bytes);
      case velocity_part:
        if (velocity_missing_ <= 0) return trash(bytes);
        return std::span(velocity_into_ + std::size_t(begin_of(s)) * size_ + n[first_element] * size_, bytes);
      default: return {};
    }
  }
  bool narrow(int s) const { return options_.wire == DType::bf16 && s < parameter_shards(); }
  std::span<std::byte> trash(std::size_t bytes) {
    trash_.resize(std::max(trash_.size(), bytes));
    return std::span(trash_).first(bytes);
  }

  void arrived(int from, const Note& n, std::span<std::byte> bytes) {
    if (!ready_ && n[what] < say) {
      std::string text;
      if (!bytes.empty()) {
        auto mine = std::find_if(waiting_room_.begin(), waiting_room_.end(), [&](auto& w) {
          return std::as_writable_bytes(std::span(w.second)).data() == bytes.data();
        });
        text = std::move(mine->second);
        waiting_room_.erase(mine);
      }
      before_begin_.push_back([this, from, n, text] {
        if (!sound(n)) fail(channel_->where(from), " sends what is no message");
        std::span<std::byte> to = text.empty() ? std::span<std::byte>() : place_part(from, n, text.size());
        if (to.size() != text.size()) fail(channel_->where(from), " does not train the same model");
        std::memcpy(to.data(), text.data(), text.size());
        arrived(from, n, to);
      });
      return;
    }
    const int s = int(n[shard_of]);
    const auto elements = std::int64_t(bytes.size() / (n[what] == push_part && narrow(s) ? sizeof(bf16) : size_));
    switch (n[what]) {
      case push_part: {
        Staged& g = staged(s, from);
        if (narrow(s)) {
          float* wide = g.gradient.write<float>() + n[first_element];
          for (std::int64_t i = 0; i < elements; i++) wide[i] = float(g.narrow[n[first_element] + std::size_t(i)]);
        }
        if ((g.arrived += elements) < length(s)) return;
        g.arrived = 0;
        if (!g.gradient.defined()) g.gradient = tensor(length(s));
        return requested(from, s, {push_part, n[number], std::int64_t(n[samples_of]), n[version_of], n[block_of], 0});
      }
      case push_here:
        return requested(from, s,
                         {push_here, n[number], std::int64_t(n[samples_of]), n[version_of], n[block_of], n[offset_of]});
      case pull_part:
      case pull_here: return requested(from, s, {What(n[what]), n[number], 0, n[version_of], 0, 0});
      case answer_part:
        if (n[number] == exchange_.id && !answered_[std::size_t(s)]) {
          landed_[std::size_t(s)] += elements;
          if (landed_[std::size_t(s)] == length(s) + 1) answered(s, ends_[s]);
        }
        return;
      case answer_end:
      case answer_here:
        if (n[number] != exchange_.id || answered_[std::size_t(s)]) return;
        tables_[std::size_t(s)] = tables_in_[{from, s}];
        ends_[s] = n;
        if (n[what] == answer_here) return answered(s, n);
        landed_[std::size_t(s)] += 1;  // the end may overtake parts
        if (landed_[std::size_t(s)] == length(s) + 1) answered(s, n);
        return;
      case idle:
        if (!serves(s)) {
          early_[std::size_t(s)].push_back([this, from, n] { arrived(from, n, {}); });
          return;
        }
        served(s).idle(from, n[number]);
        return answer(s);
      case first_part: {
        auto& f = first_[std::size_t(s)];
        if (n[version_of]) {
          f.velocity_arrived += elements;
        } else {
          f.arrived += elements;
        }
        return first_arrived(s);
      }
      case offer:
        if (auto& a = adoptions_[std::size_t(s)]; a) {
          a->offers[from] = {.here = n[version_of] > 0,
                             .version = n[version_of] - 1,
                             .pushes = std::int64_t(n[samples_of]),
                             .applied = tables_in_[{from, s}]};
          adopt(s);
        } else if (owner(s) != rank_) {  // this rank has not heard of the loss yet
          offers_early_.push_back([this, from, n, table = tables_in_[{from, s}]] {
            tables_in_[{from, int(n[shard_of])}] = table;
            arrived(from, n, {});
          });
        }
        return;
      case copy_wanted: {
        const Copy& mine = complete_[std::size_t(s)];
        return send_parts(from, {copy_part, std::uint64_t(s)}, at(landing_half(mine.half), begin_of(s)), length(s));
      }
      case copy_part:
        if (auto& a = adoptions_[std::size_t(s)]; a && a->from == from && (a->arrived += elements) == length(s)) adopted(s);
        return;
      case snapshot_part: return snapshot_arrived(s, elements);
      case velocity_wanted: {
        if (!serves(s)) {
          early_[std::size_t(s)].push_back([this, from, n] { arrived(from, n, {}); });
          return;
        }
        auto copy = std::make_shared<std::vector<std::byte>>(std::size_t(length(s)) * size_);
        std::memcpy(copy->data(), served(s).shard().velocity(0).raw(), copy->size());
        return send_parts(from, {velocity_part, std::uint64_t(s)}, copy->data(), length(s), copy);
      }
      case velocity_part:
        if ((velocity_missing_ -= elements) == 0) change([&] { velocity_here_ = true; });
        return;
      case say:
        said_[n[number]][from] = std::move(saying_[from]);
        return answer_gathering(n[number]);
      case heard: {
        std::vector<std::string> all;
        for (std::size_t at = 0; at < hearing_.size();) {
          std::uint64_t size;
          std::memcpy(&size, hearing_.data() + at, sizeof size);
          all.push_back(hearing_.substr(at + sizeof size, size));
          at += sizeof size + size;
        }
        return change([&] { heard_[n[number]] = std::move(all); });
      }
      case ask_owners: {
        if (!ready_) {
          before_begin_.push_back([this, from, n] { arrived(from, n, {}); });
          return;
        }
        auto text = std::make_shared<std::string>(reinterpret_cast<const char*>(owner_.data()), owner_.size() * sizeof(int));
        return send(from, {owners}, bytes_of(*text), text);
      }
      case owners: {
        owner_.resize(hearing_.size() / sizeof(int));
        std::memcpy(owner_.data(), hearing_.data(), hearing_.size());
        const std::vector<bool> living = channel_->living();
        for (int& o : owner_)
          while (!living[std::size_t(o)]) o = successor(o);
        return begin_exchanging();
      }
      case want:
        if (n[number] <= wanted_[from]) return;
        wanted_[from] = n[number];
        if (over_told_) return tell_over(from);  // it came back late
        waiting_for_ticket_.push_back(from);
        return hand_out();
      case ticket_is:
        if (n[version_of] != ((incarnation_ << 40) | asked_) || has_drawn_ == asked_) return;
        if (n[number] != none) has_drawn_ = asked_;
        change([&] {
          tickets_done_ = std::max(tickets_done_, std::int64_t(n[samples_of]));
          if (n[number] != none) drawn_ = std::int64_t(n[number]);
        });
        if (n[number] != none) return;
        idle_ = true;
        if (missing_answers_ == 0) tell_idle();
        return;
      case done: return was_done(from, std::int64_t(n[number]));
      case stop_all:
        stop_asked_ = true;
        tickets_.stop();
        return hand_out();
      case over:
        change([&] {
          over_ = true, stopped_ = n[number] != 0;
          tickets_done_ = std::max(tickets_done_, std::int64_t(n[samples_of]));
        });
        over_told_ = true;
        return;
      case leaves:
        left_.insert(from);
        waiting_for_ticket_.erase(std::remove(waiting_for_ticket_.begin(), waiting_for_ticket_.end(), from),
                                  waiting_for_ticket_.end());
        tickets_.lost(from);
        return hand_out();
      case bye:
        byes_.insert(from);
        return count_byes();
      case end: return change([&] { ended_ = true; });
      default: fail(channel_->where(from), " sends what is no message of a parameter server");
    }
  }
  void first_arrived(int s) {
    First& f = first_[std::size_t(s)];
    if (f.arrived < length(s) || serves(s)) {
      if (!serves(s) || f.velocity_arrived < length(s)) return;
    } else {
      serve(s, f.values.defined() ? f.values : tensor(0));
    }
    if (f.velocity_arrived == length(s) && f.velocity.defined())
      if (Tensor v = served(s).shard().velocity(0); v.defined())
        std::memcpy(v.raw_write(), f.velocity.raw(), f.velocity.bytes());
    serve_early(s);
  }

  using Scores = std::array<double, 3>;
  struct First {
    Tensor values, velocity;
    std::int64_t arrived = 0, velocity_arrived = 0;
  };
  struct Sending {
    Work work;
    std::shared_ptr<void> keep;
  };

  std::unique_ptr<Channel> channel_;
  double deadline_;
  int rank_, ranks_;
  std::uint64_t incarnation_;
  std::unique_ptr<Backend> host_;
  std::shared_ptr<void> owner_of_all_ = std::make_shared<int>();  // of memory that lives as long as this
  std::deque<Sending> sends_;

  // Set by begin(), before the thread's part of it runs.
  ServerOptions options_;
  DType dtype_ = DType::f32;
  std::size_t size_ = 4;
  std::vector<std::int64_t> cuts_;
  int shards_ = 0;
  std::int64_t parameters_ = 0, statistics_ = 0;
  std::shared_ptr<void> landing_, statistics_out_;
  std::uint64_t landing_block_ = 0;

  bool begun_ = false, ready_ = false;
  std::vector<std::function<void()>> before_begin_;
  std::list<std::pair<Note, std::string>> waiting_room_;
  std::vector<float> scales_;
  std::unique_ptr<Rule> rule_, averaging_;
  std::vector<int> owner_;

  // a worker
  Exchange exchange_;
  std::uint64_t exchanges_ = 0;
  std::uint64_t asked_ = 0, has_drawn_ = 0;  // for tickets; which of these was given
  int missing_answers_ = 0;
  bool idle_ = false;
  std::vector<bool> answered_;
  std::vector<std::int64_t> landed_;  // elements of each answer, and one for its end
  std::map<int, Note> ends_;
  std::vector<std::vector<ExchangeId>> tables_;
  std::map<std::pair<int, int>, std::vector<ExchangeId>> tables_in_;
  std::vector<Copy> complete_;
  std::vector<bf16> narrow_;
  std::vector<std::byte> trash_;
  std::byte* velocity_into_ = nullptr;
  std::int64_t velocity_missing_ = 0;

  // an owner
  std::vector<std::unique_ptr<Served>> served_;
  std::vector<First> first_;
  std::map<std::pair<int, int>, Staged> staged_;  // (shard, worker)
  std::vector<std::vector<Request>> requests_;
  std::vector<std::vector<std::function<void()>>> early_;
  std::vector<std::function<void()>> offers_early_;
  std::vector<std::unique_ptr<Adoption>> adoptions_;
  std::vector<Snapshot> snapshots_;
  std::uint64_t snapshot_number_ = 0;
  double next_snapshot_ = 0;
  std::set<int> returned_;

  // rank 0
  Tickets tickets_;
  std::vector<int> waiting_for_ticket_;
  std::set<int> told_idle_, byes_, left_;
  std::map<int, std::uint64_t> wanted_;
  bool over_told_ = false, end_told_ = false, stop_asked_ = false;
  std::map<int, std::string> saying_;
  std::map<int, Scores> scores_;
  std::string hearing_;
  std::map<std::uint64_t, std::map<int, std::string>> said_;
  std::set<std::uint64_t> gathered_;
  std::set<std::pair<std::uint64_t, int>> told_;

  // the training thread's
  std::optional<std::int64_t> holds_;
  std::uint64_t gatherings_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;
  std::vector<std::pair<std::byte*, std::size_t>> blocks_;
  std::map<std::uint64_t, std::vector<std::string>> heard_;
  std::optional<std::int64_t> drawn_;
  bool waiting_ = true, over_ = false, stopped_ = false, ended_ = false, end_ = false;
  bool answer_taken_ = true, velocity_here_ = false;
  int answer_half_ = 0;
  std::int64_t tickets_done_ = 0;
  Score score_;
  double waited_ = 0;
  std::string missing_;
  std::exception_ptr failed_;
  Counts counts_;
  std::vector<ShardEvent> events_;
  std::thread thread_;  // last
};

Member::Member(std::unique_ptr<Channel> channel, double deadline)
    : thread_(std::make_unique<Thread>(std::move(channel), deadline)) {}
Member::~Member() = default;
int Member::rank() const { return thread_->rank(); }
int Member::size() const { return thread_->size(); }
std::string Member::where() const { return thread_->where(); }
bool Member::trains() const { return thread_->trains(); }
int Member::workers() const { return thread_->workers(); }
std::shared_ptr<void> Member::memory(std::size_t bytes) { return thread_->memory(bytes); }
std::vector<std::string> Member::gather(const std::string& mine) { return thread_->gather(mine); }
void Member::begin(Buffer parameters, Buffer statistics, std::vector<float> scales, ServerOptions options, Tickets tickets,
                   Buffer velocity) {
  thread_->begin(parameters, statistics, std::move(scales), std::move(options), std::move(tickets), velocity);
}
std::optional<std::int64_t> Member::ticket(const std::function<bool()>& asked_to_stop) {
  return thread_->ticket(asked_to_stop);
}
void Member::leave() { thread_->leave(); }
void Member::push(Buffer gradient, Buffer statistics, std::int64_t samples, const Score& score) {
  thread_->push(gradient, statistics, samples, score);
}
bool Member::pull(Buffer parameters, Buffer statistics) { return thread_->pull(parameters, statistics); }
void Member::finish(Buffer parameters, Buffer statistics) { thread_->finish(parameters, statistics); }
void Member::stop() { thread_->stop(); }
bool Member::stopped() const { return thread_->stopped(); }
Score Member::trained() { return thread_->trained(); }
std::int64_t Member::tickets_done() const { return thread_->tickets_done(); }
bool Member::velocity(Buffer into) { return thread_->velocity(into); }
Member::Counts Member::counts() const { return thread_->counts(); }
std::vector<ShardEvent> Member::events() const { return thread_->events(); }

}  // namespace tandem
