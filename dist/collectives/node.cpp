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

class NodeCommunicator : public QueuedCommunicator {
 public:
  explicit NodeCommunicator(std::unique_ptr<Communicator> base)
      : QueuedCommunicator(base->group()),
        base_(std::move(base)),
        under_(messages_under(*base_)),
        ranks_(size()),
        rank_(rank()) {
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
    return add(std::make_shared<Collective>(*this, call, header_of(call, ++number_)));
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
  enum class Way { undecided, barrier, small, in_place, slots };
  struct Collective : Operation {
    using Operation::Operation;
    std::size_t bytes(Piece p) const { return std::size_t(p.length()) * size_of(call.data.dtype); }
    Piece piece(int rank) const { return {call.cuts[std::size_t(rank)], call.cuts[std::size_t(rank) + 1]}; }
    std::int64_t per_slot() const { return std::int64_t(slot_bytes / size_of(call.data.dtype)); }  // elements
    int rounds_per_slot() const { return call.kind == Kind::all_reduce ? 2 : 1; }

    Way way = Way::undecided;
    std::int64_t round = 0, rounds = 1;
    std::uint64_t sequence = 0;
    bool entered = false;
    int slot = 0;
    Clock::time_point since = {};  // when the other ranks were first found missing
  };
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

  bool step(Collective& o);          // returns true when a round is over
  void before(Collective& o);        // a round's writes, before this rank arrives
  void after(const Collective& o);   // its reads, after all ranks have arrived
  void decide(Collective& o) const;  // after the first round, in which all ranks publish their intents
  Piece open(const Collective& o, int rank) const;
  std::uint64_t sent(const Collective& o) const;

  Collective& front() const { return static_cast<Collective&>(*operations_.front()); }
  bool arrived(std::uint64_t sequence) const {
    for (int r = 0; r < ranks_; r++)
      if (control_blocks_[r].arrivals[sequence % 2].sequence.load(std::memory_order_acquire) < sequence) return false;
    return true;
  }
  bool front_arrived() const { return !operations_.empty() && front().entered && arrived(front().sequence); }
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
    const Collective& o = front();
    under_.wire->report_wait({under_.job_ranks[std::size_t(last_to_arrive(o.sequence))], o.sequence, false, o.header});
    wait_reported_ = true;
  }
  // Operations are executed one after the other: each waits for the front of the queue.
  void check(Operation&) override {
    Collective& o = front();
    const int last = last_to_arrive(o.sequence), job = under_.job_ranks[std::size_t(last)];
    const bool gone = o.entered && last != rank_ && under_.wire->left(job) && !arrived(o.sequence);
    under_.wire->progress();  // after left(): a rank that fails reports it before it leaves
    if (gone)
      throw CommunicationError(
          job, describe(o.header) + ": " + where(rank_) + " waits for " + where(last) + ", which has left");
    if (o.since == Clock::time_point()) o.since = Clock::now();
    const double waited = seconds_since(o.since);
    if (waited > 0.5) report_wait();
    if (waited > under_.deadline)
      under_.wire->waited_too_long(job, describe(o.header) + ": " + where(last) + " has not come for " +
                                            std::to_string(int(under_.deadline)) + " s");
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
    while (!operations_.empty() && step(front())) {
      moved = true;
      if (front().over) operations_.pop_front();
    }
    if (moved && std::exchange(wait_reported_, false)) under_.wire->report_wait({});
    return moved;
  }

  std::unique_ptr<Communicator> base_;
  const Messages under_;
  const std::shared_ptr<NodeMemory> memory_ =
      std::make_shared<NodeMemory>(words_of(double(reinterpret_cast<std::uintptr_t>(this))));
  int blocks_ = 0;  // made so far, in rank 0's memory_
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
bool NodeCommunicator::step(Collective& o) {
  if (!o.entered) {
    o.sequence = ++sequences_;
    if (o.round == 0) {
      control_blocks_[rank_].arrivals[o.sequence % 2].intent = {o.header, place_of(o.call.data)};
      if (o.call.data.bytes() <= small_bytes) o.way = o.call.kind == Kind::barrier ? Way::barrier : Way::small;
    }
    before(o);
    o.entered = true;
    arrive(o.sequence);
    o.since = {};
  }
  if (!arrived(o.sequence)) return false;
  if (o.round == 0) {
    decide(o);
    bytes_ += sent(o);
  }
  after(o);
  o.entered = false;
  o.over = ++o.round == o.rounds;
  return true;
}

void NodeCommunicator::decide(Collective& o) const {
  auto intent = [&](int r) -> const Intent& { return control_blocks_[r].arrivals[o.sequence % 2].intent; };
  bool same_place = true;
  for (int r = 0; r < ranks_; r++) {
    const Intent& theirs = intent(r);
    if (theirs.header.kind != o.header.kind || !theirs.header.agrees(o.header))
      throw CommunicationError(under_.job_ranks[std::size_t(r)],
                               mismatch(where(r), theirs.header, where(rank_), o.header));
    same_place = same_place && theirs.place == intent(0).place && theirs.place >= 0;
  }
  if (o.way != Way::undecided) return;
  o.way = same_place ? Way::in_place : Way::slots;
  o.rounds = 2;  // in place; after the second no rank uses another's memory
  if (same_place) return;
  std::int64_t longest = o.call.data.count;
  if (o.call.kind == Kind::all_gather) {
    longest = 0;
    for (int r = 0; r < ranks_; r++) longest = std::max(longest, o.piece(r).length());
  }
  o.rounds = 1 + (longest + o.per_slot() - 1) / o.per_slot() * o.rounds_per_slot();
}

// The bytes of this rank that the others read, plus those that it writes for them.
std::uint64_t NodeCommunicator::sent(const Collective& o) const {
  const auto others = std::uint64_t(ranks_ - 1), all = std::uint64_t(o.call.data.bytes()),
             share = all / std::uint64_t(ranks_);
  switch (o.call.kind) {
    case Kind::broadcast: return o.call.peer == rank_ ? others * all : 0;
    case Kind::all_reduce: return 2 * others * share;
    case Kind::reduce_scatter: return all - o.bytes(o.piece(rank_));
    case Kind::all_gather: return others * o.bytes(o.piece(rank_));
    default: return 0;
  }
}

// Elements of rank r's buffer that others can read in this round: all that it contributes, or as many as a slot holds.
Piece NodeCommunicator::open(const Collective& o, int r) const {
  const Piece whole = o.call.kind == Kind::all_gather ? o.piece(r) : Piece{0, o.call.data.count};
  if (o.way != Way::slots) return whole;
  const std::int64_t from = whole.begin + (o.round - 1) / o.rounds_per_slot() * o.per_slot();
  return {std::min(from, whole.end), std::min(from + o.per_slot(), whole.end)};
}

// into = the combination of the ranks' elements, in the order of ranks; in bf16 with one rounding.
template <class From>
void reduce(Combine combine, DType dtype, int ranks, std::int64_t count, std::byte* into, const From& from) {
  if (dtype == DType::bf16) {
    float wide[1024];
    const auto* first = reinterpret_cast<const bf16*>(from(0));
    widen(wide, first, count);
    for (int r = 1; r < ranks; r++) combine_wide(combine, wide, reinterpret_cast<const bf16*>(from(r)), count);
    narrow(reinterpret_cast<bf16*>(into), wide, count);
    return;
  }
  std::memcpy(into, from(0), std::size_t(count) * size_of(dtype));
  for (int r = 1; r < ranks; r++) combine_elements(combine, dtype, into, from(r), count);
}

void NodeCommunicator::before(Collective& o) {
  const bool second = o.call.kind == Kind::all_reduce && o.round > 0 && o.round % 2 == 0;  // the slots hold sums
  if ((o.way != Way::small && o.way != Way::slots) || second) return;
  o.slot = int(uses_++ % 2);
  if (o.call.kind == Kind::broadcast && o.call.peer != rank_) return;
  if (const Piece p = open(o, rank_); p.length() > 0)
    std::memcpy(slot(rank_, o.slot), o.call.data.at(p.begin), o.bytes(p));
}

void NodeCommunicator::after(const Collective& o) {
  if (o.way == Way::barrier || (o.way == Way::slots && o.round == 0) || (o.way == Way::in_place && o.round == 1))
    return;
  const Buffer& data = o.call.data;
  const bool in_place = o.way == Way::in_place;
  const std::int64_t place = in_place ? place_of(data) : 0;
  auto of = [&](int r, std::int64_t at) {  // the shared address of element `at` of rank r
    return (in_place ? at_place(place, r) : slot(r, o.slot)) +
           std::size_t(at - (in_place ? 0 : open(o, r).begin)) * size_of(data.dtype);
  };
  auto copy = [&](int r, Piece p) {
    if (p.length() > 0) std::memcpy(data.at(p.begin), of(r, p.begin), o.bytes(p));
  };
  constexpr std::int64_t block = 1024;  // elements that stay in the first-level cache
  alignas(64) std::byte sum[block * 8];
  auto combine = [&](Piece p, auto&& then) {  // block by block: then(block) takes its result from `sum`
    for (Piece b{p.begin, 0}; b.begin < p.end; b.begin = b.end) {
      b.end = std::min(b.begin + block, p.end);
      reduce(o.call.combine, data.dtype, ranks_, b.length(), sum, [&](int r) { return of(r, b.begin); });
      then(b);
    }
  };
  auto into_data = [&](Piece b) { std::memcpy(data.at(b.begin), sum, o.bytes(b)); };

  const Piece p = open(o, rank_);
  switch (o.call.kind) {
    case Kind::broadcast:
      if (o.call.peer != rank_) copy(o.call.peer, p);
      return;
    case Kind::all_gather:
      for (int r = 0; r < ranks_; r++)
        if (r != rank_) copy(r, open(o, r));
      return;
    case Kind::reduce_scatter: {
      const Piece mine = o.piece(rank_);
      return combine({std::max(p.begin, mine.begin), std::min(p.end, mine.end)}, into_data);
    }
    default: break;  // all_reduce
  }
  if (o.way == Way::small) return combine(p, into_data);
  // Each rank computes the sums of a share. Shares end at multiples of a cache line, so that no two ranks write to the
  // same line.
  auto cut = [&](int r) { return r == ranks_ ? p.end : p.begin + p.length() * r / ranks_ / 64 * 64; };
  auto share_of = [&](int r) { return Piece{cut(r), cut(r + 1)}; };
  if (in_place)
    combine(share_of(rank_), [&](Piece b) {
      for (int r = 0; r < ranks_; r++) std::memcpy(of(r, b.begin), sum, o.bytes(b));
    });
  else if (o.round % 2 == 1)  // in slots: first each rank writes its share to its own slot
    combine(share_of(rank_), [&](Piece b) { std::memcpy(of(rank_, b.begin), sum, o.bytes(b)); });
  else  // then all ranks copy all shares
    for (int r = 0; r < ranks_; r++) copy(r, share_of(r));
}

}  // namespace

std::unique_ptr<Communicator> on_node(std::unique_ptr<Communicator> base) {
  return std::make_unique<NodeCommunicator>(std::move(base));
}

}  // namespace tandem
