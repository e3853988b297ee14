// The wrapper of oneDNN. The make_… functions hide the differences between versions 2 and 3: version 2 builds a
// primitive descriptor from an operation descriptor, version 3 takes the same arguments directly.
#include "core/cpu/onednn.h"

#include <algorithm>
#include <atomic>
#include <dnnl.hpp>
#include <map>
#include <sstream>
#include <unordered_map>

#include "core/cpu/library_threads.h"
#include "core/cpu/prepared.h"
#include "core/cpu/simd.h"

namespace tandem::cpu {
namespace {

using dnnl::memory;
using Dims = memory::dims;

std::string text(const ConvShape& s, DType t) {
  std::ostringstream out;
  out << name_of(t) << " x[" << s.n << ',' << s.h << ',' << s.w << ',' << s.c_in << "] w[" << s.c_out << ',' << s.kh
      << ',' << s.kw << ',' << s.c_in / s.groups << "] stride " << s.stride_h << ',' << s.stride_w << " pad " << s.pad_h
      << ',' << s.pad_w << " dilation " << s.dilation_h << ',' << s.dilation_w << " groups " << s.groups;
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

// Identifies a primitive: a pass of a layer, or a product [m, k]·[k, n] with m = shape.n, k = shape.c_in and
// n = shape.c_out.
struct Key {
  enum Kind { convolution, linear, product } kind;
  ConvShape shape;
  Pass pass;
  DType type;
  bool bias = false, transpose_a = false, transpose_b = false, add = false;
  auto operator<=>(const Key&) const = default;
};

// One primitive with its memory objects; before each execution their pointers are set to the caller's buffers.
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
  k.reordered = plain != own;
  if (!k.reordered) return;
  k.plain = memory(plain, engine, nullptr);
  const memory &from = gradient ? k.weights : k.plain, &to = gradient ? k.plain : k.weights;
  k.reorder = dnnl::reorder(from, to);
  k.reorder_arguments = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}};
}

// The attributes do not include ReLU: the library computes max(x, 0), which turns a NaN into 0. layer() and
// product() apply ReLU afterwards.
dnnl::primitive_attr attributes() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

// ---- descriptors: the two interfaces --------------------------------------------------------------------------------
// Up to version 2, an operation has a descriptor. hint: the forward pass of a backward operation.
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
// Completes the primitive of one pass of a layer; k.source and k.target are already set. plain: the layout of the
// caller's weights, or of their gradient.
template <class Operation>
void complete(Compiled& k, const Key& key, const typename Operation::primitive_desc& d, const memory::desc& plain,
              const dnnl::engine& engine) {
  const bool data = key.pass == Pass::backward_data, filter = key.pass == Pass::backward_filter;
  k.primitive = Operation(d);
  finish(k, d, engine);
  bind_weights(k, plain, d.query_md(filter ? dnnl::query::diff_weights_md : dnnl::query::weights_md),
               key.shape.w_numel(), filter, engine);
  k.arguments.insert({{data ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, k.source},
                      {filter ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, k.weights},
                      {key.pass == Pass::forward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, k.target}});
  if (!key.bias) return;
  k.bias = memory(memory::desc({key.shape.c_out}, memory::data_type::f32, memory::format_tag::a), engine, nullptr);
  k.arguments.emplace(DNNL_ARG_BIAS, k.bias);
}

void make_convolution(Compiled& k, const Key& key, const dnnl::engine& engine) {
  const ConvShape& s = key.shape;
  const auto type = type_of(key.type), f32 = memory::data_type::f32;
  const auto direct = dnnl::algorithm::convolution_direct;
  const auto x = pictures(s.n, s.h, s.w, s.c_in, type), y = pictures(s.n, s.out_h(), s.out_w(), s.c_out, type);
  const auto w = any_layout(filter_dims(s), type), dw = any_layout(filter_dims(s), f32), plain = ohwi(s);
  const auto bias = key.bias ? memory::desc({s.c_out}, f32, memory::format_tag::a) : memory::desc();
  const Dims strides{s.stride_h, s.stride_w}, dilations{s.dilation_h - 1, s.dilation_w - 1}, padding{s.pad_h, s.pad_w};
  const auto attr = attributes();
  const auto forward = described<dnnl::convolution_forward>(engine, attr, dnnl::prop_kind::forward_training, direct, x,
                                                            w, bias, y, strides, dilations, padding, padding);
  k.source = memory(x, engine, nullptr);
  k.target = memory(y, engine, nullptr);
  if (key.pass == Pass::forward) return complete<dnnl::convolution_forward>(k, key, forward, plain, engine);
  using Data = dnnl::convolution_backward_data;
  using Filter = dnnl::convolution_backward_weights;
  if (key.pass == Pass::backward_data)
    complete<Data>(
        k, key, described_backward<Data>(engine, attr, forward, direct, x, w, y, strides, dilations, padding, padding),
        plain, engine);
  else
    complete<Filter>(
        k, key,
        described_backward<Filter>(engine, attr, forward, direct, x, dw, y, strides, dilations, padding, padding),
        plain, engine);
}

void make_linear(Compiled& k, const Key& key, const dnnl::engine& engine) {
  const std::int64_t m = key.shape.n, n = key.shape.c_out, depth = key.shape.c_in;
  const auto type = type_of(key.type), f32 = memory::data_type::f32;
  const auto x = matrix(m, depth, type), y = matrix(m, n, type), plain = matrix(n, depth, f32);
  const auto w = any_layout({n, depth}, type), dw = any_layout({n, depth}, f32);
  const auto bias = key.bias ? memory::desc({n}, f32, memory::format_tag::a) : memory::desc();
  const auto attr = attributes();
  const auto forward =
      described<dnnl::inner_product_forward>(engine, attr, dnnl::prop_kind::forward_training, x, w, bias, y);
  k.source = memory(x, engine, nullptr);
  k.target = memory(y, engine, nullptr);
  if (key.pass == Pass::forward) return complete<dnnl::inner_product_forward>(k, key, forward, plain, engine);
  using Data = dnnl::inner_product_backward_data;
  using Weights = dnnl::inner_product_backward_weights;
  if (key.pass == Pass::backward_data)
    complete<Data>(k, key, described_backward<Data>(engine, attr, forward, x, w, y), plain, engine);
  else
    complete<Weights>(k, key, described_backward<Weights>(engine, attr, forward, x, dw, y), plain, engine);
}

void make_product(Compiled& k, const Key& key, const dnnl::engine& engine) {
  const std::int64_t m = key.shape.n, n = key.shape.c_out, depth = key.shape.c_in;
  const auto type = type_of(key.type);
  const auto a = matrix(m, depth, type, key.transpose_a), b = matrix(depth, n, type, key.transpose_b),
             c = matrix(m, n, type);
  dnnl::primitive_attr attr = attributes();
  dnnl::post_ops ops;
  if (key.add) ops.append_sum(1);
  attr.set_post_ops(ops);
  const auto d = described<dnnl::matmul>(engine, attr, a, b, c);
  k.primitive = dnnl::matmul(d);
  finish(k, d, engine);
  k.source = memory(a, engine, nullptr);
  k.weights = memory(b, engine, nullptr);
  k.target = memory(c, engine, nullptr);
  k.arguments.insert({{DNNL_ARG_SRC, k.source}, {DNNL_ARG_WEIGHTS, k.weights}, {DNNL_ARG_DST, k.target}});
}

struct Product {  // of row-major matrices; transpose_a: a is stored as [k, m]; transpose_b: b as [n, k]
  bool transpose_a, transpose_b;
  std::int64_t m, n, k;
  bool add = false;
  const float* bias = nullptr;
  bool relu = false;
};

}  // namespace

struct OneDnn::State {
  State(CachingAllocator& allocator, int threads) : allocator(allocator), threads(threads), prepared(allocator) {}
  CachingAllocator& allocator;
  int threads;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Key, Compiled> compiled;
  PreparedWeights prepared;

  Compiled& find(const Key& key) {
    const auto [found, is_new] = compiled.try_emplace(key);
    if (!is_new) return found->second;
    try {
      constexpr auto make = std::array{make_convolution, make_linear, make_product};
      make[key.kind](found->second, key, engine);
    } catch (...) {
      compiled.erase(found);
      throw;
    }
    return found->second;
  }

  // One pass of a convolution or of a fully connected layer. The library overwrites its output, so a data gradient that
  // is to be added is first computed elsewhere.
  template <class T>
  void layer(Key::Kind kind, const ConvCall<T>& c) {
    LibraryThreads own(threads);
    Compiled& k = find({kind, c.s, c.pass, dtype_of<T>, c.epilogue.bias != nullptr});
    const bool elsewhere = c.add && c.pass == Pass::backward_data;
    const Scratch fresh(allocator, elsewhere ? sizeof(T) * std::size_t(c.s.x_numel()) : 0);
    T* x = elsewhere ? reinterpret_cast<T*>(fresh.data()) : c.x;
    k.source.set_data_handle(x);
    k.target.set_data_handle(c.y);
    if (c.epilogue.bias) k.bias.set_data_handle(const_cast<float*>(c.epilogue.bias));
    if (c.pass == Pass::backward_filter) return execute_gradient(k, c.w, c.add);
    execute_with(k, c.w, c.key);
    if (elsewhere) convert(threads, x, c.x, c.s.x_numel(), true);
    if (c.epilogue.relu)
      in_vectors(threads, c.s.y_numel(),
                 [&](std::int64_t i, int lanes) { store(c.y + i, relu(load(c.y + i, lanes)), lanes); });
  }

  void execute(Compiled& k) {
    const Scratch pad(allocator, k.scratch_bytes);
    k.scratchpad.set_data_handle(pad.data());
    k.primitive.execute(stream, k.arguments);
    stream.wait();
  }
  // Sets the weights to w, in the layout that the kernel expects, and executes.
  void execute_with(Compiled& k, float* w, WeightKey key) {
    auto run = [&](void* own) {
      k.weights.set_data_handle(own);
      execute(k);
    };
    if (!k.reordered) return run(w);
    auto prepare = [&](void* to) {
      k.plain.set_data_handle(w);
      k.weights.set_data_handle(to);
      k.reorder.execute(stream, k.reorder_arguments);
      stream.wait();
    };
    prepared.with(key, reinterpret_cast<std::uintptr_t>(&k), k.weight_bytes, prepare, run);
  }
  // Writes a weight gradient to dw, or adds it; converts it from the kernel's own layout if there is one.
  void execute_gradient(Compiled& k, float* dw, bool add) {
    const std::size_t plain_bytes = std::size_t(k.weight_numel) * 4;
    Scratch memory(allocator, (k.reordered ? k.weight_bytes : 0) + 64 + (add ? plain_bytes : 0));
    void* own = k.reordered ? memory.carve<std::byte>(k.weight_bytes) : nullptr;
    float* plain = add ? memory.carve<float>(std::size_t(k.weight_numel)) : dw;
    k.weights.set_data_handle(own ? own : plain);
    execute(k);
    if (own) {
      k.plain.set_data_handle(plain);
      k.reorder.execute(stream, k.reorder_arguments);
      stream.wait();
    }
    if (add) convert(threads, plain, dw, k.weight_numel, true);
  }
  // c[m, n] (+)= a·b, then + bias[n] and ReLU. Each thread computes a part of the longer side of c with the
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
      const dnnl_status_t own = dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', m, n, p.k, 1.f,
                                           a + row * (p.transpose_a ? 1 : p.k), p.transpose_a ? p.m : p.k,
                                           b + column * (p.transpose_b ? p.k : 1), p.transpose_b ? p.k : p.n,
                                           float(p.add), c + row * p.n + column, p.n);
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
};

// Runs a library call; its exception becomes an Error that names the place and the remedy.
template <class Work>
static void checked(const char* operation, const ConvShape& s, DType type, const Work& work) {
  require(type != DType::bf16 || OneDnn::has_bf16(), operation,
          ": this CPU has no bf16 instructions (AVX-512 with bf16 is needed): use f32");
  try {
    work();
  } catch (const dnnl::error& e) {
    fail(__FILE__, ": oneDNN ", operation, " ", text(s, type), ": ", e.what(), " (status ", int(e.status), "). ",
         e.status == dnnl_unimplemented ? "This CPU has no kernel for it: try f32"
                                        : "Check the shapes; ONEDNN_VERBOSE=1 shows the library's view");
  }
}

OneDnn::OneDnn(CachingAllocator& memory, int threads) : state_(std::make_unique<State>(memory, threads)) {}
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
    const Kernel found{state_->find({Key::convolution, s, pass, dtype_of<T>}).name};
    return broken<T>(s, pass, found) ? Kernel{} : found;
  } catch (const dnnl::error&) {
    return {};
  }
}

template <class T>
void OneDnn::convolution(const ConvCall<T>& c) {
  checked("conv2d", c.s, dtype_of<T>, [&] { state_->layer(Key::convolution, c); });
}

template <class T>
void OneDnn::linear(const ConvCall<T>& c) {
  const std::int64_t m = c.s.n, n = c.s.c_out, k = c.s.c_in;
  checked("linear", c.s, dtype_of<T>, [&] {
    if constexpr (dtype_of<T> == DType::bf16)
      state_->layer(Key::linear, c);
    else if (c.pass == Pass::forward)
      state_->product({false, true, m, n, k, false, c.epilogue.bias, c.epilogue.relu}, c.x, c.w, c.y);
    else if (c.pass == Pass::backward_data)
      state_->product({false, false, m, k, n, c.add}, c.y, c.w, c.x);
    else
      state_->product({true, false, n, k, m, c.add}, c.y, c.x, c.w);
  });
}

template <class T>
void OneDnn::gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
                  const T* b, T* c, bool add) {
  if (m == 0 || n == 0) return;
  const ConvShape s = linear_shape(m, n, k);
  checked("matmul", s, dtype_of<T>, [&] {
    if constexpr (dtype_of<T> == DType::f32) return state_->product({transpose_a, transpose_b, m, n, k, add}, a, b, c);
    LibraryThreads threads(state_->threads);
    Compiled& p = state_->find({Key::product, s, Pass::forward, dtype_of<T>, false, transpose_a, transpose_b, add});
    p.source.set_data_handle(const_cast<T*>(a));
    p.weights.set_data_handle(const_cast<T*>(b));
    p.target.set_data_handle(c);
    state_->execute(p);
  });
}

void OneDnn::forget(const void* owner) { state_->prepared.forget(owner); }

#define TANDEM_ONEDNN_FOR(T)                                         \
  template OneDnn::Kernel OneDnn::kernel<T>(const ConvShape&, Pass); \
  template void OneDnn::convolution(const ConvCall<T>&);             \
  template void OneDnn::linear(const ConvCall<T>&);                  \
  template void OneDnn::gemm(bool, bool, std::int64_t, std::int64_t, std::int64_t, const T*, const T*, T*, bool);
TANDEM_ONEDNN_FOR(float)
TANDEM_ONEDNN_FOR(bf16)
#undef TANDEM_ONEDNN_FOR

}  // namespace tandem::cpu
