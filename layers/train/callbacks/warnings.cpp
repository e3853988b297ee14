#include <cmath>

#include "core/text.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

// The metric of an epoch that is no better than that of guessing: a loss above ln(classes), or an accuracy less than
// three standard errors above 1/classes. Null: none, or so few pictures that three standard errors are more than a
// third of 1/classes.
const char* guessed(const MetricSums& trained, std::int64_t classes) {
  if (classes < 2 || trained.samples < 1) return nullptr;
  const double p = 1 / double(classes), error = std::sqrt(p * (1 - p) / trained.samples);
  if (3 * error >= p / 3) return nullptr;
  if (trained.correct / trained.samples < p + 3 * error) return "accuracy";
  return trained.loss > std::log(double(classes)) * trained.samples ? "loss" : nullptr;
}

// With a batch that grows with the ranks, runs with fewer steps were measured to be less accurate than one machine
// (dist/REFERENCE.md).
constexpr double few_steps = 600;

// Settings that probably give a worse result.
std::vector<std::string> doubts(const Run& run) {
  const RunConfig& options = run.options;
  const double steps = run.rates.total;
  std::vector<std::string> all;
  const std::string share = std::to_string(run.smallest_share());
  if (run.strategy.ranks().batch_shares > 1 && run.smallest_share() < 16 && !options.sync_batch_norm &&
      !run.model.buffers().empty())
    all.push_back("batch norm has only " + share +
                  " pictures of a batch on each rank: --sync-bn takes all of them (under all-reduce); or a larger "
                  "--batch, or fewer ranks");
  if (run.batch_growth > 1 && steps < few_steps)
    all.push_back(printed("%s %s few for a batch of %ld: more --epochs, or --batch %s for the steps of one machine",
                          counted(std::int64_t(steps), "step").c_str(), steps == 1 ? "is" : "are", run.global_batch,
                          share.c_str()));
  if (options.accumulate > run.batches_per_epoch())
    all.push_back(printed("--accumulate %d: an epoch has %ld of these batches, so each epoch makes one smaller step",
                          options.accumulate, run.batches_per_epoch()));
  const bool alone = run.strategy.size() == 1;
  if (alone && options.sync_batch_norm) all.push_back("--sync-bn has no effect on one rank: its batches are whole");
  if (alone && options.partition != "shared")
    all.push_back("--partition divides nothing on one rank: it trains on all pictures");
  const Schedule& schedule = run.rates.schedule;
  const double first_change = schedule.milestones.empty() ? schedule.every : schedule.milestones.front();
  if (schedule.kind == Schedule::Kind::step && schedule.warmup + first_change >= options.epochs && options.epochs > 0)
    all.push_back("--schedule: its first change, after epoch " + digits(schedule.warmup + first_change) +
                  ", is not within the run: --epochs " + std::to_string(options.epochs));
  return all;
}

class Warnings : public Callback {
 public:
  void begin(Run& run) override {
    for (const std::string& doubt : doubts(run)) run.warn(doubt);
  }
  void epoch_end(Run& run) override {
    if (run.one_batch || !run.task.has_accuracy) return;
    if (const char* metric = guessed(run.trained, run.classes))
      run.warn(printed("the training %s of epoch %d is no better than that of guessing among %ld classes", metric,
                       run.epoch.epoch, run.classes) +
               ": try a smaller --lr, and --overfit-batch");
  }
};

}  // namespace

std::shared_ptr<Callback> warn_of_doubts() { return std::make_shared<Warnings>(); }

}  // namespace tandem
