#include "dist/collectives/communicator.h"

#include <algorithm>

#include "dist/collectives/operations.h"

namespace tandem {

Cuts even_cuts(std::int64_t count, int pieces) {
  Cuts cuts;
  for (int i = 0; i <= pieces; i++) cuts.push_back(count * i / pieces);
  return cuts;
}

// ---- the calls ------------------------------------------------------------------------------------------------------
Cuts Communicator::checked(Cuts cuts, Buffer data) const {
  if (cuts.empty()) return even_cuts(data.count, size());
  require(
      int(cuts.size()) == size() + 1 && cuts.front() == 0 && cuts.back() == data.count && std::ranges::is_sorted(cuts),
      "cuts of ", data.count, " elements for ", size(), " ranks must be ", size() + 1, " rising numbers from 0 to ",
      data.count);
  return cuts;
}

Work Communicator::message(Kind kind, int peer, Buffer data, int tag) {
  require(peer >= 0 && peer < size() && peer != rank(), kind == Kind::send ? "send" : "recv", ": rank ", rank(), " of ",
          size(), " cannot exchange with ", peer);
  return begin({.kind = kind, .data = data, .peer = peer, .tag = tag});
}
Work Communicator::broadcast(Buffer data, int root) {
  require(root >= 0 && root < size(), "broadcast: there is no rank ", root, " of ", size());
  return begin({.kind = Kind::broadcast, .data = data, .peer = root});
}
Work Communicator::all_reduce(Buffer data, Combine combine) {
  return begin({.kind = Kind::all_reduce, .data = data, .combine = combine});
}
Work Communicator::reduce_scatter(Buffer data, Combine combine, Cuts cuts) {
  return begin(
      {.kind = Kind::reduce_scatter, .data = data, .combine = combine, .cuts = checked(std::move(cuts), data)});
}
Work Communicator::all_gather(Buffer data, Cuts cuts) {
  return begin({.kind = Kind::all_gather, .data = data, .cuts = checked(std::move(cuts), data)});
}

// ---- their description ----------------------------------------------------------------------------------------------
Header header_of(const Call& call, std::uint32_t number, std::uint64_t context) {
  return {.context = context,
          .number = call.is_message() ? std::uint32_t(call.tag) : number,
          .kind = call.is_message() ? Kind::send : call.kind,
          .dtype = call.data.dtype,
          .combine = call.combine,
          .root = std::uint8_t(call.kind == Kind::broadcast ? call.peer : 0),
          .count = call.data.count};
}

std::string describe(const Header& h) {
  constexpr const char* names[] = {"message",        "message",    "broadcast", "all_reduce",
                                   "reduce_scatter", "all_gather", "barrier"};
  std::string s = names[int(h.kind)];
  s += h.kind == Kind::send ? " with tag " : " #";
  s += std::to_string(h.number);
  if (h.kind == Kind::barrier) return s;
  const bool reduces = h.kind == Kind::all_reduce || h.kind == Kind::reduce_scatter;
  s += std::string(" (") + (reduces ? h.combine == Combine::sum ? "sum of " : "maximum of " : "") +
       std::to_string(h.count) + " " + name_of(h.dtype);
  if (h.kind == Kind::broadcast) s += " from rank " + std::to_string(h.root);
  return s + ")";
}

std::string mismatch(const std::string& one, const Header& ones, const std::string& other, const Header& others) {
  return one + " calls " + describe(ones) + " where " + other + " calls " + describe(others);
}

// ---- waiting for others ---------------------------------------------------------------------------------------------
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

// ---- the queue ------------------------------------------------------------------------------------------------------
bool OperationQueue::Operation::advance() {
  if (over) return true;
  queue.guarded([&] {
    if (!queue.carry_on() && !over) queue.check(*this);
  });
  return over;
}

void OperationQueue::Operation::wait() {
  if (over) return;
  queue.guarded([&] {
    while (!over)
      if (!queue.carry_on() && !over) queue.rest_for(*this);
  });
}

void OperationQueue::Operation::abandon() noexcept {
  if (!over) queue.abandon(*this);
}

}  // namespace tandem
