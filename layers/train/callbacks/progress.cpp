#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "core/clock.h"
#include "core/text.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

// "batch 128 = 4 × 32, as on one machine".
std::string text_of(const Run& run) {
  const Ranks& ranks = run.strategy.ranks();
  const RunConfig& options = run.options;
  const std::int64_t pictures = run.global_batch, smallest = run.smallest_share();
  const double rate = run.rates.given;
  const std::string lr = ", lr " + digits(rate);
  if (ranks.batch_shares == 1) return "batch " + std::to_string(pictures * options.accumulate) + " a push" + lr;
  std::string shares = printed("batch %ld = %d × %ld", pictures, ranks.batch_shares, smallest);
  if (pictures % ranks.batch_shares) shares += " or " + std::to_string(smallest + 1);
  const bool parts = !options.sync_batch_norm && !run.model.buffers().empty();
  if (run.batch_growth == 1)
    return shares + (!ranks.synchronous ? lr : parts ? ", steps as on one machine" : ", as on one machine");
  return shares + lr + " → " + digits(run.rates.base) + " (" + name_of(options.lr_scale) + ")";
}

// On a terminal, one line that is updated ten times a second; otherwise one line per epoch. Rank 0 prints it on stderr.
class Progress : public Callback {
 public:
  explicit Progress(const Run& run) : on_(run.options.progress && run.first_rank), terminal_(on_ && isatty(2)) {}

  void begin(Run& run) override {
    if (!on_) return;
    if (run.files.resumes())
      resumed(run);
    else if (!run.options.resume.empty())
      std::fprintf(stderr, "%s holds no checkpoint: the run begins\n", run.options.checkpoint.c_str());
    if (run.strategy.size() == 1) return;
    std::fprintf(stderr, "%d ranks, %s: %s\n", run.strategy.size(), run.strategy.name().c_str(), text_of(run).c_str());
  }
  bool reads_step(const Run&) const override { return terminal_ && seconds_since(last_) >= 0.1; }
  void step_end(Run& run) override {
    if (!terminal_ || !run.step.known || seconds_since(last_) < 0.1) return;
    last_ = Clock::now();
    const double share = double(run.batch.index + 1) / double(std::max<std::int64_t>(1, run.batches_per_epoch()));
    std::string bar;
    for (int i = 0; i < 20; i++) bar += i < int(20 * share) ? "█" : "·";
    const std::string accuracy = run.task.has_accuracy ? printed("accuracy %.1f %%  ", 100 * run.step.accuracy) : "";
    std::fprintf(stderr, "\repoch %d/%d %s %3d%%  loss %.4f  %s%.0f images/s  lr %.4g  %.0f s left \033[K",
                 run.epoch.epoch, run.options.epochs, bar.c_str(), int(100 * share), run.step.mean_loss,
                 accuracy.c_str(), run.step.images_per_second, run.step.learning_rate,
                 (1 - share) * run.step.seconds / share);
  }
  void epoch_end(Run& run) override {
    clear();
    if (on_) std::fprintf(stderr, "%s\n", line_of(run.epoch, run.options.epochs).c_str());
    report_plan(run);
  }
  void warning(Run&, const std::string& text) override {
    clear();
    if (on_) std::fprintf(stderr, "warning: %s\n", text.c_str());
  }
  void stopped(Run& run) override {
    clear();
    report_plan(run);
    if (on_ && run.nothing_left.empty())
      std::fprintf(stderr, "stopped after step %ld of %ld (%s)\n", run.position.step, std::int64_t(run.rates.total),
                   run.reason.c_str());
  }
  void failed(Run&, std::string&) override { clear(); }

 private:
  void report_plan(const Run& run) {  // once
    if (on_ && run.memory_plan && !std::exchange(printed_plan_, true))
      std::fprintf(stderr, "%s\n", run.memory_plan->report().c_str());
  }
  void resumed(const Run& run) {
    const RunPosition& at = run.position;
    std::fprintf(stderr, "%s: %ld of %d epochs are done", run.files.from().c_str(), at.epoch, run.options.epochs);
    if (at.batch > 0) std::fprintf(stderr, " and %ld of %ld batches", at.batch, at.batches);
    std::fprintf(stderr, ", %s%s%s\n", counted(at.step, "step").c_str(),
                 run.nothing_left.empty() ? "" : ": nothing is left to do: ", run.nothing_left.c_str());
    if (run.report.differences.empty() || !run.nothing_left.empty()) return;
    std::fprintf(stderr, "warning: it goes on, but not bit for bit as it would have:\n");
    for (const std::string& d : run.report.differences) std::fprintf(stderr, "  %s\n", d.c_str());
  }
  void clear() const {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }

  bool on_, terminal_, printed_plan_ = false;
  Clock::time_point last_{};
};

}  // namespace

std::shared_ptr<Callback> show_progress(Run& run) { return std::make_shared<Progress>(run); }

}  // namespace tandem
