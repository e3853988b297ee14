// Update rules: hand-computed sequences with known delays, what they become when a constant is zero, and that they do
// not see how the vector is cut. What they are when nothing is late: test_dist_parameter_server.cpp and
// test_dist_simulator.cpp.
#include "dist/server/shard.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

constexpr std::int64_t n = 256;

Numbers drawn(std::uint32_t what) { return numbers(std::to_string(what), n, -0.5, 0.5); }

// Who pulls and who pushes, in this order: with three workers delays of 0 to 4.
struct Event {
  bool push;
  int worker;
};
const std::vector<Event> schedule{{false, 0}, {false, 1}, {false, 2}, {true, 0}, {false, 0}, {true, 0},
                                  {true, 1},  {false, 1}, {false, 0}, {true, 0}, {true, 2},  {false, 2},
                                  {true, 1},  {true, 2},  {false, 0}, {true, 0}};

// The rule as ALGORITHMS has it, for one element, in double.
struct Element {
  double w, velocity = 0, buffer = 0, ahead = 0;  // a worker is sent w − ahead
  struct Worker {
    double sent, square_avg = 0, own = 0;
    int version = 0;
  };
  std::vector<Worker> workers;
  int version = 0;
  double mean_delay;
  Element(double first, int k) : w(first), workers(std::size_t(k), {first}), mean_delay(k - 1) {}
};
using Step = std::function<void(Element&, Element::Worker&, double g, double delay)>;
constexpr double eta = 0.1f, mu = 0.9f;

double adaptive(Element& e, Element::Worker& m, double g, double lambda = 2) {
  m.square_avg = double(0.95f) * m.square_avg + (1 - double(0.95f)) * g * g;
  return lambda / std::sqrt(m.square_avg + double(1e-7f)) * g * g * (e.w - m.sent);
}
struct Parts {
  bool clamp = true, trust = true, ahead = true, own = true;
  double lambda = 50;
};
void ddc(Element& e, Element::Worker& m, double g, double delay, Parts parts) {
  double c = adaptive(e, m, g, parts.lambda);
  if (parts.clamp) c = std::clamp(c, -std::abs(g), std::abs(g));
  const double share = parts.trust ? std::min(1.0, (1 + e.mean_delay) / (1 + delay)) : 1,
               theta = parts.ahead ? delay / (1 + delay) : 0;
  const double d = share * (g + c);
  double& u = parts.own ? m.own : e.velocity;
  u = mu * u + d;
  e.w -= eta * ((1 - theta) * u + theta * (mu * u + d));
}

const std::vector<std::pair<std::string, Step>> by_hand{
    {"asgd", [](Element& e, auto&, double g, double) { e.w -= eta * g; }},
    {"delay-adaptive", [](Element& e, auto&, double g, double delay) { e.w -= eta * 3 / std::max(3.0, delay) * g; }},
    {"rescaled", [](Element& e, auto&, double g, double delay) { e.w -= eta * (1 + delay) / 3 * g; }},
    {"gap-aware",
     [](Element& e, Element::Worker& m, double g, double) {
       m.square_avg = double(0.95f) * m.square_avg + (1 - double(0.95f)) * e.velocity * e.velocity;
       const double moved = std::abs(e.w - m.sent), seen = 1 - std::pow(0.95, 1 + (e.version - 1) / 3.0);
       const double gap = moved == 0 ? 1 : 1 + moved / (eta * std::sqrt(m.square_avg / seen));
       e.velocity = mu * e.velocity + g / gap, e.w -= eta * e.velocity;
     }},
    {"dana-dc",
     [](Element& e, Element::Worker& m, double g, double) {
       m.own = mu * m.own + g + adaptive(e, m, g);
       e.w -= eta * m.own;
       e.ahead = 0;
       for (const Element::Worker& any : e.workers) e.ahead += eta * mu * any.own;
     }},
    {"asgd-m", [](Element& e, auto&, double g, double) { e.velocity = mu * e.velocity + g, e.w -= eta * e.velocity; }},
    {"sa-asgd", [](Element& e, auto&, double g, double delay) { e.w -= eta / std::max(1.0, delay) * g; }},
    {"dc-asgd-c", [](Element& e, Element::Worker& m, double g,
                     double) { e.w -= eta * (g + double(0.04f) * g * g * (e.w - m.sent)); }},
    {"dc-asgd-a", [](Element& e, Element::Worker& m, double g, double) { e.w -= eta * (g + adaptive(e, m, g)); }},
    {"dc-asgd-k",
     [](Element& e, Element::Worker& m, double g, double) {
       e.velocity = mu * e.velocity + g + adaptive(e, m, g);
       e.w -= eta * e.velocity;
     }},
    {"dana-slim",
     [](Element& e, Element::Worker& m, double g, double) {
       m.own = mu * m.own + g;
       e.w -= eta * (mu * m.own + g);
     }},
    {"delayed-nesterov",
     [](Element& e, auto&, double g, double) {
       e.buffer += g, e.w -= eta / 4 * g;
       if (e.version % 4 > 0) return;  // with this push
       e.velocity = mu * e.velocity + e.buffer / 4;
       e.w -= eta * mu * e.velocity;
       e.buffer = 0;
     }},
    {"ddc-asgd", [](Element& e, auto& m, double g, double delay) { ddc(e, m, g, delay, {}); }},
    {"ddc-asgd:clamp=off,lambda=5",
     [](Element& e, auto& m, double g, double delay) { ddc(e, m, g, delay, {.clamp = false, .lambda = 5}); }},
    {"ddc-asgd:trust=off,lambda=5",
     [](Element& e, auto& m, double g, double delay) { ddc(e, m, g, delay, {.trust = false, .lambda = 5}); }},
    {"ddc-asgd:ahead=off", [](Element& e, auto& m, double g, double delay) { ddc(e, m, g, delay, {.ahead = false}); }},
    {"ddc-asgd:own=off", [](Element& e, auto& m, double g, double delay) { ddc(e, m, g, delay, {.own = false}); }},
};

std::vector<double> run_by_hand(const Step& step) {
  std::vector<double> ended;
  const std::vector<double> first = drawn(0);
  for (std::int64_t i = 0; i < n; i++) {
    Element e(first[i], 3);
    std::uint32_t pushes = 0;
    for (const Event& event : schedule) {
      Element::Worker& m = e.workers[event.worker];
      if (!event.push) {
        m.sent = e.w - e.ahead, m.version = e.version;
        continue;
      }
      const double delay = e.version++ - m.version;
      e.mean_delay = 0.98 * e.mean_delay + 0.02 * delay;
      step(e, m, drawn(++pushes)[i], delay);
    }
    ended.push_back(e.w - e.ahead);
  }
  return ended;
}

// The schedule on shards that cut the vector at these places. A second tensor begins at `second`.
std::vector<double> run(const std::string& rule_text, DType dtype, const std::vector<std::int64_t>& cuts = {0, n},
                        std::int64_t second = n) {
  auto backend = reference_backend();
  const auto rule = make_rule(rule_text);
  const Tensor first = Tensor::of(*backend, {n}, drawn(0), dtype);
  std::vector<Shard> shards;
  for (std::size_t s = 0; s + 1 < cuts.size(); s++) {
    std::vector<RuleBlock> blocks;
    for (std::int64_t i = cuts[s]; i < cuts[s + 1]; i += 64) blocks.push_back({.tensor = i >= second});
    shards.emplace_back(*rule, first.slice(cuts[s], cuts[s + 1]), blocks, 3);
  }
  std::uint32_t pushes = 0;
  for (const Event& event : schedule) {
    Tensor g;
    if (event.push) g = Tensor::of(*backend, {n}, drawn(++pushes), dtype);
    for (std::size_t s = 0; s < shards.size(); s++)
      if (event.push)
        shards[s].push(event.worker, g.slice(cuts[s], cuts[s + 1]), double(0.1f), 0.9);
      else
        shards[s].pull(event.worker, Tensor::like(shards[s].values()));
  }
  std::vector<double> ended;
  for (const Shard& s : shards)
    for (double v : s.values().values()) ended.push_back(v);
  return ended;
}

TEST(Rules, HandComputedSequences) {
  for (const auto& [name, step] : by_hand) {
    const std::vector<double> wanted = run_by_hand(step), f64 = run(name, DType::f64), f32 = run(name, DType::f32);
    for (std::size_t i = 0; i < wanted.size(); i++) {
      // The rule rounds its few scalars to f32, as the optimizers do.
      ASSERT_NEAR(f64[i], wanted[i], 1e-7) << name << " at " << i;
      ASSERT_NEAR(f32[i], wanted[i], 5e-6) << name << " at " << i;
    }
  }
  std::vector<std::string> names;
  for (const auto& [name, step] : by_hand)
    if (name.find(':') == name.npos) names.push_back(name);
  names.push_back("heloco");  // the test below
  auto known = rule_names();
  std::sort(names.begin(), names.end()), std::sort(known.begin(), known.end());
  EXPECT_EQ(names, known) << "a rule has no hand-computed sequence";
}

TEST(Rules, DoNotSeeHowTheVectorIsCut) {
  for (const std::string& name : rule_names()) {
    if (make_rule(name)->sees_tensors()) continue;
    const auto whole = run(name, DType::f32);
    EXPECT_EQ(whole, run(name, DType::f32, {0, 64, 192, n})) << name;
    EXPECT_EQ(whole, run(name, DType::f32, {0, 128, n})) << name;
  }
}

// heloco as its paper has it, in double, for a tensor [begin, end) of the vector.
std::vector<double> heloco_by_hand(std::int64_t begin, std::int64_t end, double keep, double turn) {
  std::vector<double> w = drawn(0), m(n);
  std::uint32_t pushes = 0;
  for (const Event& event : schedule) {
    if (!event.push) continue;
    std::vector<double> g = drawn(++pushes);
    double gg = 0, mm = 0, gm = 0, uu = 0;
    for (std::int64_t i = begin; i < end; i++) gg += g[i] * g[i], mm += m[i] * m[i], gm += g[i] * m[i];
    const double G = std::sqrt(gg), M = std::sqrt(mm), c = M > 0 ? gm / G / M : 1, conf = G / (G + M);
    const double beta = std::min(-c * conf, 1.0), lambda = std::min(turn * (1 - c) * conf, 1.0);
    std::vector<double> u(n);
    for (std::int64_t i = begin; i < end; i++) u[i] = (1 - lambda) * g[i] / G + lambda * m[i] / M, uu += u[i] * u[i];
    for (std::int64_t i = begin; i < end; i++) {
      if (c < 0) g[i] -= beta * c * G * m[i] / M;
      if (0 <= c && c < keep) g[i] = G * u[i] / std::sqrt(uu);
      m[i] = mu * m[i] + (1 - mu) * g[i];
      w[i] -= eta * (g[i] + mu * m[i]);
    }
  }
  return {w.begin() + begin, w.begin() + end};
}

TEST(Rules, HelocoTurnsEachTensorTowardsTheMomentum) {
  for (const double keep : {0.0, 0.03125, 0.25})
    for (const double turn : {0.5, 4.0}) {
      const std::string rule = "heloco:keep=" + std::to_string(keep) + ",turn=" + std::to_string(turn);
      std::vector<double> wanted = heloco_by_hand(0, 64, keep, turn), rest = heloco_by_hand(64, n, keep, turn);
      wanted.insert(wanted.end(), rest.begin(), rest.end());
      const std::vector<double> f64 = run(rule, DType::f64, {0, n}, 64);
      EXPECT_EQ(f64, run(rule, DType::f64, {0, 64, n}, 64)) << "one tensor in each shard";
      for (std::size_t i = 0; i < n; i++) ASSERT_NEAR(f64[i], wanted[i], 1e-7) << rule << " at " << i;
    }
}

TEST(Rules, TheCorrectionOfHelocoIsWhatItTurns) {
  std::vector<float> w(128), g(128, 1), m(128, 1);
  std::fill_n(m.begin(), 64, -1.0f);  // against the first half
  const auto rule = make_rule("heloco");
  auto corrected = [&](std::int32_t second) {
    const std::vector<RuleBlock> blocks{{}, {.tensor = second}};
    return rule->correction({.w = w.data(), .g = g.data(), .velocity = m.data(), .blocks = blocks.data()}, 128, {});
  };
  EXPECT_NEAR(corrected(1), 0.5 * std::sqrt(0.5), 1e-6);  // half of the first tensor's gradient
  // One tensor, at a right angle to the momentum: λ = 1/4, ĝ = (3g + m)/√10
  EXPECT_NEAR(corrected(0), std::hypot(1 - 3 / std::sqrt(10), 1 / std::sqrt(10)), 1e-6);
}

TEST(Rules, WithoutCorrectionTheyAreTheirSimplerKin) {
  EXPECT_EQ(run("dc-asgd-c:lambda=0", DType::f32), run("asgd", DType::f32));
  EXPECT_EQ(run("dc-asgd-a:lambda=0", DType::f32), run("asgd", DType::f32));
  EXPECT_EQ(run("dc-asgd-k:lambda=0", DType::f32), run("asgd-m", DType::f32));
  EXPECT_NE(run("delayed-nesterov", DType::f32), run("delayed-nesterov:every=2", DType::f32));
  EXPECT_NE(run("dc-asgd-a", DType::f32), run("asgd", DType::f32));
  EXPECT_NE(run("ddc-asgd:lambda=2", DType::f32), run("ddc-asgd", DType::f32));
}

// One element: w = 1, u₀ = u₁ = 0, μ = 0.5, without correction. Σu and the rate of the last push make what is sent.
TEST(Rules, DanaDcSendsWhereAllMomentumWillHaveBroughtTheWeights) {
  auto backend = reference_backend(1);
  const auto rule = make_rule("dana-dc:lambda=0");
  Shard shard(*rule, Tensor::full(*backend, {64}, 1, DType::f64), {RuleBlock{}}, 2);
  const auto push = [&](int worker, double g, double rate) {
    shard.push(worker, Tensor::full(*backend, {64}, g, DType::f64), rate, 0.5);
    return shard.pull(worker, Tensor::like(shard.values())).values()[0];
  };
  EXPECT_DOUBLE_EQ(push(0, 4, 0.25), 1 - 0.25 * 4 - 0.25 * 0.5 * 4);  // w = 0, u₀ = 4
  EXPECT_DOUBLE_EQ(push(1, 2, 0.25), -0.5 - 0.25 * 0.5 * 6);          // w = −0.5, u₁ = 2
  EXPECT_DOUBLE_EQ(push(0, 0, 0.125), -0.75 - 0.125 * 0.5 * 4);       // w = −0.75, u₀ = 2, and a lower rate
  shard.forget(1);  // w is where it would be from what was sent: −1, with u₁ = 0
  EXPECT_DOUBLE_EQ(push(0, 0, 0.25), -1 + 0.125 * 0.5 * 2 - 0.25 * 1 - 0.25 * 0.5 * 1);
}

TEST(Rules, NamesAndConstantsAreChecked) {
  auto said = [](const std::string& text) { return error_of<UsageError>([&] { make_rule(text); }); };
  EXPECT_TRUE(holds(said("adgs"), {"ddc-asgd, asgd, asgd-m"}));
  EXPECT_TRUE(holds(said("ddc-asgd:lamda=1"), {"ahead=, clamp=, decay=, lambda=, own=, trust=, clip="}));
  EXPECT_TRUE(holds(said("dc-asgd-a:0.5"), {"'0.5' is no option"}));
  EXPECT_TRUE(holds(said("ddc-asgd:lambda"), {"lambda is a number"}));
  EXPECT_NE(said("ddc-asgd:lambda=-1"), "");
  EXPECT_NE(said("ddc-asgd:lambda=nan"), "");
  EXPECT_TRUE(holds(said("asgd:lambda=1"), {"choose clip="}));
  for (const std::string& name : rule_names()) {
    EXPECT_EQ(make_rule(name)->clip(), 0);
    EXPECT_EQ(make_rule(name + ":clip=0.5")->clip(), 0.5);
    EXPECT_TRUE(holds(said(name + ":clip=0"), {"above 0"}));
  }
  EXPECT_TRUE(holds(said("ddc-asgd:lambda=1e39"), {"to 1000000000"}));
  EXPECT_TRUE(holds(said("dc-asgd-a:decay=1.5"), {"from 0 to 0.999999"}));
  EXPECT_TRUE(holds(said("gap-aware:decay=1"), {"from 0 to 0.999999"}));
  EXPECT_TRUE(holds(said("rescaled:power=1"), {"choose clip="}));
  EXPECT_TRUE(holds(said("delayed-nesterov:every=0"), {"from 1"}));
  EXPECT_TRUE(holds(said("delayed-nesterov:every=2.5"), {"whole number"}));
  EXPECT_EQ(said("ddc-asgd:decay=0.5,lambda=1"), "");
  EXPECT_EQ(said("ddc-asgd:clamp=off,own=on"), "");
  EXPECT_TRUE(holds(said("ddc-asgd:clamp=0"), {"on or off"}));
  EXPECT_TRUE(holds(said("dc-asgd-a:clamp=off"), {"decay=, lambda=, clip="}));
  EXPECT_TRUE(holds(said("ddc-asgd:lambda=3,lambda=4"), {"lambda is given twice"}));
}

}  // namespace
}  // namespace tandem::test
