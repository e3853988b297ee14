// A convolution as a cuDNN graph, and the plans that cuDNN's heuristics offer for the graph. This file does not run
// plans, so it needs no device: the GPU is given by a handle, or only by a description (tests/cuda_plans.cpp). Pictures
// [n, h, w, c], filters [c_out, kh, kw, c_in / groups]; sums are f32.
#pragma once
#include <cudnn.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/shape.h"
#include "cuda/check.h"

namespace tandem::cuda {

enum class Pass { forward, backward_data, backward_filter };
const char* name_of(Pass);

// The alignment of each tensor's address in bytes: 16, 8, 4 or 2. cuDNN accepts none below the size of an element.
struct Alignments {
  int x = 16, w = 16, y = 16, bias = 16;
  bool operator==(const Alignments&) const = default;
};
// The largest of 16, 8, 4, 2 that divides all addresses.
int alignment_of(std::initializer_list<const void*> pointers);

// The tensors of a pass, or their gradients: for a filter gradient x and y are read, and w is written. All have the
// type of the pictures.
struct Operands {
  const void *x, *w, *y;
  const void* bias = nullptr;        // of a forward pass; null: none
  const float* wide_bias = nullptr;  // the bias before rounding, for Tandem's own kernel
};

// The key of a plan. Two calls share a plan only if all members are equal.
struct PlanKey {
  Pass pass;
  ConvShape shape;
  DType type;  // of all tensors: with narrower pictures the heuristics offer no engine for f32 filter gradients or an
               // f32 bias
  // The graph ends with y = relu?(y + bias); the heuristics offer no engine for a ReLU without a bias
  bool bias = false, relu = false;
  Alignments alignment = {};
  bool add = false;  // a gradient is added to the old values
  static PlanKey of(Pass pass, const ConvShape& s, DType type, const Operands& o, bool relu = false);
  // True when nothing is multiplied, as with an empty batch. cuDNN refuses such shapes; Tandem's own kernels write the
  // zeros.
  bool empty() const { return shape.x_numel() == 0 || shape.w_numel() == 0 || shape.y_numel() == 0; }
  // The same key with pictures of eight channels, which take 16 bytes: there are faster engines for them. None if there
  // is no gain.
  std::optional<PlanKey> widened() const;
  bool operator==(const PlanKey&) const = default;
  std::string text() const;  // "conv2d backward data of [128, 32, 32, 16] …": for errors
};

// Dimensions and strides in the form that cuDNN requires: always in the order n, c, h, w, for any layout.
struct Layout {
  std::int64_t sizes[4], strides[4];
  static Layout pictures(std::int64_t n, std::int64_t h, std::int64_t w, std::int64_t c);
  static Layout filters(const ConvShape& s);
};

// The rules for permitted engines.
struct EngineRules {
  bool deterministic = false, tf32 = false, exact = false;  // exact: no Winograd
  bool operator==(const EngineRules&) const = default;
};
// Whether the rules permit an engine with these numerical notes of cuDNN; `type`: of the pictures.
bool acceptable(const std::vector<cudnnBackendNumericalNote_t>& notes, DType type, const EngineRules& rules);

// A cuDNN descriptor: its attributes are set, then it is finalized.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) : type_(type) {
    CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &d_));
  }
  Descriptor(Descriptor&& o) noexcept : type_(o.type_), d_(std::exchange(o.d_, nullptr)) {}
  Descriptor& operator=(Descriptor&& o) noexcept {
    std::swap(type_, o.type_), std::swap(d_, o.d_);
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
  cudnnBackendDescriptorType_t type() const { return type_; }
  cudnnBackendDescriptor_t raw() const { return d_; }

 private:
  cudnnBackendDescriptorType_t type_;
  cudnnBackendDescriptor_t d_ = nullptr;
};

// Sets the GPU in the descriptor of a graph, a heuristic or a plan.
using ForDevice = std::function<void(Descriptor&)>;

// The tensors of a graph, by number.
enum Uid : std::int64_t { x_uid = 1, w_uid, y_uid, bias_uid, product_uid, sum_uid };

struct Plan {
  Descriptor plan;
  std::int64_t workspace = 0;  // bytes
  bool fused = false;          // it adds the bias and applies the ReLU, too
  bool wide = false;           // it is for key.widened()
};
// Plans for the configurations that the heuristic offers, in its order of preference: at most `most` acceptable ones.
std::vector<Plan> candidates(const ForDevice& device, const PlanKey& key, const EngineRules& rules, std::size_t most);

}  // namespace tandem::cuda
