// The CUDA backend's logic that needs no device: what a plan is kept under, which engines are taken, narrow copies
// of weights, and what is said where there is no GPU.
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

template <class Key, class Change>
Key with(Key key, const Change& change) {
  change(key);
  return key;
}

// ---- plans ----------------------------------------------------------------------------------------------------------
const PlanKey key{Pass::forward, {.n = 8, .h = 32, .w = 32, .c_in = 16, .c_out = 16, .kh = 3, .kw = 3}, DType::bf16};

TEST(CudaPlans, LayoutsAreDescribedInTheOrderNCHW) {
  const Layout x = Layout::pictures(8, 32, 16, 3);
  EXPECT_EQ(std::vector<std::int64_t>(x.sizes, x.sizes + 4), (std::vector<std::int64_t>{8, 3, 32, 16}));
  EXPECT_EQ(std::vector<std::int64_t>(x.strides, x.strides + 4), (std::vector<std::int64_t>{1536, 1, 48, 3}));
  const Layout w = Layout::filters({.c_in = 12, .c_out = 8, .kh = 3, .kw = 5, .groups = 4});
  EXPECT_EQ(std::vector<std::int64_t>(w.sizes, w.sizes + 4), (std::vector<std::int64_t>{8, 3, 3, 5}));
  EXPECT_EQ(std::vector<std::int64_t>(w.strides, w.strides + 4), (std::vector<std::int64_t>{45, 1, 15, 3}));
}

TEST(CudaPlans, OnePlanForEachPassShapeTypeAndAlignment) {
  EXPECT_EQ(with(key, [](PlanKey&) {}), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.pass = Pass::backward_data; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.shape.n = 7; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.shape.dilation_w = 2; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.shape.groups = 2; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.type = DType::f32; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.bias = true; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.relu = true; }), key);
  EXPECT_NE(with(key, [](PlanKey& k) { k.alignment.w = 4; }), key);
  EXPECT_EQ(key.text(), "conv2d forward, pictures [8, 32, 32, 16], filters [16, 3, 3, 16], bf16");
  EXPECT_EQ(with(key, [](PlanKey& k) { k.bias = k.relu = true; }).text(),
            "conv2d forward, pictures [8, 32, 32, 16], filters [16, 3, 3, 16], bias, ReLU, bf16");
}

const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(CudaPlans, AlignmentIsThatOfTheWorstPointer) {
  EXPECT_EQ(alignment_of({at(4096), at(256)}), 16);
  EXPECT_EQ(alignment_of({at(4096), at(264)}), 8);
  EXPECT_EQ(alignment_of({at(4098), at(264)}), 2);
  EXPECT_EQ(alignment_of({nullptr}), 16);
}

TEST(CudaPlans, EachTensorHasItsOwnAlignmentAtLeastItsElements) {
  const ConvShape& s = key.shape;
  auto alignment = [&](Pass pass, DType type, const Operands& o) { return PlanKey::of(pass, s, type, o).alignment; };
  EXPECT_EQ(alignment(Pass::backward_filter, DType::bf16, {at(4098), at(4100), at(4104)}), (Alignments{2, 4, 8, 16}));
  EXPECT_EQ(alignment(Pass::backward_filter, DType::f32, {at(4096), at(4098), at(4096)}), (Alignments{16, 4, 16, 16}));
  EXPECT_EQ(alignment(Pass::forward, DType::bf16, {at(4096), at(4098), at(4096), at(4104)}),
            (Alignments{16, 2, 16, 8}));
  EXPECT_TRUE(PlanKey::of(Pass::forward, s, DType::bf16, {at(4096), at(4096), at(4096), at(4096)}).bias);
  EXPECT_FALSE(PlanKey::of(Pass::forward, s, DType::bf16, {at(4096), at(4096), at(4096)}).bias);
}

TEST(CudaPlans, AnEmptyBatchIsNotForCudnn) {
  EXPECT_FALSE(key.empty());
  EXPECT_TRUE(with(key, [](PlanKey& k) { k.shape.n = 0; }).empty());
  EXPECT_TRUE(with(key, [](PlanKey& k) { k.shape.c_out = 0; }).empty());
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
  EXPECT_EQ(fused.of(head, true), nullptr) << "while a step is recorded nothing can be tried,";
  EXPECT_EQ(asked.plans, 0) << "nor is it remembered";
  ASSERT_NE(fused.of(head, false), nullptr);
  EXPECT_EQ(*fused.of(head, true), 128) << "what is known is used in a recording, too";
  EXPECT_EQ(asked.plans, 1);
  EXPECT_EQ(asked.probes, 0) << "a bias alone lets NaN through";
  for (const LinearKey& other :
       {with(head, [](LinearKey& k) { k.m = 64; }), with(head, [](LinearKey& k) { k.n = 11; }),
        with(head, [](LinearKey& k) { k.k = 8; }), with(head, [](LinearKey& k) { k.type = DType::f32; }),
        with(head, [](LinearKey& k) { k.relu = true; }), with(head, [](LinearKey& k) { k.alignment = 4; })}) {
    const int before = asked.plans;
    EXPECT_NE(fused.of(other, false), nullptr);
    EXPECT_EQ(asked.plans, before + 1) << other.text();
  }
  EXPECT_EQ(asked.probes, 1);
  const LinearKey none = with(head, [](LinearKey&k) { k.n = 7; }),
                  swallows = with(head, [](LinearKey&k) { k.k = 3, k.relu = true; });
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
  for (const auto& [error, driver, cause] : std::initializer_list<std::tuple<cudaError_t, int, std::string>>{
           {cudaErrorInsufficientDriver, 0, "no NVIDIA driver"},
           {cudaErrorInsufficientDriver, 12040, "driver is made for CUDA 12.4, this program for CUDA 13.0"},
           {cudaErrorNoDevice, 13000, "nvidia-smi"},
           {cudaErrorUnknown, 13000, "cudaErrorUnknown"}})
    EXPECT_TRUE(holds(why_unusable(error, driver, 13000), {cause}));
}

TEST(CudaDevice, IsRefusedWithoutAGpuAndNeverReplacedByTheCpu) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "there is a GPU here";
  EXPECT_REFUSED(cuda_backend(0), "no usable GPU");
}

TEST(CudaDevice, LibrariesSayTheirVersions) {
  EXPECT_TRUE(holds(library_versions(), {"cuDNN 9."}));
  bool found = false;
  for (const std::string& path : library_paths()) found |= path.find("libcudnn") != std::string::npos;
  EXPECT_TRUE(found) << "libcudnn is loaded, but not among the paths";
}

}  // namespace
}  // namespace tandem::test
