// Convolutions by cuDNN's graph API: one plan for each pass of each shape, made once and kept. Pictures [n, h, w, c], filters
// [c_out, kh, kw, c_in / groups]; sums are f32. Where no engine serves a shape, plain kernels of our own do.
#pragma once
#include <cudnn.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/shape.h"
#include "cuda/kernels.h"

namespace tandem::cuda {

enum class Pass { forward, backward_data, backward_filter };
const char* name_of(Pass);

// What each tensor's address is a multiple of, in bytes: 16, 8, 4 or 2. cuDNN takes none below the size of an element.
struct Alignments {
  int x = 16, w = 16, y = 16;
  bool operator==(const Alignments&) const = default;
};

// What a plan was made for. Two calls share one only when all of it is equal.
struct PlanKey {
  Pass pass;
  ConvShape shape;
  DType type;      // of pictures and, but for a filter gradient, of filters
  DType gradient;  // of a filter gradient: f32, or `type` where no engine writes f32
  Alignments alignment = {};
  static PlanKey of(Pass pass, const ConvShape& s, DType type, DType gradient, const void* x, const void* w,
                    const void* y);
  DType type_of_filters() const { return pass == Pass::backward_filter ? gradient : type; }
  // True when nothing is multiplied, as with an empty batch. cuDNN refuses such shapes; our own kernels write the zeros.
  bool empty() const { return shape.x_numel() == 0 || shape.w_numel() == 0 || shape.y_numel() == 0; }
  bool operator==(const PlanKey&) const = default;
  std::string text() const;  // "conv2d backward data of [128, 32, 32, 16] …": for errors
};
// The largest of 16, 8, 4, 2 that divides all addresses.
int alignment_of(std::initializer_list<const void*> pointers);

// Dimensions and strides as cuDNN wants them: always in the order n, c, h, w, whatever the layout.
struct Layout {
  std::int64_t sizes[4], strides[4];
  static Layout pictures(std::int64_t n, std::int64_t h, std::int64_t w, std::int64_t c);
  static Layout filters(const ConvShape& s);
};

// Which engines may be taken.
struct EngineRules {
  bool deterministic = false, tf32 = false, exact = false;  // exact: no Winograd
  bool operator==(const EngineRules&) const = default;
};
// Decided by the numerical notes that cuDNN gives of an engine; `type`: of the pictures.
bool acceptable(const std::vector<cudnnBackendNumericalNote_t>& notes, DType type, const EngineRules& rules);

// The candidate to keep: the fastest one that runs or, with `first`, the first one that runs. A candidate that does not run (too large a
// workspace, or refused by the library) has no time and is ignored.
struct Choice {
  std::optional<std::size_t> candidate;  // none: not one of them runs
  std::size_t ran = 0;
  float milliseconds = 0;
};
Choice choose(std::size_t candidates, bool first, const std::function<std::optional<float>(std::size_t)>& milliseconds);

class Convolution {
 public:
  struct Memory {  // scratch for the length of a call, from the backend's allocator
    std::function<void*(std::size_t)> take;
    std::function<void(void*)> give;
  };
  Convolution(const Grid& grid, Memory memory);
  ~Convolution();
  Convolution(const Convolution&) = delete;

  void forward(const ConvShape&, DType, const void* x, const void* w, void* y);
  void backward_data(const ConvShape&, DType, const void* dy, const void* w, void* dx, bool add);
  void backward_filter(const ConvShape&, DType, const void* x, const void* dy, float* dw, bool add);

  void rules(const EngineRules& rules);  // forgets the plans when they change
  EngineRules rules() const;
  // While a step is recorded no plan can be timed: a new key gets the first acceptable plan.
  void recording(bool on);
  struct Chosen {
    PlanKey key;
    std::string engine;  // "engine 37 of 8 tried, 0.042 ms", or "plain kernel: …why"
  };
  std::vector<Chosen> chosen() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::cuda
