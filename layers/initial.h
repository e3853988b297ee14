// Initial values of parameters: the initialisers of torch.nn.init, with the same names. An Initial is a plain value,
// stored in a Parameter until FlatParameters draws the numbers:
//   for (auto& [name, p] : model.parameters())
//     if (p->shape.rank() == 4) p->initial = Initial::kaiming_normal(p->shape, {.mode = Fan::out});
// Weights are [out, in] or filters [out, kh, kw, in/groups]. The number drawn for element i of the flat vector depends
// only on (seed, i). For orthogonal, which draws a whole matrix, it depends on the seed and the position of the matrix.
#pragma once
#include <cstdint>
#include <span>

#include "core/shape.h"

namespace tandem {

enum class Nonlinearity { linear, sigmoid, tanh, relu, leaky_relu };
// The factor that preserves the variance through a nonlinearity. slope: the slope of leaky_relu for negative inputs.
double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);

enum class Fan { in, out };
// The number of inputs of one output, or of outputs that one input affects. Throws Error for fewer than two axes.
std::int64_t fan(const Shape& weight, Fan mode);

struct KaimingOptions {
  Fan mode = Fan::in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
  double slope = 0;  // of leaky_relu
};

struct Initial {
  enum class Kind { constant, uniform, normal, trunc_normal, orthogonal } kind = Kind::constant;
  double value = 0;          // constant: the value; normal and trunc_normal: the mean; orthogonal: the gain
  double std = 1;            // of normal and trunc_normal
  double low = 0, high = 1;  // uniform: in [low, high); trunc_normal: the bounds

  static Initial constant(double v) { return {.value = v}; }
  static Initial ones() { return constant(1); }
  static Initial zeros() { return constant(0); }
  static Initial uniform(double low = 0, double high = 1) { return {.kind = Kind::uniform, .low = low, .high = high}; }
  static Initial normal(double mean = 0, double std = 1) { return {.kind = Kind::normal, .value = mean, .std = std}; }
  // N(mean, std²) given that low ≤ x ≤ high.
  static Initial trunc_normal(double mean = 0, double std = 1, double low = -2, double high = 2) {
    return {.kind = Kind::trunc_normal, .value = mean, .std = std, .low = low, .high = high};
  }
  // Glorot and Bengio 2010: variance gain²·2/(fan in + fan out).
  static Initial xavier_uniform(const Shape& weight, double gain = 1);
  static Initial xavier_normal(const Shape& weight, double gain = 1);
  // He et al. 2015: variance gain²/fan.
  static Initial kaiming_uniform(const Shape& weight, const KaimingOptions& options = {});
  static Initial kaiming_normal(const Shape& weight, const KaimingOptions& options = {});
  // Saxe et al. 2013: orthonormal rows (or columns, if there are fewer of these) times gain; axes after the first count
  // as one axis.
  static Initial orthogonal(double gain = 1) { return {.kind = Kind::orthogonal, .value = gain}; }
  // PyTorch's default for the weight and the bias of Linear and Conv2d: U(−1/√fan_in, 1/√fan_in).
  static Initial fan_in_uniform(std::int64_t fan_in);
};

// Elements [from, from + out.size()) of a parameter of this shape, whose first element is element `begin` of the whole
// model's flat vector. Throws Error for a shape that the initialiser does not support.
void draw(const Initial& how, const Shape& shape, std::uint64_t seed, std::int64_t begin, std::span<double> out,
          int threads = 1, std::int64_t from = 0);

}  // namespace tandem
