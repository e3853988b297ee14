// The device: whether there is a usable one, its properties, and the versions of its libraries.
#pragma once
#include <cuda_runtime.h>

#include <string>
#include <vector>

namespace tandem::cuda {

struct Device {
  int index = 0;
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  int processors = 0;        // multiprocessors
  std::size_t bytes = 0;     // of memory
  std::string uuid = {};     // 32 hexadecimal digits
};

// Makes `index` this thread's device. If it cannot be used, throws Error with the cause and the remedy.
Device use_device(int index);

// The cause in words: the runtime's message, and the versions of driver and runtime (13000 is CUDA 13.0; 0: no driver).
std::string why_unusable(cudaError_t status, int driver, int runtime);

// "driver 580.82 (CUDA 13.0), CUDA runtime 13.0, cuBLAS 13.1.0, cuDNN 9.19.0"
std::string library_versions();
// The files from which this process has loaded these libraries, to find out whether two versions are mixed.
std::vector<std::string> library_paths();

}  // namespace tandem::cuda
