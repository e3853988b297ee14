// Ranks that are threads of a test, and what every communicator is tried with.
#pragma once
#include "dist/collectives/communicator.h"
#include "tests/support.h"

namespace tandem::test {

// Runs body(rank) in a thread for each of n ranks; what each threw, or "".
template <class Body>
std::vector<std::string> ranks_say(int n, const Body& body) {
  std::vector<std::string> said(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; r++)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        said[r] = e.what();
      }
    });
  for (auto& t : threads) t.join();
  return said;
}

inline void all_well(const std::vector<std::string>& said) {
  for (std::size_t r = 0; r < said.size(); r++) EXPECT_EQ(said[r], "") << "rank " << r;
}

// For 20 seconds at most.
inline void wait_until(const std::function<bool()>& done) {
  for (int ms = 0; ms < 20000 && !done(); ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// What every rank threw holds these parts.
inline void all_say(const std::vector<std::string>& said, const std::vector<std::string>& parts) {
  for (std::size_t r = 0; r < said.size(); r++) EXPECT_TRUE(holds(said[r], parts)) << "rank " << r;
}

template <class T>
void same_bits(const std::vector<std::vector<T>>& of_ranks) {
  for (std::size_t r = 1; r < of_ranks.size(); r++) {
    ASSERT_EQ(of_ranks[r].size(), of_ranks[0].size());
    EXPECT_EQ(std::memcmp(of_ranks[r].data(), of_ranks[0].data(), of_ranks[0].size() * sizeof(T)), 0) << "rank " << r;
  }
}

inline Buffer whole(Tensor& t) { return {t.raw_write(), t.numel(), t.dtype()}; }

template <class T>
void is(const T* x, std::int64_t i, double want, const char* what) {
  require(double(x[i]) == want, what, ": element ", i, " is ", double(x[i]), " and should be ", want);
}

// Whole numbers, so that sums are exact (in bf16 up to 256, of 8 ranks): element i of rank r is (i mod 29) + r.
template <class T>
void exercise(Communicator& c, T* x, std::int64_t count) {
  const int n = c.size(), me = c.rank();
  auto of = [](std::int64_t i, int rank) { return double(i % 29 + rank); };
  auto sum = [&](std::int64_t i) { return n * of(i, 0) + n * (n - 1) / 2.0; };
  auto fill = [&] {
    for (std::int64_t i = 0; i < count; i++) x[i] = T(float(of(i, me)));
  };
  const Buffer b{x, count, dtype_of<T>};
  fill();
  c.all_reduce(b).wait();
  for (std::int64_t i = 0; i < count; i++) is(x, i, sum(i), "sum");
  fill();
  c.all_reduce(b, Combine::max).wait();
  for (std::int64_t i = 0; i < count; i++) is(x, i, of(i, n - 1), "maximum");
  fill();
  c.broadcast(b, n - 1).wait();
  for (std::int64_t i = 0; i < count; i++) is(x, i, of(i, n - 1), "broadcast");
  Cuts half = even_cuts(count, n), none = half;
  if (n > 1) half[1] /= 2;
  if (n > 1) none[1] = 0;
  for (const Cuts& given : {Cuts{}, half, none}) {
    const Cuts at = given.empty() ? even_cuts(count, n) : given;
    fill();
    c.all_gather(b, given).wait();
    for (int r = 0; r < n; r++)
      for (std::int64_t i = at[r]; i < at[std::size_t(r) + 1]; i++) is(x, i, of(i, r), "gather");
    fill();
    c.reduce_scatter(b, Combine::sum, given).wait();
    for (std::int64_t i = at[me]; i < at[std::size_t(me) + 1]; i++) is(x, i, sum(i), "scatter");
  }
  c.barrier().wait();
}

template <class T>
void exercise(Communicator& c, std::int64_t count) {
  std::vector<T> x(static_cast<std::size_t>(count));
  exercise(c, x.data(), count);
}

inline const std::vector<std::int64_t> lengths{1, 5, 700, 5000, 70000, 300001};

// One sum of 256 MiB.
constexpr std::int64_t much = 64 << 20;
inline void sum_much(Communicator& c, float* x) {
  for (std::int64_t i = 0; i < much; i++) x[i] = float(i % 1000 + c.rank());
  c.all_reduce({x, much, DType::f32}).wait();
  const int n = c.size();
  for (std::int64_t i = 0; i < much; i++)
    if (x[i] != float(n * int(i % 1000) + n * (n - 1) / 2)) is(x, i, double(n * (i % 1000)) + n * (n - 1) / 2.0, "sum");
}

// Twenty sums of `count` elements at once, waited for in the opposite order.
inline void many_at_once(Communicator& c, std::size_t count) {
  const int n = c.size();
  std::vector<std::vector<float>> x(20, std::vector<float>(count));
  std::vector<Work> works;
  for (std::size_t k = 0; k < x.size(); k++) {
    std::fill(x[k].begin(), x[k].end(), float(k) + float(c.rank()));
    works.push_back(c.all_reduce({x[k].data(), std::int64_t(count), DType::f32}));
  }
  for (std::size_t k = x.size(); k-- > 0;) {
    works[k].wait();
    for (const float sum : {x[k][77], x[k].back()})
      require(sum == float(n) * float(k) + float(n * (n - 1) / 2), "collective ", k, " gave ", sum);
  }
}

// Rank 1 sums one element less than the others: what all of them say must name both counts.
inline void disagree(Communicator& c) {
  std::vector<float> x(c.rank() == 1 ? 9 : 10);
  c.all_reduce({x.data(), std::int64_t(x.size()), DType::f32}).wait();
  c.barrier().wait();
}
inline void expect_disagreement_named(const std::vector<std::string>& said) {
  all_say(said, {"sum of 9 f32", "sum of 10 f32"});
}

}  // namespace tandem::test
