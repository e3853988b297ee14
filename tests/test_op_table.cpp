// The op table: one row per operation declared in autograd/ops.h, with inputs that show what it does. Each row is
// checked three ways: finite differences in double; values and gradients that PyTorch computed; every backend and type
// against the reference backend in double. A declared operation without a row fails, and so does a backend that refuses
// a row.
//
// To add an operation: a row in table(), at its place in ops.h.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <regex>
#include <set>

#include "autograd/ops.h"
#include "core/random.h"
#include "core/step.h"
#include "tests/support.h"

using namespace tandem;
using test::close;
using test::Dumps;
using test::refused;

namespace {

using Inputs = std::span<const Variable>;
using Build = std::function<Variable(Inputs)>;

struct Input {
  Shape shape;
  double low = -1, high = 1;  // values are drawn from [low, high)
  double step = 0;            // and rounded to multiples of it: ties, numbers that any type holds
  bool parameter = false;     // stays f32 beside bf16 pictures
};

struct Case {
  std::string name;
  Build y;
  std::vector<Input> inputs;
  std::function<double(double, double)> oracle = {};  // element-wise operations: the same function, from <cmath>
  std::string dump = {};                              // the inputs are PyTorch's, and so are y and the gradients
  std::vector<std::string> names = {};                // of the inputs, in the dump
  double step = 1e-5;                                 // of finite differences; 0: none
};

struct Row {
  std::string op;
  std::vector<Case> cases;
  double f32 = 1e-5, bf16 = 0x1p-7;  // allowed error, of the largest value of the tensor
};

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

std::vector<double> values_of(const std::string& op, const Case& c, std::size_t i) {
  if (!c.dump.empty()) return dumps().at(c.dump + "/" + c.names[i]).values;
  const Input& in = c.inputs[i];
  return test::numbers(op + "/" + c.name + "/" + std::to_string(i), in.shape.elements(), in.low, in.high, in.step);
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
  if (dumps().has(op + "/x"))
    add(dumped(op, {"x"}, {}));
  else
    add({.name = "small", .y = {}, .inputs = {{.shape = {3, 37}, .low = low, .high = high}}});
  add({.name = "scalar", .y = {}, .inputs = {{.shape = {}, .low = 0.75, .high = 0.75}}});
  add({.name = "many", .y = {}, .inputs = {{.shape = {many}, .low = low, .high = high}}});
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

using Reduce = Variable (*)(const Variable&, std::initializer_list<int>, bool);
template <int... axes>
void reduction(Row& row, Reduce f, const std::string& name, const Shape& shape = {}, double step = 0) {
  for (bool keep : {false, true}) {
    Build y = [f, keep](Inputs v) { return f(v[0], {axes...}, keep); };
    if (shape.rank() == 0)
      row.cases.push_back(dumped(row.op + "_" + name + (keep ? "_keepdim" : ""), {"x"}, y));
    else
      row.cases.push_back({.name = name, .y = y, .inputs = {{.shape = shape, .step = step}}});
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
  return shape.rank() == 0 ? dumped(dump, {"x"}, y) : Case{.name = dump, .y = y, .inputs = {{.shape = shape}}};
}

Build convolution(const Conv2dOptions& o) {
  return [o](Inputs v) { return conv2d(v[0], v[1], v.size() > 2 ? v[2] : Variable(), o); };
}

Row conv2d_row() {
  Row row{"conv2d", {}, 5e-6};  // Winograd's transforms cost digits
  for (const std::string& name : dumps().cases()) {
    const nlohmann::json& a = dumps().attributes(name);
    if (a["op"] != "conv2d") continue;
    Conv2dOptions o{.stride = a["stride"], .dilation = a["dilation"], .groups = a["groups"]};
    if (a["padding"].is_array())
      o.padding = a["padding"][0], o.padding_w = a["padding"][1];
    else
      o.padding = a["padding"];
    std::vector<std::string> names{"x", "*w"};
    if (dumps().has(name + "/b")) names.push_back("*b");
    row.cases.push_back(dumped(name, names, convolution(o)));
  }
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
  for (const std::string& name : dumps().cases()) {
    const nlohmann::json& a = dumps().attributes(name);
    if (a["op"] == dump)
      row.cases.push_back(
          dumped(name, {"x"}, y({.window = a["kernel"], .stride = a["stride"], .padding = a["padding"]})));
  }
  auto add = [&](const char* name, const Shape& x, const Pool2dOptions& o, double step = 0) {
    row.cases.push_back({.name = name, .y = y(o), .inputs = {{.shape = x, .step = step}}});
  };
  add("overlap", {2, 6, 7, 3}, {.window = 3, .stride = 1});
  add("gaps", {2, 9, 7, 3}, {.window = 2, .stride = 3});
  add("padding", {2, 7, 6, 5}, {.window = 3, .stride = 2, .padding = 1});
  add("many", {4, 16, 15, 48}, {});
  add("one channel", {3, 8, 8, 1}, {});
  if (!relu) return row;
  add("ties", {2, 6, 6, 4}, {.window = 3, .stride = 2}, 0.5);
  add("relu", {2, 6, 6, 5}, {.relu = true});
  add("relu overlap", {2, 7, 6, 5}, {.window = 3, .stride = 2, .padding = 1, .relu = true});
  add("relu many", {4, 16, 16, 48}, {.relu = true});
  return row;
}

// The running statistics are made anew for each evaluation, so that a case is a function.
Build norm(BatchNormOptions o, std::vector<double> mean, std::vector<double> variance) {
  return [=](Inputs v) {
    Tensor m = Tensor::of(v[0].backend(), v[1].shape(), mean, v[1].dtype()),
           s = Tensor::of(v[0].backend(), v[1].shape(), variance, v[1].dtype());
    return batch_norm(v[0], v[1], v[2], m, s, o, v.size() > 3 ? v[3] : Variable());
  };
}

Row batch_norm_row() {
  Row row{"batch_norm", {}};
  for (const std::string& name : dumps().cases()) {
    const nlohmann::json& a = dumps().attributes(name);
    if (a["op"] != "batch_norm") continue;
    BatchNormOptions o{
        .epsilon = a["eps"], .momentum = a["momentum"], .training = a["training"] == 1, .relu = a["relu"] == 1};
    std::vector<std::string> names{"x", "*weight", "*bias"};
    if (dumps().has(name + "/residual")) names.push_back("residual");
    row.cases.push_back(dumped(
        name, names, norm(o, dumps().at(name + "/running_mean").values, dumps().at(name + "/running_var").values)));
  }
  for (const Shape& x : {Shape{3, 4, 2, 5}, Shape{9, 7}, Shape{8, 12, 11, 48}})
    for (bool training : {true, false})
      for (bool residual : {false, true})
        for (bool relu : {false, true}) {
          const std::int64_t channels = x[-1];
          std::string name = std::to_string(channels) + (training ? " training" : " eval") +
                             (residual ? " residual" : "") + (relu ? " relu" : "");
          Case c{.name = name,
                 .y = norm({.training = training, .relu = relu}, test::numbers(name + " mean", channels),
                           test::numbers(name + " variance", channels, 0.5, 2)),
                 .inputs = {{.shape = x, .low = -1, .high = 2},
                            {.shape = {channels}, .low = 0.5, .high = 1.5, .parameter = true},
                            {.shape = {channels}, .parameter = true}}};
          if (residual) c.inputs.push_back({.shape = x});
          row.cases.push_back(c);
        }
  return row;
}

Row group_norm_row() {
  Row row{"group_norm", {}};
  auto y = [](int groups) { return Build([groups](Inputs v) { return group_norm(v[0], groups, v[1], v[2]); }); };
  for (const std::string& name : dumps().cases()) {
    const nlohmann::json& a = dumps().attributes(name);
    if (a["op"] == "group_norm") row.cases.push_back(dumped(name, {"x", "*weight", "*bias"}, y(a["groups"])));
  }
  auto add = [&](const char* name, const Shape& x, int groups) {
    const std::int64_t channels = x[-1];
    row.cases.push_back({.name = name,
                         .y = y(groups),
                         .inputs = {{.shape = x, .low = -1, .high = 2},
                                    {.shape = {channels}, .low = 0.5, .high = 1.5, .parameter = true},
                                    {.shape = {channels}, .parameter = true}}});
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
  for (const std::string& name : dumps().cases())
    if (dumps().attributes(name)["op"] == "layer_norm") row.cases.push_back(dumped(name, {"x", "*weight", "*bias"}, y));
  auto add = [&](const char* name, const Shape& x, const Shape& last) {
    row.cases.push_back({.name = name,
                         .y = y,
                         .inputs = {{.shape = x, .low = -1, .high = 2},
                                    {.shape = last, .low = 0.5, .high = 1.5, .parameter = true},
                                    {.shape = last, .parameter = true}}});
  };
  add("vector", {40}, {40});
  add("many", {130, 301}, {301});
  add("pictures", {9, 12, 11, 32}, {12, 11, 32});
  return row;
}

Tensor labels_of(Backend& backend, const std::vector<double>& labels) {
  return Tensor::of(backend, {std::int64_t(labels.size())}, labels, DType::i32);
}

Row cross_entropy_row() {
  Row row{"cross_entropy", {}};
  auto loss = [](double smoothing, std::vector<double> labels) {
    return Build([=](Inputs v) { return cross_entropy(v[0], labels_of(v[0].backend(), labels), smoothing); });
  };
  for (const char* name : {"cross_entropy", "cross_entropy_smoothing"})
    row.cases.push_back(
        dumped(name, {"x"},
               loss(dumps().attributes(name)["label_smoothing"], dumps().at(std::string(name) + "/labels").values)));
  for (double smoothing : {0.0, 0.2}) {
    std::string name = smoothing > 0 ? " smoothing" : "";
    row.cases.push_back(
        {.name = "one row" + name, .y = loss(smoothing, {2}), .inputs = {{.shape = {1, 3}, .low = -3, .high = 3}}});
    row.cases.push_back({.name = "many" + name,
                         .y = loss(smoothing, test::numbers("labels", 128, 0, 99, 1)),
                         .inputs = {{.shape = {128, 100}, .low = -9, .high = 9}}});
  }
  return row;
}

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<Row> table() {
  std::vector<Row> rows;
  auto row = [&](Row r) { rows.push_back(std::move(r)); };
  using F = double (*)(double);
  auto one = [&](const char* op, Variable (*f)(const Variable&), F oracle) { row(unary(op, -4, 4, f, oracle)); };
  auto positive_one = [&](const char* op, Variable (*f)(const Variable&), F oracle) {
    row(unary(op, 0.1, 4, f, oracle));
  };
  using X = const Variable&;

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
      "power", 0.1, 4, [](X x) { return power(x, 2.5); }, [](double x) { return x * x * std::sqrt(x); }));

  // Finite differences see through a narrow type when each step is a number of it: steps of 2^-10 between multiples of
  // 2^-6.
  auto through = [](DType narrow) {
    return Build([narrow](Inputs v) { return cast(cast(v[0], narrow), v[0].dtype()); });
  };
  row({"cast",
       {{.name = "through f32",
         .y = through(DType::f32),
         .inputs = {{.shape = {5, 7}, .step = 0x1p-6}},
         .step = 0x1p-10},
        {.name = "through bf16", .y = through(DType::bf16), .inputs = {{.shape = {5, 7}, .step = 0x1p-6}}, .step = 0},
        {.name = "many", .y = through(DType::bf16), .inputs = {{.shape = {many}, .step = 0x1p-6}}, .step = 0}}});

  const Input any{.shape = {}, .low = -2, .high = 2}, positive{.shape = {}, .low = 0.5, .high = 2};
  row(binary("add", add, any, any, 0, [](double a, double b) { return a + b; }));
  row(binary("sub", sub, any, any, 0, [](double a, double b) { return a - b; }));
  row(binary("mul", mul, any, any, 0, [](double a, double b) { return a * b; }));
  row(binary("div", div, any, positive, 0, [](double a, double b) { return a / b; }));
  row(binary("maximum", maximum, any, any, 0.5, [](double a, double b) { return std::fmax(a, b); }));
  row(binary("minimum", minimum, any, any, 0.5, [](double a, double b) { return std::fmin(a, b); }));
  row(binary("pow", pow, positive, any, 0, [](double a, double b) { return std::exp(b * std::log(a)); }));

  row(reduce("sum", sum));
  row(reduce("mean", mean));
  row(reduce("max", max, 0.25));

  auto reshaped = [](const Shape& shape) { return Build([shape](Inputs v) { return reshape(v[0], shape); }); };
  row({"reshape",
       {{.name = "same", .y = reshaped({6, 4}), .inputs = {{.shape = {2, 3, 4}}}},
        {.name = "inferred", .y = reshaped({4, 0, 3}), .inputs = {{.shape = {2, 3, 4}}}}}});
  Build flat = [](Inputs v) { return flatten(v[0]); };
  row({"flatten",
       {{.name = "pictures", .y = flat, .inputs = {{.shape = {2, 3, 4, 2}}}},
        {.name = "vector", .y = flat, .inputs = {{.shape = {5}}}}}});
  row({"transpose",
       {permutation<1, 0>("permute_10"), permutation<0, 2, 1>("permute_021"), permutation<2, 0, 1>("permute_201"),
        permutation<0, 3, 1, 2>("permute_0312"), permutation<-1, 0>("negative", {3, 5}),
        permutation<2, 1, 0>("many", {50, 30, 41})}});

  Row slices{"slice", {}};
  for (const char* name : {"slice", "slice_step"})  // PyTorch's cuts three axes at once
    slices.cases.push_back(dumped(name, {"x"}, [a = dumps().attributes(name)](Inputs v) {
      Variable y = v[0];
      for (int axis = 0; axis < 3; axis++) y = slice(y, axis, a["start"][axis], a["stop"][axis], a["step"][axis]);
      return y;
    }));
  slices.cases.push_back(
      {.name = "rows", .y = [](Inputs v) { return slice(v[0], 0, 1, 3); }, .inputs = {{.shape = {5, 4}}}});
  slices.cases.push_back(
      {.name = "last axis", .y = [](Inputs v) { return slice(v[0], -1, 1, 6, 2); }, .inputs = {{.shape = {2, 3, 7}}}});
  slices.cases.push_back({.name = "two of one",
                          .y = [](Inputs v) { return mul(slice(v[0], 0, 0, 3), slice(v[0], 0, 2, 5)); },
                          .inputs = {{.shape = {5, 4}}}});
  slices.cases.push_back(
      {.name = "many", .y = [](Inputs v) { return slice(v[0], 1, 0, 200, 2); }, .inputs = {{.shape = {130, 401}}}});
  row(std::move(slices));

  Row concats{"concat", {}};
  for (int axis = 0; axis < 3; axis++)
    concats.cases.push_back(
        dumped("concat_" + std::to_string(axis), {"x0", "x1", "x2"}, [axis](Inputs v) { return concat(v, axis); }));
  Build twice = [](Inputs v) { return concat(std::vector{v[0], v[1], v[0]}, -1); };
  concats.cases.push_back({.name = "twice the same", .y = twice, .inputs = {{.shape = {2, 3}}, {.shape = {2, 1}}}});
  concats.cases.push_back({.name = "six",
                           .y = [](Inputs v) { return concat(v, 0); },
                           .inputs = std::vector<Input>(6, Input{.shape = {2, 3}})});
  row(std::move(concats));

  auto shortcut = [](int stride, int widen) {
    return Build([=](Inputs v) { return pad_shortcut(v[0], stride, widen); });
  };
  row({"pad_shortcut",
       {{.name = "halves", .y = shortcut(2, 2), .inputs = {{.shape = {2, 4, 6, 3}}}},
        {.name = "odd", .y = shortcut(2, 1), .inputs = {{.shape = {2, 5, 7, 2}}}},
        {.name = "wide only", .y = shortcut(1, 3), .inputs = {{.shape = {1, 3, 2, 4}}}},
        {.name = "thirds", .y = shortcut(3, 0), .inputs = {{.shape = {1, 7, 8, 2}}}},
        {.name = "many", .y = shortcut(2, 8), .inputs = {{.shape = {4, 32, 31, 16}}}}}});

  Row pads{"pad", {}};
  for (const char* name : {"pad_zero", "pad_value"})
    pads.cases.push_back(dumped(name, {"x"}, [a = dumps().attributes(name)](Inputs v) {
      Variable y = v[0];
      for (int axis = 0; axis < 3; axis++) y = pad(y, axis, a["before"][axis], a["after"][axis], a["value"]);
      return y;
    }));
  pads.cases.push_back(
      {.name = "channels", .y = [](Inputs v) { return pad(v[0], -1, 8, 8); }, .inputs = {{.shape = {2, 3, 3, 4}}}});
  row(std::move(pads));

  Build product = [](Inputs v) { return matmul(v[0], v[1]); };
  row({"matmul",
       {dumped("matmul_2d", {"a", "b"}, product),
        dumped("matmul_batched", {"a", "b"}, product),
        {.name = "large", .y = product, .inputs = {{.shape = {65, 130}}, {.shape = {130, 71}}}},
        {.name = "large batch", .y = product, .inputs = {{.shape = {3, 33, 40}}, {.shape = {3, 40, 17}}}}}});
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
  row({"global_average_pool",
       {dumped("global_avg_pool", {"x"}, global),
        {.name = "many", .y = global, .inputs = {{.shape = {4, 14, 13, 70}}}}}});
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
       {{.name = "rows", .y = drop(0.4), .inputs = {{.shape = {8, 5, 3}}}},
        {.name = "vector", .y = drop(0.4), .inputs = {{.shape = {9}}}},
        {.name = "never", .y = drop(0), .inputs = {{.shape = {3, 4}}}},
        {.name = "many", .y = drop(0.1), .inputs = {{.shape = {130, 401}}}}}});

  Build soft = [](Inputs v) { return log_softmax(v[0]); };
  row({"log_softmax",
       {dumped("log_softmax", {"x"}, soft),
        {.name = "three axes", .y = soft, .inputs = {{.shape = {2, 3, 4}, .low = -5, .high = 5}}},
        {.name = "many", .y = soft, .inputs = {{.shape = {64, 1000}, .low = -9, .high = 9}}}}});
  row(cross_entropy_row());
  return rows;
}

// ---- running a case -------------------------------------------------------------------------------------------------
struct Result {
  std::vector<double> y;
  std::vector<std::vector<double>> gradients;  // empty where none was asked for
};

enum class Form {
  once,
  twice,   // backward() twice over one tape: the leaves' gradients add up
  shared,  // two copies of the operation behind one intermediate node per input: the engine adds
};

DType type_of(const Input& in, DType dtype) { return in.parameter && dtype == DType::bf16 ? DType::f32 : dtype; }

// y, and the gradients of Σ dy·y with respect to all inputs, or to one of them.
Result evaluate(const Case& c, Backend& backend, DType dtype, const std::vector<std::vector<double>>& values,
                const std::vector<double>& dy, Form form = Form::once, int only = -1) {
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
  for (const Variable& leaf : leaves)
    r.gradients.push_back(leaf.grad().defined() ? leaf.grad().values() : std::vector<double>());
  return r;
}

std::vector<double> times(double factor, std::vector<double> v) {
  for (double& x : v) x *= factor;
  return v;
}

// The oracle at every element of y, with broadcasting written out once more.
std::vector<double> by_oracle(const Case& c, const std::vector<std::vector<double>>& values, const Shape& y) {
  std::vector<double> out(static_cast<std::size_t>(y.elements()));
  for (std::size_t e = 0; e < out.size(); e++) {
    double argument[2] = {0, 0};
    for (std::size_t input = 0; input < values.size(); input++) {
      const Shape& s = c.inputs[input].shape;
      std::int64_t rest = std::int64_t(e), at = 0, step = 1;
      for (int axis = y.rank() - 1, k = s.rank() - 1; axis >= 0; axis--, k--) {
        if (k >= 0) {
          at += s[k] == 1 ? 0 : rest % y[axis] * step;
          step *= s[k];
        }
        rest /= y[axis];
      }
      argument[input] = values[input][at];
    }
    out[e] = c.oracle(argument[0], argument[1]);
  }
  return out;
}

class OpTable : public testing::Test {
 protected:
  static void TearDownTestSuite() {
    if (!printed_.empty()) std::printf("%s", printed_.c_str());
  }
  static std::string printed_;  // shown after the suite, whether it passed or not
};
std::string OpTable::printed_;

TEST_F(OpTable, EveryDeclaredOperationHasARow) {
  std::set<std::string> declared, present;
  const std::string header = test::contents(test::source("autograd/ops.h"));
  const std::regex declaration(R"(\nVariable (\w+)\()");
  for (auto i = std::sregex_iterator(header.begin(), header.end(), declaration); i != std::sregex_iterator(); ++i)
    declared.insert((*i)[1]);
  EXPECT_GT(declared.size(), 40u) << "ops.h is no longer read as it is written";
  for (const Row& row : table()) {
    EXPECT_TRUE(present.insert(row.op).second) << row.op << " has two rows";
    EXPECT_TRUE(declared.count(row.op)) << "the row " << row.op << " names no operation of ops.h";
    EXPECT_FALSE(row.cases.empty()) << row.op;
  }
  for (const std::string& op : declared) EXPECT_TRUE(present.count(op)) << op << " of ops.h has no row in the table";
}

// Every dump belongs to a case, or PyTorch's word goes unheard.
TEST_F(OpTable, EveryDumpIsUsed) {
  std::set<std::string> used;
  for (const Row& row : table())
    for (const Case& c : row.cases) used.insert(c.dump);
  for (const std::string& name : dumps().cases())
    EXPECT_TRUE(used.count(name)) << name << " of ops.safetensors is in no row";
}

TEST_F(OpTable, GradientsPyTorchAndEveryBackend) {
  struct Column {
    std::unique_ptr<Backend> backend;
    DType dtype;
  };
  std::vector<Column> columns;
  for (const test::BackendKind& kind : test::backends())
    for (DType dtype : {DType::f32, DType::bf16}) columns.push_back({kind.make(), dtype});
  std::unique_ptr<Backend> exact = reference_backend(2);

  std::ostringstream out;
  out << "  " << std::left << std::setw(20) << "operation" << std::setw(6) << "cases" << std::setw(19) << "differences"
      << std::setw(9) << "PyTorch";
  for (const Column& column : columns) out << std::setw(15) << column.backend->name() + " " + name_of(column.dtype);
  out << "\n" << std::setprecision(1) << std::scientific;

  for (const Row& row : table()) {
    double differences = 0, pytorch = 0;
    std::int64_t compared = 0, skipped = 0;
    bool dump = false;
    std::vector<double> worst(columns.size(), 0.0);

    for (const Case& c : row.cases) {
      SCOPED_TRACE(row.op + ": " + c.name);
      std::vector<std::vector<double>> values;
      std::vector<Tensor> tensors;
      std::int64_t elements = 0;
      for (std::size_t i = 0; i < c.inputs.size(); i++) {
        values.push_back(values_of(row.op, c, i));
        tensors.push_back(Tensor::of(*exact, c.inputs[i].shape, values[i], DType::f64));
        elements += c.inputs[i].shape.elements();
      }
      auto undifferentiated = [&](Backend& backend, DType dtype, const std::vector<std::vector<double>>& v) {
        NoGrad off;
        std::vector<Variable> inputs;
        for (std::size_t i = 0; i < v.size(); i++)
          inputs.emplace_back(Tensor::of(backend, c.inputs[i].shape, v[i], type_of(c.inputs[i], dtype)));
        return c.y(inputs);
      };
      const Variable y = undifferentiated(*exact, DType::f64, values);

      if (c.oracle) {
        EXPECT_TRUE(close("y", y.value().values(), by_oracle(c, values, y.shape()), 1e-13)) << "beside <cmath>";
      }

      if (c.step > 0 && elements <= 1200) {
        GradientReport report = check_gradient(c.y, tensors, {.step = c.step});
        EXPECT_TRUE(report.passed) << report.text;
        differences = std::max(differences, report.worst);
        compared += report.compared;
        skipped += report.skipped;
      }

      if (!c.dump.empty()) {
        dump = true;
        auto want = [&](const std::string& name) { return dumps().at(c.dump + "/" + name).values; };
        EXPECT_EQ(y.shape(), dumps().at(c.dump + "/y").shape);
        Result r = evaluate(c, *exact, DType::f64, values, want("dy"));
        auto check = [&](const std::string& name, const std::vector<double>& got) {
          EXPECT_TRUE(close(name, got, want(name), 2e-7)) << "beside PyTorch";  // stored in f32
          pytorch = std::max(pytorch, test::difference(got, want(name)).error);
        };
        check("y", r.y);
        for (std::size_t i = 0; i < c.names.size(); i++) check("d" + c.names[i], r.gradients[i]);
      }

      for (std::size_t k = 0; k < columns.size(); k++) {
        Backend& backend = *columns[k].backend;
        const DType dtype = columns[k].dtype;
        if (!backend.supports(dtype)) continue;
        SCOPED_TRACE(backend.name() + " " + name_of(dtype));
        try {
          std::vector<std::vector<double>>
              rounded;  // parameters too: beside bf16 pictures some kernels multiply in bf16
          for (std::size_t i = 0; i < values.size(); i++)
            rounded.push_back(Tensor::of(backend, c.inputs[i].shape, values[i], dtype).values());
          const Variable plain = undifferentiated(backend, dtype, rounded);
          const std::vector<double> drawn = c.dump.empty()
                                                ? test::numbers(row.op + "/" + c.name + "/dy", plain.value().elements())
                                                : dumps().at(c.dump + "/dy").values;
          const std::vector<double> dy = Tensor::of(backend, plain.shape(), drawn, plain.dtype()).values();
          const Result truth = evaluate(c, *exact, DType::f64, rounded, dy);
          const double tolerance = dtype == DType::bf16 ? row.bf16 : row.f32;
          auto check = [&](const std::string& name, const std::vector<double>& got, const std::vector<double>& want) {
            EXPECT_TRUE(close(name, got, want, tolerance));
            worst[k] = std::max(worst[k], test::difference(got, want).error);
          };
          check("y without a tape", plain.value().values(), truth.y);
          for (Form form : {Form::once, Form::twice, Form::shared}) {
            const Result r = evaluate(c, backend, dtype, rounded, dy, form);
            check("y", r.y, truth.y);
            const char* names[] = {"gradient ", "gradient of two passes ", "gradient of two uses "};
            for (std::size_t i = 0; i < values.size(); i++)
              check(names[int(form)] + std::to_string(i), r.gradients[i],
                    times(form == Form::once ? 1 : 2, truth.gradients[i]));
          }
          for (std::size_t i = 0; values.size() > 1 && dtype == DType::f32 && i < values.size(); i++)
            check("gradient, of no other input, " + std::to_string(i),
                  evaluate(c, backend, dtype, rounded, dy, Form::once, int(i)).gradients[i], truth.gradients[i]);
        } catch (const std::exception& e) {
          ADD_FAILURE() << e.what();
          worst[k] = INFINITY;
        }
      }
    }
    EXPECT_GT(compared, 0) << row.op << ": no gradient was compared with finite differences";

    std::ostringstream cell;
    cell << std::setprecision(1) << std::scientific << differences << " (" << skipped << " kinks)";
    out << "  " << std::setw(20) << row.op << std::setw(6) << row.cases.size() << std::setw(19) << cell.str()
        << std::setw(9);
    if (dump)
      out << pytorch;
    else
      out << "-";
    for (std::size_t k = 0; k < columns.size(); k++) {
      cell.str("");
      const bool there = columns[k].backend->supports(columns[k].dtype);
      if (there)
        cell << (worst[k] <= (columns[k].dtype == DType::bf16 ? row.bf16 : row.f32) ? "ok " : "FAILED ") << worst[k];
      else
        cell << "unsupported";
      out << std::setw(15) << cell.str();
    }
    out << "\n";
  }
  printed_ = out.str();
}

// ---- what a table of functions does not show ------------------------------------------------------------------------
TEST_F(OpTable, ElementwiseOperationsLetNaNThrough) {
  for (const test::BackendKind& kind : test::backends()) {
    std::unique_ptr<Backend> backend = kind.make();
    for (const Row& row : table()) {
      if (!row.cases[0].oracle) continue;
      for (std::size_t nan = 0; nan < row.cases[0].inputs.size(); nan++) {
        std::vector<Variable> inputs;
        for (std::size_t i = 0; i < row.cases[0].inputs.size(); i++)
          inputs.emplace_back(Tensor::full(*backend, {70}, i == nan ? NAN : 2.0));
        for (double y : row.cases[0].y(inputs).value().values())
          ASSERT_TRUE(std::isnan(y)) << row.op << " on " << kind.name << " hides a NaN in input " << nan;
      }
    }
  }
}

// Finite differences cannot see a tie, and the other backends share the code.
TEST_F(OpTable, TiesShareTheGradient) {
  for (const test::BackendKind& kind : test::backends()) {
    std::unique_ptr<Backend> backend = kind.make();
    auto gradient = [&](const Shape& shape, std::initializer_list<double> values, auto f) {
      Variable x(Tensor::of(*backend, shape, values), true);
      Variable y = f(x);
      sum(mul(y, Variable(Tensor::full(*backend, y.shape(), 6)))).backward();
      return x.grad().values();
    };
    const std::initializer_list<double> ties{2, 5, 5, 5, 1, 4, 0, 4};
    EXPECT_EQ(gradient({2, 4}, ties, [](const Variable& x) { return max(x, {1}); }),
              (std::vector<double>{0, 2, 2, 2, 0, 3, 0, 3}));
    EXPECT_EQ(gradient({2, 4}, ties, [](const Variable& x) { return max(x); }),
              (std::vector<double>{0, 2, 2, 2, 0, 0, 0, 0}));
    EXPECT_EQ(gradient({3}, {1, 2, 3},
                       [&](const Variable& x) { return maximum(x, Variable(Tensor::full(*backend, {3}, 2))); }),
              (std::vector<double>{0, 3, 6}));
    EXPECT_EQ(gradient({3}, {1, 2, 3},
                       [&](const Variable& x) { return minimum(Variable(Tensor::full(*backend, {3}, 2)), x); }),
              (std::vector<double>{6, 3, 0}));
    EXPECT_EQ(gradient({1, 2, 4, 1}, ties, [](const Variable& x) { return max_pool2d(x); }),
              (std::vector<double>{0, 6, 6, 0, 0, 0, 0, 0}))
        << "pooling: the first of the window, row by row, takes it all";
    EXPECT_EQ(gradient({1, 2, 2, 1}, {0, -1, -2, -1}, [](const Variable& x) { return max_pool2d(x, {.relu = true}); }),
              (std::vector<double>{0, 0, 0, 0}))
        << "the ReLU of zero";
  }
}

TEST_F(OpTable, PadShortcutIsTwoSlicesAndAPad) {
  std::unique_ptr<Backend> backend = reference_backend();
  Variable x(Tensor::of(*backend, {2, 5, 7, 3}, test::numbers("shortcut", 210)));
  for (int stride : {1, 2, 3})
    EXPECT_EQ(pad_shortcut(x, stride, 2).value().values(),
              pad(slice(slice(x, 1, 0, 5, stride), 2, 0, 7, stride), 3, 2, 2).value().values());
  EXPECT_TRUE(refused([&] { pad_shortcut(x, 0, 2); }, {"pad_shortcut"}));
}

TEST_F(OpTable, BatchNormMovesItsRunningStatistics) {
  for (const std::string& name : dumps().cases()) {
    const nlohmann::json& a = dumps().attributes(name);
    if (a["op"] != "batch_norm") continue;
    const bool training = a["training"] == 1;
    for (const test::BackendKind& kind : test::backends())
      for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        std::unique_ptr<Backend> backend = kind.make();
        if (!backend->supports(dtype)) continue;
        SCOPED_TRACE(name + " " + kind.name + " " + name_of(dtype));
        const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
        auto tensor = [&](const char* which, DType type) { return dumps().at(name + "/" + which).on(*backend, type); };
        Tensor mean = tensor("running_mean", wide), variance = tensor("running_var", wide);
        Variable residual = dumps().has(name + "/residual") ? Variable(tensor("residual", dtype)) : Variable();
        batch_norm(Variable(tensor("x", dtype)), Variable(tensor("weight", wide)), Variable(tensor("bias", wide)), mean,
                   variance,
                   {.epsilon = a["eps"], .momentum = a["momentum"], .training = training, .relu = a["relu"] == 1},
                   residual);
        auto after = [&](const std::string& which) {
          return dumps().at(name + "/" + which + (training ? "_after" : "")).values;
        };
        const double tolerance = dtype == DType::f64 ? 2e-7 : dtype == DType::f32 ? 1e-6 : 0x1p-9;
        EXPECT_TRUE(close("running_mean", mean.values(), after("running_mean"), tolerance));
        EXPECT_TRUE(close("running_var", variance.values(), after("running_var"), tolerance));
      }
  }
}

TEST_F(OpTable, CrossEntropyCountsWhatIsCorrect) {
  for (const test::BackendKind& kind : test::backends())
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::unique_ptr<Backend> backend = kind.make();
      if (!backend->supports(dtype)) continue;
      Variable logits(Tensor::of(*backend, {4, 3}, {9, 1, 2, 0, -1, 5, 1, 3, 2, 4, 8, 7}, dtype));
      Tensor correct = Tensor::full(*backend, {1}, 10, DType::i32);
      cross_entropy(logits, labels_of(*backend, {0, 2, 0, 1}), 0, &correct);
      EXPECT_EQ(correct.item(), 13) << kind.name << " " << name_of(dtype);
      cross_entropy(logits, labels_of(*backend, {1, 1, 1, 2}), 0.1, &correct);
      EXPECT_EQ(correct.item(), 14) << kind.name << " " << name_of(dtype);
    }
}

TEST_F(OpTable, DropoutDrawsFromCountersOnly) {
  std::vector<std::vector<double>> masks;  // of every backend and type: they agree
  for (const test::BackendKind& kind : test::backends())
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::unique_ptr<Backend> owner = kind.make();
      Backend& backend = *owner;
      if (!backend.supports(dtype)) continue;
      SCOPED_TRACE(kind.name + " " + name_of(dtype));
      constexpr std::int64_t rows = 8, length = 30;
      auto mask = [&](std::uint64_t seed, std::uint32_t epoch, std::uint32_t layer,
                      const std::vector<double>& samples) {
        StepState state;
        state.seed = seed;
        state.epoch = epoch;
        Mode before = mode();
        mode().step_state = Tensor(backend, {std::int64_t(sizeof state)}, DType::u8);
        backend.upload(mode().step_state.raw_write(), &state, sizeof state);
        mode().samples = labels_of(backend, samples);
        std::vector<double> y =
            dropout(Variable(Tensor::full(backend, {rows, length}, 1, dtype)), 0.5, layer).value().values();
        mode() = before;
        return y;
      };
      const std::vector<double> order{5, 9, 2, 70'000, 1, 0, 33, 8}, turned(order.rbegin(), order.rend());
      const std::vector<double> first = mask(1, 2, 3, order);
      masks.push_back(first);
      EXPECT_EQ(first, mask(1, 2, 3, order)) << "the same counters give the same mask";
      EXPECT_NE(first, mask(2, 2, 3, order)) << "the seed";
      EXPECT_NE(first, mask(1, 3, 3, order)) << "the epoch";
      EXPECT_NE(first, mask(1, 2, 4, order)) << "the layer";
      const std::vector<double> moved = mask(1, 2, 3, turned);
      for (std::int64_t row = 0; row < rows; row++)
        EXPECT_TRUE(std::equal(first.begin() + row * length, first.begin() + (row + 1) * length,
                               moved.begin() + (rows - 1 - row) * length))
            << "picture " << order[row] << " loses other elements elsewhere in the batch";
    }
  for (const auto& m : masks) EXPECT_EQ(m, masks[0]);
}

TEST_F(OpTable, DropoutKeepsTheMeanAndMasksTheGradient) {
  for (const test::BackendKind& kind : test::backends()) {
    std::unique_ptr<Backend> backend = kind.make();
    for (double p : {0.1, 0.5, 0.9}) {
      mode().draws = 0;
      constexpr std::int64_t n = 200'000;
      Variable x(Tensor::full(*backend, {100, n / 100}, 1), true);
      Variable y = dropout(x, p), again = dropout(x, p);
      sum(y).backward();
      const std::vector<double> values = y.value().values();
      EXPECT_EQ(values, x.grad().values()) << "the gradient passes where the value did, with the same factor";
      EXPECT_NE(values, again.value().values()) << "each call draws anew where no loop counts";
      double mean = 0;
      for (double v : values) {
        mean += v / n;
        ASSERT_TRUE(v == 0 || std::abs(v - 1 / (1 - p)) < 1e-6) << v;
      }
      EXPECT_NEAR(mean, 1, 5 * std::sqrt(p / (1 - p) / n)) << "p = " << p << ", five standard errors";
    }
  }
}

TEST_F(OpTable, ArgumentsThatDoNotFitAreRefused) {
  std::unique_ptr<Backend> backend = reference_backend();
  auto x = [&](const Shape& s, DType t = DType::f32) { return Variable(Tensor::zeros(*backend, s, t)); };
  EXPECT_TRUE(refused([&] { add(x({2, 3}), x({2, 4})); }, {"add", "[2,3]", "[2,4]"}));
  EXPECT_TRUE(refused([&] { mul(x({2}), x({2}, DType::bf16)); }, {"mul", "f32 and bf16"}));
  EXPECT_TRUE(refused([&] { add(x({2, 1, 2, 1}), x({1, 2, 1, 2})); }, {"add", "three times"}));
  EXPECT_TRUE(refused([&] { relu(x({2}, DType::i32)); }, {"relu", "i32"}));
  EXPECT_TRUE(refused([&] { clamp(x({2}), 1, 0); }, {"clamp"}));
  EXPECT_TRUE(refused([&] { sum(x({2, 3}), {2}); }, {"sum", "axis 2", "[2,3]"}));
  EXPECT_TRUE(refused([&] { sum(x({2, 3}), {1, -1}); }, {"sum", "twice"}));
  EXPECT_TRUE(refused([&] { max(x({0, 3}), {0}); }, {"max", "[0,3]"}));
  EXPECT_TRUE(refused([&] { reshape(x({2, 3}), {4, 2}); }, {"[2,3]", "[4,2]"}));
  EXPECT_TRUE(refused([&] { transpose(x({2, 3}), {0, 0}); }, {"transpose", "twice"}));
  EXPECT_TRUE(refused([&] { slice(x({2, 3}), 1, 2, 4); }, {"slice", "[2,3]"}));
  EXPECT_TRUE(refused([&] { concat(std::vector{x({2, 3}), x({3, 3})}, 1); }, {"concat", "[2,3]", "[3,3]"}));
  EXPECT_TRUE(refused([&] { pad(x({2}), 0, -1, 0); }, {"pad"}));
  EXPECT_TRUE(refused([&] { matmul(x({2, 3}), x({4, 2})); }, {"matmul", "[2,3]", "[4,2]"}));
  EXPECT_TRUE(refused([&] { linear(x({2, 3}), x({5, 4})); }, {"linear", "[2,3]", "[5,4]"}));
  EXPECT_TRUE(refused([&] { linear(x({2, 3, 1}), x({5, 3})); }, {"linear", "flatten"}));
  EXPECT_TRUE(refused([&] { conv2d(x({1, 5, 5, 3}), x({4, 3, 3, 2}), {}); }, {"conv2d", "3 channels"}));
  EXPECT_TRUE(refused([&] { conv2d(x({1, 2, 2, 3}), x({4, 3, 3, 3}), {}); }, {"conv2d", "does not fit"}));
  EXPECT_TRUE(refused([&] { conv2d(x({1, 5, 5, 4}), x({3, 3, 3, 2}), {}, {.groups = 2}); }, {"conv2d", "groups"}));
  EXPECT_TRUE(refused([&] { conv2d(x({1, 5, 5, 3}), x({4, 3, 3, 3}), x({5})); }, {"conv2d", "bias"}));
  EXPECT_TRUE(refused([&] { max_pool2d(x({1, 3, 3, 1}), {.window = 4}); }, {"max_pool2d", "does not fit"}));
  EXPECT_TRUE(refused([&] { max_pool2d(x({1, 9, 9, 1}), {.window = 2, .padding = 2}); }, {"max_pool2d", "padding"}));
  EXPECT_TRUE(refused([&] { dropout(x({3}), 1); }, {"dropout"}));
  EXPECT_TRUE(refused(
      [&] {
        cross_entropy(x({2, 3}), x({3}, DType::i32).value());
      },
      {"cross_entropy", "[2,3]", "[3]"}));
  Tensor mean = Tensor::zeros(*backend, {3}), variance = Tensor::zeros(*backend, {3});
  EXPECT_TRUE(refused([&] { batch_norm(x({1, 3}), x({3}), x({3}), mean, variance); }, {"batch_norm", "variance"}));
  EXPECT_TRUE(refused([&] { batch_norm(x({4, 2}), x({3}), x({3}), mean, variance); }, {"batch_norm", "2 channels"}));
  EXPECT_TRUE(refused([&] { group_norm(x({4, 6}), 4, x({6}), x({6})); }, {"group_norm", "6 channels", "4 groups"}));
  EXPECT_TRUE(refused([&] { group_norm(x({4, 6}), 0, x({6}), x({6})); }, {"group_norm", "0 groups"}));
  EXPECT_TRUE(refused([&] { group_norm(x({4, 6}), 2, x({3}), x({6})); }, {"group_norm", "[3]"}));
  EXPECT_TRUE(refused([&] { layer_norm(x({4, 6}), x({4}), x({4})); }, {"layer_norm", "[4]", "[4,6]"}));
  EXPECT_TRUE(refused([&] { layer_norm(x({4, 6}), x({6}), x({4})); }, {"layer_norm", "[4]"}));
}

}  // namespace
