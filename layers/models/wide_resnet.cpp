// Wide residual networks (Zagoruyko and Komodakis, 2016), for CIFAR.
#include "layers/layers.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// z = relu(bn1(x)), y = conv2(relu(bn2(conv1(z)))) + x. Where the width or the picture changes, a 1 × 1 of z takes the
// place of x.
class WideBlock : public Module {
 public:
  WideBlock(int in, int out, int stride)
      : bn1_(child<BatchNorm2d>("bn1", in, true)),
        conv1_(adopt("conv1", Conv2d::before_norm(in, out, 3, stride))),
        bn2_(child<BatchNorm2d>("bn2", out, true)),
        conv2_(adopt("conv2", Conv2d::before_norm(out, out, 3))) {
    if (in != out || stride > 1) downsample_ = &adopt("downsample", Conv2d::before_norm(in, out, 1, stride));
  }
  Variable forward(const Variable& x) override {
    Variable z = bn1_(x);
    Variable y = conv2_(bn2_(conv1_(z)));
    return y + (downsample_ ? (*downsample_)(z) : x);
  }

 private:
  BatchNorm2d& bn1_;
  Conv2d& conv1_;
  BatchNorm2d& bn2_;
  Conv2d& conv2_;
  Conv2d* downsample_ = nullptr;
};

class WideResNet : public Module {
 public:
  WideResNet(int blocks, int width, int classes, int channels)
      : conv1_(adopt("conv1", Conv2d::before_norm(channels, 16, 3))) {
    int in = 16;
    for (int stage = 0; stage < 3; stage++) {
      Sequential& layer = child<Sequential>("layer" + std::to_string(stage + 1));
      const int out = (16 << stage) * width;
      for (int b = 0; b < blocks; b++) {
        layer.add<WideBlock>(in, out, b == 0 && stage > 0 ? 2 : 1);
        in = out;
      }
      stages_.push_back(&layer);
    }
    bn1_ = &child<BatchNorm2d>("bn1", in, true);
    fc_ = &child<Linear>("fc", in, classes);
  }
  Variable forward(const Variable& x) override {
    Variable y = conv1_(x);
    for (Sequential* stage : stages_) y = (*stage)(y);
    return (*fc_)(global_average_pool((*bn1_)(y)));
  }

 private:
  Conv2d& conv1_;
  std::vector<Sequential*> stages_;
  BatchNorm2d* bn1_;
  Linear* fc_;
};

}  // namespace

Model wide_resnet(int depth, int width, int classes, int channels) {
  require(depth >= 10 && depth % 6 == 4 && width >= 1,
          "wide_resnet: the depth is 6n + 4 and the width at least 1, not ", depth, " and ", width);
  return std::make_unique<WideResNet>((depth - 4) / 6, width, classes, channels);
}

}  // namespace tandem
