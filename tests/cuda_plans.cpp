// Which of the backend's convolutions cuDNN has plans for, on GPUs that are not here: `make cuda-plans`. cuDNN (since
// 9.8) asks its heuristics and finishes plans for a description of a GPU. The graphs, the rules and the choice of
// engines are the backend's own (cuda/plans.h), the shapes those of the op table, of the models and of airbench94.
// Nothing is run. Exit status 1: a graph has no plan.
//   build/cuda_plans [--gpu sm_90] [--first] [ops lenet5 …]
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "core/clock.h"
#include "core/reference/kernels.h"
#include "cuda/plans.h"
#include "examples/airbench.h"
#include "layers/models/models.h"
#include "layers/train/options.h"
#include "tests/op_table.h"

using namespace tandem;
using namespace tandem::cuda;

namespace {

// ---- GPUs: cuDNN wants each of these keys ---------------------------------------------------------------------------
struct Gpu {
  const char *compute, *properties;
};
constexpr Gpu gpus[] = {
    {"sm_80",
     R"("deviceName":"NVIDIA A100-SXM4-80GB","deviceVer":800,"multiProcessorCount":108,"totalGlobalMem":85100068864,)"
     R"("maxSharedMemoryPerBlockOptin":166912,"smClockRateKHz":1410000,"memClockRateKHz":1593000,"l2CacheSize":41943040)"},
    {"sm_90",
     R"("deviceName":"NVIDIA H200","deviceVer":900,"multiProcessorCount":132,"totalGlobalMem":151397597184,)"
     R"("maxSharedMemoryPerBlockOptin":232448,"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":52428800)"},
    // Too old for bf16, and asked for by name only: it shows that a graph without a plan is found.
    {"sm_60",
     R"("deviceName":"Tesla P100","deviceVer":600,"multiProcessorCount":56,"totalGlobalMem":17071734784,)"
     R"("maxSharedMemoryPerBlockOptin":49152,"smClockRateKHz":1328500,"memClockRateKHz":715000,"l2CacheSize":4194304)"}};
constexpr const char* all_gpus =
    R"(,"warpSize":32,"maxSharedMemoryPerBlock":49152,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,)"
    R"("regsPerBlock":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"maxBlockSize":[1024,1024,64],)"
    R"("maxGridSize":[2147483647,65535,65535],"supportCoopLaunch":1,"pciDeviceId":0,"isTccDriver":0,"cudaDeviceId":0,)"
    R"("driverVer":13000)";

ForDevice described(const Gpu& gpu) {
  const std::string json = "{" + std::string(gpu.properties) + all_gpus + "}";
  auto device = std::make_shared<Descriptor>(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, json.data(), int(json.size())).finish();
  return [device](Descriptor& d) {
    if (d.type() == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) d.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device);
    if (d.type() == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) d.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *device);
  };
}

// ---- the convolutions of a program: what its forward pass asks a backend for ----------------------------------------
struct Convolved {
  ConvShape shape;
  bool bias, relu;
  bool operator==(const Convolved&) const = default;
};
class Listening : public reference::ReferenceBackend {
 public:
  std::vector<Convolved> heard;
  std::int64_t times = 1;  // as large a batch as the one that it sees
  Listening() : ReferenceBackend(1) { provide<float>(std::make_unique<Listener>(*this)); }

 private:
  struct Listener : reference::ReferenceKernels<float> {
    Listening& all;
    explicit Listener(Listening& l) : ReferenceKernels(1, l.memory()), all(l) {}
    void conv2d(const ConvShape& s, In<float>, In<float>, In<float> bias, bool relu, Out<float> y) override {
      Convolved c{s, bias != nullptr, relu};
      c.shape.n *= all.times;
      if (std::find(all.heard.begin(), all.heard.end(), c) == all.heard.end()) all.heard.push_back(c);
      std::fill_n(y.data, s.y_numel(), 0.f);
    }
  };
};

void listen_to_table(Listening& backend) {
  for (const test::Row& row : test::table())
    for (const test::Case& c : row.cases) {
      std::vector<Variable> inputs;
      for (const test::Input& in : c.inputs) inputs.emplace_back(Tensor::zeros(backend, in.shape));
      c.y(inputs);
    }
}
void listen_to(Listening& backend, Module& model, int channels, int side) {
  FlatParameters flat(model, backend, 1);
  model.eval();
  model(Variable(Tensor::zeros(backend, {1, side, side, channels})));
}

// `words`: "ops", models, "airbench94"; empty: all.
std::vector<Convolved> convolutions(const std::vector<std::string>& words) {
  Listening backend;
  NoGrad off;
  auto asked = [&](const std::string& name) {
    return words.empty() || std::find(words.begin(), words.end(), name) != words.end();
  };
  if (asked("ops")) listen_to_table(backend);
  std::istringstream names(model_names());
  for (std::string name; names >> name;) {
    if (!asked(name)) continue;
    auto pictures = [&](int channels, int side, int batch) {
      backend.times = batch;
      listen_to(backend, *make_model(name, 10, channels, side), channels, side);
    };
    pictures(3, 32, 128);
    if (name == "lenet5" || name.starts_with("smallcnn")) pictures(1, 28, 128);
    for (const char* large : {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"})
      if (name == large) pictures(3, 224, 128);
  }
  if (asked("airbench94")) {
    airbench::Net net;
    backend.times = 1024;
    listen_to(backend, net, 3, 32);
  }
  return std::move(backend.heard);
}

// ---- the table ------------------------------------------------------------------------------------------------------
struct Type {
  const char* name;
  DType type;
  bool tf32;
};
constexpr Type types[] = {
    {"f32", DType::f32, false}, {"tf32", DType::f32, true}, {"bf16", DType::bf16, false}, {"f16", DType::f16, false}};

struct Graphs {
  const char* name;
  std::vector<PlanKey> keys = {};
  void add(const PlanKey& key) {
    if (!key.empty() && std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
};
std::vector<Graphs> graphs_of(const std::vector<Convolved>& convolutions, DType type) {
  std::vector<Graphs> all{
      {"forward"}, {"backward data"}, {"backward filter"}, {"forward, bias"}, {"forward, bias, ReLU"}};
  for (const Convolved& c : convolutions) {
    const Pass passes[] = {Pass::forward, Pass::backward_data, Pass::backward_filter};
    for (int i = 0; i < 3; i++) all[std::size_t(i)].add({passes[i], c.shape, type});
    if (c.bias) all[c.relu ? 4 : 3].add({Pass::forward, c.shape, type, true, c.relu});
  }
  return all;
}

// One line: how many of the graphs have a plan, without rules and deterministic without Winograd. Returns how many have
// none. At most `most` plans of each are finished.
int tell(const Gpu& gpu, const ForDevice& device, const Graphs& graphs, const Type& type, std::size_t most) {
  std::size_t with[2] = {}, fewest = most;
  std::vector<std::string> none;
  for (const PlanKey& key : graphs.keys)
    for (bool strict : {false, true}) {
      const std::size_t plans =
          candidates(device, key, {.deterministic = strict, .tf32 = type.tf32, .exact = strict}, most).size();
      with[strict] += plans > 0;
      if (!strict) fewest = std::min(fewest, plans);
      if (!plans) none.push_back(key.text() + (strict ? ", deterministic" : ""));
    }
  std::printf("%-20s %-5s %-6s %6zu %12zu %14zu %8zu\n", graphs.name, type.name, gpu.compute, graphs.keys.size(),
              with[0], with[1], fewest);
  for (const std::string& text : none) std::printf("  NO PLAN on %s: %s\n", gpu.compute, text.c_str());
  std::fflush(stdout);
  return int(none.size());
}

}  // namespace

int main(int argc, char** argv) {
  int missing = 0;
  const int status = run_program(argc, argv, [&] {
    std::string only;
    std::size_t most = 8;
    std::vector<std::string> words;
    parse_command_line(
        argc, argv,
        "Which convolutions cuDNN has plans for, on GPUs that are not here: ops, models, airbench94; default: all.",
        {{"--gpu", "one of them, or sm_60, which is too old for bf16", "sm_80 and sm_90", [&](auto& v) { only = v; }},
         {"--first", "finish one plan of each graph; up to eight otherwise", "", [&](auto&) { most = 1; }, true}},
        &words);
    for (const std::string& word : words)
      if (word != "ops" && word != "airbench94") check_model_name(word);
    const auto begin = Clock::now();
    const std::vector<Convolved> all = convolutions(words);
    if (all.empty()) refuse("there is no convolution: name ops, airbench94 or some of ", model_names());
    std::printf("cuDNN %zu, %zu convolutions; %s\n", cudnnGetVersion(), all.size(),
                dlopen("libcuda.so.1", RTLD_LAZY) ? "libcuda.so.1 is there"
                                                  : "without libcuda.so.1 cuDNN compiles no kernel at run time");
    std::printf("%-20s %-5s %-6s %6s %12s %14s %8s\n", "graph", "type", "GPU", "graphs", "with a plan", "deterministic",
                "fewest");
    int seen = 0;
    for (const Gpu& gpu : gpus) {
      if (only.empty() ? gpu.compute == std::string("sm_60") : gpu.compute != only) continue;
      seen++;
      const ForDevice device = described(gpu);
      for (const Type& type : types)
        for (const Graphs& graphs : graphs_of(all, type.type))
          if (!graphs.keys.empty()) missing += tell(gpu, device, graphs, type, most);
    }
    if (!seen) refuse("--gpu ", only, ": choose sm_80, sm_90 or sm_60");
    std::printf("%s, %.0f s\n",
                missing ? "there are graphs without a plan" : "every graph has a plan, deterministic or not",
                seconds_since(begin));
  });
  return status ? status : missing > 0;
}
