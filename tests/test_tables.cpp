// Tables of numbers, their batches, and the tasks beside classification: regression and several labels.
#include "tests/data_files.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

struct Tables : OnReference {
  DataFolder dir;
};
using Tasks = OnReference;

// As numpy.save writes it: `type` is "<f4" or "<i8".
template <class T>
std::string saved(const DataFolder& dir, const std::string& name, const char* type, const std::string& shape,
                  const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  save(dir / name, npy(type, shape, Bytes(bytes, bytes + values.size() * sizeof(T))));
  return dir.file(name);
}

TEST_F(Tables, ArraysAreFeaturesAndTargets) {
  const std::string x = saved<float>(dir, "x.npy", "<f4", "(2, 3)", {1, 2, 3, 4, 5, 6});
  const Table numbers = read_table(x, saved<float>(dir, "y.npy", "<f4", "(2,)", {7, 8}));
  EXPECT_EQ(numbers.features.shape(), (Shape{2, 3}));
  EXPECT_EQ(numbers.targets.shape(), (Shape{2, 1}));
  EXPECT_EQ(numbers.targets.values(), (Numbers{7, 8}));
  EXPECT_EQ(numbers.outputs(), 1);
  const Table classes = read_table(x, saved<std::int64_t>(dir, "c.npy", "<i8", "(2,)", {2, 0}));
  EXPECT_EQ(classes.targets.dtype(), DType::i32);
  EXPECT_EQ(classes.outputs(), 3);
}

TEST_F(Tables, WhatIsWrongInArraysIsNamed) {
  auto floats = [&](const char* name, const char* shape, const std::vector<float>& values) {
    return saved(dir, name, "<f4", shape, values);
  };
  const std::string x = floats("x.npy", "(2, 1)", {1, 2});
  EXPECT_REFUSED(read_table(x, dir.file("none.npy")), "none.npy");
  EXPECT_REFUSED(read_table(floats("a.npy", "(2,)", {1, 2}), x), "a.npy", "[2]", "expected features");
  EXPECT_REFUSED(read_table(x, floats("y.npy", "(3,)", {1, 2, 3})), "y.npy", "expected targets [2]");
  EXPECT_REFUSED(read_table(x, floats("n.npy", "(2,)", {1, NAN})), "not finite");
  const std::string negative = saved<std::int64_t>(dir, "m.npy", "<i8", "(2,)", {1, -1});
  EXPECT_REFUSED(read_table(x, negative), "m.npy", "label -1 at position 1");
}

Table numbers_table(std::int64_t rows) {
  Table t{.name = "numbers"};
  t.features = host_tensor({rows, 3}, DType::f32), t.targets = host_tensor({rows, 2}, DType::f32);
  const Numbers x = numbers("table", rows * 3, -1, 1);
  for (std::int64_t i = 0; i < rows; i++) {
    for (int c = 0; c < 3; c++) t.features.write<float>()[i * 3 + c] = float(x[i * 3 + c]);
    t.targets.write<float>()[i * 2] = float(2 * x[i * 3] - x[i * 3 + 1]);
    t.targets.write<float>()[i * 2 + 1] = float(x[i * 3 + 2] > 0);
  }
  return t;
}

TEST_F(Tables, SplitAndStandardise) {
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
  EXPECT_REFUSED(split(all, 100), "numbers", "100 of 100");
}

TEST_F(Tables, RanksShareEachBatch) {
  const Table t = numbers_table(53);
  TableLoader whole(t, {.batch = 16, .seed = 3}, *backend);
  for (std::int64_t i = 0; i < whole.batches_per_epoch(); i++) {
    const Numbers want = whole.make(1, i).images.values();
    Numbers got;
    for (int r = 0; r < 3; r++) {
      TableLoader part(t, {.batch = 16, .seed = 3}, *backend);
      part.share(r, 3);
      for (double v : part.make(1, i).images.values()) got.push_back(v);
    }
    EXPECT_EQ(got, want) << "batch " << i;
  }
}

constexpr PlainSizes of_a_table{.features = 3, .hidden = 16, .classes = 2};
EpochReport fit_table(const Task& task, Strategy& strategy, Ended& run) {
  auto backend = reference_backend(1);
  auto [training, testing] = split(numbers_table(240), 40);
  TableLoader train(training, {.batch = 20}, *backend), test(testing, {.batch = 40, .shuffle = false}, *backend);
  Plain model(of_a_table);
  AdamW optimizer({.learning_rate = 0.01});
  const FitReport report = fit(model, task, optimizer, *backend, {train, nullptr, &test}, quiet(12), &strategy);
  run.weights = parameter_values(model);
  return report.epochs.back();
}

TEST_F(Tasks, RegressionHasALossAndNoAccuracyAndRanksAreOneMachine) {
  Strategy one;
  Ended alone;
  const EpochReport e = fit_table(regression(), one, alone);
  EXPECT_LT(*e.test_loss, 0.1);
  EXPECT_FALSE(e.train_accuracy || e.test_accuracy || e.validation_accuracy);
  EXPECT_EQ(line_of(e, 12).find('%'), std::string::npos) << line_of(e, 12);
  const auto ranks = on_ranks(2, all_reduced(), [](Strategy& s, Ended& run) { fit_table(regression(), s, run); });
  same_bits(ranks);
  EXPECT_LT(furthest(ranks[0].weights, alone.weights), 1e-5);
}

TEST_F(Tasks, SeveralLabelsARowIsRightWhenAllAre) {
  const Tensor outputs = Tensor::of(*backend, {3, 2}, {2, -1, -3, 4, 1, 1}),
               targets = Tensor::of(*backend, {3, 2}, {1, 0, 1, 1, 1, 1});
  Tensor correct = Tensor::zeros(*backend, {1}, DType::i32);
  const double loss = multi_label().evaluation(Variable(outputs), targets, &correct).value().item();
  double want = 0;
  const Numbers x = outputs.values(), y = targets.values();
  for (std::size_t i = 0; i < 6; i++) want += std::log(1 + std::exp(y[i] > 0 ? -x[i] : x[i])) / 6;
  EXPECT_NEAR(loss, want, 1e-6);
  EXPECT_EQ(correct.item(), 2);

  Table t = numbers_table(240);
  for (std::int64_t i = 0; i < 240; i++) t.targets.write<float>()[i * 2] = t.features.data<float>()[i * 3] > 0;
  TableLoader train(t, {.batch = 20}, *backend);
  Plain model(of_a_table);
  AdamW optimizer({.learning_rate = 0.02});
  Strategy one;
  fit(model, multi_label(), optimizer, *backend, {train}, quiet(15), &one);
  const Evaluation e = evaluate(model, train, nullptr, multi_label());
  EXPECT_GT(e.accuracy, 0.9);
}

// What a tester found: none of these said a word, and each did something else than was meant.
TEST_F(Tables, NamesAndKindsThatDoNotFitAreRefused) {
  TableLoader labels(numbers_table(12), {.batch = 4}, *backend);
  Plain model(of_a_table);
  FlatParameters flat(model, *backend, 1);
  EXPECT_REFUSED(confusion_matrix(model, labels), "confusion_matrix", "i32", "[b, classes]");
  EXPECT_REFUSED(Tensor::of(*backend, {1}, {300}, DType::u8), "300", "u8");
  // Parameters that others have taken over.
  FlatParameters second(model, *backend, 2);
  EXPECT_REFUSED(flat.backward(mean(model(labels.make(0, 0).images))), "belongs to other FlatParameters");
  second.backward(mean(model(labels.make(0, 0).images)));
}

TEST_F(Tasks, AreAPartOfTheRunsIdentity) {
  TemporaryFolder folder;
  TableLoader train(numbers_table(40), {.batch = 20}, *backend);
  for (const Task& task : {regression(), multi_label()}) {
    Plain model(of_a_table);
    SGD sgd({.learning_rate = 0.01});
    RunConfig o = quiet(2);
    o.checkpoint = folder.file("run");
    if (task.name == "multi-label") o.resume = o.checkpoint, o.epochs = 3, o.progress = true;
    Strategy one;
    const std::string said = stderr_of([&] { fit(model, task, sgd, *backend, {train}, o, &one); });
    EXPECT_EQ(said.find("task was regression and is multi-label") != said.npos, task.name == "multi-label") << said;
  }
}

}  // namespace
}  // namespace tandem::test
