// Matrix products by cuBLAS. Row-major matrices are the transposes of cuBLAS's column-major matrices, so C = A·B is
// computed as Cᵀ = Bᵀ·Aᵀ. Sums are f32 (TF32 only on request); inputs and outputs are f32, bf16 or f16.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace tandem::cuda {

// The key of a cuBLASLt plan for a linear layer that applies the bias, and optionally the ReLU, in the matrix product:
// y[m, n] = relu?(x[m, k]·w[n, k]ᵀ + bias[n]), all of one type.
struct LinearKey {
  std::int64_t m, n, k;
  DType type;
  bool relu;
  int alignment;  // of the least aligned pointer, in bytes
  bool operator==(const LinearKey&) const = default;
  std::string text() const;  // for errors
};

// Decides once for each key whether the layer is fused. It is not fused when the library has no plan for the key, or
// when the plan's ReLU turns NaN into 0, since failures must stay visible. A plan cannot be tried while a step is
// recorded; a new key then runs unfused.
template <class Plan>
class FusedPlans {
 public:
  std::function<std::optional<Plan>(const LinearKey&)> plan;        // the library's best, or none
  std::function<bool(const LinearKey&, const Plan&)> nan_survives;  // runs it on NaN
  const Plan* of(const LinearKey& key, bool recording) {
    for (const auto& [known, chosen] : all_)
      if (known == key) return chosen ? &*chosen : nullptr;
    if (recording) return nullptr;
    std::optional<Plan> p = plan(key);
    if (p && key.relu && !nan_survives(key, *p)) p.reset();
    all_.emplace_back(key, std::move(p));
    return all_.back().second ? &*all_.back().second : nullptr;
  }
  void clear() { all_.clear(); }

 private:
  std::vector<std::pair<LinearKey, std::optional<Plan>>> all_;
};

class Matrix {
 public:
  // workspace: device memory from the caller, so that cuBLAS allocates nothing while a step is recorded.
  Matrix(cudaStream_t stream, void* workspace, std::size_t workspace_bytes);
  ~Matrix();
  Matrix(const Matrix&) = delete;

  // C[m, n] = op(A)·op(B) + beta·C, for `batch` matrices that are stored densely one after another.
  void product(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
               DType type_a, const void* b, DType type_b, float beta, void* c, DType type_c, std::int64_t batch = 1);
  // Returns false when there is no plan; then nothing was done.
  bool linear(const LinearKey& key, const void* x, const void* w, const void* bias, void* y, bool recording);
  void tf32(bool on);

 private:
  void run(const LinearKey& key, const cublasLtMatmulAlgo_t& algorithm, float alpha, const void* x, const void* w,
           const void* bias, void* y);
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_ = nullptr;
  cudaStream_t stream_;
  void* workspace_;
  std::size_t workspace_bytes_;
  bool tf32_ = false;
  FusedPlans<cublasLtMatmulAlgo_t> plans_;
  struct {
    const void *x = nullptr, *w = nullptr, *bias = nullptr;
    void* y = nullptr;
  } tried_;  // the buffers of the call that requests a plan
};

}  // namespace tandem::cuda
