// AdamW and Adam: two running means, of the gradient and of its square. Both begin at zero; the corrections compensate
// for this.
#include <cmath>

#include "layers/optim/update.h"

namespace tandem {
namespace {

// Runs for one index. check_gradients() has already incremented the step number.
template <class T>
struct Corrections {
  const StepState* state;
  double beta1, beta2;
  T* out;
  TANDEM_HD void operator()(std::int64_t) const {
    if (state->not_finite) return;
    out[0] = T(1 / (1 - std::pow(beta1, double(state->step))));
    out[1] = T(1 / std::sqrt(1 - std::pow(beta2, double(state->step))));
  }
};

template <class T, bool decoupled>
struct UpdateAdamW {
  const StepState* state;
  const float* rates;  // learning-rate scale, weight decay per block of 64
  T beta1, beta2, epsilon;
  const T *corrections, *g;
  T *w, *m, *v;
  TANDEM_HD void operator()(std::int64_t i) const {
    const float* r = rates + i / FlatParameters::alignment * 2;
    T rate = T(state->learning_rate) * T(r[0]), gradient = g[i] * T(state->gradient_scale);
    if (!decoupled) gradient += T(r[1]) * w[i];
    T moment = beta1 * m[i] + (1 - beta1) * gradient;
    T square = beta2 * v[i] + (1 - beta2) * gradient * gradient;
    m[i] = moment;
    v[i] = square;
    w[i] = w[i] * (decoupled ? 1 - rate * T(r[1]) : T(1)) -
           rate * corrections[0] * moment / (std::sqrt(square) * corrections[1] + epsilon);
  }
};

}  // namespace

AdamW::AdamW(const AdamWOptions& o)
    : Optimizer(o.learning_rate, o.weight_decay, o.decay_everything, {"moment", "square"}), options_(o) {
  require(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "AdamW: the betas ", o.beta1, " and ", o.beta2,
          " must be at least 0 and below 1");
  positive("AdamW: epsilon", o.epsilon);
}

void AdamW::allocate() { corrections_ = Tensor::zeros(flat_->backend(), {2}, flat_->values.dtype()); }

void AdamW::apply(Range range) {
  dispatch_wide(flat().values.dtype(), "AdamW", [&]<class T> {
    launch(flat_->backend(), 1,
           Corrections<T>{device_state(), options_.beta1, options_.beta2, corrections_.write<T>()});
    auto run = [&]<bool decoupled> {
      update_blocks(
          *this, range,
          UpdateAdamW<T, decoupled>{device_state(), rates_.data<float>(), T(options_.beta1), T(options_.beta2),
                                    T(options_.epsilon), corrections_.data<T>(), flat_->gradients.data<T>(),
                                    flat_->values.write<T>(), vector<T>(0), vector<T>(1)});
    };
    options_.decoupled ? run.template operator()<true>() : run.template operator()<false>();
  });
}

}  // namespace tandem
