#include "examples/course/check.h"
#include "dist/lab/simulator.h"
#include "dist/server/rules.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

const Numbers w0{1, -2, 0.5}, sent0{0.8, -2.4, 0.5}, g0{0.5, 3, -1};

void rules_are_right() {
  Numbers w = w0;
  asgd(w, g0, 0.1);
  expect_equal("asgd", w, {0.95, -2.3, 0.6}, 1e-14, {{{1.05, -1.7, 0.4}, "The step goes uphill: subtract it."}});
  auto with = [](double sign, double power) {
    Numbers v = w0;
    for (std::size_t i = 0; i < v.size(); i++)
      v[i] -= 0.1 * (g0[i] + sign * 0.5 * std::pow(g0[i], power) * (w0[i] - sent0[i]));
    return v;
  };
  w = w0;
  delay_compensated(w, g0, sent0, 0.1, 0.5);
  expect_equal("delay compensation", w, with(1, 2), 1e-14,
               {{with(0, 2), "The correction is missing: lambda*g*g*(w - sent)."},
                {with(-1, 2), "The difference has the wrong sign: it is w - sent."},
                {with(1, 1), "The correction has g*g, an estimate of the Hessian's diagonal."}});
}

void shard_is_right() {
  auto after = [](Numbers w, const Numbers& sent) {
    for (std::size_t i = 0; i < w.size(); i++) w[i] -= 0.1 * (g0[i] + 0.5 * g0[i] * g0[i] * (w[i] - sent[i]));
    return w;
  };
  const Numbers w1 = after(w0, w0), w2 = after(w1, w0), w3 = after(w2, w1);
  Shard shard(w0, 2);
  shard.push(1, g0, 0.1, 0.5);
  expect_equal("a pull after one push", shard.pull(0), w1, 1e-14, {{w0, "push() changes the shard."}});
  shard.push(1, g0, 0.1, 0.5);
  shard.push(0, g0, 0.1, 0.5);
  expect_equal("two workers' late pushes", shard.pull(0), w3, 1e-14,
               {{after(after(w1, w1), after(w1, w1)), "Compare w with what the worker was last sent, not with itself."},
                {after(w2, w0), "pull() has to remember what it sends to the worker."}});
}

// Adapts a rule of the course to the library's Rule, for the simulator.
struct CourseRule : Rule {
  using Body = std::function<void(std::span<double>, std::span<const double>, std::span<const double>, double, double)>;
  explicit CourseRule(Body b) : body(std::move(b)) {}
  std::string name() const override { return "course"; }
  Keeps keeps() const override { return {.sent = true}; }
  template <class T>
  void apply(const RuleVectors<T>& x, std::int64_t numel, const Hyper& hyper) const {
    Numbers w(x.w, x.w + numel), g(x.g, x.g + numel), sent(x.sent, x.sent + numel);
    body(w, g, sent, hyper.learning_rate, hyper.delay);
    std::copy(w.begin(), w.end(), x.w);
  }
  void push(const RuleVectors<double>& x, std::int64_t n, const Hyper& hyper) const override { apply(x, n, hyper); }
  void push(const RuleVectors<float>& x, std::int64_t n, const Hyper& hyper) const override { apply(x, n, hyper); }
  double correction(const RuleVectors<float>&, std::int64_t, const Hyper&) const override { return 0; }
  Body body;
};

// The accuracy on test pictures after five epochs of 16 workers, a quarter of them four times slower.
double accuracy(const std::string& strategy, const std::shared_ptr<const Rule>& rule = {}) {
  const auto backend = cpu_backend(1);
  Dataset data = load_dataset("fashion-mnist", "datasets/fashion-mnist-small");
  Loader train(data.train, {.batch = 32, .seed = 1, .prefetch = 0}, *backend);
  Loader test(data.test, {.batch = 100, .shuffle = false, .prefetch = 0}, *backend);
  Model model = mlp(data.classes(), data.channels(), data.side());
  SimulatorOptions o{.strategy = strategy, .rule = rule, .epochs = 5, .progress = false};
  o.cluster.workers = 16;
  o.cluster.slower = {{0, 4}, {1, 4}, {2, 4}, {3, 4}};
  const SimulatorReport report =
      simulate(*model, cross_entropy_loss(), {.learning_rate = 0.02}, *backend, {train, nullptr, &test}, o);
  return report.diverged ? 0 : 100 * report.evaluations.back().test_accuracy.value_or(0);
}

std::string rules_train() {
  using Sent = std::span<const double>;
  const double library = accuracy("dc-asgd-c:lambda=0.5"), plain = accuracy("asgd");
  const double yours =
      accuracy("asgd", std::make_shared<CourseRule>([](std::span<double> w, Sent g, Sent sent, double rate, double) {
                 delay_compensated(w, g, sent, rate, 0.5);
               }));
  const double own = accuracy("asgd", std::make_shared<CourseRule>(own_rule));
  const std::string table = "16 workers, test accuracy: asgd " + digits(plain, 4) + " %, the library's dc-asgd-c " +
                            digits(library, 4) + " %, yours " + digits(yours, 4) + " %, your own rule " +
                            digits(own, 4) + " %";
  expect(std::fabs(yours - library) < 2, table, "The same rule should train as well.");
  expect(own > 60, table, "own_rule() does not train. Its delay can be 0; a rate that is not finite ends the run.");
  return table;
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 5, "a shard and late gradients", [] {
    rules_are_right();
    shard_is_right();
    return rules_train();
  });
}
