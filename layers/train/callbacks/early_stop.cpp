#include "layers/train/run.h"

namespace tandem {
namespace {

// The merit of an epoch; larger is better. Test pictures are not used.
std::pair<double, double> merit(const EpochReport& e) {
  if (e.validation_accuracy) return {*e.validation_accuracy, -*e.validation_loss};
  if (e.validation_loss) return {-*e.validation_loss, 0};
  return {-e.train_loss, 0};
}

// Finds the best epoch, and ends the run after RunConfig::patience epochs without improvement.
class EarlyStop : public Callback {
 public:
  void epoch_end(Run& run) override {
    RunPosition& at = run.position;
    if (merit(run.epoch) > at.best) {
      at.best = merit(run.epoch);
      at.best_epoch = run.epoch.epoch;
    }
    if (!run.strategy.ranks().evaluates || run.options.patience == 0 || at.epoch >= run.options.epochs) return;
    at.ended = at.epoch - at.best_epoch >= run.options.patience;
    if (at.ended) run.stop("no better since epoch " + std::to_string(at.best_epoch));
  }
};

}  // namespace

std::shared_ptr<Callback> stop_early() { return std::make_shared<EarlyStop>(); }

}  // namespace tandem
