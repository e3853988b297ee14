// What lies at the edge of what an operation takes: empty tensors, sizes beyond any memory, tensors that are not there,
// calls in the wrong order, names that a file cannot hold. Each works, or is refused with a message.
#include "tests/training.h"

namespace tandem::test {
namespace {

using Edges = OnCpu;

constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();

// ---- empty tensors --------------------------------------------------------------------------------------------------
TEST_F(Edges, ABroadcastHasAGradientAlongAnEmptyAxis) {
  const std::pair<Shape, Shape> shapes[] = {{{1, 6, 1, 1, 2}, {2, 6, 1, 0, 1}},
                                            {{0, 3}, {3}},
                                            {{2, 0}, {2, 1}},
                                            {{2, 1, 3}, {2, 0, 3}},
                                            {{0, 1, 4}, {3, 1}},
                                            {{2, 3, 1, 2}, {1, 3, 0, 1}},
                                            {{1, 0, 1}, {2, 1, 3}}};
  for (const auto& kind : backends())
    for (const auto& [p, q] : shapes) {
      SCOPED_TRACE(kind.name);
      auto backend = kind.make();
      Variable x(Tensor::full(*backend, p, 1), true), y(Tensor::full(*backend, q, 1), true);
      sum(x * y).backward();
      for (const Variable& v : {x, y}) EXPECT_EQ(v.grad().values(), Numbers(std::size_t(v.shape().numel())));
    }
}

TEST_F(Edges, EmptyPicturesAreNormalised) {
  on_backends({DType::f32}, [&](Backend& backend, DType) {
    auto check = [&](const Shape& shape, std::int64_t channels,
                     const std::function<Variable(Variable, Variable, Variable)>& f) {
      SCOPED_TRACE(backend.name() + " " + (std::ostringstream() << shape).str());
      Variable x(Tensor::full(backend, shape, 1), true), gamma(Tensor::full(backend, {channels}, 1), true),
          beta(Tensor::full(backend, {channels}, 1), true);
      Variable y = f(x, gamma, beta);
      EXPECT_EQ(y.shape(), shape);
      sum(y).backward();
      EXPECT_EQ(x.grad().shape(), shape);
      for (const Variable& v : {gamma, beta}) EXPECT_EQ(v.grad().values(), Numbers(std::size_t(channels)));
    };
    auto groups = [](int n) {
      return [n](Variable x, Variable gamma, Variable beta) { return group_norm(x, n, gamma, beta); };
    };
    auto layer = [](Variable x, Variable gamma, Variable beta) { return layer_norm(x, gamma, beta); };
    check({0, 4, 4, 2}, 2, groups(2));
    check({2, 0, 4, 2}, 2, groups(2));
    check({2, 3, 0}, 0, groups(1));
    check({0, 3}, 3, layer);
    check({2, 0}, 0, layer);
  });
}

// ---- sizes ----------------------------------------------------------------------------------------------------------
TEST_F(Edges, SizesBeyondAnyMemoryAreRefused) {
  const Tensor two = Tensor::zeros(*backend, {2});
  const std::int64_t half = std::int64_t{1} << 32, most = std::int64_t{1} << 62;
  for (const Shape& s : {Shape{half, half}, Shape{half / 2, half / 2, 4}, Shape{most}, Shape{3074457345618258604, 6}})
    EXPECT_REFUSED(Tensor t(*backend, s), "the shape [", "more elements than any memory");
  Variable x(Tensor::zeros(*backend, {2, 3}));
  EXPECT_REFUSED(reshape(x, {half, half}), "more elements");
  EXPECT_REFUSED(reshape(x, {6, most, 4, -1}), "more elements");
  EXPECT_REFUSED(pad(x, 0, huge, huge), "pad");
  const Variable picture(Tensor::zeros(*backend, {1, 4, 4, 2}));
  EXPECT_REFUSED(pad_shortcut(picture, 1, huge), "pad_shortcut");
}

TEST_F(Edges, RangesSlicesAndAxesDoNotWrapAround) {
  const Tensor t = Tensor::of(*backend, {3}, {1, 2, 3});
  EXPECT_REFUSED(t.range(huge, {1}), "range", "3 elements");
  EXPECT_REFUSED(t.range(3, {1}), "range");
  EXPECT_REFUSED(t.slice(2, huge), "slice");
  EXPECT_EQ(slice(Variable(t), 0, 1, 3, huge).value().values(), Numbers{2});
  Variable x(Tensor::of(*backend, {2, 2}, {1, 2, 3, 4}), true);
  sum(slice(x, 1, 1, 2, huge)).backward();
  EXPECT_EQ(x.grad().values(), (Numbers{0, 1, 0, 1}));
  for (int axis : {1, 5, -2, -7}) EXPECT_REFUSED(t.size(axis), "no axis", "[3]");
  EXPECT_EQ(t.size(-1), 3);
}

// ---- what is not there ----------------------------------------------------------------------------------------------
TEST_F(Edges, AnUndefinedTensorIsRefusedByEveryMethod) {
  const std::pair<const char*, std::function<void(Tensor&)>> uses[] = {
      {"fill", [](Tensor& t) { t.fill(1); }},
      {"raw", [](Tensor& t) { t.raw(); }},
      {"raw_write", [](Tensor& t) { t.raw_write(); }},
      {"data", [](Tensor& t) { t.data<float>(); }},
      {"write", [](Tensor& t) { t.write<float>(); }},
      {"writes", [](Tensor& t) { t.writes(); }},
      {"values", [](Tensor& t) { t.values(); }},
      {"clone", [](Tensor& t) { t.clone(); }},
      {"copy_from", [](Tensor& t) { t.copy_from(Tensor()); }},
      {"cast", [](Tensor& t) { t.cast(DType::bf16); }},
      {"to", [&](Tensor& t) { t.to(*backend); }}};
  for (const auto& use : uses) {
    Tensor t;
    EXPECT_REFUSED(use.second(t), "undefined Tensor") << use.first;
  }
  Tensor scalar = Tensor::zeros(*backend, {});
  EXPECT_REFUSED(scalar.copy_from(Tensor()), "undefined Tensor");
  EXPECT_REFUSED(Variable().backward(), "loss with one element", "undefined");
}

// ---- options of a convolution ---------------------------------------------------------------------------------------
TEST_F(Edges, ConvolutionsOutOfRangeAreRefused) {
  Variable x(Tensor::zeros(*backend, {1, 4, 4, 2})), w(Tensor::zeros(*backend, {2, 1, 1, 2}));
  EXPECT_REFUSED(conv2d(x, w, {}, {.padding_w = -2}), "conv2d", "-2", "out of range");
  for (int groups : {0, -1, 3})
    EXPECT_REFUSED(Conv2d(4, 8, 3, {.groups = groups}), "Conv2d", std::to_string(groups) + " groups");
}

// ---- calls in the wrong order ---------------------------------------------------------------------------------------
TEST_F(Edges, OptimizersAreRefusedBeforeTheyAreBound) {
  std::unique_ptr<Optimizer> all[] = {std::make_unique<SGD>(SGDOptions{.learning_rate = 0.1, .momentum = 0.9}),
                                      std::make_unique<AdamW>(AdamWOptions{}), std::make_unique<LARS>(LARSOptions{})};
  const Range some{0, 64};
  const std::function<void(Optimizer&)> uses[] = {[&](auto& o) { o.measure(some, false); },
                                                  [&](auto& o) { o.apply(some); },
                                                  [](auto& o) { o.vectors(); },
                                                  [](auto& o) { o.flat(); },
                                                  [](auto& o) { o.sync_hyperparameters(); },
                                                  [](auto& o) { o.step(); },
                                                  [](auto& o) { o.read_state(); },
                                                  [](auto& o) { o.clear_not_finite(); },
                                                  [](auto& o) { o.gradient_norm(); },
                                                  [](auto& o) { o.check_gradients(nullptr); },
                                                  [](auto& o) { o.update(nullptr); },
                                                  [](auto& o) { o.scaled(Variable()); }};
  for (auto& o : all)
    for (auto& use : uses) EXPECT_REFUSED(use(*o), "not bound", "bind") << o->name() << ", use " << &use - uses;
  EXPECT_REFUSED(all[0]->finish_gradients(some), "not bound");
}

TEST_F(Edges, AStepWantsALossWithOneElement) {
  Linear model(2, 2);
  FlatParameters flat(model, *backend, 1);
  BoundSgd sgd(flat, {.learning_rate = 0.1});
  flat.zero_gradients();
  flat.backward(sum(model(Variable(Tensor::full(*backend, {1, 2}, 1)))));
  const auto before = flat.values.values();
  const Tensor none, two = Tensor::zeros(*backend, {2});
  for (const Tensor* loss : {&none, &two}) EXPECT_REFUSED(sgd.step(loss), "step", "loss", "one element");
  EXPECT_EQ(flat.values.values(), before);
}

// ---- names ----------------------------------------------------------------------------------------------------------
TEST_F(Edges, NamesThatACheckpointCannotHoldAreRefused) {
  struct Named : Holder {
    explicit Named(const std::string& name, bool leaf) {
      if (leaf)
        parameter(name, {2}, Initial::zeros());
      else
        child<Linear>(name, 2, 2);
    }
  };
  for (const char* name :
       {"average/fc", "optimizer/velocity/x", "/", "a\nb", "\x01", "a\x7f", "__metadata__", "\xff", "a\xc3"})
    for (bool leaf : {true, false}) EXPECT_REFUSED(Named(name, leaf), "name", "choose another") << name;
  for (const char* name : {"a+b", "x ", "l\xc3\xa4ufer", "\"", "\\"}) EXPECT_NO_THROW(Named(name, false)) << name;
}

}  // namespace
}  // namespace tandem::test
