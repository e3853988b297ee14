// The cpu backend: f32 and bf16 on the cores of one machine.
#include "core/backend.h"

#include <cstring>

#include "core/cpu/kernels.h"
#include "core/launch.h"
#include "core/machine.h"

namespace tandem {
namespace cpu {
namespace {

// Without this check, a binary built for another CPU would be killed by an illegal instruction, without a message.
void require_instructions() {
#if defined(__x86_64__) && defined(__GNUC__)
  std::string missing;
  [[maybe_unused]] auto need = [&](bool there, const char* name) {
    if (!there) missing += missing.empty() ? name : std::string(", ") + name;
  };
  __builtin_cpu_init();
#if defined(__AVX2__) && defined(__FMA__)
  need(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "AVX2 and FMA");
#endif
#if defined(TANDEM_AVX512)
  need(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"), "AVX-512");
#endif
#if defined(__AVX512BF16__)
  need(__builtin_cpu_supports("avx512bf16"), "AVX-512 BF16");
#endif
  require(
      missing.empty(), "cpu backend: this program was compiled for a CPU with ", missing,
      ", which this one lacks; rebuild it here with make MARCH=native, or with MARCH=x86-64-v3 for any CPU with AVX2");
#endif
}

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads)
      : Backend("cpu", heap_memory(), threads), shared_{threads, Convolution(memory(), threads)} {
    provide<float>(std::make_unique<CpuKernels<float>>(shared_));
    provide<bf16>(std::make_unique<CpuKernels<bf16>>(shared_));
  }

  std::string description() const override {
    return cpu_model() + ", " + OneDnn::version() + ", " + counted(threads_, "thread");
  }
  bool supports(DType dtype) const override {
    return dtype == DType::f32 || (dtype == DType::bf16 && OneDnn::has_bf16());
  }

  void upload(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    auto n = std::int64_t(bytes);
    parallel_ranges(n / 4 >= parallel_grain ? threads_ : 1, n, 4096, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, std::size_t(end - begin));
    });
  }
  void synchronize() override {}

  void forget(const WriteCount& owner) override { shared_.convolution.forget(&owner); }
  void deterministic(bool on) override { shared_.convolution.deterministic(deterministic_ = on); }
  void exact_convolution(bool on) override { shared_.convolution.exact(on); }

 private:
  Shared shared_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> cpu_backend(int threads) {
  cpu::require_instructions();
  return std::make_unique<cpu::CpuBackend>(threads > 0 ? threads : default_threads());
}

}  // namespace tandem
