// Collectives in shared memory, and over several hosts of several ranks: threads that map the same memory, each for
// itself.
#include "dist/collectives/hierarchy.h"
#include "dist/collectives/in_process.h"
#include "dist/collectives/node.h"
#include "tests/ranks.h"

namespace tandem::test {
namespace {

// per_host ranks on each host; the messages between them are in-process ones.
using Body = std::function<void(Communicator&)>;
std::vector<std::string> on_hosts(int ranks, int per_host, double deadline, const Body& body) {
  auto bases = in_process(ranks, {.deadline = deadline});
  return ranks_say(ranks, [&](int r) {
    auto c = hierarchy(std::move(bases[r]), r / per_host);
    body(*c);
  });
}
std::vector<std::string> on_hosts(int ranks, int per_host, const Body& body) {
  return on_hosts(ranks, per_host, 30, body);
}

TEST(CommunicatorNode, AnyMemory) {
  for (int n : {2, 3, 4, 7})
    all_well(on_hosts(n, n, [](Communicator& c) {
      for (std::int64_t count : lengths) {
        exercise<float>(c, count);
        exercise<double>(c, count);
        exercise<bf16>(c, count);
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

TEST(CommunicatorNode, FractionsHaveTheSameBitsEverywhere) {
  std::vector<std::vector<float>> result(3);
  all_well(on_hosts(3, 3, [&](Communicator& c) {
    for (std::int64_t count : {500, 200000}) {
      auto x = numbers_as<float>("rank " + std::to_string(c.rank()), count);
      c.all_reduce(buffer(x)).wait();
      auto& mine = result[c.rank()];
      mine.insert(mine.end(), x.begin(), x.end());
    }
  }));
  same_bits(result);
}

TEST(CommunicatorNode, DisagreementIsNamed) {
  expect_disagreement_named(on_hosts(3, 3, disagree));
  all_say(on_hosts(2, 2, [](Communicator& c) { c.allocate(c.rank() ? 4096 : 8192); }), {"different amounts of memory"});
}

TEST(CommunicatorNode, WhoLeavesAndWhoStopsIsNamed) {
  auto said = on_hosts(3, 3, [](Communicator& c) {
    std::vector<float> x(100000);
    c.all_reduce(buffer(x)).wait();
    if (c.rank() == 1) throw Error("a full disk");
    c.all_reduce(buffer(x)).wait();
  });
  for (int r : {0, 2}) EXPECT_TRUE(holds(said[r], {"rank 1, which has left"}));
  // Rank 2 waits for what nobody sends, and the others for rank 2.
  said = on_hosts(3, 3, 1, [](Communicator& c) {
    std::vector<float> x(100000);
    if (c.rank() == 2) c.recv(0, buffer(x), 5).wait();
    c.all_reduce(buffer(x)).wait();
  });
  all_say(said, {"rank 2 has ", " for 1 s"});
}

TEST(CommunicatorNode, WhoWorksForLongerThanTheDeadlineIsWaitedFor) {
  all_well(on_hosts(3, 3, 0.7, [](Communicator& c) {
    std::vector<float> x(100000);
    if (c.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    c.all_reduce(buffer(x)).wait();
  }));
}

TEST(CommunicatorHierarchy, HostsOfSeveralRanks) {
  for (auto [ranks, per_host] : {std::pair{4, 2}, {6, 3}, {6, 2}, {5, 2}, {3, 1}, {4, 4}})
    all_well(on_hosts(ranks, per_host, [](Communicator& c) {
      auto memory = c.allocate(300001 * 4);
      for (std::int64_t count : lengths) {
        exercise<float>(c, count);
        if (memory) exercise(c, static_cast<float*>(memory.get()), count);
      }
      many_at_once(c, 50000);
    }));
}

}  // namespace
}  // namespace tandem::test
