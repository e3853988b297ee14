// Every call of CUDA, cuBLAS or cuDNN is made through one of these macros. A failure throws Error with the call, its
// file and line, the library's message, and the context: CUDNN_CHECK(cudnnBackendExecute(…), "conv2d ", shape).
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include <string>

#include "core/error.h"

namespace tandem::cuda {

std::string text_of(cudaError_t status);
std::string text_of(cublasStatus_t status);
std::string text_of(cudnnStatus_t status);  // with the library's own last message, which names the cause

template <class Status, class... Context>
void check(Status status, const char* call, const char* file, int line, const Context&... context) {
  if (status == Status{}) return;  // success is zero in all three
  fail(context..., sizeof...(context) ? ": " : "", call, " at ", file, ":", line, ": ", text_of(status));
}

}  // namespace tandem::cuda

#define CUDA_CHECK(call, ...) ::tandem::cuda::check((call), #call, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define CUBLAS_CHECK CUDA_CHECK
#define CUDNN_CHECK CUDA_CHECK
