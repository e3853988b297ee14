// A trained model that names what it sees: built from a file of weights and from what was saved beside them.
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
  // `weights`: a checkpoint (whose moving average is used where it has one) or a file of --export-torch. `model`: one
  // of model_names(), or empty to take the name that the file holds. Throws UsageError when the file is damaged, of
  // another model, or says nothing of the pictures that it was trained on.
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
