// The callbacks of fit(), which do its work besides training, in the order in which they are called. Run::begin()
// makes them; those with a Run may throw UsageError.
#pragma once
#include <memory>

#include "layers/train/run.h"

namespace tandem {

std::shared_ptr<Callback> stop_on_signal();   // SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU
std::shared_ptr<Callback> profile(Run& run);  // RunConfig::profiler
std::shared_ptr<Callback> write_metrics(Run& run);
std::shared_ptr<Callback> write_exports(Run& run);  // RunConfig::import_export
std::shared_ptr<Callback> show_progress(Run& run);
std::shared_ptr<Callback> warn_of_doubts();
std::shared_ptr<Callback> stop_early();  // RunConfig::patience; finds the best epoch in any case
std::shared_ptr<Callback> save_checkpoints(Run& run);
std::shared_ptr<Callback> overfit_batch();
std::unique_ptr<BatchSource> first_batch_of(BatchSource& source);  // repeats it, 300 times an epoch

bool asked_to_stop();  // whether a signal asked fit() to stop; may be called from any thread

}  // namespace tandem
