// The parts of the recipe of airbench94 (Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv
// 2404.00498): the network and its initial values, the optimizer and its rates, the lookahead average, and the test.
//
// From the paper: a frozen 2 × 2 convolution that whitens, three groups of 64, 256 and 256 channels, GELU, Nesterov
// 0.85, label smoothing 0.2, batches of 1024 for 9.9 epochs, crops by 2 pixels and alternating flips, biases of norms
// that learn 64 times as fast, the whitening's bias for 3 epochs only, lookahead, and six views of a test picture. The
// details that the paper omits are from memory of the published program; the comments below mark them "from memory".
#pragma once
#include <cmath>
#include <memory>
#include <vector>

#include "core/elementwise.h"
#include "datasets/loader.h"
#include "layers/layers.h"
#include "layers/optim/optimizer.h"

namespace tandem::airbench {

// ---- the network ----------------------------------------------------------------------------------------------------
struct Group : Module {
  Conv2d& conv1;
  BatchNorm2d& norm1;
  Conv2d& conv2;
  BatchNorm2d& norm2;
  Group(std::int64_t in, std::int64_t out)  // from memory: ε = 1e-12 and PyTorch's momentum 0.4
      : conv1(child<Conv2d>("conv1", in, out, 3, Conv2dOptions{.padding = 1}, false)),
        norm1(child<BatchNorm2d>("norm1", out, false, 1e-12, 0.4)),
        conv2(child<Conv2d>("conv2", out, out, 3, Conv2dOptions{.padding = 1}, false)),
        norm2(child<BatchNorm2d>("norm2", out, false, 1e-12, 0.4)) {}
  Variable forward(const Variable& x) override { return gelu(norm2(conv2(gelu(norm1(max_pool2d(conv1(x))))))); }
};

struct Net : Module {
  Conv2d& whiten = child<Conv2d>("whiten", 3, 24, 2);
  Group& group1 = child<Group>("group1", 24, 64);
  Group& group2 = child<Group>("group2", 64, 256);
  Group& group3 = child<Group>("group3", 256, 256);
  Linear& head = child<Linear>("head", 256, 10, false);

  Net() {
    for (auto& [name, p] : parameters()) {
      const bool bias = name.ends_with("bias"), norm = name.find(".norm") != name.npos;
      p->frozen = !bias && (norm || name.starts_with("whiten"));
      p->learning_rate_scale = bias && norm ? 64 : 1;
    }
  }
  Variable forward(const Variable& x) override {
    Variable y = group3(group2(group1(gelu(whiten(x)))));
    return scale(head(flatten(max_pool2d(y, {.kernel_size = 3}))), 1.0 / 9);
  }
};

// Sets the first filters of every convolution in a group to the identity: filter c returns input channel c. There are
// as many of them as input channels; the other filters keep their initial values.
inline void let_through(FlatParameters& flat) {
  for (const ParameterRange& s : flat.parameter_ranges()) {
    if (s.name.find(".conv") == std::string::npos) continue;
    const std::int64_t kernel_size = s.shape[1], in = s.shape[3], each = kernel_size * kernel_size * in;
    std::vector<double> filters(std::size_t(in * each), 0.0);
    for (std::int64_t c = 0; c < in; c++) filters[std::size_t(c * each + kernel_size * kernel_size / 2 * in + c)] = 1;
    s.leaf->value.slice(0, in).copy_from(Tensor::of(flat.backend(), {in, kernel_size, kernel_size, in}, filters));
  }
  flat.count_writes(flat.all());
}

// ---- whitening ------------------------------------------------------------------------------------------------------
// Eigenvalues (on the diagonal of a) and eigenvectors (rows of v) of a symmetric matrix, by Jacobi's rotations.
constexpr int patch = 12;  // 2 · 2 · 3
using Matrix = double[patch][patch];
inline void eigen(Matrix& a, Matrix& v) {
  for (int i = 0; i < patch; i++)
    for (int j = 0; j < patch; j++) v[i][j] = i == j;
  for (int sweep = 0; sweep < 60; sweep++)
    for (int p = 0; p < patch; p++)
      for (int q = p + 1; q < patch; q++) {
        if (std::abs(a[p][q]) < 1e-18) continue;
        const double theta = 0.5 * std::atan2(2 * a[p][q], a[q][q] - a[p][p]), c = std::cos(theta), s = std::sin(theta);
        auto turn = [&](double& x, double& y) {
          const double old = x;
          x = c * old - s * y;
          y = s * old + c * y;
        };
        for (int k = 0; k < patch; k++) turn(a[k][p], a[k][q]);
        for (int k = 0; k < patch; k++) turn(a[p][k], a[q][k]);
        for (int k = 0; k < patch; k++) turn(v[p][k], v[q][k]);
      }
}

// The filters that whiten 2 × 2 patches of the first pictures: the eigenvectors of the patches' covariance, divided by
// √(eigenvalue + ε), and their negatives. From memory: 5000 pictures, ε = 5e-4.
inline std::vector<double> whitening(const Pictures& pictures, std::int64_t first = 5000) {
  const std::int64_t n = std::min(first, pictures.count()), h = pictures.height(), w = pictures.width();
  const std::uint8_t* x = pictures.images.data<std::uint8_t>();
  Matrix covariance = {}, vectors;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; i++)
    for (std::int64_t row = 0; row + 1 < h; row++)
      for (std::int64_t column = 0; column + 1 < w; column++, count++) {
        double values[patch];
        for (int k = 0; k < patch; k++) {
          const int c = k % 3;
          values[k] =
              (x[((i * h + row + k / 6) * w + column + k / 3 % 2) * 3 + c] / 255.0 - pictures.mean[std::size_t(c)]) /
              pictures.std[std::size_t(c)];
        }
        for (int a = 0; a < patch; a++)
          for (int b = 0; b <= a; b++) covariance[a][b] += values[a] * values[b];
      }
  for (int a = 0; a < patch; a++)
    for (int b = 0; b <= a; b++) covariance[b][a] = covariance[a][b] /= double(count);
  eigen(covariance, vectors);
  std::vector<double> filters;
  for (double sign : {1.0, -1.0})
    for (int i = 0; i < patch; i++)
      for (int k = 0; k < patch; k++) filters.push_back(sign * vectors[i][k] / std::sqrt(covariance[i][i] + 5e-4));
  return filters;
}

// ---- the optimizer --------------------------------------------------------------------------------------------------
// The paper's rate of 11.5 and decay of 0.0153 are for a loss summed over 1024 pictures, and both are divided by
// 1 + 1/(1 − 0.85). Here the loss is a mean and the rate multiplies the decay: 1.5 and 0.0153/11.5.
constexpr double learning_rate = 1.5, weight_decay = 0.00133, momentum = 0.85, label_smoothing = 0.2;
constexpr int whitening_bias_epochs = 3;

// Nesterov's SGD in which all parameters decay equally fast: a parameter that learns 64 times as fast has a 64 times
// smaller decay (from memory).
class Descent : public SGD {
 public:
  Descent(double rate, double mu, double decay)
      : SGD({.learning_rate = rate, .momentum = mu, .nesterov = mu > 0, .weight_decay = decay}), decay_(decay) {}
  void freeze(const ParameterRange& s) {  // from now on
    const std::int64_t block = FlatParameters::alignment;
    rates_.slice(2 * s.local_begin / block, 2 * ((s.local_begin + s.length + block - 1) / block)).fill(0);
  }

 protected:
  double decay_of(const ParameterRange& s) const override { return decay_ / s.learning_rate_scale; }

 private:
  double decay_;
};

// The rate after a share t of the steps, as a factor of the peak rate: it rises from 0.2 to 1 in the first 23 % of the
// steps, and then falls to 0.07 (from memory).
inline double triangle(double t) { return t < 0.23 ? 0.2 + 0.8 * t / 0.23 : 1 - 0.93 * (t - 0.23) / 0.77; }

// Slow copies of weights and running statistics. pull() changes both: w = slow = decay·slow + (1 − decay)·w. It is
// called every five steps with 0.95⁵·t³, after a share t of the steps, and with 1 at the end (from memory).
class Lookahead {
 public:
  explicit Lookahead(FlatParameters& s) : flat_(s), weights_(s.values.clone()), buffers_(s.buffers.clone()) {}
  static double decay(double t) { return std::pow(0.95, 5) * t * t * t; }
  void pull(double decay) {
    NoGrad off;
    for (auto [slow, fast] : {std::pair(&weights_, &flat_.values), {&buffers_, &flat_.buffers}}) {
      slow->copy_from((decay * Variable(*slow) + (1 - decay) * Variable(*fast)).value());
      fast->copy_from(*slow);
    }
    flat_.count_writes(flat_.all());
  }

 private:
  FlatParameters& flat_;
  Tensor weights_, buffers_;
};

// ---- the test -------------------------------------------------------------------------------------------------------
// The pictures shifted by whole pixels, with reflected borders, and then mirrored if asked. Pixel (y, x) of the shifted
// picture is pixel (y + by, x + by) of the original.
inline Pictures view(const Pictures& pictures, std::int64_t by, bool mirrored) {
  Pictures v = pictures;
  v.images = pictures.images.clone();
  const std::uint8_t* from = pictures.images.data<std::uint8_t>();
  std::uint8_t* to = v.images.write<std::uint8_t>();
  const std::int64_t h = pictures.height(), w = pictures.width(), c = pictures.channels();
  for (std::int64_t i = 0; i < pictures.count(); i++)
    for (std::int64_t y = 0; y < h; y++)
      for (std::int64_t x = 0; x < w; x++) {
        const std::int64_t row = reflected(y + by, h), column = reflected((mirrored ? w - 1 - x : x) + by, w);
        for (std::int64_t k = 0; k < c; k++) *to++ = from[((i * h + row) * w + column) * c + k];
      }
  return v;
}

// Six views of each test picture: not shifted, shifted by one pixel up and left, and down and right, each of them also
// mirrored. The logits of the first pair have half of the weight, the other pairs a quarter each (from memory).
class Looks {
 public:
  Looks(const Pictures& test, const LoaderOptions& options, Backend& backend) {
    for (auto [by, share] : {std::pair(0, 0.25), {-1, 0.125}, {1, 0.125}})
      for (bool mirrored : {false, true})
        looks_.emplace_back(share, std::make_unique<Loader>(view(test, by, mirrored), options, backend));
  }
  // The share of the pictures that are classified correctly by the first `count` views: 1, 2 or all 6.
  double accuracy(Module& model, Backend& backend, std::size_t count = 6) const {
    NoGrad off;
    model.eval();
    Tensor correct = Tensor::zeros(backend, {1}, DType::i32);
    std::int64_t seen = 0;
    const auto looks = std::span(looks_).first(count);
    for (auto& [share, loader] : looks) loader->start(0);
    for (;;) {
      Variable sum;
      Batch batch;
      for (auto& [share, loader] : looks) {
        if (!loader->next(batch)) break;
        Variable logits = scale(model(Variable(batch.images)), share);
        sum = sum.defined() ? sum + logits : logits;
      }
      if (!sum.defined()) break;
      cross_entropy(sum, batch.labels, 0, &correct);
      seen += batch.size();
    }
    model.train();
    return correct.item() / double(seen);
  }

 private:
  std::vector<std::pair<double, std::unique_ptr<Loader>>> looks_;  // with the weights of their logits
};

}  // namespace tandem::airbench
