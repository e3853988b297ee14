#include "layers/optim/ema.h"

#include "core/launch.h"

namespace tandem {
namespace {

template <class T>
struct UpdateAverage {
  const StepState* state;
  double decay;
  const T* w;
  T* average;
  TANDEM_HD void operator()(std::int64_t block) const {
    if (state->not_finite) return;
    double t = double(state->step), early = (1 + t) / (10 + t);
    T share = T(1 - (early < decay ? early : decay));
#pragma omp simd
    for (std::int64_t i = block * FlatParameters::alignment; i < (block + 1) * FlatParameters::alignment; i++)
      average[i] += share * (w[i] - average[i]);
  }
};

template <class T>
struct Swap {
  T *a, *b;
  TANDEM_HD void operator()(std::int64_t i) const {
    T was = a[i];
    a[i] = b[i];
    b[i] = was;
  }
};

}  // namespace

Ema::Ema(FlatParameters& flat, double decay)
    : values(flat.values.clone()), buffers(flat.buffers.clone()), flat_(flat), decay_(decay) {
  require(decay > 0 && decay < 1, "ema: the decay ", decay, " must lie between 0 and 1");
}

void Ema::update(const Optimizer& optimizer) {
  auto* state = reinterpret_cast<const StepState*>(optimizer.state().raw());
  dispatch_wide(values.dtype(), "EMA", [&]<class T> {
    for (auto [from, to] : {std::pair{&flat_.values, &values}, {&flat_.buffers, &buffers}})
      launch_blocks(flat_.backend(), to->numel() / FlatParameters::alignment,
                    UpdateAverage<T>{state, decay_, from->template data<T>(), to->template write<T>()});
  });
}

void Ema::swap() {
  dispatch_wide(values.dtype(), "EMA", [&]<class T> {
    for (auto [a, b] : {std::pair{&flat_.values, &values}, {&flat_.buffers, &buffers}})
      launch(flat_.backend(), b->numel(), Swap<T>{a->template write<T>(), b->template write<T>()});
  });
  flat_.count_writes(flat_.all());
}

}  // namespace tandem
