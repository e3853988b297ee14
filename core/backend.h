// Backend: one object per device. It owns the device's memory and its matrix products, convolutions, pooling,
// normalisation and reductions. Element-wise operations are not in this class: they are named functors, run by launch()
// (core/launch.h).
//
// The public operations are not virtual. Each checks its tensors once (device, type, number of elements), and calls one
// function of Kernels<T>, which a backend implements for every type T that it supports. Kernels check nothing again.
//
// Contracts shared by all operations
//   - pictures [n, h, w, c], filters [c_out, kh, kw, c_in/groups], matrices row-major, tensors contiguous
//   - outputs are allocated by the caller; the sizes in s were checked by the operation in autograd/
//   - T: f32 and bf16 on every backend (f64 on the reference one, f16 on CUDA); parameters, their gradients and
//     statistics are f32 (f64 when x is f64), for any type of the pictures
//   - `add`: add to the output instead of overwriting it; for a new gradient it is false and old contents are never
//     read
//   - an optional tensor is passed by pointer; null means absent
//   - ReLU propagates NaN, forward and backward, and the maximum with a NaN is NaN, so that failures stay visible
//   - calls on one backend come from one thread at a time; a second rank has a backend object of its own
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/queue.h"
#include "core/tensor.h"
#include "core/trace/trace.h"

namespace tandem {

enum class Reduction { sum, max };

// Batch normalisation over all axes but the last: y = relu?((x − mean)·gamma/√(var + epsilon) + beta + residual?)
struct NormShape {
  std::int64_t rows = 0, channels = 0;
  double epsilon = 1e-5, momentum = 0.1;  // running = (1 − momentum)·running + momentum·batch (unbiased variance)
  bool relu = false;
};

// The requested parts of a batch norm's gradient. Each may be null; dresidual may be dy itself (in place).
template <class Picture, class Parameter>
struct NormOutputs {
  Picture *dx = nullptr, *dresidual = nullptr;
  Parameter *dgamma = nullptr, *dbeta = nullptr;
  bool add_dx = false, add_dresidual = false, add_dgamma = false, add_dbeta = false;
};

// A tensor as a kernel receives it: a pointer of the right type (null: an optional tensor is absent), and the tensor
// itself, whose write count identifies the state of prepared copies. In<T> is read, Out<T> is written.
template <class T>
struct In {
  const T* data = nullptr;
  const Tensor* tensor = nullptr;
  In(const Tensor& t) : data(t.data<T>()), tensor(&t) {}
  In(const Tensor* t) : data(t ? t->data<T>() : nullptr), tensor(t) {}
  operator const T*() const { return data; }
};
template <class T>
struct Out {
  T* data = nullptr;
  const Tensor* tensor = nullptr;
  Out(Tensor& t) : data(t.write<T>()), tensor(&t) {}
  Out(Tensor* t) : data(t ? t->write<T>() : nullptr), tensor(t) {}
  operator T*() const { return data; }
};

// The operations of Backend on elements of type T. All are pure virtual: a backend that lacks one does not compile.
template <class T>
class Kernels {
 public:
  using P = Accumulator<T>;  // the type of parameters, their gradients, statistics and losses
  virtual ~Kernels() = default;
  // c[m, n] (+)= op(a)·op(b) for `batch` matrices that are stored one after another
  virtual void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n,
                    std::int64_t k, In<T> a, In<T> b, Out<T> c, bool add) = 0;
  // x[m, k], w[n, k], y[m, n]
  virtual void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<P> w, In<P> bias, bool relu,
                      Out<T> y) = 0;
  virtual void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<P> w, Out<T> dx,
                                    bool add) = 0;
  virtual void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<P> dw,
                                      bool add) = 0;
  virtual void conv2d(const ConvShape& s, In<T> x, In<P> w, In<P> bias, bool relu, Out<T> y) = 0;
  virtual void conv2d_backward_data(const ConvShape& s, In<T> dy, In<P> w, Out<T> dx, bool add) = 0;
  virtual void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<P> dw, bool add) = 0;
  virtual void sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<P> db, bool add) = 0;
  virtual void max_pool(const PoolShape& s, In<T> x, bool relu, Out<T> y, Out<std::uint8_t> argmax) = 0;
  virtual void max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) = 0;
  virtual void average_pool(const PoolShape& s, In<T> x, Out<T> y) = 0;
  virtual void average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) = 0;
  virtual void batch_norm(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, Out<P> running_mean,
                          Out<P> running_variance, Out<T> y, Out<P> mean, Out<P> inverse_std) = 0;
  // spread: the variance, or 1/√(variance + epsilon)
  virtual void normalise(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, In<P> mean, In<P> spread,
                         bool is_variance, Out<T> y) = 0;
  virtual void batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<P> gamma, In<P> beta, In<P> mean,
                                   In<P> inverse_std, const NormOutputs<T, P>& out) = 0;
  virtual void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
                      bool add) = 0;
  virtual void squared_norm(std::int64_t n, In<T> x, Out<P> y, bool add) = 0;
  virtual void cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels,
                             double smoothing, Out<P> loss, Out<P> probabilities, Out<std::int32_t> correct) = 0;
  virtual void cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<P> probabilities,
                                      In<std::int32_t> labels, double smoothing, In<P> dloss, Out<T> dx, bool add) = 0;
};

class Backend {
 public:
  Backend(std::string name, std::unique_ptr<MemorySource> source, int threads)
      : name_(std::move(name)), memory_(new CachingAllocator(std::move(source), this)), threads_(threads) {}
  virtual ~Backend() { memory_->backend_ends(); }
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const std::string& name() const { return name_; }  // "reference", "cpu", "cuda"
  virtual std::string description() const = 0;       // device and library versions, one line
  // The files from which this process has loaded these libraries
  virtual std::vector<std::string> libraries() const { return {}; }
  CachingAllocator& memory() { return *memory_; }
  int threads() const { return threads_; }          // host threads per parallel region; 1 on devices
  virtual bool on_device() const { return false; }  // false: pointers may be read by the host
  virtual bool supports(DType dtype) const = 0;
  virtual void* stream() const { return nullptr; }  // the device's current stream
  virtual std::unique_ptr<Follower> follower() { return queue().follower(); }

  // Memory movement. upload and download return when the host buffer may be reused.
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;  // within the device
  virtual void synchronize() = 0;

  // Asynchronous work (core/queue.h). The defaults are for a backend whose calls return when their work is done.
  virtual bool asynchronous() const { return on_device(); }  // operations may return before their work is done
  virtual Queue& queue();                                    // holds all operations, in the order of the calls
  virtual std::unique_ptr<Queue> new_queue();                // another queue, for copies and collectives
  virtual std::unique_ptr<Event> new_event();                // events and queues must be destroyed before the backend
  virtual std::shared_ptr<void> pinned(std::size_t bytes);   // host memory that the device reads and writes
  virtual std::string identity() const { return {}; }        // the device's, unique over all machines; empty: the host

  // Called when the owner of weights is destroyed: the backend drops its prepared copies (weights in its own layout).
  virtual void forget(const WriteCount& owner) { (void)owner; }

  // Returns a function that runs the step. The default calls it each time. The CUDA backend records a graph: it calls
  // the step twice, records the third call, and then replays the recorded device work, at the same addresses, without
  // calling the step. A step that cannot be recorded is called each time; stderr says why. Destroy the result before
  // the backend.
  virtual std::function<void()> record(std::function<void()> step) { return step; }
  virtual bool records() const { return false; }
  virtual bool recording() const { return false; }  // a step is being recorded: the host must not wait

  // Bit-identical results for the same binary, device and number of threads: algorithms are chosen by rule, not by
  // timing.
  virtual void deterministic(bool on) = 0;
  bool deterministic() const { return deterministic_; }
  virtual void exact_convolution(bool on) = 0;  // excludes Winograd algorithms
  virtual void tf32(bool on) { (void)on; }      // f32 products on a GPU's tensor cores, with 10 bits of precision

  // ---- matrices -----------------------------------------------------------------------------------------------------
  // c = op(a)·op(b) (+ c if add). All have one type, and rank 2, or rank 3 with a leading batch axis.
  void gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add);
  // y[m, n] = relu?(x[m, k]·w[n, k]ᵀ + bias[n])
  void linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y);
  void linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add);
  void linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add);

  // ---- convolution --------------------------------------------------------------------------------------------------
  void conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y);
  void conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx, bool add);
  void conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw, bool add);
  // db[c] = Σ over all rows of dy[…, c]: the bias gradient of linear and conv2d.
  void sum_rows(const Tensor& dy, Tensor& db, bool add);

  // ---- pooling ------------------------------------------------------------------------------------------------------
  // y = max over the window, or relu of it. argmax[y] (u8) is the position kh_i·kw + kw_i of the first largest element
  // of the window (of the last NaN, as in PyTorch), 255 where relu set it to 0; null when no gradient is wanted.
  // Elements outside the picture are ignored.
  void max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax);
  void max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx, bool add);
  void average_pool(const PoolShape& s, const Tensor& x, Tensor& y);
  void average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add);

  // ---- batch normalisation ------------------------------------------------------------------------------------------
  // x, residual, y: s.rows × s.channels elements; gamma, beta, running_*, mean, inverse_std: s.channels.
  void batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma, const Tensor& beta,
                  Tensor& running_mean, Tensor& running_variance, Tensor& y, Tensor& mean, Tensor& inverse_std);
  // With the running statistics, for evaluation.
  void batch_norm_inference(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                            const Tensor& beta, const Tensor& mean, const Tensor& variance, Tensor& y) {
    normalise(s, x, residual, gamma, beta, mean, variance, true, y);
  }
  // Computes the y of batch_norm again, bit for bit, from the statistics that batch_norm stored.
  void batch_norm_again(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                        const Tensor& beta, const Tensor& mean, const Tensor& inverse_std, Tensor& y) {
    normalise(s, x, residual, gamma, beta, mean, inverse_std, false, y);
  }
  // y is needed for the mask only when s.relu and there was a residual (else the mask is recomputed from x).
  using NormGradients = NormOutputs<Tensor, Tensor>;
  void batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy, const Tensor& gamma,
                           const Tensor& beta, const Tensor& mean, const Tensor& inverse_std, const NormGradients& out);

  // ---- rows and reductions ------------------------------------------------------------------------------------------
  // x viewed as [outer, middle, inner] → y[outer, inner].
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const Tensor& x, Tensor& y,
              bool add);
  // y (one element; f32, or f64 when x is f64) = Σ x² (+ y if add), summed in double. y is inf or NaN exactly when an
  // element is, or when the sum exceeds the range of y's type.
  void squared_norm(const Tensor& x, Tensor& y, bool add);
  // loss (one f32 element) = mean over rows of −Σ_c q_c·log softmax(x)_c, q = (1−ε)·onehot(label) + ε/classes;
  // probabilities (the shape of x) are kept for backward; both are f32, or f64 when x is f64. correct (i32, one
  // element) += rows whose first largest logit is the label.
  void cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss, Tensor& probabilities,
                     Tensor* correct);
  void cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing, const Tensor& dloss,
                              Tensor& dx, bool add);

 private:
  void normalise(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma, const Tensor& beta,
                 const Tensor& mean, const Tensor& spread, bool is_variance, Tensor& y);
  std::string name_;
  Ref<CachingAllocator> memory_;  // shared with the tensors that still exist
  std::tuple<std::unique_ptr<Kernels<float>>, std::unique_ptr<Kernels<bf16>>, std::unique_ptr<Kernels<f16>>,
             std::unique_ptr<Kernels<double>>>
      kernels_;

 protected:
  template <class T>
  void provide(std::unique_ptr<Kernels<T>> kernels) {  // called by the constructor of a backend, once for each type
    std::get<std::unique_ptr<Kernels<T>>>(kernels_) = std::move(kernels);
  }
  int threads_;
  bool deterministic_ = false;
};

// Checks t, an operand of the operation `op` whose input is x. Throws Error when t is not on the backend, or when it is
// a parameter and its type is not f32 (f64 if x is f64).
void check_operand(const char* op, const Backend& backend, const Tensor& x, const Tensor& t, bool is_parameter);

// Plain loops over float, bf16 or double. It is slow; the other backends are tested against it.
std::unique_ptr<Backend> reference_backend(int threads = 1);
// The fast CPU backend: oneDNN and Tandem's own kernels. In a build without oneDNN this is the reference backend.
std::unique_ptr<Backend> cpu_backend(int threads = 0);  // 0: default_threads()
// The GPU with this index; throws Error with the cause when there is none. Defined in cuda/, or in cuda/none.cpp.
std::unique_ptr<Backend> cuda_backend(int index);
int cuda_devices();  // number of GPUs that this process sees; 0 without CUDA. Defined in the same files

}  // namespace tandem
