// Tandem's own kernels, as functions that the host calls. T is float, bf16 or f16 (activations); parameters, statistics
// and losses are float. Pointers are to device memory; pointers called optional may be null. All functions queue work
// on the stream and do not wait. Arithmetic is float; sums are finished in double, in a fixed order, so every run gives
// the same bits.
#pragma once
#include <cuda_runtime.h>

#include "core/backend.h"

namespace tandem::cuda {

struct Grid {  // the number of processors, and the stream on which work is queued
  cudaStream_t stream = nullptr;
  int processors = 1;
};

inline constexpr int most_parts = 1024;  // maximum number of partial sums per channel
// Floats of scratch memory that `sums` simultaneous sums over the rows of `channels` columns need (columns.h).
inline std::size_t column_scratch(int sums, std::int64_t channels) {
  return std::size_t(most_parts) * std::size_t(sums) * std::size_t(channels);
}

// ---- batch normalisation (norm.cu): x, y, residual [rows, channels] -------------------------------------------------
// scratch: column_scratch(2, channels) + 2·channels floats.
template <class T>
void batch_norm(const Grid&, const NormShape&, const T* x, const T* optional_residual, const float* gamma,
                const float* beta, float* running_mean, float* running_variance, T* y, float* mean, float* inverse_std,
                float* scratch);
template <class T>
void batch_norm_inference(const Grid&, const NormShape&, const T* x, const T* optional_residual, const float* gamma,
                          const float* beta, const float* mean, const float* variance, T* y, float* scratch);
// Computes the y of batch_norm from the statistics that it stored.
template <class T>
void batch_norm_again(const Grid&, const NormShape&, const T* x, const T* optional_residual, const float* gamma,
                      const float* beta, const float* mean, const float* inverse_std, T* y);
template <class T>
using NormOutputs = tandem::NormOutputs<T, float>;
// y is optional: if given, the mask is computed from y (ReLU after a residual), otherwise from x again.
template <class T>
void batch_norm_backward(const Grid&, const NormShape&, const T* x, const T* optional_y, const T* dy,
                         const float* gamma, const float* beta, const float* mean, const float* inverse_std,
                         const NormOutputs<T>& out, float* scratch);

// ---- pooling (pool.cu) ----------------------------------------------------------------------------------------------
template <class T>
void max_pool(const Grid&, const PoolShape&, const T* x, bool relu, T* y, std::uint8_t* optional_winner);
template <class T>
void max_pool_backward(const Grid&, const PoolShape&, const T* dy, const std::uint8_t* argmax, T* dx, bool add);
template <class T>
void average_pool(const Grid&, const PoolShape&, const T* x, T* y);
template <class T>
void average_pool_backward(const Grid&, const PoolShape&, const T* dy, T* dx, bool add);

// ---- rows (rows.cu) -------------------------------------------------------------------------------------------------
// scratch: column_scratch(1, channels).
template <class T>
void sum_rows(const Grid&, std::int64_t rows, std::int64_t channels, const T* dy, float* db, bool add, float* scratch);
template <class T>
void reduce(const Grid&, Reduction, std::int64_t outer, std::int64_t middle, std::int64_t inner, const T* x, T* y,
            bool add);
// scratch: most_parts floats.
template <class T>
void squared_norm(const Grid&, std::int64_t n, const T* x, float* y, bool add, float* scratch);
// A label outside [0, classes) makes the loss NaN: the device cannot throw. scratch: 2·rows floats.
template <class T>
void cross_entropy(const Grid&, std::int64_t rows, std::int64_t classes, const T* x, const std::int32_t* labels,
                   double smoothing, float* loss, float* probabilities, std::int32_t* optional_correct, float* scratch);
template <class T>
void cross_entropy_backward(const Grid&, std::int64_t rows, std::int64_t classes, const float* probabilities,
                            const std::int32_t* labels, double smoothing, const float* dloss, T* dx, bool add);

// ---- convolution without a library (convolution.cu) -----------------------------------------------------------------
// One thread for each result; for shapes that no engine of cuDNN supports. It is slow, but not used by common networks.
template <class T>
void plain_convolution(const Grid&, const ConvShape&, const T* x, const T* w, T* y);
template <class T>
void plain_convolution_backward_data(const Grid&, const ConvShape&, const T* dy, const T* w, T* dx, bool add);
template <class T>
void plain_convolution_backward_filter(const Grid&, const ConvShape&, const T* x, const T* dy, float* dw, bool add);

// y = relu?(y + bias) in place; bias optional. y [rows, channels].
template <class T>
void bias_relu(const Grid&, std::int64_t rows, std::int64_t channels, const float* optional_bias, bool relu, T* y);
// y[r, c] = row[c] for every row.
template <class T>
void fill_rows(const Grid&, std::int64_t rows, std::int64_t channels, const T* row, T* y);
// Copies rows to another width: truncated, or padded with zeros.
template <class T>
void set_channels(const Grid&, std::int64_t rows, std::int64_t from_width, std::int64_t to_width, const T* from, T* to);
// to (+)= from, converted.
template <class From, class To>
void convert(const Grid&, std::int64_t n, const From* from, To* to, bool add);

}  // namespace tandem::cuda
