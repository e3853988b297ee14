// Residual networks (He et al., Deep Residual Learning for Image Recognition, 2016), in their two forms.
#include "layers/layers.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// What x becomes before it is added to a block's result.
class Shortcut {
 public:
  enum class Kind { identity, pad, project };
  // A projection is a child of the block: `down`, which the block has registered.
  Shortcut(Kind kind, int stride, int widen, Sequential* down)
      : kind_(kind), stride_(stride), widen_(widen), down_(down) {}
  Variable operator()(const Variable& x) {
    switch (kind_) {
      case Kind::project: return (*down_)(x);
      case Kind::pad: return pad_shortcut(x, stride_, widen_);
      default: return x;
    }
  }

 private:
  Kind kind_;
  int stride_, widen_;
  Sequential* down_;
};

class Block : public Module {
 protected:
  Shortcut shortcut(Shortcut::Kind kind, int in, int out, int stride) {
    if (kind != Shortcut::Kind::project) return {kind, stride, (out - in) / 2, nullptr};
    Sequential& down = child<Sequential>("downsample");
    down.attach("0", Conv2d::before_norm(in, out, 1, stride));
    down.add<BatchNorm2d>(out);
    return {kind, stride, 0, &down};
  }
};

// y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)), two 3 × 3.
class BasicBlock : public Block {
 public:
  static constexpr int expansion = 1;
  BasicBlock(int in, int width, int stride, Shortcut::Kind kind)
      : conv1_(adopt("conv1", Conv2d::before_norm(in, width, 3, stride))),
        bn1_(child<BatchNorm2d>("bn1", width, true)),
        conv2_(adopt("conv2", Conv2d::before_norm(width, width, 3))),
        bn2_(child<BatchNorm2d>("bn2", width, true)),
        shortcut_(shortcut(kind, in, width, stride)) {}
  Variable forward(const Variable& x) override {
    Variable y = conv2_(bn1_(conv1_(x)));
    return bn2_(y, shortcut_(x));
  }

 private:
  Conv2d& conv1_;
  BatchNorm2d& bn1_;
  Conv2d& conv2_;
  BatchNorm2d& bn2_;
  Shortcut shortcut_;
};

// 1 × 1 to `width`, 3 × 3, 1 × 1 to four times as much; a stride is the 3 × 3's.
class Bottleneck : public Block {
 public:
  static constexpr int expansion = 4;
  Bottleneck(int in, int width, int stride, Shortcut::Kind kind)
      : conv1_(adopt("conv1", Conv2d::before_norm(in, width, 1))),
        bn1_(child<BatchNorm2d>("bn1", width, true)),
        conv2_(adopt("conv2", Conv2d::before_norm(width, width, 3, stride))),
        bn2_(child<BatchNorm2d>("bn2", width, true)),
        conv3_(adopt("conv3", Conv2d::before_norm(width, expansion * width, 1))),
        bn3_(child<BatchNorm2d>("bn3", expansion * width, true)),
        shortcut_(shortcut(kind, in, expansion * width, stride)) {}
  Variable forward(const Variable& x) override {
    Variable y = bn2_(conv2_(bn1_(conv1_(x))));
    return bn3_(conv3_(y), shortcut_(x));
  }

 private:
  Conv2d& conv1_;
  BatchNorm2d& bn1_;
  Conv2d& conv2_;
  BatchNorm2d& bn2_;
  Conv2d& conv3_;
  BatchNorm2d& bn3_;
  Shortcut shortcut_;
};

enum class Stem { small, imagenet };  // 3 × 3; 7 × 7 with stride 2, then a max pool 3 × 3 with stride 2

template <class B>
class ResNet : public Module {
 public:
  // blocks of each stage; widths of each stage; every stage but the first halves the picture.
  ResNet(int classes, int channels, Stem stem, const std::vector<int>& blocks, const std::vector<int>& widths,
         Shortcut::Kind widening)
      : pool_(stem == Stem::imagenet),
        conv1_(adopt("conv1", pool_ ? Conv2d::before_norm(channels, widths[0], 7, 2)
                                    : Conv2d::before_norm(channels, widths[0], 3))),
        bn1_(child<BatchNorm2d>("bn1", widths[0], !pool_)) {
    int in = widths[0];
    for (std::size_t stage = 0; stage < blocks.size(); stage++) {
      Sequential& layer = child<Sequential>("layer" + std::to_string(stage + 1));
      const int out = B::expansion * widths[stage];
      for (int b = 0; b < blocks[stage]; b++) {
        const int stride = b == 0 && stage > 0 ? 2 : 1;
        layer.add<B>(in, widths[stage], stride, stride > 1 || in != out ? widening : Shortcut::Kind::identity);
        in = out;
      }
      stages_.push_back(&layer);
    }
    fc_ = &child<Linear>("fc", in, classes);
  }
  Variable forward(const Variable& x) override {
    Variable y = bn1_(conv1_(x));
    if (pool_) y = max_pool2d(y, {.kernel_size = 3, .stride = 2, .padding = 1, .relu = true});
    for (Sequential* stage : stages_) y = (*stage)(y);
    return (*fc_)(global_average_pool(y));
  }

 private:
  bool pool_;
  Conv2d& conv1_;
  BatchNorm2d& bn1_;
  std::vector<Sequential*> stages_;
  Linear* fc_;
};

}  // namespace

Model resnet_cifar(int depth, int classes, int channels) {
  require(depth >= 8 && depth % 6 == 2, "resnet_cifar: the depth is 6n + 2, not ", depth);
  const int n = (depth - 2) / 6;
  return std::make_unique<ResNet<BasicBlock>>(classes, channels, Stem::small, std::vector{n, n, n},
                                              std::vector{16, 32, 64}, Shortcut::Kind::pad);
}

Model resnet(int depth, int classes, int channels, int side) {
  auto of = [&]<class B>(const std::vector<int>& blocks) -> Model {
    return std::make_unique<ResNet<B>>(classes, channels, side >= 64 ? Stem::imagenet : Stem::small, blocks,
                                       std::vector{64, 128, 256, 512}, Shortcut::Kind::project);
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

}  // namespace tandem
