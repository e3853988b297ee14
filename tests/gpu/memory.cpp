// Training within a budget of memory: the losses of training without one, and how fast. tests/gpu/memory_peer.py has
// PyTorch's.
#include "core/mover.h"
#include "core/text.h"
#include "tests/bench/timing.h"
#include "tests/gpu/table.h"
#include "tests/recorded_training.h"

namespace tandem::gpu {
namespace {

struct Way {
  std::size_t budget = 0;  // 0: none
  SwapMode swap = SwapMode::automatic;
  std::string mover = "pinned";
};

std::unique_ptr<Mover> mover_of(const Way& way, Backend& backend) {
  if (way.swap == SwapMode::recompute || way.swap == SwapMode::off) return nullptr;
  return way.mover == "unified" ? unified_mover(backend, way.budget) : pinned_mover(backend);
}

// Steps on one fixed batch.
struct Planned : test::RecordedTraining {
  int made = 0, eager = 0;  // steps
  Planned(Backend& b, const Case& c, DType type, const Way& way = {}) : RecordedTraining(b, c.make(), 0.01, type) {
    const Shape shape{c.batch, c.side, c.side, c.channels};
    std::vector<double> pixels(std::size_t(shape.numel())), labels(std::size_t(c.batch));
    for (std::size_t i = 0; i < pixels.size(); i++) pixels[i] = double(i * 7919 % 1000) / 500 - 1;
    for (std::size_t i = 0; i < labels.size(); i++) labels[i] = double(i % std::size_t(c.classes));
    batch.images = Tensor::of(b, shape, pixels, type);
    batch.labels = batch.samples = Tensor::of(b, {c.batch}, labels, DType::i32);
    if (way.budget) plan.emplace(b, mover_of(way, b), MemoryPlanOptions{.budget = way.budget, .swap = way.swap});
  }
  void step() {
    if (made++ == 2) backend.memory().reset_peak();  // the first ones try engines, and show what the plan needs
    const bool unsettled = plan && !plan->settled();
    RecordedTraining::step(unsettled);
    eager += unsettled;
  }
  std::size_t peak() { return backend.memory().statistics().peak_bytes; }
};

std::string in_bytes(std::size_t bytes) { return readable_bytes(double(bytes)); }

// ---- the same losses ------------------------------------------------------------------------------------------------
void check_losses(const Machine& machine, Table& table, const Case& c, DType type, int steps) {
  struct Outcome {
    std::vector<double> losses;
    std::size_t peak = 0, least = 0;
    std::string said;
  };
  auto run = [&](const Way& way, int count) {
    auto device = machine.device();
    device->deterministic(true);
    Planned t(*device, c, type, way);
    Outcome out;
    for (int k = 0; k < count; k++) t.step(), out.losses.push_back(t.loss.item());
    out.peak = t.peak();
    if (!t.plan) return out;
    out.least = smallest_budget(t.plan->record(), t.plan->means());
    out.said = "  " + t.plan->report() + "; " + std::to_string(t.eager) + " steps before it stood";
    return out;
  };
  const std::vector<double> plain = run({}, steps).losses;
  for (const char* mover : {"pinned", "unified"}) {
    if (machine.small && std::string(mover) == "unified") continue;
    for (const SwapMode swap : {SwapMode::swap, SwapMode::automatic}) {
      const Outcome all = run({std::size_t{1} << 50, swap, "pinned"}, 4);
      for (const double share : {0.0, 0.5}) {
        const std::size_t budget = all.least + std::size_t(share * double(all.peak - std::min(all.peak, all.least)));
        const std::string what = c.model + " " + name_of(type) + ", " + name_of(swap) + ", " + mover + ", " +
                                 in_bytes(budget) + " of " + in_bytes(all.peak);
        if (!table.time_for(what)) return;
        const Outcome within = run({budget, swap, mover}, steps);
        std::size_t differ = 0;
        for (std::size_t k = 0; k < plain.size(); k++) differ += within.losses[k] != plain[k];
        table.check(what + ": losses that differ", double(differ), 0, ("of " + std::to_string(steps)).c_str());
        table.check(what + ": peak of the budget", double(within.peak) / double(budget), 1);
        table.note(within.said);
      }
    }
  }
}

// ---- how fast -------------------------------------------------------------------------------------------------------
struct Speed {
  double seconds = 0, predicted = 0;
  std::string said = {};
};

// A step's seconds, when the plan stands or has had `most` steps for it.
Speed speed_of(const Machine& machine, const Case& c, DType type, const Way& way, int most) {
  auto device = machine.device();
  Planned t(*device, c, type, way);
  do t.step();
  while (t.plan && !t.plan->settled() && t.eager < most);
  for (int k = 0; k < 4; k++) t.step();  // until it is a replay
  std::vector<double> times;
  for (int round = 0; round < 5; round++) {
    device->synchronize();
    times.push_back(seconds_of([&] {
      t.step();
      device->synchronize();
    }));
  }
  if (!t.plan) return {median(times)};
  return {median(times), t.plan->choice()->forecast.seconds,
          "  " + t.plan->report() + (t.plan->settled() ? "" : "; eager")};
}

// The most pictures whose step fits without a plan.
std::int64_t largest_unswapped(const Machine& machine, Case c, DType type) {
  auto peak = [&](std::int64_t n) {
    c.batch = n;
    auto device = machine.device();
    Planned t(*device, c, type);
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
  const std::string within = " within " + in_bytes(c.budget);
  if (!table.time_for(c.model + " " + name_of(type) + within)) return;
  const std::int64_t largest = c.batch = largest_unswapped(machine, c, type);
  auto rate = [&](const Speed& s) { return double(c.batch) / s.seconds; };
  const double plain = rate(speed_of(machine, c, type, {}, 0));
  table.measured(c.text(type) + within + ", nothing swapped", plain, "pictures/s");
  for (const auto& [times, mover] : std::initializer_list<std::pair<int, std::string>>{
           {1, "pinned"}, {4, "pinned"}, {4, "unified"}, {8, "pinned"}, {12, "pinned"}}) {
    if (machine.small && mover == "unified") continue;
    c.batch = times * largest;
    const std::string what = c.text(type) + within + ", " + std::to_string(times) + "×, " + mover;
    if (!table.time_for(what)) continue;
    try {
      const Speed s = speed_of(machine, c, type, {.budget = c.budget, .mover = mover}, machine.small ? 8 : 40);
      table.measured(what, rate(s), "pictures/s", rate(s) / plain, "the unswapped");
      table.measured("  predicted", double(c.batch) / s.predicted, "pictures/s", double(c.batch) / s.predicted / plain,
                     "the unswapped");
      table.note(s.said);
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
  for (const Case& c :
       {Case{"resnet152", 224, 3, 1000, 0, std::size_t{4} << 30}, {"resnet1202", 32, 3, 10, 0, std::size_t{4} << 30}})
    measure_within(machine, table, c, type);
}

}  // namespace tandem::gpu
