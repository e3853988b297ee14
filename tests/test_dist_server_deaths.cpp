// Ranks of a parameter server that die, at every message that they send: the others go on, and what a living worker was
// told is applied is in every shard, once. TANDEM_EVERY_MESSAGE=1 tries all messages; otherwise some of them.
#include <cstdlib>

#include "core/random.h"
#include "dist/collectives/in_process.h"
#include "tests/support_channels.h"

namespace tandem::test {
namespace {

constexpr std::int64_t n = 4 * 1024;
struct Drill {
  std::string strategy;
  int ranks = 4, servers = 0;
  std::int64_t leases = 24;
  ChannelFaults faults = {};
  bool returns = false;       // who dies comes back
  std::uint32_t dawdles = 0;  // a seed: ranks sleep now and then
  bool parts = false;         // gradients are pushed in parts
  int late = -1;              // a rank that begins when somebody has come back, and not begun again
  struct Leaves {
    int rank = -1;
    std::int64_t step = 0, parts = 0;  // it has sent so many of that gradient
    bool seen = false;                 // another rank has made an exchange after its last push
  } leaves = {};                       // a rank that ends with an error in the middle of backward
};
struct Outcome {
  explicit Outcome(std::size_t ranks) : told(ranks), told_at_last(ranks), weights(ranks), died(ranks) {}
  std::vector<std::string> said;
  std::vector<std::int64_t> told;            // pushes that each worker was told of, by all that had its number
  std::vector<std::int64_t> told_at_last;    // by the one that is there at the end
  std::vector<std::vector<double>> weights;  // at the end, of each rank
  std::int64_t done = 0;                     // leases, as rank 0 counts
  std::int64_t taken_over = 0;
  std::vector<char> died;  // by several threads
};

// Each push of worker m adds one to its own blocks: 64 elements in every 64 · ranks, in all shards.
Outcome run(const Drill& drill) {
  std::vector<std::unique_ptr<Channel>> channels = in_process_channels(drill.ranks, drill.faults);
  const auto size = std::size_t(drill.ranks);
  Outcome o(size);
  std::vector<std::atomic<std::int64_t>> told(size);
  std::atomic<std::int64_t> taken_over = 0;
  std::atomic<bool> back = false, left = false;
  Channel* first = channels[0].get();
  std::mutex mutex;
  o.said = ranks_say(drill.ranks, [&](int r) {
    auto channel = std::move(channels[r]);
    for (int life = 0;; life++) try {
        o.told_at_last[r] = 0;
        Rank rank(std::move(channel), n, 10);
        Tensor velocity = Tensor::like(rank.weights);
        rank.share_gradient(DType::f32);
        float* g = rank.gradient.write<float>();
        for (std::int64_t i = 0; i < n; i++) g[i] = i / 64 % drill.ranks == r ? -1.f : 0.f;
        if (rank.node.gather("I am " + std::to_string(r))[0] != "I am 0") fail("rank 0 said something else");
        using ms = std::chrono::milliseconds;
        for (int k = 0; r == drill.late && !back && k < 100; k++) std::this_thread::sleep_for(ms(1));
        const Philox random(6, Stream::test, std::uint32_t(r), drill.dawdles);
        std::uint32_t drawn = std::uint32_t(100 * life);
        const auto dawdle = [&](std::uint32_t seldom, std::uint32_t most) {
          const std::uint32_t chance = random.word(drawn++);
          if (drill.dawdles && chance % seldom == 0) std::this_thread::sleep_for(ms(chance / seldom % most));
        };
        dawdle(2, 12);
        if (drill.late >= 0) std::this_thread::sleep_for(ms(r == drill.late ? 5 : 20 * std::min(1, life)));
        const Asynchrony how = Asynchrony::parse(drill.strategy);
        rank.begin({.how = how, .servers = drill.servers, .momentum = 0.5, .snapshots = 0.002}, {0, drill.leases});
        const auto step = [&](std::int64_t) {
          for (std::int64_t at = 0; drill.parts && at + 1024 <= n; at += 1536) {  // and a rest
            rank.node.push_part(whole(rank.gradient), {at, at + 1024});
            dawdle(12, 3);
            if (r == drill.leaves.rank && told[r] == drill.leaves.step && at / 1536 + 1 == drill.leaves.parts) {
              if (drill.leaves.seen) wait_until([&] { return *std::ranges::max_element(told) > drill.leaves.step; });
              left = true;
              fail("an error in backward");
            }
          }
          // No rank is ahead of the one that leaves. So the push with which one passes it begins after its last.
          if (drill.leaves.seen && r != drill.leaves.rank)
            wait_until([&] { return left || told[drill.leaves.rank] >= told[r]; });
          dawdle(12, 6);
        };
        const auto made = [&] {
          told[r]++;
          o.told_at_last[r]++;
          if (r == 0 && told[0] % 3 == 0) rank.node.velocity(whole(velocity));  // as a checkpoint asks for it
        };
        rank.train(step, {}, made);
        rank.node.gather("");
        o.weights[r] = rank.weights.values();
        taken_over += rank.node.counts().taken_over;
        if (r > 0) return;
        o.done = rank.node.leases_done();
        std::lock_guard lock(mutex);  // its channel goes
        first = nullptr;
        return;
      } catch (const Killed&) {
        o.died[r] = true;
        std::lock_guard lock(mutex);
        if (!drill.returns || life > 3 || !first) throw;
        channel = in_process_return(*first, r);
        back = true;
      }
  });
  for (std::size_t r = 0; r < size; r++) o.told[r] = told[r];
  o.taken_over = taken_over;
  return o;
}

void expect_well(const Drill& drill, const Outcome& o, const std::string& what) {
  SCOPED_TRACE(what);
  const int workers = drill.ranks - drill.servers;
  for (int r = 0; r < drill.ranks; r++) {
    // Who comes back when all is over finds nobody.
    const std::string& said = o.said[r];
    if (o.died[r] && (!drill.returns || said.find("has left") != std::string::npos ||
                      said.find("killed by the test") != std::string::npos))
      continue;
    ASSERT_EQ(o.said[r], "") << "rank " << r;
    if (r >= workers) continue;
    ASSERT_EQ(o.weights[r], o.weights[0]) << "rank " << r;
  }
  EXPECT_EQ(o.done, drill.leases);
  if (!drill.strategy.ends_with("+asgd")) return;  // where a push of one is not a step of one
  for (std::int64_t i = 0; i < n; i += 64) {
    const auto m = std::size_t(i / 64 % drill.ranks);
    const auto applied = std::int64_t(o.weights[0][i]);
    // A dead one was not told of its last.
    ASSERT_LE(applied, o.told[m] + (o.died[m] ? 5 : 0)) << "pushes of worker " << m << " at element " << i;
    // Nor does anybody go on with what was told to one that did not come back.
    const bool back = drill.returns && o.said[m].empty();
    ASSERT_GE(applied, !o.died[m] ? o.told[m] : back ? o.told_at_last[m] : 0) << "worker " << m << ", element " << i;
  }
}

bool every_message() {
  const char* v = std::getenv("TANDEM_EVERY_MESSAGE");
  return v && *v == '1';
}

// Deaths of one rank at each of its messages; where it sent fewer, it does not die.
void die_at_every_message(Drill drill, std::int64_t stride) {
  if (every_message()) stride = 1;
  const ChannelFaults faults = drill.faults;
  int deaths = 0;
  for (int r = 1; r < drill.ranks; r++)
    for (std::int64_t at = (r * 7) % stride;; at += stride) {
      drill.faults = faults;
      drill.faults.deaths.push_back({r, at});
      const Outcome o = run(drill);
      expect_well(drill, o,
                  drill.strategy + ": rank " + std::to_string(r) + " dies at its message " + std::to_string(at));
      if (testing::Test::HasFatalFailure()) return;
      if (!o.died[r]) break;
      deaths++;
    }
  EXPECT_GT(deaths, 3);
}

TEST(ServerDeaths, AnyRankAtAnyMessage) {
  for (const char* strategy : {"asp+asgd", "ssp:1+asgd", "bsp", "ddc-asgd", "quorum:3,grace=0.002"})
    for (bool shared : {true, false})
      ASSERT_NO_FATAL_FAILURE(
          die_at_every_message({.strategy = strategy, .faults = {.shared_memory = shared}}, shared ? 17 : 29));
}

TEST(ServerDeaths, WhilePartsOfAGradientAreOnTheirWay) {
  for (const char* strategy : {"asp+asgd", "bsp"})
    for (bool returns : {false, true})
      ASSERT_NO_FATAL_FAILURE(die_at_every_message(
          {.strategy = strategy, .faults = {.shared_memory = false}, .returns = returns, .parts = true}, 37));
}

// Nothing comes of a gradient of which some parts were sent, and every confirmed push is in the shards of the ranks
// that live. The shard of the rank that left goes on from the newest copy that another rank has received: it contains
// what was confirmed before that, and may lack the pushes whose answers only that rank has received.
TEST(ServerDeaths, AnErrorInTheMiddleOfBackwardLeavesNothingBehind) {
  for (const bool seen : {true, false})
    for (const bool shared : {false, true})
      for (int rank = 1; rank < 4; rank++)
        for (std::int64_t step = 0; step < 4; step++) {
          const Drill drill{.strategy = "asp+asgd",
                            .leases = 40,
                            .faults = {.delays = std::uint64_t(step + 1), .shared_memory = shared},
                            .parts = true,
                            .leaves = {rank, step, 1 + (rank + step) % 2, seen}};
          const Outcome o = run(drill);
          SCOPED_TRACE("rank " + std::to_string(rank) + " leaves in step " + std::to_string(step));
          EXPECT_EQ(o.done, drill.leases);
          for (int r = 0; r < 4; r++) {
            const std::string& said = o.said[r];
            // If the others do not wait for it, they may have left it too few leases to come to that step.
            EXPECT_EQ(said, r == rank && (seen || !said.empty()) ? "an error in backward" : "");
            for (std::int64_t i = 64 * r; i < n; i += 64 * 4) {
              const double applied = o.weights[0][i], told = double(o.told[r]);
              const bool may_be_lost = !seen && !said.empty() && i / (n / 4) == rank;
              ASSERT_TRUE(applied == told || (may_be_lost && applied < told))
                  << applied << " of " << told << " pushes of rank " << r << " are in element " << i;
            }
          }
        }
}

TEST(ServerDeaths, RanksThatOnlyServe) {
  for (const char* strategy : {"asp+asgd", "bsp"})
    ASSERT_NO_FATAL_FAILURE(die_at_every_message({.strategy = strategy, .servers = 2}, 23));
}

TEST(ServerDeaths, WithDelaysAndDuplicates) {
  for (std::uint64_t seed = 1; seed <= (every_message() ? 20 : 2); seed++)
    ASSERT_NO_FATAL_FAILURE(die_at_every_message(
        {.strategy = "asp+asgd", .faults = {.delays = seed, .duplicates = true, .shared_memory = seed % 2 == 0}}, 37));
}

TEST(ServerDeaths, TwoRanks) {
  const std::int64_t stride = every_message() ? 5 : 41;
  for (std::int64_t a = 3; a < 160; a += stride)
    for (std::int64_t b = 5; b < 160; b += stride) {
      Drill drill{.strategy = "asp+asgd", .faults = {.deaths = {{1, a}, {2, b}}}};
      ASSERT_NO_FATAL_FAILURE(expect_well(
          drill, run(drill), "ranks 1 and 2 die at their messages " + std::to_string(a) + " and " + std::to_string(b)));
    }
}

TEST(ServerDeaths, WhoDiedComesBack) {
  for (const char* strategy : {"asp+asgd", "ssp:1+asgd", "bsp", "ddc-asgd", "quorum:3,grace=0.002", "quorum:2,grace=0"})
    ASSERT_NO_FATAL_FAILURE(die_at_every_message({.strategy = strategy, .leases = 40, .returns = true}, 33));
}

TEST(ServerDeaths, WhoComesBackBeforeOthersHaveBegun) {
  for (const char* strategy : {"asp+asgd", "bsp"})
    for (std::int64_t at = 0; at < 11; at++) {
      const Drill drill{.strategy = strategy, .faults = {.deaths = {{3, at}}}, .returns = true, .late = 2};
      ASSERT_NO_FATAL_FAILURE(
          expect_well(drill, run(drill), drill.strategy + ": rank 3 dies at its message " + std::to_string(at)));
    }
}

// Two to five deaths anywhere, of ranks that come back and now and then take their time.
TEST(ServerDeaths, AnyNumberAtRandom) {
  for (std::uint32_t k = 0; k < (every_message() ? 3000u : 80u); k++) {
    const Philox random(5, Stream::test, 0, k);
    Drill drill{
        .strategy = k % 4 ? "asp+asgd" : "quorum:3,grace=0.001", .leases = 40, .returns = true, .dawdles = k + 1};
    drill.faults.delays = random.word(0) % 4, drill.faults.shared_memory = random.word(1) % 3 > 0;
    drill.parts = k % 2;
    std::string deaths;
    for (std::uint32_t d = 0; d < 2 + random.word(2) % 4; d++) {
      drill.faults.deaths.push_back(
          {1 + int(random.word(3 + 2 * d) % 3), 2 + std::int64_t(random.word(4 + 2 * d) % 150)});
      deaths +=
          " " + std::to_string(drill.faults.deaths.back().rank) + "@" + std::to_string(drill.faults.deaths.back().at);
    }
    ASSERT_NO_FATAL_FAILURE(expect_well(drill, run(drill), std::to_string(k) + ": deaths" + deaths));
  }
}

TEST(ServerDeaths, RankZeroIsEverybodysEnd) {
  const Outcome o = run({.strategy = "asp+asgd", .faults = {.deaths = {{0, 60}}}});
  for (int r = 1; r < 4; r++) EXPECT_TRUE(holds(o.said[r], {"rank 0"}));
}

}  // namespace
}  // namespace tandem::test
