// Tables of numbers, their batches, and the tasks beside classification: regression and several labels.
#include <cmath>
#include <fstream>
#include <set>

#include "datasets/table.h"
#include "dist/strategies/all_reduce.h"
#include "layers/train/confusion_matrix.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

std::string csv(const TemporaryFolder& dir, const std::string& text) {
  std::ofstream(dir.file("t.csv")) << text;
  return dir.file("t.csv");
}

TEST(Tables, ACsvFileIsFeaturesAndTargets) {
  TemporaryFolder dir;
  const std::string file = csv(dir, "size, price ,\"age\"\r\n1,10,3\r\n\r\n2.5,-20,4e1\r\n");
  const Table t = read_csv(file, {"price"});
  EXPECT_EQ(t.columns, (std::vector<std::string>{"size", "age"}));
  EXPECT_EQ(t.features.values(), (std::vector<double>{1, 3, 2.5, 40}));
  EXPECT_EQ(t.targets.values(), (std::vector<double>{10, -20}));
  EXPECT_EQ(t.outputs(), 1);
  const Table two = read_csv(file, {"age", "size"});  // in the file's order
  EXPECT_EQ(two.targets.values(), (std::vector<double>{1, 3, 2.5, 40}));
  const Table kinds = read_csv(csv(dir, "x,kind\n1,10\n2,9\n3,10\n4,rose\n"), {"kind"}, true);
  EXPECT_EQ(kinds.classes, (std::vector<std::string>{"9", "10", "rose"}));
  EXPECT_EQ(kinds.targets.values(), (std::vector<double>{1, 0, 1, 2}));
  EXPECT_EQ(kinds.outputs(), 3);
}

TEST(Tables, WhatIsWrongInACsvFileIsNamed) {
  TemporaryFolder dir;
  EXPECT_TRUE(refused([&] { read_csv(dir.file("none.csv"), {"y"}); }, {"none.csv", "No such file"}));
  EXPECT_TRUE(refused([&] { read_csv(csv(dir, "x,y\n1,2\n"), {"z"}); }, {"no column 'z'", "x,y"}));
  EXPECT_TRUE(refused([&] { read_csv(csv(dir, "x,y\n1,2\n3\n"), {"y"}); }, {"line 3", "1 fields, expected 2"}));
  for (const char* bad : {"", "cat", "1.5x", "nan", "1e99"})
    EXPECT_TRUE(refused([&] { read_csv(csv(dir, std::string("x,y\n1,2\n") + bad + ",4\n"), {"y"}); },
                        {"line 3", "column 'x'", "finite"}))
        << bad;
  EXPECT_TRUE(refused([&] { read_csv(csv(dir, "x,y\n"), {"y"}); }, {"no row"}));
  EXPECT_TRUE(refused([&] { read_csv(csv(dir, "y\n1\n"), {"y"}); }, {"no feature"}));
}

Table numbers_table(std::int64_t rows) {
  Table t{.name = "numbers"};
  t.features = host_tensor({rows, 3}, DType::f32), t.targets = host_tensor({rows, 2}, DType::f32);
  const std::vector<double> x = numbers("table", rows * 3, -1, 1);
  for (std::int64_t i = 0; i < rows; i++) {
    for (int c = 0; c < 3; c++) t.features.write<float>()[i * 3 + c] = float(x[std::size_t(i * 3 + c)]);
    t.targets.write<float>()[i * 2] = float(2 * x[std::size_t(i * 3)] - x[std::size_t(i * 3 + 1)]);
    t.targets.write<float>()[i * 2 + 1] = float(x[std::size_t(i * 3 + 2)] > 0);
  }
  return t;
}

TEST(Tables, SplitAndStandardise) {
  const Table all = numbers_table(100);
  auto [rest, held] = split(all, 20, 7);
  EXPECT_EQ(rest.rows(), 80);
  EXPECT_EQ(held.rows(), 20);
  std::multiset<double> before, after;
  for (double v : all.features.values()) before.insert(v);
  for (const Table* t : {&rest, &held})
    for (double v : t->features.values()) after.insert(v);
  EXPECT_TRUE(before == after);
  standardise(rest, {&held});
  double sum = 0, squares = 0;
  for (std::int64_t i = 0; i < 80; i++) {
    const double v = rest.features.data<float>()[i * 3 + 1];
    sum += v, squares += v * v;
  }
  EXPECT_NEAR(sum / 80, 0, 1e-6);
  EXPECT_NEAR(squares / 80, 1, 1e-5);
  EXPECT_EQ(held.mean, rest.mean);
  EXPECT_TRUE(refused([&] { split(all, 100); }, {"numbers", "100 of 100"}));
}

TEST(Tables, RanksShareEachBatch) {
  auto backend = reference_backend(1);
  const Table t = numbers_table(53);
  TableLoader whole(t, {.batch = 16, .seed = 3}, *backend);
  for (std::int64_t i = 0; i < whole.batches_per_epoch(); i++) {
    const std::vector<double> want = whole.make(1, i).images.values();
    std::vector<double> got;
    for (int r = 0; r < 3; r++) {
      TableLoader part(t, {.batch = 16, .seed = 3}, *backend);
      part.share(r, 3);
      for (double v : part.make(1, i).images.values()) got.push_back(v);
    }
    EXPECT_EQ(got, want) << "batch " << i;
  }
}

struct Net : Module {
  Linear& a = child<Linear>("a", 3, 16, true, true);
  Linear& b = child<Linear>("b", 16, 2);
  Variable forward(const Variable& x) override { return b(a(x)); }
};
EpochReport fit_table(const Task& task, Strategy& strategy, Ended& run) {
  auto backend = reference_backend(1);
  auto [training, testing] = split(numbers_table(240), 40);
  TableLoader train(training, {.batch = 20}, *backend), test(testing, {.batch = 40, .shuffle = false}, *backend);
  Net model;
  AdamW optimizer({.learning_rate = 0.01});
  const FitReport report = fit(model, task, optimizer, *backend, {train, nullptr, &test}, quiet(12), &strategy);
  for (auto& [name, p] : model.parameters())
    for (double v : p->variable.value().values()) run.weights.push_back(v);
  return report.epochs.back();
}

TEST(Tasks, RegressionHasALossAndNoAccuracyAndRanksAreOneMachine) {
  Strategy one;
  Ended alone;
  const EpochReport e = fit_table(regression(), one, alone);
  EXPECT_LT(*e.test_loss, 0.1);
  EXPECT_FALSE(e.train_accuracy || e.test_accuracy || e.validation_accuracy);
  EXPECT_EQ(line_of(e, 12).find('%'), std::string::npos) << line_of(e, 12);
  const auto ranks = on_ranks(
      2, [](std::unique_ptr<Communicator> c) { return all_reduce(std::move(c)); },
      [](Strategy& s, Ended& run) { fit_table(regression(), s, run); });
  same_bits(ranks);
  EXPECT_LT(furthest(ranks[0].weights, alone.weights), 1e-5);
}

TEST(Tasks, SeveralLabelsARowIsRightWhenAllAre) {
  auto backend = reference_backend(1);
  const Tensor outputs = Tensor::of(*backend, {3, 2}, {2, -1, -3, 4, 1, 1}),
               targets = Tensor::of(*backend, {3, 2}, {1, 0, 1, 1, 1, 1});
  Tensor correct = Tensor::zeros(*backend, {1}, DType::i32);
  const double loss = multi_label().judged(Variable(outputs), targets, &correct).value().item();
  double want = 0;
  const std::vector<double> x = outputs.values(), y = targets.values();
  for (std::size_t i = 0; i < 6; i++) want += std::log(1 + std::exp(y[i] > 0 ? -x[i] : x[i])) / 6;
  EXPECT_NEAR(loss, want, 1e-6);
  EXPECT_EQ(correct.item(), 2);

  Table t = numbers_table(240);
  for (std::int64_t i = 0; i < 240; i++) t.targets.write<float>()[i * 2] = t.features.data<float>()[i * 3] > 0;
  TableLoader train(t, {.batch = 20}, *backend);
  Net model;
  AdamW optimizer({.learning_rate = 0.02});
  Strategy one;
  fit(model, multi_label(), optimizer, *backend, {train}, quiet(15), &one);
  const Evaluation e = evaluate(model, train, nullptr, multi_label());
  EXPECT_GT(e.accuracy, 0.9);
}

// What a tester found: none of these said a word, and each did something else than was meant.
TEST(Tables, NamesAndKindsThatDoNotFitAreRefused) {
  TemporaryFolder folder;
  auto written = [&](const std::string& text) {
    std::ofstream(folder.file("t.csv")) << text;
    return folder.file("t.csv");
  };
  EXPECT_TRUE(refused([&] { read_csv(written("a,y,y\n1,2,3\n"), {"y"}); }, {"two columns", "'y'"}));
  EXPECT_TRUE(refused([&] { read_csv(written("a,y\n1,2\n"), {"y", "y"}); }, {"two of the targets"}));
  EXPECT_TRUE(refused([&] { read_csv(written("a,y\n1,\n"), {"y"}, true); }, {"line 2", "no class"}));
  EXPECT_TRUE(refused([&] { read_csv(folder.file("."), {"y"}); }, {"folder"}));
  const Table t = read_csv(written("\xEF\xBB\xBF"
                                   "a,y\n+1,2\n"),
                           {"y"});
  EXPECT_EQ(t.columns[0], "a");
  EXPECT_EQ(t.features.values()[0], 1);

  auto backend = reference_backend(1);
  TableLoader labels(numbers_table(12), {.batch = 4}, *backend);
  Net model;
  FlatParameters flat(model, *backend, 1);
  EXPECT_TRUE(refused([&] { confusion_matrix(model, labels); }, {"confusion_matrix", "i32", "[b, classes]"}));
  EXPECT_TRUE(refused([&] { Tensor::of(*backend, {1}, {300}, DType::u8); }, {"300", "u8"}));
  // Parameters that others have taken over.
  FlatParameters second(model, *backend, 2);
  EXPECT_TRUE(
      refused([&] { flat.backward(mean(model(labels.make(0, 0).images))); }, {"belongs to other FlatParameters"}));
  second.backward(mean(model(labels.make(0, 0).images)));
}

TEST(Tasks, AreAPartOfTheRunsIdentity) {
  TemporaryFolder folder;
  auto backend = reference_backend(1);
  TableLoader train(numbers_table(40), {.batch = 20}, *backend);
  for (const Task& task : {regression(), multi_label()}) {
    Net model;
    SGD sgd({.learning_rate = 0.01});
    FitOptions o = quiet(2);
    o.checkpoint = folder.file("run");
    if (task.name == "multi-label") o.resume = o.checkpoint, o.epochs = 3, o.progress = true;
    Strategy one;
    testing::internal::CaptureStderr();
    fit(model, task, sgd, *backend, {train}, o, &one);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("task was regression and is multi-label") != said.npos, task.name == "multi-label") << said;
  }
}

}  // namespace
}  // namespace tandem::test
