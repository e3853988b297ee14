// The wrapper of oneDNN. What differs between versions 2 and 3 is in the make_… functions: version 2 builds a primitive
// descriptor from an operation descriptor, version 3 takes the same arguments directly.
#include "core/cpu/onednn.h"

#include <algorithm>
#include <atomic>
#include <dnnl.hpp>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/cpu/library_threads.h"
#include "core/cpu/prepared.h"
#include "core/cpu/simd.h"
#include "core/error.h"

namespace tandem::cpu {
namespace {

using dnnl::memory;
using Dims = memory::dims;

// Runs a piece of library work; what the library throws becomes an Error that says where and what can be done.
template <class Work>
auto checked(const char* operation, const std::string& shapes, const Work& work) {
  try {
    return work();
  } catch (const dnnl::error& e) {
    const bool missing = e.status == dnnl_unimplemented;
    fail(__FILE__, ": oneDNN ", operation, " ", shapes, ": ", e.what(), " (status ", int(e.status), "). ",
         missing ? "This CPU has no kernel for it: try f32"
                 : "Check the shapes; ONEDNN_VERBOSE=1 shows the library's view");
  }
}

std::string text(const ConvShape& s, DType t) {
  std::ostringstream out;
  out << name_of(t) << " x[" << s.n << ',' << s.h << ',' << s.w << ',' << s.c_in << "] w[" << s.c_out << ',' << s.kh
      << ',' << s.kw << ',' << s.c_in / s.groups << "] stride " << s.stride_h << ',' << s.stride_w << " pad " << s.pad_h
      << ',' << s.pad_w << " dilation " << s.dilation_h << ',' << s.dilation_w << " groups " << s.groups;
  return out.str();
}
std::string text(std::int64_t m, std::int64_t n, std::int64_t k, DType t) {
  std::ostringstream out;
  out << name_of(t) << " m " << m << " n " << n << " k " << k;
  return out.str();
}

memory::data_type type_of(DType t) { return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32; }

memory::desc any_layout(const Dims& dims, memory::data_type t) { return {dims, t, memory::format_tag::any}; }
memory::desc pictures(std::int64_t n, std::int64_t h, std::int64_t w, std::int64_t c, memory::data_type t) {
  return {{n, c, h, w}, t, memory::format_tag::nhwc};
}
memory::desc matrix(std::int64_t rows, std::int64_t columns, memory::data_type t, bool transposed = false) {
  return {{rows, columns}, t, transposed ? memory::format_tag::ba : memory::format_tag::ab};
}

// Filters w[c_out][kh][kw][c_in / groups] as the library counts axes: (groups,) out, in, height, width.
Dims filter_dims(const ConvShape& s) {
  if (s.groups == 1) return {s.c_out, s.c_in, s.kh, s.kw};
  return {s.groups, s.c_out / s.groups, s.c_in / s.groups, s.kh, s.kw};
}
memory::desc ohwi(const ConvShape& s) {
  const std::int64_t i = s.c_in / s.groups, o = s.kh * s.kw * i;
  if (s.groups == 1) return {filter_dims(s), memory::data_type::f32, Dims{o, 1, s.kw * i, i}};
  return {filter_dims(s), memory::data_type::f32, Dims{s.c_out / s.groups * o, o, 1, s.kw * i, i}};
}

bool same(const memory::desc& a, const memory::desc& b) { return a == b; }

struct ConvKey {
  ConvShape shape;
  Pass pass;
  DType type;
  bool bias;
  bool operator==(const ConvKey&) const = default;
};
struct MatrixKey {
  enum class Op { linear, linear_backward_data, linear_backward_weights, gemm } op;
  DType type;
  std::int64_t m, n, k;
  bool first, second;  // bias, or the transpositions
  float alpha = 1, beta = 0;
  bool operator==(const MatrixKey&) const = default;
};
struct Hash {
  std::size_t operator()(const ConvKey& k) const {
    const ConvShape& s = k.shape;
    std::size_t h = 0;
    for (std::int64_t v :
         {s.n, s.h, s.w, s.c_in, s.c_out, s.kh, s.kw, s.stride_h, s.stride_w, s.pad_h, s.pad_w, s.dilation_h,
          s.dilation_w, s.groups, std::int64_t(k.pass), std::int64_t(k.type), std::int64_t(k.bias)})
      h = (h ^ std::size_t(v)) * 0x9e3779b97f4a7c15u;
    return h;
  }
  std::size_t operator()(const MatrixKey& k) const {
    std::size_t h = std::size_t(k.alpha * 64) + std::size_t(k.beta * 4096);
    for (std::int64_t v :
         {std::int64_t(k.op), std::int64_t(k.type), k.m, k.n, k.k, std::int64_t(k.first), std::int64_t(k.second)})
      h = (h ^ std::size_t(v)) * 0x9e3779b97f4a7c15u;
    return h;
  }
};

// One primitive with its memory objects; before each execution they are pointed at the caller's buffers.
struct Compiled {
  dnnl::primitive primitive;
  std::string name;
  memory source, weights, target, bias, scratchpad;  // target: y, dy, or the product
  std::unordered_map<int, memory> arguments;
  std::size_t scratch_bytes = 0, weight_bytes = 0;
  std::int64_t weight_numel = 0;
  bool reordered = false;  // weights (or their gradient) have a layout of their own
  memory plain;            // the caller's weights
  dnnl::reorder reorder;
  std::unordered_map<int, memory> reorder_arguments;
};

template <class Descriptor>
void finish(Compiled& k, const Descriptor& d, const dnnl::engine& engine) {
  k.name = d.impl_info_str();
  k.scratch_bytes = d.scratchpad_desc().get_size();
  k.scratchpad = memory(d.scratchpad_desc(), engine, nullptr);
  k.arguments.emplace(DNNL_ARG_SCRATCHPAD, k.scratchpad);
}

void bind_weights(Compiled& k, const memory::desc& plain, const memory::desc& own, std::int64_t numel, bool gradient,
                  const dnnl::engine& engine) {
  k.weights = memory(own, engine, nullptr);
  k.weight_bytes = own.get_size();
  k.weight_numel = numel;
  k.reordered = !same(plain, own);
  if (!k.reordered) return;
  k.plain = memory(plain, engine, nullptr);
  const memory &from = gradient ? k.weights : k.plain, &to = gradient ? k.plain : k.weights;
  k.reorder = dnnl::reorder(from, to);
  k.reorder_arguments = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}};
}

// ReLU is not among them: the library computes max(x, 0), which turns a NaN into 0. State::relu() runs afterwards.
dnnl::primitive_attr attributes() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

// ---- descriptors: the two interfaces --------------------------------------------------------------------------------
// Up to version 2 an operation has a descriptor of its own; hint: the forward pass of a backward one.
template <class Operation, class... Arguments>
auto described(const dnnl::engine& engine, const dnnl::primitive_attr& attr, const Arguments&... arguments) {
#if DNNL_VERSION_MAJOR >= 3
  return typename Operation::primitive_desc(engine, arguments..., attr);
#else
  return typename Operation::primitive_desc(typename Operation::desc(arguments...), attr, engine);
#endif
}
template <class Operation, class Hint, class... Arguments>
auto described_backward(const dnnl::engine& engine, const dnnl::primitive_attr& attr, const Hint& hint,
                        const Arguments&... arguments) {
#if DNNL_VERSION_MAJOR >= 3
  return typename Operation::primitive_desc(engine, arguments..., hint, attr);
#else
  return typename Operation::primitive_desc(typename Operation::desc(arguments...), attr, engine, hint);
#endif
}
// c = alpha·a·b + beta·c: alpha and beta as post-operations, which both versions have.
auto matrix_product(const memory::desc& a, const memory::desc& b, const memory::desc& c, float alpha, float beta,
                    const dnnl::engine& engine) {
  using namespace dnnl;
  primitive_attr attr = attributes();
  post_ops ops;
#if DNNL_VERSION_MAJOR >= 3
  if (alpha != 1) ops.append_eltwise(algorithm::eltwise_linear, alpha, 0.f);
  if (beta != 0) ops.append_sum(beta);
  attr.set_post_ops(ops);
  return matmul::primitive_desc(engine, a, b, c, attr);
#else
  if (alpha != 1) ops.append_eltwise(1.f, algorithm::eltwise_linear, alpha, 0.f);
  if (beta != 0) ops.append_sum(beta);
  attr.set_post_ops(ops);
  return matmul::primitive_desc({a, b, c}, attr, engine);
#endif
}

// The primitive of one pass of a layer, whose source and target are there. plain: the caller's weights, or their
// gradient.
template <class Operation>
void complete(Compiled& k, Pass pass, const typename Operation::primitive_desc& d, const memory::desc& plain,
              std::int64_t numel, const dnnl::engine& engine) {
  const bool data = pass == Pass::backward_data, filter = pass == Pass::backward_filter;
  k.primitive = Operation(d);
  finish(k, d, engine);
  bind_weights(k, plain, d.query_md(filter ? dnnl::query::diff_weights_md : dnnl::query::weights_md), numel, filter,
               engine);
  k.arguments.insert({{data ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, k.source},
                      {filter ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, k.weights},
                      {pass == Pass::forward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, k.target}});
}

void bind_bias(Compiled& k, const memory::desc& bias, const dnnl::engine& engine) {
  k.bias = memory(bias, engine, nullptr);
  k.arguments.emplace(DNNL_ARG_BIAS, k.bias);
}

std::unique_ptr<Compiled> make_convolution(const ConvKey& key, const dnnl::engine& engine) {
  const ConvShape& s = key.shape;
  const auto type = type_of(key.type), f32 = memory::data_type::f32;
  const auto direct = dnnl::algorithm::convolution_direct;
  const auto x = pictures(s.n, s.h, s.w, s.c_in, type), y = pictures(s.n, s.out_h(), s.out_w(), s.c_out, type);
  const auto w = any_layout(filter_dims(s), type), dw = any_layout(filter_dims(s), f32);
  const auto bias = key.bias ? memory::desc({s.c_out}, f32, memory::format_tag::a) : memory::desc();
  const Dims strides{s.stride_h, s.stride_w}, dilations{s.dilation_h - 1, s.dilation_w - 1}, padding{s.pad_h, s.pad_w};
  const auto attr = attributes();
  const auto forward = described<dnnl::convolution_forward>(engine, attr, dnnl::prop_kind::forward_training, direct, x,
                                                            w, bias, y, strides, dilations, padding, padding);
  auto k = std::make_unique<Compiled>();
  k->source = memory(x, engine, nullptr);
  k->target = memory(y, engine, nullptr);
  using Data = dnnl::convolution_backward_data;
  using Filter = dnnl::convolution_backward_weights;
  if (key.pass == Pass::forward)
    complete<dnnl::convolution_forward>(*k, key.pass, forward, ohwi(s), s.w_numel(), engine);
  else if (key.pass == Pass::backward_data)
    complete<Data>(
        *k, key.pass,
        described_backward<Data>(engine, attr, forward, direct, x, w, y, strides, dilations, padding, padding), ohwi(s),
        s.w_numel(), engine);
  else
    complete<Filter>(
        *k, key.pass,
        described_backward<Filter>(engine, attr, forward, direct, x, dw, y, strides, dilations, padding, padding),
        ohwi(s), s.w_numel(), engine);
  if (key.pass == Pass::forward && key.bias) bind_bias(*k, bias, engine);
  return k;
}

std::unique_ptr<Compiled> make_matrix(const MatrixKey& key, const dnnl::engine& engine) {
  using Op = MatrixKey::Op;
  const auto type = type_of(key.type), f32 = memory::data_type::f32;
  auto k = std::make_unique<Compiled>();
  if (key.op == Op::gemm) {
    const auto a = matrix(key.m, key.k, type, key.first), b = matrix(key.k, key.n, type, key.second),
               c = matrix(key.m, key.n, type);
    const auto d = matrix_product(a, b, c, key.alpha, key.beta, engine);
    k->primitive = dnnl::matmul(d);
    finish(*k, d, engine);
    k->source = memory(a, engine, nullptr), k->weights = memory(b, engine, nullptr),
    k->target = memory(c, engine, nullptr);
    k->arguments.insert({{DNNL_ARG_SRC, k->source}, {DNNL_ARG_WEIGHTS, k->weights}, {DNNL_ARG_DST, k->target}});
    return k;
  }
  const bool has_bias = key.op == Op::linear && key.first;
  const auto x = matrix(key.m, key.k, type), y = matrix(key.m, key.n, type), plain = matrix(key.n, key.k, f32);
  const auto w = any_layout({key.n, key.k}, type), dw = any_layout({key.n, key.k}, f32);
  const auto bias = has_bias ? memory::desc({key.n}, f32, memory::format_tag::a) : memory::desc();
  const auto attr = attributes();
  const auto forward =
      described<dnnl::inner_product_forward>(engine, attr, dnnl::prop_kind::forward_training, x, w, bias, y);
  k->source = memory(x, engine, nullptr);
  k->target = memory(y, engine, nullptr);
  using Data = dnnl::inner_product_backward_data;
  using Weights = dnnl::inner_product_backward_weights;
  if (key.op == Op::linear)
    complete<dnnl::inner_product_forward>(*k, Pass::forward, forward, plain, key.n * key.k, engine);
  else if (key.op == Op::linear_backward_data)
    complete<Data>(*k, Pass::backward_data, described_backward<Data>(engine, attr, forward, x, w, y), plain,
                   key.n * key.k, engine);
  else
    complete<Weights>(*k, Pass::backward_filter, described_backward<Weights>(engine, attr, forward, x, dw, y), plain,
                      key.n * key.k, engine);
  if (has_bias) bind_bias(*k, bias, engine);
  return k;
}

struct Product {  // of matrices stored by rows; transpose: stored as the other's columns
  bool transpose_a, transpose_b;
  std::int64_t m, n, k;
  float alpha = 1, beta = 0;
  const float* bias = nullptr;
  bool relu = false;
};

template <class T>
void* writable(const T* p) {
  return const_cast<T*>(p);
}

}  // namespace

struct OneDnn::State {
  State(Scratch& scratch, int threads) : scratch(scratch), threads(threads), prepared(scratch) {}
  Scratch& scratch;
  int threads;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::unordered_map<ConvKey, std::unique_ptr<Compiled>, Hash> convolutions;
  std::unordered_map<MatrixKey, std::unique_ptr<Compiled>, Hash> matrices;
  PreparedWeights prepared;

  Compiled& find(const ConvKey& key) {
    auto& k = convolutions[key];
    if (!k) k = make_convolution(key, engine);
    return *k;
  }
  Compiled& find(const MatrixKey& key) {
    auto& k = matrices[key];
    if (!k) k = make_matrix(key, engine);
    return *k;
  }

  void execute(Compiled& k) {
    Block pad(scratch, k.scratch_bytes);
    k.scratchpad.set_data_handle(pad.data());
    k.primitive.execute(stream, k.arguments);
    stream.wait();
  }
  // Points the weights at w, laid out as the kernel wants them, and executes.
  void execute_with(Compiled& k, const float* w, WeightKey key) {
    auto run = [&](const void* own) {
      k.weights.set_data_handle(const_cast<void*>(own));
      execute(k);
    };
    if (!k.reordered) return run(w);
    auto prepare = [&](void* to) {
      k.plain.set_data_handle(writable(w));
      k.weights.set_data_handle(to);
      k.reorder.execute(stream, k.reorder_arguments);
      stream.wait();
    };
    prepared.with(key, reinterpret_cast<std::uintptr_t>(&k), k.weight_bytes, prepare, run);
  }
  // Executes a weight gradient into dw: directly, or through the kernel's own layout, or through a sum.
  void execute_gradient(Compiled& k, float* dw, bool add) {
    const std::size_t plain_bytes = std::size_t(k.weight_numel) * 4;
    Block memory(scratch, (k.reordered ? k.weight_bytes : 0) + 64 + (add ? plain_bytes : 0));
    void* own = k.reordered ? memory.carve<std::byte>(k.weight_bytes) : nullptr;
    float* plain = add ? memory.carve<float>(std::size_t(k.weight_numel)) : dw;
    k.weights.set_data_handle(own ? own : plain);
    execute(k);
    if (own) {
      k.plain.set_data_handle(plain);
      k.reorder.execute(stream, k.reorder_arguments);
      stream.wait();
    }
    if (add) sum(plain, dw, k.weight_numel);
  }
  template <class T>
  void sum(const T* from, T* to, std::int64_t n) {
    in_vectors(n,
               [&](std::int64_t i, int lanes) { store(to + i, load(to + i, lanes) + load(from + i, lanes), lanes); });
  }
  template <class T>
  void relu(T* y, std::int64_t n) {
    in_vectors(n, [&](std::int64_t i, int lanes) { store(y + i, cpu::relu(load(y + i, lanes)), lanes); });
  }
  // c[m, n] = alpha·a·b + beta·c, then + bias[n] and ReLU. Each thread computes a part of the longer side of c with the
  // library's single-threaded product. The threads of the library's parallel product wait for each other, which takes a
  // scheduler's time slice where another program has the core.
  void product(const Product& p, const float* a, const float* b, float* c) {
    const bool rows = p.m >= p.n;
    const std::int64_t side = rows ? p.m : p.n, blocks = (side + VL - 1) / VL;
    const int parts = p.m * p.n * p.k < 65536 ? 1 : int(std::min<std::int64_t>(threads, blocks));
    std::atomic<dnnl_status_t> status{dnnl_success};
    in_parts(parts, [&](int part) {
      LibraryThreads one(1);
      const std::int64_t begin = blocks * part / parts * VL, end = std::min(side, blocks * (part + 1) / parts * VL);
      const std::int64_t m = rows ? end - begin : p.m, n = rows ? p.n : end - begin;
      const std::int64_t row = rows ? begin : 0, column = rows ? 0 : begin;
      const dnnl_status_t own = dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', m, n, p.k, p.alpha,
                                           a + row * (p.transpose_a ? 1 : p.k), p.transpose_a ? p.m : p.k,
                                           b + column * (p.transpose_b ? p.k : 1), p.transpose_b ? p.k : p.n, p.beta,
                                           c + row * p.n + column, p.n);
      if (own != dnnl_success) status = own;
      if (p.bias || p.relu)
        for (std::int64_t r = row; r < row + m; r++)
          finish_row(c + r * p.n + column, p.bias ? p.bias + column : nullptr, p.relu, n);
    });
    if (status != dnnl_success) throw dnnl::error(status, "dnnl_sgemm");
  }
  static void finish_row(float* y, const float* bias, bool positive, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += VL) {
      const int lanes = int(std::min<std::int64_t>(VL, n - i));
      auto v = load(y + i, lanes);
      if (bias) v = v + load(bias + i, lanes);
      store(y + i, positive ? cpu::relu(v) : v, lanes);
    }
  }
  // body(first, count) for every vector of n elements, the last of which may be short.
  template <class Body>
  void in_vectors(std::int64_t n, const Body& body) {
    const int parts = n < 65536 ? 1 : threads;
    in_parts(parts, [&](int lane) {
      std::int64_t i = n / VL * lane / parts * VL;
      const std::int64_t end = lane == parts - 1 ? n : n / VL * (lane + 1) / parts * VL;
      for (; i + VL <= end; i += VL) body(i, VL);
      if (i < end) body(i, int(end - i));
    });
  }
  void need(DType t, const char* operation) const {
    require(t != DType::bf16 || has_bf16(), operation,
            ": this CPU has no bf16 instructions (AVX-512 with bf16 is needed): use f32");
  }
};

OneDnn::OneDnn(Scratch& scratch, int threads) : state_(std::make_unique<State>(scratch, threads)) {}
OneDnn::~OneDnn() = default;

std::string OneDnn::version() {
  const dnnl_version_t* v = dnnl_version();
  std::ostringstream out;
  const int isa = int(dnnl::get_effective_cpu_isa());
  auto has = [&](dnnl::cpu_isa wanted) { return (isa & int(wanted)) == int(wanted); };
  out << "oneDNN " << v->major << '.' << v->minor << '.' << v->patch << ", "
      << (has_bf16()                        ? "AVX-512 with bf16"
          : has(dnnl::cpu_isa::avx512_core) ? "AVX-512"
          : has(dnnl::cpu_isa::avx2)        ? "AVX2"
                                            : "no AVX2");
  return out.str();
}

bool OneDnn::has_bf16() {
  const int wanted = int(dnnl::cpu_isa::avx512_core_bf16);
  return (int(dnnl::get_effective_cpu_isa()) & wanted) == wanted;
}

// oneDNN 2.6.3 in bf16 is wrong in two places (tests/test_convolution.cpp, OddChannelsInBf16 and ThinPicturesInBf16):
// the data gradient of 1×1 filters for some numbers of pixels where the output channels are odd, and the weight
// gradient where padded pictures are thinner than the stride.
template <class T>
static bool broken(const ConvShape& s, Pass pass, const OneDnn::Kernel& k) {
  if (dtype_of<T> != DType::bf16) return false;
  if (pass == Pass::backward_data) return s.c_out / s.groups % 2 == 1 && k.name.find("1x1") != std::string::npos;
  return pass == Pass::backward_filter && s.pad_w > 0 && s.stride_w > 1 && s.w <= s.stride_w;
}

template <class T>
OneDnn::Kernel OneDnn::kernel(const ConvShape& s, Pass pass) {
  if (dtype_of<T> == DType::bf16 && !has_bf16()) return {};
  LibraryThreads threads(state_->threads);
  try {
    const Kernel found{state_->find(ConvKey{s, pass, dtype_of<T>, false}).name};
    return broken<T>(s, pass, found) ? Kernel{} : found;
  } catch (const dnnl::error&) {
    state_->convolutions.erase(ConvKey{s, pass, dtype_of<T>, false});
    return {};
  }
}

template <class T>
void OneDnn::forward(const ConvShape& s, const T* x, const float* w, WeightKey key, T* y, const Epilogue& epilogue) {
  state_->need(dtype_of<T>, "conv2d");
  checked("conv2d", text(s, dtype_of<T>), [&] {
    LibraryThreads threads(state_->threads);
    auto& k = state_->find(ConvKey{s, Pass::forward, dtype_of<T>, epilogue.bias != nullptr});
    k.source.set_data_handle(writable(x)), k.target.set_data_handle(y);
    if (epilogue.bias) k.bias.set_data_handle(writable(epilogue.bias));
    state_->execute_with(k, w, key);
    if (epilogue.relu) state_->relu(y, s.y_numel());
  });
}

template <class T>
void OneDnn::backward_data(const ConvShape& s, const T* dy, const float* w, WeightKey key, T* dx, bool add) {
  state_->need(dtype_of<T>, "conv2d_backward_data");
  checked("conv2d_backward_data", text(s, dtype_of<T>), [&] {
    LibraryThreads threads(state_->threads);
    auto& k = state_->find(ConvKey{s, Pass::backward_data, dtype_of<T>, false});
    Block fresh(state_->scratch, add ? sizeof(T) * std::size_t(s.x_numel()) : 0);  // the library overwrites
    T* to = add ? reinterpret_cast<T*>(fresh.data()) : dx;
    k.source.set_data_handle(to), k.target.set_data_handle(writable(dy));
    state_->execute_with(k, w, key);
    if (add) state_->sum(to, dx, s.x_numel());
  });
}

template <class T>
void OneDnn::backward_filter(const ConvShape& s, const T* x, const T* dy, float* dw, bool add) {
  state_->need(dtype_of<T>, "conv2d_backward_filter");
  checked("conv2d_backward_filter", text(s, dtype_of<T>), [&] {
    LibraryThreads threads(state_->threads);
    auto& k = state_->find(ConvKey{s, Pass::backward_filter, dtype_of<T>, false});
    k.source.set_data_handle(writable(x)), k.target.set_data_handle(writable(dy));
    state_->execute_gradient(k, dw, add);
  });
}

template <class T>
void OneDnn::linear_forward(std::int64_t m, std::int64_t n, std::int64_t k, const T* x, const float* w, WeightKey key,
                            const float* bias, bool relu, T* y) {
  state_->need(dtype_of<T>, "linear");
  checked("linear", text(m, n, k, dtype_of<T>), [&] {
    if constexpr (dtype_of<T> == DType::f32) return state_->product({false, true, m, n, k, 1, 0, bias, relu}, x, w, y);
    LibraryThreads threads(state_->threads);
    auto& p = state_->find(MatrixKey{MatrixKey::Op::linear, dtype_of<T>, m, n, k, bias != nullptr, false});
    p.source.set_data_handle(writable(x)), p.target.set_data_handle(y);
    if (bias) p.bias.set_data_handle(writable(bias));
    state_->execute_with(p, w, key);
    if (relu) state_->relu(y, m * n);
  });
}

template <class T>
void OneDnn::linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, const T* dy, const float* w,
                                  WeightKey key, T* dx, bool add) {
  state_->need(dtype_of<T>, "linear_backward_data");
  checked("linear_backward_data", text(m, n, k, dtype_of<T>), [&] {
    if constexpr (dtype_of<T> == DType::f32) return state_->product({false, false, m, k, n, 1, float(add)}, dy, w, dx);
    LibraryThreads threads(state_->threads);
    auto& p = state_->find(MatrixKey{MatrixKey::Op::linear_backward_data, dtype_of<T>, m, n, k, false, false});
    Block fresh(state_->scratch, add ? sizeof(T) * std::size_t(m * k) : 0);
    T* to = add ? reinterpret_cast<T*>(fresh.data()) : dx;
    p.source.set_data_handle(to), p.target.set_data_handle(writable(dy));
    state_->execute_with(p, w, key);
    if (add) state_->sum(to, dx, m * k);
  });
}

template <class T>
void OneDnn::linear_backward_weights(std::int64_t m, std::int64_t n, std::int64_t k, const T* x, const T* dy, float* dw,
                                     bool add) {
  state_->need(dtype_of<T>, "linear_backward_weights");
  checked("linear_backward_weights", text(m, n, k, dtype_of<T>), [&] {
    if constexpr (dtype_of<T> == DType::f32) return state_->product({true, false, n, k, m, 1, float(add)}, dy, x, dw);
    LibraryThreads threads(state_->threads);
    auto& p = state_->find(MatrixKey{MatrixKey::Op::linear_backward_weights, dtype_of<T>, m, n, k, false, false});
    p.source.set_data_handle(writable(x)), p.target.set_data_handle(writable(dy));
    state_->execute_gradient(p, dw, add);
  });
}

template <class T>
void OneDnn::gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                  const T* a, const T* b, float beta, T* c) {
  state_->need(dtype_of<T>, "gemm");
  if (m == 0 || n == 0) return;
  checked("gemm", text(m, n, k, dtype_of<T>), [&] {
    if constexpr (dtype_of<T> == DType::f32) {
      state_->product({transpose_a, transpose_b, m, n, k, alpha, beta}, a, b, c);
    } else {
      LibraryThreads threads(state_->threads);
      auto& p =
          state_->find(MatrixKey{MatrixKey::Op::gemm, dtype_of<T>, m, n, k, transpose_a, transpose_b, alpha, beta});
      p.source.set_data_handle(writable(a)), p.weights.set_data_handle(writable(b)), p.target.set_data_handle(c);
      state_->execute(p);
    }
  });
}

void OneDnn::forget(const void* owner) { state_->prepared.forget(owner); }

#define TANDEM_ONEDNN_FOR(T)                                                                                          \
  template OneDnn::Kernel OneDnn::kernel<T>(const ConvShape&, Pass);                                                  \
  template void OneDnn::forward(const ConvShape&, const T*, const float*, WeightKey, T*, const Epilogue&);            \
  template void OneDnn::backward_data(const ConvShape&, const T*, const float*, WeightKey, T*, bool);                 \
  template void OneDnn::backward_filter(const ConvShape&, const T*, const T*, float*, bool);                          \
  template void OneDnn::linear_forward(std::int64_t, std::int64_t, std::int64_t, const T*, const float*, WeightKey,   \
                                       const float*, bool, T*);                                                       \
  template void OneDnn::linear_backward_data(std::int64_t, std::int64_t, std::int64_t, const T*, const float*,        \
                                             WeightKey, T*, bool);                                                    \
  template void OneDnn::linear_backward_weights(std::int64_t, std::int64_t, std::int64_t, const T*, const T*, float*, \
                                                bool);                                                                \
  template void OneDnn::gemm(bool, bool, std::int64_t, std::int64_t, std::int64_t, float, const T*, const T*, float,  \
                             T*);
TANDEM_ONEDNN_FOR(float)
TANDEM_ONEDNN_FOR(bf16)
#undef TANDEM_ONEDNN_FOR

}  // namespace tandem::cpu
