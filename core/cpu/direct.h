// Direct convolution for pictures of few channels (up to 8): the first layers of networks, where a library made for
// many channels is poor. NHWC pictures, OHWI filters, T float or bf16, arithmetic in f32; any filter, stride and
// padding. Re-entrant; scratch is taken once per call. Results do not depend on `threads`, except the order of
// backward_filter's sum.
#pragma once
#include "core/cpu/pass.h"
#include "core/dtype.h"

namespace tandem::cpu::direct {

// One group, no dilation, at most 8 input channels, output channels fewer than a vector's lanes or whole vectors of
// them, filter rows (kw·c_in) of at most four vectors.
bool applicable(const ConvShape&);

template <class T>
void run(const ConvCall<T>&, CachingAllocator&, int threads);

}  // namespace tandem::cpu::direct
