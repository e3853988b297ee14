#include "dist/collectives/node.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "dist/collectives/node_memory.h"
#include "dist/collectives/operations.h"

namespace tandem {
namespace {

// The operation that a rank begins, for comparison by the others.
struct Intent {
  Header header;
  std::int64_t place = -1;  // segment · 2⁴⁴ + byte in it, of a buffer from allocate()
};

struct ControlBlock {           // one per rank; other ranks write only its doorbell
  struct alignas(64) Arrival {  // for odd and even rounds, each in a cache line
    std::atomic<std::uint64_t> sequence{0};
    Intent intent;
  } arrivals[2];
  alignas(64) std::atomic<std::uint32_t> doorbell{0};
  std::atomic<std::uint32_t> sleeping{0};
};
constexpr std::size_t slot_bytes = 256 << 10, small_bytes = 4096;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, int milliseconds) {
  timespec t{0, milliseconds * 1000000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &t, nullptr, 0);
}
void ring(ControlBlock& block) {
  block.doorbell.fetch_add(1);
  if (block.sleeping.load()) syscall(SYS_futex, &block.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

class NodeCommunicator;

class NodeOperation : public OperationQueue::Operation {
 public:
  NodeOperation(NodeCommunicator& node, const Call& call, const Header& header);

 private:
  friend class NodeCommunicator;
  bool step();    // returns true when a round is over
  void before();  // a round's writes, before this rank arrives
  void after();   // its reads, after all ranks have arrived
  void decide();  // after the first round, in which all ranks publish their intents
  Piece open(int rank) const;
  std::uint64_t sent() const;
  std::size_t bytes(Piece p) const { return std::size_t(p.length()) * size_of(data_.dtype); }
  Piece piece(int rank) const { return {call.cuts[std::size_t(rank)], call.cuts[std::size_t(rank) + 1]}; }

  NodeCommunicator& node_;
  Buffer& data_ = call.data;
  enum class Way { undecided, barrier, small, in_place, slots } way_ = Way::undecided;
  std::int64_t round_ = 0, rounds_ = 1;
  std::uint64_t sequence_ = 0;
  bool entered_ = false;
  int slot_ = 0;
  Clock::time_point since_;  // when the other ranks were first found missing
};

class NodeCommunicator : public QueuedCommunicator {
 public:
  explicit NodeCommunicator(std::unique_ptr<Communicator> base)
      : QueuedCommunicator(base->group()), base_(std::move(base)), ranks_(size()), rank_(rank()) {
    const Messages under = messages_under(*base_);
    wire_ = under.wire;
    job_ranks_ = under.job_ranks;
    deadline_ = under.deadline;
    const std::size_t control_blocks = (std::size_t(ranks_) * sizeof(ControlBlock) + 4095) / 4096 * 4096;
    arena_ = share(control_blocks + std::size_t(ranks_) * 2 * slot_bytes);
    control_blocks_ = reinterpret_cast<ControlBlock*>(arena_.get());
    slots_ = arena_.get() + control_blocks;
    new (&control_blocks_[rank_]) ControlBlock;
    base_->barrier().wait();
    const bool own_core = int(std::thread::hardware_concurrency()) >= ranks_;
    spins_ = own_core ? 3000 : 40;
    spins_per_yield_ = own_core ? 100 : 1;
  }

  Work begin(const Call& call) override {
    if (call.is_message()) return base_->begin(call);
    return add(std::make_shared<NodeOperation>(*this, call, header_of(call, ++number_)));
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = base_->split(color, key);
    return part ? on_node(std::move(part)) : nullptr;
  }
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    const std::size_t each = (bytes + 4095) / 4096 * 4096;
    auto whole = share(each * std::size_t(ranks_));
    segments_.push_back({whole, each});
    return {whole, whole.get() + each * std::size_t(rank_)};
  }

  void rest() override {
    ControlBlock& mine = control_blocks_[rank_];
    const std::uint32_t doorbell = mine.doorbell.load();
    if (doorbell == doorbell_seen_) {
      mine.sleeping.fetch_add(1);
      if (!front_arrived()) futex_wait(mine.doorbell, doorbell, 5);
      mine.sleeping.fetch_sub(1);
    }
    doorbell_seen_ = mine.doorbell.load();
  }
  void wake() override { ring(control_blocks_[rank_]); }
  Traffic traffic() const override { return {bytes_ + base_->traffic().bytes, "shared memory"}; }

 private:
  friend class NodeOperation;
  struct SharedSegment {
    std::shared_ptr<std::byte> memory;
    std::size_t each;  // bytes per rank
  };

  // Memory that all ranks share. Rank 0 makes it; the others find it by rank 0's process id and a name.
  std::shared_ptr<std::byte> share(std::size_t bytes) {
    std::vector<double> offer{double(getpid()), double(reinterpret_cast<std::uintptr_t>(this)), double(bytes)};
    std::shared_ptr<void> mine;
    std::string why = "/proc does not show it";
    if (rank_ == 0) try {
        mine = memory_->share(bytes);
      } catch (const Error& e) {
        why = e.what();
      }
    base_->broadcast(buffer(offer), 0).wait();
    auto* at = static_cast<std::byte*>(mine.get());
    if (rank_ != 0) at = memory_->of(int(offer[0]), words_of(offer[1]), blocks_).data();
    blocks_++;
    std::vector<float> failed{at ? 0.f : 1.f, offer[2] == double(bytes) ? 0.f : 1.f};
    base_->all_reduce(buffer(failed)).wait();
    if (failed[1] > 0)
      tandem::fail("the ranks of this host ask for different amounts of memory: they do not train the same model");
    if (failed[0] > 0) tandem::fail("the ranks of this host cannot share ", bytes >> 20, " MiB of memory: ", why);
    if (mine) return {mine, at};
    return {memory_, at};
  }
  static std::string words_of(double communicator) { return std::to_string(std::uint64_t(communicator)); }

  NodeOperation& front() const { return static_cast<NodeOperation&>(*operations_.front()); }
  bool arrived(std::uint64_t sequence) const {
    for (int r = 0; r < ranks_; r++)
      if (control_blocks_[r].arrivals[sequence % 2].sequence.load(std::memory_order_acquire) < sequence) return false;
    return true;
  }
  bool front_arrived() const { return !operations_.empty() && front().entered_ && arrived(front().sequence_); }
  int last_to_arrive(std::uint64_t sequence) const {
    for (int r = 0; r < ranks_; r++)
      if (control_blocks_[r].arrivals[sequence % 2].sequence.load() < sequence) return r;
    return rank_;
  }
  void arrive(std::uint64_t sequence) {
    control_blocks_[rank_].arrivals[sequence % 2].sequence.store(sequence);
    for (int r = 0; r < ranks_; r++)
      if (r != rank_ && control_blocks_[r].sleeping.load()) ring(control_blocks_[r]);
  }
  std::byte* slot(int rank, int which) const {
    return slots_ + (std::size_t(rank) * 2 + std::size_t(which)) * slot_bytes;
  }

  std::int64_t place_of(Buffer data) const {
    const auto* at = static_cast<const std::byte*>(data.data);
    for (std::size_t s = 0; s < segments_.size(); s++) {
      const std::byte* mine = segments_[s].memory.get() + segments_[s].each * std::size_t(rank_);
      if (at >= mine && at + data.bytes() <= mine + segments_[s].each) return (std::int64_t(s) << 44) + (at - mine);
    }
    return -1;
  }
  std::byte* at_place(std::int64_t place, int rank) const {
    const SharedSegment& s = segments_[std::size_t(place >> 44)];
    return s.memory.get() + s.each * std::size_t(rank) + (place & ((std::int64_t(1) << 44) - 1));
  }

  void report_wait() {
    const NodeOperation& o = front();
    wire_->report_wait({job_ranks_[std::size_t(last_to_arrive(o.sequence_))], o.sequence_, false, o.header});
    wait_reported_ = true;
  }
  // Operations are executed one after the other: each waits for the front of the queue.
  void check(Operation&) override {
    NodeOperation& o = front();
    const int last = last_to_arrive(o.sequence_), job = job_ranks_[std::size_t(last)];
    const bool gone = o.entered_ && last != rank_ && wire_->left(job) && !arrived(o.sequence_);
    wire_->progress();  // after left(): a rank that fails reports it before it leaves
    if (gone)
      throw CommunicationError(
          job, describe(o.header) + ": " + where(rank_) + " waits for " + where(last) + ", which has left");
    if (o.since_ == Clock::time_point()) o.since_ = Clock::now();
    const double waited = seconds_since(o.since_);
    if (waited > 0.5) report_wait();
    if (waited > deadline_)
      wire_->waited_too_long(
          job, describe(o.header) + ": " + where(last) + " has not come for " + std::to_string(int(deadline_)) + " s");
  }
  void rest_for(Operation& operation) override {
    for (int i = 1; i <= spins_; i++) {
      if (i % spins_per_yield_ == 0) sched_yield();  // the awaited rank may need this core
      if (carry_on()) return;
    }
    check(operation);
    report_wait();
    rest();
  }
  bool carry_on() override {
    bool moved = false;
    while (!operations_.empty() && front().step()) {
      moved = true;
      if (front().over) operations_.pop_front();
    }
    if (moved && std::exchange(wait_reported_, false)) wire_->report_wait({});
    return moved;
  }

  std::unique_ptr<Communicator> base_;
  const std::shared_ptr<NodeMemory> memory_ =
      std::make_shared<NodeMemory>(words_of(double(reinterpret_cast<std::uintptr_t>(this))));
  int blocks_ = 0;  // made so far, in rank 0's memory_
  std::shared_ptr<Wire> wire_;
  std::vector<int> job_ranks_;
  double deadline_;
  int ranks_, rank_;
  int spins_, spins_per_yield_;  // polls before a waiting rank sleeps; and per yield
  std::shared_ptr<std::byte> arena_;
  ControlBlock* control_blocks_;
  std::byte* slots_;
  std::vector<SharedSegment> segments_;
  std::uint64_t sequences_ = 0, uses_ = 0, bytes_ = 0;
  std::uint32_t number_ = 0, doorbell_seen_ = 0;
  bool wait_reported_ = false;  // this rank's wait was reported to the others
};

// ---- an operation ---------------------------------------------------------------------------------------------------
NodeOperation::NodeOperation(NodeCommunicator& node, const Call& call, const Header& header)
    : Operation(node, call, header), node_(node) {}

bool NodeOperation::step() {
  if (!entered_) {
    sequence_ = ++node_.sequences_;
    if (round_ == 0) {
      node_.control_blocks_[node_.rank_].arrivals[sequence_ % 2].intent = {header, node_.place_of(data_)};
      if (call.kind != Kind::barrier && data_.bytes() <= small_bytes) way_ = Way::small;
    }
    before();
    entered_ = true;
    node_.arrive(sequence_);
    since_ = {};
  }
  if (!node_.arrived(sequence_)) return false;
  if (round_ == 0) decide(), node_.bytes_ += sent();
  after();
  entered_ = false;
  over = ++round_ == rounds_;
  return true;
}

void NodeOperation::decide() {
  auto intent = [&](int r) -> const Intent& { return node_.control_blocks_[r].arrivals[sequence_ % 2].intent; };
  bool same_place = true;
  for (int r = 0; r < node_.ranks_; r++) {
    const Intent& theirs = intent(r);
    if (theirs.header.kind != header.kind || !theirs.header.agrees(header))
      throw CommunicationError(node_.job_ranks_[std::size_t(r)],
                               mismatch(node_.where(r), theirs.header, node_.where(node_.rank_), header));
    same_place = same_place && theirs.place == intent(0).place && theirs.place >= 0;
  }
  if (way_ == Way::small) return;
  if (call.kind == Kind::barrier) {
    way_ = Way::barrier;
    return;
  }
  const bool reduces = call.kind == Kind::all_reduce;
  if (same_place) {
    way_ = Way::in_place;
    rounds_ = 2;  // the second: no rank uses another's memory any more
    return;
  }
  way_ = Way::slots;
  std::int64_t longest = data_.count;
  if (call.kind == Kind::all_gather) {
    longest = 0;
    for (int r = 0; r < node_.ranks_; r++) longest = std::max(longest, piece(r).length());
  }
  const auto per_slot = std::int64_t(slot_bytes / size_of(data_.dtype));
  rounds_ = 1 + (longest + per_slot - 1) / per_slot * (reduces ? 2 : 1);
}

// The bytes of this rank that the others read, plus those that it writes for them.
std::uint64_t NodeOperation::sent() const {
  const auto others = std::uint64_t(node_.ranks_ - 1), all = std::uint64_t(data_.bytes()),
             share = all / std::uint64_t(node_.ranks_);
  switch (call.kind) {
    case Kind::broadcast: return call.peer == node_.rank_ ? others * all : 0;
    case Kind::all_reduce: return 2 * others * share;
    case Kind::reduce_scatter: return all - bytes(piece(node_.rank_));
    case Kind::all_gather: return others * bytes(piece(node_.rank_));
    default: return 0;
  }
}

// Elements of rank r's buffer that others can read in this round: all that it contributes, or as many as a slot holds.
Piece NodeOperation::open(int r) const {
  const Piece whole = call.kind == Kind::all_gather ? piece(r) : Piece{0, data_.count};
  if (way_ != Way::slots) return whole;
  const auto per_slot = std::int64_t(slot_bytes / size_of(data_.dtype));
  const std::int64_t from = whole.begin + (round_ - 1) / (call.kind == Kind::all_reduce ? 2 : 1) * per_slot;
  return {std::min(from, whole.end), std::min(from + per_slot, whole.end)};
}

// into = the combination of the ranks' elements, in the order of ranks; in bf16 with one rounding.
template <class From>
void reduce(Combine combine, DType dtype, int ranks, std::int64_t count, std::byte* into, const From& from) {
  const std::size_t bytes = std::size_t(count) * size_of(dtype);
  if (dtype == DType::bf16) {
    float wide[1024];
    const auto* first = reinterpret_cast<const bf16*>(from(0));
    widen(wide, first, count);
    for (int r = 1; r < ranks; r++) combine_wide(combine, wide, reinterpret_cast<const bf16*>(from(r)), count);
    narrow(reinterpret_cast<bf16*>(into), wide, count);
    return;
  }
  if (into != from(0)) std::memcpy(into, from(0), bytes);
  for (int r = 1; r < ranks; r++) combine_elements(combine, dtype, into, from(r), count);
}

// Shares end at multiples of a cache line, so that no two ranks write to the same line.
Piece share(std::int64_t count, int rank, int ranks, std::int64_t line = 64) {
  auto cut = [&](int r) { return r == ranks ? count : count * r / ranks / line * line; };
  return {cut(rank), cut(rank + 1)};
}

void NodeOperation::before() {
  const int me = node_.rank_;
  const bool second = call.kind == Kind::all_reduce && round_ > 0 && round_ % 2 == 0;  // the slots hold sums
  if ((way_ != Way::small && way_ != Way::slots) || second) return;
  slot_ = int(node_.uses_++ % 2);
  if (call.kind == Kind::broadcast && call.peer != me) return;
  if (const Piece p = open(me); p.length() > 0) std::memcpy(node_.slot(me, slot_), data_.at(p.begin), bytes(p));
}

void NodeOperation::after() {
  if (way_ == Way::barrier || (way_ == Way::slots && round_ == 0) || (way_ == Way::in_place && round_ == 1)) return;
  const int me = node_.rank_, n = node_.ranks_;
  const bool in_place = way_ == Way::in_place;
  const std::int64_t place = in_place ? node_.place_of(data_) : 0;
  auto of = [&](int r, std::int64_t at) {  // the shared address of element `at` of rank r
    return (in_place ? node_.at_place(place, r) : node_.slot(r, slot_)) +
           std::size_t(at - (in_place ? 0 : open(r).begin)) * size_of(data_.dtype);
  };
  auto copy = [&](int r, Piece p) {
    if (r != me && p.length() > 0) std::memcpy(data_.at(p.begin), of(r, p.begin), bytes(p));
  };
  constexpr std::int64_t block = 1024;                     // elements that stay in the first-level cache
  auto combine = [&](Piece p, auto&& into, auto&& then) {  // block by block: into(block) = the sum; then(block)
    for (Piece b{p.begin, 0}; b.begin < p.end; b.begin = b.end) {
      b.end = std::min(b.begin + block, p.end);
      reduce(call.combine, data_.dtype, n, b.length(), into(b), [&](int r) { return of(r, b.begin); });
      then(b);
    }
  };
  auto mine = [&](Piece b) { return data_.at(b.begin); };
  auto nothing = [](Piece) {};
  alignas(64) std::byte sum[block * 8];
  auto aside = [&](Piece) { return sum; };  // for results that overwrite their operands

  const Piece p = open(me);
  switch (call.kind) {
    case Kind::broadcast: return copy(call.peer, p);
    case Kind::all_gather:
      for (int r = 0; r < n; r++) copy(r, open(r));
      return;
    case Kind::reduce_scatter: {
      const Piece wanted{std::max(p.begin, piece(me).begin), std::min(p.end, piece(me).end)};
      if (!in_place) return combine(wanted, mine, nothing);
      return combine(wanted, aside, [&](Piece b) { std::memcpy(mine(b), sum, bytes(b)); });
    }
    default: break;  // all_reduce: each rank computes the sums of a share
  }
  auto share_of = [&](int r) {
    const Piece s = share(p.length(), r, n);
    return Piece{p.begin + s.begin, p.begin + s.end};
  };
  if (way_ == Way::small) return combine(p, mine, nothing);
  if (in_place) {
    return combine(share_of(me), aside, [&](Piece b) {
      for (int r = 0; r < n; r++) std::memcpy(of(r, b.begin), sum, bytes(b));
    });
  }
  // In slots: first each rank writes its share to its own slot. Then all ranks copy all shares.
  if (round_ % 2 == 1)
    return combine(share_of(me), aside, [&](Piece b) { std::memcpy(of(me, b.begin), sum, bytes(b)); });
  for (int r = 0; r < n; r++)
    if (const Piece s = share_of(r); s.length() > 0) std::memcpy(data_.at(s.begin), of(r, s.begin), bytes(s));
}

}  // namespace

std::unique_ptr<Communicator> on_node(std::unique_ptr<Communicator> base) {
  return std::make_unique<NodeCommunicator>(std::move(base));
}

}  // namespace tandem
