// LARS. The norms of all weight tensors and of their gradients come from one pass over the two flat vectors, which leaves two
// sums per block of 64, and one over these sums, which adds up each segment's (squares.h): two launches for any number of
// tensors.
#include <cmath>

#include "layers/optim/squares.h"
#include "layers/optim/update.h"

namespace tandem {
namespace {

static_assert(square_block == ParameterSpace::alignment);

template <class T>
struct TotalSquares {
  std::int64_t segments;
  T* sums;
  TANDEM_HD void operator()(std::int64_t) const {
    double total = 0;
    for (std::int64_t s = 0; s < segments; s++) total += double(sums[2 + 2 * s]);
    sums[0] = T(total);
  }
};

template <class T>
struct UpdateLARS {
  const StepState* state;
  const float* rates;  // learning-rate scale, weight decay per block of 64
  const std::int32_t* segment;
  const T* sums;
  T trust, mu;
  const T* g;
  T *w, *v;
  T rate = 0, decay = 0;
  TANDEM_HD void begin(std::int64_t block) {
    rate = T(state->learning_rate) * T(rates[2 * block]);
    decay = T(rates[2 * block + 1]);
    if (segment[block] < 0) return;
    const T* s = sums + 1 + 2 * segment[block];
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

LARS::LARS(const LARSOptions& options) : Optimizer(options.learning_rate, options.weight_decay), options_(options) {
  require(options.momentum >= 0 && options.momentum < 1, "LARS: momentum ", options.momentum,
          " must be at least 0 and below 1");
  require(options.trust > 0 && std::isfinite(options.trust), "LARS: the trust coefficient ", options.trust,
          " must be finite and positive");
}

void LARS::allocate() {
  Backend& backend = space_->backend();
  const DType dtype = space_->values.dtype();
  const std::int64_t blocks = space_->elements() / ParameterSpace::alignment;
  const std::int64_t count = std::int64_t(space_->segments().size());
  std::vector<double> bounds, segment(blocks, -1);
  for (const Segment& s : space_->segments()) {
    const std::int64_t first = s.local_begin / ParameterSpace::alignment;
    const std::int64_t last = (s.local_begin + s.length + ParameterSpace::alignment - 1) / ParameterSpace::alignment;
    if (s.decay) std::fill(segment.begin() + first, segment.begin() + last, double(bounds.size() / 2));
    bounds.push_back(double(first));
    bounds.push_back(double(last));
  }
  bounds_ = Tensor::of(backend, {count, 2}, bounds, DType::i32);
  adaptive_ = Tensor::of(backend, {blocks}, segment, DType::i32);
  partial_ = Tensor::zeros(backend, {blocks, 2}, dtype);
  sums_ = Tensor::zeros(backend, {1 + 2 * count}, dtype);
  velocity_ = Tensor::zeros(backend, {space_->elements()}, dtype);
}

std::vector<std::pair<std::string, Tensor>> LARS::vectors() const {
  check_bound();
  return {{"velocity", velocity_}};
}

void LARS::measure(Range range, bool add) {
  check_range(range);
  const std::int64_t first = range.begin / ParameterSpace::alignment, last = range.end / ParameterSpace::alignment;
  const std::int64_t count = bounds_.extent(0);
  dispatch_wide(space_->values.dtype(), "LARS", [&]<class T> {
    launch_sums<16>(
        space_->backend(), last - first,
        SquaresOfBlocks<T>{first, space_->values.data<T>(), space_->gradients.data<T>(), partial_.write<T>()});
    launch_sums<256>(
        space_->backend(), count,
        SquaresOfSegments<T>{first, last, add, bounds_.data<std::int32_t>(), partial_.data<T>(), sums_.write<T>()});
    launch(space_->backend(), 1, TotalSquares<T>{count, sums_.write<T>()});
  });
}

void LARS::apply(Range range) {
  check_range(range);
  dispatch_wide(space_->values.dtype(), "LARS", [&]<class T> {
    update_blocks(*space_, range,
                  UpdateLARS<T>{device_state(), rates_.data<float>(), adaptive_.data<std::int32_t>(), sums_.data<T>(),
                                T(options_.trust), T(options_.momentum), space_->gradients.data<T>(),
                                space_->values.write<T>(), velocity_.write<T>()});
  });
}

}  // namespace tandem
