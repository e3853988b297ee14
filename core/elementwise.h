// Element-wise work that every room needs and nobody differentiates: filling, converting, adding, testing.
#pragma once
#include "core/tensor.h"

namespace tandem {

void fill(Tensor& y, double value);
void convert(const Tensor& x, Tensor& y);   // y = x, in y's type; u8 and i32 convert to and from floating types
void add_into(Tensor& y, const Tensor& x);  // y += x
void add(const Tensor& a, const Tensor& b, Tensor& y);  // y = a + b
// dy, zero where y ≤ 0 (not where y is NaN): the gradient behind a fused ReLU. Overwrites dy when nobody else holds it.
Tensor mask_positive(const Tensor& y, Tensor dy);
bool all_finite(const Tensor& x);  // waits for the device

}  // namespace tandem
