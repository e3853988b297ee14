// Experiments: the search for a learning rate on a runner whose best one is known, going on after an interruption, and plans
// that are refused.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/files/files.h"
#include "dist/lab/experiment.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

struct Experiment : testing::Test {
  std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "experiment";
  std::string file = (folder / "plan.jsonl").string();
  std::atomic<int> runs{0}, until{1 << 30};
  Plan plan;
  void SetUp() override {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    plan.title = "Try <1>";
    plan.strategies = {"a", "b"}, plan.workers = {1, 16}, plan.rates = {0.01, 0.02, 0.04}, plan.seeds = 3;
  }
  // Best at 0.16 for "a" and at 0.02/√workers for "b"; longer runs are better.
  Outcome fake(const Trial& t) {
    if (++runs > until) throw Error("interrupted");
    const double best = t.strategy == "a" ? 0.16 : 0.02 / std::sqrt(t.workers), off = std::log2(t.rate / best);
    Outcome o;
    const double accuracy = 0.9 - 0.02 * off * off - 0.1 / t.epochs + 1e-4 * double(t.seed % 10);
    (t.final ? o.test : o.validation) = accuracy;
    o.accuracies.assign(std::size_t(t.epochs), accuracy), o.seconds.assign(std::size_t(t.epochs), 1);
    o.delays = {1, 2, 3};
    return o;
  }
  Results carry_out(int jobs = 3) {
    return tandem::carry_out(
        plan, file, jobs, [&](const Trial& t) { return fake(t); }, [](auto&, auto&) {});
  }
  std::string refused(const std::string& json) {
    write_file((folder / "bad.json").string(), json);
    try {
      read_plan((folder / "bad.json").string());
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  }
};

TEST_F(Experiment, FindsTheRateAndGrowsTheGrid) {
  const Results results = carry_out();
  EXPECT_DOUBLE_EQ(chosen_rate(plan, results, "a", 1), 0.16);  // two doublings beyond the grid
  EXPECT_DOUBLE_EQ(chosen_rate(plan, results, "a", 16), 0.16);
  EXPECT_DOUBLE_EQ(chosen_rate(plan, results, "b", 1), 0.02);
  EXPECT_DOUBLE_EQ(chosen_rate(plan, results, "b", 16), 0.005);
  int final = 0;
  for (const auto& [t, o] : results) {
    final += t.final;
    EXPECT_EQ(t.final, t.seed < 1000) << "seeds that choose must not be those that are reported";
  }
  EXPECT_EQ(final, 2 * 2 * 3);
  const std::string page = experiment_page(plan, results);
  EXPECT_NE(page.find("Try &lt;1&gt;"), std::string::npos);
  EXPECT_EQ(page.find("nan"), std::string::npos);

  // Seeds 1, 2, 3 give the best accuracy, 0.9 − 0.1/4, and 1e-4 more for each: standard deviation 1e-4, error 1e-4/√3.
  const Mean a = test_accuracy(results, "a", 16), difference = advantage(results, "a", "b", 16);
  EXPECT_EQ(a.count, 3u);
  EXPECT_NEAR(a.value, 0.8752, 1e-12);
  EXPECT_NEAR(a.error, 1e-4 / std::sqrt(3), 1e-12);
  EXPECT_NEAR(difference.value, 0, 1e-12);  // paired: what a seed adds to both is no difference
  EXPECT_NEAR(difference.error, 0, 1e-12);
  const std::string table = experiment_table(plan, results);
  EXPECT_NE(table.find("| workers | 1 | 16 |"), std::string::npos) << table;
  EXPECT_NE(table.find("| a | 87.52 ± 0.01 (0.16) | 87.52 ± 0.01 (0.16) |"), std::string::npos) << table;
  EXPECT_NE(table.find("| b | +0.00 ± 0.00 |"), std::string::npos) << table;
}

TEST_F(Experiment, TheSearchMayBeShorterThanTheRuns) {
  plan.tuning_epochs = 2;
  for (const auto& [t, o] : carry_out()) EXPECT_TRUE(t.final ? t.epochs == 4 : t.epochs <= 2);
}

TEST_F(Experiment, GoesOnWhereItWasInterrupted) {
  const std::size_t all = carry_out().size();
  const int needed = runs;
  std::filesystem::remove(file);
  runs = 0, until = 10;
  EXPECT_THROW(carry_out(), Error);
  {
    std::ofstream cut(file, std::ios::app);
    cut << R"({"strategy":"a","workers":1,"ra)";  // killed while it wrote
  }
  const int done = int(read_results(file, plan).size());
  EXPECT_GE(done, 8);
  runs = 0, until = 1 << 30;
  EXPECT_EQ(carry_out(1).size(), all);
  EXPECT_EQ(runs, needed - done);
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) EXPECT_NO_THROW(Json::parse(line)) << line;
  runs = 0;
  EXPECT_EQ(carry_out().size(), all);
  EXPECT_EQ(runs, 0);
}

TEST_F(Experiment, OtherConditionsAreAnotherExperiment) {
  carry_out();
  plan.batch = 32;
  EXPECT_THROW(carry_out(), UsageError);
  write_file(file, "something else\nof another kind\n");
  EXPECT_THROW(carry_out(), UsageError);
  EXPECT_EQ(read_file(file), "something else\nof another kind\n");
}

TEST_F(Experiment, PlansAreChecked) {
  const std::string rest = R"("strategies":["asgd"],"workers":[1],"rates":[0.1])";
  EXPECT_EQ(refused("{" + rest + "}"), "");
  EXPECT_NE(refused("{" + rest + R"(,"epoch":3})").find("\"epoch\" is nothing that a plan has"), std::string::npos);
  EXPECT_NE(refused("{" + rest + R"(,"epochs":0})").find("from 1"), std::string::npos);
  EXPECT_NE(refused("{" + rest + R"(,"epochs":2,"tuning_epochs":3})").find("more than the 2"), std::string::npos);
  EXPECT_NE(refused("{" + rest + R"(,"epochs":2.5})").find("whole number"), std::string::npos);
  EXPECT_NE(refused("{" + rest + R"(,"model":3})").find("not a text"), std::string::npos);
  EXPECT_NE(refused(R"({"strategies":["asgd"],"workers":[0],"rates":[0.1]})"), "");
  EXPECT_NE(refused(R"({"strategies":[]})").find("at least"), std::string::npos);
  EXPECT_NE(refused(R"({"strategies":["asgd","bsp","asgd"],"workers":[1],"rates":[0.1]})").find("asgd twice"),
            std::string::npos);
  EXPECT_NE(refused(R"({"strategies":["asgd"],"workers":[4,4],"rates":[0.1]})").find("4 twice"), std::string::npos);
  EXPECT_NE(refused(R"({"strategies":["asgd"],"workers":[2.7],"rates":[0.1]})").find("whole number"), std::string::npos);
  EXPECT_NE(refused(R"({"strategies":["asgd"],"workers":[1e300],"rates":[0.1]})").find("whole number from 1 to"), std::string::npos);
  EXPECT_NE(refused("{" + rest + R"(,"momentum":5})").find("\"momentum\" is 5"), std::string::npos);
  EXPECT_NE(refused("[1]").find("is not a plan"), std::string::npos);
  EXPECT_NE(refused("{"), "");
}

TEST_F(Experiment, ResultsAreARegularFile) {
  for (const char* path : {"/dev/null", "/tmp"})
    EXPECT_TRUE(test::refused([&] { read_results(path, Plan{}); }, {path, "not a regular file"}));
}

}  // namespace
}  // namespace tandem::test
