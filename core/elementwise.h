// Element-wise operations without a gradient, used in all folders: filling, converting, adding, testing.
#pragma once
#include "core/tensor.h"

namespace tandem {

void fill(Tensor& y, double value);
void convert(const Tensor& x, Tensor& y);   // y = x, in y's type; u8 and i32 convert to and from floating types
void add_into(Tensor& y, const Tensor& x);  // y += x
void add(const Tensor& a, const Tensor& b, Tensor& y);  // y = a + b
// dy, with zero where y ≤ 0 (not where y is NaN): the gradient before a fused ReLU. Overwrites dy if no other handle
// shares its storage.
Tensor mask_positive(const Tensor& y, Tensor dy);
bool all_finite(const Tensor& x);  // waits for the device

}  // namespace tandem
