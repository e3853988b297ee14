// The models that programs know by name. Parameter names are torchvision's where torchvision has the model.
#pragma once
#include <memory>
#include <string>

#include "layers/module.h"

namespace tandem {

// name: one of model_names(). Pictures are [N, side, side, channels]. An unknown name throws Error that lists the names.
std::unique_ptr<Module> make_model(const std::string& name, int classes, int channels, int side);
std::string model_names();  // "mlp lenet5 smallcnn resnet20 resnet18"

std::unique_ptr<Module> mlp(int classes, int channels, int side);       // side²·channels → 256 → classes
std::unique_ptr<Module> lenet5(int classes, int channels, int side);    // LeCun et al. 1998, with ReLU and max pooling
std::unique_ptr<Module> smallcnn(int classes, int channels, int side);  // 32 and 64 filters 3×3, two pools, 128 hidden
std::unique_ptr<Module> resnet20(int classes, int channels);  // He et al. 2016, CIFAR form, parameter-free shortcuts
std::unique_ptr<Module> resnet18(int classes, int channels);  // four stages 64 … 512, CIFAR stem

}  // namespace tandem
