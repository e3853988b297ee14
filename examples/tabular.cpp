// Rows of numbers instead of pictures. Without files: a regression on artificial house prices with six features.
//   build/tabular --features x.npy --targets y.npy                   (numbers [N] or [N, k])
//   build/tabular --features x.npy --targets y.npy --task classes    (whole numbers [N])
//   build/tabular --features x.npy --targets y.npy --task labels     (0 and 1, [N, k])
// pandas.read_csv("iris.csv")["species"].astype("category").cat.codes.to_numpy() makes classes of a CSV file's column;
// numpy.save writes them.
#include <cmath>
#include <cstdio>

#include "tandem.h"

using namespace tandem;

class Mlp : public Module {
 public:
  Mlp(std::int64_t inputs, std::int64_t outputs)
      : a_(child<Linear>("a", inputs, 64)), b_(child<Linear>("b", 64, 64)), out_(child<Linear>("out", 64, outputs)) {}
  Variable forward(const Variable& x) override { return out_(relu(b_(relu(a_(x))))); }

 private:
  Linear &a_, &b_, &out_;
};

// price = rooms · (1 + size)² − 3·age + sin(6x)·y.
Table houses(std::int64_t rows) {
  Table t{.name = "houses"};  // rooms, size, age, position x and y, and a feature without effect
  t.features = host_tensor({rows, 6}, DType::f32);
  t.targets = host_tensor({rows, 1}, DType::f32);
  float *x = t.features.write<float>(), *y = t.targets.write<float>();
  for (std::int64_t i = 0; i < rows; i++, x += 6) {
    for (std::uint32_t c = 0; c < 6; c++) x[c] = uniform(Philox(1, Stream::synthetic, 0, std::uint32_t(i)).word(c));
    y[i] = x[0] * (1 + x[1]) * (1 + x[1]) - 3 * x[2] + std::sin(6 * x[3]) * x[4];
  }
  return t;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::string features, targets, kind = "numbers";
    OptionRows own;
    own.text("--features", features, "features [N, columns] as .npy");
    own.text("--targets", targets, "their targets as .npy");
    own.choice("--task", kind, {"numbers", "classes", "labels"},
               "numbers (regression), classes or labels (each target 0 or 1)");
    RunConfig o = parse_options(argc, argv, "A network for rows of numbers.",
                                {.epochs = 20, .batch = 64, .learning_rate = 0.003, .optimizer = "adamw"},
                                {"--epochs", "--batch", "--lr", "--schedule", "--optimizer", "--seed", "--device",
                                 "--metrics", "--checkpoint", "--resume"},
                                own.all);
    if (features.empty() != targets.empty()) refuse("--features and --targets go together: name both");
    if (kind != "numbers" && features.empty()) refuse("--task ", kind, " needs your own --features and --targets");
    auto backend = make_backend(o);
    const Table all = features.empty() ? houses(4000) : read_table(features, targets);
    if ((kind == "classes") != (all.targets.dtype() == DType::i32))
      refuse("--task ", kind, ": ", targets,
             kind == "classes" ? " holds no whole numbers [N]: save them as int64" : " holds classes");
    if (kind == "labels")
      for (double v : all.targets.values())
        if (v != 0 && v != 1) refuse("--task labels: ", targets, " holds ", v, ": each target is 0 or 1");
    auto [training, testing] = split(all, all.rows() / 5, o.seed);
    standardise(training, {&testing});
    TableLoader train(training, {.batch = o.batch, .seed = o.seed}, *backend);
    TableLoader test(testing, {.batch = 500, .shuffle = false}, *backend);

    const Task task = kind == "classes" ? classification() : kind == "labels" ? multi_label() : regression();
    Mlp model(all.features.size(1), all.outputs());
    auto optimizer = make_optimizer(o);
    const FitReport report = fit(model, task, *optimizer, *backend, {train, nullptr, &test}, o);
    if (!report.epochs.empty()) std::printf("test loss %.4f\n", *report.epochs.back().test_loss);
  });
}
