// Matrix products by cuBLAS. Row-major matrices are the transposes of cuBLAS's column-major ones, so C = A·B is asked for
// as Cᵀ = Bᵀ·Aᵀ. Sums are f32 (TF32 only when asked for); inputs and outputs f32 or bf16.
#pragma once
#include <cublas_v2.h>

#include <cstdint>

#include "core/dtype.h"

namespace tandem::cuda {

class Matrix {
 public:
  // workspace: device memory of our own, so that cuBLAS allocates nothing while a step is recorded.
  Matrix(cudaStream_t stream, void* workspace, std::size_t workspace_bytes);
  ~Matrix();
  Matrix(const Matrix&) = delete;

  // C[m, n] = op(A)·op(B) + beta·C, `batch` times, with dense strides between.
  void product(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
               DType type_a, const void* b, DType type_b, float beta, void* c, DType type_c, std::int64_t batch = 1);
  void tf32(bool on);

 private:
  cublasHandle_t handle_ = nullptr;
};

}  // namespace tandem::cuda
