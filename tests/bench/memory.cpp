// One way of training within a budget of memory, for tests/bench/memory.py, which alternates several and prints the
// table. The step: forward, cross-entropy, backward and SGD with momentum on one fixed batch.
//
//   build/bench_memory [--model resnet110] [--batch 128] [--threads 2] [--budget BYTES] [--swap
//   auto|swap|recompute|off] [--accumulate K]
//                      [--scratch FOLDER]
//
// Without --budget nothing is planned, only counted. Reads "for SECONDS" from stdin, runs steps for so long and answers
// with a line of JSON: seconds of a step, the forecast and what was measured, peaks of the allocator and of resident
// memory above the start. The first line, after the steps that the plan needs, says the same.
#include <cstdio>
#include <iostream>

#include "autograd/memory_plan.h"
#include "autograd/ops.h"
#include "core/backend.h"
#include "layers/models/models.h"
#include "layers/optim/optimizer.h"
#include "tests/bench/timing.h"

using namespace tandem;

namespace {

struct Arguments {
  std::map<std::string, std::string> given;
  Arguments(int n, char** words) {
    for (int i = 1; i + 1 < n; i += 2) given[words[i]] = words[i + 1];
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = given.find(name);
    return found == given.end() ? otherwise : found->second;
  }
  std::size_t whole(const std::string& name, std::size_t otherwise) const {
    return std::stoull(text(name, std::to_string(otherwise)));
  }
};

SwapMode swap_of(const std::string& word) {
  for (SwapMode s : {SwapMode::off, SwapMode::automatic, SwapMode::swap, SwapMode::recompute})
    if (word == name_of(s)) return s;
  refuse("--swap ", word, ": auto, swap, recompute or off");
}

struct Training {
  Backend& backend;
  const std::int64_t batch, parts;
  Model model;
  FlatParameters flat;
  SGD sgd{{.learning_rate = 0.01, .momentum = 0.9}};
  Tensor images, labels;
  MemoryPlan* plan = nullptr;

  Training(Backend& b, const std::string& name, std::int64_t n, std::int64_t k)
      : backend(b), batch(n), parts(k), model(make_model(name, 10, 3, 32)), flat(*model, b, 1) {
    require(batch % parts == 0, "--batch ", batch, " does not divide into ", parts, " parts");
    sgd.bind(flat);
    model->train();
    std::vector<double> pixels(std::size_t(batch / parts) * 32 * 32 * 3), classes(std::size_t(batch / parts));
    for (std::size_t i = 0; i < pixels.size(); i++) pixels[i] = double(i * 7919 % 1000) / 500 - 1;
    for (std::size_t i = 0; i < classes.size(); i++) classes[i] = double(i % 10);
    images = Tensor::of(backend, {batch / parts, 32, 32, 3}, pixels);
    labels = Tensor::of(backend, {batch / parts}, classes, DType::i32);
  }

  void step() {
    flat.zero_gradients();
    for (std::int64_t k = 0; k < parts; k++) {
      std::optional<MemoryPlan::Step> planned;
      if (plan) planned.emplace(*plan);
      flat.backward(cross_entropy((*model)(Variable(images)), labels), 1.0 / double(parts), k + 1 == parts);
      if (planned) planned->end();
    }
    sgd.step();
  }
};

void answer(const Training& t, double seconds, std::size_t start) {
  const MemoryPlan& plan = *t.plan;
  const MemoryPlan::Measured& m = plan.measured();
  std::size_t saved = 0;
  for (const SavedRecord& s : plan.record().saved) saved += s.bytes;
  const MoverRates rates{plan.means().out, plan.means().in};
  std::printf(
      "{\"seconds\": %.4f, \"predicted\": %.4f, \"measured\": %.4f, \"predicted_stall\": %.4f, \"stall\": %.4f, "
      "\"saved\": %zu, "
      "\"swapped\": %zu, \"recomputed\": %zu, \"on_demand\": %d, \"peak\": %zu, \"resident\": %zu, \"least\": %zu, "
      "\"out\": %.3g, "
      "\"in\": %.3g}\n",
      seconds, plan.choice()->forecast.seconds, m.seconds, plan.choice()->forecast.stall, m.stall, saved, m.swapped,
      m.recomputed, m.on_demand, m.peak, of_this_process("VmHWM:") - std::min(start, of_this_process("VmHWM:")),
      smallest_budget(plan.record(), plan.means()), rates.out, rates.in);
  std::fflush(stdout);
}

int run(const Arguments& a) {
  const auto backend = cpu_backend(int(a.whole("--threads", 2)));
  backend->deterministic(true);
  const std::size_t start = of_this_process("VmRSS:"), budget = a.whole("--budget", 0);
  Training training(*backend, a.text("--model", "resnet110"), std::int64_t(a.whole("--batch", 128)),
                    std::int64_t(a.whole("--accumulate", 1)));
  MemoryPlan plan(*backend, budget ? file_mover(a.text("--scratch", "")) : nullptr,
                  {.budget = budget ? budget : std::size_t{1} << 50, .swap = swap_of(a.text("--swap", "auto"))});
  training.plan = &plan;
  for (int k = 0; k < 10; k++) training.step();
  answer(training, 0, start);
  for (std::string word; std::cin >> word && word == "for";) {
    double wanted = 1;
    std::cin >> wanted;
    const auto began = Clock::now();
    int steps = 0;
    while (seconds_since(began) < wanted || steps == 0) training.step(), steps++;
    answer(training, seconds_since(began) / steps, start);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(Arguments(count, words));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_memory: %s\n", e.what());
    return 2;
  }
}
