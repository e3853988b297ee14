// Dropout. The elements to zero are drawn from counters. A picture loses the same elements in an epoch, whatever its
// position in the batch, the number of ranks or threads, and whether the run was resumed.
#include "autograd/ops.h"
#include "core/launch.h"
#include "core/random.h"
#include "core/step.h"

namespace tandem {
namespace {

// Four elements of one row per index: one Philox block gives four words.
template <class T>
struct Drop {
  std::int64_t row_length, groups;  // groups of four in a row
  std::uint32_t stream, threshold;  // an element is dropped if its word is below the threshold
  float keep_scale;
  const StepState* state;  // null: seed and epoch below
  std::uint64_t seed;
  std::uint32_t epoch;
  const std::int32_t* samples;  // null: the row number
  const T* x;
  T* y;
  std::uint8_t* mask;
  TANDEM_HD void operator()(std::int64_t i) const {
    std::int64_t row = i / groups, group = i % groups, base = row * row_length;
    std::uint32_t sample = samples ? std::uint32_t(samples[row]) : std::uint32_t(row);
    Words words =
        Philox(state ? state->seed : seed, stream, state ? state->epoch : epoch, sample).block(std::uint32_t(group));
    for (int k = 0; k < 4; k++) {
      std::int64_t e = group * 4 + k;
      if (e >= row_length) break;
      bool kept = words.w[k] >= threshold;
      mask[base + e] = kept;
      // A NaN stays visible even if it is dropped
      y[base + e] = T(Accumulator<T>(x[base + e]) * Accumulator<T>(kept ? keep_scale : 0));
    }
  }
};

// y = x·mask, for the gradient, and when the result is computed again.
template <class T>
struct DropMasked {
  float keep_scale;
  bool add;
  const std::uint8_t* mask;
  const T* x;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const {
    using A = Accumulator<T>;
    A v = A(x[i]) * A(mask[i] ? keep_scale : 0);
    y[i] = T(add ? A(y[i]) + v : v);
  }
};
void drop_masked(float keep_scale, const Tensor& mask, const Tensor& x, Tensor& y, bool add) {
  dispatch(x.dtype(), "dropout", [&]<class T> {
    launch(x.backend(), x.numel(),
           DropMasked<T>{keep_scale, add, mask.data<std::uint8_t>(), x.data<T>(), y.write<T>()});
  });
}

struct DropoutNode : Node {
  static constexpr auto name = "dropout";
  float keep_scale;
  explicit DropoutNode(float s) : Node(name), keep_scale(s) {}
  Attributes attributes() const override { return {{"keep_scale", {double(keep_scale)}}}; }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    auto [dx, add] = slots[0].destination(dy.backend(), dy.shape(), dy.dtype());
    drop_masked(keep_scale, kept(0), dy, *dx, add);
  }
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value(), saved[0].tensor}, [scale = keep_scale](std::span<const Tensor> s) {
              Tensor y = Tensor::like(s[0]);
              drop_masked(scale, s[1], s[0], y, false);
              return y;
            }};
  }
};

}  // namespace

Variable dropout(const Variable& x, double p, std::uint32_t layer) {
  require(p >= 0 && p < 1, "dropout: p = ", p, " must be at least 0 and below 1");
  require(x.rank() >= 1, "dropout: needs at least one axis");
  if (p == 0 || x.value().numel() == 0) return x;
  Mode& m = mode();
  Tensor y = Tensor::like(x.value()), mask(x.backend(), x.shape(), DType::u8);
  std::int64_t row = x.value().numel() / x.size(0), groups = (row + 3) / 4;
  bool known = m.samples.defined() && m.samples.numel() == x.size(0);
  float keep_scale = float(1 / (1 - p));
  // The training loop counts steps and epochs; otherwise the number of the call replaces the epoch
  const bool loop = m.step_state.defined();
  // A further call of the module in the same step gets another mask
  if (loop && layer != by_call && !m.draws.first_of(layer)) layer = by_call;
  std::uint32_t call = 0;
  if (!loop || layer == by_call) call = std::uint32_t(m.draws.unnumbered++);
  if (loop && layer == by_call) layer += call;
  dispatch(x.dtype(), "dropout", [&]<class T> {
    launch(x.backend(), x.size(0) * groups,
           Drop<T>{row, groups, std::uint32_t(Stream::dropout) + layer, std::uint32_t(p * 4294967296.0), keep_scale,
                   loop ? reinterpret_cast<const StepState*>(m.step_state.raw()) : nullptr, m.seed, call,
                   known ? m.samples.data<std::int32_t>() : nullptr, x.value().data<T>(), y.write<T>(),
                   mask.write<std::uint8_t>()});
  });
  return record<DropoutNode>(y, {&x}, {mask}, keep_scale);
}

}  // namespace tandem
