// Operations that move elements without arithmetic. All but reshape are one copy between two strided views of the same
// shape. The gradient is the same copy in reverse.
#include <vector>

#include "autograd/ops.h"
#include "core/strided_view.h"

namespace tandem {
namespace {

void copy_view(const Shape& shape, const Tensor& x, const StridedView& from, Tensor& y, const StridedView& to,
               bool add) {
  if (shape.numel() == 0) return;
  Backend& backend = x.backend();
  dispatch(x.dtype(), "copy", [&]<class T> {
    ViewCopy<T> view{.rank = std::max(1, shape.rank()), .from = from, .to = to, .x = x.data<T>(), .y = y.write<T>()};
    for (int k = 0; k < shape.rank(); k++) view.size[k] = shape[k];
    constexpr int V = 16 / sizeof(T);
    const std::int64_t n = shape.numel();
    auto run = [&]<bool adds> {
      if (!backend.on_device()) return launch(backend, n / view.size[view.rank - 1], CopyRows<T, adds>{view});
      if (in_packs(view, V)) return launch(backend, n / V, CopyPacks<T, adds, V>{view});
      launch(backend, n, CopyPacks<T, adds, 1>{view});
    };
    add ? run.template operator()<true>() : run.template operator()<false>();
  });
}

StridedView whole(const Shape& s) {
  StridedView b;
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
  void backward(Tensor dy, std::span<GradientSlot> slots) override { slots[0].accumulate(dy.reshape(from)); }
};

// The elements of an input that are copied, as a view of the input and as one of the result.
struct Copy {
  Shape shape;
  StridedView from, to;
};

constexpr char transpose_op[] = "transpose", slice_op[] = "slice", pad_op[] = "pad", cat_op[] = "cat";

template <const char* operation>
struct CopyNode : Node {
  static constexpr auto name = operation;
  std::vector<Shape> shapes;  // of the inputs
  std::vector<Copy> copies;
  Attributes described;
  CopyNode(Operands xs, std::vector<Copy> c, Attributes a) : Node(name), copies(std::move(c)), described(std::move(a)) {
    for (const Variable* x : xs) shapes.push_back(x->shape());
  }
  Attributes attributes() const override { return described; }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    for (std::size_t i = 0; i < copies.size(); i++) {
      if (!slots[i].wanted()) continue;
      const Copy& c = copies[i];
      auto [dx, add] = slots[i].destination(dy.backend(), shapes[i], dy.dtype());
      if (!add && c.shape.numel() < shapes[i].numel()) dx->fill(0);  // the elements that are not copied
      copy_view(c.shape, dy, c.to, *dx, c.from, add);
    }
  }
};

template <const char* operation>
Variable copied(Tensor y, Operands xs, const std::vector<Copy>& copies, Attributes attributes = {}) {
  for (std::size_t i = 0; i < copies.size(); i++)
    if (y.storage().pointer() != xs[i]->value().storage().pointer())  // else y is a view of x
      copy_view(copies[i].shape, xs[i]->value(), copies[i].from, y, copies[i].to, false);
  return record<CopyNode<operation>>(y, xs, {}, xs, copies, std::move(attributes));
}

}  // namespace

Variable pad_shortcut(const Variable& x, int stride, std::int64_t widen) {
  require(x.rank() == 4 && stride >= 1 && widen >= 0 && widen <= Shape::most, "pad_shortcut: input ", x.shape(),
          " must be [N,H,W,C], stride ", stride, " at least 1, widening ", widen, " at least 0 and at most ",
          Shape::most);
  Variable y = x;
  for (int axis : {1, 2})
    if (stride > 1) y = slice(y, axis, 0, y.size(axis), stride);
  return pad(y, 3, widen, widen);
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
    const std::int64_t numel = x.value().numel(), known = s.numel();
    require(known > 0 && numel % known == 0, "reshape: ", x.shape(), " has ", numel,
            " elements, which the other sizes (together ", known, ") do not divide");
    s[unknown] = numel / known;
  }
  return reshape(x, s);
}

Variable flatten(const Variable& x) {
  require(x.rank() >= 1, "flatten: needs at least one axis");
  return reshape(x, {x.size(0), x.size(0) ? x.value().numel() / x.size(0) : 0});
}

Variable squeeze(const Variable& x, int axis) {
  const int a = x.shape().axis("squeeze", axis);
  require(x.size(a) == 1, "squeeze: axis ", axis, " of the shape ", x.shape(), " has ", x.size(a),
          " elements, not one");
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
  return cat(wide, axis);
}

Variable transpose(const Variable& x, Axes order) {
  require(int(order.size()) == x.rank(), "transpose: ", order.size(), " axes named for the shape ", x.shape());
  StridedView all = whole(x.shape()), view;
  Shape shape;
  unsigned seen = 0;
  for (int named : order) {
    int axis = x.shape().axis("transpose", named);
    require(!(seen >> axis & 1), "transpose: the axis ", named, " is named twice");
    seen |= 1u << axis;
    view.step[shape.rank()] = all.step[axis];
    shape.append(x.size(axis));
  }
  Tensor y(x.backend(), shape, x.dtype());
  return copied<transpose_op>(y, {&x}, {{shape, view, whole(shape)}});
}

Variable slice(const Variable& x, int axis, std::int64_t begin, std::int64_t end, std::int64_t step) {
  int a = x.shape().axis("slice", axis);
  require(step >= 1 && 0 <= begin && begin <= end && end <= x.size(a), "slice: [", begin, ", ", end, ") step ", step,
          " of axis ", axis, " in the shape ", x.shape());
  step = std::min(step, std::max<std::int64_t>(1, x.size(a)));  // a longer step selects the same elements
  StridedView view = whole(x.shape());
  view.begin = begin * view.step[a];
  view.step[a] *= step;
  Shape shape = x.shape();
  shape[a] = (end - begin + step - 1) / step;
  // A slice of the first axis without gaps shares memory with x
  const Tensor y = a == 0 && step == 1 ? x.value().slice(begin, end) : Tensor(x.backend(), shape, x.dtype());
  return copied<slice_op>(
      y, {&x}, {{shape, view, whole(shape)}},
      {{"axis", {double(a)}}, {"begin", {double(begin)}}, {"end", {double(end)}}, {"step", {double(step)}}});
}

Variable cat(std::span<const Variable> parts, int axis) {
  require(!parts.empty(), "cat: nothing to concatenate");
  for (const Variable& p : parts) check_inputs("cat", parts[0].value(), {}, {&p.value()});
  int a = parts[0].shape().axis("cat", axis);
  Shape shape = parts[0].shape();
  shape[a] = 0;
  for (const Variable& p : parts) {
    require(p.dtype() == parts[0].dtype(), "cat: ", name_of(parts[0].dtype()), " and ", name_of(p.dtype()));
    require(p.rank() == shape.rank(), "cat: the shapes ", parts[0].shape(), " and ", p.shape(), " differ in rank");
    for (int i = 0; i < shape.rank(); i++)
      require(i == a || p.size(i) == shape[i], "cat along axis ", axis, ": the shapes ", parts[0].shape(), " and ",
              p.shape(), " differ elsewhere");
    shape[a] += p.size(a);
  }
  std::vector<const Variable*> inputs;
  std::vector<Copy> copies;
  StridedView view = whole(shape);
  for (const Variable& p : parts) {
    inputs.push_back(&p);
    copies.push_back({p.shape(), whole(p.shape()), view});
    view.begin += p.size(a) * view.step[a];
  }
  return copied<cat_op>(Tensor(parts[0].backend(), shape, parts[0].dtype()), inputs, copies, {{"axis", {double(a)}}});
}

Variable pad(const Variable& x, int axis, std::int64_t before, std::int64_t after, double value) {
  int a = x.shape().axis("pad", axis);
  require(before >= 0 && after >= 0, "pad: ", before, " before and ", after, " after: use slice to cut");
  require(before <= Shape::most && after <= Shape::most, "pad: ", before, " before and ", after,
          " after: more elements than any memory holds");
  Shape shape = x.shape();
  shape[a] += before + after;
  StridedView view = whole(shape);
  view.begin = before * view.step[a];
  return copied<pad_op>(
      Tensor::full(x.backend(), shape, value, x.dtype()), {&x}, {{x.shape(), whole(x.shape()), view}},
      {{"axis", {double(a)}}, {"before", {double(before)}}, {"after", {double(after)}}, {"value", {value}}});
}

}  // namespace tandem
