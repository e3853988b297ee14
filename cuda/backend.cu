// The cuda backend. All work is queued on one stream. Matrix products are computed by cuBLAS, convolutions by cuDNN's
// plans, the rest by our own kernels (kernels.h). This file also records steps.
#include "core/backend.h"

#include <memory>
#include <optional>

#include "core/recording.h"
#include "core/text.h"
#include "cuda/check.h"
#include "cuda/convolution.h"
#include "cuda/device.h"
#include "cuda/elements.h"
#include "cuda/matrix.h"
#include "cuda/memory.h"
#include "cuda/norm.h"
#include "cuda/pool.h"
#include "cuda/queue.h"
#include "cuda/rows.h"
#include "cuda/weights.h"

namespace tandem {
namespace cuda {
namespace {

constexpr std::size_t matrix_workspace = std::size_t{32} << 20;  // NVIDIA's recommendation for Hopper

template <class T>
class CudaKernels;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const Device& device);
  ~CudaBackend() override { cudaStreamSynchronize(stream_); }

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
  void* stream() const override { return stream_; }

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
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  void synchronize() override {
    if (recording_) throw NotRecordable("the host waits for the GPU");
    CUDA_CHECK(cudaStreamSynchronize(stream_), "GPU ", device_.index, " (", device_.name, ")");
  }
  Queue& queue() override { return *queue_; }
  std::unique_ptr<Queue> new_queue() override { return cuda::new_queue(device_.index); }
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

  void deterministic(bool on) override { set(&EngineRules::deterministic, deterministic_ = on); }
  void exact_convolution(bool on) override { set(&EngineRules::exact, on); }
  void tf32(bool on) override {
    set(&EngineRules::tf32, on);
    matrix_.tf32(on);
  }

 private:
  template <class T>
  friend class CudaKernels;

  void set(bool EngineRules::*rule, bool on) {
    EngineRules rules = convolution_.rules();
    rules.*rule = on;
    convolution_.rules(rules);
  }

  // A step as a CUDA graph. Its memory is a separate pool. The capture mode is relaxed: the allocator may request
  // device memory and cuDNN may load a kernel during the capture. Our own checks refuse operations that a graph cannot
  // contain.
  class Graph : public Capture {
   public:
    explicit Graph(CudaBackend& b) : b_(b), pool_(b.memory().new_pool()) {}
    ~Graph() override {
      if (graph_) {
        cudaStreamSynchronize(b_.stream_);
        cudaGraphExecDestroy(graph_);
      }
      b_.memory().release_pool(pool_);
    }
    void begin() override {
      b_.synchronize();
      b_.memory().trim();  // makes memory that the eager steps freed available to the pool
      b_.weights_.convert_again();
      CUDA_CHECK(cudaStreamBeginCapture(b_.stream_, cudaStreamCaptureModeRelaxed));
      b_.memory().use_pool(pool_);
      b_.convolution_.recording(b_.recording_ = true);
    }
    std::string end() override {
      b_.convolution_.recording(b_.recording_ = false);
      b_.memory().use_pool(0);
      b_.weights_.convert_again();  // the conversions were only recorded, not executed
      cudaGraph_t graph = nullptr;
      cudaError_t status = cudaStreamEndCapture(b_.stream_, &graph);
      if (status == cudaSuccess) status = cudaGraphInstantiate(&graph_, graph, 0);
      if (graph) cudaGraphDestroy(graph);
      if (status == cudaSuccess) return {};
      cudaGetLastError();
      graph_ = nullptr;
      return text_of(status);
    }
    void replay() override { CUDA_CHECK(cudaGraphLaunch(graph_, b_.stream_), "the recorded step"); }

   private:
    CudaBackend& b_;
    int pool_;
    cudaGraphExec_t graph_ = nullptr;
  };

  Device device_;
  std::unique_ptr<Queue> queue_;  // destroyed after everything that uses it
  cudaStream_t stream_;
  Grid grid_;
  Staging staging_;
  Scratch workspace_;
  Matrix matrix_;
  Convolution convolution_;
  NarrowWeights weights_;
  bool recording_ = false;
};

// Work on one stream is in order, so scratch memory may be given back while a kernel still uses it.
template <class T>
class CudaKernels final : public Kernels<T> {
 public:
  explicit CudaKernels(CudaBackend& backend) : b_(backend) {}

  // ---- matrices -----------------------------------------------------------------------------------------------------
  void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k,
            In<T> a, In<T> b, Out<T> c, bool add) override {
    b_.matrix_.product(transpose_a, transpose_b, m, n, k, a, type, b, type, float(add), c, type, batch);
  }
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<float> w, In<float> bias, bool relu,
              Out<T> y) override {
    const Narrow weights(b_, w), narrow_bias(b_, bias);
    if (bias) {
      const T* b = narrow_bias.data();
      const LinearKey key{m, n, k, type, relu, alignment_of({x.data, weights.data(), b, y.data})};
      if (b_.matrix_.linear(key, x, weights.data(), b, y, b_.recording_)) return;
      // The bias is added in f32: adding it after the product would use a product that is already rounded.
      fill_rows<T>(b_.grid_, m, n, b, y);
    }
    b_.matrix_.product(false, true, m, n, k, x, type, weights.data(), type, bias ? 1.f : 0.f, y, type);
    if (relu) bias_relu<T>(b_.grid_, m, n, nullptr, true, y);
  }
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<float> w, Out<T> dx,
                            bool add) override {
    const Narrow weights(b_, w);
    b_.matrix_.product(false, false, m, k, n, dy, type, weights.data(), type, float(add), dx, type);
  }
  void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<float> dw,
                              bool add) override {
    b_.matrix_.product(true, false, n, k, m, dy, type, x, type, float(add), dw, DType::f32);
  }

  // ---- convolution --------------------------------------------------------------------------------------------------
  void conv2d(const ConvShape& s, In<T> x, In<float> w, In<float> bias, bool relu, Out<T> y) override {
    const Narrow weights(b_, w), narrow_bias(b_, bias);
    const Operands operands{x.data, weights.data(), y.data, narrow_bias.data(), bias.data};
    b_.convolution_.forward(s, type, operands, relu);
  }
  void conv2d_backward_data(const ConvShape& s, In<T> dy, In<float> w, Out<T> dx, bool add) override {
    const Narrow weights(b_, w);
    b_.convolution_.backward_data(s, type, dy, weights.data(), dx, add);
  }
  void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<float> dw, bool add) override {
    b_.convolution_.backward_filter(s, type, x, dy, dw, add);
  }
  void sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<float> db, bool add) override {
    const Columns room(b_, 1, channels);
    cuda::sum_rows<T>(b_.grid_, rows, channels, dy, db, add, room);
  }

  // ---- pooling ------------------------------------------------------------------------------------------------------
  void max_pool(const PoolShape& s, In<T> x, bool relu, Out<T> y, Out<std::uint8_t> argmax) override {
    cuda::max_pool<T>(b_.grid_, s, x, relu, y, argmax);
  }
  void max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) override {
    cuda::max_pool_backward<T>(b_.grid_, s, dy, argmax, dx, add);
  }
  void average_pool(const PoolShape& s, In<T> x, Out<T> y) override { cuda::average_pool<T>(b_.grid_, s, x, y); }
  void average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) override {
    cuda::average_pool_backward<T>(b_.grid_, s, dy, dx, add);
  }

  // ---- batch normalisation ------------------------------------------------------------------------------------------
  void batch_norm(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta, Out<float> running_mean,
                  Out<float> running_variance, Out<T> y, Out<float> mean, Out<float> inverse_std) override {
    const Columns room(b_, 2, s.channels);
    cuda::batch_norm<T>(b_.grid_, s, x, residual, gamma, beta, running_mean, running_variance, y, mean, inverse_std,
                        room);
  }
  void normalise(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta, In<float> mean,
                 In<float> spread, bool is_variance, Out<T> y) override {
    const Columns room(b_, 0, s.channels);
    if (is_variance)
      cuda::batch_norm_inference<T>(b_.grid_, s, x, residual, gamma, beta, mean, spread, y, room);
    else
      cuda::batch_norm_again<T>(b_.grid_, s, x, residual, gamma, beta, mean, spread, y);
  }
  void batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<float> gamma, In<float> beta,
                           In<float> mean, In<float> inverse_std, const tandem::NormOutputs<T, float>& out) override {
    const Columns room(b_, 2, s.channels);
    cuda::batch_norm_backward<T>(b_.grid_, s, x, y, dy, gamma, beta, mean, inverse_std, out, room);
  }

  // ---- rows and reductions ------------------------------------------------------------------------------------------
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
              bool add) override {
    cuda::reduce<T>(b_.grid_, op, outer, middle, inner, x, y, add);
  }
  void squared_norm(std::int64_t n, In<T> x, Out<float> y, bool add) override {
    Scratch room(b_.memory(), most_parts * sizeof(float));
    cuda::squared_norm<T>(b_.grid_, n, x, y, add, room.carve<float>(most_parts));
  }
  void cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels, double smoothing,
                     Out<float> loss, Out<float> probabilities, Out<std::int32_t> correct) override {
    Scratch room(b_.memory(), 2 * std::size_t(rows) * sizeof(float));
    cuda::cross_entropy<T>(b_.grid_, rows, classes, x, labels, smoothing, loss, probabilities, correct,
                           room.carve<float>(2 * std::size_t(rows)));
  }
  void cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<float> probabilities, In<std::int32_t> labels,
                              double smoothing, In<float> dloss, Out<T> dx, bool add) override {
    cuda::cross_entropy_backward<T>(b_.grid_, rows, classes, probabilities, labels, smoothing, dloss, dx, add);
  }

 private:
  static constexpr DType type = dtype_of<T>;

  // Partial sums of `sums` values per channel, and two numbers of each channel (kernels.h).
  struct Columns : Scratch {
    Columns(CudaBackend& b, int sums, std::int64_t channels)
        : Scratch(b.memory(), (column_scratch(sums, channels) + 2 * std::size_t(channels)) * sizeof(float)) {}
    operator float*() const { return reinterpret_cast<float*>(data()); }
  };

  // Weights in type T, for products with pictures of that type: the weights themselves, their cached copy, or a copy
  // for this call.
  class Narrow {
   public:
    Narrow(CudaBackend& b, In<float> w)
        : kept_(!w || type == DType::f32 ? w.data : b.weights_.of(*w.tensor, type)),
          room_(b.memory(), !w || kept_ ? 0 : std::size_t(w.tensor->numel()) * sizeof(T)) {
      if (w && !kept_) convert(b.grid_, w.tensor->numel(), w.data, reinterpret_cast<T*>(room_.data()), false);
    }
    const T* data() const { return static_cast<const T*>(kept_ ? kept_ : room_.data()); }

   private:
    const void* kept_;
    Scratch room_;
  };

  CudaBackend& b_;
};

CudaBackend::CudaBackend(const Device& device)
    : Backend("cuda", std::make_unique<DeviceMemory>(device), 1),
      device_(device),
      queue_(cuda::new_queue(device.index)),
      stream_(static_cast<cudaStream_t>(queue_->handle())),
      grid_{stream_, device.processors},
      staging_(stream_),
      workspace_(memory(), matrix_workspace),
      matrix_(stream_, workspace_.data(), matrix_workspace),
      convolution_(grid_, memory()),
      weights_([this](const float* from, std::int64_t numel, Tensor& to) {
        dispatch_among<bf16, f16>(to.dtype(), "weights",
                                  [&]<class T> { convert(grid_, numel, from, to.write<T>(), false); });
      }) {
  provide<float>(std::make_unique<CudaKernels<float>>(*this));
  provide<bf16>(std::make_unique<CudaKernels<bf16>>(*this));
  provide<f16>(std::make_unique<CudaKernels<f16>>(*this));
}

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> cuda_backend(int index) {
  return std::make_unique<cuda::CudaBackend>(cuda::use_device(index));
}
int cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // clears the error
  return 0;
}

}  // namespace tandem
