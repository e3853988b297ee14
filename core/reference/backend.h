// ReferenceBackend: plain loops (core/reference/kernels.h) on host memory. One thread calls; the loops may use several.
#pragma once
#include "core/backend.h"

namespace tandem::reference {

class ReferenceBackend : public Backend {
 public:
  explicit ReferenceBackend(int threads, std::unique_ptr<MemorySource> source = heap_memory());
  std::string description() const override;
  bool supports(DType dtype) const override;

  void upload(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override;
  void synchronize() override {}                                // a call returns when it is done
  void deterministic(bool) override { deterministic_ = true; }  // always deterministic
  void exact_convolution(bool) override {}                      // always exact
};

}  // namespace tandem::reference
