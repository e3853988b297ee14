// What backends do with their arguments before a kernel gets pointers.
#pragma once
#include "core/tensor.h"

namespace tandem {

// f.operator()<T>() for the type among Types that `dtype` is; another one is refused in the name of `backend`.
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
