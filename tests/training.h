// What tests of training share: a small network, quiet options, weights as numbers, a command line.
#pragma once
#include <iterator>

#include "datasets/synthetic.h"
#include "tandem.h"
#include "tests/support.h"

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

// No batch norm: a batch in parts has the gradient of the whole.
struct PlainSizes {
  std::int64_t features = 64, hidden = 32, classes = 10;
  bool bias = true;  // of the last layer
};
struct Plain : Module {
  Linear &fc1, &fc2;
  explicit Plain(const PlainSizes& s = {})
      : fc1(child<Linear>("fc1", s.features, s.hidden, true, true)),
        fc2(child<Linear>("fc2", s.hidden, s.classes, s.bias)) {}
  Variable forward(const Variable& x) override { return fc2(fc1(flatten(x))); }
};

// A module that only has what others add to it.
struct Holder : Module {
  Variable forward(const Variable& x) override { return x; }
};

// An operation that passes no gradient on.
struct SilentNode : Node {
  static constexpr auto name = "silent";
  SilentNode() : Node(name) {}
  void backward(Tensor, std::span<GradientSlot>) override {}
};

struct BoundSgd : SGD {
  BoundSgd(FlatParameters& flat, const SGDOptions& options) : SGD(options) { bind(flat); }
};

// A classification for which the strategy has prepared the model.
inline Task prepared(Strategy& strategy, Module& model, double smoothing = 0) {
  Task task = classification(smoothing);
  strategy.prepare(model, task, {});
  return task;
}

inline RunConfig quiet(int epochs, std::uint64_t seed = 1) {
  return {.epochs = epochs, .seed = seed, .progress = false};
}

inline Numbers parameter_values(Module& m) {
  Numbers all;
  for (auto& [name, p] : m.parameters())
    for (double v : p->variable.value().values()) all.push_back(v);
  return all;
}
inline Numbers buffer_values(Module& m) {
  Numbers all;
  for (auto& [name, s] : m.buffers())
    for (double v : s->tensor.values()) all.push_back(v);
  return all;
}
inline Numbers weights_of(Module& m) {  // parameters, then buffers
  Numbers all = parameter_values(m);
  for (double v : buffer_values(m)) all.push_back(v);
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
