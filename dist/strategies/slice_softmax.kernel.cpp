#include "dist/strategies/slice_softmax.h"

#include "core/launch.h"
#include "core/math.h"

namespace tandem {
namespace {

template <class T>
struct Measure {
  using A = Accumulator<T>;
  std::int64_t n;
  const T* z;
  const std::int32_t* labels;
  A* out;  // [rows, 5]
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    const T* from = z + row * n;
    const std::int32_t label = labels[row];
    const A largest = lanes.max(n, [=](std::int64_t c) { return A(from[c]); });
    const A sum = lanes.sum(n, [=](std::int64_t c) { return exponential(A(from[c]) - largest); });
    const A logits = lanes.sum(n, [=](std::int64_t c) { return A(from[c]); });
    const bool here = label >= 0;
    const std::int64_t before = here && A(from[label]) == largest ? label : 0;
    const A ties = lanes.sum(before, [=](std::int64_t c) { return A(A(from[c]) == largest ? 1 : 0); });
    A* to = out + row * slice_numbers;
    lanes.each(1, [=](std::int64_t) {
      to[0] = largest;
      to[1] = sum;
      to[2] = here ? A(from[label]) : A(0);
      to[3] = here && A(from[label]) == largest && ties == 0 ? A(1) : A(0);
      to[4] = logits;
    });
  }
};

template <class T>
struct Gradient {
  using A = Accumulator<T>;
  std::int64_t n;
  A at_label, everywhere;
  bool add;
  const T* z;
  const std::int32_t* labels;
  const A *log_sum, *weight;
  T* dz;
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    const T* from = z + row * n;
    T* to = dz + row * n;
    const A l = log_sum[row], w = weight[row], q = at_label, e = everywhere;
    const std::int32_t label = labels[row];
    const bool adds = add;
    lanes.each(n, [=](std::int64_t c) {
      const A g = w * (exponential(A(from[c]) - l) - e - (c == label ? q : A(0)));
      to[c] = T(adds ? A(to[c]) + g : g);
    });
  }
};

}  // namespace

std::vector<double> slice_of_rows(const Tensor& z, const Tensor& labels) {
  const std::int64_t rows = z.size(0), n = z.size(1);
  Tensor out(z.backend(), {rows, slice_numbers}, z.dtype() == DType::f64 ? DType::f64 : DType::f32);
  dispatch(z.dtype(), "slice_softmax", [&]<class T> {
    launch_rows(z.backend(), rows, n,
                Measure<T>{n, z.data<T>(), labels.data<std::int32_t>(), out.write<Accumulator<T>>()});
  });
  return out.values();
}

void slice_gradient(const Tensor& z, const Tensor& labels, const Tensor& log_sum, const Tensor& weight,
                    const SliceGradient& how, Tensor& dz) {
  const std::int64_t n = z.size(1);
  dispatch(z.dtype(), "slice_softmax", [&]<class T> {
    using A = Accumulator<T>;
    launch_rows(z.backend(), z.size(0), n,
                Gradient<T>{n, A(how.at_label), A(how.everywhere), how.add, z.data<T>(), labels.data<std::int32_t>(),
                            log_sum.data<A>(), weight.data<A>(), dz.write<T>()});
  });
}

}  // namespace tandem
