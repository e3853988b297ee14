// Residual networks (He et al., Deep Residual Learning for Image Recognition, 2016), in their two forms, and wide ones
// (Zagoruyko and Komodakis, 2016).
#include "layers/layers.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// How a block adds its input x to its result: unchanged; or, if the width or the picture's size changes, padded with
// zero channels or projected by a 1 × 1 convolution.
enum class Shortcut { identity, pad, project };

// Convolutions, each with a batch norm. The shortcut is added to the last one's result: y = relu(bn(…) + shortcut(x)).
class Block : public Module {
 public:
  static constexpr bool norm_first = false;

 protected:
  struct Convolution {
    int width, kernel_size, stride = 1;
  };
  Block(int in, const std::vector<Convolution>& convolutions, Shortcut kind) : pads_(kind == Shortcut::pad) {
    int channels = in;
    for (const Convolution& c : convolutions) {
      const std::string number = std::to_string(layers_.size() + 1);
      Conv2d& conv = adopt("conv" + number, Conv2d::before_norm(channels, c.width, c.kernel_size, c.stride));
      layers_.emplace_back(conv, child<BatchNorm2d>("bn" + number, c.width, true));
      stride_ *= c.stride;
      channels = c.width;
    }
    widen_ = (channels - in) / 2;
    if (kind != Shortcut::project) return;
    down_ = &child<Sequential>("downsample");
    down_->adopt("0", Conv2d::before_norm(in, channels, 1, stride_));
    down_->add<BatchNorm2d>(channels);
  }

 public:
  Variable forward(const Variable& x) override {
    Variable y = x;
    for (auto& [conv, norm] : std::span(layers_).first(layers_.size() - 1)) y = norm(conv(y));
    auto& [last_conv, last_norm] = layers_.back();
    y = last_conv(y);
    const Variable shortcut = down_ ? (*down_)(x) : pads_ ? pad_shortcut(x, stride_, widen_) : x;
    return last_norm(y, shortcut);
  }

 private:
  std::vector<std::pair<Conv2d&, BatchNorm2d&>> layers_;
  int stride_ = 1, widen_ = 0;
  bool pads_;
  Sequential* down_ = nullptr;
};

// Two convolutions of 3 × 3.
struct BasicBlock : Block {
  static constexpr int expansion = 1;
  BasicBlock(int in, int width, int stride, Shortcut kind) : Block(in, {{width, 3, stride}, {width, 3}}, kind) {}
};

// 1 × 1 to `width` channels, 3 × 3 with the stride, 1 × 1 to 4 · `width` channels.
struct Bottleneck : Block {
  static constexpr int expansion = 4;
  Bottleneck(int in, int width, int stride, Shortcut kind)
      : Block(in, {{width, 1}, {width, 3, stride}, {expansion * width, 1}}, kind) {}
};

// z = relu(bn1(x)), y = conv2(relu(bn2(conv1(z)))) + x. If the width or the size of the picture changes, a 1 × 1
// convolution of z replaces x.
class WideBlock : public Module {
 public:
  static constexpr int expansion = 1;
  static constexpr bool norm_first = true;
  WideBlock(int in, int out, int stride, Shortcut kind)
      : bn1_(child<BatchNorm2d>("bn1", in, true)),
        conv1_(adopt("conv1", Conv2d::before_norm(in, out, 3, stride))),
        bn2_(child<BatchNorm2d>("bn2", out, true)),
        conv2_(adopt("conv2", Conv2d::before_norm(out, out, 3))) {
    if (kind == Shortcut::project) downsample_ = &adopt("downsample", Conv2d::before_norm(in, out, 1, stride));
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

// A stem, stages of blocks B, the mean over the picture and a Linear.
template <class B>
struct ResNet : Sequential {
  // Every stage but the first halves the picture. The stem has `stem` channels. large: it is 7 × 7 with stride 2 and a
  // max pool 3 × 3 with stride 2, otherwise 3 × 3. If the blocks begin with a norm, a last norm follows the stages.
  ResNet(int classes, int channels, bool large, int stem, const std::vector<int>& blocks,
         const std::vector<int>& widths, Shortcut widening) {
    int in = stem;
    adopt("conv1", large ? Conv2d::before_norm(channels, stem, 7, 2) : Conv2d::before_norm(channels, stem, 3));
    if (!B::norm_first) child<BatchNorm2d>("bn1", in, !large);
    if (large) child<MaxPool2d>("maxpool", Pool2dOptions{.kernel_size = 3, .stride = 2, .padding = 1, .relu = true});
    for (std::size_t stage = 0; stage < blocks.size(); stage++) {
      Sequential& layer = child<Sequential>("layer" + std::to_string(stage + 1));
      const int out = B::expansion * widths[stage];
      for (int b = 0; b < blocks[stage]; b++) {
        const int stride = b == 0 && stage > 0 ? 2 : 1;
        layer.add<B>(in, widths[stage], stride, stride > 1 || in != out ? widening : Shortcut::identity);
        in = out;
      }
    }
    if (B::norm_first) child<BatchNorm2d>("bn1", in, true);
    child<GlobalAveragePool>("avgpool");
    child<Linear>("fc", in, classes);
  }
};

}  // namespace

Model resnet_cifar(int depth, int classes, int channels) {
  require(depth >= 8 && depth % 6 == 2, "resnet_cifar: the depth is 6n + 2, not ", depth);
  return std::make_unique<ResNet<BasicBlock>>(classes, channels, false, 16, std::vector(3, (depth - 2) / 6),
                                              std::vector{16, 32, 64}, Shortcut::pad);
}

Model resnet(int depth, int classes, int channels, int side) {
  auto of = [&]<class B>(const std::vector<int>& blocks) -> Model {
    return std::make_unique<ResNet<B>>(classes, channels, side >= 64, 64, blocks, std::vector{64, 128, 256, 512},
                                       Shortcut::project);
  };
  switch (depth) {
    case 18: return of.operator()<BasicBlock>({2, 2, 2, 2});
    case 34: return of.operator()<BasicBlock>({3, 4, 6, 3});
    case 50: return of.operator()<Bottleneck>({3, 4, 6, 3});
    case 101: return of.operator()<Bottleneck>({3, 4, 23, 3});
    case 152: return of.operator()<Bottleneck>({3, 8, 36, 3});
    default: fail("resnet: the depth is 18, 34, 50, 101 or 152, not ", depth);
  }
}

Model wide_resnet(int depth, int width, int classes, int channels) {
  require(depth >= 10 && depth % 6 == 4 && width >= 1,
          "wide_resnet: the depth is 6n + 4 and the width at least 1, not ", depth, " and ", width);
  return std::make_unique<ResNet<WideBlock>>(classes, channels, false, 16, std::vector(3, (depth - 4) / 6),
                                             std::vector{16 * width, 32 * width, 64 * width}, Shortcut::project);
}

}  // namespace tandem
