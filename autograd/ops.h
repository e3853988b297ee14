// The differentiable operations. Pictures are [N, H, W, C], filters [O, H, W, I]; axes may be negative (−1 is the
// last). Every function checks its arguments and throws Error naming the operation and the shapes. Arithmetic needs
// operands of equal type (cast one of them); parameters are f32 also when pictures are bf16.
#pragma once
#include <span>
#include <vector>

#include "autograd/variable.h"

namespace tandem {

// Axes of a shape, as arguments: {0, 2}, a vector, or one axis.
struct Axes : std::span<const int> {
  Axes() = default;  // none; without this constructor nvcc 13 turns an argument {} into {0}
  Axes(std::initializer_list<int> axes) : span(axes.begin(), axes.size()) {}
  Axes(const std::vector<int>& axes) : span(axes) {}
  Axes(const int& axis) : span(&axis, 1) {}
};

// ---- element-wise, one input (unary.kernel.cpp) ---------------------------------------------------------------------
Variable relu(const Variable& x);
Variable leaky_relu(const Variable& x, double slope = 0.01);
Variable elu(const Variable& x, double alpha = 1);
Variable gelu(const Variable& x);       // x·Φ(x)
Variable gelu_tanh(const Variable& x);  // the tanh approximation
Variable silu(const Variable& x);       // x·sigmoid(x)
Variable hardswish(const Variable& x);  // x·clamp(x + 3, 0, 6)/6
Variable softplus(const Variable& x);
Variable sigmoid(const Variable& x);
Variable tanh(const Variable& x);
Variable exp(const Variable& x);
Variable log(const Variable& x);
Variable sqrt(const Variable& x);
Variable rsqrt(const Variable& x);
Variable reciprocal(const Variable& x);
Variable square(const Variable& x);
Variable abs(const Variable& x);
Variable neg(const Variable& x);
Variable sin(const Variable& x);
Variable cos(const Variable& x);
Variable clamp(const Variable& x, double low, double high);
// factor·x + shift; the default −0 keeps the sign of a zero
Variable scale(const Variable& x, double factor, double shift = -0.0);
Variable div_by(const Variable& x, double divisor);  // x / divisor, correctly rounded: scale(x, 1 / divisor) is not
Variable power(const Variable& x, double exponent);
Variable cast(const Variable& x, DType dtype);

// ---- element-wise, two inputs, broadcast as in NumPy (binary.kernel.cpp) --------------------------------------------
Variable add(const Variable& a, const Variable& b);
Variable sub(const Variable& a, const Variable& b);
Variable mul(const Variable& a, const Variable& b);
Variable div(const Variable& a, const Variable& b);
Variable maximum(const Variable& a, const Variable& b);  // in a tie each input gets half of the gradient
Variable minimum(const Variable& a, const Variable& b);
Variable pow(const Variable& a, const Variable& b);  // a > 0

Shape broadcast_shape(const char* op, const Shape& a, const Shape& b);  // of the result; its errors name op

// ---- comparisons (compare.kernel.cpp), broadcast too: u8, 1 where true. A NaN is unequal to every number ------------
Tensor eq(const Variable& a, const Variable& b);
Tensor ne(const Variable& a, const Variable& b);
Tensor lt(const Variable& a, const Variable& b);
Tensor le(const Variable& a, const Variable& b);
Tensor gt(const Variable& a, const Variable& b);
Tensor ge(const Variable& a, const Variable& b);
Variable where(const Tensor& mask, const Variable& a, const Variable& b);  // a where the mask (u8) is not 0, else b

inline Variable operator+(const Variable& a, const Variable& b) { return add(a, b); }
inline Variable operator-(const Variable& a, const Variable& b) { return sub(a, b); }
inline Variable operator*(const Variable& a, const Variable& b) { return mul(a, b); }
inline Variable operator/(const Variable& a, const Variable& b) { return div(a, b); }
inline Variable operator-(const Variable& a) { return neg(a); }
inline Variable operator*(const Variable& a, double s) { return scale(a, s); }
inline Variable operator*(double s, const Variable& a) { return scale(a, s); }
inline Variable operator+(const Variable& a, double s) { return scale(a, 1, s); }
inline Variable operator-(const Variable& a, double s) { return scale(a, 1, -s); }
inline Variable operator/(const Variable& a, double s) { return div_by(a, s); }

// ---- reductions (reduce.kernel.cpp); no axes: over all axes, with a scalar result -----------------------------------
Variable sum(const Variable& x, Axes axes = {}, bool keepdim = false);
Variable mean(const Variable& x, Axes axes = {}, bool keepdim = false);
Variable max(const Variable& x, Axes axes = {}, bool keepdim = false);  // ties share the gradient

// ---- shapes (shape.kernel.cpp) --------------------------------------------------------------------------------------
Variable reshape(const Variable& x, const Shape& shape);                         // shares memory
Variable reshape(const Variable& x, std::initializer_list<std::int64_t> shape);  // one size may be −1: inferred
Variable flatten(const Variable& x);                // [N, …] → [N, product]; shares memory
Variable squeeze(const Variable& x, int axis);      // without that axis, which has size 1
Variable unsqueeze(const Variable& x, int axis);    // with an axis of size 1 at that position
Variable transpose(const Variable& x, Axes order);  // y's axis i is x's axis order[i]
Variable slice(const Variable& x, int axis, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
Variable cat(std::span<const Variable> parts, int axis);
Variable stack(std::span<const Variable> parts, int axis);  // along a new axis
// He et al.'s parameter-free shortcut: every stride-th element of both spatial axes, and `widen` zero channels on both
// sides. x[N,H,W,C] → [N, ⌈H/stride⌉, ⌈W/stride⌉, C + 2·widen]: two slices and a pad.
Variable pad_shortcut(const Variable& x, int stride, std::int64_t widen);
Variable pad(const Variable& x, int axis, std::int64_t before, std::int64_t after, double value = 0);

// ---- matrices (matrix.cpp) ------------------------------------------------------------------------------------------
// […,m,k]·[…,k,n]; the leading axes are batch axes, and are broadcast as in NumPy
Variable matmul(const Variable& a, const Variable& b);
// y[N, out] = relu?(x[N, in]·w[out, in]ᵀ + bias[out]); bias may be an empty Variable.
Variable linear(const Variable& x, const Variable& w, const Variable& bias = {}, bool relu = false);

// ---- convolution and pooling (convolution.cpp, pooling.cpp) ---------------------------------------------------------
struct Conv2dOptions {
  int stride = 1, padding = 0, dilation = 1, groups = 1;
  int padding_w = -1;  // −1: equal to padding
  bool relu = false;   // applied in the same pass over memory
};
// x[N,H,W,I], w[O,kh,kw,I/groups], bias[O] or empty → y[N,H',W',O].
Variable conv2d(const Variable& x, const Variable& w, const Variable& bias, const Conv2dOptions& options = {});

struct Pool2dOptions {
  int kernel_size = 2, stride = 0, padding = 0;  // stride 0: equal to kernel_size
  bool relu = false;                             // relu(max_pool(x)) in one pass; equals max_pool(relu(x))
};
Variable max_pool2d(const Variable& x, const Pool2dOptions& options = {});
Variable average_pool2d(const Variable& x, const Pool2dOptions& options = {});  // padding is not counted
Variable global_average_pool(const Variable& x);                                // [N,H,W,C] → [N,C]

// ---- normalisation (norm.cpp) ---------------------------------------------------------------------------------------
struct BatchNormOptions {
  double epsilon = 1e-5, momentum = 0.1;
  bool training = true;  // false: uses the running statistics and does not change them
  bool relu = false;
};
// y = relu?((x − mean)·gamma/√(var + ε) + beta + residual?), statistics over all axes but the last.
Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                    Tensor& running_variance, const BatchNormOptions& options = {}, const Variable& residual = {});

// ---- normalisation within a picture (group_norm.cpp); the same in training and evaluation ---------------------------
// y = x̂·gamma[C] + beta[C], x[N, …, C]; within each picture x̂ has mean 0 and variance 1 over the pixels and C/groups
// neighbouring channels. Wu and He 2018.
Variable group_norm(const Variable& x, int groups, const Variable& gamma, const Variable& beta, double epsilon = 1e-5);
// The same over the last axes, which are the axes of gamma and beta: over C alone with gamma[C]. Ba et al. 2016.
Variable layer_norm(const Variable& x, const Variable& gamma, const Variable& beta, double epsilon = 1e-5);

// ---- dropout (dropout.kernel.cpp) -----------------------------------------------------------------------------------
// Zeroes each element with probability p and scales the rest by 1/(1−p). layer is the number of the random stream: a
// module Dropout has its own number for its first call in a step; all other calls in a step are numbered in order. If a
// training loop supplies (seed, layer, epoch, picture), the random numbers depend on these, not on the position in the
// batch. If a loop does not supply them, each call draws new numbers from mode().seed.
inline constexpr std::uint32_t by_call = 1u << 20;
Variable dropout(const Variable& x, double p, std::uint32_t layer = by_call);

// ---- softmax (softmax.kernel.cpp) -----------------------------------------------------------------------------------
Variable softmax(const Variable& x, int axis = -1);
Variable log_softmax(const Variable& x, int axis = -1);

// ---- elements by their index (index.kernel.cpp); indices are i32 ----------------------------------------------------
// y has the shape of index, which equals the shape of x except along `axis`: y[i, j] = x[i, index[i, j]] with axis 1.
Variable gather(const Variable& x, int axis, const Tensor& index);
Variable embedding(const Variable& weight, const Tensor& index);  // weight[rows, columns] → [index's shape…, columns]
// The index of the largest element along an axis. A NaN counts as larger than every number; in a tie the first index.
Tensor argmax(const Variable& x, int axis = -1, bool keep_axis = false);
struct TopKResult {
  Variable values;
  Tensor places;
};
TopKResult topk(const Variable& x, std::int64_t k, int axis = -1, bool largest = true);  // sorted, ties by index

// ---- losses (loss.kernel.cpp, loss.cpp); the mean, in f32, or in f64 if x is f64 ------------------------------------
// Over all elements; x and target have one shape.
Variable mse_loss(const Variable& x, const Variable& target);  // (x − t)²
Variable l1_loss(const Variable& x, const Variable& target);   // |x − t|
// d²/2 up to |d| = δ, then δ·(|d| − δ/2)
Variable huber_loss(const Variable& x, const Variable& target, double delta = 1);
Variable bce_with_logits(const Variable& x, const Variable& target);  // −t·log σ(x) − (1 − t)·log(1 − σ(x))
// Mean over rows of −Σ_c q_c·log_softmax(x)_c, q = (1−ε)·onehot + ε/classes. labels i32 [rows]. correct, if given, is
// incremented by the number of rows whose largest logit is that of the label.
Variable cross_entropy(const Variable& logits, const Tensor& labels, double label_smoothing = 0,
                       Tensor* correct = nullptr);

// ---- checking a gradient (gradient_check.cpp) -----------------------------------------------------------------------
struct GradientCheck {
  double step = 1e-5, tolerance = 1e-6;  // relative to the largest gradient of the input
};
struct GradientReport {
  double worst = 0;                        // largest |analytic − numeric| / scale
  std::int64_t compared = 0, skipped = 0;  // skipped: the one-sided slopes differ (a kink lies within the step)
  std::string text;                        // a summary in one line; names the worst element
  bool passed = true;
};
// Compares backward() of f with central differences, in f64 on the reference backend, for every element of every input.
// f may return any shape: a sum with fixed random weights makes it a scalar.
GradientReport check_gradient(const std::function<Variable(std::span<const Variable>)>& f,
                              std::span<const Tensor> inputs, const GradientCheck& options = {});

}  // namespace tandem
