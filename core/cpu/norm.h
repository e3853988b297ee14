// Normalisation on the CPU. Batch norm: x, y [rows, channels], statistics per channel over the rows.
//
// The cost is memory traffic, so each pass reads memory once, in one parallel region. Forward reads x for the
// statistics, then reads x (and the residual) and writes y. Backward reads x and dy for the two sums of the gradient,
// then again to write dx. The second pass runs backwards, so that it begins with data that is still in the cache.
#pragma once
#include "core/backend.h"
#include "core/cpu/scratch.h"

namespace tandem::cpu {

// T is float or bf16. Pointers that may be null: residual, moments (of x, where the convolution that made it took them:
// the first reading of x is then left out). Results are the same bits for the same number of threads.
template <class T>
void batch_norm(int threads, const NormShape& s, const T* x, const Moments* moments, const T* residual,
                const float* gamma, const float* beta, float* running_mean, float* running_variance, T* y, float* mean,
                float* inverse_std);

template <class T>
void batch_norm_inference(int threads, const NormShape& s, const T* x, const T* residual, const float* gamma,
                          const float* beta, const float* mean, const float* variance, T* y);

// The y of batch_norm, from the statistics that it stored.
template <class T>
void batch_norm_again(int threads, const NormShape& s, const T* x, const T* residual, const float* gamma,
                      const float* beta, const float* mean, const float* inverse_std, T* y);

template <class T>
struct NormBackward {  // as Backend::NormGradients, in pointers; null: not wanted
  T *dx = nullptr, *dresidual = nullptr;
  float *dgamma = nullptr, *dbeta = nullptr;
  bool add_dx = false, add_dresidual = false, add_dgamma = false, add_dbeta = false;
};
// y: null unless the mask is to be taken from it (ReLU after a residual). dresidual may be dy.
template <class T>
void batch_norm_backward(int threads, const NormShape& s, const T* x, const T* y, const T* dy, const float* gamma,
                         const float* beta, const float* mean, const float* inverse_std, const NormBackward<T>& out);

}  // namespace tandem::cpu
