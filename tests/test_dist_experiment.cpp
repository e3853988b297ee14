// Experiments: plans and the lines of their errors; the search on a runner whose best point is known, in parallel and
// interrupted after every run; censoring, intervals against values worked out by hand; rows that are checked.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/files/files.h"
#include "core/files/json.h"
#include "dist/lab/experiment.h"
#include "dist/lab/experiment_results.h"
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
    plan.strategies = {SearchedStrategy::parse("ddc-asgd"),
                       SearchedStrategy::parse("ringmaster:R={2,4}+asgd:clip={0.5,1}")};
    plan.workers = {1, 16}, plan.rates = {0.01, 0.02, 0.04};
    plan.search = 24, plan.tuning_epochs = 2, plan.tuning_seeds = 2, plan.finalists = 2, plan.seeds = 3;
  }
  Cell cell(std::size_t strategy, int workers) { return {&plan.strategies[strategy], workers, "even"}; }

  // ddc-asgd: best at η = 0.16, μ = 0.95. ringmaster: best at η = 0.02/√workers, R = 16, clip = 0.125, however the text
  // is.
  static double accuracy_of(const Trial& t) {
    double best = 0.16, off = 0;
    if (t.strategy == "ddc-asgd") {
      off = 20 * std::abs(t.momentum - 0.95);
    } else {
      const std::size_t r = t.strategy.find("R="), clip = t.strategy.find("clip=");
      off = std::abs(std::log2(std::stod(t.strategy.substr(r + 2)) / 16)) +
            std::abs(std::log2(std::stod(t.strategy.substr(clip + 5)) / 0.125));
      best = 0.02 / std::sqrt(t.workers);
    }
    return 0.9 - 0.02 * std::abs(std::log2(t.rate / best)) - 0.02 * off + 1e-4 * double(t.seed % 10);
  }
  static Outcome outcome(const Trial& t) {
    Outcome o;
    o.accuracy = accuracy_of(t);
    o.evaluations = {{1 / 3.0, 10 / 3.0, o.accuracy / 2}, {2, 20, o.accuracy}};
    o.delays = {1, 2, 3}, o.gap = 0.25, o.dropped = 7, o.participation = 0.5;
    return o;
  }
  Results carry_out(int jobs = 1) {
    return tandem::carry_out(
        plan, file, jobs,
        [&](const Trial& t) {
          if (++runs > until) throw Error("interrupted");
          if (jobs > 1) std::this_thread::sleep_for(std::chrono::microseconds(1000 * (t.seed % 3) + 300 * (runs % 5)));
          return outcome(t);
        },
        [](auto&, auto&) {});
  }
  std::string refused(const std::string& json) {
    write_file((folder / "bad.json").string(), json);
    try {
      read_plan((folder / "bad.json").string());
    } catch (const UsageError& e) {
      return std::string(e.what()).substr(folder.string().size() + 1);
    }
    return "";
  }
};

// What is the same however the runs were scheduled.
bool same(const Results& a, const Results& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.first == y.first && x.second.accuracy == y.second.accuracy &&
                  x.second.diverged == y.second.diverged && x.second.evaluations == y.second.evaluations &&
                  x.second.delays == y.second.delays;
         });
}

// ---- the search -----------------------------------------------------------------------------------------------------
TEST_F(Experiment, FindsTheBestBeyondTheListsOfThePlan) {
  plan.search = 40;
  const Results results = carry_out();
  for (int workers : plan.workers) {
    const Search a = search(plan, results, cell(0, workers)), b = search(plan, results, cell(1, workers));
    ASSERT_TRUE(a.chosen && b.chosen);
    EXPECT_DOUBLE_EQ(a.chosen->rate, 0.16);  // two doublings beyond the grid
    EXPECT_DOUBLE_EQ(a.chosen->momentum, 0.95);
    EXPECT_DOUBLE_EQ(b.chosen->rate, workers == 1 ? 0.02 : 0.005);
    EXPECT_EQ(b.chosen->momentum, 0) << "its rule keeps no velocity";
    EXPECT_EQ(b.chosen->strategy, "ringmaster:R=16+asgd:clip=0.125");
    EXPECT_EQ(b.constants, (std::vector<double>{16, 0.125}));
    EXPECT_FALSE(a.edge || b.edge);
    EXPECT_EQ(a.tried.size(), 40u);
    EXPECT_EQ(b.tried.size(), 40u);
  }
}

// The larger the rate the sooner the target is reached, up to where it diverges; the accuracy at the end is best at
// 0.16.
TEST_F(Experiment, TheSearchMayBeForTime) {
  plan.target = 0.5, plan.search = 20;
  for (bool by_time : {false, true}) {
    plan.by_time = by_time;
    Results results;
    for (Search s = search(plan, results, cell(0, 16)); !s.missing.empty(); s = search(plan, results, cell(0, 16)))
      for (const Trial& t : s.missing) {
        Outcome o = outcome(t);
        o.diverged = t.rate > 0.7;
        if (t.rate > 0.05) o.evaluations = {{1, 0.1 / t.rate, 0.5}, {2, 50, o.accuracy}};
        results[t] = o;
      }
    EXPECT_DOUBLE_EQ(search(plan, results, cell(0, 16)).chosen->rate, by_time ? 0.64 : 0.16);
  }
}

TEST_F(Experiment, EveryCellHasTheSameBudget) {
  for (const auto& c : cells_of(plan)) {
    int tuning = 0, others = 0, final = 0;
    Results results;
    for (Search s = search(plan, results, c); !s.missing.empty(); s = search(plan, results, c))
      for (const Trial& t : s.missing) results[t] = outcome(t), (t.seed == 1001 ? tuning : others)++, final += t.final;
    EXPECT_EQ(tuning, plan.search);
    EXPECT_EQ(others, plan.finalists * (plan.tuning_seeds - 1));
    EXPECT_EQ(final, 0) << "nothing is chosen on test pictures";
  }
}

TEST_F(Experiment, TheOrderOfNeighboursIsThatOfTheHeader) {
  plan.rates = {0.01}, plan.search = 9, plan.workers = {1};
  plan.momenta = {0.9, 0.5};
  Results results;
  auto tried = [&](std::size_t strategy) {
    const Cell c = cell(strategy, 1);
    for (Search s = search(plan, results, c); !s.missing.empty(); s = search(plan, results, c))
      for (const Trial& t : s.missing) results[t].accuracy = t.rate == 0.01 && s.tried.empty() ? 0.9 : 0.1;
    std::vector<Trial> all;
    for (const TriedPoint& p : search(plan, results, c).tried) all.push_back(p.trial);
    return all;
  };
  const auto a = tried(0);
  EXPECT_DOUBLE_EQ(a[1].rate, 0.02);
  EXPECT_DOUBLE_EQ(a[2].rate, 0.005);
  EXPECT_DOUBLE_EQ(a[3].momentum, 0.95);
  EXPECT_DOUBLE_EQ(a[3].rate, 0.005);  // η/(1 − μ) is 0.1, as before
  EXPECT_DOUBLE_EQ(a[4].momentum, 0.5);
  EXPECT_DOUBLE_EQ(a[4].rate, 0.04);  // 0.08
  const auto b = tried(1);
  EXPECT_EQ(b[0].strategy, "ringmaster:R=2+asgd:clip=0.5");
  EXPECT_EQ(b[3].strategy, "ringmaster:R=4+asgd:clip=0.5");
  EXPECT_EQ(b[4].strategy, "ringmaster:R=1+asgd:clip=0.5");
  EXPECT_EQ(b[5].strategy, "ringmaster:R=2+asgd:clip=1");
  EXPECT_EQ(b[6].strategy, "ringmaster:R=2+asgd:clip=0.25");
}

TEST_F(Experiment, ABudgetThatEndsAtAnEdgeIsMarked) {
  plan.search = 3;
  const Results results = carry_out();
  EXPECT_TRUE(search(plan, results, cell(0, 16)).edge);
  EXPECT_NE(experiment_table(plan, results).find(")†"), std::string::npos);
}

TEST_F(Experiment, ListsOfConstantsContinue) {
  const SearchedStrategy s = SearchedStrategy::parse("ringmaster:R={4,2,8}+asgd:clip={1,4}");
  EXPECT_EQ(s.constants[0].first, 1);
  EXPECT_EQ(s.constants[0].at(3), 16.0);
  EXPECT_EQ(s.constants[0].at(-1), 1.0);
  EXPECT_FALSE(s.constants[0].at(-2));
  EXPECT_EQ(s.constants[1].at(3), 64.0);
  EXPECT_EQ(s.constants[1].at(-2), 1.0 / 16);
  const SearchedStrategy h = SearchedStrategy::parse("local-sgd:{2,3}");
  EXPECT_EQ(h.constants[0].at(2), 5.0);  // 4.5, rounded
  EXPECT_EQ(h.constants[0].at(-1), 1.0);
  EXPECT_EQ(h.filled({5}), "local-sgd:5");
  EXPECT_TRUE(h.momentum);
  EXPECT_FALSE(SearchedStrategy::parse("sa-asgd").momentum);
  for (const char* strategy : {"all-reduce", "outer:H={8,16}", "bsp", "ddc-asgd:own=off"})
    EXPECT_TRUE(SearchedStrategy::parse(strategy).momentum) << strategy;
}

TEST_F(Experiment, ParallelRunsAndInterruptionsChangeNothing) {
  plan.search = 6;
  const Results all = carry_out();
  const int needed = runs;
  EXPECT_EQ(std::size_t(needed), all.size());
  std::filesystem::remove(file);
  EXPECT_TRUE(same(carry_out(4), all));
  std::filesystem::remove(file);
  runs = 0;
  for (until = 1; until <= needed; until++) {
    runs = until - 1;
    if (until < needed) {
      EXPECT_THROW(carry_out(), Error);
    } else {
      until = 1 << 29;
      EXPECT_TRUE(same(carry_out(), all));
    }
    std::ofstream(file, std::ios::app) << R"({"strategy":"a","workers":1,"ra)";  // killed while it wrote
    EXPECT_NO_THROW(read_results(file, plan));
  }
  runs = 0;
  EXPECT_TRUE(same(carry_out(), all));
  EXPECT_EQ(runs, 0);
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) EXPECT_NO_THROW(Json::parse(line)) << line;
}

// ---- results --------------------------------------------------------------------------------------------------------
TEST_F(Experiment, ResultsAreReadAsTheyWereWritten) {
  plan.search = 3;
  const Results written = carry_out(), read = read_results(file, plan);
  EXPECT_TRUE(same(written, read));
  EXPECT_EQ(read.begin()->second.made_by, this_build());
  EXPECT_EQ(read.begin()->second.dropped, 7);
}

TEST_F(Experiment, OtherConditionsAreAnotherExperiment) {
  plan.search = 3;
  carry_out();
  Plan other = plan;
  other.batch = 32;
  EXPECT_TRUE(test::refused([&] { read_results(file, other); }, {"plan.jsonl:1: ", "another experiment"}));
  other = plan, other.clusters[0].shape = 10;
  EXPECT_TRUE(test::refused([&] { read_results(file, other); }, {"plan.jsonl:1: ", "another cluster"}));
  const std::string text = read_file(file);
  write_file(file, text.substr(0, text.find('\n') + 1) + "{\"strategy\":\"a\"}\n");
  EXPECT_TRUE(test::refused([&] { read_results(file, plan); }, {"plan.jsonl:2: ", "\"workers\" is missing"}));
  write_file(file, "something else\nof another kind\n");
  EXPECT_THROW(carry_out(), UsageError);
  EXPECT_EQ(read_file(file), "something else\nof another kind\n");
  for (const char* path : {"/dev/null", "/tmp"})
    EXPECT_TRUE(test::refused([&] { read_results(path, plan); }, {path, "not a regular file"}));
}

// ---- statistics -----------------------------------------------------------------------------------------------------
TEST_F(Experiment, IntervalsAreThoseWorkedOutByHand) {
  EXPECT_NEAR(t_quantile(4), 2.7764, 1e-4);
  EXPECT_NEAR(t_quantile(30), 2.0423, 2e-4);
  EXPECT_NEAR(t_quantile(120), 1.9799, 2e-4);
  plan.search = 3;
  Results results = carry_out();
  const Cell a = cell(0, 1), b = cell(1, 1);
  const double mine[] = {0.90, 0.92, 0.94}, others[] = {0.89, 0.90, 0.91};  // differences 0.01, 0.02, 0.03: std 0.01
  for (int k = 0; k < 3; k++) {
    Trial t = *search(plan, results, a).chosen, u = *search(plan, results, b).chosen;
    t.seed = u.seed = std::uint64_t(k + 1);
    results[t].accuracy = mine[k], results[u].accuracy = others[k];
  }
  const Paired p = advantage(plan, results, a, b);
  EXPECT_EQ(p.pairs, 3u);
  EXPECT_NEAR(p.value, 0.02, 1e-12);
  EXPECT_NEAR(p.high - p.value, 4.3027 * 0.01 / std::sqrt(3), 1e-6);
  EXPECT_NEAR(p.value - p.low, 4.3027 * 0.01 / std::sqrt(3), 1e-6);
  const CensoredMean m = test_accuracy(plan, results, a);
  EXPECT_NEAR(m.mean.value, 0.92, 1e-12);
  EXPECT_NEAR(m.mean.error, 0.02 / std::sqrt(3), 1e-12);
}

TEST_F(Experiment, TimesToATarget) {
  Outcome o;
  o.evaluations = {{1, 10, 0.5}, {2, 20, 0.7}, {3, 30, 0.6}, {4, 40, 0.9}};
  EXPECT_DOUBLE_EQ(*time_to(0.6, o), 15);  // half way between the first two; the first crossing
  EXPECT_DOUBLE_EQ(*time_to(0.75, o), 35);
  EXPECT_DOUBLE_EQ(*time_to(0.4, o), 10);
  EXPECT_FALSE(time_to(0.91, o));
}

TEST_F(Experiment, CensoredRunsAreCountedAndNotAveraged) {
  plan.search = 3, plan.target = 0.6;
  Results results = carry_out();
  const Cell a = cell(0, 1), b = cell(1, 1);
  // Times 10, 20 and never; the other's 5, 5, and diverged before it got there.
  for (int k = 0; k < 3; k++) {
    Trial t = *search(plan, results, a).chosen, u = *search(plan, results, b).chosen;
    t.seed = u.seed = std::uint64_t(k + 1);
    results[t].accuracy = k == 2 ? 0.5 : 0.8,
    results[t].evaluations = {{0.5, 0, 0}, {1, 10.0 * (k + 1), k == 2 ? 0.5 : 0.6}};
    results[u].diverged = k == 2, results[u].accuracy = k == 2 ? 0 : 0.8,
    results[u].evaluations = {{0.5, 0, 0}, {1, 5, k == 2 ? 0.1 : 0.6}};
  }
  const CensoredMean accuracy = test_accuracy(plan, results, b), time = time_to_target(plan, results, a);
  EXPECT_NEAR(accuracy.mean.value, 0.8, 1e-12);
  EXPECT_EQ(accuracy.diverged, 1u);
  EXPECT_DOUBLE_EQ(time.mean.value, 15);
  EXPECT_EQ(time.not_reached, 1u);
  const Paired p = time_ratio(plan, results, a, b);  // 2 and 4
  EXPECT_NEAR(p.value, std::sqrt(8.0), 1e-12);
  EXPECT_NEAR(std::log(p.high / p.value), 12.7062 * std::log(2) / 2, 1e-5);  // std of the logs: ln 2/√2, over √2 pairs
  EXPECT_EQ(p.pairs, 2u);
  EXPECT_EQ(p.censored, 1u);
  const std::string table = experiment_table(plan, results);
  EXPECT_NE(table.find("80.00 ± 0.00 (1 of 3 diverged) (η 0."), std::string::npos) << table;
  EXPECT_NE(table.find("15.0 ± 5.0 (1 of 3 not reached) |"), std::string::npos) << table;
  EXPECT_NE(table.find("(2 of 3 pairs)"), std::string::npos) << table;
  EXPECT_EQ(table.find("nan"), std::string::npos);
}

TEST_F(Experiment, ATableHasTheCellsWithFinalRunsAndCountsTheOthers) {
  plan.search = 3, plan.target = 0.6;
  Results results = carry_out();
  std::erase_if(results, [](const auto& run) { return run.first.strategy != "ddc-asgd" && run.first.final; });
  const std::string table = experiment_table(plan, results);
  EXPECT_NE(table.find("| ddc-asgd |"), std::string::npos) << table;
  EXPECT_EQ(table.find("| ringmaster"), std::string::npos) << table;
  EXPECT_EQ(table.find("better by"), std::string::npos) << "nothing to compare with: " << table;
  EXPECT_NE(table.find("2 of 4 cells: no final run yet."), std::string::npos) << table;
}

TEST_F(Experiment, ATargetBeforeTheFirstEvaluationIsSaid) {
  plan.search = 3, plan.target = 0.2;  // the first evaluations are at half of the accuracies at the end, of 0.8
  const Results results = carry_out();
  EXPECT_EQ(time_to_target(plan, results, cell(0, 1)).at_first, 3u);
  EXPECT_NE(experiment_table(plan, results).find("3 of 3 at the first evaluation"), std::string::npos);
  EXPECT_EQ(time_ratio(plan, results, cell(0, 1), cell(1, 1)).pairs, 0u) << "a ratio of the times of evaluations";
}

TEST_F(Experiment, ResultsThatCannotBeAreRefused) {
  plan.search = 3, plan.data = "100 + 10 pictures, a checksum";
  const Results results = carry_out();
  EXPECT_TRUE(same(read_results(file, plan), results));
  const std::string good = read_file(file), line = good.substr(good.rfind('\n', good.size() - 2) + 1);
  auto damaged = [&](const std::string& from, const std::string& to) {
    std::string all = good;
    all.replace(all.rfind(from), from.size(), to);
    write_file(file, all);
    return test::refused([&] { read_results(file, plan); }, {file + ":"});
  };
  const std::string accuracy =
      line.substr(line.find("\"test\":") + 7, line.find(",\"evaluations") - line.find("\"test\":") - 7);
  EXPECT_TRUE(damaged("\"test\":" + accuracy, "\"test\":1.5"));
  EXPECT_TRUE(damaged("\"test\":" + accuracy, "\"test\":0.5"));  // not the last evaluation's
  EXPECT_TRUE(damaged("\"epoch\":[", "\"epoch\":[\"x\","));
  EXPECT_TRUE(damaged("\"seconds\":[", "\"seconds\":[-"));
  EXPECT_TRUE(damaged(",20]", ",2]"));  // before the first evaluation
  EXPECT_TRUE(damaged("\"delays\":[", "\"delays\":[-"));
  EXPECT_TRUE(damaged("\"participation\":0.5", "\"participation\":2"));
  EXPECT_TRUE(damaged(line, line + line));
  plan.data = "100 + 10 pictures, another";
  write_file(file, good);
  EXPECT_TRUE(test::refused([&] { read_results(file, plan); }, {"other data"}));
  plan.data = "";  // not loaded
  EXPECT_TRUE(same(read_results(file, plan), results));
}

TEST_F(Experiment, ADivergedTuningSeedCountsAsMinusOne) {
  plan.search = 3, plan.rates = {0.01, 0.02, 0.04}, plan.workers = {1};
  Results results;
  const Cell c = cell(0, 1);
  for (Search s = search(plan, results, c); !s.missing.empty(); s = search(plan, results, c))
    for (const Trial& t : s.missing) {
      results[t].accuracy = 0.5 + t.rate;                     // the largest rate is the best,
      results[t].diverged = t.rate > 0.03 && t.seed == 1002;  // but diverges with the second seed
    }
  EXPECT_DOUBLE_EQ(search(plan, results, c).chosen->rate, 0.02);
}

TEST_F(Experiment, PageAndStatus) {
  plan.search = 3;
  EXPECT_NE(experiment_status(plan, {}, 2).find("unknown"), std::string::npos);
  const Results results = carry_out();
  const std::string page = experiment_page(plan, results);
  EXPECT_NE(page.find("Try &lt;1&gt;"), std::string::npos);
  const std::string status = experiment_status(plan, results, 2);
  EXPECT_NE(status.find("3 of 3 points tried, chosen, 3 of 3 final runs"), std::string::npos) << status;
  EXPECT_NE(status.find("about 0.0 hours"), std::string::npos) << status;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
TEST_F(Experiment, ARowThatWasReadAgreesWithItsRun) {
  plan.search = 3, plan.seeds = 1;
  auto run = [](const Trial& t) {
    Outcome o = outcome(t);
    o.participation = 1 / 3.0;  // the file has seven digits of it
    return o;
  };
  tandem::carry_out(plan, file, 1, run, [](auto&, auto&) {});
  const Results recorded = read_results(file, plan);
  for (const auto& [t, o] : recorded) {
    Outcome again = run(t);
    for (const std::string& by : {o.made_by, std::string("0.0.1, another CPU")}) {
      again.made_by = by;
      EXPECT_EQ(contradiction(recorded, t, again), "");
    }
  }
}

TEST_F(Experiment, AFalsifiedRowIsFound) {
  plan.search = 3;
  Results results = carry_out();
  for (auto& [t, o] : results) o.made_by = "0.1.0, git 1a2b3c4, a CPU";
  const auto rows = rows_to_check(results, 3, 17, 300);
  EXPECT_EQ(rows, rows_to_check(results, 3, 17, 300));
  EXPECT_NE(rows, rows_to_check(results, 3, 18, 300));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_TRUE(rows_to_check(results, 3, 17, -1).empty());
  for (const Trial& t : rows) {
    Outcome again = outcome(t);
    again.made_by = "0.1.0, git 1a2b3c4, a CPU";
    EXPECT_EQ(contradiction(results, t, again), "");
    Results falsified = results;
    falsified[t].accuracy += 1e-6, falsified[t].evaluations.back().accuracy += 1e-6;
    EXPECT_NE(contradiction(falsified, t, again).find("not the same bits"), std::string::npos);
    for (double Outcome::*what : {&Outcome::gap, &Outcome::correction, &Outcome::dropped, &Outcome::refused}) {
      falsified = results, falsified[t].*what = 0.7;
      EXPECT_NE(contradiction(falsified, t, again).find("not the same bits"), std::string::npos);
    }
    Outcome dirty = again;
    falsified[t].made_by = dirty.made_by = "0.1.0, git 1a2b3c4-dirty, a CPU";
    EXPECT_EQ(contradiction(falsified, t, dirty), "");  // two builds can have that name
    falsified[t].made_by = "0.1.0, git 9999999, a CPU";
    EXPECT_EQ(contradiction(falsified, t, again), "");  // within 1 point
    falsified[t].evaluations[1].accuracy += 0.02;
    EXPECT_NE(contradiction(falsified, t, again).find("evaluation 2"), std::string::npos);
    falsified[t].made_by = "0.0.1, another CPU";
    falsified[t].accuracy += 0.02;
    EXPECT_EQ(contradiction(falsified, t, again), "");  // within 3 points
    falsified[t].accuracy += 0.02;
    EXPECT_NE(contradiction(falsified, t, again).find("may differ by 3 points"), std::string::npos)
        << contradiction(falsified, t, again);
    for (int what = 0; what < 3; what++) {  // what rounding does not change
      falsified = results, falsified[t].made_by = "0.0.1, another CPU";
      if (what == 0) falsified[t].evaluations[0].seconds *= 1.01;
      if (what == 1) falsified[t].delays[1]++;
      if (what == 2) falsified[t].participation = 0.6;
      EXPECT_NE(contradiction(falsified, t, again), "") << what;
    }
    falsified = results, falsified[t].diverged = true;
    EXPECT_NE(contradiction(falsified, t, again), "");
    falsified[t].made_by = "0.1.0, git 9999999, a CPU";
    EXPECT_NE(contradiction(falsified, t, again), "");
    falsified[t].made_by = "0.0.1, another CPU";
    EXPECT_EQ(contradiction(falsified, t, again), "");
    falsified[t].made_by = "0.1.0, git 9999999, a CPU";
    Outcome diverged = again;  // in both: what came before it is compared
    diverged.diverged = true, diverged.accuracy = 0;
    EXPECT_EQ(contradiction(falsified, t, diverged), "");
    falsified[t].evaluations[0].accuracy += 0.02;
    EXPECT_NE(contradiction(falsified, t, diverged).find("evaluation 1"), std::string::npos);
    falsified[t].made_by = "0.0.1, another CPU";  // versions without a commit
    diverged.made_by = "0.0.2, a CPU";
    EXPECT_EQ(contradiction(falsified, t, diverged), "");
    diverged.made_by = "0.0.2, another CPU";
    EXPECT_NE(contradiction(falsified, t, diverged).find("evaluation 1"), std::string::npos);
  }
}

// ---- plans ----------------------------------------------------------------------------------------------------------
TEST_F(Experiment, APlanIsRead) {
  EXPECT_EQ(refused(R"({"strategies":["asgd:clip={4,1}"],"workers":[1],"rates":[0.4,0.1],"target":0.5,"momenta":[0.9],
    "clusters":[{"name":"even"},{"name":"uneven","shape":10,"slow_share":0.5,"slow_factor":4,"latency":0.01,"bandwidth":1e9}]})"),
            "");
  const Plan p = read_plan((folder / "bad.json").string());
  EXPECT_EQ(p.title, "bad");
  EXPECT_EQ(p.rates, (std::vector<double>{0.1, 0.4}));
  EXPECT_EQ(p.tuning_epochs, p.epochs);
  EXPECT_EQ(*p.target, 0.5);
  const VirtualCluster c = p.clusters[1].of(5);
  EXPECT_EQ(c.slower, (std::map<int, double>{{3, 4}, {4, 4}}));
  EXPECT_EQ(c.bandwidth, 1e9);
  EXPECT_TRUE(p.clusters[1].of(1).slower.empty());
}

TEST_F(Experiment, EveryErrorOfAPlanNamesItsLine) {
  const std::string rest = "\"strategies\":[\"asgd\"],\n\"workers\":[1],\n\"rates\":[0.1]";  // lines 2, 3, 4
  auto with = [&](const std::string& line5) { return refused("{\n" + rest + ",\n" + line5 + "\n}"); };
  auto expect = [](const std::string& said, const std::string& line, const std::string& what) {
    EXPECT_EQ(said.find("bad.json:" + line + ": "), 0u) << said;
    EXPECT_NE(said.find(what), std::string::npos) << said;
  };
  EXPECT_EQ(with("\"epochs\":3"), "");
  expect(with("\"epochs\":2,\n\"schedule\":\"warmup:2+cosine\""), "6", "does not end in a run of 2");
  for (const char* half : {"\"slow_share\":0.5", "\"slow_factor\":2"})
    expect(with(std::string("\"clusters\":[{\"name\":\"a\",") + half + "}]"), "5", "only together");
  EXPECT_NE(refused(R"({"strategies":["quorum:8"],"workers":[16,4],"rates":[0.1]})").find("there are 4 workers"),
            std::string::npos);
  expect(with("\"epoch\":3"), "5", "\"epoch\" is not a field of a plan");
  expect(with("\"epochs\":0"), "5", "from 1");
  expect(with("\"epochs\":2.5"), "5", "whole number");
  expect(with("\"epochs\":\"2\""), "5", "not a number");
  expect(with("\"epochs\":2,\n\"tuning_epochs\":3"), "6", "to 2");
  expect(with("\"epochs\":2,\n\"epochs\":3"), "6", "comes twice");
  expect(with("\"augment\":1"), "5", "not true or false");
  expect(with("\"model\":3"), "5", "not a text");
  expect(with("\"model\":\"resnet21\""), "5", "resnet21");
  expect(with("\"data_set\":\"mnits\""), "5", "no data set");
  expect(with("\"dtype\":\"f16\""), "5", "f32 or bf16");
  expect(with("\"schedule\":\"cosinus\""), "5", "cosinus");
  expect(with("\"target\":92"), "5", "to 0.9999");
  expect(with("\"choose_by\":\"time\""), "5", "needs a \"target\"");
  expect(with("\"choose_by\":\"speed\""), "5", "accuracy or time");
  expect(with("\"epochs\":4,\n\"tuning_epochs\":2,\"target\":0.5,\"schedule\":\"cosine\",\n\"choose_by\":\"time\""),
         "7", "two schedules");
  expect(with("\"tuning_seed\":5"), "5", "from 1001");
  expect(refused("{\"strategies\":[\"asgd\"],\"rates\":[0.1],\n\"workers\":[16,4],\n\"clusters\":[{\"name\":\"a\","
                 "\"slow_share\":0.2}]}"),
         "3", "0.2 of 4 workers is none");
  expect(with("\"search\":0"), "5", "from 1");
  expect(with("\"momenta\":[0.9,\n1]"), "6", "to 0.9999");
  expect(with("\"momenta\":[0.9,\n0.9]"), "6", "twice");
  expect(with("\"momenta\":[]"), "5", "is empty");
  expect(with("\"clusters\":[\n{\"shape\":1}]"), "6", "\"name\" is missing");
  expect(with("\"clusters\":[\n{\"name\":\"a\",\"shap\":1}]"), "6", "not a field of a cluster");
  expect(with("\"clusters\":[\n{\"name\":\"a\",\"shape\":0.001}]"), "6", "0.001");
  expect(with("\"clusters\":[\n{\"name\":\"a\",\n\"slow_share\":2}]"), "7", "from 0 to 1");
  expect(with("\"clusters\":[{\"name\":\"a\"},\n{\"name\":\"a\"}]"), "6", "twice");
  expect(with("\"clusters\":[\n3]"), "6", "a cluster is an object");
  expect(with("\"seeds\" 3"), "5", "expected ':'");
  expect(refused("{\n\"strategies\":[\"asgd\"],\n\"workers\":[1]}"), "1", "\"rates\" is missing");
  expect(refused("[1]"), "1", "a plan is an object");
  expect(refused("{\n"), "2", "the end");
  auto strategy = [&](const std::string& s) {
    return refused("{\"strategies\":[\"bsp\",\n\"" + s + "\"],\n\"workers\":[1],\"rates\":[0.1]}");
  };
  EXPECT_EQ(strategy("asgd:clip={1,2}"), "");
  expect(strategy("agsd"), "2", "agsd");
  expect(strategy("bsp"), "2", "twice");
  expect(strategy("asgd:clip={1"), "2", "not closed");
  expect(strategy("asgd:clip={1}"), "2", "two values");
  expect(strategy("asgd:clip={1,1}"), "2", "twice");
  expect(strategy("asgd:clip={0,1}"), "2", "clip");
  expect(strategy("ddc-asgd:clamp={on,off}"), "2", "a row of its own");
  expect(strategy("ringmaster:R={1,2.5}"), "2", "whole numbers");
  auto lists = [&](const std::string& workers, const std::string& rates) {
    return refused("{\"strategies\":[\"asgd\"],\n\"workers\":" + workers + ",\n\"rates\":" + rates + "}");
  };
  expect(lists("[0]", "[0.1]"), "2", "from 1");
  expect(lists("[2.7]", "[0.1]"), "2", "whole number");
  expect(lists("[4,4]", "[0.1]"), "2", "4 twice");
  expect(lists("[1e300]", "[0.1]"), "2", "to 100000");
  expect(lists("[]", "[0.1]"), "2", "is empty");
  expect(lists("[1]", "[0.1,\n0.3]"), "4", "power of two");
  expect(lists("[1]", "[0.1,\n\"a\"]"), "4", "not a number");
}

}  // namespace
}  // namespace tandem::test
