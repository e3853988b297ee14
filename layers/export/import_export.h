// Import and export: PyTorch weights in both directions, ONNX at the end, TensorBoard events during training.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "core/batch.h"
#include "layers/export/tensorboard.h"

namespace tandem {

struct ImportExportFiles {  // empty: none
  std::string import_torch = {}, export_torch = {}, export_onnx = {};
  std::string tensorboard = {};  // a folder
};

// The interface that fit() uses. A user's own loop may call the functions of torch_weights.h, onnx.h and tensorboard.h
// directly.
class ImportExport {
 public:
  static constexpr std::int64_t every = 50;  // steps from one point of a curve to the next

  // Imports the weights, and checks before training that the files of end() can be written. about: stored with exported
  // weights. writes: true on the only rank that writes files.
  ImportExport(const ImportExportFiles& files, Module& model, FlatParameters& flat, BatchSource& train,
               const std::map<std::string, std::string>& about, bool writes);

  void begin_step(std::int64_t step, bool first_of_epoch);  // histograms of the first batch of every epoch
  bool due(std::int64_t step) const { return events_ && step % every == 0; }  // end_step will write
  bool watching() const { return watch_.has_value(); }                        // this step's activations are written
  void after_backward();
  // step counts from 1. Losses and accuracies are means since the epoch began.
  void end_step(std::int64_t step, double loss, double accuracy, double learning_rate, double images_per_second);
  void end_epoch(std::int64_t step, const std::vector<std::pair<std::string, double>>& values);
  void end();  // call it when the model is whole

 private:
  ImportExportFiles files_;
  Module& model_;
  FlatParameters& flat_;
  Shape picture_;
  std::map<std::string, std::string> about_;
  std::int64_t step_ = 0;
  std::optional<EventFile> events_;
  std::optional<WatchActivations> watch_;
};

}  // namespace tandem
