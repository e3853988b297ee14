// Max and average pooling on the CPU, x[n, h, w, c] → y[n, out_h, out_w, c], vectors along c, threads along rows of
// pictures.
//
// Backward does not scatter. Where windows do not overlap, one pass over them writes all of dx: the gradient at the
// argmax and zero elsewhere. Where they overlap, every element of dx sums the gradients of its windows. dx is therefore
// written once, without being cleared first, and no two threads write the same element.
#pragma once
#include <cstdint>

#include "core/shape.h"

namespace tandem::cpu {

// T is float or bf16. argmax may be null. A NaN is the maximum. 255: ReLU made the output 0, or the window is outside
// the picture.
template <class T>
void max_pool(int threads, const PoolShape& s, const T* x, bool relu, T* y, std::uint8_t* argmax);
template <class T>
void max_pool_backward(int threads, const PoolShape& s, const T* dy, const std::uint8_t* argmax, T* dx, bool add);
// Divides by the number of elements inside the picture.
template <class T>
void average_pool(int threads, const PoolShape& s, const T* x, T* y);
template <class T>
void average_pool_backward(int threads, const PoolShape& s, const T* dy, T* dx, bool add);

}  // namespace tandem::cpu
