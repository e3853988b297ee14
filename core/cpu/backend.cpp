// The cpu backend: f32 and bf16 on the cores of one machine. Convolutions and matrix products go to Convolution
// (Winograd, oneDNN, direct).
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
#if defined(__AVX2__)
  need(__builtin_cpu_supports("avx2"), "AVX2");
#endif
#if defined(__FMA__)
  need(__builtin_cpu_supports("fma"), "FMA");
#endif
#if defined(__AVX512F__)
  need(__builtin_cpu_supports("avx512f"), "AVX-512");
#endif
#if defined(__AVX512BW__)
  need(__builtin_cpu_supports("avx512bw"), "AVX-512 BW");
#endif
#if defined(__AVX512VL__)
  need(__builtin_cpu_supports("avx512vl"), "AVX-512 VL");
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
    return cpu_model() + ", " + OneDnn::version() + ", " + std::to_string(threads_) +
           (threads_ == 1 ? " thread" : " threads");
  }
  bool supports(DType dtype) const override {
    return dtype == DType::f32 || (dtype == DType::bf16 && OneDnn::has_bf16());
  }

  void upload(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    auto n = static_cast<std::int64_t>(bytes);
    parallel_ranges(n / 4 >= parallel_grain ? threads_ : 1, n, 4096, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                  static_cast<std::size_t>(end - begin));
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

template <class T>
void CpuKernels<T>::gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n,
                         std::int64_t k, In<T> a, In<T> b, Out<T> c, bool add) {
  for (std::int64_t i = 0; i < batch; i++)
    shared_.convolution.library().gemm<T>(transpose_a, transpose_b, m, n, k, a + i * m * k, b + i * k * n,
                                          c + i * m * n, add);
}

// The passes of a layer overwrite one of x, w and y, and only read the other two.
template <class T>
void CpuKernels<T>::linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<float> w, In<float> bias,
                           bool relu, Out<T> y) {
  shared_.convolution.library().linear<T>({Pass::forward,
                                           OneDnn::linear_shape(m, n, k),
                                           const_cast<T*>(x.data),
                                           const_cast<float*>(w.data),
                                           y,
                                           key_of(w),
                                           false,
                                           {bias, relu}});
}
template <class T>
void CpuKernels<T>::linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<float> w,
                                         Out<T> dx, bool add) {
  shared_.convolution.library().linear<T>({Pass::backward_data, OneDnn::linear_shape(m, n, k), dx,
                                           const_cast<float*>(w.data), const_cast<T*>(dy.data), key_of(w), add});
}
template <class T>
void CpuKernels<T>::linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy,
                                           Out<float> dw, bool add) {
  shared_.convolution.library().linear<T>({Pass::backward_filter,
                                           OneDnn::linear_shape(m, n, k),
                                           const_cast<T*>(x.data),
                                           dw,
                                           const_cast<T*>(dy.data),
                                           {},
                                           add});
}

template <class T>
void CpuKernels<T>::conv2d(const ConvShape& s, In<T> x, In<float> w, In<float> bias, bool relu, Out<T> y) {
  Moments* moments = bias || relu ? nullptr : &shared_.moments;  // without these it is batch norm that follows
  shared_.convolution.forward<T>(s, x, w, key_of(w), y, {bias, relu, moments});
  if (moments) shared_.measured = state_of(*y.tensor);
}
template <class T>
void CpuKernels<T>::conv2d_backward_data(const ConvShape& s, In<T> dy, In<float> w, Out<T> dx, bool add) {
  shared_.convolution.backward_data<T>(s, dy, w, key_of(w), dx, add);
}
template <class T>
void CpuKernels<T>::conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<float> dw, bool add) {
  shared_.convolution.backward_filter<T>(s, x, dy, dw, add);
}

template class CpuKernels<float>;  // the members that this file defines
template class CpuKernels<bf16>;

}  // namespace cpu

std::unique_ptr<Backend> cpu_backend(int threads) {
  cpu::require_instructions();
  return std::make_unique<cpu::CpuBackend>(threads > 0 ? threads : default_threads());
}

}  // namespace tandem
