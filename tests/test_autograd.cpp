// The tape and its engine: what it may not do (recurse, corrupt, leak, read stale values) and what it promises (each
// hook once, gradients that add up, a steady state that asks the system for nothing).
#include <pthread.h>

#include <future>
#include <new>

#include "tests/bench/timing.h"
#include "tests/training.h"

// ---- every request to the C++ heap, counted while somebody asks -----------------------------------------------------
namespace {

std::atomic<bool> counting{false};
std::atomic<std::uint64_t> heap_requests{0}, heap_largest{0};

void* from_heap(std::size_t bytes, std::size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) {
    heap_requests.fetch_add(1, std::memory_order_relaxed);
    std::uint64_t largest = heap_largest.load(std::memory_order_relaxed);
    while (bytes > largest && !heap_largest.compare_exchange_weak(largest, bytes)) {}
  }
  bytes = std::max<std::size_t>(bytes, 1);
  void* p =
      alignment ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment) : std::malloc(bytes);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

// Weak, because the sanitizers of clang bring their own: then nothing is counted.
[[gnu::weak]] void* operator new(std::size_t bytes) { return from_heap(bytes, 0); }
[[gnu::weak]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return from_heap(bytes, static_cast<std::size_t>(alignment));
}
// std::stable_sort asks this one.
[[gnu::weak]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return from_heap(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::weak]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::weak]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::weak]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::weak]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace tandem::test {
namespace {

struct Tape : testing::Test {
  std::unique_ptr<Backend> owner_ = reference_backend(1);
  Backend& backend_ = *owner_;

  Variable leaf(const Shape& shape, std::initializer_list<double> values, DType dtype = DType::f64) {
    return Variable(Tensor::of(backend_, shape, values, dtype), true, "x");
  }
};

// A stack on which recursion over 200,000 nodes, or over 5,000, cannot live.
void on_small_stack(std::function<void()> body) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 256 * 1024), 0);
  pthread_t thread;
  auto run = [](void* f) -> void* {
    try {
      (*static_cast<std::function<void()>*>(f))();
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &body), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

Variable chain(Variable x, int length) {
  for (int i = 0; i < length; i++) x = scale(x, 1, 1);
  return x;
}

// ---- depth ----------------------------------------------------------------------------------------------------------
constexpr int deep = 200'000;

TEST_F(Tape, LongChainRunsAndIsReleasedWithoutRecursion) {
  on_small_stack([&] {
    Variable x = leaf({1}, {3});
    Variable y = chain(x, deep);
    EXPECT_EQ(y.item(), 3 + deep);
    y.backward();
    EXPECT_EQ(x.grad().item(), 1);
  });
}

TEST_F(Tape, LongChainIsDroppedWithoutBackward) {
  on_small_stack([&] {
    const std::uint64_t before = living_nodes();
    {
      Variable x = leaf({1}, {3});
      Variable y = chain(x, deep);
      EXPECT_EQ(living_nodes(), before + deep + 1);
    }
    EXPECT_EQ(living_nodes(), before);
    Variable x = leaf({1}, {3});
    Variable middle = chain(x, deep / 2);
    { Variable end = chain(middle, deep / 2); }  // the first half lives on
    EXPECT_EQ(living_nodes(), before + deep / 2 + 1);
    middle.backward();
    EXPECT_EQ(x.grad().item(), 1);
  });
}

TEST_F(Tape, WideAndDeepLattice) {
  on_small_stack([&] {  // every value is used twice: 2^n paths, n nodes
    Variable x = leaf({1}, {1});
    Variable y = x;
    for (int i = 0; i < 40; i++) y = y + y;
    y.backward();
    EXPECT_EQ(x.grad().item(), 0x1p40);
  });
}

// ---- sums -----------------------------------------------------------------------------------------------------------
TEST_F(Tape, SharedWeightsFireOneHookWithTheWholeSum) {
  Variable w = leaf({2}, {3, -4}), x = leaf({2}, {5, 7});
  int calls = 0;
  Numbers seen;
  w.leaf()->hook = [&](Leaf& l) {
    calls++;
    seen = l.grad.values();
  };
  // w·x + w·w + w: used four times, at different depths
  sum(w * x + chain(w, 5) * w + w).backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(seen, (Numbers{5 + 2 * 3 + 5 + 1, 7 + 2 * -4 + 5 + 1}));
  EXPECT_EQ(w.grad().values(), seen);
}

// Where one gradient tensor goes to two inputs, and one of them masks it in place, the other must not see that.
TEST_F(Tape, ResidualJoinsDoNotCorruptEachOther) {
  std::vector<Tensor> inputs;
  for (const auto& [name, s] : {std::pair{"x", Shape{6, 5}}, {"w", {5, 5}}, {"v", {5, 5}}, {"gamma", {5}}})
    inputs.push_back(Tensor::of(backend_, s, numbers(name, s.numel()), DType::f64));
  using In = std::span<const Variable>;
  using X = const Variable&;
  // One leaf for gamma and beta: two gradients of one operation meet in it.
  auto norm = [&](X a, X g, X residual) {
    Tensor mean = Tensor::zeros(a.backend(), {5}, DType::f64), variance = Tensor::full(a.backend(), {5}, 1, DType::f64);
    return batch_norm(a, g, g, mean, variance, {.relu = true}, residual);
  };
  auto masked = [](X a, X w) { return linear(a, w, {}, true); };
  // Of the leaves, of a branch h that masks, and of d, twice x.
  const std::vector<std::pair<const char*, std::function<Variable(In, X h, X d)>>> graphs = {
      {"two branches that mask", [&](In i, X h, X) { return h + masked(i[0], i[2]); }},
      {"a branch and the identity", [](In i, X h, X) { return h + i[0]; }},
      {"the identity and a branch", [&](In i, X, X d) { return d + masked(d, i[1]); }},
      {"a sum with itself", [](In, X h, X) { return h + h; }},
      {"a sum of sums", [&](In i, X h, X) { return (h + i[0]) + (h + masked(h, i[2])); }},
      {"a branch that adds later",
       [](In i, X, X) {  // the join runs first; doubled must not add to what both branches hold
         Variable a = linear(i[0], i[1]), b = linear(i[0], i[2]), doubled = scale(a, 2);
         return (a + b) + doubled;
       }},
      {"through reshape",
       [&](In i, X h, X) {
         return reshape(reshape(h, {30}) + reshape(masked(i[0], i[2]), {30}), {6, 5}) + h;
       }},
      {"batch norm's residual",
       [&](In i, X h, X) {
         Variable y = norm(linear(h, i[2]), i[3], h);
         return norm(linear(y, i[1]), i[3], y) + y;
       }},
      {"batch norm's residual is its input", [&](In i, X, X d) { return norm(d, i[3], d); }},
      {"cat and slice",
       [](In i, X h, X) {
         Variable both = cat(std::vector{h, i[0], h}, 0);
         return slice(both, 0, 0, 6) + slice(both, 0, 12, 18) + slice(both, 0, 6, 12);
       }},
  };
  for (auto& [name, f] : graphs) {
    GradientReport r = check_gradient([&, &f = f](In i) { return f(i, masked(i[0], i[1]), scale(i[0], 2)); }, inputs);
    EXPECT_TRUE(r.passed) << name << ": " << r.text;
  }
}

TEST_F(Tape, GradientsAddUpUntilZeroed) {
  Variable x = leaf({2}, {1, 2});
  for (int pass = 1; pass <= 3; pass++) {
    sum(square(x)).backward();
    EXPECT_EQ(x.grad().values(), (Numbers{2.0 * pass, 4.0 * pass}));
  }
  x.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  sum(x).backward();
  EXPECT_EQ(x.grad().values(), (Numbers{1, 1}));
}

TEST_F(Tape, TwoLossesOverOneTrunk) {
  Variable x = leaf({2}, {1, 2});
  Variable trunk = square(x);
  Variable first = sum(trunk), second = sum(trunk * trunk);
  first.backward({.keep = true});
  second.backward();
  EXPECT_EQ(x.grad().values(), (Numbers{2 + 4, 4 + 4 * 8}));
}

TEST_F(Tape, SeedScalesTheGradient) {
  Variable x = leaf({}, {3});
  square(x).backward({.seed = 128});
  EXPECT_EQ(x.grad().item(), 768);
  x.zero_grad();
  x.backward({.seed = 5});  // a leaf is a loss too
  EXPECT_EQ(x.grad().item(), 5);
}

// ---- leaves and gradient slots --------------------------------------------------------------------------------------
TEST_F(Tape, UnusedLeafFiresAtTheEndWithZero) {
  Variable x = leaf({1}, {1}), unused = leaf({3}, {1, 2, 3}), w = leaf({1}, {2});
  std::vector<std::string> order;
  for (auto [v, name] : {std::pair{&x, "x"}, {&unused, "unused"}, {&w, "w"}})
    v->leaf()->hook = [&order, name = name](Leaf&) { order.push_back(name); };
  std::vector<Leaf*> leaves{unused.leaf(), x.leaf(), w.leaf()};
  sum(square(x * w)).backward({.leaves = leaves});
  ASSERT_EQ(order.size(), 3u);
  EXPECT_EQ(order.back(), "unused");
  EXPECT_EQ(unused.grad().values(), (Numbers{0, 0, 0}));
  sum(unused).backward({.leaves = leaves});  // adds to what is there; the others get nothing more
  EXPECT_EQ(unused.grad().values(), (Numbers{1, 1, 1}));
  EXPECT_EQ(order.size(), 6u);
  EXPECT_EQ(x.grad().item(), 8);
}

TEST_F(Tape, UnusedLeafFiresOnWhateverThreadBackwardRuns) {
  Variable x = leaf({1}, {1}), unused = leaf({1}, {2});
  int calls = 0;
  unused.leaf()->hook = [&](Leaf&) { calls++; };
  std::vector<Leaf*> leaves{unused.leaf(), x.leaf()};
  std::thread([&] { sum(x * unused).backward(); }).join();
  EXPECT_EQ(calls, 1);
  std::thread([&] {
    sum(x).backward({.leaves = leaves});
  }).join();  // this thread's first pass, as that one was the other's
  EXPECT_EQ(calls, 2);
}

// Says which gradients were wanted, and hands the same tensor to all who want one.
struct ProbeNode : Node {
  static constexpr auto name = "probe";
  std::vector<bool>* wanted;
  explicit ProbeNode(std::vector<bool>* w) : Node(name), wanted(w) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    for (GradientSlot& s : slots) {
      wanted->push_back(s.wanted());
      if (s.wanted()) s.accumulate(dy);
    }
  }
};
Variable probe(const Variable& a, const Variable& b, std::vector<bool>* wanted) {
  return record<ProbeNode>(a.value().clone(), {&a, &b}, {}, wanted);
}

TEST_F(Tape, GradientOfTheFirstLayersInputIsNotWanted) {
  Variable picture(Tensor::zeros(backend_, {1, 4, 4, 1}, DType::f64)),
      w(Tensor::zeros(backend_, {2, 3, 3, 1}, DType::f64), true);
  Variable y = conv2d(picture, w, {});
  EXPECT_FALSE(y.node()->inputs[0]);
  EXPECT_TRUE(y.node()->inputs[1]);
  EXPECT_FALSE(y.node()->inputs[2]);
  std::vector<bool> wanted;
  sum(probe(picture, Variable(picture.value(), true), &wanted)).backward();
  EXPECT_EQ(wanted, (std::vector<bool>{false, true}));
  wanted.clear();
  Variable h = scale(picture, 1);  // still a constant
  sum(probe(h, relu(Variable(picture.value(), true)), &wanted)).backward();
  EXPECT_EQ(wanted, (std::vector<bool>{false, true}));
}

TEST_F(Tape, AGradientHandedToTwoLeavesIsTwoGradients) {
  Variable a = leaf({2}, {1, 2}), b = leaf({2}, {3, 4});
  std::vector<bool> wanted;
  sum(probe(a, b, &wanted)).backward();
  a.grad().fill(7);
  EXPECT_EQ(b.grad().values(), (Numbers{1, 1}));
}

TEST_F(Tape, AnOperationMayPassNothingOn) {
  Variable x = leaf({1}, {3}), h = square(x);
  Variable blocked = record<SilentNode>(h.value().clone(), {&h}, {});
  (blocked + h).backward();
  EXPECT_EQ(x.grad().item(), 6);
  x.zero_grad();
  Variable g = square(x);
  Variable(record<SilentNode>(g.value().clone(), {&g}, {})).backward();
  EXPECT_EQ(x.grad().item(), 0);
}

// ---- refusals -------------------------------------------------------------------------------------------------------
TEST_F(Tape, BackwardStartsFromOneElement) {
  Variable x = leaf({2}, {1, 2});
  EXPECT_REFUSED(square(x).backward(), "one element", "[2]");
  EXPECT_REFUSED(sum(Variable(x.value())).backward(), "requires a gradient");
}

TEST_F(Tape, SecondBackwardNeedsKeep) {
  Variable x = leaf({2}, {1, 2});
  Variable y = sum(square(x));
  y.backward();
  EXPECT_REFUSED(y.backward(), "second time", "keep");
  Variable trunk = square(x);
  sum(trunk).backward();
  EXPECT_REFUSED(sum(trunk * trunk).backward(), "second time", "square");
}

TEST_F(Tape, NoGradRecordsNothing) {
  Variable x = leaf({1}, {2});
  {
    NoGrad off;
    EXPECT_FALSE(square(x).requires_grad());
    { NoGrad again; }
    EXPECT_FALSE(square(x).requires_grad()) << "the inner scope ended, the outer did not";
  }
  EXPECT_TRUE(square(x).requires_grad());
  EXPECT_FALSE(square(x.detach()).requires_grad());
  EXPECT_FALSE(square(Variable(x.value())).requires_grad());
}

TEST_F(Tape, ChangedSinceSavedIsRefusedByName) {
  std::unique_ptr<Module> model = mlp(3, 1, 4);
  FlatParameters flat(*model, backend_, 1);
  Tensor x = Tensor::full(backend_, {2, 4, 4, 1}, 0.5), labels = Tensor::zeros(backend_, {2}, DType::i32);
  auto loss = [&] { return cross_entropy((*model)(Variable(x)), labels); };

  Variable l = loss();
  flat.parameter_range("fc2.weight").leaf->value.fill(0.1);
  EXPECT_REFUSED(flat.backward(l), "fc2.weight", "changed", "linear in fc2");

  l = loss();
  BoundSgd sgd(flat, {.learning_rate = 0.1});
  flat.zero_gradients();
  flat.backward(loss());
  sgd.step();  // between the forward and the backward pass of l
  EXPECT_REFUSED(flat.backward(l), ".weight", "changed", "linear in fc");

  l = loss();
  x.fill(0.25);  // kept by the first layer through flatten's shared memory
  EXPECT_REFUSED(flat.backward(l), "a tensor changed", "linear in fc1");

  l = loss();
  flat.parameter_range("fc1.bias").leaf->value.fill(0);  // not needed for any gradient
  flat.zero_gradients();
  EXPECT_NO_THROW(flat.backward(l));
  EXPECT_TRUE(flat.gradients_complete());
}

struct FaultyNode : Node {
  static constexpr auto name = "faulty";
  bool* fails;
  explicit FaultyNode(bool* f) : Node(name), fails(f) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    if (*fails) fail("as asked");
    slots[0].accumulate(dy);
  }
};

TEST_F(Tape, APassThatThrewLeavesNothingBehind) {
  Variable x = leaf({1}, {3}), h = square(x);
  bool fails = true;
  Variable y = record<FaultyNode>(h.value().clone(), {&h}, {}, &fails) + h;
  EXPECT_REFUSED(y.backward({.keep = true}), "as asked");
  fails = false;
  y.backward();
  EXPECT_EQ(x.grad().item(), 12) << "h had received one of its two gradients when the first pass failed";
}

// ---- checks for values that are not finite --------------------------------------------------------------------------
template <Variable (*f)(const Variable&)>
class Apply : public Module {
 public:
  Variable forward(const Variable& x) override { return f(x); }
};

TEST_F(Tape, NotFiniteIsTracedToItsOperation) {
  struct Inner : Holder {
    Inner() {
      child<Linear>("fc", 2, 2);
      child<Apply<log>>("logarithm");
      child<Apply<sqrt>>("root");
    }
  };
  Sequential model;
  Inner& inner = model.add<Inner>();
  FlatParameters flat(model, backend_, 1);
  auto run = [&](int which, double value) {
    Module& m = *inner.children()[which].second;
    Variable x(Tensor::full(backend_, {2}, value), true, "input");
    Variable y = sum(m(x));
    y.backward();
  };
  EXPECT_NO_THROW(run(1, -1)) << "nobody looks unless asked";
  mode().check = true;
  EXPECT_TRUE(holds(error_of<NotFinite>([&] { run(1, -1); }), {"log in 0.logarithm", "[2]"}));
  EXPECT_REFUSED(run(2, 0), "backward", "sqrt in 0.root", "input");
  EXPECT_NO_THROW(run(2, 1));
  mode().check = false;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
TEST_F(Tape, NodesMayDieOnAnotherThread) {
  for (int round = 0; round < 3; round++) {
    Variable x, y;
    std::thread([&] {
      x = leaf({1}, {2});
      y = square(chain(x, 2000));
    }).join();  // the thread is gone, its nodes are not
    y.backward();
    EXPECT_EQ(x.grad().item(), 2 * 2002);
  }
  const std::uint64_t before = living_nodes();
  std::vector<std::promise<Variable>> made(2000);
  std::thread maker([&] {
    Variable x = leaf({1}, {2});
    for (auto& m : made) m.set_value(chain(x, 50));
  });
  for (auto& m : made) m.get_future().get();  // and drops it, while the next ones are made
  maker.join();
  EXPECT_EQ(living_nodes(), before);
}

struct Trainer {
  Backend& backend;
  std::unique_ptr<Module> model;
  FlatParameters flat;
  SGD sgd{{.learning_rate = 0.01, .momentum = 0.9, .nesterov = true, .weight_decay = 1e-4}};
  Tensor x, labels;
  Variable loss;  // of the last step, kept as a user's variable would be

  Trainer(Backend& b, std::unique_ptr<Module> m, const Shape& pictures, DType dtype)
      : backend(b), model(std::move(m)), flat(*model, b, 7) {
    sgd.bind(flat);
    x = Tensor::of(b, pictures, numbers("pictures", pictures.numel()), dtype);
    labels = Tensor::of(b, {pictures[0]}, numbers("labels", pictures[0], 0, 9, 1), DType::i32);
  }
  void step() {
    flat.zero_gradients();
    loss = cross_entropy((*model)(Variable(x)), labels);
    flat.backward(loss);
    sgd.step(&loss.value());
  }
};

TEST_F(Tape, AThousandStepsAskTheSystemForNothing) {
  const int steps = sanitized() ? 100 : 1000;  // and there sizes are not compared
  counting = true;
  ::operator delete(::operator new(1));
  counting = false;
  EXPECT_TRUE(heap_requests > 0 || sanitized()) << "nothing is counted";
  for (const BackendKind& kind : backends())
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::unique_ptr<Backend> backend = kind.make_with(1);
      if (!backend->supports(dtype)) continue;
      SCOPED_TRACE(kind.name + " " + name_of(dtype));
      const int side = backend->name() == "reference" ? 4 : 12;
      Trainer trainer(*backend, smallcnn(10, 1, side), {2, side, side, 1}, dtype);
      trainer.step();
      trainer.step();
      const MemoryStatistics begin = backend->memory().statistics();
      const std::uint64_t nodes = living_nodes();
      auto counted = [&](int n) {
        heap_requests = 0;
        counting = true;
        for (int i = 0; i < n; i++) trainer.step();
        counting = false;
        return double(heap_requests) / n;
      };
      heap_largest = 0;
      const double early = counted(20);
      for (int i = 20; i < steps / 2; i++) trainer.step();
      const auto resident = std::int64_t(of_this_process("VmRSS:"));
      for (int i = steps / 2; i < steps - 20; i++) trainer.step();
      const double late = counted(20);
      const MemoryStatistics end = backend->memory().statistics();
      EXPECT_EQ(end.source_calls, begin.source_calls) << "memory was asked for after step 2";
      EXPECT_EQ(end.live_bytes, begin.live_bytes);
      EXPECT_EQ(end.live_blocks, begin.live_blocks);
      EXPECT_EQ(end.peak_bytes, begin.peak_bytes);
      EXPECT_EQ(living_nodes(), nodes);
      EXPECT_LE(late, early) << "requests to the heap grow";
      EXPECT_LT(heap_largest, 4096u) << "a tensor, or something as large, came from the heap";
      EXPECT_LT(sanitized() ? 0 : std::int64_t(of_this_process("VmRSS:")) - resident, 1 << 20) << "the process grows";
      EXPECT_TRUE(std::isfinite(trainer.loss.item()));
      std::cout << "  " << kind.name << " " << name_of(dtype) << ": " << late << " heap requests a step, the largest "
                << heap_largest << " bytes; " << end.requests / (steps + 2) << " blocks a step from the allocator, "
                << end.source_calls << " from the system in all\n";
    }
}

// Two ranks in one process: nothing is shared, so nothing races (make test SANITIZE=thread), and both get the same
// numbers.
TEST_F(Tape, TwoThreadsTrainSideBySide) {
  for (const BackendKind& kind : backends()) {
    Numbers weights[2];
    auto train = [&](int rank) {
      std::unique_ptr<Backend> backend = kind.make_with(1);
      backend->deterministic(true);
      Trainer trainer(*backend, resnet_cifar(20, 10, 3), {2, 8, 8, 3}, DType::f32);
      for (int i = 0; i < 3; i++) trainer.step();
      weights[rank] = trainer.flat.values.values();
    };
    std::thread other([&] { train(1); });
    train(0);
    other.join();
    EXPECT_EQ(weights[0], weights[1]) << kind.name;
    for (double w : weights[0]) ASSERT_TRUE(std::isfinite(w));
  }
}

}  // namespace
}  // namespace tandem::test
