// The device: is there one that can be used, which, and with which libraries.
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

// Makes `index` this thread's device. Throws Error with the cause and what to do where it cannot be used.
Device use_device(int index);

// The cause in words: what the runtime said, and what driver and runtime there are (13000 is CUDA 13.0; 0: no driver).
std::string why_unusable(cudaError_t status, int driver, int runtime);

// "driver 580.82 (CUDA 13.0), CUDA runtime 13.0, cuBLAS 13.1.0, cuDNN 9.19.0"
std::string library_versions();
// The files of these libraries that this process has loaded, for whoever suspects that two versions met.
std::vector<std::string> library_paths();

}  // namespace tandem::cuda
