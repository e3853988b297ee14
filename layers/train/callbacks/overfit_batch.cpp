#include <cstdio>

#include "core/text.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

constexpr double near_zero = 0.01;  // a loss below this ends the training

// Repeats the first batch of a source; an epoch has `steps` repetitions.
class OneBatch : public BatchSource {
 public:
  static constexpr std::int64_t steps = 300;
  explicit OneBatch(BatchSource& source) : source_(source), batch_(source.make(0, 0)) {}
  void share(int rank, int world) override {
    source_.share(rank, world);
    batch_ = source_.make(0, 0);
  }
  bool grows_with_ranks() const override { return source_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return steps; }
  std::int64_t pictures_per_epoch() const override { return steps * batch_.global; }
  Batch make(std::int64_t epoch, std::int64_t index) override {
    Batch b = batch_;
    b.epoch = epoch;
    b.index = index;
    return b;
  }
  std::map<std::string, std::string> description() const override { return source_.description(); }

 private:
  BatchSource& source_;
  Batch batch_;
};

// RunConfig::overfit_batch: stops when the loss of the one batch is near zero, and reports at the end whether the
// model learns.
class OverfitBatch : public Callback {
 public:
  bool reads_step(const Run&) const override { return true; }
  void step_end(Run& run) override {
    if (first_ == 0) first_ = run.step.loss;
    last_ = run.step.loss;
    right_ = run.step.right / double(run.batch.size());
    if (last_ < near_zero) run.request_stop("loss below 0.01");
  }
  void end(Run& run) override {
    if (run.first_rank && !(run.report.stopped && asked_to_stop()))
      check(first_, last_, right_, run.position.step - run.began, run.position.step == std::int64_t(run.rates.total));
  }

 private:
  // Prints the result. Throws Error if the model does not learn.
  // `right`: the share of correct pictures in the last step; with label smoothing the loss alone stays high.
  static void check(double first, double last, double right, std::int64_t took, bool all) {
    const bool unknown = took == 0 || first < near_zero;
    const bool learns = !unknown && (last < near_zero || last < first / 10 || (right > 0.95 && last < first / 2));
    const char* verdict = unknown
                              ? "that cannot tell whether the model learns: begin with new weights, whose loss can fall"
                          : last < near_zero ? "the model can learn"
                          : learns ? "it learns, but not to zero: dropout, label smoothing and mixup do that, or --lr"
                          : !all   ? "that cannot tell whether the model learns: too few steps were made"
                                   : "the model does NOT learn: look at --lr, the labels and the model";
    const std::string text = "one batch: loss " + digits(first, 4) + " → " + digits(last, 4) + " in " +
                             counted(took, "step") + ": " + verdict;
    if (!learns) fail(text);
    std::printf("%s\n", text.c_str());
  }

  double first_ = 0, last_ = 0, right_ = 0;
};

}  // namespace

std::unique_ptr<BatchSource> first_batch_of(BatchSource& source) { return std::make_unique<OneBatch>(source); }
std::shared_ptr<Callback> overfit_batch() { return std::make_shared<OverfitBatch>(); }

}  // namespace tandem
