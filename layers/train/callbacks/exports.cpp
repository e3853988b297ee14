#include <string_view>

#include "core/files/files.h"
#include "layers/export/onnx.h"
#include "layers/export/tensorboard.h"
#include "layers/export/torch_weights.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

// RunConfig::import_export: TensorBoard during training, PyTorch weights and ONNX at the end.
class Exports : public Callback {
 public:
  static constexpr std::int64_t every = 50;  // steps from one point of a curve to the next

  // Checks before the training that the files of end() can be written.
  explicit Exports(Run& run) {
    if (!run.first_rank) return;
    files_ = run.options.import_export;
    if (!(files_.export_torch + files_.export_onnx).empty()) picture_ = picture_of(run.data.train);
    // The graph of a model that is divided over ranks is complete only at the end.
    if (!files_.export_onnx.empty() && run.flat.slice().count == 1) onnx_of(run.model, run.backend, picture_);
    check_output("--export-torch", files_.export_torch, "\"producer\":\"tandem\"", "an earlier export");
    check_output("--export-onnx", files_.export_onnx, "\x12\x06tandem", "an earlier export");  // producer_name
    if (!files_.tensorboard.empty()) events_.emplace(files_.tensorboard);
  }

  // In the first step of every epoch, histograms of all activations and gradients.
  void phase(Run& run, const char* name, bool begins) override {
    if (!events_) return;
    const std::string_view which = name;
    if (which == "step" && begins && run.batch.index == 0) watch(run.model, run.position.step + 1);
    if (which != "backward" || begins || hooks_.empty()) return;
    unwatch();
    for (const ParameterRange& s : run.flat.parameter_ranges()) {
      if (!s.leaf->has_grad) continue;
      std::string tag = "gradients/" + s.name;
      if (s.slice.count > 1)
        tag += " (slice " + std::to_string(s.slice.index) + " of " + std::to_string(s.slice.count) + ")";
      events_->histogram(run.position.step + 1, tag, s.leaf->grad);
    }
  }
  bool looks_inside(const Run&) const override { return !hooks_.empty(); }
  bool reads_step(const Run& run) const override { return events_ && run.position.step % every == 0; }
  void step_end(Run& run) override {
    if (run.step.known && reads_step(run))
      events_->scalars(run.position.step, {{"step/loss", run.step.mean_loss},
                                           {"step/accuracy", run.step.accuracy},
                                           {"step/learning_rate", run.step.learning_rate},
                                           {"step/images_per_second", run.step.images_per_second}});
  }
  void epoch_end(Run& run) override {
    std::vector<std::pair<std::string, double>> curves;
    for (auto& [name, value] : fields_of(run.epoch))
      if (const double* number = std::get_if<double>(&value)) curves.push_back({"epoch/" + name, *number});
    if (events_) events_->scalars(run.position.step, curves);
  }
  void end(Run& run) override {
    unwatch();
    if (!files_.export_torch.empty()) export_torch(run.model, run.backend, picture_, files_.export_torch, run.about);
    if (!files_.export_onnx.empty()) export_onnx(run.model, run.backend, picture_, files_.export_onnx);
  }
  void failed(Run&, std::string&) override { unwatch(); }

 private:
  void watch(Module& model, std::int64_t step) {
    model.each([&](Module& m) {
      const Module::ForwardHook before = m.on_forward({});
      hooks_.emplace_back(&m, before);
      m.on_forward([this, step, before](Module& module, const Variable& y) {
        events_->histogram(step, "activations/" + (module.path().empty() ? "output" : module.path()), y.value());
        if (before) before(module, y);
      });
    });
  }
  void unwatch() {
    for (auto& [module, before] : hooks_) module->on_forward(std::move(before));
    hooks_.clear();
  }

  ImportExportFiles files_;
  Shape picture_;
  std::optional<EventFile> events_;
  std::vector<std::pair<Module*, Module::ForwardHook>> hooks_;  // the model's own hooks, while watch() replaces them
};

}  // namespace

std::shared_ptr<Callback> write_exports(Run& run) { return std::make_shared<Exports>(run); }

}  // namespace tandem
