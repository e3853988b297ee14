#include <cmath>

#include "layers/train/callbacks/callbacks.h"
#include "layers/train/recipe.h"

namespace tandem {
namespace {

// Whether this is the accuracy of guessing among so many classes: less than three standard errors above 1/classes. With
// few pictures this cannot be decided: when these are more than a third of it.
bool guesses(const MetricSums& trained, std::int64_t classes) {
  if (classes < 2 || trained.samples < 1) return false;
  const double p = 1 / double(classes), error = std::sqrt(p * (1 - p) / trained.samples);
  return 3 * error < p / 3 && trained.correct / trained.samples < p + 3 * error;
}

class Warnings : public Callback {
 public:
  void begin(Run& run) override {
    for (const std::string& doubt :
         doubts(run.cutting, run.model, run.options, run.rates.total, run.batches_per_epoch()))
      run.warn(doubt);
  }
  void epoch_end(Run& run) override {
    if (!run.one_batch && run.task.has_accuracy && guesses(run.trained, run.classes))
      run.warn("the training accuracy of epoch " + std::to_string(run.epoch.epoch) + " is that of guessing among " +
               std::to_string(run.classes) + " classes: try a smaller --lr, and --overfit-batch");
  }
};

}  // namespace

std::shared_ptr<Callback> warn_of_doubts() { return std::make_shared<Warnings>(); }

}  // namespace tandem
