#include "cuda/convolution.h"

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <utility>

#include "cuda/check.h"
#include "cuda/kernels.h"

namespace tandem::cuda {

const char* name_of(Pass p) {
  return p == Pass::forward ? "forward" : p == Pass::backward_data ? "backward data" : "backward filter";
}

std::string PlanKey::text() const {
  std::ostringstream out;
  const ConvShape& s = shape;
  out << "conv2d " << name_of(pass) << ", pictures [" << s.n << ", " << s.h << ", " << s.w << ", " << s.c_in
      << "], filters [" << s.c_out << ", " << s.kh << ", " << s.kw << ", " << s.c_in / s.groups << "], "
      << tandem::name_of(type);
  return out.str();
}

int alignment_of(std::initializer_list<const void*> pointers) {
  std::uintptr_t all = 16;
  for (const void* p : pointers) all |= reinterpret_cast<std::uintptr_t>(p);
  return int(all & (~all + 1));  // the lowest bit that is set in any address, or 16
}

PlanKey PlanKey::of(Pass pass, const ConvShape& s, DType type, DType gradient, const void* x, const void* w,
                    const void* y) {
  PlanKey key{pass, s, type, gradient};
  const int element = int(size_of(type));
  key.alignment = {std::max(element, alignment_of({x})), std::max(int(size_of(key.type_of_filters())), alignment_of({w})),
                   std::max(element, alignment_of({y}))};
  return key;
}

Choice choose(std::size_t candidates, bool first,
              const std::function<std::optional<float>(std::size_t)>& milliseconds) {
  Choice best;
  for (std::size_t i = 0; i < candidates && !(first && best.candidate); i++) {
    const std::optional<float> t = milliseconds(i);
    if (!t) continue;
    best.ran++;
    if (!best.candidate || *t < best.milliseconds) best.candidate = i, best.milliseconds = *t;
  }
  return best;
}

Layout Layout::pictures(std::int64_t n, std::int64_t h, std::int64_t w, std::int64_t c) {
  return {{n, c, h, w}, {h * w * c, 1, w * c, c}};
}
Layout Layout::filters(const ConvShape& s) {
  const std::int64_t deep = s.c_in / s.groups;
  return {{s.c_out, deep, s.kh, s.kw}, {s.kh * s.kw * deep, 1, s.kw * deep, deep}};
}

bool acceptable(const std::vector<cudnnBackendNumericalNote_t>& notes, DType type, const EngineRules& rules) {
  for (cudnnBackendNumericalNote_t note : notes) {
    if (note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) return false;  // fewer digits than were asked for
    if (note == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) return false;
    if (rules.deterministic && note == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    if (type == DType::f32 && !rules.tf32 && note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE) return false;
    const bool winograd = note == CUDNN_NUMERICAL_NOTE_WINOGRAD || note == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4 ||
                          note == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 ||
                          note == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13;
    if (rules.exact && winograd) return false;
  }
  return true;
}

namespace {

cudnnDataType_t library_type(DType t) {
  switch (t) {
    case DType::f32: return CUDNN_DATA_FLOAT;
    case DType::bf16: return CUDNN_DATA_BFLOAT16;
    case DType::f16: return CUDNN_DATA_HALF;
    default: fail("conv2d: cuda backend: not defined for ", tandem::name_of(t), " (cast to f32 first)");
  }
}

// One of cuDNN's descriptors; attributes are set, then it is finished.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) { CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &d_)); }
  Descriptor(Descriptor&& o) noexcept : d_(std::exchange(o.d_, nullptr)) {}
  Descriptor& operator=(Descriptor&& o) noexcept {
    std::swap(d_, o.d_);
    return *this;
  }
  ~Descriptor() {
    if (d_) cudnnBackendDestroyDescriptor(d_);
  }

  template <class V>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const V* values, int count = 1) {
    CUDNN_CHECK(cudnnBackendSetAttribute(d_, name, type, count, values));
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &other.d_);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, std::int64_t value) { return set(name, CUDNN_TYPE_INT64, &value); }
  Descriptor& finish() {
    CUDNN_CHECK(cudnnBackendFinalize(d_));
    return *this;
  }
  bool try_to_finish() { return cudnnBackendFinalize(d_) == CUDNN_STATUS_SUCCESS; }
  template <class V>
  V get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) const {
    V value{};
    std::int64_t count = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(d_, name, type, 1, &count, &value));
    return value;
  }
  cudnnBackendDescriptor_t raw() const { return d_; }

 private:
  cudnnBackendDescriptor_t d_ = nullptr;
};

enum Uid : std::int64_t { x_uid = 1, w_uid = 2, y_uid = 3 };

Descriptor tensor(Uid uid, DType type, const Layout& layout, std::int64_t alignment) {
  Descriptor t(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const cudnnDataType_t data = library_type(type);
  t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, uid)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &data)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, layout.sizes, 4)
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, layout.strides, 4)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment)
      .finish();
  return t;
}

// The same operation has its own names in each direction.
struct Names {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
const Names& names_of(Pass pass) {
  static constexpr Names names[] = {
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};
  return names[int(pass)];
}

Descriptor operation_graph(cudnnHandle_t handle, const PlanKey& key) {
  const ConvShape& s = key.shape;
  const Descriptor x = tensor(x_uid, key.type, Layout::pictures(s.n, s.h, s.w, s.c_in), key.alignment.x),
                   w = tensor(w_uid, key.type_of_filters(), Layout::filters(s), key.alignment.w),
                   y = tensor(y_uid, key.type, Layout::pictures(s.n, s.out_h(), s.out_w(), s.c_out), key.alignment.y);
  Descriptor c(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  const std::int64_t pad[] = {s.pad_h, s.pad_w}, stride[] = {s.stride_h, s.stride_w},
                     dilation[] = {s.dilation_h, s.dilation_w};
  c.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 2)
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &arithmetic)
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, &mode)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, pad, 2)
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, pad, 2)
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, stride, 2)
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, dilation, 2)
      .finish();
  const Names& n = names_of(key.pass);
  const float one = 1, zero = 0;
  Descriptor op(n.operation);
  op.set(n.x, x).set(n.w, w).set(n.y, y).set(n.convolution, c);
  op.set(n.alpha, CUDNN_TYPE_FLOAT, &one).set(n.beta, CUDNN_TYPE_FLOAT, &zero).finish();
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle)
      .set(CUDNN_ATTR_OPERATIONGRAPH_OPS, op)
      .finish();
  return graph;
}

struct Plan {
  Descriptor plan;
  std::int64_t workspace = 0, engine = 0;
};

// Plans for the configurations that the heuristic offers, best guess first, at most `most` of those that are acceptable.
std::vector<Plan> candidates(cudnnHandle_t handle, const PlanKey& key, const EngineRules& rules, std::size_t most) {
  std::vector<Plan> found;
  const Descriptor graph = operation_graph(handle, key);
  for (cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    if (!found.empty()) break;
    Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
    if (!heuristic.try_to_finish()) continue;  // it has nothing to say of this graph
    std::int64_t count = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                         0, &count, nullptr));
    std::vector<Descriptor> configurations;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (std::int64_t i = 0; i < count; i++) {
      configurations.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
      raw.push_back(configurations.back().raw());
    }
    CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                         count, &count, raw.data()));
    for (std::int64_t i = 0; i < count && found.size() < most; i++) {
      Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
      cudnnBackendDescriptor_t into = engine.raw();
      std::int64_t got = 0;
      CUDNN_CHECK(cudnnBackendGetAttribute(raw[std::size_t(i)], CUDNN_ATTR_ENGINECFG_ENGINE,
                                           CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &got, &into));
      std::vector<cudnnBackendNumericalNote_t> notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
      CUDNN_CHECK(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                           std::int64_t(notes.size()), &got, notes.data()));
      notes.resize(std::size_t(got));
      if (!acceptable(notes, key.type, rules)) continue;
      Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle)
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw[std::size_t(i)]);
      if (!plan.try_to_finish()) continue;  // not on this device: the next one
      const auto bytes = plan.get<std::int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64);
      const auto number = engine.get<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64);
      found.push_back({std::move(plan), bytes, number});
    }
  }
  return found;
}

}  // namespace

struct Convolution::State {
  Grid grid;
  Memory memory;
  cudnnHandle_t handle = nullptr;
  EngineRules rules;
  bool recording = false;
  struct Entry {
    PlanKey key;
    std::optional<Plan> plan;  // none: our own kernel
    std::string engine;
    bool tried;  // not so what was chosen while a step was recorded
  };
  std::vector<std::unique_ptr<Entry>> entries;

  class Block {  // scratch for one call
   public:
    Block(State& s, std::size_t bytes) : s_(s), data_(bytes ? s.memory.take(bytes) : nullptr) {}
    ~Block() {
      if (data_) s_.memory.give(data_);
    }
    Block(const Block&) = delete;
    void* data() const { return data_; }

   private:
    State& s_;
    void* data_;
  };

  void run(const Plan& plan, const PlanKey& key, const void* x, const void* w, const void* y) {
    const std::int64_t uids[] = {x_uid, w_uid, y_uid};
    const void* pointers[] = {x, w, y};
    Block workspace(*this, std::size_t(plan.workspace));
    void* room = workspace.data();
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids, 3)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, 3)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &room)
        .finish();
    CUDNN_CHECK(cudnnBackendExecute(handle, plan.plan.raw(), pack.raw()), key.text());
  }

  struct Stopwatch {
    cudaEvent_t begin = nullptr, end = nullptr;
    Stopwatch() {
      CUDA_CHECK(cudaEventCreate(&begin));
      CUDA_CHECK(cudaEventCreate(&end));
    }
    ~Stopwatch() {
      for (cudaEvent_t e : {begin, end})
        if (e) cudaEventDestroy(e);
    }
    Stopwatch(const Stopwatch&) = delete;
  };

  // The best of three runs; none where the plan does not run.
  std::optional<float> milliseconds(const Stopwatch& watch, const Plan& plan, const PlanKey& key, const void* x,
                                    const void* w, const void* y) {
    try {
      run(plan, key, x, w, y);  // the first run pays for loading the kernel
      float best = 1e30f;
      for (int i = 0; i < 3; i++) {
        float t = 0;
        CUDA_CHECK(cudaEventRecord(watch.begin, grid.stream));
        run(plan, key, x, w, y);
        CUDA_CHECK(cudaEventRecord(watch.end, grid.stream));
        CUDA_CHECK(cudaEventSynchronize(watch.end));
        CUDA_CHECK(cudaEventElapsedTime(&t, watch.begin, watch.end));
        best = std::min(best, t);
      }
      return best;
    } catch (const Error&) {
      cudaGetLastError();  // it stays set otherwise, and the next launch would be blamed
      CUDA_CHECK(cudaStreamSynchronize(grid.stream), key.text());  // a device that has failed is no matter of one engine
      return {};
    }
  }

  // The plan for a key. The first time each candidate runs on the caller's own buffers (results are overwritten anyway),
  // and the fastest stays; in deterministic mode the first that runs. While a step is recorded nothing can be tried: the
  // first is taken and stays for the recording, and an eager call chooses again.
  Entry& entry(const PlanKey& key, const void* x, const void* w, const void* y) {
    for (auto& e : entries)
      if (e->key == key && (e->tried || recording)) return *e;
    auto e = std::make_unique<Entry>(Entry{key, {}, {}, !recording});
    std::vector<Plan> plans;
    if (!key.empty()) plans = candidates(handle, key, rules, recording ? 1 : 8);
    Choice choice;
    if (recording) {
      if (!plans.empty()) choice.candidate = 0;
    } else if (!plans.empty()) {
      const Stopwatch watch;
      choice = choose(plans.size(), rules.deterministic,
                      [&](std::size_t i) { return milliseconds(watch, plans[i], key, x, w, y); });
    }
    if (choice.candidate) {
      std::ostringstream out;
      out << "engine " << plans[*choice.candidate].engine;
      if (choice.ran > 1) out << ", the fastest of " << choice.ran << ", " << choice.milliseconds << " ms";
      e->engine = out.str();
      e->plan = std::move(plans[*choice.candidate]);
    } else {
      e->engine = key.empty()     ? "plain kernel: nothing is multiplied"
                  : plans.empty() ? "plain kernel: cuDNN has no acceptable engine"
                                  : "plain kernel: no engine of cuDNN runs, or there is no workspace for it";
    }
    entries.push_back(std::move(e));
    return *entries.back();
  }
};

Convolution::Convolution(const Grid& grid, Memory memory) : state_(std::make_unique<State>()) {
  state_->grid = grid;
  state_->memory = std::move(memory);
  CUDNN_CHECK(cudnnCreate(&state_->handle), "cuDNN does not start");
  CUDNN_CHECK(cudnnSetStream(state_->handle, grid.stream));
}
Convolution::~Convolution() {
  state_->entries.clear();
  cudnnDestroy(state_->handle);
}

void Convolution::rules(const EngineRules& rules) {
  if (rules == state_->rules) return;
  state_->rules = rules;
  state_->entries.clear();
}
EngineRules Convolution::rules() const { return state_->rules; }
void Convolution::recording(bool on) { state_->recording = on; }

std::vector<Convolution::Chosen> Convolution::chosen() const {
  std::vector<Chosen> all;
  for (const auto& e : state_->entries) all.push_back({e->key, e->engine});
  return all;
}

namespace {

// f.operator()<T>() for the types that pictures have.
template <class F>
void typed(DType type, const F& f) {
  if (type == DType::f32) return f.template operator()<float>();
  if (type == DType::bf16) return f.template operator()<bf16>();
  if (type == DType::f16) return f.template operator()<f16>();
  fail("conv2d: cuda backend: not defined for ", name_of(type));
}

}  // namespace

void Convolution::forward(const ConvShape& s, DType type, const void* x, const void* w, void* y) {
  const PlanKey key = PlanKey::of(Pass::forward, s, type, type, x, w, y);
  if (auto& e = state_->entry(key, x, w, y); e.plan) return state_->run(*e.plan, key, x, w, y);
  typed(type, [&]<class T> {
    plain_convolution(state_->grid, s, static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(y));
  });
}

// cuDNN overwrites: what is to be added goes through scratch.
void Convolution::backward_data(const ConvShape& s, DType type, const void* dy, const void* w, void* dx, bool add) {
  const std::size_t bytes = size_of(type) * std::size_t(s.x_numel());
  State::Block room(*state_, add ? bytes : 0);
  void* to = add ? room.data() : dx;
  const PlanKey key = PlanKey::of(Pass::backward_data, s, type, type, to, w, dy);
  auto& e = state_->entry(key, to, w, dy);
  typed(type, [&]<class T> {
    if (!e.plan)
      return plain_convolution_backward_data(state_->grid, s, static_cast<const T*>(dy), static_cast<const T*>(w),
                                             static_cast<T*>(dx), add);
    state_->run(*e.plan, key, to, w, dy);
    if (add) convert(state_->grid, s.x_numel(), static_cast<const T*>(to), static_cast<T*>(dx), true);
  });
}

// In f32 where an engine writes that, else in the pictures' type and widened.
void Convolution::backward_filter(const ConvShape& s, DType type, const void* x, const void* dy, float* dw, bool add) {
  const std::size_t numel = std::size_t(s.w_numel());
  State::Block wide(*state_, add ? numel * sizeof(float) : 0);
  float* to = add ? static_cast<float*>(wide.data()) : dw;
  PlanKey key = PlanKey::of(Pass::backward_filter, s, type, DType::f32, x, to, dy);
  auto* e = &state_->entry(key, x, to, dy);
  if (e->plan) {
    state_->run(*e->plan, key, x, to, dy);
    if (add) convert(state_->grid, s.w_numel(), static_cast<const float*>(to), dw, true);
    return;
  }
  typed(type, [&]<class T> {
    if (type != DType::f32) {
      State::Block narrow(*state_, numel * sizeof(T));
      key = PlanKey::of(Pass::backward_filter, s, type, type, x, narrow.data(), dy);
      e = &state_->entry(key, x, narrow.data(), dy);
      if (e->plan) {
        state_->run(*e->plan, key, x, narrow.data(), dy);
        return convert(state_->grid, s.w_numel(), static_cast<const T*>(narrow.data()), dw, add);
      }
    }
    plain_convolution_backward_filter(state_->grid, s, static_cast<const T*>(x), static_cast<const T*>(dy), dw, add);
  });
}

}  // namespace tandem::cuda
