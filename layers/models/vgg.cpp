// VGG with batch norm (Simonyan and Zisserman 2015; Ioffe and Szegedy 2015).
#include "layers/layers.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// Children are numbered as in torchvision, where each ReLU and dropout takes a number too.
struct Vgg : Sequential {
  // widths: the convolutions in order; 0 stands for a pool.
  Vgg(const std::vector<int>& widths, int classes, int channels, int side) {
    const bool round_up = side < 32;  // half of an odd side: otherwise five pools leave nothing of 28 pixels
    const bool large = side >= 224;
    Sequential& features = child<Sequential>("features");
    int in = channels, number = 0;
    auto name = [&](int step) { return std::to_string((number += step) - step); };
    for (int width : widths) {
      if (width == 0) {
        const int padding = round_up ? side % 2 : 0;
        features.child<MaxPool2d>(name(1), Pool2dOptions{.kernel_size = 2, .padding = padding});
        side = side / 2 + padding;
        continue;
      }
      features.adopt(name(1), Conv2d::before_norm(in, width, 3, 1, true));
      features.child<BatchNorm2d>(name(2), width, true);
      in = width;
    }
    if (!large) {
      child<GlobalAveragePool>("avgpool");
      child<Linear>("classifier", in, classes);
    } else {
      // The same as adaptive pooling of 8 to 7
      if (side > 7) child<AveragePool2d>("avgpool", Pool2dOptions{.kernel_size = side - 6, .stride = 1});
      child<Flatten>("flatten");
      Sequential& layers = child<Sequential>("classifier");
      layers.child<Linear>("0", 7 * 7 * in, 4096, true, true);
      layers.child<Dropout>("2", 0.5);
      layers.child<Linear>("3", 4096, 4096, true, true);
      layers.child<Dropout>("5", 0.5);
      layers.child<Linear>("6", 4096, classes);
    }
    for (auto& [ignored, p] : parameters())
      if (p->shape.rank() == 2)
        p->initial = Initial::normal(0, 0.01);
      else if (p->name == "bias")
        p->initial = Initial::zeros();
  }
};

}  // namespace

Model vgg(int depth, int classes, int channels, int side) {
  if (side < 28 || side >= 288) refuse("vgg", depth, ": pictures are 28 to 287 wide, not ", side);
  auto of = [&](const std::vector<int>& widths) { return std::make_unique<Vgg>(widths, classes, channels, side); };
  switch (depth) {
    case 11: return of({64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0});
    case 16: return of({64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0});
    default: fail("vgg: the depth is 11 or 16, not ", depth);
  }
}

}  // namespace tandem
