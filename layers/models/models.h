// The models that can be selected by name. Parameter names are torchvision's where torchvision has the model. Building
// a model takes almost no time or memory: its parameters get their memory from a FlatParameters.
#pragma once
#include <string>

#include "layers/module.h"

namespace tandem {

// name: one of model_names(). Pictures are [N, side, side, channels]. Throws UsageError for an unknown name, listing
// the names, and for a side that the model does not support.
Model make_model(const std::string& name, int classes, int channels, int side);
std::string model_names();                       // "mlp lenet5 smallcnn …"
void check_model_name(const std::string& name);  // throws as make_model does, and builds nothing

// models.cpp
Model mlp(int classes, int channels, int side);     // side²·channels → 256 → classes
Model lenet5(int classes, int channels, int side);  // LeCun et al. 1998, with ReLU and max pooling
// 32 and 64 filters 3×3, two pools, 128 hidden; norm: with a batch norm behind each convolution
Model smallcnn(int classes, int channels, int side, bool norm = false);

// vgg.cpp. Simonyan and Zisserman 2015, with batch norm; depth 11 or 16. Sides 224 to 287: torchvision's form, in which
// three Linear (4096, 4096, classes) follow features of 7 × 7 or 8 × 8. Sides 28 to 223: the usual form for CIFAR, one
// Linear after the mean over the remaining pixels.
Model vgg(int depth, int classes, int channels, int side);

// resnet.cpp. He et al. 2016.
// The CIFAR form, depth 6n + 2 (8, 20, 32, 44, 56, 110, 1202): three stages of n blocks, parameter-free shortcuts.
Model resnet_cifar(int depth, int classes, int channels);
// The ImageNet form, depth 18 or 34 (basic blocks), 50, 101 or 152 (bottlenecks, stride on the 3 × 3 as in
// torchvision). From 64 pixels on it begins with 7 × 7, stride 2, and a max pool; smaller pictures get one 3 × 3
// instead.
Model resnet(int depth, int classes, int channels, int side);

// Zagoruyko and Komodakis 2016: pre-activation, depth 6n + 4, `width` times the filters 16, 32, 64.
Model wide_resnet(int depth, int width, int classes, int channels);

}  // namespace tandem
