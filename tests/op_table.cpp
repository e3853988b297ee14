#include "tests/op_table.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

namespace tandem::test {
namespace {

const Dumps& dumps() { return Dumps::of("ops"); }

// A case of a dump. A name that begins with * is a parameter.
Case dumped(const std::string& name, std::vector<std::string> inputs, Build y) {
  Case c{.name = name, .y = std::move(y), .inputs = {}, .dump = name};
  for (std::string& n : inputs) {
    bool parameter = n[0] == '*';
    if (parameter) n.erase(0, 1);
    c.inputs.push_back({.shape = dumps().at(name + "/" + n).shape, .parameter = parameter});
  }
  c.names = std::move(inputs);
  return c;
}

// A case for each dump of this operation, given its name and its attributes.
template <class F>
void each_dump(Row& row, const std::string& op, const F& f) {
  for (const std::string& name : dumps().cases())
    if (const Attributes a = dumps().attributes(name); a["op"] == op) row.cases.push_back(f(name, a));
}

// Of inputs of these shapes, drawn from [low, high).
Case plain(const std::string& name, Build y, const std::vector<Shape>& shapes, double low = -1, double high = 1,
           double step = 0) {
  Case c{.name = name, .y = std::move(y), .inputs = {}};
  for (const Shape& shape : shapes) c.inputs.push_back({.shape = shape, .low = low, .high = high, .step = step});
  return c;
}

// ---- the rows -------------------------------------------------------------------------------------------------------
constexpr std::int64_t many = 40'003;  // more than one thread's share, and no multiple of a vector

Row unary(const std::string& op, double low, double high, std::function<Variable(const Variable&)> f,
          std::function<double(double)> oracle) {
  Row row{op, {}};
  auto add = [&](Case c) {
    c.y = [f](Inputs v) { return f(v[0]); };
    c.oracle = [oracle](double x, double) { return oracle(x); };
    row.cases.push_back(std::move(c));
  };
  add(dumps().has(op + "/x") ? dumped(op, {"x"}, {}) : plain("small", {}, {{3, 37}}, low, high));
  add(plain("scalar", {}, {{}}, 0.75, 0.75));
  add(plain("many", {}, {{many}}, low, high));
  return row;
}

Row binary(const std::string& op, Variable (*f)(const Variable&, const Variable&), Input a, Input b, double ties,
           double (*oracle)(double, double)) {
  Row row{op, {}};
  row.bf16 = 0x1p-6;  // a stretched input's gradient sums products that were rounded
  Build y = [f](Inputs v) { return f(v[0], v[1]); };
  auto add = [&](const char* name, const Shape& sa, const Shape& sb, double step = 0) {
    a.shape = sa, b.shape = sb, a.step = b.step = step;
    row.cases.push_back({.name = name, .y = y, .inputs = {a, b}, .oracle = oracle});
  };
  for (const char* shapes : {"same", "3x1", "4", "1", "outer"}) {
    row.cases.push_back(dumped(op + "_" + shapes, {"a", "b"}, y));
    row.cases.back().oracle = oracle;
  }
  add("gap", {3, 4, 5}, {3, 1, 5});
  add("middle", {4, 5}, {2, 4, 1});
  add("both", {4, 1, 3}, {1, 5, 3});
  add("scalar", {}, {2, 3});
  add("many", {many}, {many});
  add("many rows", {130, 401}, {401});
  add("many columns", {130, 401}, {130, 1});
  if (ties > 0) add("ties", {4, 20}, {4, 20}, ties);
  return row;
}

using Reduce = Variable (*)(const Variable&, Axes, bool);
template <int... axes>
void reduction(Row& row, Reduce f, const std::string& name, const Shape& shape = {}, double step = 0) {
  for (bool keep : {false, true}) {
    Build y = [f, keep](Inputs v) { return f(v[0], {axes...}, keep); };
    row.cases.push_back(shape.rank() == 0 ? dumped(row.op + "_" + name + (keep ? "_keepdim" : ""), {"x"}, y)
                                          : plain(name, y, {shape}, -1, 1, step));
  }
}

Row reduce(const std::string& op, Reduce f, double ties = 0) {
  Row row{op, {}};
  reduction<0>(row, f, "0");
  reduction<1>(row, f, "1");
  reduction<2>(row, f, "2");
  reduction<0, 2>(row, f, "02");
  reduction<1, 2>(row, f, "12");
  reduction<0, 1, 2>(row, f, "012");
  reduction<>(row, f, "all", {3, 5, 7});
  reduction<-1, -3>(row, f, "negative", {3, 5, 7});
  reduction<1, 3>(row, f, "gap", {2, 3, 4, 5});
  reduction<0>(row, f, "many rows", {130, 401});
  reduction<1>(row, f, "many columns", {130, 401});
  reduction<>(row, f, "many", {many});
  if (ties > 0) reduction<1>(row, f, "ties", {4, 20}, ties);
  return row;
}

template <int... order>
Case permutation(const std::string& dump, const Shape& shape = {}) {
  Build y = [](Inputs v) { return transpose(v[0], {order...}); };
  return shape.rank() == 0 ? dumped(dump, {"x"}, y) : plain(dump, y, {shape});
}

Build convolution(const Conv2dOptions& o) {
  return [o](Inputs v) { return conv2d(v[0], v[1], v.size() > 2 ? v[2] : Variable(), o); };
}

Row conv2d_row() {
  Row row{"conv2d", {}, 5e-6};  // Winograd's transforms cost digits
  each_dump(row, "conv2d", [](const std::string& name, const Attributes& a) {
    Conv2dOptions o{.stride = a["stride"], .dilation = a["dilation"], .groups = a["groups"]};
    if (a["padding"].is_array())
      o.padding = a["padding"][0], o.padding_w = a["padding"][1];
    else
      o.padding = a["padding"];
    std::vector<std::string> names{"x", "*w"};
    if (dumps().has(name + "/b")) names.push_back("*b");
    return dumped(name, names, convolution(o));
  });
  auto add = [&](const char* name, const Shape& x, const Shape& w, bool bias, const Conv2dOptions& o,
                 double step = 1e-5) {
    double bound = 1 / std::sqrt(double(w[1] * w[2] * w[3]));
    Case c{.name = name,
           .y = convolution(o),
           .inputs = {{.shape = x}, {.shape = w, .low = -bound, .high = bound, .parameter = true}}};
    if (bias) c.inputs.push_back({.shape = {w[0]}, .parameter = true});
    c.step = step;
    row.cases.push_back(c);
  };
  add("relu", {2, 4, 5, 3}, {4, 3, 3, 3}, false, {.padding = 1, .relu = true});
  add("bias relu", {2, 4, 5, 3}, {4, 3, 3, 3}, true, {.stride = 2, .padding = 1, .relu = true});
  add("groups bias relu", {1, 5, 4, 6}, {4, 3, 3, 3}, true,
      {.padding = 1, .dilation = 2, .groups = 2, .padding_w = 2, .relu = true});
  add("winograd", {4, 16, 16, 32}, {48, 3, 3, 32}, true, {.padding = 1, .relu = true}, 0);
  add("winograd odd", {3, 13, 15, 16}, {32, 3, 3, 16}, false, {.padding = 1}, 0);
  add("winograd valid", {2, 14, 14, 16}, {16, 3, 3, 16}, true, {}, 0);
  add("stride 2", {4, 16, 16, 16}, {32, 3, 3, 16}, false, {.stride = 2, .padding = 1}, 0);
  add("first layer", {4, 28, 28, 1}, {32, 3, 3, 1}, true, {.padding = 1}, 0);
  add("wide 1x1", {4, 8, 8, 64}, {32, 1, 1, 64}, false, {.stride = 2}, 0);
  return row;
}

template <class Pool>
Row pooling(const std::string& op, const std::string& dump, Pool f, bool relu) {
  Row row{op, {}};
  auto y = [f](const Pool2dOptions& o) { return Build([f, o](Inputs v) { return f(v[0], o); }); };
  each_dump(row, dump, [&](const std::string& name, const Attributes& a) {
    return dumped(name, {"x"}, y({.kernel_size = a["kernel"], .stride = a["stride"], .padding = a["padding"]}));
  });
  auto add = [&](const char* name, const Shape& x, const Pool2dOptions& o, double step = 0) {
    row.cases.push_back(plain(name, y(o), {x}, -1, 1, step));
  };
  add("overlap", {2, 6, 7, 3}, {.kernel_size = 3, .stride = 1});
  add("gaps", {2, 9, 7, 3}, {.kernel_size = 2, .stride = 3});
  add("padding", {2, 7, 6, 5}, {.kernel_size = 3, .stride = 2, .padding = 1});
  add("many", {4, 16, 15, 48}, {});
  add("one channel", {3, 8, 8, 1}, {});
  if (!relu) return row;
  add("ties", {2, 6, 6, 4}, {.kernel_size = 3, .stride = 2}, 0.5);
  add("relu", {2, 6, 6, 5}, {.relu = true});
  add("relu overlap", {2, 7, 6, 5}, {.kernel_size = 3, .stride = 2, .padding = 1, .relu = true});
  add("relu many", {4, 16, 16, 48}, {.relu = true});
  return row;
}

// The running statistics are made anew for each evaluation, so that a case is a function.
Build norm(BatchNormOptions o, Numbers mean, Numbers variance) {
  return [=](Inputs v) {
    Tensor m = Tensor::of(v[0].backend(), v[1].shape(), mean, v[1].dtype()),
           s = Tensor::of(v[0].backend(), v[1].shape(), variance, v[1].dtype());
    return batch_norm(v[0], v[1], v[2], m, s, o, v.size() > 3 ? v[3] : Variable());
  };
}

// x, and gamma and beta of this shape.
std::vector<Input> norm_inputs(const Shape& x, const Shape& parameters) {
  return {{.shape = x, .low = -1, .high = 2},
          {.shape = parameters, .low = 0.5, .high = 1.5, .parameter = true},
          {.shape = parameters, .parameter = true}};
}

Row batch_norm_row() {
  Row row{"batch_norm", {}};
  each_dump(row, "batch_norm", [](const std::string& name, const Attributes& a) {
    BatchNormOptions o{
        .epsilon = a["eps"], .momentum = a["momentum"], .training = a["training"] == 1, .relu = a["relu"] == 1};
    std::vector<std::string> names{"x", "*weight", "*bias"};
    if (dumps().has(name + "/residual")) names.push_back("residual");
    return dumped(name, names,
                  norm(o, dumps().at(name + "/running_mean").values, dumps().at(name + "/running_var").values));
  });
  for (const Shape& x : {Shape{3, 4, 2, 5}, Shape{9, 7}, Shape{8, 12, 11, 48}})
    for (bool training : {true, false})
      for (bool residual : {false, true})
        for (bool relu : {false, true}) {
          const std::int64_t channels = x[-1];
          std::string name = std::to_string(channels) + (training ? " training" : " eval") +
                             (residual ? " residual" : "") + (relu ? " relu" : "");
          Case c{.name = name,
                 .y = norm({.training = training, .relu = relu}, numbers(name + " mean", channels),
                           numbers(name + " variance", channels, 0.5, 2)),
                 .inputs = norm_inputs(x, {channels})};
          if (residual) c.inputs.push_back({.shape = x});
          row.cases.push_back(c);
        }
  return row;
}

Row group_norm_row() {
  Row row{"group_norm", {}};
  auto y = [](int groups) { return Build([groups](Inputs v) { return group_norm(v[0], groups, v[1], v[2]); }); };
  each_dump(row, "group_norm", [&](const std::string& name, const Attributes& a) {
    return dumped(name, {"x", "*weight", "*bias"}, y(a["groups"]));
  });
  auto add = [&](const char* name, const Shape& x, int groups) {
    row.cases.push_back({.name = name, .y = y(groups), .inputs = norm_inputs(x, {x[-1]})});
  };
  add("vectors", {2, 1, 2, 32}, 2);
  add("no vectors", {3, 5, 3, 3}, 3);
  add("two axes", {6, 10}, 2);
  add("one pixel", {3, 1, 1, 130}, 13);
  add("many", {5, 12, 11, 48}, 8);
  add("folded", {3, 13, 11, 24}, 4);
  return row;
}

Row layer_norm_row() {
  Row row{"layer_norm", {}};
  Build y = [](Inputs v) { return layer_norm(v[0], v[1], v[2]); };
  each_dump(row, "layer_norm", [&](const std::string& name, const Attributes&) {
    return dumped(name, {"x", "*weight", "*bias"}, y);
  });
  auto add = [&](const char* name, const Shape& x, const Shape& last) {
    row.cases.push_back({.name = name, .y = y, .inputs = norm_inputs(x, last)});
  };
  add("vector", {40}, {40});
  add("many", {130, 301}, {301});
  add("pictures", {9, 12, 11, 32}, {12, 11, 32});
  return row;
}

Row cross_entropy_row() {
  Row row{"cross_entropy", {}};
  auto loss = [](double smoothing, Numbers labels) {
    return Build([=](Inputs v) { return cross_entropy(v[0], labels_of(v[0].backend(), labels), smoothing); });
  };
  for (const char* name : {"cross_entropy", "cross_entropy_smoothing"})
    row.cases.push_back(
        dumped(name, {"x"},
               loss(dumps().attributes(name)["label_smoothing"], dumps().at(std::string(name) + "/labels").values)));
  for (double smoothing : {0.0, 0.2}) {
    std::string name = smoothing > 0 ? " smoothing" : "";
    row.cases.push_back(plain("one row" + name, loss(smoothing, {2}), {{1, 3}}, -3, 3));
    row.cases.push_back(plain("many" + name, loss(smoothing, numbers("labels", 128, 0, 99, 1)), {{128, 100}}, -9, 9));
  }
  return row;
}

// As many i32 numbers below n as the shape has elements.
Tensor index_of(Backend& backend, const std::string& name, const Shape& shape, double n) {
  return Tensor::of(backend, shape, numbers(name, shape.numel(), 0, n - 1, 1), DType::i32);
}
Tensor dumped_index(Backend& backend, const std::string& name, DType dtype = DType::i32) {
  return Tensor::of(backend, dumps().at(name).shape, dumps().at(name).values, dtype);
}

Row topk_row() {
  auto best = [](std::int64_t k, int axis, bool largest) {
    return Build([=](Inputs v) { return topk(v[0], k, axis, largest).values; });
  };
  return {"topk",
          {dumped("topk", {"x"}, best(3, 1, true)), dumped("topk_smallest", {"x"}, best(3, 1, false)),
           plain("all", best(5, 0, true), {{5, 3}}), plain("ties", best(4, -1, true), {{6, 20}}, -1, 1, 0.25),
           plain("many", best(5, -1, false), {{300, 400}})}};
}

Row loss_row(const char* op, Build y) {
  return {op,
          {dumped(op, {"x", "t"}, y),
           {.name = "many",
            .y = y,
            .inputs = {{.shape = {130, 401}, .low = -3, .high = 3}, {.shape = {130, 401}, .low = 0}}}}};
}

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

std::vector<Row> table() {
  std::vector<Row> rows;
  auto row = [&](Row r) { rows.push_back(std::move(r)); };
  using F = double (*)(double);
  using X = const Variable&;
  using Op = Variable (*)(X);
  auto one = [&](const char* op, Op f, F oracle) { row(unary(op, -4, 4, f, oracle)); };
  auto positive_one = [&](const char* op, Op f, F oracle) { row(unary(op, 0.1, 4, f, oracle)); };

  one("relu", relu, [](double x) { return std::fmax(x, 0.0); });
  row(unary(
      "leaky_relu", -4, 4, [](X x) { return leaky_relu(x, 0.01); }, [](double x) { return std::fmax(x, x / 100); }));
  row(unary(
      "elu", -4, 4, [](X x) { return elu(x); }, [](double x) { return x > 0 ? x : std::expm1(x); }));
  one("gelu", gelu, [](double x) { return x / 2 * std::erfc(-x / std::numbers::sqrt2); });
  one("gelu_tanh", gelu_tanh, [](double x) {
    return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * std::pow(x, 3))));
  });
  one("silu", silu, [](double x) { return x * sigmoid_of(x); });
  one("hardswish", hardswish, [](double x) { return x * std::fmin(std::fmax(x + 3, 0), 6) / 6; });
  one("softplus", softplus, [](double x) { return std::log(1 + std::exp(x)); });
  one("sigmoid", sigmoid, sigmoid_of);
  one("tanh", tanh, std::tanh);
  one("exp", exp, std::exp);
  positive_one("log", log, std::log);
  positive_one("sqrt", sqrt, std::sqrt);
  positive_one("rsqrt", rsqrt, [](double x) { return std::pow(x, -0.5); });
  rows.back().bf16 = 0x1p-6;  // the derivative is −y³/2, and y was rounded
  positive_one("reciprocal", reciprocal, [](double x) { return std::pow(x, -1); });
  one("square", square, [](double x) { return std::pow(x, 2); });
  one("abs", abs, std::fabs);
  one("neg", neg, [](double x) { return 0 - x; });
  one("sin", sin, std::sin);
  one("cos", cos, std::cos);
  row(unary(
      "clamp", -4, 4, [](X x) { return clamp(x, -0.5, 0.5); }, [](double x) { return std::clamp(x, -0.5, 0.5); }));
  row(unary(
      "scale", -4, 4, [](X x) { return scale(x, -1.5, 0.25); }, [](double x) { return 0.25 - 1.5 * x; }));
  row(unary(
      "div_by", -4, 4, [](X x) { return x / 0.7; }, [](double x) { return x / 0.7; }));
  row(unary(
      "power", 0.1, 4, [](X x) { return power(x, 2.5); }, [](double x) { return x * x * std::sqrt(x); }));

  // Finite differences see through a narrow type when each step is a number of it: steps of 2^-10 between multiples of
  // 2^-6.
  auto through = [](const char* name, DType narrow, const Shape& shape, double step) {
    Build y = [narrow](Inputs v) { return cast(cast(v[0], narrow), v[0].dtype()); };
    return Case{.name = name, .y = y, .inputs = {{.shape = shape, .step = 0x1p-6}}, .step = step};
  };
  row({"cast",
       {through("through f32", DType::f32, {5, 7}, 0x1p-10), through("through bf16", DType::bf16, {5, 7}, 0),
        through("many", DType::bf16, {many}, 0)}});

  const Input any{.shape = {}, .low = -2, .high = 2}, positive{.shape = {}, .low = 0.5, .high = 2};
  row(binary("add", add, any, any, 0, [](double a, double b) { return a + b; }));
  row(binary("sub", sub, any, any, 0, [](double a, double b) { return a - b; }));
  row(binary("mul", mul, any, any, 0, [](double a, double b) { return a * b; }));
  row(binary("div", div, any, positive, 0, [](double a, double b) { return a / b; }));
  row(binary("maximum", maximum, any, any, 0.5, [](double a, double b) { return std::fmax(a, b); }));
  row(binary("minimum", minimum, any, any, 0.5, [](double a, double b) { return std::fmin(a, b); }));
  row(binary("pow", pow, positive, any, 0, [](double a, double b) { return std::exp(b * std::log(a)); }));

  auto masked = [](const Shape& mask) {
    return Build(
        [mask](Inputs v) { return where(index_of(v[0].backend(), "mask", mask, 2).cast(DType::u8), v[0], v[1]); });
  };
  row({"where",
       {dumped("where", {"a", "b"},
               [](Inputs v) { return where(dumped_index(v[0].backend(), "where/mask", DType::u8), v[0], v[1]); }),
        plain("same", masked({4, 5}), {{4, 5}, {4, 5}}), plain("a stretched", masked({4, 1}), {{}, {4, 5}}),
        plain("many", masked({130, 401}), {{130, 401}, {401}})},
       1e-5,
       0x1p-4});  // a stretched input's gradient is summed, and rounded, twice

  row(reduce("sum", sum));
  row(reduce("mean", mean));
  row(reduce("max", max, 0.25));

  auto reshaped = [](const Shape& shape) { return Build([shape](Inputs v) { return reshape(v[0], shape); }); };
  Build inferred = [](Inputs v) { return reshape(v[0], {4, -1, 3}); };
  row({"reshape", {plain("same", reshaped({6, 4}), {{2, 3, 4}}), plain("inferred", inferred, {{2, 3, 4}})}});
  Build flat = [](Inputs v) { return flatten(v[0]); };
  row({"flatten", {plain("pictures", flat, {{2, 3, 4, 2}}), plain("vector", flat, {{5}})}});
  row({"transpose",
       {permutation<1, 0>("permute_10"), permutation<0, 2, 1>("permute_021"), permutation<2, 0, 1>("permute_201"),
        permutation<0, 3, 1, 2>("permute_0312"), permutation<-1, 0>("negative", {3, 5}),
        permutation<2, 1, 0>("many", {50, 30, 41})}});

  auto sliced = [](const char* name) {  // PyTorch's cuts three axes at once
    return dumped(name, {"x"}, [a = dumps().attributes(name)](Inputs v) {
      Variable y = v[0];
      for (int axis = 0; axis < 3; axis++) y = slice(y, axis, a["start"][axis], a["stop"][axis], a["step"][axis]);
      return y;
    });
  };
  row({"slice",
       {sliced("slice"), sliced("slice_step"), plain("rows", [](Inputs v) { return slice(v[0], 0, 1, 3); }, {{5, 4}}),
        plain("last axis", [](Inputs v) { return slice(v[0], -1, 1, 6, 2); }, {{2, 3, 7}}),
        plain("two of one", [](Inputs v) { return mul(slice(v[0], 0, 0, 3), slice(v[0], 0, 2, 5)); }, {{5, 4}}),
        plain("many", [](Inputs v) { return slice(v[0], 1, 0, 200, 2); }, {{130, 401}})}});

  row({"squeeze",
       {plain("middle", [](Inputs v) { return squeeze(v[0], 1); }, {{2, 1, 3}}),
        plain("last", [](Inputs v) { return squeeze(v[0], -1); }, {{4, 1}})}});
  row({"unsqueeze",
       {plain("first", [](Inputs v) { return unsqueeze(v[0], 0); }, {{2, 3}}),
        plain("last", [](Inputs v) { return unsqueeze(v[0], -1); }, {{2, 3}})}});
  row({"stack",
       {dumped("stack", {"x0", "x1"}, [](Inputs v) { return stack(v, 1); }),
        plain("last", [](Inputs v) { return stack(v, -1); }, {{2, 3}, {2, 3}})}});

  auto joined = [](int axis) { return Build([axis](Inputs v) { return cat(v, axis); }); };
  Build twice = [](Inputs v) { return cat(std::vector{v[0], v[1], v[0]}, -1); };
  row({"cat",
       {dumped("concat_0", {"x0", "x1", "x2"}, joined(0)), dumped("concat_1", {"x0", "x1", "x2"}, joined(1)),
        dumped("concat_2", {"x0", "x1", "x2"}, joined(2)), plain("twice the same", twice, {{2, 3}, {2, 1}}),
        plain("six", joined(0), std::vector<Shape>(6, {2, 3}))}});

  auto shortcut = [](int stride, int widen) {
    return Build([=](Inputs v) { return pad_shortcut(v[0], stride, widen); });
  };
  row({"pad_shortcut",
       {plain("halves", shortcut(2, 2), {{2, 4, 6, 3}}), plain("odd", shortcut(2, 1), {{2, 5, 7, 2}}),
        plain("wide only", shortcut(1, 3), {{1, 3, 2, 4}}), plain("thirds", shortcut(3, 0), {{1, 7, 8, 2}}),
        plain("many", shortcut(2, 8), {{4, 32, 31, 16}})}});

  auto padded = [](const char* name) {
    return dumped(name, {"x"}, [a = dumps().attributes(name)](Inputs v) {
      Variable y = v[0];
      for (int axis = 0; axis < 3; axis++) y = pad(y, axis, a["before"][axis], a["after"][axis], a["value"]);
      return y;
    });
  };
  row({"pad",
       {padded("pad_zero"), padded("pad_value"),
        plain("channels", [](Inputs v) { return pad(v[0], -1, 8, 8); }, {{2, 3, 3, 4}})}});

  Build product = [](Inputs v) { return matmul(v[0], v[1]); };
  row({"matmul",
       {dumped("matmul_2d", {"a", "b"}, product), dumped("matmul_batched", {"a", "b"}, product),
        dumped("matmul_broadcast", {"a", "b"}, product), plain("one matrix for all", product, {{2, 3, 4, 5}, {5, 6}}),
        plain("one matrix before all", product, {{4, 5}, {2, 3, 5, 6}}),
        plain("four axes", product, {{2, 3, 4, 5}, {2, 3, 5, 2}}), plain("large", product, {{65, 130}, {130, 71}}),
        plain("large batch", product, {{3, 33, 40}, {3, 40, 17}})}});
  auto layer = [](bool relu) {
    return Build([relu](Inputs v) { return linear(v[0], v[1], v.size() > 2 ? v[2] : Variable(), relu); });
  };
  const Input weight{.shape = {4, 6}, .parameter = true},
      large{.shape = {130, 300}, .low = -0.06, .high = 0.06, .parameter = true};
  row({"linear",
       {dumped("linear", {"x", "*w", "*b"}, layer(false)),
        {.name = "no bias", .y = layer(false), .inputs = {{.shape = {3, 6}}, weight}},
        {.name = "relu", .y = layer(true), .inputs = {{.shape = {3, 6}}, weight}},
        {.name = "bias relu",
         .y = layer(true),
         .inputs = {{.shape = {3, 6}}, weight, {.shape = {4}, .parameter = true}}},
        {.name = "large",
         .y = layer(true),
         .inputs = {{.shape = {64, 300}}, large, {.shape = {130}, .parameter = true}}}}});

  row(conv2d_row());
  row(pooling("max_pool2d", "max_pool2d", max_pool2d, true));
  row(pooling("average_pool2d", "avg_pool2d", average_pool2d, false));
  Build global = [](Inputs v) { return global_average_pool(v[0]); };
  row({"global_average_pool", {dumped("global_avg_pool", {"x"}, global), plain("many", global, {{4, 14, 13, 70}})}});
  row(batch_norm_row());
  row(group_norm_row());
  row(layer_norm_row());

  // The draw counts calls where no training loop does; begun anew, dropout is a function.
  auto drop = [](double p) {
    return Build([p](Inputs v) {
      mode().draws = 0;
      return dropout(v[0], p, 3);
    });
  };
  row({"dropout",
       {plain("rows", drop(0.4), {{8, 5, 3}}), plain("vector", drop(0.4), {{9}}), plain("never", drop(0), {{3, 4}}),
        plain("many", drop(0.1), {{130, 401}})}});

  auto soft = [&](const std::string& op, Variable (*f)(const Variable&, int)) {
    auto along = [f](int axis) { return Build([f, axis](Inputs v) { return f(v[0], axis); }); };
    row({op,
         {dumped(op, {"x"}, along(-1)), dumped(op + "_0", {"x"}, along(0)),
          plain("three axes", along(-1), {{2, 3, 4}}, -5, 5), plain("middle axis", along(1), {{2, 3, 4}}, -5, 5),
          plain("many", along(1), {{64, 1000}}, -9, 9)}});
  };
  soft("softmax", softmax);
  rows.back().bf16 = 0x1p-5;  // the gradient is y·(dy − …), and y was rounded
  soft("log_softmax", log_softmax);

  auto gathering = [](int axis, const Shape& index, int n) {
    return Build([=](Inputs v) { return gather(v[0], axis, index_of(v[0].backend(), "gather", index, n)); });
  };
  row({"gather",
       {dumped("gather", {"x"}, [](Inputs v) { return gather(v[0], 1, dumped_index(v[0].backend(), "gather/index")); }),
        plain("rows", gathering(0, {7, 3}, 4), {{4, 3}}), plain("columns", gathering(-1, {4, 2}, 3), {{4, 3}}),
        plain("many", gathering(1, {130, 60}, 401), {{130, 401}})},
       1e-5,
       0x1p-6});
  auto looked_up = [](const Shape& index, int n) {
    return Build([=](Inputs v) { return embedding(v[0], index_of(v[0].backend(), "embedding", index, n)); });
  };
  row({"embedding",
       {dumped("embedding", {"*w"},
               [](Inputs v) { return embedding(v[0], dumped_index(v[0].backend(), "embedding/index")); }),
        {.name = "one", .y = looked_up({}, 4), .inputs = {{.shape = {4, 3}, .parameter = true}}},
        {.name = "many", .y = looked_up({8, 50}, 100), .inputs = {{.shape = {100, 130}, .parameter = true}}}}});
  row(topk_row());

  row(loss_row("mse_loss", [](Inputs v) { return mse_loss(v[0], v[1]); }));
  row(loss_row("l1_loss", [](Inputs v) { return l1_loss(v[0], v[1]); }));
  row(loss_row("huber_loss", [](Inputs v) { return huber_loss(v[0], v[1], 0.7); }));
  row(loss_row("bce_with_logits", [](Inputs v) { return bce_with_logits(v[0], v[1]); }));
  row(cross_entropy_row());
  return rows;
}

Tensor labels_of(Backend& backend, const Numbers& labels) {
  return Tensor::of(backend, {std::int64_t(labels.size())}, labels, DType::i32);
}

Numbers values_of(const std::string& op, const Case& c, std::size_t i) {
  if (!c.dump.empty()) return dumps().at(c.dump + "/" + c.names[i]).values;
  const Input& in = c.inputs[i];
  return numbers(op + "/" + c.name + "/" + std::to_string(i), in.shape.numel(), in.low, in.high, in.step);
}
Numbers dy_of(const std::string& op, const Case& c, std::int64_t numel) {
  if (!c.dump.empty()) return dumps().at(c.dump + "/dy").values;
  return numbers(op + "/" + c.name + "/dy", numel);
}

// ---- running a case -------------------------------------------------------------------------------------------------
DType type_of(const Input& in, DType dtype) { return in.parameter && size_of(dtype) == 2 ? DType::f32 : dtype; }

Result evaluate(const Case& c, Backend& backend, DType dtype, const std::vector<Numbers>& values, const Numbers& dy,
                Form form, int only) {
  std::vector<Variable> leaves;
  for (std::size_t i = 0; i < c.inputs.size(); i++)
    leaves.emplace_back(Tensor::of(backend, c.inputs[i].shape, values[i], type_of(c.inputs[i], dtype)),
                        only < 0 || only == int(i));
  std::vector<Variable> inputs = leaves;
  if (form == Form::shared)
    for (Variable& v : inputs) v = scale(v, 1);
  auto weigh = [&](const Variable& y) { return sum(mul(y, Variable(Tensor::of(backend, y.shape(), dy, y.dtype())))); };
  Variable y = c.y(inputs), loss = weigh(y);
  if (form == Form::shared) loss = loss + weigh(c.y(inputs));
  loss.backward({.keep = form == Form::twice});
  if (form == Form::twice) loss.backward();
  Result r{y.value().values(), {}};
  for (const Variable& leaf : leaves) r.gradients.push_back(leaf.grad().defined() ? leaf.grad().values() : Numbers());
  return r;
}

}  // namespace tandem::test
