// What one who knows PyTorch looks for first: places and comparisons, tensors as text, parameters by name, a model that
// is called, the table of confusions, an operation of one's own.
#include "autograd/elementwise.h"
#include "tandem.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

using Public = OnReference;

std::string text_of(const Tensor& t) {
  std::ostringstream out;
  out << t;
  return out.str();
}

TEST_F(Public, PlacesAreThoseOfPyTorch) {
  const Dumps& dumps = Dumps::of("ops");
  on_backends({DType::f32, DType::f64}, [&](Backend& backend, DType dtype) {
    for (const std::string name : {"topk", "topk_smallest"})
      EXPECT_EQ(topk(dumps.at(name + "/x").on(backend, dtype), 3, 1, name == "topk").places.values(),
                dumps.at(name + "/places").values);
    const Tensor x = dumps.at("topk/x").on(backend, dtype);
    EXPECT_EQ(argmax(x, 1).values(),
              slice(Variable(dumps.at("topk/places").on(backend, dtype)), 1, 0, 1).value().values());
    EXPECT_EQ(argmax(x, 1).shape(), Shape({4, 2}));
    EXPECT_EQ(argmax(x, -2, true).shape(), Shape({4, 1, 2}));
    const Tensor odd = Tensor::of(backend, {3, 4}, {1, 7, 7, 0, 5, NAN, INFINITY, NAN, -3, -3, -3, -3}, dtype);
    EXPECT_EQ(argmax(odd).values(), (Numbers{1, 1, 0}));
    EXPECT_EQ(topk(odd, 3).places.values(), (Numbers{1, 2, 0, 1, 3, 2, 0, 1, 2}));
    EXPECT_EQ(topk(odd, 2, -1, false).places.values(), (Numbers{3, 0, 0, 2, 0, 1}));
    EXPECT_REFUSED(topk(x, 10, 1), "topk", "10 of the 9", "[4,9,2]");
    EXPECT_REFUSED(argmax(x, 3), "argmax", "no axis 3");
  });
}

TEST_F(Public, AnIndexThatIsNoneIsRefused) {
  const Tensor x = Tensor::zeros(*backend, {2, 3});
  auto index = [&](const Shape& s, const Numbers& v) { return Tensor::of(*backend, s, v, DType::i32); };
  EXPECT_REFUSED(gather(x, 1, index({2, 1}, {0, 3})), "gather", "index 3", "3 elements", "axis 1");
  EXPECT_REFUSED(gather(x, 1, index({3, 1}, {0, 0, 0})), "gather", "[3,1]", "[2,3]");
  EXPECT_REFUSED(embedding(x, index({1}, {-1})), "embedding", "index -1", "2 elements");
  EXPECT_REFUSED(embedding(x, Tensor::zeros(*backend, {1})), "embedding", "i32", "f32");
  EXPECT_REFUSED(where(x, x, x), "where", "u8", "f32");
  EXPECT_REFUSED(squeeze(x, 1), "squeeze", "[2,3]", "not one");
  EXPECT_REFUSED(mse_loss(x, Tensor::zeros(*backend, {2})), "mse_loss", "[2,3]", "[2]");
  EXPECT_REFUSED(huber_loss(x, x, 0), "huber_loss", "delta");
}

TEST_F(Public, ComparisonsGiveMasksOfEveryType) {
  for (const BackendKind& kind : backends())
    for (DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::u8}) {
      std::unique_ptr<Backend> backend = kind.make();
      const bool integers = dtype == DType::i32 || dtype == DType::u8;
      if (!integers && !backend->supports(dtype)) continue;
      SCOPED_TRACE(kind.name + " " + name_of(dtype));
      const Tensor a = Tensor::of(*backend, {2, 2}, {1, 2, 3, 4}, dtype),
                   b = Tensor::of(*backend, {2, 1}, {2, 3}, dtype);
      EXPECT_EQ(eq(a, b).dtype(), DType::u8);
      EXPECT_EQ(eq(a, b).values(), (Numbers{0, 1, 1, 0}));
      EXPECT_EQ(ne(a, b).values(), (Numbers{1, 0, 0, 1}));
      EXPECT_EQ(lt(a, b).values(), (Numbers{1, 0, 0, 0}));
      EXPECT_EQ(le(a, b).values(), (Numbers{1, 1, 1, 0}));
      EXPECT_EQ(gt(a, b).values(), (Numbers{0, 0, 0, 1}));
      EXPECT_EQ(ge(a, b).values(), (Numbers{0, 1, 1, 1}));
      EXPECT_REFUSED(eq(a, a.cast(dtype == DType::f32 ? DType::bf16 : DType::f32)), "eq", "cast");
      if (integers) continue;
      const Tensor nan = Tensor::full(*backend, {2, 2}, NAN, dtype);
      EXPECT_EQ(eq(nan, nan).values(), Numbers(4, 0));
      EXPECT_EQ(ne(nan, a).values(), Numbers(4, 1));
      EXPECT_EQ(le(nan, a).values(), Numbers(4, 0));
    }
}

// A NaN that was not chosen stays out of the result and of the gradient, and a zero keeps its sign.
TEST_F(Public, WhereLeavesOutWhatWasNotChosen) {
  on_backends({DType::f32}, [&](Backend& b, DType) {
    Variable x(Tensor::of(b, {4}, {NAN, 2, -0.0, 0.0}), true), other(Tensor::of(b, {4}, {1, NAN, INFINITY, NAN}), true);
    const Variable y = where(Tensor::of(b, {4}, {0, 1, 1, 1}, DType::u8), x, other);
    const Numbers v = y.value().values();
    EXPECT_EQ(v, (Numbers{1, 2, 0, 0}));
    EXPECT_TRUE(std::signbit(v[2]) && !std::signbit(v[3]));
    sum(y).backward();
    EXPECT_EQ(x.grad().values(), (Numbers{0, 1, 1, 1}));
    EXPECT_EQ(other.grad().values(), (Numbers{1, 0, 0, 0}));
  });
}

TEST_F(Public, LargeLogitsDoNotOverflow) {
  on_backends({DType::f32}, [&](Backend& b, DType) {
    const Variable x(Tensor::of(b, {2, 2}, {1e30, 1e30, -1e30, 3}));
    EXPECT_TRUE(close("softmax", softmax(x).value().values(), {0.5, 0.5, 0, 1}, 1e-6));
    EXPECT_NEAR(log_softmax(x).value().values()[0], -std::log(2.0), 1e-6);
    EXPECT_REFUSED(softmax(x, 2), "softmax", "no axis 2");
  });
}

TEST_F(Public, AxesAreKnownWhenTheProgramRuns) {
  const Variable x(Tensor::of(*backend, {2, 3}, {1, 2, 3, 4, 5, 6}));
  std::vector<int> axes;
  for (int i = 0; i < x.rank(); i++) axes.insert(axes.begin(), i);
  EXPECT_EQ(transpose(x, axes).shape(), Shape({3, 2}));
  EXPECT_EQ(sum(x, axes).item(), 21);
  const int last = -1;
  EXPECT_EQ(max(x, last).value().values(), (Numbers{3, 6}));
  EXPECT_EQ(mean(x, 0, true).shape(), Shape({1, 3}));
  EXPECT_REFUSED(sum(x, 2), "sum", "no axis 2", "[2,3]");
}

TEST_F(Public, PrintingIsReadable) {
  EXPECT_EQ(text_of(Tensor::of(*backend, {2, 2}, {1, -2.5, 3, 10})),
            "[[ 1.0000, -2.5000],\n [ 3.0000, 10.0000]]  f32 [2,2]");
  EXPECT_EQ(text_of(Tensor::of(*backend, {3}, {1, -2, 3})), "[ 1., -2.,  3.]  f32 [3]");
  EXPECT_EQ(text_of(Tensor::of(*backend, {3}, {1, 20, 3}, DType::i32)), "[ 1, 20,  3]  i32 [3]");
  EXPECT_EQ(text_of(Tensor::of(*backend, {}, {0.5})), "0.5000  f32 []");
  EXPECT_EQ(text_of(Tensor::of(*backend, {2}, {1e-7, 1})), "[1.0000e-07, 1.0000e+00]  f32 [2]");
  EXPECT_EQ(text_of(Tensor::of(*backend, {3}, {NAN, INFINITY, 0.5})), "[   nan,    inf, 0.5000]  f32 [3]");
  EXPECT_EQ(text_of(Tensor::of(*backend, {2, 1, 1}, {1, 2})), "[[[1.]],\n\n [[2.]]]  f32 [2,1,1]");
  EXPECT_EQ(text_of(Tensor::zeros(*backend, {0, 3})), "[]  f32 [0,3]");
  EXPECT_EQ(text_of(Tensor()), "undefined tensor");
  Numbers many(2000);
  for (std::size_t i = 0; i < many.size(); i++) many[i] = double(i);
  EXPECT_EQ(text_of(Tensor::of(*backend, {2000}, many)), "[   0.,    1.,    2., ..., 1997., 1998., 1999.]  f32 [2000]");
  const std::string square = text_of(Tensor::of(*backend, {1000, 2}, many));
  EXPECT_EQ(square,
            "[[   0.,    1.],\n [   2.,    3.],\n [   4.,    5.],\n ...,\n [1994., 1995.],\n [1996., 1997.],\n [1998., "
            "1999.]]  f32 [1000,2]");
  std::ostringstream out;
  out << Variable(Tensor::of(*backend, {1}, {2}));
  EXPECT_EQ(out.str(), "[2.]  f32 [1]");
}

struct Tower : Module {
  Sequential& body = child<Sequential>("body");
  Tower() {
    body.add<Linear>(4, 3);
    body.add<GELU>();
    body.adopt("norm", std::make_unique<BatchNorm2d>(3));
  }
  Variable forward(const Variable& x) override { return body(x); }
};

TEST_F(Public, ParametersAreFoundByName) {
  Tower tower;
  EXPECT_EQ(tower.parameter("body.0.weight").shape, Shape({3, 4})) << "before there is memory too";
  FlatParameters flat(tower, *backend, 1);
  std::string names;
  for (auto& [name, p] : tower.parameters()) names += name + " ";
  EXPECT_EQ(names, "body.0.weight body.0.bias body.norm.weight body.norm.bias ");
  Tensor weight = tower.parameter("body.0.weight").variable.value();
  weight.fill(2);
  EXPECT_EQ(flat.values.range(0, {12}).values(), Numbers(12, 2));
  EXPECT_EQ(tower.buffer("body.norm.running_var").tensor.values(), Numbers(3, 1));
  EXPECT_EQ(&tower.body.parameter("body.0.bias"), &tower.parameter("body.0.bias")) << "full names, from any module";
  EXPECT_REFUSED(tower.parameter("body.1.weight"), "body.1.weight", "body.0.weight", "body.norm.bias");
  EXPECT_REFUSED(tower.buffer("mean"), "buffer mean", "body.norm.running_mean");
}

TEST_F(Public, AModelIsCalled) {
  Model model = make_model("mlp", 10, 1, 4);
  FlatParameters flat(model, *backend, 1);
  const Tensor x = Tensor::full(*backend, {2, 4, 4, 1}, 0.5);
  EXPECT_EQ(model(x).value().values(), (*model)(x).value().values());
  EXPECT_EQ(model(x).shape(), Shape({2, 10}));
  Model own = std::make_unique<Tower>();
  EXPECT_EQ(own->parameters().size(), 4u);
}

TEST_F(Public, ActivationsAndEmbedding) {
  on_backends({DType::f32}, [&](Backend& b, DType) {
    const Variable x(Tensor::of(b, {4}, {-2, -0.5, 0.5, 2}));
    EXPECT_EQ(GELU()(x).value().values(), gelu(x).value().values());
    EXPECT_EQ(SiLU()(x).value().values(), silu(x).value().values());
    EXPECT_EQ(Tanh()(x).value().values(), tanh(x).value().values());
    EXPECT_EQ(Sigmoid()(x).value().values(), sigmoid(x).value().values());
    EXPECT_EQ(ReLU()(x).value().values(), relu(x).value().values());
    Embedding words(5, 3);
    FlatParameters flat(words, b, 1);
    const Tensor at = Tensor::of(b, {2, 2}, {4, 0, 1, 4}, DType::i32);
    const Variable y = words(at);
    EXPECT_EQ(y.shape(), Shape({2, 2, 3}));
    EXPECT_EQ(y.value().range(0, {3}).values(), words.parameter("weight").variable.value().slice(4, 5).values());
    flat.backward(sum(y));
    EXPECT_EQ(words.parameter("weight").variable.grad().values(),
              (Numbers{1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 2}));
  });
}

// Eight pictures whose first pixel is their label; the model says what their second one says.
TEST_F(Public, ConfusionMatrixCountsLabelsAndAnswers) {
  struct Second : Module {
    Variable forward(const Variable& x) override {
      EXPECT_FALSE(training());
      const Variable says = scale(slice(flatten(x), 1, 1, 2), 255);
      const Variable classes(Tensor::of(says.backend(), {1, 3}, {0, 1, 2}));
      return -abs(says - classes);
    }
  };
  const std::vector<std::uint8_t> pixels{0, 0, 0, 0, 0, 2, 1, 1, 1, 0, 2, 2, 2, 2, 2, 1};
  const std::vector<std::int32_t> labels{0, 0, 0, 1, 1, 2, 2, 2};
  Pictures pictures = in_memory("pairs", pixels, {8, 1, 2, 1}, labels, 3);
  pictures.mean = {0}, pictures.std = {1};
  Loader source(pictures, {.batch = 3, .shuffle = false, .prefetch = 0}, *backend);
  Second model;
  EXPECT_EQ(text_of(confusion_matrix(model, source)), "[[2, 0, 1],\n [1, 1, 0],\n [0, 1, 2]]  i32 [3,3]");
  EXPECT_TRUE(model.training());
}

// ---- an operation of one's own --------------------------------------------------------------------------------------
struct Cubed {
  static constexpr auto name = "cubed";
  static constexpr From from = From::x;
  double factor;
  tandem::Attributes attributes() const { return {{"factor", {factor}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return A(factor) * x * x * x;
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * (A(3 * factor) * x * x);
  }
};
struct Hypotenuse {
  static constexpr auto name = "hypotenuse";
  template <class A>
  TANDEM_HD A f(A a, A b) const {
    return std::sqrt(a * a + b * b);
  }
  template <class A>
  TANDEM_HD A da(A g, A a, A b) const {
    return g * a / f(a, b);
  }
  template <class A>
  TANDEM_HD A db(A g, A a, A b) const {
    return g * b / f(a, b);
  }
};

TEST_F(Public, AnOwnOperationIsAFunctor) {
  const Tensor x = Tensor::of(*backend, {2, 3}, {-2, -0.5, 0.1, 0.7, 1.5, 4}),
               row = Tensor::of(*backend, {3}, {1, 2, 3});
  using In = std::span<const Variable>;
  EXPECT_TRUE(check_gradient([](In v) { return elementwise(Cubed{0.5}, v[0]); }, {{x}}).passed);
  EXPECT_TRUE(check_gradient([](In v) { return elementwise(Hypotenuse{}, v[0], v[1]); }, {{x, row}}).passed);
  for (const BackendKind& kind : backends()) {
    std::unique_ptr<Backend> b = kind.make();
    if (!b->supports(DType::bf16)) continue;
    const Variable narrow(Tensor::of(*b, {2}, {2, 3}, DType::bf16), true);
    const Variable y = elementwise(Cubed{1}, narrow);
    EXPECT_EQ(y.value().values(), (Numbers{8, 27}));
    EXPECT_EQ(y.node()->attributes()[0].second, Numbers{1});
    sum(y).backward();
    EXPECT_EQ(narrow.grad().values(), (Numbers{12, 27}));
  }
}

// An operation stands in few places: its declaration, its kernel, its counterpart in ONNX.
TEST_F(Public, TheLibrarysOperationsStandInFewFiles) {
  int files = 0;
  std::string which;
  for (const char* room : {"core", "autograd", "layers", "datasets", "cuda"})
    for (const auto& entry : std::filesystem::recursive_directory_iterator(source(room))) {
      const std::string name = entry.path().filename().string();
      if (!name.ends_with(".h") && !name.ends_with(".cpp") && !name.ends_with(".cu")) continue;
      if (contents(entry.path()).find("log_softmax") != std::string::npos) files++, which += name + " ";
    }
  EXPECT_LE(files, 6) << which;
  EXPECT_GE(files, 2);
}

}  // namespace
}  // namespace tandem::test
