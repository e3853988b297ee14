// Max and average pooling on the CPU, x[n, h, w, c] → y[n, out_h, out_w, c], vectors along c, threads along rows of
// pictures.
//
// Backward never scatters: where windows do not overlap, one walk over them writes all of dx, the gradient at the
// argmax and zero beside it; where they overlap, every element of dx collects what its windows send it. So dx is
// written once, nothing is cleared before, and threads never meet.
#pragma once
#include <cstdint>

#include "core/shape.h"

namespace tandem::cpu {

// T is float or bf16. argmax may be null. A NaN wins; 255 marks what ReLU cut off (and windows outside the picture).
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
