// A reduction over one block of 256 threads, in a fixed order, so that the result does not depend on the timing of
// threads.
#pragma once

namespace tandem::cuda {

struct Plus {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};

// All threads call it; all get the result. It may be called again directly after the next barrier.
template <class A, class Op>
__device__ A over_block(A mine, const Op& op) {
  __shared__ A shared[256];
  __syncthreads();
  shared[threadIdx.x] = mine;
  for (unsigned half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = op(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

}  // namespace tandem::cuda
