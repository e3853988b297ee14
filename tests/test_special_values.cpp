// NaN, infinities, zeros of both signs, denormals, and numbers whose squares overflow, through every operation. A NaN
// stays visible, forward and backward; what PyTorch makes of the others, we make. The numbers are specials.safetensors.
#include "tests/op_table.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

const Dumps& dumps() { return Dumps::of("specials"); }
const Numbers& values(std::string name) { return dumps().at(name).values; }

// bf16 has 8 bits, and AVX-512's conversion takes its denormals for zero: it is compared where every number that goes
// in is one that it holds well.
bool plain(double v) {
  return v == 0 || !std::isfinite(v) || (float(bf16(float(v))) == float(v) && std::abs(v) > 1e-3);
}

struct Tolerance {
  double relative, absolute = 3e-45;  // two steps of the denormals
  bool may_be_nan = false;            // where PyTorch's is none
};
// A NaN is one, an infinity the same infinity, and a number within the tolerance.
testing::AssertionResult agrees(double result, double want, const Tolerance& t) {
  const double got = float(result);  // the dumps are f32, beside an f64 too
  if (got == want || (std::isnan(got) && (std::isnan(want) || t.may_be_nan))) return testing::AssertionSuccess();
  if (std::isfinite(want) && std::abs(got - want) <= t.relative * std::abs(want) + t.absolute)
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << "got " << got << ", PyTorch has " << want;
}

std::vector<Column> columns() { return test::columns({DType::f32, DType::bf16, DType::f64}); }
// v n times over; or each number n times
Numbers times(const Numbers& v, std::size_t n, bool each) {
  Numbers out;
  for (std::size_t i = 0; i < v.size() * n; i++) out.push_back(v[each ? i / n : i % v.size()]);
  return out;
}
double relative(DType dtype) { return dtype == DType::bf16 ? 0x1p-6 : 2e-6; }

TEST(SpecialValues, OneInputAsPyTorch) {
  const Numbers &x = values("unary/x"), &dy = values("unary/dy");
  const Numbers xs = times(x, dy.size(), false), dys = times(dy, x.size(), true);
  const Shape shape{std::int64_t(dy.size()), std::int64_t(x.size())};
  const std::vector<Row> rows = table();
  for (const Row& row : rows) {
    if (!row.cases[0].oracle || row.cases[0].inputs.size() != 1) continue;
    const Case c{.name = "specials", .y = row.cases[0].y, .inputs = {{.shape = shape}}};
    for (const Column& column : columns()) {
      const Result r = evaluate(c, *column.backend, column.dtype, {xs}, dys);
      for (std::size_t i = 0; i < xs.size(); i++) {
        if (column.dtype == DType::bf16 && !(plain(xs[i]) && plain(dys[i]))) continue;
        SCOPED_TRACE(row.op + "(" + std::to_string(xs[i]) + "), dy " + std::to_string(dys[i]) + ", " + column.name());
        const Tolerance t{relative(column.dtype), row.op == "elu" ? 1e-16 : 3e-45};  // PyTorch's elu is exp(x) − 1
        const double y = values(row.op + "/y")[i % x.size()];
        EXPECT_TRUE(agrees(r.y[i], y, t));
        if (y == 0 && std::set<std::string>{"abs", "tanh", "sin", "sqrt", "neg"}.count(row.op)) {
          EXPECT_EQ(std::signbit(r.y[i]), std::signbit(y)) << "the sign of zero";
        }
        // A gradient may be NaN where x is, and where y overflowed or vanished, of which PyTorch's double knows
        // nothing. 1 − y² and y·(1 − y) have lost the digits of a y that was rounded to 1.
        const bool lost = (std::isinf(r.y[i]) || r.y[i] == 0) && std::isfinite(xs[i]) && xs[i] != 0;
        const double rounded =
            (row.op == "tanh" || row.op == "sigmoid") && std::isfinite(dys[i]) ? t.relative * std::abs(dys[i]) : 0;
        EXPECT_TRUE(agrees(r.gradients[0][i], values(row.op + "/dx")[i],
                           {t.relative, t.absolute + rounded, std::isnan(xs[i]) || lost}))
            << "dx";
      }
    }
  }
}

TEST(SpecialValues, TwoInputsAsPyTorch) {
  const Numbers& a = values("binary/a");
  const std::vector<Numbers> ab{times(a, a.size(), true), times(a, a.size(), false)};
  const Shape shape{std::int64_t(a.size() * a.size())};
  const Numbers dy(a.size() * a.size(), 1.5);
  for (const Row& row : table()) {
    if (!row.cases[0].oracle || row.cases[0].inputs.size() != 2) continue;
    const Case c{.name = "specials", .y = row.cases[0].y, .inputs = {{.shape = shape}, {.shape = shape}}};
    for (const Column& column : columns()) {
      const Result r = evaluate(c, *column.backend, column.dtype, ab, dy);
      for (std::size_t i = 0; i < dy.size(); i++) {
        if (column.dtype == DType::bf16 && !(plain(ab[0][i]) && plain(ab[1][i]))) continue;
        SCOPED_TRACE(row.op + "(" + std::to_string(ab[0][i]) + ", " + std::to_string(ab[1][i]) + "), " + column.name());
        EXPECT_TRUE(agrees(r.y[i], values(row.op + "/y")[i], {relative(column.dtype)}));
        // b·a^(b − 1) of a denormal a is a product of which one factor overflows a float.
        if (row.op != "pow" || ab[0][i] == 0 || std::abs(ab[0][i]) > 1e-38 || column.dtype == DType::f64) {
          EXPECT_TRUE(agrees(r.gradients[0][i], values(row.op + "/da")[i], {relative(column.dtype)})) << "da";
        }
        EXPECT_TRUE(agrees(r.gradients[1][i], values(row.op + "/db")[i], {relative(column.dtype)})) << "db";
      }
    }
  }
}

// A layer of specials.safetensors, with its inputs' names there.
struct Layer {
  std::string name;
  std::vector<std::string> inputs;
  Build y;
};
std::vector<Layer> layers() {
  auto norm = [](bool training) {
    return Build([training](Inputs v) {
      Tensor mean = Tensor::zeros(v[0].backend(), {10}, v[1].dtype()),
             variance = Tensor::full(v[0].backend(), {10}, 1, v[1].dtype());
      const BatchNormOptions o{.training = training, .relu = true};
      if (v.size() > 3) return batch_norm(v[3], v[1], v[2], mean, variance, o, v[0]);
      return batch_norm(v[0], v[1], v[2], mean, variance, o);
    });
  };
  auto rows = [](Variable (*f)(const Variable&, Axes, bool)) {
    return Build([f](Inputs v) { return f(v[0], {1}, false); });
  };
  auto labels = [](Backend& b) { return labels_of(b, {1, 0, 3, 2, 4, 0}); };
  return {
      {"linear_relu", {"x", "w", "b"}, [](Inputs v) { return linear(v[0], v[1], v[2], true); }},
      {"matmul", {"x", "b"}, [](Inputs v) { return matmul(v[0], v[1]); }},
      {"conv2d_relu", {"x", "w", "b"}, [](Inputs v) { return conv2d(v[0], v[1], v[2], {.padding = 1, .relu = true}); }},
      {"max_pool", {"x"}, [](Inputs v) { return max_pool2d(v[0], {.kernel_size = 3, .stride = 2, .padding = 1}); }},
      {"max_pool_relu", {"x"}, [](Inputs v) { return max_pool2d(v[0], {.relu = true}); }},
      {"average_pool",
       {"x"},
       [](Inputs v) { return average_pool2d(v[0], {.kernel_size = 3, .stride = 2, .padding = 1}); }},
      {"global_average_pool", {"x"}, [](Inputs v) { return global_average_pool(v[0]); }},
      {"sum_rows", {"x"}, rows(sum)},
      {"mean_rows", {"x"}, rows(mean)},
      {"max_rows", {"x"}, rows(max)},
      {"softmax", {"x"}, [](Inputs v) { return softmax(v[0]); }},
      {"where",
       {"x", "other"},
       [](Inputs v) {
         return where(Tensor::of(v[0].backend(), {5}, {1, 0, 1, 0, 1}, DType::u8), v[0], v[1]);
       }},
      {"mse_loss", {"x", "t"}, [](Inputs v) { return mse_loss(v[0], v[1]); }},
      {"huber_loss", {"x", "t"}, [](Inputs v) { return huber_loss(v[0], v[1]); }},
      {"bce_with_logits", {"x", "t"}, [](Inputs v) { return bce_with_logits(v[0], v[1]); }},
      {"log_softmax", {"x"}, [](Inputs v) { return log_softmax(v[0]); }},
      {"cross_entropy", {"x"}, [labels](Inputs v) { return cross_entropy(v[0], labels(v[0].backend())); }},
      {"batch_norm_training", {"x", "w", "b"}, norm(true)},
      {"batch_norm_eval", {"x", "w", "b"}, norm(false)},
      {"batch_norm_residual", {"x", "w", "b", "residual"}, norm(true)},
      {"group_norm", {"x", "w", "b"}, [](Inputs v) { return group_norm(v[0], 2, v[1], v[2]); }},
      {"layer_norm", {"x", "w", "b"}, [](Inputs v) { return layer_norm(v[0], v[1], v[2]); }},
  };
}

TEST(SpecialValues, LayersAsPyTorch) {
  for (const Layer& layer : layers())
    for (const Column& column : columns()) {
      SCOPED_TRACE(layer.name + " " + column.name());
      column.backend->exact_convolution(true);  // Winograd's sums spread a NaN over its tile
      Case c{.name = layer.name, .y = layer.y, .inputs = {}};
      std::vector<Numbers> in;
      for (const std::string& name : layer.inputs) {
        c.inputs.push_back({.shape = dumps().at(layer.name + "/" + name).shape,
                            .parameter = layer.name != "matmul" && (name == "w" || name == "b")});
        in.push_back(values(layer.name + "/" + name));
      }
      const Result r = evaluate(c, *column.backend, column.dtype, in, values(layer.name + "/dy"));
      auto check = [&](const std::string& what, const Numbers& got) {
        const Numbers& want = values(layer.name + "/" + what);
        double largest = 0;
        for (double v : want) largest = std::isfinite(v) ? std::max(largest, std::abs(v)) : largest;
        ASSERT_EQ(got.size(), want.size());
        const double allowed = (column.dtype == DType::bf16 ? 0x1p-5 : 1e-5) * largest;
        for (std::size_t i = 0; i < want.size(); i++)
          EXPECT_TRUE(agrees(got[i], want[i], {0, allowed})) << what << "[" << i << "]";
      };
      check("y", r.y);
      for (std::size_t i = 0; i < in.size(); i++) check("d" + layer.inputs[i], r.gradients[i]);
    }
}

// The table's rows again, one number of one input replaced: what is NaN in the reference backend's double is so
// everywhere, and what an infinity made infinite is not finite. Large cases take other kernels than small ones.
void sweep_case(const Row& row, const Case& c, std::size_t input, double special, Backend& exact,
                const Column& column) {
  SCOPED_TRACE(row.op + " " + c.name + ", input " + std::to_string(input) + " has " + std::to_string(special) + ", " +
               column.name());
  std::vector<Numbers> in;  // rounded, so that both compute with the same numbers
  std::vector<Variable> constants;
  for (std::size_t i = 0; i < c.inputs.size(); i++) {
    in.push_back(Tensor::of(exact, c.inputs[i].shape, values_of(row.op, c, i), column.dtype).values());
    if (i == input) in[i][in[i].size() / 2] = special;
    constants.emplace_back(Tensor::of(exact, c.inputs[i].shape, in[i], DType::f64));
  }
  const Numbers dy = dy_of(row.op, c, c.y(constants).value().numel());
  const Result want = evaluate(c, exact, DType::f64, in, dy), got = evaluate(c, *column.backend, column.dtype, in, dy);
  auto lost = [&](const Numbers& a, const Numbers& b) {
    std::int64_t n = 0;
    for (std::size_t i = 0; i < b.size(); i++)
      n += std::isnan(b[i]) && std::isnan(special) ? !std::isnan(a[i]) : !std::isfinite(b[i]) && std::isfinite(a[i]);
    return n;
  };
  EXPECT_EQ(lost(got.y, want.y), 0) << "numbers of y hide it";
  for (std::size_t i = 0; i < in.size(); i++)
    EXPECT_EQ(lost(got.gradients[i], want.gradients[i]), 0) << "numbers of gradient " << i << " hide it";
}

TEST(SpecialValues, EveryRowOnEveryBackendAsTheReference) {
  auto exact = reference_backend(2);
  const std::vector<Column> all = columns();
  for (const Row& row : table())
    for (const Case& c : row.cases)
      for (std::size_t input = 0; input < c.inputs.size(); input++)
        for (double special : {double(NAN), double(INFINITY)})
          for (const Column& column : all)
            if (column.dtype != DType::f64) sweep_case(row, c, input, special, *exact, column);
}

// The kernels that a fused ReLU runs in: products, Winograd, few channels, the library's; forward, and the gradient
// behind it.
TEST(SpecialValues, AFusedReluKeepsNaN) {
  for (const Column& column : columns()) {
    Backend& b = *column.backend;
    const DType wide = column.dtype == DType::f64 ? DType::f64 : DType::f32;
    auto all_nan = [&](const char* what, const Variable& y, const Variable& x) {
      for (double v : y.value().values()) ASSERT_TRUE(std::isnan(v)) << what << ", " << column.name() << ": y";
      sum(y).backward();
      for (double v : x.grad().values()) ASSERT_TRUE(std::isnan(v)) << what << ", " << column.name() << ": dx";
    };
    auto x = [&](const Shape& s) { return Variable(Tensor::full(b, s, 1, column.dtype), true); };
    auto nan = [&](const Shape& s) { return Variable(Tensor::full(b, s, NAN, wide)); };
    for (std::int64_t n : {1, 3, 16, 64}) {
      Variable in = x({n, 40});
      all_nan("linear", linear(in, nan({n, 40}), nan({n}), true), in);
    }
    struct {
      const char* what;
      Shape x, w;
      Conv2dOptions o;
    } convolutions[] = {
        {"winograd", {2, 8, 8, 16}, {16, 3, 3, 16}, {.padding = 1, .relu = true}},
        {"few channels", {2, 8, 8, 1}, {16, 3, 3, 1}, {.padding = 1, .relu = true}},
        {"1x1", {2, 8, 8, 16}, {32, 1, 1, 16}, {.relu = true}},
        {"5x5", {2, 8, 8, 16}, {16, 5, 5, 16}, {.padding = 2, .relu = true}},
        {"groups", {2, 8, 8, 16}, {16, 3, 3, 1}, {.stride = 2, .padding = 1, .groups = 16, .relu = true}}};
    for (const auto& c : convolutions) {
      Variable in = x(c.x);
      const bool strided = c.o.stride > 1;  // leaves pixels out
      Variable y = conv2d(in, nan(c.w), nan({c.w[0]}), c.o);
      if (strided) {
        for (double v : y.value().values()) ASSERT_TRUE(std::isnan(v)) << c.what;
      } else {
        all_nan(c.what, y, in);
      }
    }
  }
}

TEST(SpecialValues, DivisionByANumberIsDivision) {
  on_backends({DType::f32}, [&](Backend& b, DType) {
    auto over = [&](double x, double s) { return (Variable(Tensor::of(b, {1}, {x})) / s).value().item(); };
    EXPECT_EQ(over(3e38f, 3e38f), 1);
    EXPECT_EQ(over(1e38f, 3e38f), double(1e38f / 3e38f));
    EXPECT_EQ(over(0, 1e-40), 0) << "1/1e-40 is infinite in f32";
    EXPECT_EQ(over(1, 0), INFINITY);
    for (int i = 1; i < 100; i++) EXPECT_EQ(over(i, 49), double(float(i) / 49)) << i;
    Variable x(Tensor::of(b, {2}, {1, -2}), true);
    sum(x / 3e38).backward({.seed = 3e38f});
    EXPECT_EQ(x.grad().values(), (Numbers{1, 1}));
  });
}

// Where a function loses digits if it is written as the textbook has it.
TEST(SpecialValues, DigitsNearZeroAndInTheTails) {
  std::unique_ptr<Backend> b = backends().back().make();
  auto check = [&](const char* op, Variable (*f)(const Variable&), double (*exact)(double)) {
    Numbers at;
    for (double x = 1e-8; x < 5; x *= 1.7) at.push_back(float(x)), at.push_back(-float(x));
    const Numbers got = f(Variable(Tensor::of(*b, {std::int64_t(at.size())}, at))).value().values();
    for (std::size_t i = 0; i < at.size(); i++)
      EXPECT_NEAR(got[i] / exact(at[i]), 1, 3e-6) << op << "(" << at[i] << ")";
  };
  check(
      "elu", [](const Variable& x) { return elu(x); }, [](double x) { return x > 0 ? x : std::expm1(x); });
  check("gelu", gelu, [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2.0)); });
  check("gelu_tanh", gelu_tanh,
        [](double x) { return x / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))); });
  check("tanh", tanh, std::tanh);
  check("silu", silu, [](double x) { return x / (1 + std::exp(-x)); });
}

}  // namespace
}  // namespace tandem::test
