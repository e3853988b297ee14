#include "cuda/convolution.h"

#include <algorithm>
#include <utility>

#include "cuda/elements.h"
#include "cuda/memory.h"
#include "cuda/plain_convolution.h"

namespace tandem::cuda {

std::optional<std::size_t> choose(std::size_t candidates, bool first,
                                  const std::function<std::optional<float>(std::size_t)>& milliseconds) {
  std::optional<std::size_t> best;
  float least = 0;
  for (std::size_t i = 0; i < candidates && !(first && best); i++) {
    const std::optional<float> t = milliseconds(i);
    if (t && (!best || *t < least)) {
      best = i;
      least = *t;
    }
  }
  return best;
}

namespace {

// Calls f.operator()<T>() for the type of the pictures.
template <class F>
void typed(DType type, const F& f) {
  dispatch_among<float, bf16, f16>(type, "conv2d", f);
}

}  // namespace

struct Convolution::State {
  Grid grid;
  CachingAllocator& memory;
  cudnnHandle_t handle = nullptr;
  EngineRules rules = {};
  bool recording = false;
  struct Entry {
    PlanKey key;
    std::optional<Plan> plan;  // empty: our own kernel is used
    bool tried;                // false if it was chosen while a step was recorded
  };
  std::vector<std::unique_ptr<Entry>> entries = {};

  void run(const Plan& plan, const PlanKey& key, const Operands& o) {
    if (!plan.wide) return execute(plan, key, o);
    const PlanKey wide = *key.widened();
    const ConvShape& s = key.shape;
    const std::int64_t pixels = s.n * s.h * s.w, taps = s.c_out * s.kh * s.kw;
    const Scratch x(memory, size_of(key.type) * std::size_t(wide.shape.x_numel())),
        w(memory, size_of(key.type) * std::size_t(wide.shape.w_numel()));
    Operands through = o;
    through.x = x.data();
    through.w = w.data();
    typed(key.type, [&]<class T> {
      auto* filters = static_cast<T*>(const_cast<void*>(o.w));
      auto* wide_w = reinterpret_cast<T*>(w.data());
      set_channels(grid, pixels, s.c_in, 8, static_cast<const T*>(o.x), reinterpret_cast<T*>(x.data()));
      if (key.pass == Pass::forward) set_channels(grid, taps, s.c_in, 8, filters, wide_w);
      execute(plan, wide, through);
      if (key.pass == Pass::backward_filter) set_channels(grid, taps, 8, s.c_in, wide_w, filters);
    });
  }

  void execute(const Plan& plan, const PlanKey& key, const Operands& o) {
    const std::int64_t uids[] = {x_uid, w_uid, y_uid, bias_uid};
    const void* pointers[] = {o.x, o.w, o.y, o.bias};
    const int count = key.bias && plan.fused ? 4 : 3;
    const Scratch workspace(memory, std::size_t(plan.workspace));
    void* room = workspace.data();
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids, count)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, count)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &room)
        .finish();
    CUDNN_CHECK(cudnnBackendExecute(handle, plan.plan.raw(), pack.raw()), key.text());
    if (!plan.fused) bias_and_relu(key, o);
  }

  // Runs our own kernel.
  void bias_and_relu(const PlanKey& key, const Operands& o) {
    const ConvShape& s = key.shape;
    typed(key.type, [&]<class T> {
      bias_relu(grid, s.n * s.out_h() * s.out_w(), s.c_out, o.wide_bias, key.relu,
                static_cast<T*>(const_cast<void*>(o.y)));
    });
  }

  // ReLU must keep NaN, so that failures stay visible. With a bias of NaN every result must be NaN. The calling
  // operation overwrites y afterwards.
  bool nan_survives(const Plan& plan, const PlanKey& key, Operands o) {
    const std::size_t bytes = size_of(key.type) * std::size_t(key.shape.c_out);
    const Scratch bias(memory, bytes);
    CUDA_CHECK(cudaMemsetAsync(bias.data(), 0xff, bytes, grid.stream));
    o.bias = bias.data();
    run(plan, key, o);
    return is_nan(key.type, o.y, grid.stream);
  }

  // Records calls in a CUDA graph, so that the device's time is measured and not the host's. The destructor deletes the
  // graph.
  class Replay {
   public:
    static constexpr int calls = 4;
    explicit Replay(cudaStream_t stream) : stream_(stream) {
      CUDA_CHECK(cudaEventCreate(&begin_));
      CUDA_CHECK(cudaEventCreate(&end_));
    }
    ~Replay() {
      if (executable_) cudaGraphExecDestroy(executable_);
      if (graph_) cudaGraphDestroy(graph_);
      for (cudaEvent_t e : {begin_, end_})
        if (e) cudaEventDestroy(e);
    }
    Replay(const Replay&) = delete;
    void record(const std::function<void()>& call) {
      CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
      try {
        for (int i = 0; i < calls; i++) call();
      } catch (...) {
        cudaStreamEndCapture(stream_, &graph_);  // the stream must not stay in capture mode
        throw;
      }
      CUDA_CHECK(cudaStreamEndCapture(stream_, &graph_));
      CUDA_CHECK(cudaGraphInstantiate(&executable_, graph_, 0));
    }
    float milliseconds() {
      float t = 0;
      CUDA_CHECK(cudaEventRecord(begin_, stream_));
      CUDA_CHECK(cudaGraphLaunch(executable_, stream_));
      CUDA_CHECK(cudaEventRecord(end_, stream_));
      CUDA_CHECK(cudaEventSynchronize(end_));
      CUDA_CHECK(cudaEventElapsedTime(&t, begin_, end_));
      return t / calls;
    }

   private:
    cudaStream_t stream_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
  };

  // The shorter time of two replays, including the kernel for the parts that the plan does not compute. Empty if the
  // plan does not run or cannot be recorded.
  std::optional<float> milliseconds(const Plan& plan, const PlanKey& key, const Operands& o) {
    try {
      if (plan.fused && key.relu && !nan_survives(plan, key, o)) return {};
      run(plan, key, o);  // the first run loads the kernel
      if (rules.deterministic) return 0;
      Replay replay(grid.stream);
      replay.record([&] { run(plan, key, o); });
      replay.milliseconds();
      const float first = replay.milliseconds();
      return std::min(first, replay.milliseconds());
    } catch (const Error&) {
      cudaGetLastError();  // clears the error, which the next launch would report otherwise
      // A failed device is not the fault of one engine
      CUDA_CHECK(cudaStreamSynchronize(grid.stream), key.text());
      return {};
    }
  }

  // The candidates for a key: with a bias, plans that add it; then plans of the convolution alone. Both kinds also with
  // padded channels.
  std::vector<Plan> plans_for(const PlanKey& key) {
    const ForDevice device = [this](Descriptor& d) {
      if (d.type() == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)
        d.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle);
      if (d.type() == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        d.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle);
    };
    std::vector<Plan> plans;
    if (key.empty()) return plans;
    const std::size_t most = recording ? 1 : 8;
    auto add = [&](PlanKey k, bool wide) {
      // Whether a ReLU keeps NaN cannot be tried while a step is recorded. For graphs with a bias cuDNN offers the same
      // engines for any alignment, although most of them need 16 bytes without a bias. So such graphs are built only if
      // all addresses are multiples of 16.
      std::vector<Plan> found;
      if (k.bias && !recording && k.alignment == Alignments()) found = candidates(device, k, rules, most);
      k.bias = k.relu = false;
      for (Plan& plan : candidates(device, k, rules, most)) found.push_back(std::move(plan));
      for (Plan& plan : found) {
        plan.wide = wide;
        plans.push_back(std::move(plan));
      }
    };
    add(key, false);
    if (const auto wide = key.widened(); wide && !recording) add(*wide, true);
    return plans;
  }

  // The plan for a key. At the first use, each candidate runs on the caller's buffers: results are overwritten later,
  // or are written to scratch memory if they are to be added. The fastest is kept; in deterministic mode, the first
  // that runs. While a step is recorded nothing can be measured: the recording uses the first candidate, and a later
  // eager call chooses again.
  Entry& entry(const PlanKey& key, Operands o) {
    for (auto& e : entries)
      if (e->key == key && (e->tried || recording)) return *e;
    auto e = std::make_unique<Entry>(Entry{key, {}, !recording});
    std::vector<Plan> plans = plans_for(key);
    std::optional<std::size_t> chosen;
    if (recording) {
      if (!plans.empty()) chosen = 0;
    } else if (!plans.empty()) {
      const Scratch elsewhere(memory, key.add ? size_of(key.type) * std::size_t(key.shape.x_numel()) : 0);
      if (key.add) o.x = elsewhere.data();
      chosen = choose(plans.size(), rules.deterministic, [&](std::size_t i) { return milliseconds(plans[i], key, o); });
    }
    if (chosen) e->plan = std::move(plans[*chosen]);
    entries.push_back(std::move(e));
    return *entries.back();
  }
};

Convolution::Convolution(const Grid& grid, CachingAllocator& memory) : state_(new State{grid, memory}) {
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

void Convolution::forward(const ConvShape& s, DType type, const Operands& o, bool relu) {
  const PlanKey key = PlanKey::of(Pass::forward, s, type, o, relu);
  if (auto& e = state_->entry(key, o); e.plan) return state_->run(*e.plan, key, o);
  typed(type, [&]<class T> {
    plain_convolution(state_->grid, s, static_cast<const T*>(o.x), static_cast<const T*>(o.w),
                      static_cast<T*>(const_cast<void*>(o.y)));
  });
  state_->bias_and_relu(key, o);
}

// The sum uses scratch memory only if no engine adds to its output.
void Convolution::backward_data(const ConvShape& s, DType type, const void* dy, const void* w, void* dx, bool add) {
  if (add) {
    const Operands o{dx, w, dy};
    PlanKey key = PlanKey::of(Pass::backward_data, s, type, o);
    key.add = true;
    if (auto& e = state_->entry(key, o); e.plan) return state_->run(*e.plan, key, o);
  }
  const Scratch room(state_->memory, add ? size_of(type) * std::size_t(s.x_numel()) : 0);
  void* to = add ? static_cast<void*>(room.data()) : dx;
  const Operands o{to, w, dy};
  const PlanKey key = PlanKey::of(Pass::backward_data, s, type, o);
  auto& e = state_->entry(key, o);
  typed(type, [&]<class T> {
    if (!e.plan)
      return plain_convolution_backward_data(state_->grid, s, static_cast<const T*>(dy), static_cast<const T*>(w),
                                             static_cast<T*>(dx), add);
    state_->run(*e.plan, key, o);
    if (add) convert(state_->grid, s.x_numel(), static_cast<const T*>(to), static_cast<T*>(dx), true);
  });
}

// Computed in the pictures' type in scratch memory and then widened: cuDNN's heuristics offer no engine that writes f32
// for narrower pictures.
void Convolution::backward_filter(const ConvShape& s, DType type, const void* x, const void* dy, float* dw, bool add) {
  const bool through = add || type != DType::f32;
  const Scratch room(state_->memory, through ? size_of(type) * std::size_t(s.w_numel()) : 0);
  void* to = through ? static_cast<void*>(room.data()) : dw;
  const Operands o{x, to, dy};
  const PlanKey key = PlanKey::of(Pass::backward_filter, s, type, o);
  auto& e = state_->entry(key, o);
  typed(type, [&]<class T> {
    if (!e.plan)
      return plain_convolution_backward_filter(state_->grid, s, static_cast<const T*>(x), static_cast<const T*>(dy), dw,
                                               add);
    state_->run(*e.plan, key, o);
    if (through) convert(state_->grid, s.w_numel(), static_cast<const T*>(to), dw, add);
  });
}

}  // namespace tandem::cuda
