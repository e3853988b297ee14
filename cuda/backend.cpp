// The cuda backend: one stream, and everything queued on it. Matrix products go to cuBLAS, convolutions to cuDNN's
// plans, the rest to kernels of our own (kernels.h). This file unpacks tensors into pointers, keeps narrow copies of
// the weights, and records steps.
#include "core/backend.h"
#include "core/operands.h"

#include <memory>
#include <optional>

#include "core/recording.h"
#include "core/text.h"
#include "cuda/check.h"
#include "cuda/convolution.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/matrix.h"
#include "cuda/memory.h"
#include "cuda/queue.h"
#include "cuda/weights.h"

namespace tandem {
namespace cuda {
namespace {

// f.operator()<T>() for the types that pictures have.
template <class F>
void typed(DType dtype, const char* op, const F& f) {
  typed_among<float, bf16, f16>(dtype, op, "cuda", f);
}

struct Queue {  // the stream, gone after all that uses it
  cudaStream_t stream = nullptr;
  Queue() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Queue() { cudaStreamDestroy(stream); }
  Queue(const Queue&) = delete;
};

// Memory for the length of a call: work on one stream is in order, so it may be given back while a kernel still uses
// it.
class Scratch {
 public:
  Scratch(CachingAllocator& memory, std::size_t bytes) : memory_(memory) {
    MemoryUse use(Use::scratch);
    if (bytes) data_ = memory.take(bytes);
  }
  ~Scratch() { memory_.give(data_); }
  Scratch(const Scratch&) = delete;
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  CachingAllocator& memory_;
  void* data_ = nullptr;
};

constexpr std::size_t matrix_workspace = std::size_t{32} << 20;  // what NVIDIA recommends for Hopper

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const Device& device)
      : Backend("cuda", std::make_unique<DeviceMemory>(device), 1),
        device_(device),
        in_order_(device.index, queue_.stream),
        grid_{queue_.stream, device.processors},
        staging_(queue_.stream),
        workspace_(memory(), matrix_workspace),
        matrix_(queue_.stream, workspace_.data(), matrix_workspace),
        convolution_(grid_, {[this](std::size_t bytes) {
                               MemoryUse use(Use::scratch);
                               return memory().take(bytes);
                             },
                             [this](void* block) { memory().give(block); }}),
        weights_([this](const float* from, std::int64_t numel, Tensor& to) {
          typed(to.dtype(), "weights", [&]<class T> { convert(grid_, numel, from, to.write<T>(), false); });
        }) {}
  ~CudaBackend() override { cudaStreamSynchronize(queue_.stream); }

  std::string description() const override {
    return device_.name + " (GPU " + std::to_string(device_.index) + ", sm_" + std::to_string(device_.major) +
           std::to_string(device_.minor) + ", " + std::to_string(device_.processors) + " processors, " +
           readable_bytes(double(device_.bytes)) + "), " + library_versions();
  }
  std::vector<std::string> libraries() const override { return library_paths(); }
  bool on_device() const override { return true; }
  bool supports(DType dtype) const override {
    return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  }
  void* stream() const override { return queue_.stream; }

  // ---- memory -------------------------------------------------------------------------------------------------------
  void upload(void* to, const void* from, std::size_t bytes) override {
    if (recording_)
      throw NotRecordable("memory of the host is copied to the GPU, and would be the same in every replay");
    staging_.send(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    if (recording_) throw NotRecordable("a value is read on the host");
    staging_.fetch(to, from, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, queue_.stream));
  }
  void synchronize() override {
    if (recording_) throw NotRecordable("the host waits for the GPU");
    CUDA_CHECK(cudaStreamSynchronize(queue_.stream), "GPU ", device_.index, " (", device_.name, ")");
  }
  tandem::Queue& queue() override { return in_order_; }
  std::unique_ptr<tandem::Queue> new_queue() override { return cuda::new_queue(device_.index); }
  std::unique_ptr<Event> new_event() override { return std::make_unique<DeviceEvent>(device_.index); }
  std::shared_ptr<void> pinned(std::size_t bytes) override { return pinned_memory(device_.index, bytes); }
  std::string identity() const override { return device_.uuid; }
  void forget(const WriteCount& owner) override { weights_.forget(owner); }

  // ---- recording ----------------------------------------------------------------------------------------------------
  std::function<void()> record(std::function<void()> step) override {
    auto recording = std::make_shared<Recording>(std::move(step), std::make_unique<Graph>(*this));
    return [recording] { (*recording)(); };
  }

  bool records() const override { return true; }
  bool recording() const override { return recording_; }

  void deterministic(bool on) override {
    deterministic_ = on;
    EngineRules rules = convolution_.rules();
    rules.deterministic = on;
    convolution_.rules(rules);
  }
  void exact_convolution(bool on) override {
    EngineRules rules = convolution_.rules();
    rules.exact = on;
    convolution_.rules(rules);
  }
  void tf32(bool on) override {
    EngineRules rules = convolution_.rules();
    rules.tf32 = on;
    convolution_.rules(rules);
    matrix_.tf32(on);
  }

  // ---- matrices -----------------------------------------------------------------------------------------------------
  void gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) override {
    const std::int64_t m = c.size(-2), n = c.size(-1), k = a.size(transpose_a ? -2 : -1);
    matrix_.product(transpose_a, transpose_b, m, n, k, a.raw(), a.dtype(), b.raw(), b.dtype(), add ? 1.f : 0.f,
                    c.raw_write(), c.dtype(), c.rank() == 3 ? c.size(0) : 1);
  }
  void linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override {
    const std::int64_t n = w.size(0), k = w.size(1), m = y.numel() / std::max<std::int64_t>(1, n);
    const Narrow narrow(*this, w, x.dtype());
    std::optional<Narrow> narrow_bias;
    if (bias) {
      const void* b = narrow_bias.emplace(*this, *bias, x.dtype()).data();
      const LinearKey key{m, n, k, x.dtype(), relu, alignment_of({x.raw(), narrow.data(), b, y.raw()})};
      if (matrix_.linear(key, x.raw(), narrow.data(), b, y.raw_write(), recording_)) return;
      // The product is added to the bias in f32: a bias behind it would meet a product that was rounded already.
      typed(x.dtype(), "linear", [&]<class T> { fill_rows(grid_, m, n, static_cast<const T*>(b), y.write<T>()); });
    }
    matrix_.product(false, true, m, n, k, x.raw(), x.dtype(), narrow.data(), x.dtype(), bias ? 1.f : 0.f, y.raw_write(),
                    y.dtype());
    if (relu) typed(x.dtype(), "linear", [&]<class T> { bias_relu(grid_, m, n, nullptr, true, y.write<T>()); });
  }
  void linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override {
    const std::int64_t n = w.size(0), k = w.size(1), m = dy.numel() / std::max<std::int64_t>(1, n);
    const Narrow narrow(*this, w, dy.dtype());
    matrix_.product(false, false, m, k, n, dy.raw(), dy.dtype(), narrow.data(), dy.dtype(), add ? 1.f : 0.f,
                    dx.raw_write(), dx.dtype());
  }
  void linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override {
    const std::int64_t n = dw.size(0), k = dw.size(1), m = dy.numel() / std::max<std::int64_t>(1, n);
    matrix_.product(true, false, n, k, m, dy.raw(), dy.dtype(), x.raw(), x.dtype(), add ? 1.f : 0.f, dw.raw_write(),
                    dw.dtype());
  }

  // ---- convolution --------------------------------------------------------------------------------------------------
  void conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override {
    const Narrow narrow(*this, w, x.dtype());
    std::optional<Narrow> narrow_bias;
    if (bias) narrow_bias.emplace(*this, *bias, x.dtype());
    convolution_.forward(
        s, x.dtype(), {x.raw(), narrow.data(), y.raw_write(), bias ? narrow_bias->data() : nullptr, data<float>(bias)},
        relu);
  }
  void conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override {
    const Narrow narrow(*this, w, dy.dtype());
    convolution_.backward_data(s, dy.dtype(), dy.raw(), narrow.data(), dx.raw_write(), add);
  }
  void conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override {
    convolution_.backward_filter(s, x.dtype(), x.raw(), dy.raw(), dw.write<float>(), add);
  }
  void sum_rows(const Tensor& dy, Tensor& db, bool add) override {
    const std::int64_t channels = db.numel();
    if (!channels) return;
    const Scratch room = columns(1, channels);
    typed(dy.dtype(), "sum_rows", [&]<class T> {
      cuda::sum_rows(grid_, dy.numel() / channels, channels, dy.data<T>(), db.write<float>(), add, room.floats());
    });
  }

  // ---- pooling ------------------------------------------------------------------------------------------------------
  void max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax) override {
    require(!argmax || s.kh * s.kw <= 255, "max_pool: a window of ", s.kh, "×", s.kw, " has more than 255 positions");
    typed(x.dtype(), "max_pool",
          [&]<class T> { cuda::max_pool(grid_, s, x.data<T>(), relu, y.write<T>(), write_if<std::uint8_t>(argmax)); });
  }
  void max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx, bool add) override {
    typed(dy.dtype(), "max_pool_backward", [&]<class T> {
      cuda::max_pool_backward(grid_, s, dy.data<T>(), argmax.data<std::uint8_t>(), dx.write<T>(), add);
    });
  }
  void average_pool(const PoolShape& s, const Tensor& x, Tensor& y) override {
    typed(x.dtype(), "average_pool", [&]<class T> { cuda::average_pool(grid_, s, x.data<T>(), y.write<T>()); });
  }
  void average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add) override {
    typed(dy.dtype(), "average_pool_backward",
          [&]<class T> { cuda::average_pool_backward(grid_, s, dy.data<T>(), dx.write<T>(), add); });
  }

  // ---- batch normalisation ------------------------------------------------------------------------------------------
  void batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma, const Tensor& beta,
                  Tensor& running_mean, Tensor& running_variance, Tensor& y, Tensor& mean,
                  Tensor& inverse_std) override {
    const Scratch room = columns(2, s.channels);
    typed(x.dtype(), "batch_norm", [&]<class T> {
      cuda::batch_norm(grid_, s, x.data<T>(), data<T>(residual), gamma.data<float>(), beta.data<float>(),
                       running_mean.write<float>(), running_variance.write<float>(), y.write<T>(), mean.write<float>(),
                       inverse_std.write<float>(), room.floats());
    });
  }
  void batch_norm_inference(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                            const Tensor& beta, const Tensor& mean, const Tensor& variance, Tensor& y) override {
    const Scratch room = columns(0, s.channels);
    typed(x.dtype(), "batch_norm_inference", [&]<class T> {
      cuda::batch_norm_inference(grid_, s, x.data<T>(), data<T>(residual), gamma.data<float>(), beta.data<float>(),
                                 mean.data<float>(), variance.data<float>(), y.write<T>(), room.floats());
    });
  }
  void batch_norm_again(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                        const Tensor& beta, const Tensor& mean, const Tensor& inverse_std, Tensor& y) override {
    typed(x.dtype(), "batch_norm_again", [&]<class T> {
      cuda::batch_norm_again(grid_, s, x.data<T>(), data<T>(residual), gamma.data<float>(), beta.data<float>(),
                             mean.data<float>(), inverse_std.data<float>(), y.write<T>());
    });
  }
  void batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy, const Tensor& gamma,
                           const Tensor& beta, const Tensor& mean, const Tensor& inverse_std,
                           const NormGradients& out) override {
    const Scratch room = columns(2, s.channels);
    typed(x.dtype(), "batch_norm_backward", [&]<class T> {
      cuda::batch_norm_backward(grid_, s, x.data<T>(), data<T>(y), dy.data<T>(), gamma.data<float>(),
                                beta.data<float>(), mean.data<float>(), inverse_std.data<float>(), outputs<T>(out),
                                room.floats());
    });
  }

  // ---- rows and reductions ------------------------------------------------------------------------------------------
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const Tensor& x, Tensor& y,
              bool add) override {
    typed(x.dtype(), "reduce",
          [&]<class T> { cuda::reduce(grid_, op, outer, middle, inner, x.data<T>(), y.write<T>(), add); });
  }
  void squared_norm(const Tensor& x, Tensor& y, bool add) override {
    const Scratch room(memory(), most_parts * sizeof(float));
    typed(x.dtype(), "squared_norm",
          [&]<class T> { cuda::squared_norm(grid_, x.numel(), x.data<T>(), y.write<float>(), add, room.floats()); });
  }
  void cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss, Tensor& probabilities,
                     Tensor* correct) override {
    const Rows r(x);
    const Scratch room(memory(), 2 * std::size_t(r.rows) * sizeof(float));
    typed(x.dtype(), "cross_entropy", [&]<class T> {
      cuda::cross_entropy(grid_, r.rows, r.classes, x.data<T>(), labels.data<std::int32_t>(), smoothing,
                          loss.write<float>(), probabilities.write<float>(), write_if<std::int32_t>(correct),
                          room.floats());
    });
  }
  void cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing, const Tensor& dloss,
                              Tensor& dx, bool add) override {
    const Rows r(dx);
    typed(dx.dtype(), "cross_entropy_backward", [&]<class T> {
      cuda::cross_entropy_backward(grid_, r.rows, r.classes, probabilities.data<float>(), labels.data<std::int32_t>(),
                                   smoothing, dloss.data<float>(), dx.write<T>(), add);
    });
  }

 private:
  struct Rows {  // a tensor as rows along its last axis
    std::int64_t classes, rows;
    explicit Rows(const Tensor& t) : classes(t.size(-1)), rows(classes ? t.numel() / classes : 0) {}
  };

  // Partial sums of `sums` values per channel, and two numbers of each channel (kernels.h).
  Scratch columns(int sums, std::int64_t channels) {
    return Scratch(memory(), (column_scratch(sums, channels) + 2 * std::size_t(channels)) * sizeof(float));
  }

  template <class T>
  static NormOutputs<T> outputs(const NormGradients& out) {
    return {write_if<T>(out.dx),
            write_if<T>(out.dresidual),
            write_if<float>(out.dgamma),
            write_if<float>(out.dbeta),
            out.add_dx,
            out.add_dresidual,
            out.add_dgamma,
            out.add_dbeta};
  }

  // Weights as products with pictures of this type want them: themselves, their kept copy, or a copy for this call.
  class Narrow {
   public:
    Narrow(CudaBackend& b, const Tensor& w, DType type)
        : kept_(w.dtype() == type ? w.raw() : b.weights_.of(w, type)),
          room_(b.memory(), kept_ ? 0 : std::size_t(w.numel()) * size_of(type)) {
      if (kept_) return;
      typed(type, "weights",
            [&]<class T> { convert(b.grid_, w.numel(), w.data<float>(), static_cast<T*>(room_.data()), false); });
    }
    const void* data() const { return kept_ ? kept_ : room_.data(); }

   private:
    const void* kept_;
    Scratch room_;
  };

  // A step as a CUDA graph. Its memory is a pool of its own. Capturing is relaxed: the allocator may ask the device for
  // more and cuDNN may load a kernel meanwhile; what a graph cannot hold we refuse ourselves.
  class Graph : public Capture {
   public:
    explicit Graph(CudaBackend& b) : b_(b), pool_(b.memory().new_pool()) {}
    ~Graph() override {
      if (graph_) cudaStreamSynchronize(b_.queue_.stream), cudaGraphExecDestroy(graph_);
      b_.memory().release_pool(pool_);
    }
    void begin() override {
      b_.synchronize();
      b_.memory().trim();  // what the eager steps left free is the pool's now
      b_.weights_.convert_again();
      CUDA_CHECK(cudaStreamBeginCapture(b_.queue_.stream, cudaStreamCaptureModeRelaxed));
      b_.memory().use_pool(pool_);
      b_.convolution_.recording(b_.recording_ = true);
    }
    std::string end() override {
      b_.convolution_.recording(b_.recording_ = false);
      b_.memory().use_pool(0);
      b_.weights_.convert_again();  // nothing was converted: the work was only written down
      cudaGraph_t graph = nullptr;
      cudaError_t status = cudaStreamEndCapture(b_.queue_.stream, &graph);
      if (status == cudaSuccess) status = cudaGraphInstantiate(&graph_, graph, 0);
      if (graph) cudaGraphDestroy(graph);
      if (status == cudaSuccess) return {};
      cudaGetLastError();
      graph_ = nullptr;
      return text_of(status);
    }
    void replay() override { CUDA_CHECK(cudaGraphLaunch(graph_, b_.queue_.stream), "the recorded step"); }

   private:
    CudaBackend& b_;
    int pool_;
    cudaGraphExec_t graph_ = nullptr;
  };

  Device device_;
  Queue queue_;
  DeviceQueue in_order_;
  Grid grid_;
  Staging staging_;
  Scratch workspace_;
  Matrix matrix_;
  Convolution convolution_;
  NarrowWeights weights_;
  bool recording_ = false;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> cuda_backend(int index) {
  return std::make_unique<cuda::CudaBackend>(cuda::use_device(index));
}
int cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // it stays set otherwise
  return 0;
}

}  // namespace tandem
