#include "layers/train/metrics.h"
#include "core/text.h"

#include "core/backend.h"
#include "core/clock.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

// RunConfig::metrics. Writes a JSON line when the run starts, every log_every steps and after every epoch, and at the
// end one for every rank and one for the run.
class Metrics : public Callback {
 public:
  explicit Metrics(const Run& run)
      : file_(run.first_rank && run.nothing_left.empty() ? run.options.metrics : "", run.files.resumes(),
              run.position.run) {}

  void begin(Run& run) override {
    MetricFields start{{"event", run.files.resumes() ? "resume" : "start"},
                       {"run", run.position.run},
                       {"parameters", run.flat.parameters()},
                       {"epochs", run.options.epochs},
                       {"batches_per_epoch", run.batches_per_epoch()},
                       {"backend", run.backend.description()},
                       {"strategy", run.strategy.name()},
                       {"ranks", run.strategy.size()},
                       {"seed", std::int64_t(run.options.seed)},
                       {"step", run.position.step}};
    for (auto& field : recipe_fields(run.settings, run.optimizer.name(), run.global_batch)) start.push_back(field);
    if (const Parts parts = run.data.train.parts(run.strategy.size()); !parts.pictures.empty())
      start.push_back({"pictures_of_workers", parts.pictures});
    file_.write(start);
    logged_ = run.position.step;
  }
  bool reads_step(const Run& run) const override { return logs(run); }
  void step_end(Run& run) override {
    if (logs(run))
      file_.write({{"event", "step"},
                   {"step", run.position.step},
                   {"loss", run.step.loss},
                   {"learning_rate", run.step.learning_rate}});
    logged_ = run.position.step;
  }
  void epoch_end(Run& run) override { file_.write(fields_of(run.epoch)); }
  void warning(Run& run, const std::string& text) override {
    file_.write({{"event", "warning"}, {"epoch", run.epoch.epoch}, {"text", text}});
  }
  void failed(Run& run, std::string&) override {
    if (run.not_finite.empty()) return;
    file_.write({{"event", "not_finite"}, {"step", run.position.step + 1}, {"reason", run.not_finite}});
    file_.write({{"event", "end"}, {"steps", run.position.step}, {"stopped", 1}, {"reason", "not finite"}});
  }
  void end(Run& run) override {
    if (run.strategy.size() > 1)
      for (std::size_t r = 0; r < run.measures.size(); r++) {
        MetricFields rank{{"event", "rank"}, {"rank", std::int64_t(r)}};
        for (const auto& [name, value] : run.measures[r]) rank.push_back({name, value});
        file_.write(rank);
      }
    MetricFields end{{"event", "end"},
                     {"steps", run.report.steps},
                     {"epochs", std::int64_t(run.position.epoch)},
                     {"stopped", run.report.stopped},
                     {"reason", run.reason},
                     {"seconds", seconds_since(began_)}};
    for (const auto& [name, value] : run.measures[std::size_t(run.strategy.rank())]) end.push_back({name, value});
    if (!run.report.epochs.empty() && run.report.epochs.back().test_accuracy)
      end.push_back({"test_accuracy", *run.report.epochs.back().test_accuracy});
    file_.write(end);
  }

 private:
  bool logs(const Run& run) const {
    const std::int64_t every = run.options.log_every;
    return every > 0 && run.position.step / every > logged_ / every;
  }
  MetricsFile file_;
  std::int64_t logged_ = 0;
  const Clock::time_point began_ = Clock::now();
};

}  // namespace

MetricFields fields_of(const EpochReport& e) {
  MetricFields f{{"event", "epoch"}, {"epoch", e.epoch}, {"train_loss", e.train_loss}};
  if (e.several()) f.push_back({"first_epoch", e.first});
  for (const auto& [name, value] : {std::pair{"train_accuracy", e.train_accuracy},
                                    {"val_loss", e.validation_loss},
                                    {"val_accuracy", e.validation_accuracy},
                                    {"test_loss", e.test_loss},
                                    {"test_accuracy", e.test_accuracy}})
    if (value) f.push_back({name, *value});
  if (!e.class_accuracy.empty()) f.push_back({"class_accuracy", e.class_accuracy});
  f.insert(f.end(),
           {{"learning_rate", e.learning_rate}, {"images_per_second", e.images_per_second}, {"seconds", e.seconds}});
  return f;
}

std::string line_of(const EpochReport& e, int epochs) {
  const std::string from = e.several() ? std::to_string(e.first) + "-" : "";
  std::string text = printed("epoch %s%d/%d  loss %.4f", from.c_str(), e.epoch, epochs, e.train_loss);
  auto reached = [&](const char* name, const std::optional<double>& accuracy, const std::optional<double>& loss) {
    if (accuracy)
      text += printed("  %s %.2f %%", name, 100 * *accuracy);
    else if (loss)
      text += printed("  %s %.4f", name, *loss);
  };
  reached("validation", e.validation_accuracy, e.validation_loss);
  reached("test", e.test_accuracy, e.test_loss);
  return text + printed("  %.0f images/s  %.1f s", e.images_per_second, e.seconds);
}

std::shared_ptr<Callback> write_metrics(Run& run) { return std::make_shared<Metrics>(run); }

}  // namespace tandem
