// Operations, optimizers and batches on the device against the reference backend, and twice for the same bits.
#include <algorithm>
#include <cmath>

#include "core/random.h"
#include "core/text.h"
#include "datasets/synthetic.h"
#include "layers/train/options.h"
#include "tests/gpu/table.h"
#include "tests/op_table.h"
#include "tests/recorded_training.h"

namespace tandem::gpu {
namespace {

using test::numbers;
using Values = std::vector<double>;

constexpr DType types[] = {DType::f32, DType::bf16, DType::f16};

Values rounded(Values v, DType type) {
  for (double& x : v) {
    const float narrow = float(x);
    x = type == DType::bf16 ? float(bf16(narrow)) : type == DType::f16 ? float(f16(narrow)) : narrow;
  }
  return v;
}
Values absolute(Values v) {
  for (double& x : v) x = std::abs(x);
  return v;
}

// ---- products and convolutions: sums of K terms ---------------------------------------------------------------------
// Sums are made in f32, of inputs that both sides have rounded alike: |a − b| ≤ 4·ε·√K·(|x|∗|w|) with f32's ε. A result
// in 16 bits is rounded once more, by half a unit of its last place; below f16's smallest normal number that unit
// stands still.
double rounding(DType type, double value) {
  if (type == DType::bf16) return 0x1p-8 * std::abs(value);
  return type == DType::f16 ? std::max(0x1p-11 * std::abs(value), 0x1p-25) : 0;
}
// The largest error in units of the bound: at most 1. `type`: what the result is rounded to. Where a bias was added, of
// at most `bias`, the sum may have been rounded before it, too: it is no larger than the result and the bias.
double worst(const Values& got, const Values& want, const Values& sizes, double k, DType type, double bias = 0) {
  double most = 0;
  for (std::size_t i = 0; i < got.size(); i++) {
    const double sums = 4 * 0x1p-23 * std::sqrt(k) * sizes[i] + 1e-30, size = std::abs(want[i]) + sums;
    const double before = bias > 0 ? rounding(type, size + bias) : 0;
    const double error = std::abs(got[i] - want[i]) / (sums + before + rounding(type, size + before));
    if (!(error <= most)) most = error;
    if (most != most) return INFINITY;
  }
  return most;
}

ConvShape square(std::int64_t n, std::int64_t size, std::int64_t in, std::int64_t out, std::int64_t k = 3,
                 std::int64_t pad = 1, std::int64_t stride = 1, std::int64_t dilation = 1, std::int64_t groups = 1) {
  return {n, size, size, in, out, k, k, stride, stride, pad, pad, dilation, dilation, groups};
}
const ConvShape shapes[] = {
    square(2, 14, 3, 16),
    {.n = 3, .h = 13, .w = 15, .c_in = 16, .c_out = 32, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
    square(2, 8, 64, 64),
    square(2, 16, 16, 32, 3, 1, 2),
    square(2, 8, 64, 32, 1, 0, 2),
    square(1, 32, 3, 8, 7, 3, 2),
    square(2, 9, 8, 8, 3, 2, 1, 2),
    square(2, 9, 8, 16, 3, 1, 1, 1, 4),
    square(2, 31, 3, 24, 2, 0),
    {.n = 1, .h = 6, .w = 5, .c_in = 5, .c_out = 7, .kh = 5, .kw = 3, .pad_h = 2, .pad_w = 1},
};
constexpr const char* passes[] = {"forward", "data", "filter", "forward + bias", "forward + bias, ReLU"};

// What a pass works on, rounded, and how many terms each of its sums has; a and b are pictures, filters or gradients.
struct Operands {
  Values a, b, bias;
  double terms;
  Operands(const ConvShape& s, int pass, DType type) {
    const std::int64_t w = s.c_out * s.kh * s.kw * (s.c_in / s.groups), out = s.n * s.out_h() * s.out_w() * s.c_out;
    const Values x = rounded(numbers("x", s.n * s.h * s.w * s.c_in), type), filters = rounded(numbers("w", w), type),
                 dy = rounded(numbers("dy", out), type);
    a = pass == 1 ? dy : x;
    b = pass == 2 ? dy : filters;
    if (pass > 2) bias = rounded(numbers("bias", s.c_out), type);
    const double each = double(s.kh * s.kw) / double(s.groups);
    terms = pass == 1   ? each * double(s.c_out)
            : pass == 2 ? double(s.n * s.out_h() * s.out_w())
                        : each * double(s.c_in);
  }
};
Operands absolute(Operands o) {
  for (Values* v : {&o.a, &o.b, &o.bias}) *v = absolute(std::move(*v));
  return o;
}

// One pass of a convolution on any backend.
Values convolved(Backend& backend, const ConvShape& s, int pass, const Operands& o, DType type,
                 const Values* old = nullptr) {
  const Shape in{s.n, s.h, s.w, s.c_in}, out{s.n, s.out_h(), s.out_w(), s.c_out},
      filter{s.c_out, s.kh, s.kw, s.c_in / s.groups};
  const DType wide = type == DType::f64 ? DType::f64 : DType::f32;
  auto on = [&](const Values& v, const Shape& shape, DType t) { return Tensor::of(backend, shape, v, t); };
  Tensor y(backend, pass == 1 ? in : pass == 2 ? filter : out, pass == 2 ? wide : type);
  if (old) y = on(*old, in, type);
  if (pass == 1)
    backend.conv2d_backward_data(s, on(o.a, out, type), on(o.b, filter, wide), y, old != nullptr);
  else if (pass == 2)
    backend.conv2d_backward_filter(s, on(o.a, in, type), on(o.b, out, type), y, false);
  else {
    const Tensor bias = pass > 2 ? on(o.bias, {s.c_out}, wide) : Tensor();
    backend.conv2d(s, on(o.a, in, type), on(o.b, filter, wide), pass > 2 ? &bias : nullptr, pass == 4, y);
  }
  return y.values();
}

std::string text_of(const ConvShape& s, int pass, DType type) {
  return printed("conv2d %s %s [%d,%d,%d,%d] → %d, %d×%d / %d%s", passes[pass], name_of(type), int(s.n), int(s.h),
                 int(s.w), int(s.c_in), int(s.c_out), int(s.kh), int(s.kw), int(s.stride_h),
                 s.groups > 1 ? ", groups" : "");
}

struct Product {
  std::int64_t m, n, k;
};
constexpr Product products[] = {{5, 7, 3}, {128, 10, 256}, {130, 257, 512}};
Values multiplied(Backend& backend, const Product& p, bool ta, bool tb, const Values& a, const Values& b, DType type) {
  Tensor c(backend, {p.m, p.n}, type);
  backend.gemm(ta, tb, Tensor::of(backend, ta ? Shape{p.k, p.m} : Shape{p.m, p.k}, a, type),
               Tensor::of(backend, tb ? Shape{p.n, p.k} : Shape{p.k, p.n}, b, type), c, false);
  return c.values();
}

void check_sums(Backend& device, Backend& host, DType type, Table& table) {
  for (const ConvShape& s : shapes)
    for (int pass = 0; pass < 5; pass++) {
      const Operands o(s, pass, type);
      // A filter gradient is f32, but comes through the pictures' type.
      table.check(text_of(s, pass, type),
                  worst(convolved(device, s, pass, o, type), convolved(host, s, pass, o, DType::f64),
                        convolved(host, s, pass, absolute(o), DType::f64), o.terms, type, pass > 2 ? 1 : 0),
                  1, "of the bound");
    }
  for (const ConvShape& s : shapes) {
    const Operands o(s, 1, type);
    const Values once = convolved(device, s, 1, o, type),
                 old = rounded(numbers("old", std::int64_t(once.size())), type),
                 added = convolved(device, s, 1, o, type, &old);
    double most = 0;
    for (std::size_t i = 0; i < once.size(); i++)
      most = std::max(
          most, std::abs(added[i] - (once[i] + old[i])) / (1e-5 + rounding(type, once[i]) + rounding(type, added[i])));
    table.check(text_of(s, 1, type) + ", added to what is there", most, 1.01, "of the bound");
  }
  Operands o(shapes[1], 4, type);
  for (double& b : o.bias) b = NAN;
  const Values y = convolved(device, shapes[1], 4, o, type);
  table.check(std::string("conv2d forward + NaN, ReLU ") + name_of(type) + ": results that are numbers",
              double(std::count_if(y.begin(), y.end(), [](double v) { return v == v; })), 0);
  for (const Product& p : products)
    for (bool ta : {false, true})
      for (bool tb : {false, true}) {
        const Values a = rounded(numbers("a", p.m * p.k), type), b = rounded(numbers("b", p.n * p.k), type);
        const std::string what = printed("gemm %s %s%s [%d,%d]·[%d,%d]", name_of(type), ta ? "T" : "N", tb ? "T" : "N",
                                         int(p.m), int(p.k), int(p.k), int(p.n));
        table.check(what,
                    worst(multiplied(device, p, ta, tb, a, b, type), multiplied(host, p, ta, tb, a, b, DType::f64),
                          multiplied(host, p, ta, tb, absolute(a), absolute(b), DType::f64), double(p.k), type),
                    1, "of the bound");
      }
}

// ---- the op table ---------------------------------------------------------------------------------------------------
struct Drawn {
  std::vector<Values> inputs;
  Values dy;
};
Drawn drawn(Backend& backend, const test::Row& row, const test::Case& c, DType type) {
  Drawn d;
  std::vector<Variable> inputs;
  for (std::size_t i = 0; i < c.inputs.size(); i++) {
    d.inputs.push_back(rounded(test::values_of(row.op, c, i), type));
    inputs.emplace_back(Tensor::of(backend, c.inputs[i].shape, d.inputs.back(), test::type_of(c.inputs[i], type)));
  }
  d.dy = rounded(test::dy_of(row.op, c, c.y(inputs).value().numel()), type);
  return d;
}

// Errors are measured by the largest value of a tensor; f16 has numbers of few digits below 2⁻¹².
double error_of(const test::Result& got, const test::Result& want, DType type) {
  const double floor = type == DType::f16 ? 0x1p-12 : 1e-6;
  double most = test::difference(got.y, want.y, floor).error;
  for (std::size_t i = 0; i < want.gradients.size(); i++)
    most = std::max(most, test::difference(got.gradients[i], want.gradients[i], floor).error);
  return most;
}

void check_table(Backend& device, Backend& host, Table& table) {
  for (const test::Row& row : test::table())
    for (DType type : types) {
      if (!device.supports(type)) continue;
      const std::string what = row.op + " " + name_of(type) + ", " + std::to_string(row.cases.size()) + " cases";
      if (!table.time_for(what)) continue;
      double most = 0;
      std::string at;
      for (const test::Case& c : row.cases) {
        const Drawn d = drawn(device, row, c, type);
        const test::Result got = evaluate(c, device, type, d.inputs, d.dy),
                           again = evaluate(c, device, type, d.inputs, d.dy);
        if (got.y != again.y || got.gradients != again.gradients)
          table.check(what + ", " + c.name + ": the same bits twice", 1, 0, "differences");
        const double error = error_of(got, evaluate(c, host, DType::f64, d.inputs, d.dy), type);
        if (error >= most) most = error, at = c.name;
      }
      // f16 has three bits more than bf16; a share of the largest value is what PyTorch and the CPU are held to.
      table.check(what + " (worst: " + at + ")", most,
                  type == DType::f32    ? row.f32
                  : type == DType::bf16 ? row.bf16
                                        : row.bf16 / 8,
                  "of the largest");
    }
}

// ---- optimizers, batches, a recorded step ---------------------------------------------------------------------------
// The parameters after five steps with given gradients.
Values updated(Backend& backend, const std::string& name) {
  auto model = make_model("lenet5", 10, 1, 28);
  FlatParameters flat(*model, backend, 1);
  auto optimizer = make_optimizer({.learning_rate = 0.01, .optimizer = name, .clip = 2});
  optimizer->bind(flat, 1);
  for (int step = 0; step < 5; step++) {
    for (const ParameterRange& s : flat.parameter_ranges())
      flat.gradients.range(s.local_begin, s.shape)
          .copy_from(Tensor::of(backend, s.shape, numbers(s.name + std::to_string(step), s.length)));
    optimizer->sync_hyperparameters();
    optimizer->measure(flat.all(), false);
    optimizer->check_gradients(nullptr);
    optimizer->apply(flat.all());
    flat.count_writes(flat.all());
  }
  return flat.values.values();
}

Values pictures_of(Backend& backend, DType type, const Augment& augment) {
  const Dataset data = synthetic({.side = 32, .channels = 3, .train = 96, .test = 16});
  Loader loader(data.train, {.batch = 32, .dtype = type, .augment = augment, .seed = 5, .prefetch = 0}, backend);
  Values all;
  loader.start(1);
  for (Batch batch; loader.next(batch);)
    for (const Values& v : {batch.images.values(), batch.labels.values(), batch.samples.values()})
      all.insert(all.end(), v.begin(), v.end());
  return all;
}
const std::pair<const char*, Augment> augments[] = {
    {"as they are", {}}, {"cropped, mirrored, cut out", {.pad_crop = 4, .flip = true, .cutout = 8}}};

// Parameters after `steps`, the last of them replays where the device records.
Values trained(Backend& backend, DType type, int steps, bool eagerly) {
  const Dataset data = synthetic({.side = 28, .channels = 1, .train = 256, .test = 16});
  const LoaderOptions options{
      .batch = 32, .dtype = type, .augment = {.pad_crop = 2, .flip = true}, .seed = 1, .prefetch = 0};
  Loader loader(data.train, options, backend);
  test::RecordedTraining training(backend, make_model("smallcnn-bn", 10, 1, 28), 0.02, type);
  training.steps(steps, loader, eagerly);
  return training.flat.values.values();
}

std::size_t differences(const Values& a, const Values& b) {
  std::size_t n = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); i++) n += !(a[i] == b[i]);
  return n;
}

std::unique_ptr<Backend> exact(std::unique_ptr<Backend> backend) {
  backend->deterministic(true);
  backend->exact_convolution(true);
  return backend;
}

}  // namespace

void check_operations(const Machine& machine, Table& table) {
  auto device = exact(machine.device()), host = exact(reference_backend(4));
  for (DType type : types)
    if (device->supports(type) && table.time_for(std::string("conv2d and gemm ") + name_of(type)))
      check_sums(*device, *host, type, table);
  check_table(*device, *host, table);
  for (const char* name : {"sgd", "adamw", "lars"})
    if (table.time_for(name))
      table.check(std::string(name) + ", clipped: parameters after five steps",
                  test::difference(updated(*device, name), updated(*host, name)).error, 2e-6, "of the largest");
  for (const auto& [name, augment] : augments)
    table.check(std::string("a batch of pictures, ") + name + ": differences in any bit",
                double(differences(pictures_of(*device, DType::f32, augment), pictures_of(*host, DType::f32, augment))),
                0);
  for (DType type : types) {
    const std::string what = std::string("twelve steps ") + name_of(type);
    if (!device->supports(type) || !table.time_for(what)) continue;
    const Values once = trained(*device, type, 12, false);
    auto other = exact(machine.device());
    table.check(what + ", deterministic, twice: parameters that differ",
                double(differences(once, trained(*other, type, 12, false))), 0);
    if (device->records())
      table.check(what + ", replayed and eager: parameters that differ",
                  double(differences(once, trained(*device, type, 12, true))), 0);
  }
  check_ranks(machine, table);
}

void touch_operations(const Machine& machine, Table&) {
  auto device = exact(machine.device());
  for (DType type : types) {
    if (!device->supports(type)) continue;
    for (const ConvShape& s : shapes)
      for (int pass = 0; pass < 5; pass++) convolved(*device, s, pass, Operands(s, pass, type), type);
    for (const Product& p : products)
      multiplied(*device, p, false, true, numbers("a", p.m * p.k), numbers("b", p.n * p.k), type);
    for (const test::Row& row : test::table())
      for (const test::Case& c : row.cases) {
        const Drawn d = drawn(*device, row, c, type);
        evaluate(c, *device, type, d.inputs, d.dy);
      }
    trained(*device, type, 4, false);
  }
  for (const char* name : {"sgd", "adamw", "lars"}) updated(*device, name);
  for (const auto& [name, augment] : augments) pictures_of(*device, DType::f32, augment);
  std::printf("touched every operation once\n");
}

}  // namespace tandem::gpu
