// Training within a budget of memory: the losses of training without one, and how fast. tests/gpu/memory_peer.py has
// PyTorch's.
#include <algorithm>
#include <cmath>
#include <optional>

#include "autograd/memory_plan.h"
#include "autograd/ops.h"
#include "core/clock.h"
#include "core/mover.h"
#include "core/text.h"
#include "layers/models/models.h"
#include "layers/optim/optimizer.h"
#include "layers/train/step_graph.h"
#include "tests/gpu/table.h"

namespace tandem::gpu {
namespace {

struct Case {
  const char* model;
  int side, channels, classes;
  std::int64_t batch;
  std::size_t budget = 0;
};

struct Way {
  std::size_t budget = 0;  // 0: none
  SwapMode swap = SwapMode::automatic;
  std::string mover = "pinned";
};

std::unique_ptr<Mover> mover_of(const Way& way, Backend& backend) {
  if (way.swap == SwapMode::recompute || way.swap == SwapMode::off) return nullptr;
  return way.mover == "unified" ? unified_mover(backend, way.budget) : pinned_mover(backend);
}

// Steps on one fixed batch, recorded where they can be.
class Training {
 public:
  Training(Backend& backend, const Case& c, DType type, const Way& way = {})
      : backend_(backend),
        model_(make_model(c.model, c.classes, c.channels, c.side)),
        flat_(*model_, backend, 1),
        last_(backend, Shape{}) {
    sgd_.bind(flat_, 1);
    sgd_.if_not_finite = IfNotFinite::wait;
    model_->train();
    std::vector<double> pixels(std::size_t(c.batch) * std::size_t(c.side * c.side * c.channels)),
        labels(std::size_t(c.batch));
    for (std::size_t i = 0; i < pixels.size(); i++) pixels[i] = double(i * 7919 % 1000) / 500 - 1;
    for (std::size_t i = 0; i < labels.size(); i++) labels[i] = double(i % std::size_t(c.classes));
    batch_.images = Tensor::of(backend, {c.batch, c.side, c.side, c.channels}, pixels, type);
    batch_.labels = batch_.samples = Tensor::of(backend, {c.batch}, labels, DType::i32);
    if (way.budget)
      plan_.emplace(backend, mover_of(way, backend), MemoryPlanOptions{.budget = way.budget, .swap = way.swap});
  }
  void step() {
    if (steps_++ == 2) backend_.memory().reset_peak();  // the first ones try engines, and show what the plan needs
    sgd_.sync_hyperparameters();
    const bool eager = plan_ && !plan_->settled();
    graph_(batch_, eager);
    eager_ += eager;
    flat_.count_writes(flat_.all());
  }
  double loss() { return last_.item(); }
  std::size_t peak() { return backend_.memory().statistics().peak_bytes; }
  const MemoryPlan* plan() const { return plan_ ? &*plan_ : nullptr; }
  int eager() const { return eager_; }

 private:
  void pass() {
    std::optional<MemoryPlan::Step> within;
    if (plan_) within.emplace(*plan_);
    flat_.zero_gradients();
    {
      Variable l = cross_entropy((*model_)(Variable(batch_.images)), batch_.labels);
      flat_.backward(l);
      last_.copy_from(l.value());
    }
    if (within) within->end();
    within.reset();
    sgd_.step();
  }

  Backend& backend_;
  Model model_;
  FlatParameters flat_;
  SGD sgd_{{.learning_rate = 0.01, .momentum = 0.9}};
  Batch batch_;
  Tensor last_;
  std::optional<MemoryPlan> plan_;
  int steps_ = 0, eager_ = 0;
  StepGraph graph_{backend_, false, {.backward = [this] { pass(); }}, ""};
};

std::string in_bytes(std::size_t bytes) { return readable_bytes(double(bytes)); }

// ---- the same losses ------------------------------------------------------------------------------------------------
void check_losses(const Machine& machine, Table& table, const Case& c, DType type, int steps) {
  auto losses = [&](const Way& way, std::size_t* least, std::size_t* peak, std::string* said, int count) {
    auto device = machine.device();
    device->deterministic(true);
    Training t(*device, c, type, way);
    std::vector<double> all;
    for (int k = 0; k < count; k++) t.step(), all.push_back(t.loss());
    if (least) *least = smallest_budget(t.plan()->record(), t.plan()->means());
    if (peak) *peak = t.peak();
    if (said) *said = t.plan()->report() + "; " + std::to_string(t.eager()) + " steps before it stood";
    return all;
  };
  const std::vector<double> plain = losses({}, nullptr, nullptr, nullptr, steps);
  for (const char* mover : {"pinned", "unified"}) {
    if (machine.small && std::string(mover) == "unified") continue;
    for (const SwapMode swap : {SwapMode::swap, SwapMode::automatic}) {
      std::size_t least = 0, most = 0;
      losses({std::size_t{1} << 50, swap, "pinned"}, &least, &most, nullptr, 4);
      for (const double share : {0.0, 0.5}) {
        const std::size_t budget = least + std::size_t(share * double(most - std::min(most, least)));
        const std::string what = std::string(c.model) + " " + name_of(type) + ", " + name_of(swap) + ", " + mover +
                                 ", " + in_bytes(budget) + " of " + in_bytes(most);
        if (!table.time_for(what)) return;
        std::string said;
        std::size_t peak = 0;
        const std::vector<double> within = losses({budget, swap, mover}, nullptr, &peak, &said, steps);
        std::size_t differ = 0;
        for (std::size_t k = 0; k < plain.size(); k++) differ += within[k] != plain[k];
        table.check(what + ": losses that differ", double(differ), 0, ("of " + std::to_string(steps)).c_str());
        table.check(what + ": peak of the budget", double(peak) / double(budget), 1);
        table.note("  " + said);
      }
    }
  }
}

// ---- how fast -------------------------------------------------------------------------------------------------------
struct Speed {
  double seconds = 0, predicted = 0;
  std::string said;
};

// A step's seconds, when the plan stands or has had `most` steps for it.
Speed speed_of(const Machine& machine, const Case& c, DType type, const Way& way, int most) {
  auto device = machine.device();
  Training t(*device, c, type, way);
  do t.step();
  while (t.plan() && !t.plan()->settled() && t.eager() < most);
  for (int k = 0; k < 4; k++) t.step();  // until it is a replay
  std::vector<double> times;
  for (int round = 0; round < 5; round++) {
    device->synchronize();
    const auto began = Clock::now();
    t.step();
    device->synchronize();
    times.push_back(seconds_since(began));
  }
  std::nth_element(times.begin(), times.begin() + 2, times.end());
  Speed s;
  s.seconds = times[2];
  if (t.plan())
    s.predicted = t.plan()->choice()->forecast.seconds,
    s.said = t.plan()->report() + (t.plan()->settled() ? "" : "; eager");
  return s;
}

// The most pictures whose step fits without a plan.
std::int64_t largest_unswapped(const Machine& machine, Case c, DType type) {
  auto peak = [&](std::int64_t n) {
    c.batch = n;
    auto device = machine.device();
    Training t(*device, c, type);
    for (int k = 0; k < 3; k++) t.step();
    return double(t.peak());
  };
  const std::int64_t unit = machine.small ? 1 : 4;
  const double budget = double(c.budget);
  std::int64_t low = 4 * unit, high = low;
  double below = peak(low), above = below;
  for (; above <= budget; above = peak(high *= 2)) low = high, below = above;
  if (low == high) return low;
  const std::int64_t more = std::int64_t(double(high - low) * (budget - below) / (above - below)) / unit * unit;
  std::int64_t n = low + more;
  while (n > low && peak(n) > budget) n -= unit;
  return n;
}

void measure_within(const Machine& machine, Table& table, Case c, DType type) {
  const std::string name = std::string(c.model) + " " + name_of(type), within = " within " + in_bytes(c.budget);
  if (!table.time_for(name + within)) return;
  const std::int64_t largest = c.batch = largest_unswapped(machine, c, type);
  auto rate = [&](const Speed& s) { return double(c.batch) / s.seconds; };
  const double plain = rate(speed_of(machine, c, type, {}, 0));
  table.measured(name + " batch " + std::to_string(largest) + within + ", nothing swapped", plain, "pictures/s");
  struct Row {
    int times;
    const char* mover;
  };
  for (const Row row : {Row{1, "pinned"}, {4, "pinned"}, {4, "unified"}, {8, "pinned"}, {12, "pinned"}}) {
    if (machine.small && row.mover == std::string("unified")) continue;
    c.batch = row.times * largest;
    const std::string what =
        name + " batch " + std::to_string(c.batch) + within + ", " + std::to_string(row.times) + "×, " + row.mover;
    if (!table.time_for(what)) continue;
    try {
      const Speed s = speed_of(machine, c, type, {.budget = c.budget, .mover = row.mover}, machine.small ? 8 : 40);
      table.measured(what, rate(s), "pictures/s", rate(s) / plain, "the unswapped");
      table.measured("  predicted", double(c.batch) / s.predicted, "pictures/s", double(c.batch) / s.predicted / plain,
                     "the unswapped");
      table.note("  " + s.said);
    } catch (
        const UsageError& e) {  // one operation alone may need more than the budget, as ResNet-152's first ones at 12×
      table.note(what + ": does not fit: " + e.what());
    } catch (const Error& e) {
      table.note(what + ": " + e.what());
      table.check(what, NAN, 0);
    }
  }
}

}  // namespace

// Goals of the issue that this serves: 85 %, 75 % and 60 % of the unswapped throughput at 4×, 8× and 12×.
void check_memory(const Machine& machine, Table& table) {
  const DType type = machine.device()->supports(DType::f16) ? DType::bf16 : DType::f32;
  if (machine.small) {
    table.note("unified memory is left out: there is no GPU");
    check_losses(machine, table, {"resnet20", 16, 3, 10, 8}, type, 8);
    measure_within(machine, table, {"resnet56", 8, 3, 10, 0, std::size_t{24} << 20}, type);
    return;
  }
  check_losses(machine, table, {"resnet20", 32, 3, 10, 64}, type, 150);
  for (const char* model : {"resnet152", "resnet1202"}) {
    const bool large = model == std::string("resnet152");
    measure_within(machine, table, {model, large ? 224 : 32, 3, large ? 1000 : 10, 0, std::size_t{4} << 30}, type);
  }
}

}  // namespace tandem::gpu
