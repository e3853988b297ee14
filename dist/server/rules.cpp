// The update rules, a few lines each. η: learning rate, μ: momentum, τ: updates of the shard between this worker's pull
// and its push, τ̄: the running mean of τ, n: workers, w_sent: the weights sent to the worker, g: its gradient.
//
// To add a rule, write its formula here and add a row to table(). The row has its --strategy name. Then add a line to
// dist/lab/README.md.
#include "dist/server/rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "core/error.h"
#include "core/math.h"
#include "core/spec.h"
#include "core/text.h"

namespace tandem {
namespace {

using Constants = std::map<std::string, double>;
constexpr std::int64_t block = 64;  // elements that share a learning-rate scale

// The formulas receive numbers rounded to f32, as the optimizers store theirs.
template <class T>
T rounded(double x) {
  return T(static_cast<float>(x));
}

// ---- formulas -------------------------------------------------------------------------------------------------------
// A formula object is made for one push. It is called for every element, with the rate η · scale of its block.

template <class T>
struct Asgd {  // w −= η·g
  static constexpr Rule::Keeps keeps{};
  Asgd(const Hyper&, const Constants&) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const { x.w[i] = fused(-rate, x.g[i], x.w[i]); }
};

// w −= η·s·g, s: the share of the learning rate
template <class T, double (*share)(const Hyper&)>
struct SharedAsgd : Asgd<T> {
  T s;
  SharedAsgd(const Hyper& h, const Constants& k) : Asgd<T>(h, k), s(rounded<T>(share(h))) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const { Asgd<T>::operator()(x, rate* s, i); }
};
// 1/max(1, τ)   (staleness-aware; Zhang et al., arXiv 1511.05950)
double staleness_share(const Hyper& h) { return 1 / std::max(1.0, h.delay); }
// n/max(n, τ)   (Mishchenko et al. 2022, as in their group's later simulator): smaller steps for late pushes
double adaptive_share(const Hyper& h) { return h.workers / std::max(double(h.workers), h.delay); }
// (1 + τ)/n: a worker's step is proportional to the time of its computation, so that a slow worker's data count as much
// as a fast one's (Rescaled ASGD, arXiv 2605.13434). The measure of time is ours: 1 + τ updates pass from one push of a
// worker to its next, n with equal workers.
double time_share(const Hyper& h) { return (1 + h.delay) / h.workers; }
template <class T>
using SaAsgd = SharedAsgd<T, staleness_share>;
template <class T>
using DelayAdaptive = SharedAsgd<T, adaptive_share>;
template <class T>
using Rescaled = SharedAsgd<T, time_share>;

template <class T>
struct MomentumAsgd {  // v = μ·v + g;  w −= η·v
  static constexpr Rule::Keeps keeps{.velocity = true};
  T mu;
  MomentumAsgd(const Hyper& h, const Constants&) : mu(rounded<T>(h.momentum)) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    x.velocity[i] = fused(mu, x.velocity[i], x.g[i]);
    x.w[i] = fused(-rate, x.velocity[i], x.w[i]);
  }
};

// c = λ·g⊙g⊙(w − w_sent);  w −= η·(g + c)   (Zheng et al., arXiv 1609.08326, with a constant λ)
template <class T>
struct DcAsgdC {
  static constexpr Rule::Keeps keeps{.sent = true};
  T lambda;
  DcAsgdC(const Hyper&, const Constants& k) : lambda(rounded<T>(k.at("lambda"))) {}
  T correction(const RuleVectors<T>& x, std::int64_t i) const {
    return lambda * x.g[i] * x.g[i] * (x.w[i] - x.sent[i]);
  }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    x.w[i] = fused(-rate, x.g[i] + correction(x, i), x.w[i]);
  }
};

// The same with λ = λ₀/√(s + 10⁻⁷), s the worker's running mean of g²   (its adaptive form)
template <class T>
struct DcAsgdA {
  static constexpr Rule::Keeps keeps{.sent = true, .square_avg = true};
  T lambda, decay;
  DcAsgdA(const Hyper&, const Constants& k) : lambda(rounded<T>(k.at("lambda"))), decay(rounded<T>(k.at("decay"))) {}
  T mean_square(const RuleVectors<T>& x, std::int64_t i) const {
    return fused(decay, x.square_avg[i], (1 - decay) * x.g[i] * x.g[i]);
  }
  T correction(const RuleVectors<T>& x, std::int64_t i, T s) const {
    return lambda / std::sqrt(s + T(1e-7f)) * x.g[i] * x.g[i] * (x.w[i] - x.sent[i]);
  }
  T correction(const RuleVectors<T>& x, std::int64_t i) const { return correction(x, i, mean_square(x, i)); }
  T kept_correction(const RuleVectors<T>& x, std::int64_t i) const {
    return correction(x, i, x.square_avg[i] = mean_square(x, i));
  }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    x.w[i] = fused(-rate, x.g[i] + kept_correction(x, i), x.w[i]);
  }
};

// v = μ·v + g + c;  w −= η·v, c as above: delay compensation with a fixed momentum. Our reading of the thesis'
// baseline.
template <class T>
struct DcAsgdK : DcAsgdA<T> {
  static constexpr Rule::Keeps keeps{.velocity = true, .sent = true, .square_avg = true};
  T mu;
  DcAsgdK(const Hyper& h, const Constants& k) : DcAsgdA<T>(h, k), mu(rounded<T>(h.momentum)) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    x.velocity[i] = fused(mu, x.velocity[i], x.g[i] + this->kept_correction(x, i));
    x.w[i] = fused(-rate, x.velocity[i], x.w[i]);
  }
};

// v = μ·v + g/G;  w −= η·v, G = 1 + |w − w_sent|/(η·mean step): the gap in steps (Barkai et al., arXiv 1909.10802). The
// division of gradients by their gap is from the paper; that G is computed per element is from a secondary source.
// Ours: the mean step is √s; s is this worker's running mean of v² before the update, corrected for its start at 0. If
// no weight has moved, G = 1: SGD with momentum.
template <class T>
struct GapAware {
  static constexpr Rule::Keeps keeps{.velocity = true, .sent = true, .square_avg = true};
  T mu, decay, seen;  // seen = 1 − decay^k corrects s for its start at 0; k: this worker's pushes, about 1 + before/n
  GapAware(const Hyper& h, const Constants& k)
      : mu(rounded<T>(h.momentum)),
        decay(rounded<T>(k.at("decay"))),
        seen(rounded<T>(1 - std::pow(k.at("decay"), 1 + double(h.before) / h.workers))) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    const T v = x.velocity[i], s = x.square_avg[i] = fused(decay, x.square_avg[i], (1 - decay) * v * v);
    const T gap = 1 + std::abs(x.w[i] - x.sent[i]) / (rate * std::sqrt(s / seen) + T(1e-12f));  // frozen: 1
    x.velocity[i] = fused(mu, v, x.g[i] / gap);
    x.w[i] = fused(-rate, x.velocity[i], x.w[i]);
  }
};

// u = μ·u + g;  w −= η·(μ·u + g), u: the worker's velocity   (Hakimi et al., arXiv 1907.11612)
template <class T>
struct DanaSlim {
  static constexpr Rule::Keeps keeps{.own = true};
  T mu;
  DanaSlim(const Hyper& h, const Constants&) : mu(rounded<T>(h.momentum)) {}
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    x.own[i] = fused(mu, x.own[i], x.g[i]);
    x.w[i] = fused(-rate, fused(mu, x.own[i], x.g[i]), x.w[i]);
  }
};

// DANA with delay compensation (the same paper): u = μ·u + g + c;  w −= η·u;  the worker receives w − η·μ·Σu, the point
// to which the others' momentum will move w. c is as in dc-asgd-a; w_sent is the vector that was sent. A shard stores
// the vector that it sends, so all copies of it are of one kind. w is computed from this vector, Σu (the shard's
// velocity) and the learning rate with which it was sent.
template <class T>
struct DanaDc : DcAsgdA<T> {
  static constexpr Rule::Keeps keeps{.velocity = true, .sent = true, .square_avg = true, .own = true};
  T mu, before;  // μ; μ·(the learning rate before)/(this one)
  DanaDc(const Hyper& h, const Constants& k)
      : DcAsgdA<T>(h, k),
        mu(rounded<T>(h.momentum)),
        before(h.learning_rate > 0 ? rounded<T>(h.momentum * h.rate_before / h.learning_rate) : 0) {}
  T correction(const RuleVectors<T>& x, T rate, std::int64_t i, T s) const {
    const T w = fused(rate * before, x.velocity[i], x.w[i]);
    return this->lambda / std::sqrt(s + T(1e-7f)) * x.g[i] * x.g[i] * (w - x.sent[i]);
  }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    const T c = correction(x, rate, i, x.square_avg[i] = this->mean_square(x, i)), u = fused(mu, x.own[i], x.g[i] + c);
    const T sum = x.velocity[i] + (u - x.own[i]);
    x.w[i] = fused(-rate, u + (mu * sum - before * x.velocity[i]), x.w[i]);
    x.own[i] = u;
    x.velocity[i] = sum;
  }
};

// Delayed Nesterov (Liu et al., arXiv 2401.09135): once in N pushes the momentum is updated with their mean and moves
// the weights. The other pushes move them only by their own share, so late pushes are not amplified. In the paper:
// b += g; w −= (η/N)·g; and at the N-th push m = μ·m + b/N, w −= η·μ·m, b = 0. Here v is both m and b: it decays before
// the first of N pushes.
template <class T>
struct DelayedNesterov {
  static constexpr Rule::Keeps keeps{.velocity = true, .averages = true};
  T decay, share, ahead;
  DelayedNesterov(const Hyper& h, const Constants& k) {
    const auto every = std::uint64_t(k.at("every"));
    decay = h.before % every == 0 ? rounded<T>(h.momentum) : 1;
    share = rounded<T>(1 / double(every));
    ahead = h.before % every == every - 1 ? rounded<T>(h.momentum) : 0;
  }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    const T g = share * x.g[i];
    x.velocity[i] = fused(decay, x.velocity[i], g);
    x.w[i] = fused(-rate, fused(ahead, x.velocity[i], g), x.w[i]);
  }
};

// Dynamic delay compensation. The thesis (Qu 2021) adjusts the trust in the momentum and in the correction by each
// delay, but does not say how. The formulas are ours:
//   c = λ·g⊙g⊙(w − w_sent) as in the adaptive form, but never more than the gradient itself: |c| ≤ |g|, λ₀ = 50
//   a = min(1, (1 + τ̄)/(1 + τ))      smaller for a gradient that is later than the others
//   d = a·(g + c);  u = μ·u + d       u: the worker's velocity
//   θ = τ/(1 + τ)                     0: not late; approaches 1 as the delay grows
//   w −= η·((1 − θ)·u + θ·(μ·u + d))
// Two terms of u are one step of this worker apart, however many other workers there are (from DANA, Hakimi et al.).
// With θ = 0 this is Polyak's momentum, so one worker is SGD with momentum, bit for bit. With θ = 1 it is Nesterov's:
// it looks ahead to the weights that this worker's momentum will have produced when its next gradient arrives. In
// between, the trust in the past, 1 − θ(1 − μ), falls with the delay, and the trust in the new direction rises.
// Ablations, all on by default: clamp (|c| ≤ |g|), trust (a; off: 1), ahead (θ; off: 0), own (a velocity for each
// worker; off: one for all). lambda=0 omits the correction.
template <class T>
struct DdcAsgd : DcAsgdA<T> {
  static constexpr Rule::Keeps keeps{.sent = true, .square_avg = true, .own = true};
  T mu, share, ahead, most;
  DdcAsgd(const Hyper& h, const Constants& k)
      : DcAsgdA<T>(h, k),
        mu(rounded<T>(h.momentum)),
        share(k.at("trust") == 0 ? 1 : rounded<T>(std::min(1.0, (1 + h.mean_delay) / (1 + h.delay)))),
        ahead(k.at("ahead") == 0 ? 0 : rounded<T>(h.delay / (1 + h.delay))),
        most(k.at("clamp") == 0 ? std::numeric_limits<T>::max() : 1) {}
  T capped(T c, T g) const {
    const T limit = most * std::abs(g);
    return c > limit ? limit : c < -limit ? -limit : c;
  }
  T correction(const RuleVectors<T>& x, std::int64_t i) const { return capped(DcAsgdA<T>::correction(x, i), x.g[i]); }
  void step(const RuleVectors<T>& x, T rate, std::int64_t i, T& velocity) const {
    const T d = share * (x.g[i] + capped(this->kept_correction(x, i), x.g[i]));
    const T u = velocity = fused(mu, velocity, d);
    x.w[i] = fused(-rate, fused(ahead, fused(mu, u, d) - u, u), x.w[i]);
  }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const { step(x, rate, i, x.own[i]); }
};
// Its ablation own=off: one velocity for all workers.
template <class T>
struct DdcAsgdShared : DdcAsgd<T> {
  static constexpr Rule::Keeps keeps{.velocity = true, .sent = true, .square_avg = true};
  using DdcAsgd<T>::DdcAsgd;
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const { this->step(x, rate, i, x.velocity[i]); }
};

// w += s·(g − w_sent), for running statistics: w becomes the mean of the workers' results g. Each worker adds its share
// s of the difference that its batch made.
template <class T>
struct Averaging {
  static constexpr Rule::Keeps keeps{.sent = true};
  T s;
  Averaging(const Hyper&, const Constants& k) : s(T(k.at("share"))) {}
  void operator()(const RuleVectors<T>& x, T, std::int64_t i) const {  // one worker: its result, bit for bit
    x.w[i] = s == 1 ? x.g[i] + (x.w[i] - x.sent[i]) : x.w[i] + s * (x.g[i] - x.sent[i]);
  }
};

// Heterogeneous low communication (Al Asif et al., arXiv 2606.00271): a late change g of the weights is turned, tensor
// by tensor, towards the momentum m of the shard; c is the cosine between the two, conf = ‖g‖/(‖g‖ + κ‖m‖).
//   c ≥ c_ok:      ĝ = g
//   0 ≤ c < c_ok:  ĝ = ‖g‖·u/‖u‖, u = (1 − λ)·g/‖g‖ + λ·m/‖m‖, λ = min(k_d·(1 − c)·conf, 1)
//   c < 0:         ĝ = g − β·c·‖g‖·m/‖m‖, β = min(k_s·(−c)·conf, β_max)
//   m = μ·m + (1 − μ)·ĝ;  w −= η·(ĝ + μ·m)
// The formulas are those of a secondary source that quotes the paper. The constants are ours.
template <class T>
struct Heloco {
  static constexpr Rule::Keeps keeps{.velocity = true, .averages = true};
  T mu;
  double keep, shrink, most, turn, kappa;
  T of_g = 1, of_m = 0;  // ĝ = of_g·g + of_m·m in the present tensor
  Heloco(const Hyper& h, const Constants& k)
      : mu(rounded<T>(h.momentum)),
        keep(k.at("keep")),
        shrink(k.at("shrink")),
        most(k.at("most")),
        turn(k.at("turn")),
        kappa(k.at("kappa")) {}
  void begin_tensor(const RuleVectors<T>& x, std::int64_t begin, std::int64_t end) {
    double gg = 0, mm = 0, gm = 0;
#pragma omp simd reduction(+ : gg, mm, gm)
    for (std::int64_t i = begin; i < end; i++) {
      gg += double(x.g[i]) * x.g[i];
      mm += double(x.velocity[i]) * x.velocity[i];
      gm += double(x.g[i]) * x.velocity[i];
    }
    const double g = std::sqrt(gg), m = std::sqrt(mm);
    of_g = 1;
    of_m = 0;
    if (g == 0 || m == 0) return;
    const double c = gm / (g * m), confidence = g / (g + kappa * m);
    if (c < 0) of_m = T(-std::min(shrink * -c * confidence, most) * c * g / m);
    if (c < 0 || c >= keep) return;
    const double lambda = std::min(turn * (1 - c) * confidence, 1.0);
    const double norm = std::sqrt((1 - lambda) * (1 - lambda) + lambda * lambda + 2 * lambda * (1 - lambda) * c);
    of_g = T((1 - lambda) / norm);
    of_m = T(lambda * g / (norm * m));
  }
  T correction(const RuleVectors<T>& x, std::int64_t i) const { return (of_g - 1) * x.g[i] + of_m * x.velocity[i]; }
  void operator()(const RuleVectors<T>& x, T rate, std::int64_t i) const {
    const T turned = of_g * x.g[i] + of_m * x.velocity[i];
    x.velocity[i] = fused(mu, x.velocity[i], (1 - mu) * turned);
    x.w[i] = fused(-rate, fused(mu, x.velocity[i], turned), x.w[i]);
  }
};

// ---- from a formula to a rule ---------------------------------------------------------------------------------------
template <template <class> class Formula>
class RuleOf final : public Rule {
 public:
  RuleOf(std::string name, Constants constants) : name_(std::move(name)), constants_(std::move(constants)) {}
  std::string name() const override { return name_; }
  Keeps keeps() const override { return Formula<float>::keeps; }
  bool sees_tensors() const override { return sees<Formula<float>>; }
  double clip() const override { return constants_.count("clip") ? constants_.at("clip") : 0; }
  void push(const RuleVectors<float>& x, std::int64_t n, const Hyper& h) const override { run(x, n, h); }
  void push(const RuleVectors<double>& x, std::int64_t n, const Hyper& h) const override { run(x, n, h); }

  double correction(const RuleVectors<float>& x, std::int64_t n, const Hyper& h) const override {
    Formula<float> f(h, constants_);
    double corrected = 0, squares = 0;
    for (std::int64_t i = 0; i < n; i++) {
      if constexpr (sees<Formula<float>>)
        if (i % block == 0) begin_block(f, x, i, n);
      double c = 0;
      if constexpr (requires { f.correction(x, 0.f, i, 0.f); })
        c = f.correction(x, float(h.learning_rate) * x.blocks[i / block].scale, i, f.mean_square(x, i));
      else if constexpr (requires { f.correction(x, i); })
        c = f.correction(x, i);
      else
        return 0;
      corrected += c * c;
      squares += double(x.g[i]) * x.g[i];
    }
    return squares > 0 ? std::sqrt(corrected / squares) : 0;
  }

 private:
  template <class F>
  static constexpr bool sees = requires {
    &F::begin_tensor;
  };
  // If a tensor begins with block b, computes what the formula needs of the whole tensor. n: the length of the vector.
  template <class T>
  static void begin_block(Formula<T>& f, const RuleVectors<T>& x, std::int64_t b, std::int64_t n) {
    if (b > 0 && x.blocks[b / block].tensor == x.blocks[b / block - 1].tensor) return;
    std::int64_t end = b + block;
    while (end < n && x.blocks[end / block].tensor == x.blocks[b / block].tensor) end += block;
    f.begin_tensor(x, b, end);
  }
  template <class T>
  void run(const RuleVectors<T>& given, std::int64_t n, const Hyper& h) const {
    Formula<T> f(h, constants_);
    const RuleVectors<T> x = given;  // a local copy: no store changes its pointers, so none is read again
    const T eta = rounded<T>(h.learning_rate);
    for (std::int64_t b = 0; b < n; b += block) {
      const T rate = eta * T(x.blocks[b / block].scale);
      if constexpr (sees<Formula<T>>) begin_block(f, x, b, n);
#pragma omp simd
      for (std::int64_t i = b; i < b + block; i++) f(x, rate, i);
    }
  }

  std::string name_;
  Constants constants_;
};

struct Row {
  const char* name;
  Constants constants;
  std::unique_ptr<Rule> (*make)(std::string, Constants);
};
template <template <class> class Formula>
std::unique_ptr<Rule> make(std::string name, Constants constants) {
  return std::make_unique<RuleOf<Formula>>(std::move(name), std::move(constants));
}
std::unique_ptr<Rule> make_ddc(std::string name, Constants constants) {
  return constants["own"] == 0 ? make<DdcAsgdShared>(name, constants) : make<DdcAsgd>(name, constants);
}
const std::vector<Row>& table() {
  static const Constants adaptive{{"lambda", 2}, {"decay", 0.95}},
      dynamic{{"lambda", 50}, {"decay", 0.95}, {"clamp", 1}, {"trust", 1}, {"ahead", 1}, {"own", 1}},
      aligned{{"keep", 0.2}, {"shrink", 1}, {"most", 1}, {"turn", 0.5}, {"kappa", 1}};
  static const std::vector<Row> rows{{"ddc-asgd", dynamic, make_ddc},
                                     {"asgd", {}, make<Asgd>},
                                     {"asgd-m", {}, make<MomentumAsgd>},
                                     {"sa-asgd", {}, make<SaAsgd>},
                                     {"delay-adaptive", {}, make<DelayAdaptive>},
                                     {"rescaled", {}, make<Rescaled>},
                                     {"gap-aware", {{"decay", 0.95}}, make<GapAware>},
                                     {"dc-asgd-c", {{"lambda", 0.04}}, make<DcAsgdC>},
                                     {"dc-asgd-a", adaptive, make<DcAsgdA>},
                                     {"dc-asgd-k", adaptive, make<DcAsgdK>},
                                     {"dana-slim", {}, make<DanaSlim>},
                                     {"dana-dc", adaptive, make<DanaDc>},
                                     {"delayed-nesterov", {{"every", 4}}, make<DelayedNesterov>},
                                     {"heloco", aligned, make<Heloco>}};
  return rows;
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Row& row : table()) names.push_back(row.name);
  return names;
}

static const Row& row_of(const std::string& name) {
  const auto row = std::find_if(table().begin(), table().end(), [&](const Row& r) { return r.name == name; });
  if (row == table().end()) refuse("there is no update rule ", name, ": choose one of ", listed(rule_names()));
  return *row;
}

static std::vector<SpecField> fields_of(Constants& constants, double& clip) {
  std::vector<SpecField> fields;
  for (auto& [key, value] : constants) {
    const bool is_switch = key == "clamp" || key == "trust" || key == "ahead" || key == "own";
    if (is_switch)
      fields.push_back(switch_field(key, value));
    else
      fields.push_back(number_field(key, value, key == "every", key == "decay" ? 0.999999 : 1e9));
  }
  fields.push_back(number_field("clip", clip, above_zero, 1e9));
  return fields;
}

std::string rule_options(const std::string& name) {
  Constants constants = row_of(name).constants;
  double clip = 0;
  return described(fields_of(constants, clip));
}

std::unique_ptr<Rule> make_rule(const std::string& text) {
  const std::string name = spec_name(text);
  const Row& row = row_of(name);
  Constants constants = row.constants;
  double clip = 0;
  read_spec(text, fields_of(constants, clip));
  if (clip > 0) constants["clip"] = clip;
  if (constants.count("every") && constants["every"] != std::floor(constants["every"]))
    refuse(text, ": every is a whole number of pushes, from 1");
  return row.make(text, constants);
}

std::unique_ptr<Rule> averaging_rule(double share) { return make<Averaging>("average", {{"share", share}}); }

}  // namespace tandem
