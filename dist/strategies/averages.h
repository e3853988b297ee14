// Element-wise averages of the weights of ranks that trained independently. All vectors have the same length, in f32,
// or in f64 on the reference backend. `sum` is the sum over all ranks.
#pragma once
#include "core/tensor.h"

namespace tandem {

// x = sum/ranks + (x − sent): the mean of the sent weights, plus this rank's change since. `sent` may be x itself: then
// it is the mean alone. So may `sum`.
void join_mean(Tensor& x, const Tensor& sent, const Tensor& sum, int ranks);
// EASGD: pull = α(x − z), and x −= pull.
void elastic_pull(Tensor& x, const Tensor& z, Tensor& pull, double alpha);
// The outer optimizer: Δ = θ − sum/ranks; m = β·m + Δ; θ −= γ(Δ + β·m), and x = θ + (x − sent), which keeps this rank's
// change since it sent. With β = 0 and γ = 1, θ equals sum/ranks to the bit. `sent` may be x itself.
struct OuterRates {
  double momentum, learning_rate;  // β, γ
};
void outer_step(Tensor& x, const Tensor& sent, Tensor& theta, Tensor& m, const Tensor& sum, int ranks,
                const OuterRates& rates);

void add_scaled(Tensor& y, const Tensor& x, double weight, const Tensor& z = {});  // y += weight·x, or weight·(x − z)

// DASO: x = (weight·x + sum) / (weight + ranks), a mean with late sums.
void stale_mean(Tensor& x, const Tensor& sum, double weight, int ranks);
// narrow = bf16(x − common + error); error becomes the rounding error.
void narrow_difference(Tensor& narrow, Tensor& error, const Tensor& x, const Tensor& common);

}  // namespace tandem
