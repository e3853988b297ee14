#include "layers/models/models.h"

#include "core/text.h"
#include "layers/layers.h"

namespace tandem {
namespace {

class Mlp : public Sequential {
 public:
  Mlp(int classes, int inputs) {
    child<Flatten>("flatten");
    child<Linear>("fc1", inputs, 256, true, true);
    child<Linear>("fc2", 256, classes);
  }
};

// conv → ReLU → pool is one operation fewer as conv → pool with ReLU: the maximum of ReLUs is the ReLU of the maximum.
constexpr Pool2dOptions pool_relu{.kernel_size = 2, .relu = true};

class LeNet5 : public Sequential {
 public:
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
class SmallCnn : public Sequential {
 public:
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

Model small(const char* name, int classes, int channels, int side, bool norm) {
  if (side < 4) refuse(name, ": pictures are at least 4 wide, not ", side);
  return std::make_unique<SmallCnn>(classes, channels, side, norm);
}

// ---- by name --------------------------------------------------------------------------------------------------------
using Make = Model (*)(int classes, int channels, int side);

template <int depth>
Model resnet_cifar_of(int classes, int channels, int) {
  return resnet_cifar(depth, classes, channels);
}
template <int depth>
Model resnet_of(int classes, int channels, int side) {
  return resnet(depth, classes, channels, side);
}

constexpr struct {
  const char* name;
  Make make;
} models[] = {{"mlp", mlp},
              {"lenet5", lenet5},
              {"smallcnn", smallcnn},
              {"smallcnn-bn", smallcnn_bn},
              {"vgg11", [](int classes, int channels, int side) { return vgg(11, classes, channels, side); }},
              {"vgg16", [](int classes, int channels, int side) { return vgg(16, classes, channels, side); }},
              {"resnet8", resnet_cifar_of<8>},
              {"resnet20", resnet_cifar_of<20>},
              {"resnet32", resnet_cifar_of<32>},
              {"resnet44", resnet_cifar_of<44>},
              {"resnet56", resnet_cifar_of<56>},
              {"resnet110", resnet_cifar_of<110>},
              {"resnet1202", resnet_cifar_of<1202>},
              {"resnet18", resnet_of<18>},
              {"resnet34", resnet_of<34>},
              {"resnet50", resnet_of<50>},
              {"resnet101", resnet_of<101>},
              {"resnet152", resnet_of<152>},
              {"wrn28-10", [](int classes, int channels, int) { return wide_resnet(28, 10, classes, channels); }}};

Make find(const std::string& name) {
  for (auto& model : models)
    if (name == model.name) return model.make;
  fail("no model '", name, "'; there are: ", model_names());
}

}  // namespace

Model mlp(int classes, int channels, int side) { return std::make_unique<Mlp>(classes, channels * side * side); }

Model lenet5(int classes, int channels, int side) {
  if (side != 28 && side != 32) refuse("lenet5: pictures are 28 or 32 wide, not ", side);
  return std::make_unique<LeNet5>(classes, channels, side);
}

Model smallcnn(int classes, int channels, int side) { return small("smallcnn", classes, channels, side, false); }
Model smallcnn_bn(int classes, int channels, int side) { return small("smallcnn-bn", classes, channels, side, true); }

Model make_model(const std::string& name, int classes, int channels, int side) {
  return find(name)(classes, channels, side);
}

std::string model_names() {
  return joined(models, " ", [](const auto& model) { return model.name; });
}

void check_model_name(const std::string& name) { find(name); }

}  // namespace tandem
