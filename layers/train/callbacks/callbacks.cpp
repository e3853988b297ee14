#include "layers/train/callbacks/callbacks.h"

namespace tandem {

std::vector<std::shared_ptr<Callback>> callbacks_of(Run& run) {
  const auto checkpoints = save_checkpoints(run);  // what it refuses comes first
  // stop_on_signal() first: it says why the run stopped, and others write it.
  std::vector<std::shared_ptr<Callback>> all{stop_on_signal(),   profile(run),     write_exports(), write_metrics(run),
                                             show_progress(run), warn_of_doubts(), stop_early(),    checkpoints};
  if (run.one_batch) all.push_back(overfit_batch());
  all.insert(all.end(), run.options.callbacks.begin(), run.options.callbacks.end());
  return all;
}

}  // namespace tandem
