// Classifies pictures: build/predict --weights run/best.safetensors shoe.png coat.jpg. The weights are a checkpoint or
// a file of --export-torch. The largest square of each picture is scaled to the size of the training pictures.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "datasets/image.h"
#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::string weights, model;
    std::vector<std::string> files;
    int shown = 3;
    OptionRows own;
    own.text("--weights", weights, "a checkpoint, or a file of --export-torch");
    own.text("--model", model, "its model, where the file does not say: " + model_names(), {}, check_model_name);
    own.number("--top", shown, 1, 1000000, "how many classes to print for a picture");
    parse_command_line(argc, argv, "Says what is on pictures: predict --weights FILE PICTURE…", own.all, &files);
    if (weights.empty()) refuse("with which weights? Name a checkpoint with --weights");
    if (files.empty()) refuse("which pictures? Name their files");

    auto backend = cpu_backend();
    Classifier classify(weights, model, *backend);
    const int channels = classify.channels(), side = classify.side(), bytes = side * side * channels;
    if (channels != 1 && channels != 3)
      refuse(weights, ": was trained on ", channels, " channels, picture files have 1 or 3");

    std::vector<std::uint8_t> pixels(files.size() * std::size_t(bytes));
    for (std::size_t i = 0; i < files.size(); i++) {
      const ByteSource file = open_bytes(files[i], "name a picture that is there");
      fit_square(decode_image(file, channels), side, pixels.data() + i * std::size_t(bytes));
    }
    const auto probabilities = classify(pixels);
    for (std::size_t i = 0; i < files.size(); i++) {
      const std::vector<double>& p = probabilities[i];
      std::vector<int> order(p.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return p[a] > p[b]; });
      std::printf("%s:", files[i].c_str());
      for (int k = 0; k < std::min(shown, int(p.size())); k++)
        std::printf("%s %s %.1f %%", k ? "," : "", classify.classes()[order[k]].c_str(), 100 * p[order[k]]);
      std::printf("\n");
    }
  });
}
