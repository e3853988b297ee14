// LARS. One launch over the two flat vectors computes the squared norms of weights and gradients for each block of 64.
// A second launch adds those of each parameter range (squared_norms.h). Two launches suffice for any number of tensors.
#include <cmath>

#include "layers/optim/squared_norms.h"
#include "layers/optim/update.h"

namespace tandem {
namespace {

static_assert(square_block == FlatParameters::alignment);

template <class T>
struct TotalSquaredNorm {
  std::int64_t parameters;
  T* sums;
  TANDEM_HD void operator()(std::int64_t) const {
    double total = 0;
    for (std::int64_t s = 0; s < parameters; s++) total += double(sums[2 + 2 * s]);
    sums[0] = T(total);
  }
};

template <class T>
struct UpdateLARS {
  const StepState* state;
  const float* rates;  // learning-rate scale, weight decay per block of 64
  const std::int32_t* parameter;
  const T* sums;
  T trust, mu;
  const T* g;
  T *w, *v;
  T rate = 0, decay = 0;
  TANDEM_HD void begin(std::int64_t block) {
    rate = T(state->learning_rate) * T(rates[2 * block]);
    decay = T(rates[2 * block + 1]);
    if (parameter[block] < 0) return;
    const T* s = sums + 1 + 2 * parameter[block];
    T norm_w = std::sqrt(s[0]), norm_g = std::sqrt(s[1]) * T(state->gradient_scale);
    if (norm_w > 0 && norm_g > 0) rate *= trust * norm_w / (norm_g + decay * norm_w);
  }
  TANDEM_HD void operator()(std::int64_t i) const {
    T velocity = mu * v[i] + rate * (g[i] * T(state->gradient_scale) + decay * w[i]);
    v[i] = velocity;
    w[i] -= velocity;
  }
};

}  // namespace

LARS::LARS(const LARSOptions& o) : Optimizer(o.learning_rate, o.weight_decay, false, {"velocity"}), options_(o) {
  below_one("LARS: momentum", o.momentum);
  positive("LARS: the trust coefficient", o.trust);
}

void LARS::allocate() {
  Backend& backend = flat_->backend();
  const DType dtype = flat_->values.dtype();
  const std::int64_t blocks = flat_->numel() / FlatParameters::alignment;
  const std::int64_t count = std::int64_t(flat_->parameter_ranges().size());
  std::vector<double> bounds, parameter(blocks, -1);
  for (const ParameterRange& s : flat_->parameter_ranges()) {
    const std::int64_t first = s.local_begin / FlatParameters::alignment;
    const std::int64_t last = (s.local_begin + s.length + FlatParameters::alignment - 1) / FlatParameters::alignment;
    if (s.decay) std::fill(parameter.begin() + first, parameter.begin() + last, double(bounds.size() / 2));
    bounds.push_back(double(first));
    bounds.push_back(double(last));
  }
  bounds_ = Tensor::of(backend, {count, 2}, bounds, DType::i32);
  adaptive_ = Tensor::of(backend, {blocks}, parameter, DType::i32);
  partial_ = Tensor::zeros(backend, {blocks, 2}, dtype);
  sums_ = Tensor::zeros(backend, {1 + 2 * count}, dtype);
}

void LARS::measure(Range range, bool add) {
  require_blocks(*this, range);
  const std::int64_t first = range.begin / FlatParameters::alignment, last = range.end / FlatParameters::alignment;
  const std::int64_t count = std::int64_t(flat().parameter_ranges().size());
  dispatch_wide(flat().values.dtype(), "LARS", [&]<class T> {
    launch_sums<16>(
        flat_->backend(), last - first,
        SquaredNormsOfBlocks<T>{first, flat_->values.data<T>(), flat_->gradients.data<T>(), partial_.write<T>()});
    launch_sums<256>(
        flat_->backend(), count,
        SquaredNormsOfRanges<T>{first, last, add, bounds_.data<std::int32_t>(), partial_.data<T>(), sums_.write<T>()});
    launch(flat_->backend(), 1, TotalSquaredNorm<T>{count, sums_.write<T>()});
  });
}

void LARS::apply(Range range) {
  dispatch_wide(flat().values.dtype(), "LARS", [&]<class T> {
    update_blocks(*this, range,
                  UpdateLARS<T>{device_state(), rates_.data<float>(), adaptive_.data<std::int32_t>(), sums_.data<T>(),
                                T(options_.trust), T(options_.momentum), flat_->gradients.data<T>(),
                                flat_->values.write<T>(), vector<T>(0)});
  });
}

}  // namespace tandem
