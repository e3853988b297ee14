// Winograd convolution F(4×4, 3×3) on NHWC pictures: 3×3 filters, stride 1, in all three passes.
//
// Contracts: x[n, h, w, c_in], w[c_out, 3, 3, c_in], y[n, out_h, out_w, c_out]; T is float or bf16, arithmetic is f32.
// Every function is re-entrant; scratch is taken once per call, on the calling thread. Results depend on `threads` only
// in backward_filter (the order of a sum), and are bit-identical for the same number.
#pragma once
#include "core/cpu/pass.h"
#include "core/dtype.h"

namespace tandem::cpu::winograd {

// 3×3, stride 1, padding 0 to 2, one group, channels in multiples of 16 up to 4096.
bool applicable(const ConvShape&);
// The share of the 4×4 output tiles that lies inside the picture: 1 at 32², 0.77 at 14², 0.77 at 7².
double filled(const ConvShape&);

// The filter transform. It is a separate step, so that its result can be kept while the weights do not change.
// `rotated` filters are for backward_data. For small pictures (few tiles) the filters are transformed in cache during
// the convolution instead.
bool wants_prepared(const ConvShape&, bool rotated);
std::size_t prepared_bytes(const ConvShape&);
void prepare(const ConvShape&, const float* w, bool rotated, float* prepared, int threads);

// `prepared` may be null if !wants_prepared, and for the filter gradient.
template <class T>
void run(const ConvCall<T>&, const float* prepared, CachingAllocator&, int threads);

}  // namespace tandem::cpu::winograd
