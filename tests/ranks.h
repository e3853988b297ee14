// Ranks that are threads of a test, and what every communicator is tried with.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "dist/communicator.h"

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
        said[static_cast<std::size_t>(r)] = e.what();
      }
    });
  for (auto& t : threads) t.join();
  return said;
}

inline void all_well(const std::vector<std::string>& said) {
  for (std::size_t r = 0; r < said.size(); r++) EXPECT_EQ(said[r], "") << "rank " << r;
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
    require(x[k][77] == float(n) * float(k) + float(n * (n - 1) / 2), "collective ", k, " gave ", x[k][77]);
  }
}

// Rank 1 sums one element less than the others: what all of them say must name both counts.
inline void disagree(Communicator& c) {
  std::vector<float> x(c.rank() == 1 ? 9 : 10);
  c.all_reduce({x.data(), std::int64_t(x.size()), DType::f32}).wait();
  c.barrier().wait();
}
inline void expect_disagreement_named(const std::vector<std::string>& said) {
  for (const auto& s : said) {
    EXPECT_NE(s.find("sum of 9 f32"), std::string::npos) << s;
    EXPECT_NE(s.find("sum of 10 f32"), std::string::npos) << s;
  }
}

}  // namespace tandem::test
