// The memory plan: storages that leave and return, budgets, movers, the knapsack and the simulation, and above all that
// a step within a budget gives the bits of a step without.
//
// TANDEM_PLAN_GRAPHS=20000 and TANDEM_PLAN_STEPS=50 make the long runs.
#include <random>

#include "autograd/elementwise.h"
#include "layers/train/run.h"
#include "tests/bench/timing.h"
#include "tests/training.h"

namespace tandem::test {
namespace {
using Bits = std::vector<std::byte>;

// Convolutions choose their algorithm by a rule: a choice by time also changes the scratch memory, and with it the
// smallest budget.
std::unique_ptr<Backend> steady_backend(int threads) {
  auto backend = cpu_backend(threads);
  backend->deterministic(true);
  return backend;
}

constexpr std::size_t mib = std::size_t{1} << 20, unlimited = mib << 20;

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

// The budget that the refusal names which `run` throws; 0: it throws none.
std::size_t named_budget(const std::function<void()>& run) {
  const std::string text = error_of<UsageError>(run);
  return text.empty() ? 0 : std::stoull(text.substr(text.find_first_of("0123456789", text.find("smallest"))));
}

// Makes the pass a step of the plan; without a plan, just so.
void within(MemoryPlan* plan, const std::function<void()>& pass) {
  std::optional<MemoryPlan::Step> step;
  if (plan) step.emplace(*plan);
  pass();
  if (step) step->end();
}

// After `passes`, each under this plan: the smallest budget, and what they take within the plan's.
std::pair<std::size_t, std::size_t> looked_at(Backend& backend, int passes, const MemoryPlanOptions& options,
                                              const std::function<void(MemoryPlan&)>& pass,
                                              const SimulatedRates& rates = {}) {
  MemoryPlan plan(backend, simulated_mover(rates), options);
  for (int k = 0; k < passes; k++) pass(plan);
  return {smallest_budget(plan.record(), plan.means()), plan.measured().peak};
}

// A network whose loss is the sum of its outputs.
struct Summing {
  std::unique_ptr<Backend> backend = steady_backend(1);
  Model model;
  FlatParameters flat;
  Summing(const char* name, int channels, int side)
      : model(make_model(name, 10, channels, side)), flat(*model, *backend, 1) {}
  void step(MemoryPlan* plan, const Tensor& images) {
    within(plan, [&] {
      flat.zero_gradients();
      flat.backward(sum((*model)(Variable(images))));
    });
  }
};

// ---- storages and budgets -------------------------------------------------------------------------------------------
struct Shelf : Keeper {
  Bits bytes;
  int returned = 0, ended = 0;
  void take(Storage& s) {
    bytes.assign(s.data(), s.data() + s.bytes());
    s.keep(this, 0);
    s.leave(Residency::evicted);
  }
  void bring_back(Storage& s) override {
    void* block = s.new_block();
    std::memcpy(block, bytes.data(), bytes.size());
    s.arrive(block);
    returned++;
  }
  void gone(Storage&) noexcept override { ended++; }
};

struct Storages : OnReference {
  Tensor t = Tensor::of(*backend, {3}, {1, 2, 3});
  Shelf shelf;
};

TEST_F(Storages, AStorageThatLeftComesBackWhenItIsRead) {
  const std::uint64_t writes = t.writes().now();
  const std::size_t before = backend->memory().statistics().live_bytes;
  shelf.take(*t.storage());
  EXPECT_EQ(t.storage()->residency(), Residency::evicted);
  EXPECT_LT(backend->memory().statistics().live_bytes, before);
  EXPECT_EQ(t.values(), (Numbers{1, 2, 3}));
  EXPECT_EQ(shelf.returned, 1);
  EXPECT_EQ(t.writes().now(), writes);
  t = Tensor();
  EXPECT_EQ(shelf.ended, 1);
}

TEST_F(Storages, WithoutAKeeperReadingFailsByName) {
  shelf.take(*t.storage());
  t.storage()->keep(nullptr, 0);
  EXPECT_REFUSED(t.values(), "swapped out", "its memory plan is gone");
}

TEST_F(Storages, ForeignMemoryAndParametersStay) {
  auto array = std::make_shared<std::vector<float>>(4);
  EXPECT_FALSE(Tensor::wrap(*backend, array->data(), {4}, DType::f32, array).storage()->movable());
  Linear model(2, 2);
  FlatParameters flat(model, *backend, 1);
  EXPECT_FALSE(flat.values.storage()->movable());
}

TEST(MemoryBudget, ARequestBeyondItAsksForMemoryBackAndThenFailsWithTheSmallestThatWouldDo) {
  auto backend = reference_backend(1);
  CachingAllocator& memory = backend->memory();
  void* held = memory.take(3 * mib);
  std::size_t asked = 0;
  memory.budget(4 * mib, [&](std::size_t bytes) {
    asked = bytes;
    if (held) memory.give(std::exchange(held, nullptr));
    return std::size_t{0};
  });
  void* a = memory.take(2 * mib);
  EXPECT_EQ(asked, 1 * mib);
  EXPECT_EQ(held, nullptr);
  EXPECT_REFUSED(memory.take(3 * mib), "memory budget of 4.00 MiB", "5.00 MiB", std::to_string(5 * mib));
  memory.give(a);
  memory.budget(0);
  memory.give(memory.take(8 * mib));
}

// ---- movers ---------------------------------------------------------------------------------------------------------
TEST(FileMover, BringsBackWhatItCarriedOut) {
  const auto mover = file_mover();
  std::mt19937 random(1);
  auto backend = steady_backend(1);
  for (int round = 0; round < 2; round++) {  // the second one uses the first one's rooms
    std::vector<Tensor> tensors, copies;
    std::vector<Mover::CopyId> ids;
    for (std::int64_t n : {1, 100, 5000, 262144, 262145, 3000001}) {
      Numbers values(static_cast<std::size_t>(n));
      for (double& v : values) v = double(random() % 1000);
      tensors.push_back(Tensor::of(*backend, {n}, values));
      ids.push_back(mover->out(tensors.back().raw(), tensors.back().bytes()));
    }
    for (std::size_t i = 0; i < tensors.size(); i++) {
      EXPECT_EQ(mover->wait(ids[i]), "");
      copies.push_back(Tensor::like(tensors[i]));
      mover->in(ids[i], copies[i].raw_write());
    }
    for (std::size_t i = 0; i < tensors.size(); i++) {
      EXPECT_EQ(mover->wait(ids[i]), "");
      EXPECT_TRUE(mover->done(ids[i]));
      EXPECT_EQ(bytes_of(copies[i]), bytes_of(tensors[i])) << i;
      mover->forget(ids[i]);
    }
  }
  EXPECT_GT(mover->rates().out, 0);
  EXPECT_GT(mover->rates().in, 0);
}

TEST(FileMover, AFolderThatIsNotThereAndAFullDiskAreErrorsThatLoseNothing) {
  EXPECT_REFUSED(file_mover("/nowhere/at all"), "/nowhere/at all", "--scratch");
  const FileLimit limit(mib);
  const auto mover = file_mover();
  std::vector<float> values(mib / 2, 7);
  const Mover::CopyId id = mover->out(values.data(), values.size() * 4);
  EXPECT_TRUE(holds(mover->wait(id), {"could not be written"}));
  mover->forget(id);
  EXPECT_EQ(values[17], 7);
}

// ---- the choice -----------------------------------------------------------------------------------------------------
TEST(Knapsack, GivesTheKnownTotals) {
  const std::vector<std::size_t> sizes{11, 3, 4, 2};
  for (std::size_t budget : {18, 17, 16, 15, 14, 13, 11, 7, 6, 5}) {
    const std::vector<bool> taken = knapsack(sizes, Numbers(sizes.begin(), sizes.end()), budget);
    EXPECT_EQ(std::inner_product(sizes.begin(), sizes.end(), taken.begin(), std::size_t{0}), budget);
  }
}

TEST(Knapsack, IsTheBestOfAll) {
  std::mt19937 random(2);
  for (int round = 0; round < 10000; round++) {
    const std::size_t n = 1 + random() % 12, capacity = random() % 60;
    std::vector<std::size_t> sizes(n);
    Numbers values(n);
    for (std::size_t i = 0; i < n; i++) sizes[i] = 1 + random() % 20, values[i] = double(1 + random() % 100);
    auto sums = [&](auto taken) {
      std::pair<std::size_t, double> s{0, 0};
      for (std::size_t i = 0; i < n; i++)
        if (taken(i)) s.first += sizes[i], s.second += values[i];
      return s;
    };
    const std::vector<bool> chosen = knapsack(sizes, values, capacity);
    const auto got = sums([&](std::size_t i) { return chosen[i]; });
    double best = 0;
    for (std::size_t mask = 0; mask < (std::size_t{1} << n); mask++) {
      const auto s = sums([&](std::size_t i) { return mask >> i & 1; });
      if (s.first <= capacity) best = std::max(best, s.second);
    }
    ASSERT_LE(got.first, capacity);
    ASSERT_EQ(got.second, best) << round;
  }
}

// n operations, each of which saves its input, and their backward passes.
IterationRecord chain(int n, std::mt19937& random) {
  IterationRecord it;
  for (int e = 0; e < 2 * n; e++) it.events.push_back({1e-3 * double(1 + random() % 20), 1000});
  for (int i = 0; i < n; i++) {
    SavedRecord s{.bytes = 100 * (1 + random() % 30), .saved = i, .last_used = i, .free_at = i};
    s.needed = s.gone = 2 * n - 1 - i;
    if (i > 0 && random() % 2) s.recompute = 1e-3 * double(1 + random() % 10), s.sources = {i - 1};
    it.saved.push_back(s);
  }
  return it;
}

TEST(MemoryChoice, IsWithinFivePercentOfTheBestOfAll) {
  std::mt19937 random(3);
  for (int round = 0; round < 400; round++) {
    const int n = 3 + int(random() % 5);
    const IterationRecord it = chain(n, random);
    const MemoryMeans means{.out = 1e5 * double(1 + random() % 10), .in = 1e5 * double(1 + random() % 10)};
    const std::size_t least = smallest_budget(it, means);
    const std::size_t all = simulate(it, std::vector<Fate>(std::size_t(n), Fate::keep), std::size_t(-1), means).peak;
    const std::size_t budget = least + (all - least) * (random() % 10) / 10;
    const MemoryChoice c = choose_memory(it, budget, means);
    ASSERT_TRUE(c.fits) << round << ": the smallest budget is " << least << ", all takes " << all << ", this is "
                        << budget;
    double best = 1e9;
    std::vector<Fate> fates(static_cast<std::size_t>(n));
    for (int k = 0, cases = int(std::pow(3, n)); k < cases; k++) {
      bool possible = true;
      for (int i = 0, rest = k; i < n; i++, rest /= 3) {
        const SavedRecord& s = it.saved[i];
        fates[i] = static_cast<Fate>(rest % 3);
        possible = possible && (rest % 3 == 0 || s.can_leave()) && (rest % 3 != 2 || s.recompute >= 0);
      }
      if (!possible) continue;
      const Forecast f = simulate(it, fates, budget, means);
      if (f.peak <= budget) best = std::min(best, f.seconds);
    }
    EXPECT_LE(c.forecast.seconds, 1.05 * best) << round;
  }
}

// ---- steps within a budget ------------------------------------------------------------------------------------------
struct Case {
  std::string model = "lenet5";
  int batch = 8, side = 28, channels = 1;
  double drop = 0;
};

struct Outcome {
  // The loss of each step; at the end parameters, gradients, statistics, the average
  std::vector<Bits> tensors;
  std::size_t peak = 0, least = 0;
  MemoryPlan::Measured last;
  std::string report;
  // A budget between the smallest, 0, and what the whole takes, 1.
  std::size_t budget(double share) const { return least + std::size_t(share * double(peak - least)); }
};

struct Budget {
  std::size_t bytes = 0;  // 0: no plan
  SwapMode swap = SwapMode::automatic;
  bool file = false;  // instead of a simulated device
};

Outcome train(const Case& c, Backend& backend, int steps, const Budget& budget) {
  Outcome out;
  mode().draws = 0;
  Sequential model;
  if (c.drop > 0) model.add<Dropout>(c.drop);
  model.adopt("net", std::unique_ptr<Module>(make_model(c.model, 10, c.channels, c.side)));
  if (c.drop > 0) model.add<Dropout>(c.drop);
  FlatParameters flat(model, backend, 1);
  BoundSgd sgd(flat, {.learning_rate = 0.05, .momentum = 0.9});
  Ema ema(flat, 0.9);
  model.train();
  const Shape shape{c.batch, c.side, c.side, c.channels};
  Numbers labels(std::size_t(c.batch));
  for (std::size_t i = 0; i < labels.size(); i++) labels[i] = double(i % 10);
  const Tensor classes = Tensor::of(backend, {c.batch}, labels, DType::i32);
  std::unique_ptr<MemoryPlan> plan;
  if (budget.bytes)
    plan =
        std::make_unique<MemoryPlan>(backend, budget.file ? file_mover() : simulated_mover(),
                                     MemoryPlanOptions{.budget = budget.bytes, .swap = budget.swap, .smallest = 256});
  for (int k = 0; k < steps; k++) {
    const Tensor images = Tensor::of(backend, shape, numbers("picture " + std::to_string(k), shape.numel()));
    within(plan.get(), [&] {
      flat.zero_gradients();
      const Variable loss = cross_entropy(model(Variable(images)), classes);
      flat.backward(loss);
      out.tensors.push_back(bytes_of(loss.value()));
    });
    if (plan) out.peak = std::max(out.peak, plan->measured().peak);
    sgd.step();
    ema.update(sgd);
  }
  for (const Tensor& t : {flat.values, flat.gradients, flat.buffers, ema.values})
    if (t.defined()) out.tensors.push_back(bytes_of(t));
  if (plan) {
    out.least = smallest_budget(plan->record(), plan->means());
    out.last = plan->measured();
    out.report = plan->report();
  }
  return out;
}

TEST(MemoryPlan, EveryBudgetGivesTheSameBits) {
  const int steps = from_environment("TANDEM_PLAN_STEPS", 5);
  for (const auto& kind : backends()) {
    if (kind.make()->on_device()) continue;
    const int batch = kind.name == "reference" ? 2 : 8;
    std::vector<Case> cases{{.batch = batch, .drop = 0.3},
                            {.model = "resnet20", .batch = batch / 2, .side = 8, .channels = 3, .drop = 0.1}};
    if (steps >= 50 && kind.name == "cpu")
      cases.insert(cases.end(),
                   {{"resnet110", 8, 16, 3, 0.1}, {"vgg16", 8, 32, 3, 0.1}, {"smallcnn-bn", 8, 28, 1, 0.1}});
    for (const Case& c : cases) {
      auto backend = kind.make();
      const Outcome plain = train(c, *backend, steps, {});
      for (const SwapMode swap : {SwapMode::automatic, SwapMode::swap, SwapMode::recompute}) {
        const Outcome all = train(c, *backend, 2, {.bytes = unlimited, .swap = swap});
        for (const double share : {0.0, 0.3, 0.7, 1.0}) {
          const std::size_t budget = all.budget(share);
          const Outcome within = train(c, *backend, steps, {.bytes = budget, .swap = swap});
          const std::string what =
              kind.name + " " + c.model + " " + name_of(swap) + " " + std::to_string(budget) + ": " + within.report;
          EXPECT_EQ(within.tensors, plain.tensors) << what;
          EXPECT_LE(within.peak, budget) << what;
          EXPECT_TRUE(within.last.planned) << what;
          EXPECT_TRUE(budget >= all.peak || within.last.swapped + within.last.recomputed > 0) << what;
        }
      }
    }
  }
}

TEST(MemoryPlan, TensorsGoThroughAFileToo) {
  auto backend = steady_backend(2);
  const Case c{.model = "smallcnn", .batch = 64, .side = 28, .channels = 1};
  const Outcome plain = train(c, *backend, 4, {}), all = train(c, *backend, 2, {.bytes = unlimited});
  for (const SwapMode swap : {SwapMode::automatic, SwapMode::swap}) {
    const Outcome within = train(c, *backend, 4, {.bytes = all.budget(0.25), .swap = swap, .file = true});
    EXPECT_EQ(within.tensors, plain.tensors) << within.report;
  }
}

TEST(MemoryPlan, ThePagesOfTheProcessStayWithinTheBudget) {
  const Case c{.model = "resnet20", .batch = 64, .side = 32, .channels = 3};
  const Outcome all = train(c, *steady_backend(1), 2, {.bytes = unlimited});
  auto backend = steady_backend(1);
  const std::size_t budget = all.budget(0.25), before = of_this_process("VmRSS:");
  if (!(std::ofstream("/proc/self/clear_refs") << 5).flush()) GTEST_SKIP() << "the peak cannot be reset here";
  const Outcome within = train(c, *backend, 3, {.bytes = budget, .file = true});
  EXPECT_LE(within.peak, budget);
  const std::size_t took = of_this_process("VmHWM:") - before;
  EXPECT_GT(took, budget / 2) << "the whole would take " << all.peak;
  EXPECT_LT(took, budget + 16 * mib) << "the whole would take " << all.peak << ", " << within.report;
}

TEST(MemoryPlan, ABudgetThatIsTooSmallIsRefusedWithTheSmallestThatWouldDo) {
  auto backend = steady_backend(1);
  const Case c;
  const Outcome all = train(c, *backend, 2, {.bytes = unlimited});
  EXPECT_REFUSED(train(c, *backend, 2, {.bytes = all.least - 4096}), "too small", std::to_string(all.least));
  EXPECT_REFUSED(train(c, *backend, 2, {.bytes = all.peak - 4096, .swap = SwapMode::off}), "too small", "smallest");
  train(c, *backend, 2, {.bytes = all.least});
}

TEST(MemoryPlan, AnotherSequenceGoesOnDemandAndIsPlannedAnew) {
  Summing net("lenet5", 1, 28);
  std::size_t least = 0;
  for (const std::size_t budget : {unlimited, std::size_t{0}}) {
    MemoryPlan plan(*net.backend, simulated_mover(), {.budget = budget ? budget : least, .smallest = 256});
    for (const int batch : {8, 8, 8, 6, 8, 8}) {
      net.step(&plan, Tensor::full(*net.backend, {batch, 28, 28, 1}, 0.5));
      if (budget) least = std::max(least, smallest_budget(plan.record(), plan.means()));
      EXPECT_LE(plan.measured().peak, budget ? budget : least);
    }
    EXPECT_TRUE(plan.measured().planned);
  }
}

// ---- random programs ------------------------------------------------------------------------------------------------
// Graphs of element-wise operations, convolutions, norms, pools and dropout over pictures of one shape, drawn from a
// seed.
struct Program {
  Backend& backend;
  std::mt19937 random;
  std::vector<Variable> weights;
  Variable gamma, beta;
  static constexpr int channels = 4, side = 5, batch = 3;

  explicit Program(Backend& b) : backend(b) {
    for (int i = 0; i < 3; i++) weights.emplace_back(values(printed("w%d", i), {channels, 3, 3, channels}), true);
    gamma = Variable(values("gamma", {channels}), true), beta = Variable(values("beta", {channels}), true);
  }
  Tensor values(const std::string& name, const Shape& shape) {
    return Tensor::of(backend, shape, numbers(name, shape.numel()));
  }
  Variable picked(const std::vector<Variable>& all) {
    const std::size_t reach = std::min<std::size_t>(all.size(), 1 + random() % 4);
    return all[all.size() - 1 - random() % reach];
  }
  Variable operation(const Variable& x, const std::vector<Variable>& all, std::vector<Tensor>& running) {
    switch (random() % 12) {
      case 0: return relu(x);
      case 1: return tanh(x);
      case 2: return gelu(x);
      case 3: return x + picked(all);
      case 4: return tanh(x * picked(all));
      case 5: return max_pool2d(x, {.kernel_size = 3, .stride = 1, .padding = 1});
      case 6: return average_pool2d(x, {.kernel_size = 3, .stride = 1, .padding = 1});
      case 7: return dropout(x, 0.3);
      case 8: return sigmoid(scale(x, 0.5, 0.1));
      case 9: return conv2d(x, weights[random() % weights.size()], {}, {.padding = 1, .relu = random() % 2 == 0});
      default: {
        for (int i = 0; i < 2; i++) running.push_back(Tensor::full(backend, {channels}, 1));
        Variable residual;
        if (random() % 2) residual = picked(all);
        return batch_norm(x, gamma, beta, running[running.size() - 2], running.back(), {.relu = random() % 2 == 0},
                          residual);
      }
    }
  }
  // The loss of one pass, its gradients and running statistics.
  std::vector<Bits> pass(unsigned seed, MemoryPlan* plan) {
    random.seed(seed);
    mode().draws = 0;
    std::vector<Tensor> running;
    std::vector<Bits> out;
    for (Variable& w : weights) w.zero_grad();
    gamma.zero_grad(), beta.zero_grad();
    within(plan, [&] {
      std::vector<Variable> all{Variable(values("x", {batch, side, side, channels}))};
      all.push_back(conv2d(all[0], weights[0], {}, {.padding = 1}));
      for (int k = 4 + int(random() % 12); k > 0; k--) {
        Variable y = operation(picked(all), all, running);
        all.push_back(std::move(y));
        if (all.size() > 4) all.erase(all.begin());
      }
      Variable loss = mean(square(all.back()));
      if (random() % 3 == 0) loss = loss + mean(all[all.size() / 2]);
      all.clear();
      if (loss.requires_grad()) loss.backward();
      out.push_back(bytes_of(loss.value()));
    });
    for (Variable* w : {&weights[0], &weights[1], &weights[2], &gamma, &beta})
      out.push_back(w->grad().defined() ? bytes_of(w->grad()) : Bits());
    for (const Tensor& t : running) out.push_back(bytes_of(t));
    return out;
  }
};

TEST(MemoryPlan, RandomProgramsGiveTheSameBits) {
  const int graphs = from_environment("TANDEM_PLAN_GRAPHS", 500);
  int moved = 0;
  for (int g = 0; g < graphs; g++) {
    auto backend = g % 4 ? steady_backend(1) : reference_backend(1);
    Program program(*backend);
    const unsigned seed = 1000u + unsigned(g);
    const auto plain = program.pass(seed, nullptr);
    const SwapMode swap = std::array{SwapMode::automatic, SwapMode::swap, SwapMode::recompute}[g % 3];
    const auto [least, peak] = looked_at(*backend, 2, {.budget = unlimited, .swap = swap, .smallest = 64},
                                         [&](MemoryPlan& look) { EXPECT_EQ(program.pass(seed, &look), plain) << g; });
    const std::size_t budget = least + (peak - least) * (std::size_t(g * 7) % 10) / 10;
    MemoryPlan plan(*backend, simulated_mover({.flops = 1e9, .memory = 1e9, .out = 1e8, .in = 1e8}),
                    {.budget = budget, .swap = swap, .smallest = 64});
    for (int k = 0; k < 4; k++) {
      ASSERT_EQ(program.pass(seed, &plan), plain) << "graph " << g << ", step " << k << ": " << plan.report();
      ASSERT_LE(plan.measured().peak, budget) << "graph " << g << ", step " << k << ": " << plan.report();
    }
    moved += plan.measured().swapped + plan.measured().recomputed > 0;
  }
  EXPECT_GT(moved, graphs / 3);
}

// ---- the simulated device -------------------------------------------------------------------------------------------
TEST(MemoryPlan, TheForecastIsWhatTheSimulatedDeviceTakes) {
  auto backend = reference_backend(1);
  Program program(*backend);
  for (unsigned seed = 1; seed < 12; seed++) {
    const SimulatedRates rates{.flops = 1e9, .memory = 1e9, .out = 3e8, .in = 3e8};
    const auto [least, peak] = looked_at(
        *backend, 2, {.budget = unlimited, .smallest = 64}, [&](MemoryPlan& look) { program.pass(seed, &look); },
        rates);
    MemoryPlan plan(*backend, simulated_mover(rates), {.budget = least + (peak - least) / 2, .smallest = 64});
    for (int k = 0; k < 5; k++) program.pass(seed, &plan);
    ASSERT_NE(plan.choice(), nullptr);
    EXPECT_NEAR(plan.measured().seconds, plan.choice()->forecast.seconds, 0.05 * plan.measured().seconds)
        << seed << ": " << plan.report();
  }
}

// ---- the trace ------------------------------------------------------------------------------------------------------
TEST(MemoryPlan, CopiesHaveLanesOfTheirOwnInTheTrace) {
  auto backend = steady_backend(1);
  const Case c{.model = "smallcnn", .batch = 32, .side = 28, .channels = 1};
  const Outcome all = train(c, *backend, 2, {.bytes = unlimited, .swap = SwapMode::swap});
  for (const bool file : {false, true}) {
    Trace trace;
    OnLane on(&trace, "step");
    const Outcome within = train(c, *backend, 4, {.bytes = all.least, .swap = SwapMode::swap, .file = file});
    ASSERT_GT(within.last.swapped, 0u) << within.report;
    for (const char* name : {"copies out", "copies in"}) {
      const Trace::Lane* lane = trace.find(name);
      ASSERT_NE(lane, nullptr) << name;
      double bytes = 0;
      std::int64_t last = 0;
      for (const Trace::Event& e : lane->events()) {
        bytes += e.bytes;
        EXPECT_LE(e.begin, e.end);
        if (!file) continue;
        EXPECT_GE(e.begin, last) << "one after the other";
        EXPECT_LE(last = e.end, trace.now());
      }
      EXPECT_GE(bytes, double(within.last.swapped) * 0.9) << name;
    }
  }
}

// ---- what a program may do otherwise --------------------------------------------------------------------------------
TEST(MemoryPlan, WhoLooksAtASavedTensorSeesItsValues) {
  auto backend = steady_backend(1);
  Variable x(Tensor::of(*backend, {64}, numbers("x", 64)), true);
  std::size_t least = 0;
  for (const bool tight : {false, true}) {
    MemoryPlan plan(*backend, simulated_mover(), {.budget = tight ? least : unlimited, .smallest = 64});
    for (int k = 0; k < 3; k++)
      within(&plan, [&] {
        x.zero_grad();
        Variable y = x;
        for (int i = 0; i < 6; i++) y = tanh(square(y));
        const Ref<Node> first = y.node();
        const Numbers seen = first->kept(0).values();
        EXPECT_EQ(seen, y.value().values());
        Variable loss = sum(y);
        y = {};
        EXPECT_EQ(seen, first->kept(0).values());
        loss.backward();
      });
    if (!tight) least = smallest_budget(plan.record(), plan.means());
  }
}

// y is discarded while x exists, from which it is computed again; then the branch that saved x ends, which backward
// does not reach.
TEST(MemoryPlan, ABranchThatBackwardDoesNotReachMayEndFirst) {
  auto backend = steady_backend(1);
  Variable w(Tensor::of(*backend, {64, 64}, numbers("w", 64 * 64)), true);
  auto pass = [&](bool ends_first) {
    w.zero_grad();
    Variable x = scale(w, 0.5, 0.25), unused = square(x), y;
    {
      ModeScope<&Mode::recompute, true> marked;
      y = tanh(x);
    }
    Variable loss = mean(y);
    y = x = {};
    for (int k = 0; k < 3; k++) loss = scale(loss, 1);
    if (ends_first) unused = {};
    loss.backward();
    return bytes_of(w.grad());
  };
  const Bits plain = pass(false);
  MemoryPlan plan(*backend, nullptr, {.budget = unlimited, .swap = SwapMode::recompute, .smallest = 64});
  for (const bool ends_first : {false, false, true, true, true}) {
    within(&plan, [&] { EXPECT_EQ(pass(ends_first), plain); });
    if (!plan.measured().planned) continue;
    EXPECT_EQ(plan.measured().recomputed, w.value().bytes()) << plan.report();
  }
  EXPECT_TRUE(plan.measured().planned);
}

TEST(MemoryPlan, AStepThatThrowsLeavesNothingAway) {
  Summing net("lenet5", 1, 28);
  Variable y;
  {
    MemoryPlan plan(*net.backend, simulated_mover(), {.budget = unlimited, .smallest = 256});
    const auto pass = [&] {
      y = sum((*net.model)(Variable(Tensor::full(*net.backend, {8, 28, 28, 1}, 0.5))));
      fail("here");
    };
    EXPECT_THROW(within(&plan, pass), Error);
  }
  net.flat.zero_gradients();
  net.flat.backward(y);
  EXPECT_TRUE(net.flat.gradients_complete());
}

// ---- faults ---------------------------------------------------------------------------------------------------------
// A step of element-wise operations on 64 KiB tensors, whose gradient says whether it went right.
struct Chain {
  std::unique_ptr<Backend> backend = steady_backend(1);
  Variable w{Tensor::of(*backend, {128, 128}, numbers("w", 128 * 128)), true};
  std::size_t least = 0, peak = 0;
  SwapMode swap = SwapMode::swap;
  Bits plain;
  std::function<Variable(const Variable&)> between = [](const Variable& x) { return tanh(square(x)); };

  Bits pass(MemoryPlan* plan) {
    within(plan, [&] {
      w.zero_grad();
      Variable y = w;
      for (int k = 0; k < 6; k++) y = between(sigmoid(scale(y, 0.9, 0.1)));
      Variable loss = sum(y);
      y = {};
      loss.backward();
    });
    return bytes_of(w.grad());
  }
  void look() {
    plain = pass(nullptr);
    std::tie(least, peak) = looked_at(*backend, 3, {.budget = unlimited, .swap = swap, .smallest = 1024},
                                      [&](MemoryPlan& plan) { EXPECT_EQ(pass(&plan), plain); });
    ASSERT_LT(least, peak);
  }
  // A plan within the smallest budget.
  MemoryPlan planned(std::unique_ptr<Mover> mover) {
    look();
    return MemoryPlan(*backend, std::move(mover), {.budget = least, .swap = swap, .smallest = 1024});
  }
  MemoryPlan planned(const TemporaryFolder& folder) { return planned(file_mover(folder.file(""))); }
  void stays_right(SwapMode by) {
    swap = by;
    MemoryPlan plan = planned(simulated_mover());
    for (int k = 0; k < 5; k++) {
      EXPECT_EQ(pass(&plan), plain) << k;
      EXPECT_LE(plan.measured().peak, least) << plan.report();
    }
    EXPECT_GT(plan.measured().swapped + plan.measured().recomputed, 0u);
  }
};

TEST(MemoryFaults, AScratchFolderThatVanishesChangesNothing) {
  Chain chain;
  auto folder = std::make_unique<TemporaryFolder>();
  MemoryPlan plan = chain.planned(*folder);
  EXPECT_EQ(chain.pass(&plan), chain.plain);
  folder.reset();
  for (int k = 0; k < 4; k++) EXPECT_EQ(chain.pass(&plan), chain.plain);
  EXPECT_GT(plan.measured().swapped, 0u);
}

TEST(MemoryFaults, TwoPlansInOneFolderDoNotMeet) {
  const TemporaryFolder folder;
  Chain one, two;
  MemoryPlan first = one.planned(folder), second = two.planned(folder);
  std::thread other([&] {
    Chain c;  // a plan belongs to its thread
    MemoryPlan plan = c.planned(folder);
    for (int k = 0; k < 5; k++) EXPECT_EQ(c.pass(&plan), c.plain);
  });
  for (int k = 0; k < 5; k++) {
    EXPECT_EQ(one.pass(&first), one.plain);
    EXPECT_EQ(two.pass(&second), two.plain);
  }
  other.join();
}

TEST(MemoryFaults, AKilledProcessLeavesNothingInItsFolder) {
  const TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {  // threads of the test are not here: the mover brings its own
    const auto mover = file_mover(folder.file(""));
    std::vector<float> values(mib);
    mover->wait(mover->out(values.data(), 4 * mib));
    [[maybe_unused]] const auto told = write(ready[1], "x", 1);
    while (true) pause();
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  ::close(ready[0]), ::close(ready[1]);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(std::filesystem::is_empty(folder.file("")));
}

// A backend tries all its algorithms in the first step, and each run may choose another one.
TEST(MemoryFaults, TheBudgetNamedIsEnoughWhicheverAlgorithmIsChosen) {
  std::int64_t scratch = 1;
  Chain chain;
  chain.between = [&](const Variable& x) {
    Tensor borrowed(*chain.backend, {scratch}, DType::u8);
    return tanh(square(x));
  };
  chain.pass(nullptr);
  const auto steps = [&](std::size_t budget, std::int64_t chosen) {
    MemoryPlan plan(*chain.backend, simulated_mover(), {.budget = budget, .smallest = 1024});
    for (int k = 0; k < 4; k++) {
      scratch = k == 0 ? 100000 : chosen;
      chain.pass(&plan);
      EXPECT_TRUE(k < 2 || plan.measured().peak <= budget) << plan.report();
    }
  };
  const std::size_t named = named_budget([&] { steps(1, 1); });
  for (const std::int64_t chosen : {1, 50000, 100000}) EXPECT_NO_THROW(steps(named, chosen)) << named;
}

TEST(MemoryFaults, ADiskThatFillsUpLaterIsAnErrorAndTheGradientsAreThere) {
  Chain chain;
  const TemporaryFolder folder;
  MemoryPlan plan = chain.planned(folder);
  EXPECT_EQ(chain.pass(&plan), chain.plain);
  {
    Chain larger;
    larger.w = Variable(Tensor::of(*chain.backend, {256, 256}, numbers("w", 256 * 256)), true);
    const FileLimit limit(64 << 10);
    EXPECT_REFUSED(larger.pass(&plan), "cannot be kept", "could not be written", "--scratch");
  }
  EXPECT_EQ(chain.pass(nullptr), chain.plain);  // within the same budget nothing fits now, so without
}

// An operation of a user's own that reads what it saved twice, and what another operation saved as well.
struct ReadsTwice : Node {
  static constexpr auto name = "reads_twice";
  Ref<Node> other;
  explicit ReadsTwice(Ref<Node> n) : Node(name), other(std::move(n)) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Numbers first = kept(0).values(), late = other->saved[0].tensor.values();
    EXPECT_EQ(first, kept(0).values());
    Numbers dx = dy.values();
    for (std::size_t i = 0; i < dx.size(); i++) dx[i] *= 2 * first[i] + 0 * late[i];
    slots[0].accumulate(Tensor::of(dy.backend(), dy.shape(), dx));
  }
};

TEST(MemoryFaults, AnOperationThatReadsASavedTensorTwiceAndAnothersLateIsRight) {
  for (const SwapMode swap : {SwapMode::automatic, SwapMode::swap, SwapMode::recompute}) {
    Chain chain;
    chain.between = [](const Variable& x) {
      Numbers y = x.value().values();
      for (double& v : y) v = v * v;
      const Tensor t = Tensor::of(x.backend(), x.shape(), y);
      return square(gelu(tanh(record<ReadsTwice>(t, {&x}, {x.value()}, x.node()))));
    };
    chain.stays_right(swap);
  }
}

// It has the name of an operation of the library, and computes something else.
struct OwnGelu {
  static constexpr auto name = "gelu";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x / 2;
  }
  template <class A>
  TANDEM_HD A df(A g, A) const {
    return g / 2;
  }
};

TEST(MemoryFaults, AnOperationThatHasTheNameOfAnotherIsNotTakenForIt) {
  for (const SwapMode swap : {SwapMode::automatic, SwapMode::recompute}) {
    Chain chain;
    chain.between = [](const Variable& x) { return square(elementwise(OwnGelu{}, square(x))); };
    chain.stays_right(swap);
  }
}

// ---- modules that are marked -----------------------------------------------------------------------------------------
TEST(Recompute, AMarkedModuleHasTheSameGradientsAndStatisticsInLessMemory) {
  auto backend = steady_backend(2);
  std::vector<Bits> results[2];
  std::size_t again[2] = {}, peak[2] = {};
  for (const bool marked : {false, true}) {
    Sequential model;
    auto block = std::make_unique<Sequential>();
    block->recompute = marked;
    for (int k = 0; k < 4; k++) {
      block->add<Conv2d>(k ? 8 : 3, 8, 3, Conv2dOptions{.padding = 1});
      block->add<BatchNorm2d>(8, true);
      block->add<Dropout>(0.4);
    }
    model.adopt("block", std::move(block));
    model.adopt("pool", std::make_unique<GlobalAveragePool>());
    model.adopt("fc", std::make_unique<Linear>(8, 4));
    FlatParameters flat(model, *backend, 1);
    model.train();
    mode().draws = 3;
    MemoryPlan plan(*backend, nullptr, {.budget = unlimited, .swap = SwapMode::recompute, .smallest = 1});
    for (int k = 0; k < 5; k++) {
      flat.zero_gradients();
      const Variable x(Tensor::of(*backend, {8, 32, 32, 3}, numbers(printed("x%d", k), 8 * 32 * 32 * 3)));
      within(&plan, [&] {
        const Variable loss = sum(square(model(x)));
        flat.backward(loss);
        for (const Tensor& t : {loss.value(), flat.gradients, flat.buffers}) results[marked].push_back(bytes_of(t));
      });
    }
    again[marked] = plan.measured().recomputed;
    peak[marked] = plan.measured().peak;
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(again[0], 0u);
  EXPECT_GT(again[1], 0u);
  EXPECT_LT(double(peak[1]), 0.8 * double(peak[0]));
}

struct HasPlan : Callback {
  bool has = false;
  void step_end(Run& run) override { has = run.memory_plan != nullptr; }
};
// fit() makes a plan for it, without a budget.
TEST(Recompute, FitTrainsAMarkedModuleToTheSameBits) {
  Numbers weights[2];
  for (const bool marked : {false, true}) {
    auto backend = reference_backend(1);
    Dataset data = synthetic({.side = 8, .channels = 3, .train = 96, .test = 16, .seed = 3});
    Loader train(data.train, {.batch = 16, .seed = 2, .prefetch = 0}, *backend);
    auto model = make_model("resnet8", 10, 3, 8);
    (*model).recompute = marked;
    SGD sgd({.learning_rate = 0.05});
    auto seen = std::make_shared<HasPlan>();
    fit(*model, cross_entropy_loss(), sgd, *backend, {train}, {.progress = false, .callbacks = {seen}});
    EXPECT_EQ(seen->has, marked);
    weights[marked] = parameter_values(*model);
  }
  EXPECT_EQ(weights[0], weights[1]);
}

// ---- a budget that was accepted -------------------------------------------------------------------------------------
// Copies take as long as they like.
class UnsteadyMover : public Mover {
 public:
  CopyId out(const void* from, std::size_t bytes) override { return inner_->out(from, bytes); }
  void in(CopyId id, void* to) override { inner_->in(id, to); }
  bool done(CopyId id) override { return random_() % 4 == 0 && inner_->done(id); }
  std::string wait(CopyId id) override { return inner_->wait(id); }
  void forget(CopyId id) override { inner_->forget(id); }
  double now() override { return inner_->now() + 1e-5 * double(random_() % 8); }
  void ran(double flops, double bytes) override { inner_->ran(flops * double(1 + random_() % 3), bytes); }
  MoverRates rates() const override { return {1e9 * double(1 + random_() % 20), 1e9 * double(1 + random_() % 20)}; }
  std::string description() const override { return "unsteady"; }

 private:
  std::unique_ptr<Mover> inner_ = simulated_mover();
  mutable std::minstd_rand random_{1};
};

// A loader on a thread of its own holds none to three batches, from step to step and within one; now and then somebody
// takes more.
TEST(MemoryPlan, WhatOthersTakeEndsNoRun) {
  for (const SwapMode swap : {SwapMode::automatic, SwapMode::swap, SwapMode::recompute}) {
    Summing net("resnet8", 3, 8);
    Backend* const backend = net.backend.get();
    std::vector<Batch> ready(3);
    const Tensor images = Tensor::full(*backend, {4, 8, 8, 3}, 0.5);
    auto step = [&](MemoryPlan* plan) { net.step(plan, images); };
    auto hold = [&](std::int64_t batches) {
      MemoryUse use(Use::data);
      for (std::int64_t i = 0; i < 3; i++)
        if (i >= batches)
          ready[i].images = {};
        else if (!ready[i].images.defined())
          ready[i].images = Tensor(*backend, {64, 8, 8, 3}, DType::f32);
    };
    hold(3);
    step(nullptr);
    const std::size_t least = named_budget([&] {
      MemoryPlan plan(*backend, std::make_unique<UnsteadyMover>(), {.budget = 1000, .swap = swap, .smallest = 256});
      for (int k = 0; k < 3; k++) step(&plan);
    });
    ASSERT_GT(least, 1000u);
    int passed = 0, planned = 0;
    const int steps = 1200;
    const std::string said = stderr_of([&] {
      MemoryPlan plan(*backend, std::make_unique<UnsteadyMover>(), {.budget = least, .swap = swap, .smallest = 256});
      for (int k = 0; k < 3; k++) step(&plan);
      std::jthread loader([&](std::stop_token stop) {
        std::minstd_rand random(2);
        while (!stop.stop_requested()) {
          hold(random() % 4);
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
        }
      });
      for (int k = 0; k < steps; k++) {
        Tensor more;
        if (k % 400 == 399) more = Tensor(*backend, {64, 64}, DType::f32);
        backend->memory().reset_peak();
        step(&plan);
        passed += backend->memory().statistics().peak_bytes > least, planned += plan.measured().planned;
      }
    });
    EXPECT_LE(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_GT(planned, steps * 9 / 10);
    hold(0);
    const Bits gradients = bytes_of(net.flat.gradients);
    step(nullptr);
    EXPECT_EQ(bytes_of(net.flat.gradients), gradients);
    EXPECT_LT(passed, steps / 4) << "the loader's own requests may pass the budget until the step's next";
  }
}

// What another thread asks for while a step runs does not change the smallest budget that its plan names.
TEST(MemoryPlan, RequestsOfOthersChangeNoSmallestBudget) {
  Summing net("lenet5", 1, 28);
  const Tensor images = Tensor::full(*net.backend, {32, 28, 28, 1}, 0.5);
  auto budget_named = [&](bool served) {
    return named_budget([&] {
      MemoryPlan plan(*net.backend, std::make_unique<UnsteadyMover>(), {.budget = 1000, .smallest = 256});
      std::jthread server([&](std::stop_token stop) {
        MemoryUse use(Use::data);
        while (served && !stop.stop_requested()) Tensor(*net.backend, {8}, DType::f32);
      });
      for (int k = 0; k < 3; k++) net.step(&plan, images);
    });
  };
  const std::size_t alone = budget_named(false);
  ASSERT_GT(alone, 1000u);
  for (int k = 0; k < 4; k++) EXPECT_LE(budget_named(true), alone + 64);
}

// What a refusal names is accepted, and holds, in evaluation too: models, batch sizes, batches to a step and options
// drawn at random. Algorithms are chosen by time, so that each run has other ones.
TEST(MemoryPlan, TheBudgetThatARefusalNamesIsAccepted) {
  std::minstd_rand random(7);
  for (int round = 0; round < 16; round++) {
    const int accumulate = 1 + int(random() % 4), batch = 8 << random() % 3, prefetch = int(random() % 3);
    const char* name = (const char*[]){"smallcnn", "smallcnn-bn", "resnet8", "lenet5", "mlp"}[random() % 5];
    const double ema = random() % 2 ? 0.9 : 0;
    const SwapMode swap =
        (SwapMode[]){SwapMode::automatic, SwapMode::swap, SwapMode::recompute, SwapMode::off}[random() % 4];
    const DType dtype = random() % 3 ? DType::f32 : DType::bf16;
    const double mixup = random() % 4 ? 0 : 0.2;
    auto trained = [&](std::size_t budget) {
      auto backend = cpu_backend(1);
      if (!backend->supports(dtype)) return;
      const Dataset data = synthetic({.train = batch * accumulate * 3, .test = batch * 2 + 3});
      Loader train(data.train, {.batch = batch, .dtype = dtype, .mixup = mixup, .seed = 1, .prefetch = prefetch},
                   *backend);
      Loader test(data.test, {.batch = batch, .dtype = dtype, .shuffle = false, .prefetch = 0}, *backend);
      auto model = make_model(name, 10, 1, 28);
      AdamW adam({.learning_rate = 0.001});
      fit(*model, cross_entropy_loss(), adam, *backend, {.train = train, .test = &test},
          {.epochs = 3,
           .progress = false,
           .memory_budget = budget,
           .swap = swap,
           .accumulate = accumulate,
           .ema = ema});
    };
    const std::size_t named = named_budget([&] { trained(200000); });
    if (named == 0) continue;  // no bf16 here
    EXPECT_EQ(stderr_of([&] {
                EXPECT_NO_THROW(trained(named))
                    << name << ", batch " << batch << ", accumulate " << accumulate << ", ema " << ema << ", "
                    << name_of(swap) << ", " << name_of(dtype) << ": " << named;
              }),
              "")
        << name << ", batch " << batch << ", " << name_of(swap) << ", " << name_of(dtype);
  }
}

// ---- training programs ----------------------------------------------------------------------------------------------
TEST(MemoryPlan, FitTrainsWithinABudget) {
  auto trained = [](std::size_t budget) {
    auto backend = steady_backend(2);
    const Dataset data = synthetic({.train = 200, .test = 32});
    Loader train(data.train, {.batch = 64, .seed = 1, .prefetch = 0}, *backend);
    auto model = make_model("smallcnn-bn", 10, 1, 28);
    SGD sgd({.learning_rate = 0.05});
    fit(*model, cross_entropy_loss(), sgd, *backend, {.train = train},
        {.epochs = 2, .progress = false, .memory_budget = budget});
    return parameter_values(*model);
  };
  EXPECT_REFUSED(trained(mib), "too small");
  const std::size_t smallest = named_budget([&] { trained(mib); });
  ASSERT_GT(smallest, mib);
  EXPECT_EQ(trained(smallest + mib / 2), trained(0));  // batches come and go beside the step
}

}  // namespace
}  // namespace tandem::test
