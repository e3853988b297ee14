// Communicators over messages: execute the steps of algorithms.h in chunks. A chunk is combined and forwarded while the
// next one is in flight.
#include <algorithm>
#include <bit>
#include <deque>
#include <numeric>
#include <utility>

#include "core/clock.h"
#include "core/text.h"
#include "dist/collectives/algorithms.h"
#include "dist/collectives/operations.h"

namespace tandem {
namespace {

// A chunk with its header is one fragment of UCX over TCP (64 KiB), which needs no reassembly.
constexpr std::size_t chunk_bytes = 60 << 10;

// The state that all communicators of a rank share.
struct Shared : OperationQueue {
  std::shared_ptr<Wire> wire;
  double deadline = 300;
  ChoiceTable table;
  std::uint64_t finished = 0;
  std::vector<std::unique_ptr<std::byte[]>> spare;  // each for one chunk to combine

  std::unique_ptr<std::byte[]> staging() {
    if (spare.empty()) return std::make_unique_for_overwrite<std::byte[]>(chunk_bytes);
    auto last = std::move(spare.back());
    spare.pop_back();
    return last;
  }

 private:
  bool carry_on() override;
  void check(Operation& operation) override;
  void rest_for(Operation& operation) override;
  void report_failure(int culprit, const std::string& text) override { wire->fail(culprit, text); }
};

struct MessageGroup : Group {
  MessageGroup(std::shared_ptr<Shared> job, std::vector<int> ranks, int rank)
      : Group(rank, int(ranks.size())), job(std::move(job)), ranks(std::move(ranks)) {}
  std::string where(int r) const override { return job->wire->where(ranks[std::size_t(r)]); }
  void check() override {
    job->guarded([&] {
      int gone = -1;
      for (int r = size - 1; r >= 0; r--)
        if (r != rank && job->wire->left(ranks[std::size_t(r)])) gone = r;
      job->wire->progress();  // after left(): a rank that fails reports it before it leaves
      if (gone >= 0)
        throw CommunicationError(ranks[std::size_t(gone)], where(rank) + " needs " + where(gone) + ", which has left");
    });
  }
  void fail(int culprit, const std::string& text) override { job->fail(culprit, text); }
  std::vector<int> survivors() override { return job->wire->survivors(); }

  std::shared_ptr<Shared> job;
  std::vector<int> ranks;  // in the job
};

// ---- one operation in progress --------------------------------------------------------------------------------------
class Collective : public OperationQueue::Operation {
 public:
  static constexpr std::size_t window = 16;  // chunks in flight in each direction

  Collective(std::shared_ptr<MessageGroup> group, const Call& call, const Header& header, Steps steps)
      : Operation(*group->job, call, header),
        group_(std::move(group)),
        job_(*group_->job),
        wire_(*job_.wire),
        steps_(std::move(steps)),
        in_(steps_.list, &Step::from, &Step::in, std::int64_t(chunk_bytes / size_of(call.data.dtype))),
        out_(steps_.list, &Step::to, &Step::out, std::int64_t(chunk_bytes / size_of(call.data.dtype))) {
    if (call.data.dtype == DType::bf16 && steps_.wide_steps > 0) {
      wide_.resize(std::size_t(steps_.wide.length()));
      widen(wide_.data(), reinterpret_cast<const bf16*>(call.data.at(steps_.wide.begin)), steps_.wide.length());
    }
    if (!call.is_message()) wire_.announce(header, group_->size);
    post();
    over = in_.over() && out_.over();
  }

  // Returns true if a chunk has moved.
  bool carry_on() {
    bool moved = false;
    auto moves = [&] {
      if (!std::exchange(moved, true)) wire_.report_wait({});  // first: this rank may be stopped below
    };
    do {
      while (!out_.under_way.empty() && out_.under_way.front().request->done()) {
        moves();
        out_.end();
      }
      in_waits_for_out_ = false;
      while (!in_.under_way.empty() && in_.under_way.front().request->done()) {
        const Stream::Chunk c = in_.done();
        std::unique_ptr<std::byte[]>& staging = in_.under_way.front().staging;
        if (staging && (in_waits_for_out_ = !may_change(c))) break;
        moves();
        if (staging) {
          combine(c, staging.get());
          job_.spare.push_back(std::move(staging));
        }
        in_.end();
      }
    } while (post());
    if (!moved) return false;
    since_ = Clock::now();
    over = in_.over() && out_.over();
    job_.finished += over;
    return true;
  }
  void check() {
    const double waited = seconds_since(since_);
    if (waited > job_.deadline) {
      const int waits_for = rank_in_job(awaited());
      wire_.waited_too_long(waits_for, describe(header) + ": " + wire_.where(wire_.rank()) +
                                           " has heard nothing from " + wire_.where(waits_for) + " for " +
                                           digits(job_.deadline) + " s");
    }
    if (waited > 0.5) report();
  }
  void report() { wire_.report_wait({rank_in_job(awaited()), job_.finished << 16 | in_.done().step, false, header}); }

 private:
  // The data of one direction: the pieces of all steps, one after the other, in chunks.
  class Stream {
   public:
    struct Chunk {
      std::size_t step = 0;
      std::int64_t number = 0;  // within its step
    };
    struct UnderWay {
      std::unique_ptr<std::byte[]> staging;
      std::unique_ptr<Wire::Request> request;  // abandoned before the memory that it writes to
    };
    Stream(const std::vector<Step>& steps, int Step::*peer, Piece Step::*piece, std::int64_t chunk)
        : steps_(steps), peer_(peer), piece_(piece), chunk_(chunk) {
      skip(next_);
      skip(done_);
    }
    // Abandons the last request first, so that the peer's remaining messages match the chunks that they are sent for.
    ~Stream() {
      while (!under_way.empty()) under_way.pop_back();
    }

    bool over() const { return done_.step == steps_.size(); }
    bool may_begin() const { return next_.step < steps_.size() && under_way.size() < window; }
    Chunk next() const { return next_; }
    Chunk done() const { return done_; }  // the front of `under_way`
    int peer(Chunk c) const { return steps_[c.step].*peer_; }
    Piece piece(Chunk c) const {
      const Piece whole = steps_[c.step].*piece_;
      return {whole.begin + c.number * chunk_, std::min(whole.begin + (c.number + 1) * chunk_, whole.end)};
    }
    void begin(UnderWay u) {
      under_way.push_back(std::move(u));
      go_on(next_);
    }
    void end() {
      under_way.pop_front();
      go_on(done_);
    }
    // Whether a step before `step` still has to transfer any of these elements in this direction.
    bool awaits(Piece p, std::size_t step) const {
      for (Chunk c = done_; c.step < step; c = {c.step + 1}) {
        const Piece rest{(steps_[c.step].*piece_).begin + c.number * chunk_, (steps_[c.step].*piece_).end};
        if (steps_[c.step].*peer_ >= 0 && std::max(rest.begin, p.begin) < std::min(rest.end, p.end)) return true;
      }
      return false;
    }
    std::deque<UnderWay> under_way;

   private:
    void skip(Chunk& c) const {
      while (c.step < steps_.size() && steps_[c.step].*peer_ < 0) c.step++;
    }
    void go_on(Chunk& c) const {  // an empty piece is one chunk: it is sent too
      if (++c.number * chunk_ < (steps_[c.step].*piece_).length()) return;
      c = {c.step + 1};
      skip(c);
    }

    const std::vector<Step>& steps_;
    int Step::*peer_;
    Piece Step::*piece_;
    std::int64_t chunk_;
    Chunk next_, done_;
  };

  int awaited() const {
    const bool for_in = !in_.over() && !in_waits_for_out_ && (out_.over() || !in_.under_way.empty());
    return for_in ? in_.peer(in_.done()) : out_.peer(out_.done());
  }

  // Steps overlap: a chunk is sent when its data is complete, and received when the data that it replaces was sent.
  bool may_leave(Stream::Chunk c) const {
    // A barrier has no elements that define the dependencies.
    if (header.kind == Kind::barrier) return in_.done().step >= c.step;
    return !in_.awaits(out_.piece(c), c.step);
  }
  bool may_change(Stream::Chunk c) const { return !out_.awaits(in_.piece(c), c.step + 1); }

  bool post() {
    const std::size_t size = size_of(call.data.dtype);
    bool posted = false;
    for (; in_.may_begin(); posted = true) {
      const Stream::Chunk c = in_.next();
      const Piece p = in_.piece(c);
      const bool staged = steps_.list[c.step].combine;
      if (!staged && (in_.awaits(p, c.step) || !may_change(c))) break;
      Stream::UnderWay u;
      if (staged) u.staging = job_.staging();
      void* to = staged ? u.staging.get() : call.data.at(p.begin);
      u.request = wire_.recv(rank_in_job(in_.peer(c)), header, to, std::size_t(p.length()) * size);
      in_.begin(std::move(u));
    }
    for (; out_.may_begin() && may_leave(out_.next()); posted = true) {
      const Piece p = out_.piece(out_.next());
      out_.begin({nullptr, wire_.send(rank_in_job(out_.peer(out_.next())), header, call.data.at(p.begin),
                                      std::size_t(p.length()) * size)});
    }
    return posted;
  }

  void combine(Stream::Chunk c, const std::byte* from) {
    const Piece p = in_.piece(c);
    if (c.step >= steps_.wide_steps || wide_.empty())
      return combine_elements(header.combine, call.data.dtype, call.data.at(p.begin), from, p.length());
    float* wide = wide_.data() + (p.begin - steps_.wide.begin);
    combine_wide(header.combine, wide, reinterpret_cast<const bf16*>(from), p.length());
    if (c.step + 1 == steps_.wide_steps) narrow(reinterpret_cast<bf16*>(call.data.at(p.begin)), wide, p.length());
  }

  int rank_in_job(int rank) const { return group_->ranks[std::size_t(rank)]; }

  std::shared_ptr<MessageGroup> group_;
  Shared& job_;
  Wire& wire_;
  Steps steps_;
  std::vector<float> wide_;
  Clock::time_point since_ = Clock::now();
  Stream in_, out_;
  bool in_waits_for_out_ = false;  // received data waits until the data that it changes was sent
};

bool Shared::carry_on() {
  wire->progress();
  bool moved = false;
  for (auto at = operations_.begin(); at != operations_.end();) {
    auto& operation = static_cast<Collective&>(**at);
    moved = operation.carry_on() || moved;
    // At once, because the next one may throw: a finished operation in the queue would keep the wire alive.
    at = operation.over ? operations_.erase(at) : std::next(at);
  }
  return moved;
}
void Shared::check(Operation& operation) { static_cast<Collective&>(operation).check(); }
void Shared::rest_for(Operation& operation) {
  auto& waiting = static_cast<Collective&>(operation);
  waiting.check();
  waiting.report();
  wire->rest(100);  // this thread has nothing else to do, and a sleep costs more than a message
}

// ---- the communicator -----------------------------------------------------------------------------------------------
class MessageCommunicator : public Communicator {
 public:
  MessageCommunicator(std::shared_ptr<MessageGroup> group, std::uint64_t context)
      : Communicator(group), group_(std::move(group)), context_(context) {}

  Work begin(const Call& call) override {
    if (size() == 1 && !call.is_message()) return {};
    const Header header = header_of(call, call.is_message() ? 0 : ++number_, context_);
    std::shared_ptr<Collective> operation;
    group_->job->guarded([&] { operation = std::make_shared<Collective>(group_, call, header, steps_of(call)); });
    return group_->job->add(std::move(operation));
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    std::vector<std::int32_t> table(std::size_t(size()) * 2);
    table[std::size_t(rank()) * 2] = color;
    table[std::size_t(rank()) * 2 + 1] = key;
    all_gather(buffer(table)).wait();
    if (color < 0) return nullptr;
    std::vector<int> members;
    for (int r = 0; r < size(); r++)
      if (table[std::size_t(r) * 2] == color) members.push_back(r);
    std::ranges::stable_sort(
        members, [&](int a, int b) { return table[std::size_t(a) * 2 + 1] < table[std::size_t(b) * 2 + 1]; });
    const auto me = int(std::ranges::find(members, rank()) - members.begin());
    for (int& r : members) r = group_->ranks[std::size_t(r)];
    // The same on all members and different from every other communicator: a hash of its origin.
    const std::uint64_t context =
        ((context_ * 0x9e3779b97f4a7c15u) ^ number_) * 0x9e3779b97f4a7c15u + std::uint64_t(color);
    return std::make_unique<MessageCommunicator>(std::make_shared<MessageGroup>(group_->job, members, me), context);
  }

  void rest() override { group_->job->wire->rest(1); }
  void wake() override { group_->job->wire->wake(); }
  Traffic traffic() const override { return {group_->job->wire->bytes_sent(), group_->job->wire->transport()}; }

 private:
  Steps steps_of(const Call& call) const {
    const Buffer& data = call.data;
    const bool bf16_sums = data.dtype == DType::bf16;
    switch (call.kind) {
      case Kind::send: return {.list = {{.to = call.peer, .out = {0, data.count}}}};
      case Kind::recv: return {.list = {{.from = call.peer, .in = {0, data.count}}}};
      case Kind::broadcast:
        return broadcast_steps(choose(group_->job->table.broadcast, data.bytes()), rank(), size(), data.count,
                               call.peer);
      case Kind::all_reduce: {
        Algorithm algorithm = choose(group_->job->table.all_reduce, data.bytes());
        // Halving is for powers of two: with other sizes one rank would send the data of two.
        if (algorithm == Algorithm::halving && !std::has_single_bit(unsigned(size()))) algorithm = Algorithm::ring;
        if (bf16_sums && algorithm != Algorithm::doubling) algorithm = Algorithm::direct;
        return all_reduce_steps(algorithm, rank(), size(), data.count);
      }
      case Kind::reduce_scatter:
        return reduce_scatter_steps(bf16_sums ? Algorithm::direct : Algorithm::ring, rank(), size(), call.cuts);
      case Kind::all_gather: return all_gather_steps(rank(), size(), call.cuts);
      default: return barrier_steps(rank(), size());
    }
  }

  std::shared_ptr<MessageGroup> group_;
  std::uint64_t context_;
  std::uint32_t number_ = 0;
};

}  // namespace

Messages messages_under(const Communicator& communicator) {
  const auto* g = dynamic_cast<const MessageGroup*>(communicator.group().get());
  require(g != nullptr, "this communicator does not rest on messages");
  return {g->job->wire, g->ranks, g->job->deadline};
}

std::unique_ptr<Communicator> over_messages(std::shared_ptr<Wire> wire, double deadline, ChoiceTable table) {
  std::vector<int> ranks(std::size_t(wire->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int rank = wire->rank();
  auto job = std::make_shared<Shared>();
  job->deadline = deadline;
  job->table = std::move(table);
  job->wire = std::move(wire);
  return std::make_unique<MessageCommunicator>(std::make_shared<MessageGroup>(job, ranks, rank), 1);
}

}  // namespace tandem
