// Communicators over messages: execute the steps of algorithms.h in chunks. A chunk is combined and forwarded while the
// next one is in flight.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

#include "core/text.h"
#include "dist/collectives/algorithms.h"
#include "dist/collectives/wire.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// A chunk with its header is one fragment of UCX over TCP (64 KiB), which needs no reassembly.
constexpr std::size_t chunk_bytes = 60 << 10;

class Collective;

// The state that all communicators of a rank share.
struct Shared {
  std::shared_ptr<Wire> wire;
  double deadline = 300;
  ChoiceTable table;
  std::vector<Collective*> under_way;  // a wait for one advances all: another rank may wait for any
  std::uint64_t finished = 0;
  std::string broken;  // the failure; empty: none
  int culprit = -1;
  std::vector<std::unique_ptr<std::byte[]>> spare;  // each for one chunk to combine

  std::unique_ptr<std::byte[]> staging() {
    if (spare.empty()) return std::make_unique_for_overwrite<std::byte[]>(chunk_bytes);
    auto last = std::move(spare.back());
    spare.pop_back();
    return last;
  }

  // A failure is sent to the others once. Afterwards every call here fails with the same text.
  template <class F>
  void try_to(const F& body) {
    if (!broken.empty()) throw CommunicationError(culprit, broken);
    try {
      body();
    } catch (const CommunicationError& e) {
      fail(e.rank, e.what());
      throw;
    }
  }
  void fail(int who, const std::string& text) {
    if (!broken.empty()) return;
    broken = text;
    culprit = who;
    wire->fail(who, text);
  }
};

struct MessageGroup : Group {
  MessageGroup(std::shared_ptr<Shared> job, std::vector<int> ranks, int rank, std::uint64_t context)
      : Group(rank, int(ranks.size())), job(std::move(job)), ranks(std::move(ranks)), context(context) {}
  std::string where(int r) const override { return job->wire->where(ranks[std::size_t(r)]); }
  void check() override {
    job->try_to([&] {
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
  std::uint64_t context;
  std::uint32_t number = 0;
};

// ---- one operation in progress --------------------------------------------------------------------------------------
class Collective : public Work::Operation {
 public:
  static constexpr std::size_t window = 16;  // chunks in flight in each direction

  Collective(std::shared_ptr<MessageGroup> group, const Header& header, Buffer data, Steps steps)
      : group_(std::move(group)),
        job_(*group_->job),
        wire_(*job_.wire),
        header_(header),
        data_(data),
        steps_(std::move(steps)),
        in_(steps_.list, &Step::from, &Step::in, std::int64_t(chunk_bytes / size_of(data.dtype))),
        out_(steps_.list, &Step::to, &Step::out, std::int64_t(chunk_bytes / size_of(data.dtype))) {
    if (data.dtype == DType::bf16 && steps_.wide_steps > 0) {
      wide_.resize(std::size_t(steps_.wide.length()));
      widen(wide_.data(), reinterpret_cast<const bf16*>(data_.at(steps_.wide.begin)), steps_.wide.length());
    }
    job_.try_to([&] {
      if (header.kind != Kind::message) wire_.announce(header, group_->size);
      post();
    });
    job_.under_way.push_back(this);
  }
  ~Collective() override { std::erase(job_.under_way, this); }

  bool advance() override {
    job_.try_to([&] {
      wire_.progress();
      for (Collective* each : job_.under_way) each->carry_on();
      if (over()) return;
      const double waited = seconds();
      if (waited > job_.deadline) too_late();
      if (waited > 0.5) wire_.report_wait(edge());
    });
    return over();
  }

  void wait() override {
    while (!advance()) {
      wire_.report_wait(edge());
      wire_.rest(100);  // this thread has nothing else to do, and a sleep costs more than a message
    }
    wire_.report_wait({});
  }

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

  bool over() const { return in_.over() && out_.over(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }
  int awaited() const {
    const bool for_in = !in_.over() && !in_waits_for_out_ && (out_.over() || !in_.under_way.empty());
    return for_in ? in_.peer(in_.done()) : out_.peer(out_.done());
  }

  // Steps overlap: a chunk is sent when its data is complete, and received when the data that it replaces was sent.
  bool may_leave(Stream::Chunk c) const {
    // A barrier has no elements that define the dependencies.
    if (header_.kind == Kind::barrier) return in_.done().step >= c.step;
    return !in_.awaits(out_.piece(c), c.step);
  }
  bool may_change(Stream::Chunk c) const { return !out_.awaits(in_.piece(c), c.step + 1); }

  bool post() {
    const std::size_t size = size_of(data_.dtype);
    bool posted = false;
    for (; in_.may_begin(); posted = true) {
      const Stream::Chunk c = in_.next();
      const Piece p = in_.piece(c);
      const bool staged = steps_.list[c.step].combine;
      if (!staged && (in_.awaits(p, c.step) || !may_change(c))) break;
      Stream::UnderWay u;
      if (staged) u.staging = job_.staging();
      void* to = staged ? u.staging.get() : data_.at(p.begin);
      u.request = wire_.recv(rank_in_job(in_.peer(c)), header_, to, std::size_t(p.length()) * size);
      in_.begin(std::move(u));
    }
    for (; out_.may_begin() && may_leave(out_.next()); posted = true) {
      const Piece p = out_.piece(out_.next());
      out_.begin({nullptr, wire_.send(rank_in_job(out_.peer(out_.next())), header_, data_.at(p.begin),
                                      std::size_t(p.length()) * size)});
    }
    return posted;
  }

  void carry_on() {
    if (over()) return;
    bool moved = false;
    auto moves = [&] {
      if (!std::exchange(moved, true)) wire_.report_wait({});  // before progress: the rank may be stopped in it
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
    if (!moved) return;
    since_ = Clock::now();
    if (over()) job_.finished++;
  }

  void combine(Stream::Chunk c, const std::byte* from) {
    const Piece p = in_.piece(c);
    if (c.step >= steps_.wide_steps || wide_.empty())
      return combine_elements(header_.combine, data_.dtype, data_.at(p.begin), from, p.length());
    float* wide = wide_.data() + (p.begin - steps_.wide.begin);
    combine_wide(header_.combine, wide, reinterpret_cast<const bf16*>(from), p.length());
    if (c.step + 1 == steps_.wide_steps) narrow(reinterpret_cast<bf16*>(data_.at(p.begin)), wide, p.length());
  }

  WaitForEdge edge() const { return {rank_in_job(awaited()), job_.finished << 16 | in_.done().step, false, header_}; }
  int rank_in_job(int rank) const { return group_->ranks[std::size_t(rank)]; }

  void too_late() {
    const int waits_for = rank_in_job(awaited());
    const int blamed = wire_.blame(waits_for);
    if (wire_.works(blamed)) return;
    std::string text = describe(header_) + ": " + wire_.where(wire_.rank()) + " has heard nothing from " +
                       wire_.where(waits_for) + " for " + digits(job_.deadline) + " s";
    if (blamed != waits_for) text += ", which waits for " + wire_.where(blamed);
    throw CommunicationError(blamed, text);
  }

  std::shared_ptr<MessageGroup> group_;
  Shared& job_;
  Wire& wire_;
  Header header_;
  Buffer data_;
  Steps steps_;
  std::vector<float> wide_;
  Clock::time_point since_ = Clock::now();
  Stream in_, out_;
  bool in_waits_for_out_ = false;  // received data waits until the data that it changes was sent
};

// ---- the communicator -----------------------------------------------------------------------------------------------
class MessageCommunicator : public Communicator {
 public:
  explicit MessageCommunicator(std::shared_ptr<MessageGroup> group) : Communicator(group), group_(std::move(group)) {}

  Work send(int to, Buffer data, int tag) override {
    check_peer(to, "send");
    return begin(message(data, tag), data,
                 {.list = {{.to = to, .out = {0, data.count}, .from = -1, .in = {}}}, .wide = {}});
  }
  Work recv(int from, Buffer data, int tag) override {
    check_peer(from, "recv");
    return begin(message(data, tag), data,
                 {.list = {{.to = -1, .out = {}, .from = from, .in = {0, data.count}}}, .wide = {}});
  }
  Work broadcast(Buffer data, int root) override {
    require(root >= 0 && root < size(), "broadcast: there is no rank ", root, " of ", size());
    Header h = collective(Kind::broadcast, data, Combine::sum);
    h.root = std::uint8_t(root);
    return start(h, data, [&] {
      return broadcast_steps(choose(group_->job->table.broadcast, data.bytes()), rank(), size(), data.count, root);
    });
  }
  Work all_reduce(Buffer data, Combine combine) override {
    return start(collective(Kind::all_reduce, data, combine), data, [&] {
      Algorithm algorithm = choose(group_->job->table.all_reduce, data.bytes());
      // Halving is for powers of two: with other sizes one rank would send the data of two.
      if (algorithm == Algorithm::halving && !std::has_single_bit(unsigned(size()))) algorithm = Algorithm::ring;
      if (data.dtype == DType::bf16 && algorithm != Algorithm::doubling) algorithm = Algorithm::direct;
      return all_reduce_steps(algorithm, rank(), size(), data.count);
    });
  }
  Work reduce_scatter(Buffer data, Combine combine, const Cuts& cuts) override {
    return start(collective(Kind::reduce_scatter, data, combine), data, [&] {
      return reduce_scatter_steps(data.dtype == DType::bf16 ? Algorithm::direct : Algorithm::ring, rank(), size(),
                                  checked(cuts, data));
    });
  }
  Work all_gather(Buffer data, const Cuts& cuts) override {
    return start(collective(Kind::all_gather, data, Combine::sum), data,
                 [&] { return all_gather_steps(rank(), size(), checked(cuts, data)); });
  }
  Work barrier() override {
    return start(collective(Kind::barrier, {}, Combine::sum), {}, [&] { return barrier_steps(rank(), size()); });
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    std::vector<std::int32_t> table(std::size_t(size()) * 2);
    table[std::size_t(rank()) * 2] = color;
    table[std::size_t(rank()) * 2 + 1] = key;
    Cuts cuts;
    for (int i = 0; i <= size(); i++) cuts.push_back(2 * i);
    all_gather(buffer(table), cuts).wait();
    if (color < 0) return nullptr;
    std::vector<int> members;
    for (int r = 0; r < size(); r++)
      if (table[std::size_t(r) * 2] == color) members.push_back(r);
    std::stable_sort(members.begin(), members.end(),
                     [&](int a, int b) { return table[std::size_t(a) * 2 + 1] < table[std::size_t(b) * 2 + 1]; });
    const auto me = int(std::find(members.begin(), members.end(), rank()) - members.begin());
    for (int& r : members) r = group_->ranks[std::size_t(r)];
    // The same on all members and different from every other communicator: a hash of its origin.
    const std::uint64_t context =
        ((group_->context * 0x9e3779b97f4a7c15u) ^ group_->number) * 0x9e3779b97f4a7c15u + std::uint64_t(color);
    return std::make_unique<MessageCommunicator>(std::make_shared<MessageGroup>(group_->job, members, me, context));
  }

  void rest() override { group_->job->wire->rest(1); }
  void wake() override { group_->job->wire->wake(); }
  Traffic traffic() const override { return {group_->job->wire->bytes_sent(), group_->job->wire->transport()}; }

 private:
  void check_peer(int peer, const char* what) const {
    require(peer >= 0 && peer < size() && peer != rank(), what, ": rank ", rank(), " of ", size(),
            " cannot exchange with ", peer);
  }
  Cuts checked(const Cuts& cuts, Buffer data) const {
    if (cuts.empty()) return even_cuts(data.count, size());
    require(int(cuts.size()) == size() + 1 && cuts.front() == 0 && cuts.back() == data.count &&
                std::is_sorted(cuts.begin(), cuts.end()),
            "cuts of ", data.count, " elements for ", size(), " ranks must be ", size() + 1,
            " rising numbers from 0 to ", data.count);
    return cuts;
  }
  Header message(Buffer data, int tag) const {
    return {.context = group_->context, .number = std::uint32_t(tag), .dtype = data.dtype, .count = data.count};
  }
  Header collective(Kind kind, Buffer data, Combine combine) {
    return {.context = group_->context,
            .number = ++group_->number,
            .kind = kind,
            .dtype = data.dtype,
            .combine = combine,
            .count = data.count};
  }
  template <class MakeSteps>
  Work start(const Header& header, Buffer data, const MakeSteps& steps) {
    if (size() == 1) return {};
    return begin(header, data, steps());
  }
  Work begin(const Header& header, Buffer data, Steps steps) {
    return Work(std::make_unique<Collective>(group_, header, data, std::move(steps)));
  }

  std::shared_ptr<MessageGroup> group_;
};

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"message", "broadcast", "all_reduce", "reduce_scatter", "all_gather", "barrier"};
  return names[int(kind)];
}

std::string describe(const Header& h) {
  std::string s = name_of(h.kind);
  s += h.kind == Kind::message ? " with tag " : " #";
  s += std::to_string(h.number);
  if (h.kind == Kind::barrier) return s;
  const bool reduces = h.kind == Kind::all_reduce || h.kind == Kind::reduce_scatter;
  s += std::string(" (") + (reduces ? h.combine == Combine::sum ? "sum of " : "maximum of " : "") +
       std::to_string(h.count) + " " + name_of(h.dtype);
  if (h.kind == Kind::broadcast) s += " from rank " + std::to_string(h.root);
  return s + ")";
}

int culprit(const std::vector<WaitForEdge>& all, int rank) {
  std::vector<bool> seen(all.size());
  int at = rank;
  while (!seen[std::size_t(at)] && !all[std::size_t(at)].left && all[std::size_t(at)].waits_for >= 0) {
    seen[std::size_t(at)] = true;
    at = all[std::size_t(at)].waits_for;
  }
  const WaitForEdge& last = all[std::size_t(at)];
  if (last.left || last.waits_for < 0) return at;
  // `at` is on a cycle. At the widest gap the sender has made progress and the receiver has not.
  auto gap = [&](int i) {
    return std::int64_t(all[std::size_t(all[std::size_t(i)].waits_for)].steps - all[std::size_t(i)].steps);
  };
  int widest = at;
  for (int i = last.waits_for; i != at; i = all[std::size_t(i)].waits_for)
    if (gap(i) > gap(widest)) widest = i;
  return all[std::size_t(widest)].waits_for;
}

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
  return std::make_unique<MessageCommunicator>(std::make_shared<MessageGroup>(job, ranks, rank, 1));
}

}  // namespace tandem
