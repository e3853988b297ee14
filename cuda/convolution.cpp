#include "cuda/convolution.h"

#include <algorithm>
#include <utility>

#include "cuda/memory.h"

namespace tandem::cuda {

std::optional<std::size_t> choose(std::size_t candidates, bool first,
                                  const std::function<std::optional<float>(std::size_t)>& milliseconds) {
  std::optional<std::size_t> best;
  float least = 0;
  for (std::size_t i = 0; i < candidates && !(first && best); i++) {
    const std::optional<float> t = milliseconds(i);
    if (t && (!best || *t < least)) best = i, least = *t;
  }
  return best;
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

struct Convolution::State {
  Grid grid;
  Memory memory;
  cudnnHandle_t handle = nullptr;
  EngineRules rules;
  bool recording = false;
  struct Entry {
    PlanKey key;
    std::optional<Plan> plan;  // none: our own kernel
    bool tried;                // not so what was chosen while a step was recorded
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

  void run(const Plan& plan, const PlanKey& key, const Operands& o) {
    if (!plan.wide) return execute(plan, key, o);
    const PlanKey wide = *key.widened();
    const ConvShape& s = key.shape;
    const std::int64_t pixels = s.n * s.h * s.w, taps = s.c_out * s.kh * s.kw;
    const Block x(*this, size_of(key.type) * std::size_t(wide.shape.x_numel())),
        w(*this, size_of(key.type) * std::size_t(wide.shape.w_numel()));
    Operands through = o;
    through.x = x.data();
    through.w = w.data();
    typed(key.type, [&]<class T> {
      auto* filters = static_cast<T*>(const_cast<void*>(o.w));
      set_channels(grid, pixels, s.c_in, 8, static_cast<const T*>(o.x), static_cast<T*>(x.data()));
      if (key.pass == Pass::forward) set_channels(grid, taps, s.c_in, 8, filters, static_cast<T*>(w.data()));
      execute(plan, wide, through);
      if (key.pass == Pass::backward_filter)
        set_channels(grid, taps, 8, s.c_in, static_cast<const T*>(w.data()), filters);
    });
  }

  void execute(const Plan& plan, const PlanKey& key, const Operands& o) {
    const std::int64_t uids[] = {x_uid, w_uid, y_uid, bias_uid};
    const void* pointers[] = {o.x, o.w, o.y, o.bias};
    const int count = key.bias && plan.fused ? 4 : 3;
    Block workspace(*this, std::size_t(plan.workspace));
    void* room = workspace.data();
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids, count)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, count)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &room)
        .finish();
    CUDNN_CHECK(cudnnBackendExecute(handle, plan.plan.raw(), pack.raw()), key.text());
    if (!plan.fused) bias_and_relu(key, o);
  }

  // By our own kernel.
  void bias_and_relu(const PlanKey& key, const Operands& o) {
    const ConvShape& s = key.shape;
    typed(key.type, [&]<class T> {
      bias_relu(grid, s.n * s.out_h() * s.out_w(), s.c_out, o.wide_bias, key.relu,
                static_cast<T*>(const_cast<void*>(o.y)));
    });
  }

  // Failures must stay visible, so ReLU must let NaN through: with a bias of NaN every result is one. y is overwritten
  // by the call that asked.
  bool nan_survives(const Plan& plan, const PlanKey& key, Operands o) {
    const std::size_t bytes = size_of(key.type) * std::size_t(key.shape.c_out);
    Block bias(*this, bytes);
    CUDA_CHECK(cudaMemsetAsync(bias.data(), 0xff, bytes, grid.stream));
    o.bias = bias.data();
    run(plan, key, o);
    return is_nan(key.type, o.y, grid.stream);
  }

  // Calls in a CUDA graph, so that the device's time is measured and not the host's; gone with the object.
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

  // The better of two replays, with the kernel for what the plan leaves out; none where the plan does not run or cannot
  // be recorded.
  std::optional<float> milliseconds(const Plan& plan, const PlanKey& key, const Operands& o) {
    try {
      if (plan.fused && key.relu && !nan_survives(plan, key, o)) return {};
      run(plan, key, o);  // the first run pays for loading the kernel
      if (rules.deterministic) return 0;
      Replay replay(grid.stream);
      replay.record([&] { run(plan, key, o); });
      replay.milliseconds();
      const float first = replay.milliseconds();
      return std::min(first, replay.milliseconds());
    } catch (const Error&) {
      cudaGetLastError();  // it stays set otherwise, and the next launch would be blamed
      // A device that has failed is no matter of one engine
      CUDA_CHECK(cudaStreamSynchronize(grid.stream), key.text());
      return {};
    }
  }

  // What can serve a key: with a bias, plans that add it, and then those of the convolution alone; each with more
  // channels, too.
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
      // Whether a ReLU lets NaN through cannot be tried while a step is recorded. For graphs with a bias cuDNN offers
      // the same engines whatever the alignment, though most of them need 16 bytes without a bias: so they get what
      // serves any of them.
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

  // The plan for a key. The first time each candidate runs on the caller's own buffers (results are overwritten anyway,
  // or go elsewhere where they are added), and the fastest stays; in deterministic mode the first that runs. While a
  // step is recorded nothing can be tried: the first is taken and stays for the recording, and an eager call chooses
  // again.
  Entry& entry(const PlanKey& key, Operands o) {
    for (auto& e : entries)
      if (e->key == key && (e->tried || recording)) return *e;
    auto e = std::make_unique<Entry>(Entry{key, {}, !recording});
    std::vector<Plan> plans = plans_for(key);
    std::optional<std::size_t> chosen;
    if (recording) {
      if (!plans.empty()) chosen = 0;
    } else if (!plans.empty()) {
      const Block elsewhere(*this, key.add ? size_of(key.type) * std::size_t(key.shape.x_numel()) : 0);
      if (key.add) o.x = elsewhere.data();
      chosen = choose(plans.size(), rules.deterministic, [&](std::size_t i) { return milliseconds(plans[i], key, o); });
    }
    if (chosen) e->plan = std::move(plans[*chosen]);
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

void Convolution::forward(const ConvShape& s, DType type, const Operands& o, bool relu) {
  const PlanKey key = PlanKey::of(Pass::forward, s, type, o, relu);
  if (auto& e = state_->entry(key, o); e.plan) return state_->run(*e.plan, key, o);
  typed(type, [&]<class T> {
    plain_convolution(state_->grid, s, static_cast<const T*>(o.x), static_cast<const T*>(o.w),
                      static_cast<T*>(const_cast<void*>(o.y)));
  });
  state_->bias_and_relu(key, o);
}

// What is to be added goes through scratch only where no engine adds by itself.
void Convolution::backward_data(const ConvShape& s, DType type, const void* dy, const void* w, void* dx, bool add) {
  if (add) {
    const Operands o{dx, w, dy};
    PlanKey key = PlanKey::of(Pass::backward_data, s, type, o);
    key.add = true;
    if (auto& e = state_->entry(key, o); e.plan) return state_->run(*e.plan, key, o);
  }
  State::Block room(*state_, add ? size_of(type) * std::size_t(s.x_numel()) : 0);
  void* to = add ? room.data() : dx;
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

// In the pictures' type, through scratch, and widened: cuDNN's heuristics offer no engine that writes f32 beside
// narrower pictures.
void Convolution::backward_filter(const ConvShape& s, DType type, const void* x, const void* dy, float* dw, bool add) {
  const bool through = add || type != DType::f32;
  State::Block room(*state_, through ? size_of(type) * std::size_t(s.w_numel()) : 0);
  void* to = through ? room.data() : dw;
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
