// Packs of 16 bytes: V neighbouring elements are loaded and stored as one, and computed with in float.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace tandem::cuda {

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {  // eight floats take two moves
  T v[V];
};

template <int V, class T>
__device__ inline Pack<T, V> pack_at(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}

template <int V, class T, class A>
__device__ inline void unpack(const Pack<T, V>& pack, A (&to)[V]) {
  for (int i = 0; i < V; i++) to[i] = A(pack.v[i]);
}

template <int V, class T, class A>
__device__ inline void load(const T* from, A (&to)[V]) {
  unpack(pack_at<V>(from), to);
}

template <int V, class T, class A>
__device__ inline void store(T* to, const A (&from)[V]) {
  Pack<T, V> pack;
  for (int i = 0; i < V; i++) pack.v[i] = T(from[i]);
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// Calls f.operator()<V>(). V elements of T are 16 bytes if rows of `width` elements and all pointers are aligned to 16
// bytes; otherwise V = 1. Null pointers are ignored.
template <class T, class F, class... Pointers>
void with_packs(std::int64_t width, const F& f, const Pointers*... pointers) {
  constexpr int V = 16 / sizeof(T);
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
  if (width % V == 0 && aligned)
    f.template operator()<V>();
  else
    f.template operator()<1>();
}

}  // namespace tandem::cuda
