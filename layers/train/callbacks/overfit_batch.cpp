#include <cstdio>

#include "core/error.h"
#include "core/text.h"
#include "layers/train/callbacks/callbacks.h"

namespace tandem {
namespace {

// RunConfig::overfit_batch: stops when the loss of the one batch is near zero, and reports at the end whether the
// model learns.
class OverfitBatch : public Callback {
 public:
  bool reads_step(const Run&) const override { return true; }
  void step_end(Run& run) override {
    if (first_ == 0) first_ = run.step.loss;
    last_ = run.step.loss;
    right_ = run.step.right / double(run.one_batch->size());
    if (last_ < OneBatch::near_zero) run.request_stop("loss below 0.01");
  }
  void end(Run& run) override {
    if (run.first_rank && !(run.report.stopped && asked_to_stop()))
      check(first_, last_, right_, run.position.step - run.began, run.position.step == std::int64_t(run.rates.total));
  }

 private:
  // Prints the result. Throws Error if the model does not learn.
  // `right`: the share of correct pictures in the last step; with label smoothing the loss alone stays high.
  static void check(double first, double last, double right, std::int64_t took, bool all) {
    const bool unknown = took == 0 || first < OneBatch::near_zero;
    const bool learns =
        !unknown && (last < OneBatch::near_zero || last < first / 10 || (right > 0.95 && last < first / 2));
    const char* verdict = unknown
                              ? "that cannot tell whether the model learns: begin with new weights, whose loss can fall"
                          : last < OneBatch::near_zero ? "the model can learn"
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

std::shared_ptr<Callback> overfit_batch() { return std::make_shared<OverfitBatch>(); }

}  // namespace tandem
