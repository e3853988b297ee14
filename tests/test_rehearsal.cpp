// The arithmetic of build/rehearse (dist/lab/rehearsal.h); check_hosts.sh runs the program.
#include <gtest/gtest.h>

#include <cmath>

#include "dist/lab/rehearsal.h"
#include "tests/support.h"

using namespace tandem;
using test::refused;

namespace {

RehearsedRun run(const std::string& strategy, const std::string& link, double seconds, double accuracy, double bytes = 0, double steps = 100) {
  RehearsedRun r;
  r.strategy = strategy, r.link = link, r.seconds = seconds, r.accuracy = accuracy, r.bytes = bytes, r.steps = steps;
  return r;
}

}  // namespace

TEST(Rehearsal, RatesAreThoseOfTc) {
  EXPECT_EQ(bytes_per_second("200mbit"), 25e6);
  EXPECT_EQ(bytes_per_second("1.5gbit"), 187.5e6);
  EXPECT_TRUE(std::isinf(bytes_per_second("none")));
  for (const char* bad : {"200", "fast", "-1gbit", "mbit", "nanmbit"}) EXPECT_TRUE(refused([&] { bytes_per_second(bad); }, {bad, "200mbit"}));
}

TEST(Rehearsal, AnExchangeIsHiddenBehindBackwardAndNoMore) {
  const RehearsedRun all = run("all-reduce", "none", 9, 0.9, 100e6);  // backward: 6 s
  EXPECT_DOUBLE_EQ(predicted_seconds(all, "1gbit"), 9);               // 0.8 s on the wire
  EXPECT_DOUBLE_EQ(predicted_seconds(all, "100mbit"), 9 + 8 - 6);
  const RehearsedRun server = run("ddc-asgd", "none", 9, 0.9, 100e6);  // half of it is the answer
  EXPECT_DOUBLE_EQ(predicted_seconds(server, "100mbit"), 9 + 4);
  const RehearsedRun rare = run("local-sgd:8", "none", 9, 0.9, 10e6);
  EXPECT_DOUBLE_EQ(predicted_seconds(rare, "100mbit"), 9 + 0.8);
}

TEST(Rehearsal, StepsBetweenExchangesKeepTheirShare) {
  const RehearsedRun all = run("all-reduce", "none", 10, 0.9, 1e9, 1000);  // a step: 10 ms, 1 MB
  for (const char* link : {"10mbit", "100mbit", "1gbit"}) {
    const double exchange = 1e6 / bytes_per_second(link);
    const int h = steps_between(all, link);
    EXPECT_LE(exchange / (exchange + h * 0.01), 0.05) << link;
    if (h > 1) {
      EXPECT_GT(exchange / (exchange + (h - 1) * 0.01), 0.05) << link;
    }
  }
}

TEST(Rehearsal, TheFastestIsOneThatIsAccurate) {
  Rehearsal r;
  r.strategies = {"all-reduce", "daso", "local-sgd:64"}, r.links = {"none", "100mbit"};
  std::vector<RehearsedRun> runs;
  for (const std::string& link : r.links)
    runs.push_back(run("all-reduce", link, 10, 0.9)), runs.push_back(run("daso", link, 7, 0.898)), runs.push_back(run("local-sgd:64", link, 5, 0.8));
  EXPECT_NE(rehearsal_table(runs, r).find("on 100mbit: daso"), std::string::npos) << rehearsal_table(runs, r);
  runs[4].accuracy = 0.8;
  EXPECT_NE(rehearsal_table(runs, r).find("on 100mbit: all-reduce"), std::string::npos);
}

TEST(Rehearsal, ALineOfItComesBack) {
  RehearsedRun a = run("all-reduce", "1gbit", 12.5, 0.75, 1234567, 42);
  a.setup = "2 hosts × 1 ranks 'a \"b\"'", a.reached = 3.25, a.exposed = 0.5;
  const RehearsedRun b = run_of(line_of(a));
  EXPECT_EQ(line_of(a), line_of(b));
  EXPECT_EQ(b.setup, a.setup);
  EXPECT_EQ(b.reached, a.reached);
  EXPECT_TRUE(refused([] { run_of("{}"); }, {"no line of a rehearsal"}));
}
