// Communicators over messages: carries out the steps of algorithms.h, in chunks, so that a chunk is combined while the next
// one travels.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <numeric>

#include "dist/algorithms.h"
#include "dist/wire.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

class Collective;

// What all communicators of a rank share.
struct Job {
  std::shared_ptr<Wire> wire;
  double deadline = 300;
  ChoiceTable table;
  std::vector<Collective*> under_way;  // whoever waits for one carries on all: another rank may wait for any
  std::uint64_t finished = 0;
  std::string broken;  // why; empty: it works
  int culprit = -1;

  // What fails is told to the others, once; from then on everything here fails with the same words.
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

struct Group {
  std::shared_ptr<Job> job;
  std::vector<int> ranks;  // in the job
  int rank = 0;            // here
  std::uint64_t context = 1;
  std::uint32_t number = 0;
  int size() const { return int(ranks.size()); }
};

// ---- one operation under way -------------------------------------------------------------------------------------------
class Collective : public Work::Operation {
 public:
  static constexpr std::size_t chunk_bytes = 512 << 10;
  static constexpr std::size_t window = 8;  // chunks under way in each direction

  Collective(std::shared_ptr<Group> group, const Header& header, Buffer data, Steps steps)
      : group_(std::move(group)),
        job_(*group_->job),
        wire_(*job_.wire),
        header_(header),
        data_(data),
        steps_(std::move(steps)) {
    chunk_ = std::int64_t(chunk_bytes / size_of(data.dtype));
    if (data.dtype == DType::bf16 && steps_.wide_steps > 0) {
      wide_.resize(std::size_t(steps_.wide.length()));
      widen(wide_.data(), reinterpret_cast<const bf16*>(data_.at(steps_.wide.begin)), steps_.wide.length());
    }
    job_.try_to([&] {
      if (header.kind != Kind::message) wire_.announce(header, group_->size());
      begin();
    });
    job_.under_way.push_back(this);
  }
  ~Collective() override { std::erase(job_.under_way, this); }

  bool advance() override {
    job_.try_to([&] {
      wire_.progress();
      for (Collective* each : job_.under_way) each->carry_on();
      if (!over() && seconds() > job_.deadline) too_late();
    });
    return over();
  }

  void wait() override {
    while (!advance()) {
      wire_.stand({.waits_for = job(awaited()), .steps = far()});
      wire_.rest();
    }
    wire_.stand({});
  }

 private:
  // A piece cut into chunks; the front of `under_way` is chunk `done`.
  struct Stream {
    Piece piece;
    std::int64_t next = 0, done = 0, chunks = 0;
    std::deque<std::unique_ptr<Wire::Request>> under_way;
    bool over() const { return done == chunks; }
  };

  bool over() const { return at_ == steps_.list.size(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }
  const Step& step() const { return steps_.list[at_]; }
  Piece part(const Stream& s, std::int64_t k) const {
    return {s.piece.begin + k * chunk_, std::min(s.piece.begin + (k + 1) * chunk_, s.piece.end)};
  }
  int awaited() const { return !in_.over() ? step().from : step().to; }

  void begin() {
    if (over()) return;
    auto stream = [&](int peer, Piece p) {
      Stream s{.piece = p, .under_way = {}};
      s.chunks =
          peer < 0 ? 0 : std::max<std::int64_t>(1, (p.length() + chunk_ - 1) / chunk_);  // an empty one is sent too
      return s;
    };
    in_ = stream(step().from, step().in);
    out_ = stream(step().to, step().out);
    if (step().combine) {
      const auto length =
          std::size_t(std::min<std::int64_t>(window, in_.chunks) * std::min(chunk_, step().in.length()));
      staging_.resize(std::max(staging_.size(), length * size_of(data_.dtype)));
    }
    post();
  }

  std::byte* staging(std::int64_t k) {
    return staging_.data() + std::size_t(k % std::int64_t(window)) * std::size_t(std::min(chunk_, step().in.length())) *
                                 size_of(data_.dtype);
  }

  void post() {
    const std::size_t size = size_of(data_.dtype);
    for (; in_.next < in_.chunks && in_.under_way.size() < window; in_.next++) {
      const Piece p = part(in_, in_.next);
      void* to = step().combine ? staging(in_.next) : data_.at(p.begin);
      in_.under_way.push_back(wire_.recv(job(step().from), header_, to, std::size_t(p.length()) * size));
    }
    for (; out_.next < out_.chunks && out_.under_way.size() < window; out_.next++) {
      const Piece p = part(out_, out_.next);
      out_.under_way.push_back(wire_.send(job(step().to), header_, data_.at(p.begin), std::size_t(p.length()) * size));
    }
  }

  // What is combined is also what is sent: each chunk leaves before it changes.
  bool exchanges() const {
    return step().combine && step().to >= 0 && step().in.begin < step().out.end && step().out.begin < step().in.end;
  }

  void carry_on() {
    while (work()) since_ = Clock::now();
  }

  // True when something was finished.
  bool work() {
    if (over()) return false;
    bool moved = false;
    while (!out_.under_way.empty() && out_.under_way.front()->done()) {
      out_.under_way.pop_front();
      out_.done++;
      if (!moved) wire_.stand({});
      moved = true;
    }
    while (!in_.under_way.empty() && in_.under_way.front()->done() && (!exchanges() || out_.done > in_.done)) {
      if (step().combine) combine(in_.done);
      in_.under_way.pop_front();
      in_.done++;
      if (!moved) wire_.stand({});
      moved = true;
    }
    if (moved) post();
    if (in_.over() && out_.over()) {
      if (++at_ == steps_.list.size()) job_.finished++;
      if (at_ == steps_.wide_steps && !wide_.empty())
        narrow(reinterpret_cast<bf16*>(data_.at(steps_.wide.begin)), wide_.data(), steps_.wide.length());
      begin();
      return true;
    }
    return moved;
  }

  void combine(std::int64_t k) {
    const Piece p = part(in_, k);
    if (at_ < steps_.wide_steps && !wide_.empty())
      combine_wide(header_.combine, wide_.data() + (p.begin - steps_.wide.begin),
                   reinterpret_cast<const bf16*>(staging(k)), p.length());
    else
      combine_elements(header_.combine, data_.dtype, data_.at(p.begin), staging(k), p.length());
  }

  std::uint64_t far() const { return job_.finished << 16 | at_; }
  int job(int rank) const { return group_->ranks[std::size_t(rank)]; }

  void too_late() {
    const int waits_for = job(awaited());
    const int blamed = wire_.blame(waits_for);
    char time[32];
    std::snprintf(time, sizeof time, "%g s", job_.deadline);
    std::string text = describe(header_) + ": " + wire_.where(wire_.rank()) + " has heard nothing from " +
                       wire_.where(waits_for) + " for " + time;
    if (blamed != waits_for) text += ", which waits for " + wire_.where(blamed);
    throw CommunicationError(blamed, text);
  }

  std::shared_ptr<Group> group_;
  Job& job_;
  Wire& wire_;
  Header header_;
  Buffer data_;
  Steps steps_;
  std::int64_t chunk_;
  std::size_t at_ = 0;
  std::vector<std::byte> staging_;
  std::vector<float> wide_;
  Clock::time_point since_ = Clock::now();
  Stream in_, out_;  // last: they are given up before the memory that they write to
};

// ---- the communicator --------------------------------------------------------------------------------------------------
class MessageCommunicator : public Communicator {
 public:
  explicit MessageCommunicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  int rank() const override { return group_->rank; }
  int size() const override { return group_->size(); }
  std::string where(int rank) const override { return group_->job->wire->where(group_->ranks[std::size_t(rank)]); }

  const Group& group() const { return *group_; }

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
    auto part = std::make_shared<Group>(*group_);
    part->ranks.clear();
    for (std::size_t i = 0; i < members.size(); i++) {
      if (members[i] == rank()) part->rank = int(i);
      part->ranks.push_back(group_->ranks[std::size_t(members[i])]);
    }
    // The same on all members, and different from every other communicator's: a mixture of where it came from.
    part->context =
        ((group_->context * 0x9e3779b97f4a7c15u) ^ group_->number) * 0x9e3779b97f4a7c15u + std::uint64_t(color);
    part->number = 0;
    return std::make_unique<MessageCommunicator>(part);
  }

  void rest() override { group_->job->wire->rest(); }
  void wake() override { group_->job->wire->wake(); }
  std::uint64_t bytes_sent() const override { return group_->job->wire->bytes_sent(); }
  std::string transport() const override { return group_->job->wire->transport(); }
  void fail(int culprit, const std::string& text) override { group_->job->fail(culprit, text); }
  std::vector<int> survivors() override { return group_->job->wire->survivors(); }

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

  std::shared_ptr<Group> group_;
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

int culprit(const std::vector<Standing>& all, int rank) {
  std::vector<bool> seen(all.size());
  int at = rank;
  while (!seen[std::size_t(at)] && !all[std::size_t(at)].left && all[std::size_t(at)].waits_for >= 0) {
    seen[std::size_t(at)] = true;
    at = all[std::size_t(at)].waits_for;
  }
  const Standing& last = all[std::size_t(at)];
  if (last.left || last.waits_for < 0) return at;
  // `at` lies on a circle: across the gap, the sender has gone on and the receiver has not.
  auto gap = [&](int i) {
    return std::int64_t(all[std::size_t(all[std::size_t(i)].waits_for)].steps - all[std::size_t(i)].steps);
  };
  int widest = at;
  for (int i = last.waits_for; i != at; i = all[std::size_t(i)].waits_for)
    if (gap(i) > gap(widest)) widest = i;
  return all[std::size_t(widest)].waits_for;
}

Messages messages_under(const Communicator& communicator) {
  const auto* c = dynamic_cast<const MessageCommunicator*>(&communicator);
  require(c != nullptr, "this communicator does not rest on messages");
  return {c->group().job->wire, c->group().ranks, c->group().job->deadline};
}

std::unique_ptr<Communicator> over_messages(std::shared_ptr<Wire> wire, double deadline, ChoiceTable table) {
  auto group = std::make_shared<Group>();
  group->rank = wire->rank();
  group->ranks.resize(std::size_t(wire->size()));
  std::iota(group->ranks.begin(), group->ranks.end(), 0);
  group->job = std::make_shared<Job>();
  group->job->deadline = deadline;
  group->job->table = std::move(table);
  group->job->wire = std::move(wire);
  return std::make_unique<MessageCommunicator>(group);
}

namespace {
class Alone : public Communicator {
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string where(int) const override { return "rank 0"; }
  Work send(int to, Buffer, int) override { fail_with("send", to); }
  Work recv(int from, Buffer, int) override { fail_with("recv", from); }
  Work broadcast(Buffer, int) override { return {}; }
  Work all_reduce(Buffer, Combine) override { return {}; }
  Work reduce_scatter(Buffer, Combine, const Cuts&) override { return {}; }
  Work all_gather(Buffer, const Cuts&) override { return {}; }
  Work barrier() override { return {}; }
  std::unique_ptr<Communicator> split(int color, int) override { return color < 0 ? nullptr : alone(); }
  [[noreturn]] static void fail_with(const char* what, int peer) {
    tandem::fail(what, ": there is only one rank, and no rank ", peer);
  }
};
}  // namespace

std::unique_ptr<Communicator> alone() { return std::make_unique<Alone>(); }

}  // namespace tandem
