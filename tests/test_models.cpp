// Models beside torchvision's names and the papers' sizes, and the initialisers beside torch.nn.init's formulas.
#include "layers/layers.h"
#include "layers/models/models.h"
#include "layers/optim/flat_parameters.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

std::int64_t count_parameters(Module& model) {
  std::int64_t count = 0;
  for (auto& [name, p] : model.parameters()) count += p->shape.numel();
  return count;
}

// PyTorch's order of axes: filters OIHW.
Shape in_torch(const Shape& s) { return s.rank() == 4 ? Shape{s[0], s[3], s[1], s[2]} : s; }

// ---- models ---------------------------------------------------------------------------------------------------------
TEST(Torchvision, NamesAndShapesAreOurs) {
  // How many entries, and the hash of all names and shapes, sorted (torchvision_names.py).
  std::map<std::string, std::pair<std::size_t, std::uint64_t>> theirs;
  std::istringstream file(contents(source("tests/reference/torchvision_names.txt")));
  for (std::string model; file >> model;) {
    auto& [entries, hash] = theirs[model.substr(0, model.find('_'))];
    file >> entries >> hash;
  }
  ASSERT_EQ(theirs.size(), 7u);
  // torchvision's documentation of each model
  const std::map<std::string, std::int64_t> documented = {
      {"vgg11", 132'868'840},   {"vgg16", 138'365'992},    {"resnet18", 11'689'512}, {"resnet34", 21'797'672},
      {"resnet50", 25'557'032}, {"resnet101", 44'549'160}, {"resnet152", 60'192'808}};
  for (auto& [model, wanted] : theirs) {
    SCOPED_TRACE(model);
    std::unique_ptr<Module> ours = make_model(model, 1000, 3, 224);
    ours->name_tree();
    EXPECT_EQ(count_parameters(*ours), documented.at(model));
    std::set<std::string> lines;
    auto add = [&](const std::string& name, const Shape& shape) {
      std::string line = name;
      for (std::int64_t size : in_torch(shape)) line += " " + std::to_string(size);
      lines.insert(line);
    };
    for (auto& [name, p] : ours->parameters()) add(name, p->shape);
    for (auto& [name, s] : ours->buffers()) add(name, s->shape);
    std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    std::string all;
    for (const std::string& line : lines) all += line + "\n";
    for (const char c : all) hash = (hash ^ std::uint8_t(c)) * 0x100000001b3u;
    EXPECT_EQ(std::pair(lines.size(), hash), wanted) << all;
  }
}

TEST(Models, HaveThePapersSizes) {
  // As the papers round them
  for (const auto& [name, size] :
       {std::pair{"resnet32", 0.46}, {"resnet44", 0.66}, {"resnet110", 1.7}, {"resnet1202", 19.4}})
    EXPECT_NEAR(double(count_parameters(*make_model(name, 10, 3, 32))) / 1e6, size, size < 1 ? 0.005 : 0.05) << name;
  for (const auto& [name, parameters] : {std::pair{"resnet8", 75'290},
                                         {"resnet20", 269'722},
                                         {"resnet56", 853'018},
                                         {"wrn28-10", 36'479'194},
                                         {"vgg11", 9'231'114},
                                         {"resnet50", 23'520'842},
                                         {"resnet18", 11'173'962}})
    EXPECT_EQ(count_parameters(*make_model(name, 10, 3, 32)), parameters) << name;
  for (const auto& [name, parameters] :
       {std::pair{"smallcnn-bn", 421'738}, {"smallcnn", 421'642}, {"lenet5", 61'706}, {"mlp", 256 * 784 + 256 + 2570}})
    EXPECT_EQ(count_parameters(*make_model(name, 10, 1, 28)), parameters) << name;
  EXPECT_EQ(count_parameters(*make_model("lenet5", 10, 1, 32)), 61'706);
}

TEST(Models, AreCheckedByName) {
  std::istringstream names(model_names());
  int count = 0;
  for (std::string name; names >> name; count++) {
    EXPECT_NO_THROW(check_model_name(name));
    EXPECT_NO_THROW(make_model(name, 10, 1, 28)) << name;
    EXPECT_NO_THROW(make_model(name, 100, 3, 32)) << name;
  }
  EXPECT_EQ(count, 19);
  EXPECT_REFUSED(check_model_name("resnet21"), "resnet21", "there are: mlp", "wrn28-10");
  EXPECT_REFUSED(make_model("vgg11", 10, 3, 16), "vgg11", "16");
  EXPECT_REFUSED(make_model("lenet5", 10, 3, 30), "lenet5", "30");
  EXPECT_REFUSED(make_model("vgg16", 10, 3, 288), "vgg16", "288");
  EXPECT_REFUSED(resnet(19, 10, 3, 32), "resnet", "19");
  EXPECT_REFUSED(resnet_cifar(21, 10, 3), "6n + 2", "21");
  EXPECT_REFUSED(wide_resnet(27, 10, 10, 3), "6n + 4", "27");
}

// One step forward and backward; every gradient is complete, finite and not all zero.
void step(Module& model, const std::string& name, Backend& backend, int side, int batch) {
  SCOPED_TRACE(name + " at " + std::to_string(side));
  FlatParameters flat(model, backend, 1);
  Variable x(Tensor::of(backend, {batch, side, side, 3}, numbers("x", batch * side * side * 3)));
  Tensor labels = Tensor::of(backend, {batch}, numbers("labels", batch, 0, 9, 1), DType::i32);
  flat.zero_gradients();
  Variable y = model(x);
  ASSERT_EQ(y.shape(), Shape({batch, 10}));
  Variable loss = cross_entropy(y, labels);
  flat.backward(loss);
  EXPECT_TRUE(flat.gradients_complete());
  EXPECT_TRUE(std::isfinite(loss.item()));
  Tensor squares(backend, {1}, DType::f32);
  for (const ParameterRange& s : flat.parameter_ranges()) {
    backend.squared_norm(s.leaf->grad, squares, false);
    EXPECT_TRUE(std::isfinite(squares.item())) << s.name;
    EXPECT_GT(squares.item(), 0) << s.name;
  }
}

// Every kind of block, stem and shortcut; the larger models have more of the same.
TEST(Models, EveryFormTakesAStep) {
  auto backend = cpu_backend(2);
  for (auto [name, side] :
       {std::pair{"smallcnn-bn", 28}, {"vgg11", 28}, {"resnet32", 8}, {"resnet18", 16}, {"resnet50", 64}})
    step(*make_model(name, 10, 3, side), name, *backend, side, 2);
  step(*wide_resnet(16, 2, 10, 3), "wide_resnet(16, 2)", *backend, 16, 2);
  for (const BackendKind& kind : backends())
    for (auto [name, side] : {std::pair{"mlp", 8}, {"lenet5", 28}, {"smallcnn", 8}, {"resnet20", 8}}) {
      std::unique_ptr<Backend> each = kind.make();
      step(*make_model(name, 10, 3, side), kind.name + " " + name, *each, side, 4);
    }
}

// ---- initialisers ---------------------------------------------------------------------------------------------------
struct Sample {
  double mean = 0, variance = 0, low = INFINITY, high = -INFINITY;
  explicit Sample(const Numbers& v) {
    for (double x : v) mean += x / double(v.size()), low = std::min(low, x), high = std::max(high, x);
    for (double x : v) variance += (x - mean) * (x - mean) / double(v.size());
  }
};

Numbers drawn(const Initial& how, const Shape& shape, std::uint64_t seed = 1, std::int64_t begin = 0, int threads = 1) {
  Numbers values(static_cast<std::size_t>(shape.numel()), NAN);
  draw(how, shape, seed, begin, values, threads);
  return values;
}

// Five standard errors of mean and variance; kurtosis is the distribution's fourth moment over its variance squared.
void expect_moments(const std::string& name, const Numbers& v, double mean, double variance, double kurtosis) {
  const Sample s(v);
  const double n = double(v.size());
  EXPECT_NEAR(s.mean, mean, 5 * std::sqrt(variance / n)) << name;
  EXPECT_NEAR(s.variance, variance, 5 * variance * std::sqrt((kurtosis - 1) / n)) << name;
}

TEST(Initial, GainsAndFansAreTorchs) {
  // torch.nn.init.calculate_gain, printed with repr
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::linear), 1);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::sigmoid), 1);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::tanh), 1.6666666666666667);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::relu), 1.4142135623730951);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::leaky_relu), 1.4141428569978354);
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::leaky_relu, 0.2), 1.3867504905630728);
  EXPECT_EQ(fan({7, 5}, Fan::in), 5);
  EXPECT_EQ(fan({7, 5}, Fan::out), 7);
  EXPECT_EQ(fan({16, 3, 5, 8}, Fan::in), 120);
  EXPECT_EQ(fan({16, 3, 5, 8}, Fan::out), 240);
  EXPECT_REFUSED(fan({7}, Fan::in), "two axes", "[7]");
}

TEST(Initial, DistributionsHaveTheirMomentsAndBounds) {
  const Shape shape{64, 3, 3, 128};  // 73,728 elements; fan in 1152, fan out 576
  auto uniform = [&](const char* name, const Initial& how, double low, double high) {
    const Numbers v = drawn(how, shape);
    expect_moments(name, v, (low + high) / 2, (high - low) * (high - low) / 12, 1.8);
    const Sample s(v);
    EXPECT_GE(s.low, low) << name;
    EXPECT_LE(s.high, high) << name;
    EXPECT_LT(s.low, low + (high - low) * 1e-3) << name;
    EXPECT_GT(s.high, high - (high - low) * 1e-3) << name;
  };
  auto normal = [&](const char* name, const Initial& how, double mean, double std) {
    const Numbers v = drawn(how, shape);
    expect_moments(name, v, mean, std * std, 3);
    const auto within = std::count_if(v.begin(), v.end(), [&](double x) { return std::abs(x - mean) < std; });
    EXPECT_NEAR(double(within) / double(v.size()), 0.6827, 0.01) << name;
  };
  uniform("uniform", Initial::uniform(2, 5), 2, 5);
  const double xavier = std::sqrt(6.0 / (1152 + 576)), in = std::sqrt(1.0 / 1152), out = std::sqrt(1.0 / 576);
  uniform("xavier_uniform", Initial::xavier_uniform(shape, 2), -2 * xavier, 2 * xavier);
  uniform("kaiming_uniform", Initial::kaiming_uniform(shape), -std::sqrt(6.0) * in, std::sqrt(6.0) * in);
  uniform("kaiming_uniform, √5",  // PyTorch's own default for layers
          Initial::kaiming_uniform(shape, {.slope = std::sqrt(5.0)}), -in, in);
  uniform("fan_in_uniform", Initial::fan_in_uniform(1152), -in, in);
  normal("normal", Initial::normal(-3, 0.5), -3, 0.5);
  normal("xavier_normal", Initial::xavier_normal(shape), 0, xavier / std::sqrt(3.0));
  normal("kaiming_normal", Initial::kaiming_normal(shape, {.nonlinearity = Nonlinearity::tanh}), 0, 5.0 / 3 * in);
  normal("kaiming_normal", Initial::kaiming_normal(shape, {.mode = Fan::out, .nonlinearity = Nonlinearity::relu}), 0,
         std::sqrt(2.0) * out);
  EXPECT_EQ(drawn(Initial::ones(), {3}), Numbers(3, 1.0));
  EXPECT_EQ(drawn(Initial::zeros(), {2}), Numbers(2, 0.0));
  EXPECT_EQ(drawn(Initial::constant(0.25), {2}), Numbers(2, 0.25));
}

// Of a standard normal number between a and b: mean (φ(a) − φ(b))/Z, variance 1 + (a·φ(a) − b·φ(b))/Z − mean².
TEST(Initial, TruncatedNormalIsTheConditionalDistribution) {
  auto density = [](double z) { return std::exp(-z * z / 2) / std::sqrt(2 * M_PI); };
  for (auto [mean, std, low, high] :
       {std::array{0.0, 1.0, -2.0, 2.0}, {1.0, 0.5, 0.0, 1.25}, {0.0, 1.0, 3.0, 9.0}, {0.0, 2.0, -20.0, -9.0}}) {
    const double a = (low - mean) / std, b = (high - mean) / std;
    const double z = 0.5 * (std::erf(b / M_SQRT2) - std::erf(a / M_SQRT2)), shift = (density(a) - density(b)) / z;
    const double variance = 1 + (a * density(a) - b * density(b)) / z - shift * shift;
    const Numbers v = drawn(Initial::trunc_normal(mean, std, low, high), {40'000});
    expect_moments("trunc_normal", v, mean + std * shift, std * std * variance, 9);
    const Sample s(v);
    EXPECT_GE(s.low, low);
    EXPECT_LE(s.high, high);
  }
}

TEST(Initial, OrthogonalIsOrthogonal) {
  for (const Shape& shape : {Shape{24, 3, 3, 8}, Shape{90, 17}, Shape{33, 33}}) {
    const Numbers w = drawn(Initial::orthogonal(2), shape);
    const std::int64_t rows = shape[0], columns = shape.numel() / rows, n = std::min(rows, columns);
    auto at = [&](std::int64_t vector, std::int64_t k) {
      return w[rows <= columns ? vector * columns + k : k * columns + vector];
    };
    for (std::int64_t i = 0; i < n; i++)
      for (std::int64_t j = 0; j <= i; j++) {
        double dot = 0;
        for (std::int64_t k = 0; k < std::max(rows, columns); k++) dot += at(i, k) * at(j, k);
        ASSERT_NEAR(dot, i == j ? 4 : 0, 1e-12) << shape << ' ' << i << ' ' << j;
      }
    const Sample s(w);  // and in no preferred direction
    EXPECT_NEAR(s.mean, 0, 5 * std::sqrt(s.variance / double(w.size())));
  }
}

TEST(Initial, AnElementDependsOnSeedAndPlaceAlone) {
  const Shape shape{300, 150};
  for (const Initial& how : {Initial::uniform(-1, 1), Initial::normal(), Initial::trunc_normal()}) {
    const Numbers whole = drawn(how, shape, 7);
    EXPECT_EQ(whole, drawn(how, shape, 7, 0, 2)) << "threads";
    EXPECT_NE(whole, drawn(how, shape, 8));
    const Numbers tail = drawn(how, {100}, 7, 44'900);
    EXPECT_TRUE(std::equal(tail.begin(), tail.end(), whole.end() - 100)) << "a part of the vector";
  }
  const Initial how = Initial::orthogonal();
  EXPECT_EQ(drawn(how, {30, 20}, 7), drawn(how, {30, 20}, 7));
  EXPECT_NE(drawn(how, {30, 20}, 7), drawn(how, {30, 20}, 8));
  EXPECT_NE(drawn(how, {30, 20}, 7), drawn(how, {30, 20}, 7, 640));
}

// The way that the chapter shows.
TEST(Initial, IsChosenBeforeTheWeightsAreDrawn) {
  auto backend = reference_backend();
  std::unique_ptr<Module> model = make_model("mlp", 10, 1, 8);
  for (auto& [name, p] : model->parameters())
    if (p->shape.rank() == 2) p->initial = Initial::orthogonal();
  FlatParameters flat(*model, *backend, 3);
  const ParameterRange& s = flat.parameter_range("fc2.weight");
  EXPECT_TRUE(close("fc2.weight", flat.values.range(s.local_begin, s.shape).values(),
                    drawn(Initial::orthogonal(), s.shape, 3, s.global_begin), 1e-7));
}

// ---- layers ---------------------------------------------------------------------------------------------------------
TEST(Layers, GroupAndLayerNormDeclareTorchsParameters) {
  auto backend = reference_backend();
  Sequential model;
  model.add<GroupNorm>(2, 6);
  model.add<LayerNorm>(Shape{6});
  FlatParameters flat(model, *backend, 1);
  for (const char* name : {"0.weight", "0.bias", "1.weight", "1.bias"})
    EXPECT_FALSE(flat.parameter_range(name).decay) << name;
  Variable x(Tensor::of(*backend, {2, 3, 3, 6}, numbers("x", 108, 1, 5)));
  const Numbers y = model(x).value().values();
  for (std::size_t row = 0; row < 18; row++) {
    const Sample s(Numbers(y.begin() + 6 * row, y.begin() + 6 * (row + 1)));
    EXPECT_NEAR(s.mean, 0, 1e-6);
    EXPECT_NEAR(s.variance, 1, 1e-3);
  }
  model.eval();
  EXPECT_EQ(model(x).value().values(), y) << "no statistics run";
  EXPECT_REFUSED(GroupNorm(4, 6), "GroupNorm", "6 channels", "4 groups");
}

}  // namespace
}  // namespace tandem::test
