// Functions with which backends convert their arguments into pointers for kernels.
#pragma once
#include "core/tensor.h"

namespace tandem {

// Calls f.operator()<T>() with the type of Types that matches `dtype`. Throws Error, which names `backend`, if none
// does.
template <class... Types, class F>
void typed_among(DType dtype, const char* op, const char* backend, const F& f) {
  if (((dtype == dtype_of<Types> && (f.template operator()<Types>(), true)) || ...)) return;
  if (dtype == DType::f64) fail(op, ": ", backend, " backend: f64 lives in the reference backend");
  fail(op, ": not defined for ", name_of(dtype), " (cast to f32 first)");
}

// Absent tensors are null pointers.
template <class T>
const T* data(const Tensor* t) {
  return t ? t->data<T>() : nullptr;
}
template <class T>
T* write_if(Tensor* t) {
  return t ? t->write<T>() : nullptr;
}

}  // namespace tandem
