#include "examples/course/check.h"
#include "autograd/memory_plan.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

template <class T>
T sum_of(const std::vector<T>& values, const std::vector<bool>& kept) {
  T sum = 0;
  for (std::size_t i = 0; i < values.size(); i++) sum += kept[i] ? values[i] : 0;
  return sum;
}

void costs_are_right() {
  auto check = [](double free, double recompute, Cost right, const char* hint) {
    const Cost yours = cheapest(free, 2, 3, recompute);
    expect_equal("cheapest(" + digits(free) + ", 2, 3, " + digits(recompute) + "), fate and seconds",
                 {double(yours.fate), yours.seconds}, {double(right.fate), right.seconds}, 1e-12, {}, hint);
  };
  check(10, 1, {Fate::swap, 0}, "Copies that fit into the free time cost nothing.");
  check(4, 5, {Fate::swap, 1}, "A swap costs what out + in takes beyond the free time.");
  check(0, 1, {Fate::recompute, 1}, "Take the cheaper of the two.");
  check(0, 5, {Fate::swap, 5}, "Where both cost the same, swap.");
  check(0, -1, {Fate::swap, 5}, "A negative time: it cannot be computed again.");
}

// Compares with the totals in PyTorch's test of its memory budget, and with the best of all choices of eight tensors.
void knapsack_is_right() {
  const std::vector<std::size_t> sizes{11, 3, 4, 2};
  for (std::size_t room : {18, 17, 16, 15, 14, 13, 11, 7, 6, 5, 20, 1, 0}) {
    const std::size_t right = room == 20 ? 20 : room == 1 ? 0 : room;
    const std::vector<bool> kept = keep(sizes, Numbers(sizes.begin(), sizes.end()), room);
    const std::size_t sum = sum_of(sizes, kept);
    expect(sum == right,
           "room " + std::to_string(room) + ": " + std::to_string(sum) +
               " bytes of the sizes 11, 3, 4, 2 are kept, and " + std::to_string(right) + " would fit",
           sum > room
               ? "What is kept must fit."
               : "A tensor is kept once or not at all, and the largest first is not the best: try both for each.");
  }
  for (int round = 0; round < 200; round++) {
    std::vector<std::size_t> bytes;
    Numbers costs;
    for (int i = 0; i < 8; i++) {
      bytes.push_back(std::size_t(1 + (round * 7 + i * i * 5) % 13));
      costs.push_back(1 + (round * 11 + i * 17) % 23);
    }
    const std::size_t room = std::size_t(5 + round % 30);
    double best = 0;
    for (unsigned mask = 0; mask < 256; mask++) {
      std::vector<bool> kept(8);
      for (unsigned i = 0; i < 8; i++) kept[i] = mask >> i & 1;
      if (sum_of(bytes, kept) <= room) best = std::max(best, sum_of(costs, kept));
    }
    const std::vector<bool> kept = keep(bytes, costs, room);
    expect(sum_of(bytes, kept) <= room && sum_of(costs, kept) == best,
           "8 tensors, room " + std::to_string(room) + ": what is kept saves " + digits(sum_of(costs, kept)) +
               ", and the best choice " + digits(best),
           "Each tensor can be kept once. Go through the room downwards, or keep a table for each tensor.");
  }
}

// The student's knapsack for the memory plan, in KiB.
std::vector<bool> by_student(std::span<const std::size_t> bytes, std::span<const double> costs, std::size_t room) {
  std::vector<std::size_t> kibibytes;
  for (std::size_t b : bytes) kibibytes.push_back((b + 1023) / 1024);
  return keep(kibibytes, Numbers(costs.begin(), costs.end()), room / 1024);
}

// Eight steps of ResNet-20 on a simulated device, within a budget.
struct Trained {
  MemoryPlan::Measured measured;
  double predicted;
  std::size_t least;  // the smallest budget
};
Trained trained(std::size_t budget, const Knapsack& items) {
  const auto backend = cpu_backend(1);
  Model model = resnet_cifar(20, 10, 3);
  FlatParameters flat(*model, *backend, 1);
  MemoryPlan plan(*backend, simulated_mover({.flops = 2e11, .memory = 2e10, .out = 5e8, .in = 5e8}),
                  {.budget = budget, .smallest = 1024, .items = items});
  for (int step = 0; step < 8; step++) {
    const Tensor x = Tensor::of(*backend, {16, 32, 32, 3}, Numbers(16 * 3072, 0.5), DType::f32);
    MemoryPlan::Step one(plan);
    flat.zero_gradients();
    flat.backward(cross_entropy(model->forward(Variable(x)), Tensor::of(*backend, {16}, Numbers(16, 1), DType::i32)));
    one.end();
  }
  const double predicted = plan.choice() ? plan.choice()->forecast.seconds : 0;
  return {plan.measured(), predicted, smallest_budget(plan.record(), plan.means())};
}

std::string a_step_fits() {
  const Trained free = trained(std::size_t(1) << 30, knapsack);
  const std::size_t budget = free.least + (free.measured.peak - free.least) / 3;
  const auto [yours, predicted, least] = trained(budget, by_student);
  const double library = trained(budget, knapsack).measured.seconds;
  auto ms = [](double seconds) { return digits(1000 * seconds, 3) + " ms"; };
  const std::string text = "ResNet-20, " + digits(double(budget) / (1 << 20), 3) + " MiB of " +
                           digits(double(free.measured.peak) / (1 << 20), 3) + ": a step takes " + ms(yours.seconds) +
                           ", predicted " + ms(predicted) + ", by the library's choice " + ms(library) +
                           ", without a budget " + ms(free.measured.seconds);
  expect(yours.peak <= budget, text + "; the peak was " + std::to_string(yours.peak), "What is kept must fit.");
  expect(std::fabs(yours.seconds - predicted) <= 0.1 * predicted, text, "The step went otherwise than planned.");
  expect(yours.seconds <= 1.05 * library, text, "The library's knapsack chooses better.");
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 8, "what to keep, swap, recompute", [] {
    costs_are_right();
    knapsack_is_right();
    return a_step_fits();
  });
}
