#include "core/elementwise.h"

#include <cmath>

#include "core/launch.h"

namespace tandem {
namespace {

template <class T>
struct Fill {
  T* y;
  T value;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] = value; }
};

template <class From, class To>
struct Convert {
  const From* x;
  To* y;
  TANDEM_HD void operator()(std::int64_t i) const {
    using A = Accumulator<To>;
    y[i] = static_cast<To>(static_cast<A>(x[i]));
  }
};

template <class T>
struct Add {
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const {
    y[i] = static_cast<T>(Accumulator<T>(a[i]) + Accumulator<T>(b[i]));
  }
};

template <class T>
struct MaskPositive {
  const T *y, *dy;
  T* out;
  TANDEM_HD void operator()(std::int64_t i) const { out[i] = Accumulator<T>(y[i]) <= 0 ? T(0) : dy[i]; }
};

// v − v is 0 only if v is finite. Counts in integers, so that the loop vectorises.
template <class T>
std::int64_t count_not_finite(const T* x, std::int64_t n) {
  std::int64_t count = 0;
#pragma omp simd reduction(+ : count)
  for (std::int64_t i = 0; i < n; i++) {
    Accumulator<T> v = x[i];
    count += !(v - v == 0);
  }
  return count;
}

}  // namespace

void fill(Tensor& y, double value) {
  dispatch_any(y.dtype(), "fill", [&]<class T> {
    launch(y.backend(), y.numel(), Fill<T>{y.write<T>(), static_cast<T>(value)});
  });
}

void convert(const Tensor& x, Tensor& y) {
  require(x.numel() == y.numel(), "convert: ", x.shape(), " into ", y.shape());
  dispatch_any(x.dtype(), "convert", [&]<class From> {
    dispatch_any(y.dtype(), "convert", [&]<class To> {
      launch(y.backend(), y.numel(), Convert<From, To>{x.data<From>(), y.write<To>()});
    });
  });
}

void add(const Tensor& a, const Tensor& b, Tensor& y) {
  require(a.numel() == y.numel() && b.numel() == y.numel(), "add: ", a.shape(), " + ", b.shape(), " into ", y.shape());
  dispatch(y.dtype(), "add", [&]<class T> {
    launch(y.backend(), y.numel(), Add<T>{a.data<T>(), b.data<T>(), y.write<T>()});
  });
}

void add_into(Tensor& y, const Tensor& x) { add(y, x, y); }

Tensor mask_positive(const Tensor& y, Tensor dy) {
  Tensor out = dy.unique() ? dy : Tensor::like(dy);
  dispatch(dy.dtype(), "relu", [&]<class T> {
    launch(dy.backend(), dy.numel(), MaskPositive<T>{y.data<T>(), dy.data<T>(), out.write<T>()});
  });
  return out;
}

bool all_finite(const Tensor& x) {
  if (x.backend().on_device()) {  // rare (checks after a failure), so a copy to the host will do
    for (double v : x.values())
      if (!std::isfinite(v)) return false;
    return true;
  }
  return dispatch(x.dtype(), "all_finite", [&]<class T> { return count_not_finite(x.data<T>(), x.numel()) == 0; });
}

}  // namespace tandem
