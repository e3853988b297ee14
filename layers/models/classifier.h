// A trained model that classifies pictures, built from a file of weights and the metadata in it.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "datasets/dataset.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

class Classifier {
 public:
  // `weights`: a checkpoint (its moving average is used if it has one) or a file of --export-torch. `model`: one of
  // model_names(), or empty: the name in the file. Throws UsageError when the file is damaged, belongs to another
  // model, or does not describe the pictures of the training.
  Classifier(const std::string& weights, const std::string& model, Backend& backend);

  const std::vector<std::string>& classes() const { return classes_; }
  int channels() const { return channels_; }
  int side() const { return side_; }  // pictures are side × side pixels

  // For each picture the probability of every class. pixels: u8 [count, side, side, channels].
  std::vector<std::vector<double>> operator()(std::span<const std::uint8_t> pixels);

 private:
  Backend& backend_;
  std::vector<std::string> classes_;
  std::vector<float> mean_, std_;
  int channels_ = 0, side_ = 0;
  Model model_;
  std::unique_ptr<FlatParameters> flat_;
};

}  // namespace tandem
