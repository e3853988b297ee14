#include "layers/models.h"

#include "layers/layers.h"

namespace tandem {
namespace {

class Mlp : public Module {
 public:
  Mlp(int classes, int inputs)
      : fc1_(child<Linear>("fc1", inputs, 256, true, true)), fc2_(child<Linear>("fc2", 256, classes)) {}
  Variable forward(const Variable& x) override { return fc2_(fc1_(flatten(x))); }

 private:
  Linear &fc1_, &fc2_;
};

// conv → ReLU → pool is one operation fewer as conv → pool with ReLU: the maximum of ReLUs is the ReLU of the maximum.
constexpr Pool2dOptions pool_relu{.window = 2, .relu = true};

class LeNet5 : public Module {
 public:
  LeNet5(int classes, int channels, int side)
      : conv1_(child<Conv2d>("conv1", channels, 6, 5, Conv2dOptions{.padding = side == 28 ? 2 : 0})),
        conv2_(child<Conv2d>("conv2", 6, 16, 5)),
        fc1_(child<Linear>("fc1", 16 * 25, 120, true, true)),
        fc2_(child<Linear>("fc2", 120, 84, true, true)),
        fc3_(child<Linear>("fc3", 84, classes)) {}
  Variable forward(const Variable& x) override {
    Variable y = max_pool2d(conv1_(x), pool_relu);
    y = max_pool2d(conv2_(y), pool_relu);
    return fc3_(fc2_(fc1_(flatten(y))));
  }

 private:
  Conv2d &conv1_, &conv2_;
  Linear &fc1_, &fc2_, &fc3_;
};

class SmallCnn : public Module {
 public:
  SmallCnn(int classes, int channels, int side)
      : conv1_(child<Conv2d>("conv1", channels, 32, 3, Conv2dOptions{.padding = 1})),
        conv2_(child<Conv2d>("conv2", 32, 64, 3, Conv2dOptions{.padding = 1})),
        fc1_(child<Linear>("fc1", 64 * (side / 4) * (side / 4), 128, true, true)),
        fc2_(child<Linear>("fc2", 128, classes)) {}
  Variable forward(const Variable& x) override {
    Variable y = max_pool2d(conv1_(x), pool_relu);
    y = max_pool2d(conv2_(y), pool_relu);
    return fc2_(fc1_(flatten(y)));
  }

 private:
  Conv2d &conv1_, &conv2_;
  Linear &fc1_, &fc2_;
};

// y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)).
class BasicBlock : public Module {
 public:
  enum class Shortcut { identity, pad, project };
  BasicBlock(int in, int out, int stride, Shortcut shortcut)
      : conv1_(adopt("conv1", Conv2d::before_norm(in, out, 3, stride))),
        bn1_(child<BatchNorm2d>("bn1", out, true)),
        conv2_(adopt("conv2", Conv2d::before_norm(out, out, 3))),
        bn2_(child<BatchNorm2d>("bn2", out, true)),
        shortcut_(shortcut),
        stride_(stride),
        widen_((out - in) / 2) {
    if (shortcut == Shortcut::project) {
      auto down = std::make_unique<Sequential>();
      Sequential& d = adopt("downsample", std::move(down));
      d.attach("0", Conv2d::before_norm(in, out, 1, stride));
      d.add<BatchNorm2d>(out);
      downsample_ = &d;
    }
  }
  Variable forward(const Variable& x) override {
    Variable y = conv2_(bn1_(conv1_(x)));
    return bn2_(y, shortcut(x));
  }

 private:
  Variable shortcut(const Variable& x) {
    switch (shortcut_) {
      case Shortcut::project: return (*downsample_)(x);
      case Shortcut::pad: return pad_shortcut(x, stride_, widen_);
      default: return x;
    }
  }
  Conv2d& conv1_;
  BatchNorm2d& bn1_;
  Conv2d& conv2_;
  BatchNorm2d& bn2_;
  Sequential* downsample_ = nullptr;
  Shortcut shortcut_;
  int stride_, widen_;
};

class ResNet : public Module {
 public:
  // blocks of each stage; widths of each stage; every stage but the first halves the picture.
  ResNet(int classes, int channels, std::vector<int> blocks, std::vector<int> widths, BasicBlock::Shortcut widening)
      : conv1_(adopt("conv1", Conv2d::before_norm(channels, widths[0], 3))),
        bn1_(child<BatchNorm2d>("bn1", widths[0], true)) {
    int in = widths[0];
    for (std::size_t stage = 0; stage < blocks.size(); stage++) {
      Sequential& layer = child<Sequential>("layer" + std::to_string(stage + 1));
      for (int b = 0; b < blocks[stage]; b++) {
        bool first = b == 0 && stage > 0;
        layer.add<BasicBlock>(in, widths[stage], first ? 2 : 1, first ? widening : BasicBlock::Shortcut::identity);
        in = widths[stage];
      }
      stages_.push_back(&layer);
    }
    fc_ = &child<Linear>("fc", in, classes);
  }
  Variable forward(const Variable& x) override {
    Variable y = bn1_(conv1_(x));
    for (Sequential* stage : stages_) y = (*stage)(y);
    return (*fc_)(global_average_pool(y));
  }

 private:
  Conv2d& conv1_;
  BatchNorm2d& bn1_;
  std::vector<Sequential*> stages_;
  Linear* fc_;
};

}  // namespace

std::unique_ptr<Module> mlp(int classes, int channels, int side) {
  return std::make_unique<Mlp>(classes, channels * side * side);
}

std::unique_ptr<Module> lenet5(int classes, int channels, int side) {
  require(side == 28 || side == 32, "lenet5: pictures are 28 or 32 wide, not ", side);
  return std::make_unique<LeNet5>(classes, channels, side);
}

std::unique_ptr<Module> smallcnn(int classes, int channels, int side) {
  require(side >= 4, "smallcnn: pictures are at least 4 wide, not ", side);
  return std::make_unique<SmallCnn>(classes, channels, side);
}

std::unique_ptr<Module> resnet20(int classes, int channels) {
  return std::make_unique<ResNet>(classes, channels, std::vector{3, 3, 3}, std::vector{16, 32, 64},
                                  BasicBlock::Shortcut::pad);
}

std::unique_ptr<Module> resnet18(int classes, int channels) {
  return std::make_unique<ResNet>(classes, channels, std::vector{2, 2, 2, 2}, std::vector{64, 128, 256, 512},
                                  BasicBlock::Shortcut::project);
}

std::string model_names() { return "mlp lenet5 smallcnn resnet20 resnet18"; }

std::unique_ptr<Module> make_model(const std::string& name, int classes, int channels, int side) {
  if (name == "mlp") return mlp(classes, channels, side);
  if (name == "lenet5") return lenet5(classes, channels, side);
  if (name == "smallcnn") return smallcnn(classes, channels, side);
  if (name == "resnet20") return resnet20(classes, channels);
  if (name == "resnet18") return resnet18(classes, channels);
  fail("no model '", name, "'; there are: ", model_names());
}

}  // namespace tandem
