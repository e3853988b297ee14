#include "dist/strategies/slice_softmax.h"

#include <cmath>

#include "core/launch.h"
#include "core/math.h"

namespace tandem {
namespace {

struct Positions {
  std::int64_t first, width;
  const std::int32_t *labels, *places;  // places: null if all classes take part
  std::int32_t* out;
  TANDEM_HD void operator()(std::int64_t row) const {
    const std::int64_t at = labels[row] - first;
    const bool here = at >= 0 && at < width;
    out[row] = here ? places ? places[at] : std::int32_t(at) : -1;
  }
};

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

template <class A>
struct Join {
  std::int64_t slices, rows, classes;
  A at_label, everywhere;
  const A* all;  // [slices, rows, 5]
  const std::int32_t* labels;
  A *log_sum, *loss, *right;
  TANDEM_HD void operator()(std::int64_t row) const {
    const std::int64_t next = rows * slice_numbers;  // from a slice to the next
    const A* const from = all + row * slice_numbers;
    A largest = -INFINITY, first = 0, label = 0, logits = 0, sum = 0;
    for (std::int64_t k = 0; k < slices; k++) {
      const A* s = from + k * next;
      if (s[0] > largest) {
        largest = s[0];
        first = s[3];
      }
      label += s[2];
      logits += s[4];
    }
    for (std::int64_t k = 0; k < slices; k++) sum += from[k * next + 1] * exponential(from[k * next] - largest);
    const bool known = labels[row] >= 0 && labels[row] < classes;
    log_sum[row] = std::log(sum) + largest;
    loss[row] = known ? log_sum[row] - at_label * label - everywhere * logits : A(NAN);
    right[row] = first;
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

Tensor slice_positions(const Tensor& labels, std::int64_t first, std::int64_t width, const Tensor& places) {
  Tensor out = Tensor::like(labels);
  launch(labels.backend(), labels.numel(),
         Positions{first, width, labels.data<std::int32_t>(), places.defined() ? places.data<std::int32_t>() : nullptr,
                   out.write<std::int32_t>()});
  return out;
}

Tensor slice_of_rows(const Tensor& z, const Tensor& positions) {
  const std::int64_t rows = z.size(0), n = z.size(1);
  Tensor out(z.backend(), {rows, slice_numbers}, z.dtype() == DType::f64 ? DType::f64 : DType::f32);
  dispatch(z.dtype(), "slice_softmax", [&]<class T> {
    launch_rows(z.backend(), rows, n,
                Measure<T>{n, z.data<T>(), positions.data<std::int32_t>(), out.write<Accumulator<T>>()});
  });
  return out;
}

JoinedRows join_slices(const Tensor& all, const Tensor& labels, const SliceTargets& targets, std::int64_t classes) {
  const std::int64_t rows = all.size(1);
  const auto vector = [&] { return Tensor(all.backend(), {rows}, all.dtype()); };
  JoinedRows joined{vector(), vector(), vector()};
  dispatch_wide(all.dtype(), "slice_softmax", [&]<class A> {
    launch(all.backend(), rows,
           Join<A>{all.size(0), rows, classes, A(targets.at_label), A(targets.everywhere), all.data<A>(),
                   labels.data<std::int32_t>(), joined.log_sum.write<A>(), joined.loss.write<A>(),
                   joined.right.write<A>()});
  });
  return joined;
}

void slice_gradient(const Tensor& z, const Tensor& positions, const Tensor& log_sum, const Tensor& weight,
                    const SliceTargets& targets, bool add, Tensor& dz) {
  const std::int64_t n = z.size(1);
  dispatch(z.dtype(), "slice_softmax", [&]<class T> {
    using A = Accumulator<T>;
    launch_rows(z.backend(), z.size(0), n,
                Gradient<T>{n, A(targets.at_label), A(targets.everywhere), add, z.data<T>(),
                            positions.data<std::int32_t>(), log_sum.data<A>(), weight.data<A>(), dz.write<T>()});
  });
}

}  // namespace tandem
