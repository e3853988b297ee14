// Functors that the optimizers' kernels share. Included by *.kernel.cpp files only.
#pragma once
#include "core/launch.h"
#include "layers/optim/optimizer.h"

namespace tandem {

// Runs update(i) over whole blocks of 64 elements. Values that are constant in a block (rates, weight decay) are loop
// invariants, so that the compiler vectorises the inner loop; an update computes them in begin(block). A step that must
// not be applied returns at once.
template <class Update>
struct Blocks {
  Update update;
  std::int64_t begin;
  TANDEM_HD void operator()(std::int64_t block) const {
    if (update.state->not_finite) return;
    Update u = update;
    std::int64_t first = begin + block * FlatParameters::alignment;
    if constexpr (requires { u.begin(first); }) u.begin(first / FlatParameters::alignment);
#pragma omp simd
    for (std::int64_t i = first; i < first + FlatParameters::alignment; i++) u(i);
  }
};

// A device uses one thread per element, so that neighbouring threads read neighbouring elements.
template <class Update>
struct Elements {
  Update update;
  std::int64_t begin;
  TANDEM_HD void operator()(std::int64_t i) const {
    if (update.state->not_finite) return;
    Update u = update;
    if constexpr (requires { u.begin(i); }) u.begin((begin + i) / FlatParameters::alignment);
    u(begin + i);
  }
};

// Throws Error unless the range consists of whole blocks of 64 elements.
inline void require_blocks(const Optimizer& optimizer, Range range) {
  require(range.begin % FlatParameters::alignment == 0 && range.length() % FlatParameters::alignment == 0,
          optimizer.name(), ": the range [", range.begin, ", ", range.end, ") does not lie on multiples of 64");
}

template <class Update>
void update_blocks(const Optimizer& optimizer, Range range, const Update& update) {
  require_blocks(optimizer, range);
  Backend& backend = optimizer.flat().backend();
  if (backend.on_device()) return launch(backend, range.length(), Elements<Update>{update, range.begin});
  launch_blocks(backend, range.length() / FlatParameters::alignment, Blocks<Update>{update, range.begin});
}

}  // namespace tandem
