#include "layers/models/models.h"

#include "core/text.h"
#include "layers/layers.h"

namespace tandem {
namespace {

struct Mlp : Sequential {
  Mlp(int classes, int inputs) {
    child<Flatten>("flatten");
    child<Linear>("fc1", inputs, 256, true, true);
    child<Linear>("fc2", 256, classes);
  }
};

// conv → ReLU → pool is computed as conv → pool with ReLU, one operation fewer: max(ReLU(x)) = ReLU(max(x)).
constexpr Pool2dOptions pool_relu{.kernel_size = 2, .relu = true};

struct LeNet5 : Sequential {
  LeNet5(int classes, int channels, int side) {
    child<Conv2d>("conv1", channels, 6, 5, Conv2dOptions{.padding = side == 28 ? 2 : 0});
    child<MaxPool2d>("pool1", pool_relu);
    child<Conv2d>("conv2", 6, 16, 5);
    child<MaxPool2d>("pool2", pool_relu);
    child<Flatten>("flatten");
    child<Linear>("fc1", 16 * 25, 120, true, true);
    child<Linear>("fc2", 120, 84, true, true);
    child<Linear>("fc3", 84, classes);
  }
};

// norm: with a batch norm after each convolution.
struct SmallCnn : Sequential {
  SmallCnn(int classes, int channels, int side, bool norm) {
    for (const int width : {32, 64}) {
      const std::string number = width == 32 ? "1" : "2";
      if (norm) {
        adopt("conv" + number, Conv2d::before_norm(channels, width, 3));
        child<BatchNorm2d>("bn" + number, width);
      } else {
        child<Conv2d>("conv" + number, channels, width, 3, Conv2dOptions{.padding = 1});
      }
      child<MaxPool2d>("pool" + number, pool_relu);
      channels = width;
    }
    child<Flatten>("flatten");
    child<Linear>("fc1", 64 * (side / 4) * (side / 4), 128, true, true);
    child<Linear>("fc2", 128, classes);
  }
};

// ---- by name --------------------------------------------------------------------------------------------------------
Model cifar(int depth, int classes, int channels, int) { return resnet_cifar(depth, classes, channels); }

constexpr struct Known {
  const char* name;
  Model (*make)(int depth, int classes, int channels, int side);
  int depth = 0;
} models[] = {
    {"mlp", [](int, int classes, int channels, int side) { return mlp(classes, channels, side); }},
    {"lenet5", [](int, int classes, int channels, int side) { return lenet5(classes, channels, side); }},
    {"smallcnn", [](int, int classes, int channels, int side) { return smallcnn(classes, channels, side); }},
    {"smallcnn-bn", [](int, int classes, int channels, int side) { return smallcnn(classes, channels, side, true); }},
    {"vgg11", vgg, 11},
    {"vgg16", vgg, 16},
    {"resnet8", cifar, 8},
    {"resnet20", cifar, 20},
    {"resnet32", cifar, 32},
    {"resnet44", cifar, 44},
    {"resnet56", cifar, 56},
    {"resnet110", cifar, 110},
    {"resnet1202", cifar, 1202},
    {"resnet18", resnet, 18},
    {"resnet34", resnet, 34},
    {"resnet50", resnet, 50},
    {"resnet101", resnet, 101},
    {"resnet152", resnet, 152},
    {"wrn28-10", [](int, int classes, int channels, int) { return wide_resnet(28, 10, classes, channels); }}};

const Known& find(const std::string& name) {
  for (const Known& model : models)
    if (name == model.name) return model;
  refuse(name, ": there is no model '", name, "'; there are: ", model_names());
}

}  // namespace

Model mlp(int classes, int channels, int side) { return std::make_unique<Mlp>(classes, channels * side * side); }

Model lenet5(int classes, int channels, int side) {
  if (side != 28 && side != 32) refuse("lenet5: pictures are 28 or 32 wide, not ", side);
  return std::make_unique<LeNet5>(classes, channels, side);
}

Model smallcnn(int classes, int channels, int side, bool norm) {
  if (side < 4) refuse(norm ? "smallcnn-bn" : "smallcnn", ": pictures are at least 4 wide, not ", side);
  return std::make_unique<SmallCnn>(classes, channels, side, norm);
}

Model make_model(const std::string& name, int classes, int channels, int side) {
  const Known& model = find(name);
  return model.make(model.depth, classes, channels, side);
}

std::string model_names() {
  return joined(models, " ", [](const auto& model) { return model.name; });
}

void check_model_name(const std::string& name) { find(name); }

}  // namespace tandem
