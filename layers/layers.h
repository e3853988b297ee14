// The usual modules. Each applies the operation of the same name. Parameters have the same names as in PyTorch.
#pragma once
#include "layers/module.h"

namespace tandem {

// y = relu?(x·wᵀ + b): x [N, in] → [N, out].
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, bool bias = true, bool relu = false);
  Variable forward(const Variable& x) override;

  // Gives this rank a slice of the outputs, which are the rows of w and b. Call it before the flat parameters are
  // built. While w is a slice, `operation` computes the layer; b may be empty.
  using Operation = std::function<Variable(const Variable& x, const Variable& w, const Variable& b, bool training)>;
  void cut(Slice slice, Operation operation);
  std::int64_t outputs() const { return weight_->shape[0]; }  // of all slices
  bool has_relu() const { return relu_; }

 private:
  Parameter *weight_, *bias_ = nullptr;
  bool relu_;
  Operation of_slice_;
};

// x [N, H, W, in] → [N, H', W', out].
class Conv2d : public Module {
 public:
  Conv2d(std::int64_t in, std::int64_t out, int kernel_size, const Conv2dOptions& options = {}, bool bias = true);
  // A convolution that is followed by a batch norm: padding that keeps the size, He initialisation by fan-out, no bias
  // by default.
  static std::unique_ptr<Conv2d> before_norm(std::int64_t in, std::int64_t out, int kernel_size, int stride = 1,
                                             bool bias = false);
  Variable forward(const Variable& x) override;

 private:
  Conv2dOptions options_;
  Parameter *weight_, *bias_ = nullptr;
};

// Scales and shifts its normalised input by parameters of this shape, which begin as ones and zeros.
class Affine : public Module {
 protected:
  explicit Affine(const Shape& shape)
      : weight_(&parameter("weight", shape, Initial::ones(), false)),
        bias_(&parameter("bias", shape, Initial::zeros(), false)) {}
  Parameter *weight_, *bias_;
};

// Batch normalisation over all axes but the last. forward(x, residual) adds the residual before the ReLU.
class BatchNorm2d : public Affine {
 public:
  explicit BatchNorm2d(std::int64_t channels, bool relu = false, double epsilon = 1e-5, double momentum = 0.1);
  Variable forward(const Variable& x) override { return forward(x, {}); }
  Variable forward(const Variable& x, const Variable& residual);
  Variable operator()(const Variable& x) { return Module::operator()(x); }
  Variable operator()(const Variable& x, const Variable& residual);

  // Replaces the batch_norm operation in training mode. Empty (the default) means the built-in one.
  using Operation =
      std::function<Variable(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                             Tensor& running_variance, const BatchNormOptions& options, const Variable& residual)>;
  void normalise_by(Operation operation) { in_training_ = std::move(operation); }

 private:
  BatchNormOptions options_;
  ModuleBuffer *running_mean_, *running_var_;
  Operation in_training_;
};

// Normalisation over groups of neighbouring channels within each picture: x [N, …, channels].
class GroupNorm : public Affine {
 public:
  GroupNorm(int groups, std::int64_t channels, double epsilon = 1e-5);
  Variable forward(const Variable& x) override { return group_norm(x, groups_, *weight_, *bias_, epsilon_); }

 private:
  int groups_;
  double epsilon_;
};

// Normalisation over the last axes of x, which have the sizes `shape`: LayerNorm({64}).
class LayerNorm : public Affine {
 public:
  explicit LayerNorm(const Shape& shape, double epsilon = 1e-5) : Affine(shape), epsilon_(epsilon) {}
  Variable forward(const Variable& x) override { return layer_norm(x, *weight_, *bias_, epsilon_); }

 private:
  double epsilon_;
};

template <Variable (*operation)(const Variable&, const Pool2dOptions&)>
class Pool2d : public Module {
 public:
  explicit Pool2d(const Pool2dOptions& options = {}) : options_(options) {}
  Variable forward(const Variable& x) override { return operation(x, options_); }

 private:
  Pool2dOptions options_;
};
class MaxPool2d : public Pool2d<max_pool2d> {
  using Pool2d::Pool2d;
};
class AveragePool2d : public Pool2d<average_pool2d> {
  using Pool2d::Pool2d;
};

// An operation of one input as a module.
template <Variable (*operation)(const Variable&)>
struct Activation : Module {
  Variable forward(const Variable& x) override { return operation(x); }
};
class ReLU : public Activation<relu> {};
class GELU : public Activation<gelu> {};
class SiLU : public Activation<silu> {};
class Tanh : public Activation<tanh> {};
class Sigmoid : public Activation<sigmoid> {};
class GlobalAveragePool : public Activation<global_average_pool> {};
class Flatten : public Activation<flatten> {};  // [N, H, W, C] → [N, H·W·C]

// x [N, …] of row numbers (i32) → [N, …, columns].
class Embedding : public Module {
 public:
  Embedding(std::int64_t rows, std::int64_t columns)
      : weight_(&parameter("weight", {rows, columns}, Initial::normal())) {}
  Variable forward(const Variable& x) override { return embedding(*weight_, x.value()); }

 private:
  Parameter* weight_;
};

class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5) : Module(draws_random_numbers), p_(p) {}
  Variable forward(const Variable& x) override { return training() ? dropout(x, p_, stream()) : x; }

 private:
  double p_;
};

}  // namespace tandem
