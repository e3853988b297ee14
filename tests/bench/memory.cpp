// One way of training within a budget of memory, for tests/bench/memory.py, which alternates several and prints the
// table. The step: forward, cross-entropy, backward and SGD with momentum on one fixed batch.
//
//   build/bench_memory [OPTIONS]     (--help)
//
// Without --budget nothing is planned, only counted. Reads "for SECONDS" from stdin, runs steps for so long and answers
// with a line of JSON: seconds of a step, the forecast and what was measured, peaks of the allocator and of resident
// memory above the start. The first line, after the steps that the plan needs, says the same.
#include <cstdio>
#include <iostream>

#include "autograd/memory_plan.h"
#include "layers/train/options.h"
#include "tests/bench/pictures.h"
#include "tests/bench/timing.h"

using namespace tandem;

namespace {

struct Arguments {
  std::string model = "resnet110", scratch;
  std::int64_t batch = 128, accumulate = 1;
  int threads = 2;
  std::size_t budget = 0;
  SwapMode swap = SwapMode::automatic;

  Arguments(int count, char** words) {
    OptionRows own;
    own.text("--model", model, "one of " + model_names(), {}, check_model_name);
    own.number("--batch", batch, 1, OptionRows::large, "pictures of a step");
    own.number("--threads", threads, 0, 1000, "threads (0: all)");
    own.number("--budget", budget, 0, std::size_t{1} << 50, "bytes (0: nothing is planned, only counted)");
    own.choice("--swap", swap, {SwapMode::automatic, SwapMode::swap, SwapMode::recompute, SwapMode::off},
               "how the budget is kept: auto, swap, recompute or off");
    own.number("--accumulate", accumulate, 1, OptionRows::large, "parts of a batch");
    own.text("--scratch", scratch, "folder for what is swapped");
    parse_command_line(count, words, "Training within a budget of memory: reads \"for SECONDS\" from stdin.", own.all);
    if (batch % accumulate) refuse("--batch ", batch, " does not divide into --accumulate ", accumulate, " parts");
  }
};

struct Training : TimedModel {  // a step in parts of the batch
  const std::int64_t parts;
  MemoryPlan* plan = nullptr;

  Training(Backend& backend, const Arguments& a)
      : TimedModel(backend, a.model, a.batch / a.accumulate), parts(a.accumulate) {}

  void step() {
    flat.zero_gradients();
    for (std::int64_t k = 0; k < parts; k++) {
      std::optional<MemoryPlan::Step> planned;
      if (plan) planned.emplace(*plan);
      flat.backward(cross_entropy((*model)(images), labels), 1.0 / double(parts), k + 1 == parts);
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
  std::printf(R"({"seconds": %.4f, "predicted": %.4f, "measured": %.4f, "predicted_stall": %.4f, "stall": %.4f, )"
              R"("saved": %zu, "swapped": %zu, "recomputed": %zu, "on_demand": %d, "peak": %zu, "resident": %zu, )"
              R"("least": %zu, "out": %.3g, "in": %.3g})"
              "\n",
              seconds, plan.choice()->forecast.seconds, m.seconds, plan.choice()->forecast.stall, m.stall, saved,
              m.swapped, m.recomputed, m.on_demand, m.peak,
              of_this_process("VmHWM:") - std::min(start, of_this_process("VmHWM:")),
              smallest_budget(plan.record(), plan.means()), plan.means().out, plan.means().in);
  std::fflush(stdout);
}

void run(const Arguments& a) {
  const auto backend = cpu_backend(a.threads);
  backend->deterministic(true);
  const std::size_t start = of_this_process("VmRSS:"), budget = a.budget;
  Training training(*backend, a);
  MemoryPlan plan(*backend, budget ? file_mover(a.scratch) : nullptr,
                  {.budget = budget ? budget : std::size_t{1} << 50, .swap = a.swap});
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
}

}  // namespace

int main(int count, char** words) {
  return run_program(count, words, [&] { run(Arguments(count, words)); });
}
