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

RMSprop::RMSprop(const RMSpropOptions& o)
    : Optimizer(o.learning_rate, o.weight_decay, o.decay_everything,
                o.momentum > 0 ? std::vector<std::string>{"square", "velocity"} : std::vector<std::string>{"square"}),
      options_(o) {
  require(o.alpha >= 0 && o.alpha < 1 && o.momentum >= 0 && o.momentum < 1, "RMSprop: alpha ", o.alpha,
          " and momentum ", o.momentum, " must be at least 0 and below 1");
  positive("RMSprop: epsilon", o.epsilon);
}

void RMSprop::apply(Range range) {
  dispatch_wide(flat().values.dtype(), "RMSprop", [&]<class T> {
    auto run = [&]<bool momentum> {
      update_blocks(*this, range,
                    UpdateRMSprop<T, momentum>{device_state(), rates_.data<float>(), T(options_.alpha),
                                               T(options_.epsilon), T(options_.momentum), flat_->gradients.data<T>(),
                                               flat_->values.write<T>(), vector<T>(0), vector<T>(1)});
    };
    options_.momentum > 0 ? run.template operator()<true>() : run.template operator()<false>();
  });
}

}  // namespace tandem
