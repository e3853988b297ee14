#include "dist/strategies/sync_batch_norm.h"

#include <cmath>

#include "core/backend.h"
#include "layers/layers.h"

namespace tandem {
namespace {

using Numbers = std::vector<double>;

Tensor tensor_of(const Tensor& like, const Numbers& values) {
  return Tensor::of(like.backend(), like.shape(), values, like.dtype());
}

// y = relu?((x − mean)·scale + shift + residual?): inference with a standard deviation of 1. The CPU's backward
// recomputes the mask of relu from the same scale and the same mean, to the bit.
void scale_and_shift(NormShape s, const Tensor& x, const Tensor& mean, const Numbers& scale, const Tensor& shift,
                     const Tensor* residual, bool relu, Tensor& y) {
  s.epsilon = 0;
  s.relu = relu;
  const Tensor one = Tensor::full(mean.backend(), mean.shape(), 1, mean.dtype());
  x.backend().batch_norm_inference(s, x, residual, tensor_of(mean, scale), shift, mean, one, y);
}

// Like BatchNormNode (autograd/norm.cpp), with other sums for dx:
//   dx = gamma·inverse·(g − Σg/N − x̂·Σg·x̂/N), over the N rows of all ranks.
struct SyncBatchNormNode : Node {
  static constexpr auto name = "sync_batch_norm";
  NormShape s;
  bool residual;
  double all_rows;
  std::shared_ptr<const GatherNumbers> ranks;
  SyncBatchNormNode(const NormShape& shape, bool r, double all, std::shared_ptr<const GatherNumbers> across)
      : Node(name), s(shape), residual(r), all_rows(all), ranks(std::move(across)) {}
  Attributes attributes() const override { return {{"epsilon", {s.epsilon}}, {"relu", {double(s.relu)}}}; }

  // inputs: x, gamma, beta, residual. saved: x, gamma, beta, mean, inverse standard deviation, y (residual and relu
  // only).
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &gamma = kept(1), &beta = kept(2), &mean = kept(3), &inverse = kept(4);
    // Computes the gradients from this rank's sums alone. Afterwards dx is corrected.
    Tensor dgamma = Tensor::like(gamma), dbeta = Tensor::like(beta), near, masked;
    Backend::NormGradients out{.dgamma = &dgamma, .dbeta = &dbeta};
    if (slots[0].wanted()) out.dx = &(near = Tensor::like(x));
    const bool wants_residual = residual && slots[3].wanted();
    if (wants_residual && s.relu) out.dresidual = &(masked = dy.unique() ? dy : Tensor::like(dy));
    dy.backend().batch_norm_backward(s, x, residual && s.relu ? &kept(5) : nullptr, dy, gamma, beta, mean, inverse,
                                     out);
    if (slots[0].wanted()) {
      const Numbers g = gamma.values(), inv = inverse.values(), b = dbeta.values(), a = dgamma.values();
      const std::size_t channels = g.size();
      Numbers mine = b;
      mine.insert(mine.end(), a.begin(), a.end());
      require(*ranks != nullptr, where(), ": its other ranks have left between forward and backward");
      const Numbers of_ranks = (*ranks)(mine);
      Numbers sum(2 * channels);
      for (std::size_t i = 0; i < of_ranks.size(); i++) sum[i % sum.size()] += of_ranks[i];
      Numbers scale(channels), shift(channels);
      const double rows = double(s.rows);
      for (std::size_t c = 0; c < channels; c++) {
        shift[c] = g[c] * inv[c] * (b[c] / rows - sum[c] / all_rows);
        scale[c] = g[c] * inv[c] * inv[c] * (a[c] / rows - sum[channels + c] / all_rows);
      }
      Tensor dx = Tensor::like(x);
      scale_and_shift(s, x, mean, scale, tensor_of(mean, shift), &near, false, dx);
      slots[0].accumulate(std::move(dx));
    }
    if (slots[1].wanted()) slots[1].accumulate(std::move(dgamma));
    if (slots[2].wanted()) slots[2].accumulate(std::move(dbeta));
    if (wants_residual) {
      if (s.relu) dy = Tensor();  // masked holds the memory now
      slots[3].accumulate(s.relu ? std::move(masked) : std::move(dy));
    }
  }
};

}  // namespace

Variable sync_batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                         Tensor& running_variance, const BatchNormOptions& o, const Variable& residual,
                         std::shared_ptr<const GatherNumbers> ranks) {
  require(x.rank() >= 2, "sync_batch_norm: input ", x.shape(), " needs a channel axis and at least one more");
  const std::int64_t channels = x.size(-1);
  NormShape s{
      .rows = x.value().numel() / channels, .channels = channels, .epsilon = o.epsilon, .momentum = 1, .relu = false};
  Tensor y = Tensor::like(x.value());
  const auto C = static_cast<std::size_t>(channels);
  // Over all ranks: the number of rows, and for each channel the mean and the sum of squared distances from it
  double all_rows = 0;
  Numbers all_means(C), all_squares(C);
  {
    // With a momentum of 1 the running statistics become this rank's mean and unbiased variance.
    const Tensor& p = gamma.value();
    Tensor local_mean = Tensor::zeros(p.backend(), p.shape(), p.dtype()), mean = Tensor::like(p),
           variance = Tensor::zeros(p.backend(), p.shape(), p.dtype()), inverse = Tensor::like(p);
    y.backend().batch_norm(s, x.value(), nullptr, p, beta.value(), local_mean, variance, y, mean, inverse);
    Numbers mine{double(s.rows)};
    for (double v : local_mean.values()) mine.push_back(v);
    for (double v : variance.values()) mine.push_back(v * double(s.rows - 1));
    const Numbers of_ranks = (*ranks)(mine);
    for (std::size_t at = 0; at < of_ranks.size(); at += mine.size()) {  // in pairs (Chan et al. 1979)
      const double n = of_ranks[at];
      all_rows += n;
      for (std::size_t c = 0; c < C && n > 0; c++) {
        const double d = of_ranks[at + 1 + c] - all_means[c];
        all_means[c] += d * n / all_rows;
        all_squares[c] += of_ranks[at + 1 + C + c] + d * d * n * (all_rows - n) / all_rows;
      }
    }
  }
  require(all_rows > 1, "sync_batch_norm: one value per channel on all ranks together (input ", x.shape(),
          ") has no variance: use a larger batch, or eval()");

  Numbers means = running_mean.values(), variances = running_variance.values(), inverses(C);
  for (std::size_t c = 0; c < C; c++) {
    means[c] += o.momentum * (all_means[c] - means[c]);
    variances[c] += o.momentum * (all_squares[c] / (all_rows - 1) - variances[c]);
    inverses[c] = 1 / std::sqrt(all_squares[c] / all_rows + o.epsilon);
  }
  running_mean.copy_from(tensor_of(running_mean, means));
  running_variance.copy_from(tensor_of(running_variance, variances));

  const Tensor mean = tensor_of(gamma.value(), all_means), inverse = tensor_of(gamma.value(), inverses);
  Numbers scale = gamma.value().values(), stored = inverse.values();
  for (std::size_t c = 0; c < C; c++) scale[c] *= stored[c];
  scale_and_shift(s, x.value(), mean, scale, beta.value(), residual.defined() ? &residual.value() : nullptr, o.relu, y);
  s.relu = o.relu;
  s.momentum = o.momentum;
  const bool from_y = residual.defined() && o.relu;
  return record<SyncBatchNormNode>(y, {&x, &gamma, &beta, &residual},
                                   {x.value(), gamma.value(), beta.value(), mean, inverse, from_y ? y : Tensor()}, s,
                                   residual.defined(), all_rows, std::move(ranks));
}

void sync_batch_norm(Module& model, const std::shared_ptr<const GatherNumbers>& ranks) {
  if (auto* norm = dynamic_cast<BatchNorm2d*>(&model))
    norm->normalise_by([ranks](auto&... all) {
      return *ranks && !mode().alone ? sync_batch_norm(all..., ranks) : batch_norm(all...);
    });
  for (auto& [name, child] : model.children()) sync_batch_norm(*child, ranks);
}

}  // namespace tandem
