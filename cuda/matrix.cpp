#include "cuda/matrix.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "cuda/check.h"
#include "cuda/memory.h"

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

// The cuBLASLt descriptors of a fused layer, for one call.
struct Described {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;

  // Column-major, yᵀ[n, m] = w[n, k]·xᵀ[k, m]: the library supports a bias only along the rows.
  Described(const LinearKey& key, const void* bias, bool tf32) {
    const cudaDataType_t type = library_type(key.type);
    CUBLAS_CHECK(cublasLtMatmulDescCreate(
        &operation, tf32 && key.type == DType::f32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, key.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
    const auto rows = [](std::int64_t n) { return std::uint64_t(n); };
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&w, type, rows(key.k), rows(key.n), key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&x, type, rows(key.k), rows(key.m), key.k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&y, type, rows(key.n), rows(key.m), key.n));
  }
  ~Described() {
    for (cublasLtMatrixLayout_t layout : {w, x, y})
      if (layout) cublasLtMatrixLayoutDestroy(layout);
    if (operation) cublasLtMatmulDescDestroy(operation);
  }
  Described(const Described&) = delete;
  template <class V>
  void set(cublasLtMatmulDescAttributes_t name, const V& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, name, &value, sizeof value));
  }
};

struct Preference {
  cublasLtMatmulPreference_t raw = nullptr;
  Preference() { CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&raw)); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(raw); }
  template <class V>
  void set(cublasLtMatmulPreferenceAttributes_t name, const V& value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(raw, name, &value, sizeof value));
  }
};

// The heuristic's first choice; empty if there is none. Partial sums stay in f32 and are added in order.
std::optional<cublasLtMatmulAlgo_t> best_of(cublasLtHandle_t handle, const LinearKey& key, const Described& d,
                                            std::size_t room) {
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, room);
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 std::uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    preference.set(name, std::uint32_t(key.alignment));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, d.operation, d.w, d.x, d.y, d.y, preference.raw, 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return {};
  return found.algo;
}

}  // namespace

std::string LinearKey::text() const {
  std::ostringstream out;
  out << "linear [" << m << ", " << k << "]·[" << n << ", " << k << "]ᵀ + bias" << (relu ? ", ReLU" : "") << " of "
      << name_of(type);
  return out.str();
}

Matrix::Matrix(cudaStream_t stream, void* workspace, std::size_t workspace_bytes)
    : stream_(stream), workspace_(workspace), workspace_bytes_(workspace_bytes) {
  CUBLAS_CHECK(cublasLtCreate(&lt_), "cuBLASLt does not start");
  plans_.plan = [this](const LinearKey& key) {
    return best_of(lt_, key, Described(key, tried_.bias, tf32_), workspace_bytes_);
  };
  // Every product with NaN is NaN, so every result must be NaN. The calling operation overwrites y afterwards.
  plans_.nan_survives = [this](const LinearKey& key, const cublasLtMatmulAlgo_t& algorithm) {
    run(key, algorithm, std::numeric_limits<float>::quiet_NaN(), tried_.x, tried_.w, tried_.bias, tried_.y);
    return is_nan(key.type, tried_.y, stream_);
  };
  CUBLAS_CHECK(cublasCreate(&handle_), "cuBLAS does not start");
  CUBLAS_CHECK(cublasSetStream(handle_, stream));
  CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace, workspace_bytes));
  tf32(false);
}

Matrix::~Matrix() {
  cublasLtDestroy(lt_);
  cublasDestroy(handle_);
}

void Matrix::run(const LinearKey& key, const cublasLtMatmulAlgo_t& algorithm, float alpha, const void* x, const void* w,
                 const void* bias, void* y) {
  const Described d(key, bias, tf32_);
  const float zero = 0;
  CUBLAS_CHECK(cublasLtMatmul(lt_, d.operation, &alpha, w, d.w, x, d.x, &zero, y, d.y, y, d.y, &algorithm, workspace_,
                              workspace_bytes_, stream_),
               key.text());
}

bool Matrix::linear(const LinearKey& key, const void* x, const void* w, const void* bias, void* y, bool recording) {
  if (key.m * key.n * key.k == 0) return false;
  tried_ = {x, w, bias, y};
  const cublasLtMatmulAlgo_t* algorithm = plans_.of(key, recording);
  if (algorithm) run(key, *algorithm, 1, x, w, bias, y);
  return algorithm != nullptr;
}

void Matrix::tf32(bool on) {
  if (on != tf32_) plans_.clear();
  tf32_ = on;
  const int arithmetic = on ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH;  // sums are f32 in either
  CUBLAS_CHECK(cublasSetMathMode(handle_, cublasMath_t(arithmetic | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
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
                   leading(transpose_b ? k : n), k * n, a, library_type(type_a), leading(transpose_a ? m : k), m * k,
                   &beta, c, library_type(type_c), int(n), m * n, int(batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "matrix product [", m, ", ", k, "]·[", k, ", ", n, "] of ", name_of(type_a));
}

}  // namespace tandem::cuda
