// Each row of the op table (op_table.h) is checked three ways: finite differences in double; values and gradients that
// PyTorch computed; every backend and type against the reference backend in double. A declared operation without a row
// fails, and so does a backend that refuses a row.
#include <nlohmann/json.hpp>
#include <regex>

#include "core/broadcast.h"
#include "core/random.h"
#include "core/reference/backend.h"
#include "core/step.h"
#include "core/text.h"
#include "tests/op_table.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

using OpTable = OnReference;

const Dumps& dumps() { return Dumps::of("ops"); }

Numbers times(double factor, Numbers v) {
  for (double& x : v) x *= factor;
  return v;
}

// Where element e of a result of the shape y reads an operand of this shape: broadcasting, written out once more.
std::int64_t read_at(const Shape& shape, std::int64_t e, const Shape& y) {
  std::int64_t position = 0, step = 1;
  for (int axis = 1; axis <= y.rank(); axis++) {
    if (axis <= shape.rank()) {
      position += shape[-axis] == 1 ? 0 : e % y[-axis] * step;
      step *= shape[-axis];
    }
    e /= y[-axis];
  }
  return position;
}

// The oracle at every element of y.
Numbers by_oracle(const Case& c, const std::vector<Numbers>& values, const Shape& y) {
  Numbers out;
  for (std::int64_t e = 0; e < y.numel(); e++) {
    double argument[2] = {0, 0};
    for (std::size_t i = 0; i < values.size(); i++) argument[i] = values[i][read_at(c.inputs[i].shape, e, y)];
    out.push_back(c.oracle(argument[0], argument[1]));
  }
  return out;
}

TEST_F(OpTable, EveryDeclaredOperationHasARow) {
  std::set<std::string> declared, present;
  const std::string header = contents(source("autograd/ops.h"));
  const std::regex declaration(R"(\n(?:Variable|TopKResult) (\w+)\()");
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
  const std::vector<Column> columns = test::columns({DType::f32, DType::bf16});
  auto exact = reference_backend(2);

  std::string out = printed("  %-20s%-6s%-19s%-9s", "operation", "cases", "differences", "PyTorch");
  for (const Column& column : columns) out += printed("%-15s", column.name().c_str());

  for (const Row& row : table()) {
    double differences = 0, pytorch = 0;
    std::int64_t compared = 0, skipped = 0;
    bool dump = false;
    Numbers worst(columns.size(), 0.0);

    for (const Case& c : row.cases) {
      SCOPED_TRACE(row.op + ": " + c.name);
      std::vector<Numbers> values;
      std::vector<Tensor> tensors;
      std::int64_t numel = 0;
      for (std::size_t i = 0; i < c.inputs.size(); i++) {
        values.push_back(values_of(row.op, c, i));
        tensors.push_back(Tensor::of(*exact, c.inputs[i].shape, values[i], DType::f64));
        numel += c.inputs[i].shape.numel();
      }
      auto undifferentiated = [&](Backend& backend, DType dtype, const std::vector<Numbers>& v) {
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

      if (c.step > 0 && numel <= 1200) {
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
        auto check = [&](const std::string& name, const Numbers& got) {
          EXPECT_TRUE(close(name, got, want(name), 2e-7)) << "beside PyTorch";  // stored in f32
          pytorch = std::max(pytorch, difference(got, want(name)).error);
        };
        check("y", r.y);
        for (std::size_t i = 0; i < c.names.size(); i++) check("d" + c.names[i], r.gradients[i]);
      }

      for (std::size_t k = 0; k < columns.size(); k++) {
        Backend& backend = *columns[k].backend;
        const DType dtype = columns[k].dtype;
        SCOPED_TRACE(columns[k].name());
        try {
          // Parameters too: beside bf16 pictures some kernels multiply in bf16
          std::vector<Numbers> rounded;
          for (std::size_t i = 0; i < values.size(); i++)
            rounded.push_back(Tensor::of(backend, c.inputs[i].shape, values[i], dtype).values());
          const Variable plain = undifferentiated(backend, dtype, rounded);
          const Numbers drawn = dy_of(row.op, c, plain.value().numel());
          const Numbers dy = Tensor::of(backend, plain.shape(), drawn, plain.dtype()).values();
          const Result truth = evaluate(c, *exact, DType::f64, rounded, dy);
          const double tolerance = dtype == DType::bf16 ? row.bf16 : row.f32;
          auto check = [&](const std::string& name, const Numbers& got, const Numbers& want) {
            EXPECT_TRUE(close(name, got, want, tolerance));
            worst[k] = std::max(worst[k], difference(got, want).error);
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

    out += printed("\n  %-20s%-6zu%-19s%-9s", row.op.c_str(), row.cases.size(),
                   printed("%.1e (%lld kinks)", differences, static_cast<long long>(skipped)).c_str(),
                   dump ? printed("%.1e", pytorch).c_str() : "-");
    for (std::size_t k = 0; k < columns.size(); k++) {
      const bool ok = worst[k] <= (columns[k].dtype == DType::bf16 ? row.bf16 : row.f32);
      out += printed("%-15s", printed("%s %.1e", ok ? "ok" : "FAILED", worst[k]).c_str());
    }
  }
  std::printf("%s\n", out.c_str());  // after all messages
}

// A sum of nothing is zero, and an empty batch leaves no garbage in a gradient.
TEST_F(OpTable, EmptyBatchesAndProductsOfNothing) {
  on_backends({DType::f32, DType::bf16}, [](Backend& backend, DType dtype) {
    auto x = [&](const Shape& s, double value = 1) { return Variable(Tensor::full(backend, s, value, dtype), true); };
    auto w = [&](const Shape& s, double value = 1) { return Variable(Tensor::full(backend, s, value), true); };
    // Memory that is given out next holds NaN, so that what nobody writes shows.
    auto soil = [&] {
      for (std::int64_t n : {1, 4, 6, 12, 72, 288})
        Tensor::full(backend, {n}, NAN), Tensor::full(backend, {n}, NAN, dtype);
    };
    auto check = [&](const char* what, const Variable& y, std::initializer_list<Variable> leaves, double value) {
      for (double v : y.value().values()) EXPECT_EQ(v, value) << what;
      soil();
      sum(y).backward();
      for (const Variable& leaf : leaves)
        for (double v : leaf.grad().values()) EXPECT_EQ(v, 0) << what << ": a gradient of " << leaf.shape();
    };
    soil();
    Variable a = x({0, 5, 5, 2}), f = w({4, 3, 3, 2}), b = w({4});
    Variable y = conv2d(a, f, b, {.padding = 1, .relu = true});
    EXPECT_EQ(y.shape(), Shape({0, 5, 5, 4}));
    check("conv2d, batch 0", y, {a, f, b}, 0);
    a = x({0, 3}), f = w({4, 3}), b = w({4});
    check("linear, batch 0", linear(a, f, b, true), {a, f, b}, 0);
    a = x({2, 0}), f = w({4, 0}), b = w({4}, 0.5);
    check("linear, no features", linear(a, f, b, true), {a, f}, 0.5);
    check("linear, no features, no bias", linear(a, f), {a, f}, 0);
    a = x({3, 0}), f = x({0, 4});
    check("matmul, k = 0", matmul(a, f), {a, f}, 0);
    a = x({2, 3, 0}), f = x({2, 0, 4});
    check("matmul, k = 0 in batches", matmul(a, f), {a, f}, 0);
    a = x({0, 3}), f = x({3, 4});
    check("matmul, m = 0", matmul(a, f), {a, f}, 0);
    a = x({0, 3, 3, 2});
    check("global_average_pool, batch 0", global_average_pool(a), {a}, 0);
  });
}

// One place refuses what cannot be computed: inputs on two backends, parameters of a narrow type, labels that are none.
TEST_F(OpTable, MixedBackendsAndTypesAreRefused) {
  auto there = reference_backend(1);
  auto x = [&](const Shape& s, DType t = DType::f32) { return Variable(Tensor::zeros(*backend, s, t)); };
  auto other = [&](const Shape& s, DType t = DType::f32) { return Variable(Tensor::zeros(*there, s, t)); };
  EXPECT_REFUSED(add(x({2}), other({2})), "add", "two backends");
  EXPECT_REFUSED(matmul(x({2, 2}), other({2, 2})), "matmul", "two backends");
  EXPECT_REFUSED(linear(x({2, 2}), x({2, 2}), other({2})), "linear", "two backends");
  EXPECT_REFUSED(conv2d(x({1, 2, 2, 1}), other({1, 1, 1, 1}), {}), "conv2d", "two backends");
  EXPECT_REFUSED(cat(std::vector{x({2}), other({2})}, 0), "cat", "two backends");
  EXPECT_REFUSED(layer_norm(x({2, 3}), x({3}), other({3})), "layer_norm", "two backends");
  Tensor mean = Tensor::zeros(*there, {3}), variance = Tensor::zeros(*backend, {3});
  EXPECT_REFUSED(batch_norm(x({4, 3}), x({3}), x({3}), mean, variance), "batch_norm", "two backends");
  EXPECT_REFUSED(cross_entropy(x({2, 3}), labels_of(*there, {0, 1})), "cross_entropy", "two backends");
  Tensor correct = Tensor::zeros(*there, {1}, DType::i32), wrong = Tensor::zeros(*backend, {1});
  const Tensor labels = labels_of(*backend, {0, 1});
  EXPECT_REFUSED(cross_entropy(x({2, 3}), labels, 0, &correct), "cross_entropy", "two backends");
  EXPECT_REFUSED(cross_entropy(x({2, 3}), labels, 0, &wrong), "cross_entropy", "one i32");
  EXPECT_REFUSED(cross_entropy(x({2, 3}), Tensor::zeros(*backend, {2})), "cross_entropy", "i32", "f32");
  const Tensor bytes = Tensor::zeros(*backend, {2}, DType::u8);
  EXPECT_REFUSED(cross_entropy(x({2, 3}), bytes), "cross_entropy", "i32", "u8");
  EXPECT_REFUSED(linear(x({2, 2}), x({2, 2}, DType::bf16)), "linear", "parameters are f32", "bf16");
  EXPECT_REFUSED(linear(x({2, 2}, DType::f64), x({2, 2})), "linear", "parameters are f64", "f32");
  const Variable wide = x({1}, DType::f64);
  EXPECT_REFUSED(conv2d(x({1, 2, 2, 1}), x({1, 1, 1, 1}), wide), "conv2d", "parameters are f32");
}

// Its memory is the host's, and launch() must not look.
struct Device : reference::ReferenceBackend {
  Device() : ReferenceBackend(1) {}
  bool on_device() const override { return true; }
};
struct Nothing {
  void operator()(std::int64_t) const { FAIL() << "ran on the host"; }
  double part(std::int64_t, int, int) const { return 0; }
  void finish(std::int64_t, double) const { FAIL() << "ran on the host"; }
};
TEST_F(OpTable, HostCodeIsNotLaunchedOnADevice) {
  Device device;
  EXPECT_REFUSED(launch(device, 3, Nothing{}), "launch", ".kernel.cpp");
  EXPECT_REFUSED(launch_blocks(device, 3, Nothing{}), "launch", ".kernel.cpp");
  EXPECT_REFUSED(launch_sums<32>(device, 3, Nothing{}), "launch", ".kernel.cpp");
}

// ---- what a table of functions does not show ------------------------------------------------------------------------
// Finite differences cannot see a tie, and the other backends share the code.
TEST_F(OpTable, TiesShareTheGradient) {
  on_backends({DType::f32}, [](Backend& backend, DType) {
    auto gradient = [&](const Shape& shape, std::initializer_list<double> values, auto f) {
      Variable x(Tensor::of(backend, shape, values), true);
      Variable y = f(x);
      sum(mul(y, Variable(Tensor::full(backend, y.shape(), 6)))).backward();
      return x.grad().values();
    };
    const std::initializer_list<double> ties{2, 5, 5, 5, 1, 4, 0, 4};
    EXPECT_EQ(gradient({2, 4}, ties, [](const Variable& x) { return max(x, {1}); }), (Numbers{0, 2, 2, 2, 0, 3, 0, 3}));
    EXPECT_EQ(gradient({2, 4}, ties, [](const Variable& x) { return max(x); }), (Numbers{0, 2, 2, 2, 0, 0, 0, 0}));
    EXPECT_EQ(gradient({3}, {1, 2, 3},
                       [&](const Variable& x) { return maximum(x, Variable(Tensor::full(backend, {3}, 2))); }),
              (Numbers{0, 3, 6}));
    EXPECT_EQ(gradient({3}, {1, 2, 3},
                       [&](const Variable& x) { return minimum(Variable(Tensor::full(backend, {3}, 2)), x); }),
              (Numbers{6, 3, 0}));
    EXPECT_EQ(gradient({1, 2, 4, 1}, ties, [](const Variable& x) { return max_pool2d(x); }),
              (Numbers{0, 6, 6, 0, 0, 0, 0, 0}))
        << "pooling: the first of the window, row by row, takes it all";
    EXPECT_EQ(gradient({1, 2, 2, 1}, {NAN, 1, NAN, 2}, [](const Variable& x) { return max_pool2d(x); }),
              (Numbers{0, 0, 6, 0}))
        << "pooling: the last NaN, as in PyTorch";
    EXPECT_EQ(gradient({1, 2, 2, 1}, {0, -1, -2, -1}, [](const Variable& x) { return max_pool2d(x, {.relu = true}); }),
              (Numbers{0, 0, 0, 0}))
        << "the ReLU of zero";
  });
}

// What a thread of a device does with its element, seen from the host.
struct Found {
  std::int64_t *p, *q;
  void operator()(std::int64_t, std::int64_t in_a, std::int64_t in_b) const { *p = in_a, *q = in_b; }
};

// Shapes drawn at random, up to six axes: y, and both gradients, as plain loops have them.
TEST_F(OpTable, BroadcastsAnyShapesAsNumPy) {
  struct Operand {
    Shape shape;
    Numbers values;
    std::int64_t at(std::int64_t e, const Shape& y) const { return read_at(shape, e, y); }
  };
  const Philox random(1, Stream::test);
  std::uint32_t draws = 0;
  auto below = [&](std::uint32_t n) { return std::int64_t(random.word(draws++) % n); };
  auto operand = [&](const Shape& y, const char* name) {
    Operand o;
    for (std::int64_t axis = below(3) ? 0 : below(std::uint32_t(y.rank())); axis < y.rank(); axis++)
      o.shape.append(below(5) < 2 ? 1 : y[int(axis)]);
    o.values = numbers(name + std::to_string(draws), o.shape.numel(), -1, 1, 0.25);  // bf16 holds their products
    return o;
  };
  std::vector<std::pair<Operand, Operand>> pairs;
  for (int i = 0; i < 150; i++) {
    Shape y;
    for (std::int64_t rank = 1 + below(6); y.rank() < rank;) y.append(1 + below(y.rank() ? 5 : 3));
    Operand a = operand(y, "a"), b = operand(y, "b");
    pairs.emplace_back(std::move(a), std::move(b));
  }
  for (auto [a, b] : {std::pair{Shape{6, 4, 6, 5}, Shape{1, 4, 1, 5}},
                      {{2, 1, 2, 1}, {1, 2, 1, 2}},
                      {{2, 0, 3}, {1, 3}},
                      {{40'000, 3}, {3}},
                      {{3, 20'001}, {3, 1}},
                      {{1}, {70'001}}})
    pairs.push_back({{a, numbers("a", a.numel(), -1, 1, 0.25)}, {b, numbers("b", b.numel(), -1, 1, 0.25)}});
  for (const auto& [a, b] : pairs) {
    const Shape y = broadcast_shape("mul", a.shape, b.shape);
    for (std::int64_t e = 0, p = 0, q = 0; e < y.numel(); e += 1 + e / 200) {
      EachElement<Found>{loops_over(y, a.shape, b.shape), {&p, &q}}(e);
      ASSERT_TRUE(p == a.at(e, y) && q == b.at(e, y)) << "element " << e << " of " << a.shape << "·" << b.shape;
    }
  }
  on_backends({DType::f32, DType::bf16, DType::f64}, [&](Backend& backend, DType dtype) {
    const double tolerance = dtype == DType::bf16 ? 0x1p-5 : 1e-5;
    for (auto& [a, b] : pairs) {
      std::ostringstream where;
      where << a.shape << "·" << b.shape;
      SCOPED_TRACE(where.str());
      Variable va(Tensor::of(backend, a.shape, a.values, dtype), true),
          vb(Tensor::of(backend, b.shape, b.values, dtype), true);
      Variable y = mul(va, vb);
      const Shape shape = y.shape();
      const Numbers dy = numbers("dy", shape.numel(), -1, 1, 0.5);
      sum(mul(y, Variable(Tensor::of(backend, shape, dy, dtype)))).backward();
      Numbers product, da(a.values.size()), db(b.values.size());
      for (std::int64_t e = 0; e < shape.numel(); e++) {
        const std::int64_t i = a.at(e, shape), k = b.at(e, shape);
        product.push_back(a.values[i] * b.values[k]);
        da[i] += dy[e] * b.values[k], db[k] += dy[e] * a.values[i];
      }
      EXPECT_TRUE(close("y", y.value().values(), product, tolerance));
      EXPECT_TRUE(close("da", va.grad().values(), da, tolerance));
      EXPECT_TRUE(close("db", vb.grad().values(), db, tolerance));
    }
  });
}

TEST_F(OpTable, PadShortcutIsTwoSlicesAndAPad) {
  Variable x(Tensor::of(*backend, {2, 5, 7, 3}, numbers("shortcut", 210)));
  for (int stride : {1, 2, 3})
    EXPECT_EQ(pad_shortcut(x, stride, 2).value().values(),
              pad(slice(slice(x, 1, 0, 5, stride), 2, 0, 7, stride), 3, 2, 2).value().values());
  EXPECT_REFUSED(pad_shortcut(x, 0, 2), "pad_shortcut");
}

TEST_F(OpTable, BatchNormMovesItsRunningStatistics) {
  for (const std::string& name : dumps().cases()) {
    const Attributes a = dumps().attributes(name);
    if (a["op"] != "batch_norm") continue;
    const bool training = a["training"] == 1;
    SCOPED_TRACE(name);
    on_backends({DType::f32, DType::bf16, DType::f64}, [&](Backend& backend, DType dtype) {
      const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
      auto tensor = [&](const char* which, DType type) { return dumps().at(name + "/" + which).on(backend, type); };
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
    });
  }
}

TEST_F(OpTable, CrossEntropyCountsWhatIsCorrect) {
  on_backends({DType::f32, DType::bf16}, [](Backend& backend, DType dtype) {
    Variable logits(Tensor::of(backend, {4, 3}, {9, 1, 2, 0, -1, 5, 1, 3, 2, 4, 8, 7}, dtype));
    Tensor correct = Tensor::full(backend, {1}, 10, DType::i32);
    cross_entropy(logits, labels_of(backend, {0, 2, 0, 1}), 0, &correct);
    EXPECT_EQ(correct.item(), 13);
    cross_entropy(logits, labels_of(backend, {1, 1, 1, 2}), 0.1, &correct);
    EXPECT_EQ(correct.item(), 14);
  });
}

TEST_F(OpTable, DropoutDrawsFromCountersOnly) {
  std::vector<Numbers> masks;  // of every backend and type: they agree
  on_backends({DType::f32, DType::bf16}, [&](Backend& backend, DType dtype) {
    constexpr std::int64_t rows = 8, length = 30;
    auto mask = [&](std::uint64_t seed, std::uint32_t epoch, std::uint32_t layer, const Numbers& samples) {
      StepState state;
      state.seed = seed;
      state.epoch = epoch;
      Mode before = mode();
      mode().step_state = Tensor(backend, {std::int64_t(sizeof state)}, DType::u8);
      backend.upload(mode().step_state.raw_write(), &state, sizeof state);
      mode().samples = labels_of(backend, samples);
      Numbers y = dropout(Variable(Tensor::full(backend, {rows, length}, 1, dtype)), 0.5, layer).value().values();
      mode() = before;
      return y;
    };
    const Numbers order{5, 9, 2, 70'000, 1, 0, 33, 8}, turned(order.rbegin(), order.rend());
    const Numbers first = mask(1, 2, 3, order);
    masks.push_back(first);
    EXPECT_EQ(first, mask(1, 2, 3, order)) << "the same counters give the same mask";
    EXPECT_NE(first, mask(2, 2, 3, order)) << "the seed";
    EXPECT_NE(first, mask(1, 3, 3, order)) << "the epoch";
    EXPECT_NE(first, mask(1, 2, 4, order)) << "the layer";
    const Numbers moved = mask(1, 2, 3, turned);
    for (std::int64_t row = 0; row < rows; row++)
      EXPECT_TRUE(std::equal(first.begin() + row * length, first.begin() + (row + 1) * length,
                             moved.begin() + (rows - 1 - row) * length))
          << "picture " << order[row] << " loses other elements elsewhere in the batch";
  });
  for (const auto& m : masks) EXPECT_EQ(m, masks[0]);
}

TEST_F(OpTable, DropoutKeepsTheMeanAndMasksTheGradient) {
  on_backends({DType::f32}, [](Backend& backend, DType) {
    for (double p : {0.1, 0.5, 0.9}) {
      mode().draws = 0;
      constexpr std::int64_t n = 200'000;
      Variable x(Tensor::full(backend, {100, n / 100}, 1), true);
      Variable y = dropout(x, p), again = dropout(x, p);
      sum(y).backward();
      const Numbers values = y.value().values();
      EXPECT_EQ(values, x.grad().values()) << "the gradient passes where the value did, with the same factor";
      EXPECT_NE(values, again.value().values()) << "each call draws anew where no loop counts";
      double mean = 0;
      for (double v : values) {
        mean += v / n;
        ASSERT_TRUE(v == 0 || std::abs(v - 1 / (1 - p)) < 1e-6) << v;
      }
      EXPECT_NEAR(mean, 1, 5 * std::sqrt(p / (1 - p) / n)) << "p = " << p << ", five standard errors";
    }
  });
}

TEST_F(OpTable, ArgumentsThatDoNotFitAreRefused) {
  auto x = [&](const Shape& s, DType t = DType::f32) { return Variable(Tensor::zeros(*backend, s, t)); };
  EXPECT_REFUSED(add(x({2, 3}), x({2, 4})), "add", "[2,3]", "[2,4]");
  EXPECT_REFUSED(mul(x({2}), x({2}, DType::bf16)), "mul", "f32 and bf16");
  EXPECT_REFUSED(relu(x({2}, DType::i32)), "relu", "i32");
  EXPECT_REFUSED(clamp(x({2}), 1, 0), "clamp");
  EXPECT_REFUSED(sum(x({2, 3}), {2}), "sum", "axis 2", "[2,3]");
  EXPECT_REFUSED(sum(x({2, 3}), {1, -1}), "sum", "twice");
  EXPECT_REFUSED(max(x({0, 3}), {0}), "max", "[0,3]");
  EXPECT_REFUSED(reshape(x({2, 3}), {4, 2}), "[2,3]", "[4,2]");
  EXPECT_REFUSED(reshape(x({2, 3}), {-1, -1}), "reshape", "only one");
  EXPECT_REFUSED(reshape(x({2, 3}), {4, -1}), "reshape", "[2,3]", "do not divide");
  EXPECT_REFUSED(reshape(x({0, 3}), {0, -1}), "reshape", "do not divide");
  EXPECT_REFUSED(matmul(x({2, 3, 4}), x({3, 4, 2})), "matmul", "[2]", "[3]");
  EXPECT_REFUSED(matmul(x({3}), x({3, 2})), "matmul", "[3]");
  const Variable flat = x({2, 0, 3, 4}), picture = x({1, 9, 9, 1});
  EXPECT_REFUSED(global_average_pool(flat), "global_average_pool", "[2,0,3,4]", "no pixels");
  EXPECT_REFUSED(transpose(x({2, 3}), {0, 0}), "transpose", "twice");
  EXPECT_REFUSED(slice(x({2, 3}), 1, 2, 4), "slice", "[2,3]");
  EXPECT_REFUSED(cat(std::vector{x({2, 3}), x({3, 3})}, 1), "cat", "[2,3]", "[3,3]");
  EXPECT_REFUSED(pad(x({2}), 0, -1, 0), "pad");
  EXPECT_REFUSED(matmul(x({2, 3}), x({4, 2})), "matmul", "[2,3]", "[4,2]");
  EXPECT_REFUSED(linear(x({2, 3}), x({5, 4})), "linear", "[2,3]", "[5,4]");
  EXPECT_REFUSED(linear(x({2, 3, 1}), x({5, 3})), "linear", "flatten");
  EXPECT_REFUSED(conv2d(x({1, 5, 5, 3}), x({4, 3, 3, 2}), {}), "conv2d", "3 channels");
  EXPECT_REFUSED(conv2d(x({1, 2, 2, 3}), x({4, 3, 3, 3}), {}), "conv2d", "does not fit");
  EXPECT_REFUSED(conv2d(x({1, 5, 5, 4}), x({3, 3, 3, 2}), {}, {.groups = 2}), "conv2d", "groups");
  EXPECT_REFUSED(conv2d(x({1, 5, 5, 3}), x({4, 3, 3, 3}), x({5})), "conv2d", "bias");
  EXPECT_REFUSED(max_pool2d(x({1, 3, 3, 1}), {.kernel_size = 4}), "max_pool2d", "does not fit");
  EXPECT_REFUSED(max_pool2d(picture, {.kernel_size = 2, .padding = 2}), "max_pool2d", "padding");
  EXPECT_REFUSED(dropout(x({3}), 1), "dropout");
  EXPECT_REFUSED(cross_entropy(x({2, 3}), x({3}, DType::i32).value()), "cross_entropy", "[2,3]", "[3]");
  Tensor mean = Tensor::zeros(*backend, {3}), variance = Tensor::zeros(*backend, {3});
  EXPECT_REFUSED(batch_norm(x({1, 3}), x({3}), x({3}), mean, variance), "batch_norm", "variance");
  EXPECT_REFUSED(batch_norm(x({4, 2}), x({3}), x({3}), mean, variance), "batch_norm", "2 channels");
  EXPECT_REFUSED(group_norm(x({4, 6}), 4, x({6}), x({6})), "group_norm", "6 channels", "4 groups");
  EXPECT_REFUSED(group_norm(x({4, 6}), 0, x({6}), x({6})), "group_norm", "0 groups");
  EXPECT_REFUSED(group_norm(x({4, 6}), 2, x({3}), x({6})), "group_norm", "[3]");
  EXPECT_REFUSED(layer_norm(x({4, 6}), x({4}), x({4})), "layer_norm", "[4]", "[4,6]");
  EXPECT_REFUSED(layer_norm(x({4, 6}), x({6}), x({4})), "layer_norm", "[4]");
}

}  // namespace
}  // namespace tandem::test
