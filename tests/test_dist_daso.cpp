// DASO on in-process ranks that pretend to be on hosts: when hosts exchange, and what the exchange makes of their
// weights.
#include "tests/host_ranks.h"

namespace tandem::test {
namespace {

std::vector<Ended> on_hosts(int hosts, int per_host, const std::string& name, const StrategyBody& body,
                            const InProcessOptions& between_hosts = {.deadline = 30}) {
  return on_ranks(hosts * per_host, name, body,
                  {.hosts = hosts, .rounds = {.bucket_bytes = 4096, .deadline = 30}, .wire = between_hosts});
}

constexpr std::int64_t batch = 24, per_epoch = 9;  // 209 pictures; the last batch has 17
OwnLoop loop(int epochs) {
  return {.global_batch = batch, .steps = epochs * int(per_epoch), .of = per_epoch, .epochs = epochs};
}
std::vector<Ended> trained(int hosts, int per_host, const std::string& name, const OwnLoop& o) {
  auto runs = on_hosts(hosts, per_host, name, [&](Strategy& s, Ended& run) { train<Plain>(s, run, o); });
  same_bits(runs);
  return runs;
}
std::vector<double> synchronous(int n, const OwnLoop& o) {
  return on_ranks(n, "all-reduce", [&](Strategy& s, Ended& run) { train<Plain>(s, run, o); })[0].weights;
}

constexpr std::pair<int, int> grids[] = {{2, 2}, {2, 4}, {3, 4}};
const std::string cycling = ",warm-up=0,cool-down=0";

// ---- what is computed -----------------------------------------------------------------------------------------------
TEST(Daso, AnExchangeAfterEveryBatchIsSynchronousSgd) {
  for (auto [hosts, per_host] : grids) {
    const auto want = synchronous(hosts * per_host, loop(2));
    for (const char* name : {"daso:B=0,warm-up=0,cool-down=0", "daso:bf16=0", "daso:faithful,bf16=0"})
      EXPECT_LE(furthest(trained(hosts, per_host, name, loop(2))[0].weights, want), 1e-12)
          << name << " on " << hosts << " × " << per_host;
  }
}

TEST(Daso, OneHostIsAllReduceAndOneRankAHostIsAllowed) {
  const auto want = synchronous(3, loop(2));
  EXPECT_LE(furthest(trained(1, 3, "daso", loop(2))[0].weights, want), 1e-12);
  EXPECT_LE(furthest(trained(3, 1, "daso:B=0,warm-up=0,cool-down=0", loop(2))[0].weights, want), 1e-12);
}

TEST(Daso, IsTheNaiveOne) {
  for (auto [hosts, per_host] : {std::pair{2, 2}, {3, 2}, {2, 1}})
    for (const std::string kind : {"daso:", "daso:faithful,"})
      for (const std::string B : {"B=1", "B=2", "B=4", "B=8,W=2", "B=3,W=0", "B=4,W=3"}) {
        const std::string name = kind + B + cycling;
        const auto naive = trained(hosts, per_host, "naive-" + name, loop(2));
        EXPECT_LE(furthest(naive[0].weights, trained(hosts, per_host, name, loop(2))[0].weights), 1e-12)
            << name << " on " << hosts << " × " << per_host;
      }
  for (const std::string name : {"daso:warm-up=1,cool-down=1", "daso:faithful,warm-up=1,cool-down=1"})  // bf16
    EXPECT_LE(furthest(trained(2, 2, "naive-" + name, loop(3))[0].weights, trained(2, 2, name, loop(3))[0].weights),
              1e-12)
        << name;
}

// x differs by what is rounded: of x, or of the difference, whose rest goes along with the next.
TEST(Daso, DifferencesWithErrorFeedbackStayNearSynchronousSgd) {
  const auto want = synchronous(4, loop(3));
  const double values = furthest(trained(2, 2, "daso:differences=0", loop(3))[0].weights, want),
               differences = furthest(trained(2, 2, "daso", loop(3))[0].weights, want);
  EXPECT_GT(values, 1e-3);
  EXPECT_LT(differences, values / 10);
}

// ---- when -----------------------------------------------------------------------------------------------------------
// A letter for each batch of an epoch: s sends, m merges, x both, b blocks, B merges and blocks.
std::string timeline(const std::string& name, std::int64_t batches = per_epoch) {
  Daso schedule(*DasoOptions::parse(name));
  schedule.begin_epoch(0, {});
  std::string text;
  for (std::int64_t b = 0; b < batches; b++) {
    const auto turn = schedule.next({.batch = b, .last = batches - 1});
    text += turn.waits ? (turn.merges ? 'B' : 'b') : turn.sends ? (turn.merges ? 'x' : 's') : turn.merges ? 'm' : '-';
  }
  return text;
}

TEST(Daso, SendsAndMergesAtTheirBatches) {
  EXPECT_EQ(timeline("daso"), "bbbbbbbbb") << "warm-up";
  for (const std::string kind : {"daso:", "daso:faithful,"}) {
    EXPECT_EQ(timeline(kind + "B=0" + cycling), "bbbbbbbbb");
    EXPECT_EQ(timeline(kind + "B=1" + cycling), "sxxxxxxxB");
    EXPECT_EQ(timeline(kind + "B=4" + cycling), "sm--sm--b");
    EXPECT_EQ(timeline(kind + "B=8,W=2" + cycling), "s-m-----b");
    EXPECT_EQ(timeline(kind + "B=8,W=2" + cycling, 12), "s-m-----s-mb");
    EXPECT_EQ(timeline(kind + "B=3,W=0" + cycling), "b--b--b-b");
  }
  EXPECT_EQ(timeline("daso:B=2" + cycling), "smsmsmsmb");
  EXPECT_EQ(timeline("daso:faithful,B=2" + cycling), "s-x-x-x-B") << "age 2, as the published code merges";
}

TEST(Daso, APlateauMakesBAndWSmallerAndAfterOneTheLongest) {
  Daso s(*DasoOptions::parse("daso:W=2" + cycling));
  auto epochs = [&](int n, double loss) {
    for (int i = 0; i < n; i++) s.begin_epoch(0, {}), s.end_epoch(loss);
    return std::pair(s.B(), s.W());
  };
  using Pair = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(epochs(1, 2.0), Pair(4, 2));
  EXPECT_EQ(epochs(2, 1.95), Pair(4, 2)) << "twice without 5 % less";
  EXPECT_EQ(epochs(1, 1.8), Pair(4, 2)) << "that was more, and the count begins again";
  EXPECT_EQ(epochs(2, 1.8), Pair(4, 2));
  EXPECT_EQ(epochs(1, 1.8), Pair(2, 1));
  EXPECT_EQ(epochs(2, 1.8), Pair(2, 1));
  auto state = [](Daso& of, StrategyState checkpoint = {}) {
    of.saved(checkpoint);
    return checkpoint;
  };
  Daso resumed(*DasoOptions::parse("daso:W=2" + cycling));
  state(resumed, state(s));
  EXPECT_EQ(state(resumed).texts, state(s).texts);
  s = resumed;
  EXPECT_EQ(epochs(1, 1.8), Pair(1, 1));
  EXPECT_EQ(epochs(3, 1.8), Pair(8, 2));
  EXPECT_THROW(state(s, {{{"daso", "another strategy's"}}, {}}), UsageError);
  EXPECT_EQ(epochs(0, 0), Pair(8, 2));
  Daso first(*DasoOptions::parse("daso"));
  state(first, state(first));
  EXPECT_EQ(state(first).texts.at("daso"), "4 1 inf 0");
}

TEST(Daso, UnknownOptionsAreRefusedByName) {
  EXPECT_FALSE(DasoOptions::parse("dasos"));
  EXPECT_EQ(DasoOptions::parse("daso:B=4")->name(), "daso");
  EXPECT_EQ(DasoOptions::parse("daso:norms=0")->name(), "daso:norms=0");
  EXPECT_EQ(DasoOptions::parse("daso:W=3,faithful")->name(), "daso:faithful,W=3");
  for (auto [name, text] : {std::pair{"daso:C=1", "'C=1' is no option of daso"},
                            {"daso:B", "B is a whole number from 0"},
                            {"daso:B=-1", "B is a whole number from 0"},
                            {"daso:longest=0", "longest is a whole number from 1"},
                            {"daso:bf16=2", "bf16 is a whole number from 0 to 1"}})
    EXPECT_TRUE(holds(error_of<UsageError>([&, name = name] { DasoOptions::parse(name); }), {text})) << name;
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
// A rate at which nothing is learned: after four epochs the first is the best and three were no better.
TEST(Daso, AResumedRunGoesOnWithItsBAndW) {
  const TemporaryFolder folder;
  std::vector<std::string> states(4);
  for (int epochs : {4, 5}) {
    all_well(on_hosts(2, 2, "daso:W=2" + cycling, [&](Strategy& s, Ended& run) {
      RunConfig o = quiet(epochs);
      o.checkpoint = folder.file("run");
      if (epochs == 5) o.checkpoint = "", o.resume = folder.file("run");
      fit_on(s, run, o, {}, 1e-9);
      StrategyState saved;
      s.saved(saved);
      states[s.rank()] = saved.texts.at("daso");
    }));
    for (const std::string& state : states) {
      EXPECT_EQ(state, states[0]);
      EXPECT_EQ(state.substr(0, 4), "2 1 ");
      EXPECT_EQ(state.back(), epochs == 4 ? '0' : '1');
    }
  }
}

// Between hosts, in a blocking epoch and with an exchange under way.
TEST(Daso, ARankThatDiesStopsTheOthers) {
  for (const char* name : {"daso", "daso:B=2,warm-up=0,cool-down=0", "daso:faithful,B=2,warm-up=0,cool-down=0"})
    for (std::int64_t at : {5, 40, 101}) {
      Outcome outcome;
      const auto runs = on_hosts(2, 2, name, [](Strategy& s, Ended& run) { train<Plain>(s, run, loop(3)); },
                                 {.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome});
      ASSERT_GE(outcome.faulty, 0) << name;
      for (std::size_t r = 0; r < runs.size(); r++) EXPECT_NE(runs[r].said, "") << name << ": rank " << r;
      const std::string dead = "rank " + std::to_string(outcome.faulty);
      const auto mentions = std::count_if(runs.begin(), runs.end(),
                                          [&](const Ended& run) { return run.said.find(dead) != std::string::npos; });
      EXPECT_GE(mentions, 2) << name;
    }
}

}  // namespace
}  // namespace tandem::test
