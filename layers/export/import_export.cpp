#include "layers/export/import_export.h"

#include "core/files/atomic_file.h"
#include "core/files/files.h"
#include "layers/export/onnx.h"
#include "layers/export/torch_weights.h"

namespace tandem {

ImportExport::ImportExport(const ImportExportFiles& files, Module& model, FlatParameters& flat, BatchSource& train,
                           const std::map<std::string, std::string>& about, bool writes)
    : files_(files), model_(model), flat_(flat), about_(about) {
  if (!writes) files_.export_torch = files_.export_onnx = files_.tensorboard = "";
  if (!(files_.import_torch + files_.export_torch + files_.export_onnx).empty()) {
    const Shape batch = train.make(0, 0).images.shape();
    picture_ = {batch[1], batch[2], batch[3]};
  }
  if (!files_.import_torch.empty()) import_torch(model, flat.backend(), picture_, files_.import_torch);
  // The graph of a model that is cut over ranks is that of no whole model before the end.
  if (!files_.export_onnx.empty() && flat.slice().count == 1) onnx_of(model, flat.backend(), picture_);
  check_replaceable("--export-torch", files_.export_torch, "\"producer\":\"tandem\"", "an earlier export");
  check_replaceable("--export-onnx", files_.export_onnx, "\x12\x06tandem", "an earlier export");  // producer_name
  for (const std::string& path : {files_.export_torch, files_.export_onnx})
    if (!path.empty()) AtomicFile can_be_written(path);
  if (!files_.tensorboard.empty()) events_.emplace(files_.tensorboard);
}

void ImportExport::begin_step(std::int64_t step, bool first_of_epoch) {
  step_ = step;
  if (events_ && first_of_epoch) watch_.emplace(model_, *events_, step);
}

void ImportExport::after_backward() {
  if (!watch_) return;
  watch_.reset();
  write_gradients(flat_, *events_, step_);
}

void ImportExport::end_step(std::int64_t step, double loss, double accuracy, double learning_rate,
                            double images_per_second) {
  if (!events_ || step % every != 0) return;
  events_->scalars(step, {{"step/loss", loss},
                          {"step/accuracy", accuracy},
                          {"step/learning_rate", learning_rate},
                          {"step/images_per_second", images_per_second}});
}

void ImportExport::end_epoch(std::int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  if (events_) events_->scalars(step, values);
}

void ImportExport::end() {
  if (!files_.export_torch.empty()) export_torch(model_, flat_.backend(), picture_, files_.export_torch, about_);
  if (!files_.export_onnx.empty()) export_onnx(model_, flat_.backend(), picture_, files_.export_onnx);
}

}  // namespace tandem
