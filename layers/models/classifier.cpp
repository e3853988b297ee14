#include "layers/models/classifier.h"

#include "core/files/safetensors.h"
#include "core/text.h"
#include "datasets/loader.h"
#include "layers/export/torch_weights.h"
#include "layers/models/models.h"
#include "layers/train/checkpoint.h"

namespace tandem {

Classifier::Classifier(const std::string& weights, const std::string& model, Backend& backend) : backend_(backend) {
  const SafetensorsFile file(weights);
  std::map<std::string, std::string> about;  // model, classes, mean, std, channels and side, among others
  for (const auto& [full, value] : file.metadata()) {
    const std::string key = full.starts_with("setting ") ? full.substr(8) : full;
    about[key == "--model" ? "model" : key] = value;
  }
  auto said = [&](const char* key) -> const std::string& {
    const auto found = about.find(key);
    if (found == about.end())
      refuse(weights, ": does not say the ", key, " of the pictures it was trained on; files that --checkpoint and ",
             "--export-torch write do");
    return found->second;
  };
  auto number = [&](const char* key, const std::string& text, auto least, auto most) {
    const auto v = parsed<decltype(least)>(text);
    if (!v || !(*v >= least && *v <= most)) refuse(weights, ": says '", text, "' for ", key);
    return *v;
  };
  classes_ = parts_of(said("classes"), '\n');
  channels_ = number("channels", said("channels"), 1, 4);
  side_ = number("side", said("side"), 1, 1 << 14);
  for (const std::string& v : parts_of(said("mean"), ',')) mean_.push_back(number("mean", v, -1e6f, 1e6f));
  for (const std::string& v : parts_of(said("std"), ',')) std_.push_back(number("std", v, 1e-9f, 1e6f));
  if (classes_.empty() || int(mean_.size()) != channels_ || mean_.size() != std_.size())
    refuse(weights, ": says ", classes_.size(), " classes, and ", mean_.size(), " means and ", std_.size(),
           " standard deviations for ", channels_, " channels");

  const auto named = about.find("model");
  if (model.empty() && named == about.end())
    refuse(weights, ": does not say which model this is: name it with --model (", model_names(), ")");
  model_ = make_model(model.empty() ? named->second : model, int(classes_.size()), channels_, side_);
  flat_ = std::make_unique<FlatParameters>(model_, backend, 0);
  if (file.metadata().contains("checksum"))
    load_weights(weights, *flat_);
  else
    import_torch(model_, backend, {side_, side_, channels_}, weights);
  model_->eval();
}

std::vector<std::vector<double>> Classifier::operator()(std::span<const std::uint8_t> pixels) {
  const std::int64_t count = std::int64_t(pixels.size()) / (std::int64_t(side_) * side_ * channels_);
  const std::vector<std::int32_t> unknown(std::size_t(count), 0);
  Pictures pictures = in_memory("pictures", pixels, {count, side_, side_, channels_}, unknown, int(classes_.size()));
  pictures.mean = mean_;
  pictures.std = std_;

  NoGrad off;
  Loader loader(pictures, {.batch = std::min<std::int64_t>(count, 100), .shuffle = false, .prefetch = 0}, backend_);
  loader.start(0);
  std::vector<std::vector<double>> all;
  for (Batch batch; loader.next(batch);) {
    const std::vector<double> p = softmax(model_(batch.images)).value().values();
    for (auto row = p.begin(); row != p.end(); row += std::int64_t(classes_.size()))
      all.emplace_back(row, row + std::int64_t(classes_.size()));
  }
  return all;
}

}  // namespace tandem
