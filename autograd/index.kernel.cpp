// Elements by their index: argmax, topk, gather, embedding. A tensor is viewed as [outer, n, inner], with n along the
// given axis.
#include "autograd/ops.h"
#include "core/launch.h"

namespace tandem {
namespace {

template <class A>
TANDEM_HD inline bool larger(A a, A b) {
  return a > b || (a != a && b == b);
}  // a NaN is larger than every number, as in PyTorch

// For each of outer × inner rows, the indices of its k largest or smallest elements; of equal elements, the first.
template <class T>
struct Best {
  std::int64_t n, inner, k;
  bool largest;
  const T* x;
  std::int32_t* places;
  TANDEM_HD bool before(std::int64_t i, std::int64_t j) const {  // the elements at i and j of x
    const Accumulator<T> a(x[i]), b(x[j]);
    if (largest ? larger(a, b) : larger(b, a)) return true;
    return !(largest ? larger(b, a) : larger(a, b)) && i < j;
  }
  TANDEM_HD void operator()(std::int64_t row) const {
    const std::int64_t begin = row / inner * n * inner + row % inner;
    std::int64_t last = -1;
    for (std::int64_t found = 0; found < k; found++) {
      std::int64_t best = -1;
      for (std::int64_t i = begin; i < begin + n * inner; i += inner)
        if ((last < 0 || before(last, i)) && (best < 0 || before(i, best))) best = i;
      places[(row / inner * k + found) * inner + row % inner] = std::int32_t((best - begin) / inner);
      last = best;
    }
  }
};

Tensor best(const char* op, const Variable& x, std::int64_t k, int axis, bool largest) {
  const int a = x.shape().axis(op, axis);
  require(k >= 1 && k <= x.size(a), op, ": ", k, " of the ", x.size(a), " elements along axis ", axis, " of the shape ",
          x.shape());
  Shape shape = x.shape();
  shape[a] = k;
  Tensor places(x.backend(), shape, DType::i32);
  const std::int64_t inner = shape.inner(a);
  dispatch(x.dtype(), op, [&]<class T> {
    launch_blocks(x.backend(), shape.outer(a) * inner,
                  Best<T>{x.size(a), inner, k, largest, x.value().data<T>(), places.write<std::int32_t>()});
  });
  return places;
}

// y[o, k, :] = x[o, index, :]. There is one index for each element of y (gather), or one for each k (embedding).
struct Places {
  std::int64_t n, m, inner;  // elements along the axis: of x, of y
  bool each;
  const std::int32_t* index;
  // The element of x that belongs to y[o, k, i]; negative if the index is out of range, which a device cannot report.
  TANDEM_HD std::int64_t operator()(std::int64_t o, std::int64_t k, std::int64_t i) const {
    const std::int32_t place = index[each ? (o * m + k) * inner + i : k];
    return place < 0 || place >= n ? -1 : (o * n + place) * inner + i;
  }
};
template <class T>
struct Gather {
  Places places;
  const T* x;
  T* y;
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    lanes.each(places.inner, [&](std::int64_t i) {
      const std::int64_t from = places(row / places.m, row % places.m, i);
      y[row * places.inner + i] = from < 0 ? T(NAN) : x[from];
    });
  }
};
// Adds dy to the gradients of the elements that were gathered. An element may be gathered many times, so one lane adds
// all its gradients, in order. A row of the launch has up to 32 inner elements.
template <class T>
struct GatherBackward {
  static constexpr std::int64_t width = 32;
  Places places;
  std::int64_t chunks;
  const T* dy;
  T* dx;
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    const std::int64_t o = row / chunks, begin = row % chunks * width, left = places.inner - begin;
    for (std::int64_t k = 0; k < places.m; k++)
      lanes.each(left < width ? left : width, [&](std::int64_t i) {
        const std::int64_t to = places(o, k, begin + i);
        if (to >= 0)
          dx[to] = T(Accumulator<T>(dx[to]) + Accumulator<T>(dy[(o * places.m + k) * places.inner + begin + i]));
      });
  }
};

template <bool each>
struct GatherNode : Node {
  static constexpr auto name = each ? "gather" : "embedding";
  Shape from;
  int axis;
  GatherNode(const Shape& s, int a) : Node(name), from(s), axis(a) {}
  Attributes attributes() const override { return {{"axis", {double(axis)}}}; }
  static Places places(const Shape& x, int axis, const Tensor& index) {
    const std::int64_t m = each ? index.size(axis) : index.numel();
    return {x[axis], m, x.inner(axis), each, index.data<std::int32_t>()};
  }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    auto [dx, add] = slots[0].destination(dy.backend(), from, dy.dtype());
    if (!add) dx->fill(0);
    const Places at = places(from, axis, kept(0));
    dispatch(dy.dtype(), name, [&, dx = dx]<class T> {
      const std::int64_t chunks = (at.inner + GatherBackward<T>::width - 1) / GatherBackward<T>::width;
      launch_rows(dy.backend(), from.outer(axis) * chunks, at.m * GatherBackward<T>::width,
                  GatherBackward<T>{at, chunks, dy.data<T>(), dx->template write<T>()});
    });
  }
};

template <bool each>
Variable gathered(const Variable& x, int axis, const Tensor& index, const Shape& shape) {
  const char* name = GatherNode<each>::name;
  check_inputs(name, x.value(), {}, {&index});
  require(index.dtype() == DType::i32, name, ": an index is i32, not ", name_of(index.dtype()));
  if (!x.backend().on_device())
    for (const std::int32_t *i = index.data<std::int32_t>(), *end = i + index.numel(); i < end; i++)
      require(*i >= 0 && *i < x.size(axis), name, ": the index ", *i, " beside ", x.size(axis), " elements along axis ",
              axis, " of the shape ", x.shape());
  Tensor y(x.backend(), shape, x.dtype());
  const Places at = GatherNode<each>::places(x.shape(), axis, index);
  dispatch(x.dtype(), name, [&]<class T> {
    launch_rows(x.backend(), x.shape().outer(axis) * at.m, at.inner, Gather<T>{at, x.value().data<T>(), y.write<T>()});
  });
  return record<GatherNode<each>>(y, {&x}, {index}, x.shape(), axis);
}

}  // namespace

Tensor argmax(const Variable& x, int axis, bool keep_axis) {
  const Tensor y = best("argmax", x, 1, axis, true);
  return keep_axis ? y : y.reshape(x.shape().without(x.shape().axis("argmax", axis)));
}

TopKResult topk(const Variable& x, std::int64_t k, int axis, bool largest) {
  const Tensor places = best("topk", x, k, axis, largest);
  return {gather(x, axis, places), places};
}

Variable gather(const Variable& x, int axis, const Tensor& index) {
  const int a = x.shape().axis("gather", axis);
  Shape shape = x.shape();
  if (index.rank() == x.rank()) shape[a] = index.size(a);
  require(index.shape() == shape, "gather: the index ", index.shape(), " has to have the shape ", x.shape(),
          " of x, but for axis ", axis);
  return gathered<true>(x, a, index, shape);
}

Variable embedding(const Variable& weight, const Tensor& index) {
  require(weight.rank() == 2, "embedding: the weight ", weight.shape(), " has to be [rows, columns]");
  Shape shape = index.shape();
  shape.append(weight.size(1));
  return gathered<false>(weight, 0, index, shape);
}

}  // namespace tandem
