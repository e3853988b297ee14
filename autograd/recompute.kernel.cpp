#include "autograd/recompute.h"

#include <cstring>
#include <map>
#include <string_view>

#include "autograd/ops.h"
#include "core/launch.h"

namespace tandem {
namespace {

using Sources = std::span<const Tensor>;

double attribute(const Attributes& all, std::string_view name, std::size_t i = 0) {
  for (const auto& [key, values] : all)
    if (name == key) return values.at(i);
  fail("an operation is computed again without its attribute ", std::string(name));
}

template <Variable (*operation)(const Variable&)>
Tensor unary(const Attributes&, Sources s) {
  return operation(Variable(s[0])).value();
}

// Statistics are those that the first run stored: the running ones are not touched again.
Tensor batch_norm_again(const Attributes& a, Sources s) {
  const Tensor &x = s[0], &gamma = s[1], &beta = s[2], &residual = s[3], &mean = s[4], &inverse = s[5];
  Tensor y = Tensor::like(x);
  const std::int64_t channels = x.size(-1);
  const NormShape shape{.rows = x.numel() / channels,
                        .channels = channels,
                        .epsilon = attribute(a, "epsilon"),
                        .relu = attribute(a, "relu") != 0};
  y.backend().batch_norm_again(shape, x, residual.defined() ? &residual : nullptr, gamma, beta, mean, inverse, y);
  return y;
}

Tensor max_pool_again(const Attributes& a, Sources s) {
  return max_pool2d(Variable(s[0]), {.kernel_size = int(attribute(a, "window")),
                                     .stride = int(attribute(a, "stride")),
                                     .padding = int(attribute(a, "padding")),
                                     .relu = attribute(a, "relu") != 0}).value();
}

Tensor average_pool_again(const Attributes& a, Sources s) {
  return average_pool2d(Variable(s[0]), {.kernel_size = int(attribute(a, "window")),
                                         .stride = int(attribute(a, "stride")),
                                         .padding = int(attribute(a, "padding"))}).value();
}

template <class T>
struct DropAgain {  // the product of dropout.kernel.cpp, from the draws that it kept
  float keep_scale;
  const std::uint8_t* mask;
  const T* x;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] = T(Accumulator<T>(x[i]) * Accumulator<T>(mask[i] ? keep_scale : 0)); }
};

Tensor dropout_again(const Attributes& a, Sources s) {
  Tensor y = Tensor::like(s[0]);
  dispatch(y.dtype(), "dropout", [&]<class T> {
    launch(y.backend(), y.numel(),
           DropAgain<T>{float(attribute(a, "keep_scale")), s[1].data<std::uint8_t>(), s[0].data<T>(), y.write<T>()});
  });
  return y;
}

const std::map<std::string_view, Recomputation>& table() {
  static const std::map<std::string_view, Recomputation> all{
      {"batch_norm", {{0, 1, 2, 3}, {3, 4}, batch_norm_again, 2}},
      {"max_pool2d", {{0}, {}, max_pool_again}},
      {"average_pool2d", {{0}, {}, average_pool_again}},
      {"dropout", {{0}, {0}, dropout_again}},
      {"relu", {{0}, {}, unary<relu>}},
      {"gelu", {{0}, {}, unary<gelu>}},
      {"gelu_tanh", {{0}, {}, unary<gelu_tanh>}},
      {"silu", {{0}, {}, unary<silu>}},
      {"hardswish", {{0}, {}, unary<hardswish>}},
      {"softplus", {{0}, {}, unary<softplus>}},
      {"sigmoid", {{0}, {}, unary<sigmoid>}},
      {"tanh", {{0}, {}, unary<tanh>}},
      {"square", {{0}, {}, unary<square>}},
      {"abs", {{0}, {}, unary<abs>}},
      {"leaky_relu", {{0}, {}, [](const Attributes& a, Sources s) { return leaky_relu(Variable(s[0]), attribute(a, "slope")).value(); }}},
      {"elu", {{0}, {}, [](const Attributes& a, Sources s) { return elu(Variable(s[0]), attribute(a, "alpha")).value(); }}},
      {"clamp", {{0}, {}, [](const Attributes& a, Sources s) {
         return clamp(Variable(s[0]), attribute(a, "low"), attribute(a, "high")).value();
       }}},
      {"scale", {{0}, {}, [](const Attributes& a, Sources s) {
         return scale(Variable(s[0]), attribute(a, "factor"), attribute(a, "shift")).value();
       }}},
      {"add", {{0, 1}, {}, [](const Attributes&, Sources s) { return add(Variable(s[0]), Variable(s[1])).value(); }}},
      {"mul", {{0, 1}, {}, [](const Attributes&, Sources s) { return mul(Variable(s[0]), Variable(s[1])).value(); }}},
  };
  return all;
}

}  // namespace

const Recomputation* recomputation_of(const Node& node) {
  const auto found = table().find(node.op);
  if (found == table().end()) return nullptr;
  if (found->second.compute == average_pool_again && node.shape.rank() != 4) return nullptr;  // over all pixels: a window of two sides
  return &found->second;
}

}  // namespace tandem
