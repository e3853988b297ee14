// The cpu backend: f32 and bf16 on the cores of one machine. Convolutions and matrix products go to Convolution
// (Winograd, oneDNN, direct), what is bound by memory to norm, pool and rows. This file unpacks tensors into pointers,
// and nothing else.
#include "core/backend.h"

#include <cstring>

#include "core/cpu/convolution.h"
#include "core/cpu/norm.h"
#include "core/cpu/pool.h"
#include "core/cpu/rows.h"
#include "core/launch.h"
#include "core/machine.h"
#include "core/operands.h"

namespace tandem {
namespace cpu {
namespace {

// Without this check a binary made for another CPU would stop at an illegal instruction without a message.
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

// f.operator()<T>() for the type of x: float or bf16.
template <class F>
void typed(DType dtype, const char* op, const F& f) {
  typed_among<float, bf16>(dtype, op, "cpu", f);
}

// The state of a parameter. Prepared forms are kept for parameters only.
WeightKey key(const Tensor& w) {
  if (&w.writes() == w.storage()->whole()) return {};
  return {&w.writes(), w.writes().now()};
}

class AllocatorScratch : public Scratch {
 public:
  explicit AllocatorScratch(CachingAllocator& memory) : memory_(memory) {}
  void* take(std::size_t bytes) override {
    MemoryUse use(Use::scratch);
    return memory_.take(bytes);
  }
  void give(void* block) override { memory_.give(block); }
  bool may_keep() const override { return memory_.budget() == 0; }

 private:
  CachingAllocator& memory_;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads)
      : Backend("cpu", heap_memory(), threads), scratch_(memory()), convolution_(scratch_, threads) {}

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

  void forget(const WriteCount& owner) override { convolution_.forget(&owner); }
  void deterministic(bool on) override { convolution_.deterministic(deterministic_ = on); }
  void exact_convolution(bool on) override { convolution_.exact(on); }

  // ---- matrices -----------------------------------------------------------------------------------------------------
  void gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) override {
    const std::int64_t m = c.size(-2), n = c.size(-1), k = a.size(transpose_a ? -2 : -1);
    typed(a.dtype(), "gemm", [&]<class T> {
      const T *ap = a.data<T>(), *bp = b.data<T>();
      T* cp = c.write<T>();
      for (std::int64_t i = 0, batch = c.rank() == 3 ? c.size(0) : 1; i < batch; i++)
        convolution_.library().gemm<T>(transpose_a, transpose_b, m, n, k, 1.f, ap + i * m * k, bp + i * k * n,
                                       add ? 1.f : 0.f, cp + i * m * n);
    });
  }
  void linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override {
    typed(x.dtype(), "linear", [&]<class T> {
      convolution_.library().linear_forward<T>(y.numel() / w.size(0), w.size(0), w.size(1), x.data<T>(),
                                               w.data<float>(), key(w), data<float>(bias), relu, y.write<T>());
    });
  }
  void linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override {
    typed(dy.dtype(), "linear_backward_data", [&]<class T> {
      convolution_.library().linear_backward_data<T>(dy.numel() / w.size(0), w.size(0), w.size(1), dy.data<T>(),
                                                     w.data<float>(), key(w), dx.write<T>(), add);
    });
  }
  void linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override {
    typed(x.dtype(), "linear_backward_weight", [&]<class T> {
      convolution_.library().linear_backward_weights<T>(dy.numel() / dw.size(0), dw.size(0), dw.size(1), x.data<T>(),
                                                        dy.data<T>(), dw.write<float>(), add);
    });
  }

  // ---- convolution --------------------------------------------------------------------------------------------------
  void conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override {
    // Without bias and ReLU it is batch norm that follows.
    Moments* moments = bias || relu ? nullptr : &moments_;
    typed(x.dtype(), "conv2d", [&]<class T> {
      convolution_.forward<T>(s, x.data<T>(), w.data<float>(), key(w), y.write<T>(),
                              {data<float>(bias), relu, moments});
    });
    if (moments) measured_ = {&y.writes(), y.writes().now()};
  }
  void conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override {
    typed(dy.dtype(), "conv2d_backward_data", [&]<class T> {
      convolution_.backward_data<T>(s, dy.data<T>(), w.data<float>(), key(w), dx.write<T>(), add);
    });
  }
  void conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override {
    typed(x.dtype(), "conv2d_backward_filter",
          [&]<class T> { convolution_.backward_filter<T>(s, x.data<T>(), dy.data<T>(), dw.write<float>(), add); });
  }
  void sum_rows(const Tensor& dy, Tensor& db, bool add) override {
    const std::int64_t channels = db.numel();
    if (!channels) return;
    typed(dy.dtype(), "sum_rows", [&]<class T> {
      cpu::sum_rows<T>(threads_, dy.numel() / channels, channels, dy.data<T>(), db.write<float>(), add);
    });
  }

  // ---- pooling ------------------------------------------------------------------------------------------------------
  void max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax) override {
    require(!argmax || s.kh * s.kw <= 255, "max_pool: a window of ", s.kh, "×", s.kw, " has more than 255 positions");
    typed(x.dtype(), "max_pool", [&]<class T> {
      cpu::max_pool<T>(threads_, s, x.data<T>(), relu, y.write<T>(), write_if<std::uint8_t>(argmax));
    });
  }
  void max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx, bool add) override {
    typed(dy.dtype(), "max_pool_backward", [&]<class T> {
      cpu::max_pool_backward<T>(threads_, s, dy.data<T>(), argmax.data<std::uint8_t>(), dx.write<T>(), add);
    });
  }
  void average_pool(const PoolShape& s, const Tensor& x, Tensor& y) override {
    typed(x.dtype(), "average_pool", [&]<class T> { cpu::average_pool<T>(threads_, s, x.data<T>(), y.write<T>()); });
  }
  void average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add) override {
    typed(dy.dtype(), "average_pool_backward",
          [&]<class T> { cpu::average_pool_backward<T>(threads_, s, dy.data<T>(), dx.write<T>(), add); });
  }

  // ---- batch normalisation ------------------------------------------------------------------------------------------
  void batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma, const Tensor& beta,
                  Tensor& running_mean, Tensor& running_variance, Tensor& y, Tensor& mean,
                  Tensor& inverse_std) override {
    typed(x.dtype(), "batch_norm", [&]<class T> {
      cpu::batch_norm<T>(threads_, s, x.data<T>(), moments_of(x), data<T>(residual), gamma.data<float>(),
                         beta.data<float>(), running_mean.write<float>(), running_variance.write<float>(), y.write<T>(),
                         mean.write<float>(), inverse_std.write<float>());
    });
  }
  void batch_norm_inference(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                            const Tensor& beta, const Tensor& mean, const Tensor& variance, Tensor& y) override {
    typed(x.dtype(), "batch_norm_inference", [&]<class T> {
      cpu::batch_norm_inference<T>(threads_, s, x.data<T>(), data<T>(residual), gamma.data<float>(), beta.data<float>(),
                                   mean.data<float>(), variance.data<float>(), y.write<T>());
    });
  }
  void batch_norm_again(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                        const Tensor& beta, const Tensor& mean, const Tensor& inverse_std, Tensor& y) override {
    typed(x.dtype(), "batch_norm_again", [&]<class T> {
      cpu::batch_norm_again<T>(threads_, s, x.data<T>(), data<T>(residual), gamma.data<float>(), beta.data<float>(),
                               mean.data<float>(), inverse_std.data<float>(), y.write<T>());
    });
  }
  void batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy, const Tensor& gamma,
                           const Tensor& beta, const Tensor& mean, const Tensor& inverse_std,
                           const NormGradients& out) override {
    typed(x.dtype(), "batch_norm_backward", [&]<class T> {
      cpu::batch_norm_backward<T>(
          threads_, s, x.data<T>(), data<T>(y), dy.data<T>(), gamma.data<float>(), beta.data<float>(),
          mean.data<float>(), inverse_std.data<float>(),
          {write_if<T>(out.dx), write_if<T>(out.dresidual), write_if<float>(out.dgamma), write_if<float>(out.dbeta),
           out.add_dx, out.add_dresidual, out.add_dgamma, out.add_dbeta});
    });
  }

  // ---- rows and reductions ------------------------------------------------------------------------------------------
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const Tensor& x, Tensor& y,
              bool add) override {
    typed(x.dtype(), "reduce",
          [&]<class T> { cpu::reduce<T>(threads_, op, outer, middle, inner, x.data<T>(), y.write<T>(), add); });
  }
  void squared_norm(const Tensor& x, Tensor& y, bool add) override {
    typed(x.dtype(), "squared_norm", [&]<class T> {
      const double sum = cpu::squared_norm<T>(threads_, x.numel(), x.data<T>());
      T* to = y.write<T>();
      *to = static_cast<float>(add ? sum + static_cast<double>(*to) : sum);
    });
  }
  void cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss, Tensor& probabilities,
                     Tensor* correct) override {
    const Rows r(x);
    typed(x.dtype(), "cross_entropy", [&]<class T> {
      *loss.write<float>() = static_cast<float>(
          cpu::cross_entropy<T>(threads_, r.rows, r.classes, x.data<T>(), labels.data<std::int32_t>(), smoothing,
                                probabilities.write<float>(), write_if<std::int32_t>(correct)));
    });
  }
  void cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing, const Tensor& dloss,
                              Tensor& dx, bool add) override {
    const Rows r(dx);
    typed(dx.dtype(), "cross_entropy_backward", [&]<class T> {
      cpu::cross_entropy_backward<T>(threads_, r.rows, r.classes, probabilities.data<float>(),
                                     labels.data<std::int32_t>(), smoothing, *dloss.data<float>(), dx.write<T>(), add);
    });
  }

 private:
  struct Rows {  // a tensor as rows along its last axis
    std::int64_t classes, rows;
    explicit Rows(const Tensor& t) : classes(t.size(-1)), rows(classes ? t.numel() / classes : 0) {}
  };
  // The statistics that the last convolution took of its result, when x is that result, unchanged and whole.
  const Moments* moments_of(const Tensor& x) const {
    const bool same = measured_.owner == &x.writes() && measured_.count == x.writes().now();
    return same && moments_.counted() * moments_.channels == x.numel() ? &moments_ : nullptr;
  }
  AllocatorScratch scratch_;
  Convolution convolution_;
  Moments moments_;
  WeightKey measured_;  // whose, and after how many writes
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> cpu_backend(int threads) {
  cpu::require_instructions();
  return std::make_unique<cpu::CpuBackend>(threads > 0 ? threads : default_threads());
}

}  // namespace tandem
