// Direct convolution for pictures of few channels (up to 8): the first layers of networks, where a library made for
// many channels is slow. NHWC pictures, OHWI filters, T float or bf16, arithmetic in f32; any filter, stride and
// padding. Re-entrant; scratch is taken once per call. Results do not depend on `threads`, except the order of
// backward_filter's sum.
#pragma once
#include "core/cpu/pass.h"
#include "core/dtype.h"

namespace tandem::cpu::direct {

// One group, no dilation, at most 8 input channels. Output channels: fewer than a vector's lanes, or a multiple of
// them up to 512. Filters: at most 16 rows of at most four vectors (kw·c_in).
bool applicable(const ConvShape&);

template <class T>
void run(const ConvCall<T>&, CachingAllocator&, int threads);

}  // namespace tandem::cpu::direct
