// Collectives in shared memory, and over several hosts of several ranks: threads that map the same memory, each for
// itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "dist/collectives/hierarchy.h"
#include "dist/collectives/in_process.h"
#include "dist/collectives/node.h"
#include "tests/ranks.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

// per_host ranks on each host; the messages between them are in-process ones.
template <class Body>
std::vector<std::string> on_hosts(int ranks, int per_host, const Body& body, double deadline = 30) {
  auto bases = in_process(ranks, {.deadline = deadline});
  return ranks_say(ranks, [&](int r) {
    auto c = hierarchy(std::move(bases[std::size_t(r)]), r / per_host);
    body(*c);
  });
}

TEST(CommunicatorNode, AnyMemory) {
  for (int n : {2, 3, 4, 7})
    all_well(on_hosts(n, n, [](Communicator& c) {
      for (std::int64_t count : lengths) {
        std::vector<float> f(static_cast<std::size_t>(count));
        exercise(c, f.data(), count);
        std::vector<double> d(f.size());
        exercise(c, d.data(), count);
        std::vector<bf16> h(f.size());
        exercise(c, h.data(), count);
      }
    }));
}

TEST(CommunicatorNode, ItsOwnMemoryInPlace) {
  for (int n : {2, 3, 4, 7})
    all_well(on_hosts(n, n, [](Communicator& c) {
      auto memory = c.allocate(300001 * 8 + 4096), other = c.allocate(100000);
      for (std::int64_t count : lengths) {
        exercise(c, static_cast<float*>(memory.get()), count);
        exercise(c, static_cast<double*>(memory.get()) + 3, count);
        exercise(c, static_cast<bf16*>(memory.get()), count);
        if (count <= 10000) exercise(c, static_cast<float*>(other.get()), count);
      }
      // Not at the same place on all ranks: still right.
      exercise(c, static_cast<float*>(memory.get()) + c.rank(), 50000);
    }));
}

// 256 MiB: more than what any transport keeps under way.
TEST(CommunicatorNode, AQuarterOfAGibibyte) {
  all_well(on_hosts(2, 2, [](Communicator& c) {
    sum_much(c, static_cast<float*>(c.allocate(much * sizeof(float)).get()));
    std::vector<float> own(much);
    sum_much(c, own.data());
  }));
}

TEST(CommunicatorNode, ManyAreUnderWayAtOnce) {
  all_well(on_hosts(4, 4, [](Communicator& c) { many_at_once(c, 50000); }));
}

TEST(CommunicatorNode, FractionsHaveTheSameBitsEverywhere) {
  std::vector<std::vector<float>> result(3);
  all_well(on_hosts(3, 3, [&](Communicator& c) {
    for (std::int64_t count : {500, 200000}) {
      std::vector<float> x;
      for (double v : numbers("rank " + std::to_string(c.rank()), count)) x.push_back(float(v));
      c.all_reduce(buffer(x)).wait();
      auto& mine = result[std::size_t(c.rank())];
      mine.insert(mine.end(), x.begin(), x.end());
    }
  }));
  EXPECT_TRUE(result[0] == result[1] && result[0] == result[2]);
}

TEST(CommunicatorNode, DisagreementIsNamed) {
  expect_disagreement_named(on_hosts(3, 3, disagree));
  for (const auto& s : on_hosts(2, 2, [](Communicator& c) { c.allocate(c.rank() ? 4096 : 8192); }))
    EXPECT_NE(s.find("different amounts of memory"), std::string::npos) << s;
}

TEST(CommunicatorNode, WhoLeavesAndWhoStopsIsNamed) {
  auto said = on_hosts(3, 3, [](Communicator& c) {
    std::vector<float> x(100000);
    c.all_reduce(buffer(x)).wait();
    if (c.rank() == 1) throw Error("a full disk");
    c.all_reduce(buffer(x)).wait();
  });
  EXPECT_NE(said[0].find("rank 1, which has left"), std::string::npos) << said[0];
  EXPECT_NE(said[2].find("rank 1, which has left"), std::string::npos) << said[2];
  // Rank 2 waits for what nobody sends, and the others for rank 2.
  said = on_hosts(
      3, 3,
      [](Communicator& c) {
        std::vector<float> x(100000);
        if (c.rank() == 2) c.recv(0, buffer(x), 5).wait();
        c.all_reduce(buffer(x)).wait();
      },
      1);
  for (const auto& s : said) {
    EXPECT_NE(s.find("rank 2 has "), std::string::npos) << s;
    EXPECT_NE(s.find(" for 1 s"), std::string::npos) << s;
  }
}

TEST(CommunicatorNode, WhoWorksForLongerThanTheDeadlineIsWaitedFor) {
  all_well(on_hosts(
      3, 3,
      [](Communicator& c) {
        std::vector<float> x(100000);
        if (c.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        c.all_reduce(buffer(x)).wait();
      },
      0.7));
}

TEST(CommunicatorHierarchy, HostsOfSeveralRanks) {
  for (auto [ranks, per_host] : {std::pair{4, 2}, {6, 3}, {6, 2}, {5, 2}, {3, 1}})
    all_well(on_hosts(ranks, per_host, [](Communicator& c) {
      auto memory = c.allocate(300001 * 4);
      for (std::int64_t count : lengths) {
        std::vector<float> x(static_cast<std::size_t>(count));
        exercise(c, x.data(), count);
        if (memory) exercise(c, static_cast<float*>(memory.get()), count);
      }
      std::vector<std::vector<float>> x(12, std::vector<float>(40000));
      std::vector<Work> works;
      for (std::size_t k = 0; k < x.size(); k++) {
        std::fill(x[k].begin(), x[k].end(), float(k) + float(c.rank()));
        works.push_back(c.all_reduce(buffer(x[k])));
      }
      const int n = c.size();
      for (std::size_t k = 0; k < x.size(); k++) {
        works[k].wait();
        is(x[k].data(), 39999, double(n) * double(k) + n * (n - 1) / 2.0, "sum");
      }
    }));
}

}  // namespace
}  // namespace tandem::test
