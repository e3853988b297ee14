// Operations that move elements without arithmetic. All but reshape are one strided copy between two boxes of the same
// shape; the gradient is the same copy, the other way.
#include <vector>

#include "autograd/ops.h"
#include "core/box.h"

namespace tandem {
namespace {

void copy_box(const Shape& shape, const Tensor& x, const Box& from, Tensor& y, const Box& to, bool add) {
  if (shape.elements() == 0) return;
  Backend& backend = x.backend();
  dispatch(x.dtype(), "copy", [&]<class T> {
    BoxCopy<T> box{.rank = std::max(1, shape.rank()), .from = from, .to = to, .x = x.data<T>(), .y = y.write<T>()};
    for (int k = 0; k < shape.rank(); k++) box.extent[k] = shape[k];
    constexpr int V = 16 / sizeof(T);
    const std::int64_t n = shape.elements();
    auto run = [&]<bool adds> {
      if (!backend.on_device()) return launch(backend, n / box.extent[box.rank - 1], CopyRows<T, adds>{box});
      if (in_packs(box, V)) return launch(backend, n / V, CopyPacks<T, adds, V>{box});
      launch(backend, n, CopyPacks<T, adds, 1>{box});
    };
    add ? run.template operator()<true>() : run.template operator()<false>();
  });
}

Box whole(const Shape& s) {
  Box b;
  std::int64_t step = 1;
  for (int k = s.rank() - 1; k >= 0; k--) {
    b.step[k] = step;
    step *= s[k];
  }
  return b;
}

struct ReshapeNode : Node {
  static constexpr auto name = "reshape";
  Shape from;
  explicit ReshapeNode(const Shape& s) : Node(name), from(s) {}
  void backward(Tensor dy, std::span<Sink> sinks) override { sinks[0].give(dy.reshape(from)); }
};

struct TransposeNode : Node {
  static constexpr auto name = "transpose";
  Shape from;
  Box box;  // of x, walked in y's order
  TransposeNode(const Shape& s, const Box& b) : Node(name), from(s), box(b) {}
  void backward(Tensor dy, std::span<Sink> sinks) override {
    auto [dx, add] = sinks[0].place(dy.backend(), from, dy.dtype());
    copy_box(dy.shape(), dy, whole(dy.shape()), *dx, box, add);
  }
};

struct SliceNode : Node {
  static constexpr auto name = "slice";
  Shape from;
  Box box;  // of x
  SliceNode(const Shape& s, const Box& b) : Node(name), from(s), box(b) {}
  void backward(Tensor dy, std::span<Sink> sinks) override {
    auto [dx, add] = sinks[0].place(dy.backend(), from, dy.dtype());
    if (!add) dx->fill(0);
    copy_box(dy.shape(), dy, whole(dy.shape()), *dx, box, true);
  }
};

struct PadNode : Node {
  static constexpr auto name = "pad";
  Shape from;
  Box box;  // of y
  PadNode(const Shape& s, const Box& b) : Node(name), from(s), box(b) {}
  void backward(Tensor dy, std::span<Sink> sinks) override {
    auto [dx, add] = sinks[0].place(dy.backend(), from, dy.dtype());
    copy_box(from, dy, box, *dx, whole(from), add);
  }
};

struct ConcatNode : Node {
  static constexpr auto name = "concat";
  std::vector<Shape> parts;
  std::vector<Box> boxes;  // of y
  int axis;
  ConcatNode(int a, std::vector<Shape> p, std::vector<Box> b)
      : Node(name), parts(std::move(p)), boxes(std::move(b)), axis(a) {}
  Attributes attributes() const override { return {{"axis", {double(axis)}}}; }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    for (std::size_t i = 0; i < parts.size(); i++) {
      if (!sinks[i].wanted()) continue;
      auto [dx, add] = sinks[i].place(dy.backend(), parts[i], dy.dtype());
      copy_box(parts[i], dy, boxes[i], *dx, whole(parts[i]), add);
    }
  }
};

// One row of channels per index, of y forward and of x backward: what a host does in one pass. A device fills, and copies a box.
template <class T>
struct Shortcut {
  std::int64_t h, w, c, out_h, out_w, stride, widen;
  const T* x;
  T* y;
  TANDEM_HD void operator()(std::int64_t row) const {
    std::int64_t q = row % out_w, p = row / out_w % out_h, n = row / out_w / out_h, wide = c + 2 * widen;
    const T* from = x + ((n * h + p * stride) * w + q * stride) * c;
    T* to = y + row * wide;
    for (std::int64_t i = 0; i < widen; i++) to[i] = to[widen + c + i] = T(0);
    for (std::int64_t i = 0; i < c; i++) to[widen + i] = from[i];
  }
};
template <class T>
struct ShortcutBackward {
  std::int64_t h, w, c, out_h, out_w, stride, widen;
  bool add;
  const T* dy;
  T* dx;
  TANDEM_HD void operator()(std::int64_t row) const {
    std::int64_t j = row % w, i = row / w % h, n = row / w / h;
    T* to = dx + row * c;
    if (i % stride == 0 && j % stride == 0) {
      const T* from = dy + ((n * out_h + i / stride) * out_w + j / stride) * (c + 2 * widen) + widen;
      for (std::int64_t k = 0; k < c; k++) to[k] = add ? T(Accumulator<T>(to[k]) + Accumulator<T>(from[k])) : from[k];
    } else if (!add) {
      for (std::int64_t k = 0; k < c; k++) to[k] = T(0);
    }
  }
};

// The pixels of x, of shape `from`, that are y's; and y without the channels that were added.
Box taken(const Shape& from, std::int64_t stride) {
  Box b = whole(from);
  b.step[1] *= stride, b.step[2] *= stride;
  return b;
}
Box inner(const Shape& to, std::int64_t widen) {
  Box b = whole(to);
  b.begin = widen;
  return b;
}

struct ShortcutNode : Node {
  static constexpr auto name = "pad_shortcut";
  Shape from, to;
  std::int64_t stride, widen;
  ShortcutNode(const Shape& x, const Shape& y, std::int64_t s, std::int64_t w) : Node(name), from(x), to(y), stride(s), widen(w) {}
  Attributes attributes() const override { return {{"stride", {double(stride)}}, {"widen", {double(widen)}}}; }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    auto [dx, add] = sinks[0].place(dy.backend(), from, dy.dtype());
    if (dy.backend().on_device()) {
      if (!add) dx->fill(0);
      return copy_box({to[0], to[1], to[2], from[3]}, dy, inner(to, widen), *dx, taken(from, stride), true);
    }
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch_blocks(dy.backend(), from[0] * from[1] * from[2],
                    ShortcutBackward<T>{from[1], from[2], from[3], to[1], to[2], stride, widen, add, dy.data<T>(),
                                        dx->template write<T>()});
    });
  }
};

}  // namespace

Variable pad_shortcut(const Variable& x, int stride, std::int64_t widen) {
  require(x.rank() == 4 && stride >= 1 && widen >= 0 && widen <= Shape::most, "pad_shortcut: input ", x.shape(),
          " must be [N,H,W,C], stride ", stride, " at least 1, widening ", widen, " at least 0 and at most ", Shape::most);
  Shape s = x.shape(), shape{s[0], (s[1] + stride - 1) / stride, (s[2] + stride - 1) / stride, s[3] + 2 * widen};
  Tensor y(x.backend(), shape, x.dtype());
  if (x.backend().on_device()) {
    if (widen) y.fill(0);
    copy_box({shape[0], shape[1], shape[2], s[3]}, x.value(), taken(s, stride), y, inner(shape, widen), false);
    return record<ShortcutNode>(y, {&x}, {}, s, shape, stride, widen);
  }
  dispatch(x.dtype(), "pad_shortcut", [&]<class T> {
    launch_blocks(x.backend(), shape[0] * shape[1] * shape[2],
                  Shortcut<T>{s[1], s[2], s[3], shape[1], shape[2], stride, widen, x.value().data<T>(), y.write<T>()});
  });
  return record<ShortcutNode>(y, {&x}, {}, s, shape, stride, widen);
}

Variable reshape(const Variable& x, const Shape& shape) {
  return record<ReshapeNode>(x.value().reshape(shape), {&x}, {}, x.shape());
}

Variable reshape(const Variable& x, std::initializer_list<std::int64_t> shape) {
  Shape s;
  int unknown = -1;
  for (std::int64_t e : shape) {
    require(e != -1 || unknown < 0, "reshape: only one size can be inferred from the others, and two are -1");
    if (e == -1) unknown = s.rank();
    s.append(e == -1 ? 1 : e);
  }
  if (unknown >= 0) {
    const std::int64_t elements = x.value().elements(), known = s.elements();
    require(known > 0 && elements % known == 0, "reshape: ", x.shape(), " has ", elements, " elements, which the other sizes (together ",
            known, ") do not divide");
    s[unknown] = elements / known;
  }
  return reshape(x, s);
}

Variable flatten(const Variable& x) {
  require(x.rank() >= 1, "flatten: needs at least one axis");
  return reshape(x, {x.extent(0), x.extent(0) ? x.value().elements() / x.extent(0) : 0});
}

Variable squeeze(const Variable& x, int axis) {
  const int a = x.shape().axis("squeeze", axis);
  require(x.extent(a) == 1, "squeeze: axis ", axis, " of the shape ", x.shape(), " has ", x.extent(a), " elements, not one");
  return reshape(x, x.shape().without(a));
}

Variable unsqueeze(const Variable& x, int axis) {
  Shape wide = x.shape();
  wide.append(1);
  const int a = wide.axis("unsqueeze", axis);
  for (int i = x.rank(); i > a; i--) wide[i] = wide[i - 1];
  wide[a] = 1;
  return reshape(x, wide);
}

Variable stack(std::span<const Variable> parts, int axis) {
  std::vector<Variable> wide;
  for (const Variable& p : parts) wide.push_back(unsqueeze(p, axis));
  return concat(wide, axis);
}

Variable transpose(const Variable& x, Axes order) {
  require(int(order.size()) == x.rank(), "transpose: ", order.size(), " axes named for the shape ", x.shape());
  Box all = whole(x.shape()), box;
  Shape shape;
  unsigned seen = 0;
  for (int named : order) {
    int axis = x.shape().axis("transpose", named);
    require(!(seen >> axis & 1), "transpose: the axis ", named, " is named twice");
    seen |= 1u << axis;
    box.step[shape.rank()] = all.step[axis];
    shape.append(x.extent(axis));
  }
  Tensor y(x.backend(), shape, x.dtype());
  copy_box(shape, x.value(), box, y, whole(shape), false);
  return record<TransposeNode>(y, {&x}, {}, x.shape(), box);
}

Variable slice(const Variable& x, int axis, std::int64_t begin, std::int64_t end, std::int64_t step) {
  int a = x.shape().axis("slice", axis);
  require(step >= 1 && 0 <= begin && begin <= end && end <= x.extent(a), "slice: [", begin, ", ", end, ") step ", step,
          " of axis ", axis, " in the shape ", x.shape());
  step = std::min(step, std::max<std::int64_t>(1, x.extent(a)));  // a longer step selects the same elements
  Box box = whole(x.shape());
  box.begin = begin * box.step[a];
  box.step[a] *= step;
  Shape shape = x.shape();
  shape[a] = (end - begin + step - 1) / step;
  Tensor y;
  if (a == 0 && step == 1) {
    y = x.value().slice(begin, end);  // rows of the first axis share memory
  } else {
    y = Tensor(x.backend(), shape, x.dtype());
    copy_box(shape, x.value(), box, y, whole(shape), false);
  }
  return record<SliceNode>(y, {&x}, {}, x.shape(), box);
}

Variable concat(std::span<const Variable> parts, int axis) {
  require(!parts.empty(), "concat: nothing to concatenate");
  for (const Variable& p : parts) check_inputs("concat", parts[0].value(), {}, {&p.value()});
  int a = parts[0].shape().axis("concat", axis);
  Shape shape = parts[0].shape();
  shape[a] = 0;
  for (const Variable& p : parts) {
    require(p.dtype() == parts[0].dtype(), "concat: ", name_of(parts[0].dtype()), " and ", name_of(p.dtype()));
    require(p.rank() == shape.rank(), "concat: the shapes ", parts[0].shape(), " and ", p.shape(), " differ in rank");
    for (int i = 0; i < shape.rank(); i++)
      require(i == a || p.extent(i) == shape[i], "concat along axis ", axis, ": the shapes ", parts[0].shape(), " and ", p.shape(),
              " differ elsewhere");
    shape[a] += p.extent(a);
  }
  Tensor y(parts[0].backend(), shape, parts[0].dtype());
  std::vector<Box> boxes;
  std::vector<Shape> shapes;
  Box box = whole(shape);
  for (const Variable& p : parts) {
    copy_box(p.shape(), p.value(), whole(p.shape()), y, box, false);
    boxes.push_back(box);
    shapes.push_back(p.shape());
    box.begin += p.extent(a) * box.step[a];
  }
  Ref<Node> node;
  if (needs_tape(parts) || mode().recorder) node = Ref<Node>(new ConcatNode(a, std::move(shapes), std::move(boxes)));
  if (mode().recorder) {
    std::vector<const Variable*> inputs;
    for (const Variable& p : parts) inputs.push_back(&p);
    write_down(*node, inputs, y);
  }
  if (!needs_tape(parts)) node.reset();
  else
    for (const Variable& p : parts) node->inputs.push(p.node());
  return finish(y, std::move(node), ConcatNode::name);
}

Variable pad(const Variable& x, int axis, std::int64_t before, std::int64_t after, double value) {
  int a = x.shape().axis("pad", axis);
  require(before >= 0 && after >= 0, "pad: ", before, " before and ", after, " after: use slice to cut");
  require(before <= Shape::most && after <= Shape::most, "pad: ", before, " before and ", after,
          " after: more elements than any memory holds");
  Shape shape = x.shape();
  shape[a] += before + after;
  Box box = whole(shape);
  box.begin = before * box.step[a];
  Tensor y = Tensor::full(x.backend(), shape, value, x.dtype());
  copy_box(x.shape(), x.value(), whole(x.shape()), y, box, false);
  return record<PadNode>(y, {&x}, {}, x.shape(), box);
}

}  // namespace tandem
