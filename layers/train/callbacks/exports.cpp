#include <string_view>

#include "layers/train/callbacks/callbacks.h"

namespace tandem {
namespace {

// FitOptions::import_export: TensorBoard during training, PyTorch weights and ONNX at the end.
class Exports : public Callback {
 public:
  void phase(Run& run, const char* name, bool begins) override {
    const std::string_view which = name;
    if (which == "step" && begins) run.exports.begin_step(run.at.step + 1, run.batch.index == 0);
    if (which == "backward" && !begins) run.exports.after_backward();
  }
  bool looks_inside(const Run& run) const override { return run.exports.watching(); }
  bool reads_step(const Run& run) const override { return run.exports.due(run.at.step); }
  void step_end(Run& run) override {
    if (run.step.known)
      run.exports.end_step(run.at.step, run.step.mean_loss, run.step.accuracy, run.step.learning_rate,
                           run.step.images_per_second);
  }
  void epoch_end(Run& run) override {
    std::vector<std::pair<std::string, double>> curves;
    for (auto& [name, value] : fields_of(run.epoch))
      if (const double* number = std::get_if<double>(&value)) curves.push_back({"epoch/" + name, *number});
    run.exports.end_epoch(run.at.step, curves);
  }
  void end(Run& run) override { run.exports.end(); }
};

}  // namespace

std::shared_ptr<Callback> write_exports() { return std::make_shared<Exports>(); }

}  // namespace tandem
