// The CUDA backend's logic that needs no device: what a plan is kept under, which engines are taken, when a step is
// recorded and when it is not, pools of the allocator, and what is said where there is no GPU.
#include "core/recording.h"
#include "cuda/convolution.h"
#include "cuda/device.h"
#include "cuda/matrix.h"
#include "cuda/memory.h"
#include "cuda/timeline.h"
#include "cuda/weights.h"
#include "tests/support.h"

namespace tandem::test {
namespace {
using namespace tandem::cuda;

// ---- plans ----------------------------------------------------------------------------------------------------------
TEST(CudaPlans, LayoutsAreDescribedInTheOrderNCHW) {
  const Layout x = Layout::pictures(8, 32, 16, 3);
  EXPECT_EQ(std::vector<std::int64_t>(x.sizes, x.sizes + 4), (std::vector<std::int64_t>{8, 3, 32, 16}));
  EXPECT_EQ(std::vector<std::int64_t>(x.strides, x.strides + 4), (std::vector<std::int64_t>{1536, 1, 48, 3}));
  const Layout w = Layout::filters({.c_in = 12, .c_out = 8, .kh = 3, .kw = 5, .groups = 4});
  EXPECT_EQ(std::vector<std::int64_t>(w.sizes, w.sizes + 4), (std::vector<std::int64_t>{8, 3, 3, 5}));
  EXPECT_EQ(std::vector<std::int64_t>(w.strides, w.strides + 4), (std::vector<std::int64_t>{45, 1, 15, 3}));
}

TEST(CudaPlans, OnePlanForEachPassShapeTypeAndAlignment) {
  const PlanKey key{Pass::forward, {.n = 8, .h = 32, .w = 32, .c_in = 16, .c_out = 16, .kh = 3, .kw = 3}, DType::bf16};
  auto differs = [&](auto change) {
    PlanKey other = key;
    change(other);
    return !(other == key);
  };
  EXPECT_FALSE(differs([](PlanKey&) {}));
  EXPECT_TRUE(differs([](PlanKey& k) { k.pass = Pass::backward_data; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.shape.n = 7; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.shape.dilation_w = 2; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.shape.groups = 2; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.type = DType::f32; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.bias = true; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.relu = true; }));
  EXPECT_TRUE(differs([](PlanKey& k) { k.alignment.w = 4; }));
  EXPECT_EQ(key.text(), "conv2d forward, pictures [8, 32, 32, 16], filters [16, 3, 3, 16], bf16");
  PlanKey fused = key;
  fused.bias = fused.relu = true;
  EXPECT_EQ(fused.text(), "conv2d forward, pictures [8, 32, 32, 16], filters [16, 3, 3, 16], bias, ReLU, bf16");
}

TEST(CudaPlans, AlignmentIsThatOfTheWorstPointer) {
  auto at = [](std::uintptr_t address) { return reinterpret_cast<const void*>(address); };
  EXPECT_EQ(alignment_of({at(4096), at(256)}), 16);
  EXPECT_EQ(alignment_of({at(4096), at(264)}), 8);
  EXPECT_EQ(alignment_of({at(4098), at(264)}), 2);
  EXPECT_EQ(alignment_of({nullptr}), 16);
}

TEST(CudaPlans, EachTensorHasItsOwnAlignmentAtLeastItsElements) {
  auto at = [](std::uintptr_t address) { return reinterpret_cast<const void*>(address); };
  const ConvShape s{.n = 8, .h = 32, .w = 32, .c_in = 16, .c_out = 16, .kh = 3, .kw = 3};
  auto alignment = [&](Pass pass, DType type, const Operands& o) { return PlanKey::of(pass, s, type, o).alignment; };
  EXPECT_EQ(alignment(Pass::backward_filter, DType::bf16, {at(4098), at(4100), at(4104)}), (Alignments{2, 4, 8, 16}));
  EXPECT_EQ(alignment(Pass::backward_filter, DType::f32, {at(4096), at(4098), at(4096)}), (Alignments{16, 4, 16, 16}));
  EXPECT_EQ(alignment(Pass::forward, DType::bf16, {at(4096), at(4098), at(4096), at(4104)}),
            (Alignments{16, 2, 16, 8}));
  EXPECT_TRUE(PlanKey::of(Pass::forward, s, DType::bf16, {at(4096), at(4096), at(4096), at(4096)}).bias);
  EXPECT_FALSE(PlanKey::of(Pass::forward, s, DType::bf16, {at(4096), at(4096), at(4096)}).bias);
}

TEST(CudaPlans, AnEmptyBatchIsNotForCudnn) {
  PlanKey key{Pass::forward, {.n = 1, .h = 8, .w = 8, .c_in = 4, .c_out = 4, .kh = 3, .kw = 3}, DType::f32};
  EXPECT_FALSE(key.empty());
  key.shape.n = 0;
  EXPECT_TRUE(key.empty());
  key.shape.n = 1, key.shape.c_out = 0;
  EXPECT_TRUE(key.empty());
}

TEST(CudaPlans, TheFastestThatRunsIsTakenAndWhatDoesNotRunIsLeftOut) {
  std::vector<std::size_t> tried;
  auto chosen = [&](bool first, std::vector<std::optional<float>> times) {
    tried.clear();
    return choose(times.size(), first, [&, times](std::size_t i) { return tried.push_back(i), times[i]; });
  };
  const std::optional<float> refused;
  EXPECT_EQ(chosen(false, {refused, 3.f, 1.f, refused, 2.f}), 2u);
  EXPECT_EQ(chosen(true, {refused, 3.f, 1.f}), 1u) << "deterministic: not by the stopwatch";
  EXPECT_EQ(tried, (std::vector<std::size_t>{0, 1}));
  EXPECT_FALSE(chosen(false, {refused, refused}));
  EXPECT_FALSE(chosen(false, {}));
}

TEST(CudaPlans, EnginesAreChosenByTheirNotes) {
  using Notes = std::vector<cudnnBackendNumericalNote_t>;
  const Notes cores{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, winograd{CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4},
      random{CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, narrowed{CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS};
  EXPECT_TRUE(acceptable({}, DType::f32, {}));
  EXPECT_FALSE(acceptable(cores, DType::f32, {})) << "TF32 was not asked for";
  EXPECT_TRUE(acceptable(cores, DType::f32, {.tf32 = true}));
  EXPECT_TRUE(acceptable(cores, DType::bf16, {}));
  EXPECT_TRUE(acceptable(winograd, DType::f32, {}));
  EXPECT_FALSE(acceptable(winograd, DType::f32, {.exact = true}));
  EXPECT_TRUE(acceptable(random, DType::bf16, {}));
  EXPECT_FALSE(acceptable(random, DType::bf16, {.deterministic = true}));
  EXPECT_FALSE(acceptable(narrowed, DType::f32, {.tf32 = true}));
}

// ---- fused linear layers --------------------------------------------------------------------------------------------
TEST(CudaLinear, APlanIsAskedForOnceAndRefusedWhereItSwallowsNaN) {
  struct Asked {
    int plans = 0, probes = 0;
  } asked;
  FusedPlans<int> fused;
  fused.plan = [&](const LinearKey& k) { return asked.plans++, k.n == 7 ? std::nullopt : std::optional(int(k.m)); };
  fused.nan_survives = [&](const LinearKey& k, int) { return asked.probes++, k.k != 3; };
  const LinearKey head{128, 10, 256, DType::bf16, false, 16};
  auto with = [&](auto change) {
    LinearKey k = head;
    change(k);
    return k;
  };
  EXPECT_EQ(fused.of(head, true), nullptr) << "while a step is recorded nothing can be tried,";
  EXPECT_EQ(asked.plans, 0) << "nor is it remembered";
  ASSERT_NE(fused.of(head, false), nullptr);
  EXPECT_EQ(*fused.of(head, true), 128) << "what is known is used in a recording, too";
  EXPECT_EQ(asked.plans, 1);
  EXPECT_EQ(asked.probes, 0) << "a bias alone lets NaN through";
  for (const LinearKey& other :
       {with([](LinearKey& k) { k.m = 64; }), with([](LinearKey& k) { k.n = 11; }), with([](LinearKey& k) { k.k = 8; }),
        with([](LinearKey& k) { k.type = DType::f32; }), with([](LinearKey& k) { k.relu = true; }),
        with([](LinearKey& k) { k.alignment = 4; })}) {
    const int before = asked.plans;
    EXPECT_NE(fused.of(other, false), nullptr);
    EXPECT_EQ(asked.plans, before + 1) << other.text();
  }
  EXPECT_EQ(asked.probes, 1);
  const LinearKey none = with([](LinearKey&k) { k.n = 7; }),
                  swallows = with([](LinearKey&k) { k.k = 3, k.relu = true; });
  for (int again = 0; again < 2; again++) {
    EXPECT_EQ(fused.of(none, false), nullptr);
    EXPECT_EQ(fused.of(swallows, false), nullptr);
  }
  EXPECT_EQ(asked.plans, 9) << "a refusal is remembered, too";
  EXPECT_EQ(asked.probes, 2);
  fused.clear();
  fused.of(head, false);
  EXPECT_EQ(asked.plans, 10);
  EXPECT_EQ(swallows.text(), "linear [128, 3]·[10, 3]ᵀ + bias, ReLU of bf16");
}

// ---- recording ------------------------------------------------------------------------------------------------------
struct FakeCapture : Capture {
  std::string& log;
  std::string refusal;
  FakeCapture(std::string& l, std::string r = "") : log(l), refusal(std::move(r)) {}
  void begin() override { log += '['; }
  std::string end() override {
    log += ']';
    return refusal;
  }
  void replay() override { log += 'r'; }
};

std::string run(int calls, std::function<void(std::string&)> step, std::string refusal = "",
                std::string* why = nullptr) {
  std::string log;
  Recording recording([&] { step(log); }, std::make_unique<FakeCapture>(log, refusal));
  const std::string said = stderr_of([&] {
    for (int i = 0; i < calls; i++) recording();
  });
  if (why) {
    *why = recording.why_eager();
    EXPECT_TRUE(holds(said, {*why}));
  }
  EXPECT_EQ(recording.recorded(), recording.why_eager().empty() && calls > Recording::eager_calls);
  return log;
}

TEST(CudaRecording, TwoEagerStepsThenOneRecordingThenReplays) {
  EXPECT_EQ(run(5, [](std::string& log) { log += 's'; }), "ss[s]rrr");
}

TEST(CudaRecording, WhatCannotBeRecordedRunsEagerlyAndSaysWhy) {
  std::string why;
  const auto reads = [](std::string& log) {
    if (log.ends_with('[')) throw NotRecordable("a value is read on the host");
    log += 's';
  };
  EXPECT_EQ(run(5, reads, "", &why), "ss[]sss");
  EXPECT_EQ(why, "a value is read on the host");
  const auto plain = [](std::string& log) { log += 's'; };
  EXPECT_EQ(run(4, plain, "the device refuses", &why), "ss[s]ss");
  EXPECT_EQ(why, "the device refuses");
}

TEST(CudaRecording, AnErrorWhileRecordingIsThrownWhenItComesAgain) {
  std::string why;
  const auto fails = [](std::string& log) {
    if (log.ends_with('[')) fail("cuDNN refuses to be captured");
    log += 's';
  };
  EXPECT_EQ(run(4, fails, "", &why), "ss[]ss");
  EXPECT_EQ(why, "cuDNN refuses to be captured");
  std::string log;
  int calls = 0;
  const auto step = [&] {
    if (++calls >= 3) fail("a real error");
  };
  Recording recording(step, std::make_unique<FakeCapture>(log));
  recording(), recording();
  stderr_of([&] { EXPECT_REFUSED(recording(), "a real error"); });
  EXPECT_EQ(log, "[]") << "the stream does not stay in capture mode";
}

// ---- narrow copies of the weights -----------------------------------------------------------------------------------
struct CudaWeights : testing::Test {  // a parameter vector of two segments, and copies of it in bf16
  std::unique_ptr<Backend> backend = reference_backend();
  Tensor values = Tensor::of(*backend, {128}, numbers("values", 128));
  WriteCount *first = values.storage()->add_segment("first"), *second = values.storage()->add_segment("second");
  Tensor a = values.range(0, {10}), b = values.range(64, {8, 8});
  int conversions = 0;
  NarrowWeights weights{[this](const float* from, std::int64_t numel, Tensor& to) {
    conversions++;
    for (std::int64_t i = 0; i < numel; i++) to.write<bf16>()[i] = bf16(from[i]);
  }};
  CudaWeights() { a.count_on(first), b.count_on(second); }
  std::vector<float> narrow(const Tensor& w) {
    const bf16* p = static_cast<const bf16*>(weights.of(w, DType::bf16));
    return std::vector<float>(p, p + w.numel());
  }
};
std::vector<float> rounded(const Tensor& w) {
  std::vector<float> v;
  for (double x : w.values()) v.push_back(bf16(float(x)));
  return v;
}

TEST_F(CudaWeights, TheWholeVectorIsConvertedOnceForEachWrite) {
  EXPECT_EQ(narrow(a), rounded(a));
  EXPECT_EQ(narrow(b), rounded(b));
  EXPECT_EQ(narrow(a), rounded(a));
  EXPECT_EQ(conversions, 1);
  b.fill(0.5);
  EXPECT_EQ(narrow(a), rounded(a)) << "not the segment that was written";
  EXPECT_EQ(conversions, 1);
  EXPECT_EQ(narrow(b), rounded(b));
  EXPECT_EQ(conversions, 2);
}

TEST_F(CudaWeights, ARecordedStepHoldsTheConversion) {
  narrow(a);
  weights.convert_again();
  narrow(b), narrow(a);
  EXPECT_EQ(conversions, 2);
}

TEST_F(CudaWeights, OthersThanParametersHaveNoCopyAndTheDeadAreForgotten) {
  EXPECT_EQ(weights.of(Tensor::zeros(*backend, {4}), DType::bf16), nullptr);
  narrow(a);
  weights.forget(*second);
  EXPECT_EQ(narrow(a), rounded(a));
  EXPECT_EQ(conversions, 2);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
TEST(CudaMemory, WhoHoldsTheDeviceIsSaid) {
  EXPECT_EQ(memory_state(std::size_t{1} << 30, std::size_t{80} << 30, std::size_t{70} << 30),
            "80.0 GiB: 1.00 GiB free, 70.0 GiB ours, 9.00 GiB held by other programs and by libraries");
  EXPECT_TRUE(holds(memory_state(10, 5, 10), {"0 B held by other"})) << "numbers that do not add up";
}

// ---- the device in a trace ------------------------------------------------------------------------------------------
TEST(CudaTimeline, TimesAreSumsThatKeepTheirDigits) {
  EXPECT_EQ(times_of(10, {}), (std::vector<std::int64_t>{10}));
  EXPECT_EQ(times_of(0, {0.5f, 0.25f}), (std::vector<std::int64_t>{0, 500'000, 750'000}));
  const std::vector<std::int64_t> long_one = times_of(0, std::vector<float>(100'001, 1.f));
  EXPECT_EQ(long_one.back(), 100'001'000'000) << "a microsecond is seen after a hundred seconds";
}

// ---- where there is no GPU ------------------------------------------------------------------------------------------
TEST(CudaDevice, TheCauseIsNamed) {
  EXPECT_TRUE(holds(why_unusable(cudaErrorInsufficientDriver, 0, 13000), {"no NVIDIA driver"}));
  EXPECT_TRUE(
      holds(why_unusable(cudaErrorInsufficientDriver, 12040, 13000), {"driver is made for CUDA 12.4, this program for "
                                                                      "CUDA 13.0"}));
  EXPECT_TRUE(holds(why_unusable(cudaErrorNoDevice, 13000, 13000), {"nvidia-smi"}));
  EXPECT_TRUE(holds(why_unusable(cudaErrorUnknown, 13000, 13000), {"cudaErrorUnknown"}));
}

TEST(CudaDevice, IsRefusedWithoutAGpuAndNeverReplacedByTheCpu) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "there is a GPU here";
  EXPECT_REFUSED(cuda_backend(0), "no usable GPU");
}

TEST(CudaDevice, RunsTheOpTable) {
  bool there = false;
  for (const BackendKind& kind : backends()) there |= kind.name == "cuda";
  if (!there) GTEST_SKIP() << "no GPU: the op table ran on the other backends";
}

TEST(CudaDevice, LibrariesSayTheirVersions) {
  EXPECT_TRUE(holds(library_versions(), {"cuDNN 9."}));
  bool found = false;
  for (const std::string& path : library_paths()) found |= path.find("libcudnn") != std::string::npos;
  EXPECT_TRUE(found) << "libcudnn is loaded, but not among the paths";
}

}  // namespace
}  // namespace tandem::test
