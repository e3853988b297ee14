// What every communicator on memory of devices is tried with, on twins that run behind the host's back.
#pragma once
#include "tests/ranks.h"
#include "tests/twin.h"

namespace tandem::test {

// Whole numbers: every order of adding gives the same.
inline std::vector<double> of_rank(int r, std::int64_t count) {
  return numbers("rank " + std::to_string(r), count, -100, 100, 1);
}
inline std::vector<double> over(int n, std::int64_t count, bool sum) {
  std::vector<double> all = of_rank(0, count);
  for (int r = 1; r < n; r++)
    for (std::size_t i = 0; const double v : of_rank(r, count)) {
      all[i] = sum ? all[i] + v : std::max(all[i], v);
      i++;
    }
  return all;
}
// The device has it: what is queued behind the host's back is done.
inline Tensor on(Twin& twin, const std::vector<double>& v) {
  Tensor t = Tensor::of(twin, {std::int64_t(v.size())}, v);
  twin.synchronize();
  return t;
}
// As queues beside its own see it.
inline std::vector<double> beside(Twin& twin, const Tensor& t) {
  std::vector<float> v(std::size_t(t.numel()));
  twin.read(v.data(), t.raw(), t.bytes());
  return {v.begin(), v.end()};
}
inline void expect(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  require(got == want, what, " gave other numbers");
}

inline void sums_and_maxima(Communicator& c, Twin& twin, std::int64_t count) {
  const int n = c.size();
  Tensor sum = on(twin, of_rank(c.rank(), count)), most = on(twin, of_rank(c.rank(), count));
  Work a = c.all_reduce(whole(sum)), b = c.all_reduce(whole(most), Combine::max);
  b.wait();
  a.wait();
  expect(sum.values(), over(n, count, true), "the sum");
  expect(beside(twin, sum), over(n, count, true), "the sum");
  expect(most.values(), over(n, count, false), "the maximum");
}

inline void pieces_and_copies(Communicator& c, Twin& twin) {
  const int n = c.size();
  const std::int64_t count = 101;
  for (const Cuts& cuts : {Cuts{}, n == 2   ? Cuts{0, 0, 101}
                                   : n == 3 ? Cuts{0, 3, 90, 101}
                                            : Cuts{0, 50, 50, 51, 101}}) {
    const Cuts at = cuts.empty() ? even_cuts(count, n) : cuts;
    Tensor x = on(twin, of_rank(c.rank(), count));
    c.reduce_scatter(whole(x), Combine::sum, cuts).wait();
    const auto mine = x.values(), want = over(n, count, true);
    for (std::int64_t i = at[c.rank()]; i < at[std::size_t(c.rank()) + 1]; i++)
      require(mine[i] == want[i], "element ", i, " of the scattered sum");
    c.all_gather(whole(x), cuts).wait();
    expect(x.values(), want, "what was gathered");
  }
  for (int root = 0; root < n; root++) {
    Tensor x = on(twin, of_rank(c.rank(), count));
    c.broadcast(whole(x), root).wait();
    expect(x.values(), of_rank(root, count), "the broadcast");
  }
  c.barrier().wait();
  auto half = c.split(c.rank() % 2, 0);
  Tensor x = on(twin, {double(c.rank())});
  half->all_reduce(whole(x)).wait();
  require(x.item() == (c.rank() % 2 ? (n == 4 ? 4 : 1) : n > 2 ? 2 : 0), "the half gave ", x.item());
}

inline void messages_both_ways(Communicator& c, Twin& twin) {
  const int n = c.size(), to = (c.rank() + 1) % n, from = (c.rank() + n - 1) % n;
  Tensor out = on(twin, of_rank(c.rank(), 97)), in = on(twin, std::vector<double>(97));
  Work sent = c.send(to, whole(out)), got = c.recv(from, whole(in));
  sent.wait();
  got.wait();
  expect(in.values(), of_rank(from, 97), "the message");
}

// All of that on 2 to 4 ranks; on_ranks(n, body) makes them.
template <class OnRanks>
void every_collective(const OnRanks& on_ranks) {
  for (int n : {2, 3, 4}) {
    for (std::int64_t count : {1, 3, 7, 1000, 4099})
      all_well(on_ranks(n, [=](Communicator& c, Twin& twin) { sums_and_maxima(c, twin, count); }));
    all_well(on_ranks(n, pieces_and_copies));
    all_well(on_ranks(n, messages_both_ways));
  }
}

}  // namespace tandem::test
