#include "layers/train/fit.h"

#include <cmath>
#include <cstdio>

#include "core/files/files.h"
#include "layers/export/torch_weights.h"
#include "layers/train/run.h"
#include "layers/train/step_graph.h"

namespace tandem {
namespace {

// RunConfig::evaluate. Every rank evaluates all test pictures, without exchange.
FitReport evaluate_only(Module& model, const Task& task, Backend& backend, const FitData& data,
                        const RunConfig& options) {
  if (!data.test) refuse("--evaluate: there are no test pictures");
  FlatParameters flat(model, backend, options.seed);
  auto warn = [](const std::string& text) { std::fprintf(stderr, "warning: %s\n", text.c_str()); };
  if (const std::string& torch = options.import_export.import_torch; options.resume.empty()) {
    for_option("--import-torch", [&] { import_torch(model, backend, picture_of(*data.test), torch); });
  } else {
    const std::string file = CheckpointFiles("", options.resume, false).from();
    for_option("--resume", [&] { load_weights(file, flat); });
    Settings seen;  // the settings that determine the pictures
    for (const auto& [name, value] : data.test->description())
      if (name == "mean" || name == "std" || name == "classes") seen.push_back({name, value});
    for (const std::string& difference : differences_from(file, seen)) warn(file + ": " + difference);
  }
  const Evaluation e = evaluate(model, *data.test, nullptr, task);
  if (!std::isfinite(e.loss)) warn("the test loss is not finite: the weights, or the pictures, hold NaN or infinity");
  FitReport report;
  EpochReport& reached = report.epochs.emplace_back();
  reached.test_loss = e.loss;
  if (task.has_accuracy) reached.test_accuracy = e.accuracy;
  return report;
}

// The reason why the steps of this run cannot be recorded; empty: they can.
std::string why_eager(const Run& run) {
  if (run.options.accumulate > 1) return "--accumulate makes it of several batches";
  if (run.flat.slice().count > 1) return "the ranks exchange in it what a layer that is cut over them needs";
  return run.strategy.size() > 1 && run.options.sync_batch_norm ? "batch norm exchanges its sums in it" : "";
}

// The training loop.
FitReport train(Run& run) {
  run.begin();
  StepGraph step(run.backend, run.strategy.size() > 1,
                 {.backward = [&] { run.forward_backward(); },
                  .exchange = [&] { run.exchange(); },
                  .update = [&] { run.update(); },
                  .finish = [&] { run.finish(); }},
                 why_eager(run));
  while (run.has_epochs()) {
    run.begin_epoch();
    while (run.next_batch()) {
      run.begin_step();
      step(run.batch, run.eager);
      run.end_step();
      if (run.stops()) break;
    }
    run.end_training();
    if (run.report.stopped) break;
    run.evaluate();
    if (run.report.stopped) break;
    run.end_epoch();
  }
  return run.end();
}

}  // namespace

FitReport fit(Module& model, const Task& task, Optimizer& optimizer, Backend& backend, const FitData& data,
              const RunConfig& options, Strategy* strategy) {
  if (options.evaluate) return evaluate_only(model, task, backend, data, options);
  const std::unique_ptr<Strategy> own = strategy ? nullptr : strategy_from_environment();
  Run run(model, task, optimizer, backend, data, options, strategy ? *strategy : *own);
  try {
    return train(run);
  } catch (const NotFinite& e) {
    throw NotFinite(run.fail(e.what()));
  } catch (const std::exception& e) {
    run.fail(e.what());
    throw;
  }
}

}  // namespace tandem
