#include "dist/strategies/local_steps.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

using Kind = RoundSteps::Kind;

// ---- when -----------------------------------------------------------------------------------------------------------
// The step before which the learning rate first decays.
std::int64_t first_decay(const RunPlan& run) {
  const double total = double(run.epochs) * run.steps_per_epoch;
  double largest = 0, before = 0;
  for (std::int64_t step = 0; double(step) < total; step++) {
    const double rate = run.learning_rate(double(step));
    if (rate < 0.9 * before || rate < 0.5 * largest) return step;
    largest = std::max(largest, rate);
    before = rate;
  }
  return std::int64_t(total / 2);
}

class EveryH : public RoundMethod {
 public:
  explicit EveryH(const RoundSteps& how) : how_(how) {}
  void begin_epoch(std::int64_t, const RunPlan& plan) override {
    plan_ = plan;
    if (how_.kind == Kind::post_local && plan.learning_rate && first_decay_ < 0) first_decay_ = first_decay(plan);
  }
  Turn next(const Moment& now) override {
    if (made_ == 0) round_ = before_decay(now.step) ? 1 : how_.every.at(now.rate, now.step, plan_);
    made_++;
    Turn turn{.merges = left_ > 0 && --left_ == 0, .fragment = turn_, .fragments = how_.stream};
    if (made_ < round_ * (turn_ + 1) / how_.stream) return turn;
    turn.sends = true;
    turn.waits = how_.overlap == 0;
    turn.merges = turn.merges || left_ > 0;
    left_ = how_.overlap == RoundSteps::until_next_turn ? std::numeric_limits<std::int64_t>::max() : how_.overlap;
    if (++turn_ == how_.stream) made_ = turn_ = 0;
    return turn;
  }
  // The centre of easgd is equal on all ranks; it needs no exchange unless steps were made since the last one.
  Turn end(const Moment&) override {
    const bool sends = how_.kind != Kind::elastic || made_ > 0;
    const Turn turn{.sends = sends, .waits = sends, .merges = true};
    made_ = turn_ = left_ = 0;
    return turn;
  }

 protected:
  const RoundSteps how_;

 private:
  bool before_decay(std::int64_t step) const {
    if (how_.kind != Kind::post_local) return false;
    if (first_decay_ < 0)
      refuse(how_.name(),
             " asks when the learning rate decays: call begin_epoch() before the first step, as fit() does");
    return step < first_decay_;
  }

  RunPlan plan_;
  std::int64_t round_ = 1, made_ = 0, turn_ = 0;  // length of this round; its steps so far; the next fragment
  std::int64_t left_ = 0;                         // steps until the sum in flight is used; 0: none is in flight
  std::int64_t first_decay_ = -1;                 // −1: unknown
};

// ---- merges ---------------------------------------------------------------------------------------------------------
// x −= α(x − z);  z += Σ α(x − z)
struct Elastic : EveryH {
  using EveryH::EveryH;
  Tensor z;
  void allocate(const FlatParameters& flat) override { z = Replicas::vector(flat, flat.values.dtype()); }
  void release() override { z = {}; }
  void start(const Tensor& x) override { z.copy_from(x); }
  void send(Exchanged& e) override { elastic_pull(e.x, z, e.sum, 0.9 / e.ranks); }
  void merge(Exchanged& e) override { add_into(z, e.sum); }
  Tensor* centre() override { return &z; }
};

// Δ = θ − mean;  m = β·m + Δ;  θ = θ − γ(Δ + β·m);  x = θ + (x − sent)
struct Outer : EveryH {
  using EveryH::EveryH;
  Tensor theta, m;
  void allocate(const FlatParameters& flat) override {
    theta = Replicas::vector(flat, flat.values.dtype());
    m = Replicas::vector(flat, flat.values.dtype());
    m.fill(0);
  }
  void release() override { theta = m = {}; }
  void start(const Tensor& x) override { theta.copy_from(x); }
  void merge(Exchanged& e) override {
    Tensor t = part(theta, e.range), v = part(m, e.range);
    outer_step(e.x, e.sent, t, v, e.sum, e.ranks, {how_.momentum, how_.learning_rate});
  }
  bool acts_alone() const override { return true; }
  void saved(StrategyState& state) override {
    if (how_.momentum > 0 && m.defined()) state.vector("momentum", m);
  }
};

constexpr const char* kinds[] = {"local-sgd", "post-local-sgd", "cocod-sgd", "easgd", "outer"};

}  // namespace

std::unique_ptr<RoundMethod> round_method(const RoundSteps& how) {
  if (how.kind == Kind::elastic) return std::make_unique<Elastic>(how);
  if (how.kind == Kind::outer) return std::make_unique<Outer>(how);
  return std::make_unique<EveryH>(how);
}

std::unique_ptr<Strategy> rounds(std::unique_ptr<Communicator> communicator, const RoundSteps& how,
                                 const RoundsOptions& options) {
  return rounds(
      {.everybody = std::move(communicator)}, how.name(), [how] { return round_method(how); }, options);
}

// ---- names ----------------------------------------------------------------------------------------------------------
std::optional<Interval> Interval::parse(const std::string& text, std::int64_t steps) {
  const std::vector<std::string> parts = parts_of(text, ':');
  const bool rule = text.starts_with("qsr:");
  const std::size_t before = rule ? 2 : 0;  // parts before the number of steps, which may be left out after a rule
  Interval every{.steps = rule ? steps : 0};
  if (rule) every.alpha = parsed<double>(parts[1]).value_or(0);
  if (parts.size() > before) every.steps = parsed<std::int64_t>(parts[before]).value_or(0);
  const bool valid =
      parts.size() <= before + 1 && every.steps >= 1 && (!rule || (every.alpha > 0 && every.alpha < 1e9));
  return valid ? std::optional(every) : std::nullopt;
}

std::string Interval::name() const { return (alpha > 0 ? "qsr:" + digits(alpha) + ":" : "") + std::to_string(steps); }

std::int64_t Interval::at(double rate, std::int64_t step, const RunPlan& plan) const {
  if (alpha == 0) return steps;
  const double total = double(plan.epochs) * plan.steps_per_epoch;
  for (double next = double(step) + 1; plan.learning_rate && next < total && plan.learning_rate(next) > rate; next++)
    rate = plan.learning_rate(next);
  const double root = alpha / rate, most = 1e9;  // most: longer than any epoch; an exchange ends each epoch
  return std::max(steps, root * root < most ? std::int64_t(root * root) : std::int64_t(most));
}

std::vector<std::string> RoundSteps::names() { return {std::begin(kinds), std::end(kinds)}; }

std::vector<SpecField> RoundSteps::fields() {
  auto interval = [this](const std::string& value) {
    const auto read = Interval::parse(value, every.steps);
    every = read.value_or(every);
    return read.has_value();
  };
  std::vector<SpecField> all{bare({"H", "STEPS, from 1, or qsr:ALPHA:STEPS", interval, every.name()})};
  if (kind != Kind::outer) return all;
  all.push_back(number_field("momentum", momentum, 0, 0.999999));
  all.push_back(number_field("lr", learning_rate, 1e-6, 10));
  all.push_back(number_field("stream", stream, 1, 1e6));
  all.push_back(number_field("overlap", overlap, 0, 1e9));
  if (overlap < 0) all.back().value = "until the next turn";
  return all;
}

std::optional<RoundSteps> RoundSteps::parse(const std::string& text, const RoundSteps& outer) {
  const auto known = std::ranges::find(kinds, spec_name(text));
  if (known == std::end(kinds)) return {};
  const Kind kind = Kind(known - kinds);
  RoundSteps how = kind == Kind::outer ? outer : RoundSteps{.kind = kind};
  const bool local = how.kind == Kind::local || how.kind == Kind::post_local;
  how.overlap = local ? 0 : until_next_turn;
  read_spec(text, how.fields());
  if (how.kind == Kind::outer && how.stream == 1 && how.overlap < 0) how.overlap = 0;
  const std::int64_t turn = how.every.steps / how.stream;
  if (turn < 1) refuse(text, ": ", how.stream, " fragments need at least as many steps in H, not ", how.every.steps);
  if (how.overlap > turn)
    refuse(text, ": overlap=", how.overlap, " reaches past the next fragment's turn: at most ", turn, " steps");
  return how;
}

std::string RoundSteps::name() const {
  const std::string is = kinds[int(kind)];
  if (kind != Kind::outer) return is + ":" + every.name();
  std::string text = is + ":H=" + every.name() + ",momentum=" + digits(momentum) + ",lr=" + digits(learning_rate);
  if (stream > 1 || overlap != 0) text += ",stream=" + std::to_string(stream);
  if (overlap >= 0 && (stream > 1 || overlap > 0)) text += ",overlap=" + std::to_string(overlap);
  return text;
}

}  // namespace tandem
