#include <cstdio>

#include "layers/train/run.h"

namespace tandem {
namespace {

// RunConfig::checkpoint. Writes last.safetensors after every epoch and when the run is stopped or another rank is lost,
// and best.safetensors after an epoch that is better than all earlier ones.
class Checkpoints : public Callback {
 public:
  explicit Checkpoints(Run& run) {
    if (run.nothing_left.empty()) run.files.begin();
  }
  void epoch_end(Run& run) override {
    save(run, run.files.last());
    if (first_says(run, run.position.best_epoch == run.epoch.epoch)) save(run, run.files.best());
  }
  void stopped(Run& run) override {
    if (run.nothing_left.empty() && first_says(run, saved_at_ != run.position.step)) save(run, run.files.last());
  }
  void failed(Run& run, std::string& message) override {
    if (run.diverged) message += run.files.kept(saved_at_);
    if (run.position.step == run.began || !run.strategy.saves_after_failure()) return;
    if (run.flat.slice().count > 1) {
      std::fprintf(stderr,
                   "%s: a layer is cut over ranks, which must write it together, so nothing is written now; --resume "
                   "goes on from the last checkpoint\n",
                   run.strategy.where().c_str());
      return;
    }
    const RunPosition at = run.consistent_position();
    if (!run.files.take_over(at)) return;
    save_checkpoint(run.files.last(), run.training(), at, run.settings);
    std::fprintf(stderr, "%s has written %s: the run after step %ld; --resume goes on with it\n",
                 run.strategy.where().c_str(), run.files.last().c_str(), at.step);
  }

 private:
  // Ranks that write slices together use the decision of their first rank, because an asynchronous strategy may give
  // the result to that rank only.
  static bool first_says(Run& run, bool mine) {
    if (run.flat.slice().count == 1 || !run.strategy.ranks().evaluates) return mine;
    return !run.strategy.gather(mine ? "yes" : "", Strategy::Among::evaluating)[0].empty();
  }
  void save(Run& run, const std::string& file) {
    const bool gives_slices = run.files.wanted() && run.flat.slice().count > 1 && run.strategy.ranks().evaluates;
    if (!run.files.writes() && !gives_slices) return;
    if (run.files.writes()) run.strategy.synchronize(Strategy::Shared::optimizer, run.flat, run.optimizer);
    save_checkpoint(run.files.writes() ? file : "", run.training(), run.position, run.settings);
    saved_at_ = run.position.step;
  }
  std::int64_t saved_at_ = -1;  // the step of last.safetensors; −1: this run has not written it
};

}  // namespace

std::shared_ptr<Callback> save_checkpoints(Run& run) { return std::make_shared<Checkpoints>(run); }

}  // namespace tandem
