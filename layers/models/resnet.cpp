// Residual networks (He et al., Deep Residual Learning for Image Recognition, 2016), in their two forms, and wide ones
// (Zagoruyko and Komodakis, 2016).
#include "layers/layers.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// The shortcut if the width or the size of the picture changes: x as it is added to a block's result.
enum class Shortcut { identity, pad, project };

class Block : public Module {
 protected:
  // A convolution and the batch norm after it: the children conv1 and bn1.
  struct ConvNorm {
    Conv2d& conv;
    BatchNorm2d& norm;
    Variable operator()(const Variable& x) { return norm(conv(x)); }
  };
  ConvNorm conv_norm(const std::string& number, int in, int out, int kernel_size, int stride = 1) {
    Conv2d& conv = adopt("conv" + number, Conv2d::before_norm(in, out, kernel_size, stride));
    return {conv, child<BatchNorm2d>("bn" + number, out, true)};
  }
  // Call it last in the constructor: a projection is a child.
  void add_shortcut(Shortcut kind, int in, int out, int stride) {
    stride_ = stride;
    widen_ = (out - in) / 2;
    pads_ = kind == Shortcut::pad;
    if (kind != Shortcut::project) return;
    down_ = &child<Sequential>("downsample");
    down_->attach("0", Conv2d::before_norm(in, out, 1, stride));
    down_->add<BatchNorm2d>(out);
  }
  Variable shortcut(const Variable& x) {
    if (down_) return (*down_)(x);
    return pads_ ? pad_shortcut(x, stride_, widen_) : x;
  }

 private:
  int stride_ = 1, widen_ = 0;
  bool pads_ = false;
  Sequential* down_ = nullptr;
};

// y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)), two 3 × 3.
class BasicBlock : public Block {
 public:
  static constexpr int expansion = 1;
  static constexpr bool norm_first = false;
  BasicBlock(int in, int width, int stride, Shortcut kind)
      : first_(conv_norm("1", in, width, 3, stride)), second_(conv_norm("2", width, width, 3)) {
    add_shortcut(kind, in, width, stride);
  }
  Variable forward(const Variable& x) override {
    Variable y = second_.conv(first_(x));
    return second_.norm(y, shortcut(x));
  }

 private:
  ConvNorm first_, second_;
};

// 1 × 1 to `width`, 3 × 3, 1 × 1 to four times as much; a stride is the 3 × 3's.
class Bottleneck : public Block {
 public:
  static constexpr int expansion = 4;
  static constexpr bool norm_first = false;
  Bottleneck(int in, int width, int stride, Shortcut kind)
      : first_(conv_norm("1", in, width, 1)),
        second_(conv_norm("2", width, width, 3, stride)),
        third_(conv_norm("3", width, expansion * width, 1)) {
    add_shortcut(kind, in, expansion * width, stride);
  }
  Variable forward(const Variable& x) override {
    Variable y = third_.conv(second_(first_(x)));
    return third_.norm(y, shortcut(x));
  }

 private:
  ConvNorm first_, second_, third_;
};

// z = relu(bn1(x)), y = conv2(relu(bn2(conv1(z)))) + x. Where the width or the picture changes, a 1 × 1 of z takes the
// place of x.
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
class ResNet : public Module {
 public:
  // Every stage but the first halves the picture. large: the stem is 7 × 7 with stride 2 and a max pool 3 × 3 with
  // stride 2, otherwise 3 × 3 to `stem` channels. Where the blocks begin with a norm, one ends the stages.
  ResNet(int classes, int channels, bool large, int stem, const std::vector<int>& blocks,
         const std::vector<int>& widths, Shortcut widening)
      : large_(large),
        conv1_(adopt("conv1",
                     large ? Conv2d::before_norm(channels, stem, 7, 2) : Conv2d::before_norm(channels, stem, 3))) {
    int in = stem;
    if (!B::norm_first) bn1_ = &child<BatchNorm2d>("bn1", in, !large);
    for (std::size_t stage = 0; stage < blocks.size(); stage++) {
      Sequential& layer = child<Sequential>("layer" + std::to_string(stage + 1));
      const int out = B::expansion * widths[stage];
      for (int b = 0; b < blocks[stage]; b++) {
        const int stride = b == 0 && stage > 0 ? 2 : 1;
        layer.add<B>(in, widths[stage], stride, stride > 1 || in != out ? widening : Shortcut::identity);
        in = out;
      }
      stages_.push_back(&layer);
    }
    if (B::norm_first) bn1_ = &child<BatchNorm2d>("bn1", in, true);
    fc_ = &child<Linear>("fc", in, classes);
  }
  Variable forward(const Variable& x) override {
    Variable y = conv1_(x);
    if (!B::norm_first) y = (*bn1_)(y);
    if (large_) y = max_pool2d(y, {.kernel_size = 3, .stride = 2, .padding = 1, .relu = true});
    for (Sequential* stage : stages_) y = (*stage)(y);
    if (B::norm_first) y = (*bn1_)(y);
    return (*fc_)(global_average_pool(y));
  }

 private:
  bool large_;
  Conv2d& conv1_;
  BatchNorm2d* bn1_;
  std::vector<Sequential*> stages_;
  Linear* fc_;
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
