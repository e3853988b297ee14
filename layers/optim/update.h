// Functors that the optimizers' kernels share. Included by *.kernel.cpp files only.
#pragma once
#include "core/launch.h"
#include "layers/optim/optimizer.h"

namespace tandem {

// Runs update(i) for `count` elements. On the host these are the 64 elements of a block. The values of a block (rates,
// weight decay) are then loop invariants, and the compiler vectorises the loop. An update may compute them in
// begin(block). A device uses one thread per element, so that neighbouring threads read neighbouring elements. Does
// nothing if the step must not be applied.
template <class Update, std::int64_t count>
struct Elements {
  Update update;
  std::int64_t begin;
  TANDEM_HD void operator()(std::int64_t k) const {
    if (update.state->not_finite) return;
    Update u = update;
    const std::int64_t first = begin + k * count;
    if constexpr (requires { u.begin(first); }) u.begin(first / FlatParameters::alignment);
#pragma omp simd
    for (std::int64_t i = first; i < first + count; i++) u(i);
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
  if (backend.on_device()) return launch(backend, range.length(), Elements<Update, 1>{update, range.begin});
  constexpr std::int64_t block = FlatParameters::alignment;
  launch_blocks(backend, range.length() / block, Elements<Update, block>{update, range.begin});
}

}  // namespace tandem
