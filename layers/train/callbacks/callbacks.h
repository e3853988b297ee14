// What fit() does besides training, in the order in which it is called.
#pragma once
#include <memory>
#include <vector>

#include "layers/train/run.h"

namespace tandem {

std::shared_ptr<Callback> stop_on_signal();   // SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU
std::shared_ptr<Callback> profile(Run& run);  // FitOptions::profiler
std::shared_ptr<Callback> write_metrics(Run& run);
std::shared_ptr<Callback> write_exports();  // FitOptions::import_export
std::shared_ptr<Callback> show_progress(Run& run);
std::shared_ptr<Callback> warn_of_doubts();
std::shared_ptr<Callback> stop_early();  // FitOptions::patience; finds the best epoch in any case
std::shared_ptr<Callback> save_checkpoints(Run& run);
std::shared_ptr<Callback> overfit_batch();

bool asked_to_stop();  // by a signal, while fit() runs; any thread

// What the parts of a run are called: by fit() when it begins. May throw UsageError; nothing is written yet.
std::vector<std::shared_ptr<Callback>> callbacks_of(Run& run);

}  // namespace tandem
