// RMSprop: each gradient is divided by the root of a running mean of its square.
#include <cmath>

#include "layers/optim/update.h"

namespace tandem {
namespace {

template <class T, bool momentum>
struct UpdateRMSprop {
  const StepState* state;
  const float* rates;  // learning-rate scale, weight decay per block of 64
  T alpha, epsilon, mu;
  const T* g;
  T *w, *s, *v;
  TANDEM_HD void operator()(std::int64_t i) const {
    const float* r = rates + i / FlatParameters::alignment * 2;
    const T gradient = g[i] * T(state->gradient_scale) + T(r[1]) * w[i];
    const T square = alpha * s[i] + (1 - alpha) * gradient * gradient;
    s[i] = square;
    T direction = gradient / (std::sqrt(square) + epsilon);
    if (momentum) v[i] = direction = mu * v[i] + direction;
    w[i] -= T(state->learning_rate) * T(r[0]) * direction;
  }
};

}  // namespace

RMSprop::RMSprop(const RMSpropOptions& options)
    : Optimizer(options.learning_rate, options.weight_decay, options.decay_everything), options_(options) {
  require(options.alpha >= 0 && options.alpha < 1 && options.momentum >= 0 && options.momentum < 1, "RMSprop: alpha ",
          options.alpha, " and momentum ", options.momentum, " must be at least 0 and below 1");
  require(options.epsilon > 0 && std::isfinite(options.epsilon), "RMSprop: epsilon ", options.epsilon,
          " must be finite and positive");
}

void RMSprop::allocate() {
  square_ = Tensor::like(flat_->values);
  square_.fill(0);
  if (options_.momentum > 0) velocity_ = square_.clone();
}

std::vector<std::pair<std::string, Tensor>> RMSprop::vectors() const {
  check_bound();
  if (!velocity_.defined()) return {{"square", square_}};
  return {{"square", square_}, {"velocity", velocity_}};
}

void RMSprop::apply(Range range) {
  check_range(range);
  dispatch_wide(flat_->values.dtype(), "RMSprop", [&]<class T> {
    auto run = [&]<bool momentum> {
      update_blocks(
          *flat_, range,
          UpdateRMSprop<T, momentum>{device_state(), rates_.data<float>(), T(options_.alpha), T(options_.epsilon),
                                     T(options_.momentum), flat_->gradients.data<T>(), flat_->values.write<T>(),
                                     square_.write<T>(), momentum ? velocity_.write<T>() : nullptr});
    };
    options_.momentum > 0 ? run.template operator()<true>() : run.template operator()<false>();
  });
}

}  // namespace tandem
