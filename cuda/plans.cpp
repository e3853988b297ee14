#include "cuda/plans.h"

#include <algorithm>
#include <sstream>

namespace tandem::cuda {

std::string text_of(cudnnStatus_t status) {
  char last[1024] = {};
  cudnnGetLastErrorString(last, sizeof last);
  return std::string(cudnnGetErrorString(status)) + (last[0] ? ": " : "") + last;
}

const char* name_of(Pass p) {
  return p == Pass::forward ? "forward" : p == Pass::backward_data ? "backward data" : "backward filter";
}

std::string PlanKey::text() const {
  std::ostringstream out;
  const ConvShape& s = shape;
  out << "conv2d " << name_of(pass) << ", pictures [" << s.n << ", " << s.h << ", " << s.w << ", " << s.c_in
      << "], filters [" << s.c_out << ", " << s.kh << ", " << s.kw << ", " << s.c_in / s.groups << "], "
      << (bias ? "bias, " : "") << (relu ? "ReLU, " : "") << (add ? "added, " : "") << tandem::name_of(type);
  return out.str();
}

int alignment_of(std::initializer_list<const void*> pointers) {
  std::uintptr_t all = 16;
  for (const void* p : pointers) all |= reinterpret_cast<std::uintptr_t>(p);
  return int(all & (~all + 1));  // the lowest bit that is set in any address, or 16
}

PlanKey PlanKey::of(Pass pass, const ConvShape& s, DType type, const Operands& o, bool relu) {
  auto aligned = [&](const void* p) { return std::max(int(size_of(type)), alignment_of({p})); };
  return {pass, s, type, o.bias != nullptr, relu, {aligned(o.x), aligned(o.w), aligned(o.y), aligned(o.bias)}};
}

std::optional<PlanKey> PlanKey::widened() const {
  if (size_of(type) != 2 || shape.c_in >= 8 || shape.groups != 1 || pass == Pass::backward_data) return {};
  PlanKey wide = *this;
  wide.shape.c_in = 8;
  wide.alignment.x = wide.alignment.w = 16;
  return wide;
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
    if (note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) return false;  // less precision than requested
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

Descriptor tensor(Uid uid, DType type, const Layout& layout, std::int64_t alignment, bool inner = false) {
  Descriptor t(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const cudnnDataType_t data = library_type(type);
  t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, uid)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &data)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, layout.sizes, 4)
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, layout.strides, 4)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment)
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &inner)
      .finish();
  return t;
}

// cuDNN's names of the operation and its attributes, which differ between the passes.
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

constexpr cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;

Descriptor convolution(const PlanKey& key, const Descriptor& x, const Descriptor& w, const Descriptor& y) {
  const ConvShape& s = key.shape;
  Descriptor c(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
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
  const float one = 1, old = key.add ? 1 : 0;
  Descriptor op(n.operation);
  op.set(n.x, x).set(n.w, w).set(n.y, y).set(n.convolution, c);
  op.set(n.alpha, CUDNN_TYPE_FLOAT, &one).set(n.beta, CUDNN_TYPE_FLOAT, &old).finish();
  return op;
}

// y = x + b or, without b, y = relu(x).
Descriptor pointwise(const Descriptor& x, const Descriptor* b, const Descriptor& y) {
  const cudnnPointwiseMode_t mode = b ? CUDNN_POINTWISE_ADD : CUDNN_POINTWISE_RELU_FWD;
  // A request; convolution.cu tests whether an engine complies
  const cudnnNanPropagation_t nan = CUDNN_PROPAGATE_NAN;
  Descriptor p(CUDNN_BACKEND_POINTWISE_DESCRIPTOR), op(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  p.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode)
      .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &arithmetic);
  if (!b) p.set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, &nan);
  p.finish();
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, p).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
  if (b) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y).finish();
  return op;
}

// The convolution, then + bias, then ReLU; intermediate values are f32 and not in memory. The graph is not finalised
// yet.
Descriptor operation_graph(const ForDevice& device, const PlanKey& key) {
  const ConvShape& s = key.shape;
  const Layout results = Layout::pictures(s.n, s.out_h(), s.out_w(), s.c_out);
  const Descriptor x = tensor(x_uid, key.type, Layout::pictures(s.n, s.h, s.w, s.c_in), key.alignment.x),
                   w = tensor(w_uid, key.type, Layout::filters(s), key.alignment.w);
  auto result = [&](Uid between, bool last) {
    return last ? tensor(y_uid, key.type, results, key.alignment.y) : tensor(between, DType::f32, results, 16, true);
  };
  std::vector<Descriptor> operations;
  Descriptor y = result(product_uid, !key.bias && !key.relu);
  operations.push_back(convolution(key, x, w, y));
  if (key.bias) {
    const Descriptor bias = tensor(bias_uid, key.type, Layout::pictures(1, 1, 1, s.c_out), key.alignment.bias);
    Descriptor sum = result(sum_uid, !key.relu);
    operations.push_back(pointwise(y, &bias, sum));
    y = std::move(sum);
  }
  if (key.relu) operations.push_back(pointwise(y, nullptr, result(y_uid, true)));
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& op : operations) raw.push_back(op.raw());
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  device(graph);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), int(raw.size()));
  return graph;
}

// The engines that a heuristic suggests, the best first.
std::vector<Descriptor> configurations(const Descriptor& heuristic) {
  std::int64_t count = 0;
  CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0,
                                       &count, nullptr));
  std::vector<Descriptor> all;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; i++) raw.push_back(all.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
  CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                       count, &count, raw.data()));
  all.erase(all.begin() + count, all.end());  // it may return fewer than it announced
  return all;
}

// Empty if the engine is not acceptable or does not support this device.
std::optional<Plan> plan_of(const ForDevice& device, const PlanKey& key, const EngineRules& rules,
                            const Descriptor& configuration) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t into = engine.raw();
  std::int64_t got = 0;
  CUDNN_CHECK(cudnnBackendGetAttribute(configuration.raw(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                       1, &got, &into));
  std::vector<cudnnBackendNumericalNote_t> notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
  CUDNN_CHECK(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                       std::int64_t(notes.size()), &got, notes.data()));
  notes.resize(std::size_t(got));
  if (!acceptable(notes, key.type, rules)) return {};
  Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  device(plan);
  if (!plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration).try_to_finish()) return {};
  const auto bytes = plan.get<std::int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64);
  return Plan{.plan = std::move(plan), .workspace = bytes, .fused = key.bias || key.relu};
}

}  // namespace

std::vector<Plan> candidates(const ForDevice& device, const PlanKey& key, const EngineRules& rules, std::size_t most) {
  std::vector<Plan> found;
  Descriptor graph = operation_graph(device, key);
  if (!graph.try_to_finish()) return found;  // cuDNN does not support this graph
  for (cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    if (!found.empty()) break;
    Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    device(heuristic);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
    if (!heuristic.try_to_finish()) continue;  // it does not support this graph
    for (const Descriptor& configuration : configurations(heuristic)) {
      if (found.size() == most) break;
      if (auto plan = plan_of(device, key, rules, configuration)) found.push_back(std::move(*plan));
    }
  }
  return found;
}

}  // namespace tandem::cuda
