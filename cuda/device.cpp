#include "cuda/device.h"

#include <algorithm>
#include <fstream>

#include "core/text.h"
#include "cuda/check.h"

namespace tandem::cuda {
namespace {

// 13020 → "13.2"
std::string cuda_version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  …": the first word with a digit and a dot.
std::string driver_version() {
  std::ifstream in("/proc/driver/nvidia/version");
  for (std::string word; in >> word;)
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  return "";
}

}  // namespace

std::string text_of(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}
std::string text_of(cublasStatus_t status) {
  return std::string(cublasGetStatusName(status)) + ": " + cublasGetStatusString(status);
}

std::string why_unusable(cudaError_t status, int driver, int runtime) {
  if (status == cudaErrorInsufficientDriver || (driver > 0 && driver / 1000 < runtime / 1000))
    return driver == 0 ? "there is no NVIDIA driver on this machine (CUDA_VISIBLE_DEVICES or a container without "
                         "--gpus would hide one)"
                       : "the driver is made for CUDA " + cuda_version(driver) + ", this program for CUDA " +
                             cuda_version(runtime) + ": update the driver, or build with an older toolkit";
  if (status == cudaErrorNoDevice)
    return "the driver shows no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES, and in a container for --gpus";
  return text_of(status);
}

Device use_device(int index) {
  int count = 0, driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();  // clears the error
    fail("no usable GPU: ", why_unusable(status, driver, runtime));
  }
  require(count > 0, "no usable GPU: ", why_unusable(cudaErrorNoDevice, driver, runtime));
  require(index < count, "there is no GPU ", index, ": this machine shows ", count, ", 0 to ", count - 1);
  cudaDeviceProp p{};
  CUDA_CHECK(cudaGetDeviceProperties(&p, index), "GPU ", index);
  Device d{index, p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem};
  d.uuid = hex({p.uuid.bytes, sizeof p.uuid.bytes});
  require(d.major >= 8, "GPU ", index, " (", d.name, ") has compute capability ", d.major, ".", d.minor,
          "; Tandem needs 8.0 (Ampere) or later");
  CUDA_CHECK(cudaSetDevice(index), "GPU ", index, " (", d.name, ")");
  CUDA_CHECK(cudaFree(nullptr), "GPU ", index, " (", d.name, ") cannot be initialised");
  return d;
}

std::string library_versions() {
  int driver = 0, runtime = 0, major = 0, minor = 0, patch = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cublasGetProperty(MAJOR_VERSION, &major);
  cublasGetProperty(MINOR_VERSION, &minor);
  cublasGetProperty(PATCH_LEVEL, &patch);
  const std::size_t dnn = cudnnGetVersion();  // 91900
  auto join = [](auto a, auto b, auto c) {
    return std::to_string(a) + "." + std::to_string(b) + "." + std::to_string(c);
  };
  const std::string number = driver_version();
  return "driver " + (number.empty() ? "" : number + " ") + "(CUDA " + cuda_version(driver) + "), CUDA runtime " +
         cuda_version(runtime) + ", cuBLAS " + join(major, minor, patch) + ", cuDNN " +
         join(dnn / 10000, dnn / 100 % 100, dnn % 100);
}

std::vector<std::string> library_paths() {
  std::vector<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t at = line.find('/');
    if (at == std::string::npos) continue;
    std::string path = line.substr(at);
    const std::string file = path.substr(path.rfind('/') + 1);
    for (const char* name : {"libcuda.", "libcudart.", "libcublas", "libcudnn", "libnccl."})
      if (file.starts_with(name) && std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
  }
  return paths;
}

}  // namespace tandem::cuda
