#include "cuda/matrix.h"

#include <algorithm>
#include <limits>

#include "cuda/check.h"

namespace tandem::cuda {
namespace {

cudaDataType_t library_type(DType t) {
  switch (t) {
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: fail("matrix product: cuda backend: not defined for ", name_of(t), " (cast to f32 first)");
  }
}

}  // namespace

Matrix::Matrix(cudaStream_t stream, void* workspace, std::size_t workspace_bytes) {
  CUBLAS_CHECK(cublasCreate(&handle_), "cuBLAS does not start");
  CUBLAS_CHECK(cublasSetStream(handle_, stream));
  CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace, workspace_bytes));
  tf32(false);
}

Matrix::~Matrix() { cublasDestroy(handle_); }

void Matrix::tf32(bool on) {
  CUBLAS_CHECK(cublasSetMathMode(handle_, on ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH));
}

void Matrix::product(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
                     DType type_a, const void* b, DType type_b, float beta, void* c, DType type_c, std::int64_t batch) {
  require(std::max({m, n, k}) <= std::numeric_limits<int>::max(), "matrix product: [", m, ", ", k, "]·[", k, ", ", n,
          "] is too large for cuBLAS");
  if (m * n * batch == 0) return;
  const float one = 1;
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const auto leading = [](std::int64_t width) { return int(std::max<std::int64_t>(1, width)); };
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(
                   handle_, op(transpose_b), op(transpose_a), int(n), int(m), int(k), &one, b, library_type(type_b),
                   leading(transpose_b ? k : n), k * n, a, library_type(type_a), leading(transpose_a ? m : k), m * k, &beta, c,
                   library_type(type_c), int(n), m * n, int(batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "matrix product [", m, ", ", k, "]·[", k, ", ", n, "] of ", name_of(type_a));
}

}  // namespace tandem::cuda
