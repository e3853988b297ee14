// What tests of training share: a small network, quiet options, weights as numbers, a command line.
#pragma once
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "layers/layers.h"
#include "layers/train/fit.h"
#include "layers/train/options.h"

namespace tandem::test {

// The network of tests/reference/training.safetensors.
struct Tiny : Module {
  Conv2d& conv1 = child<Conv2d>("conv1", 1, 4, 3, Conv2dOptions{.padding = 1});
  BatchNorm2d& bn1 = child<BatchNorm2d>("bn1", 4, true);
  Conv2d& conv2 = child<Conv2d>("conv2", 4, 8, 3, Conv2dOptions{.stride = 2, .padding = 1}, false);
  BatchNorm2d& bn2 = child<BatchNorm2d>("bn2", 8, true);
  Linear& fc = child<Linear>("fc", 32, 10);
  Variable forward(const Variable& x) override { return fc(flatten(bn2(conv2(max_pool2d(bn1(conv1(x))))))); }
};

inline RunConfig quiet_options(int epochs, std::uint64_t seed = 1) {
  RunConfig o;
  o.epochs = epochs;
  o.seed = seed;
  o.progress = false;
  return o;
}

// All parameters and buffers.
inline std::vector<double> weights_of(Module& m) {
  std::vector<double> all;
  auto add = [&](const Tensor& t) {
    const std::vector<double> values = t.values();
    all.insert(all.end(), values.begin(), values.end());
  };
  for (auto& [name, p] : m.parameters()) add(p->variable.value());
  for (auto& [name, s] : m.buffers()) add(s->tensor);
  return all;
}

// The options of a program that is started with these words.
inline RunConfig parsed_options(std::vector<std::string> words) {
  words.insert(words.begin(), "program");
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  return parse_options(int(argv.size()), argv.data(), "Trains a network.");
}
inline RunConfig parsed_options(const std::string& line) {  // words with a blank between them
  std::istringstream in(line);
  return parsed_options(std::vector<std::string>{std::istream_iterator<std::string>(in), {}});
}

}  // namespace tandem::test
