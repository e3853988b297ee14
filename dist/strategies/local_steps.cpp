#include "dist/strategies/local_steps.h"

#include <algorithm>
#include <limits>

#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

// ---- when -----------------------------------------------------------------------------------------------------------
class EveryH : public RoundMethod {
 public:
  explicit EveryH(const RoundSteps& how) : how_(how) {}
  void begin_epoch(std::int64_t, const RunPlan& plan) override { plan_ = plan; }
  Turn next(const Moment& now) override {
    if (made_ == 0) round_ = steps(now);
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
  // A centre is equal on all ranks; it needs no exchange unless steps were made since the last one.
  Turn end(const Moment&) override {
    const bool sends = !centre() || made_ > 0;
    const Turn turn{.sends = sends, .waits = sends, .merges = true};
    made_ = turn_ = left_ = 0;
    return turn;
  }

 protected:
  // Of the round that begins with this step.
  virtual std::int64_t steps(const Moment& now) { return how_.every.at(now.rate, now.step, plan_); }
  const RoundSteps how_;
  RunPlan plan_;

 private:
  std::int64_t round_ = 1, made_ = 0, turn_ = 0;  // length of this round; its steps so far; the next fragment
  std::int64_t left_ = 0;                         // steps until the sum in flight is used; 0: none is in flight
};

struct PostLocal : EveryH {
  using EveryH::EveryH;
  std::int64_t decays_at = -1;  // the step before which the learning rate first decays; −1: unknown
  std::int64_t steps(const Moment& now) override {
    if (decays_at < 0) find_decay();
    return now.step < decays_at ? 1 : EveryH::steps(now);
  }
  void find_decay() {
    if (!plan_.learning_rate)
      refuse(how_.name(),
             " asks when the learning rate decays: call begin_epoch() before the first step, as fit() does");
    const double total = double(plan_.epochs) * plan_.steps_per_epoch;
    double largest = 0, before = 0;
    for (decays_at = 0; double(decays_at) < total; decays_at++) {
      const double rate = plan_.learning_rate(double(decays_at));
      if (rate < 0.9 * before || rate < 0.5 * largest) return;
      largest = std::max(largest, rate);
      before = rate;
    }
    decays_at = std::int64_t(total / 2);
  }
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

// ---- the table ------------------------------------------------------------------------------------------------------
template <class Method>
std::unique_ptr<RoundMethod> made(const RoundSteps& how) {
  return std::make_unique<Method>(how);
}

struct Row {
  RoundSteps defaults;
  std::unique_ptr<RoundMethod> (*make)(const RoundSteps& how);
};
const Row table[] = {{{.kind = "local-sgd"}, made<EveryH>},
                     {{.kind = "post-local-sgd"}, made<PostLocal>},
                     {{.kind = "cocod-sgd", .overlap = RoundSteps::until_next_turn}, made<EveryH>},
                     {{.kind = "easgd", .overlap = RoundSteps::until_next_turn}, made<Elastic>},
                     {{.kind = "outer", .every = {.steps = 100}, .overlap = RoundSteps::until_next_turn}, made<Outer>}};

const Row* row_of(const std::string& kind) {
  for (const Row& row : table)
    if (row.defaults.kind == kind) return &row;
  return nullptr;
}

}  // namespace

std::unique_ptr<RoundMethod> RoundSteps::method() const { return row_of(kind)->make(*this); }

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

std::vector<std::string> RoundSteps::names() {
  std::vector<std::string> all;
  for (const Row& row : table) all.push_back(row.defaults.kind);
  return all;
}

std::vector<SpecField> RoundSteps::fields() {
  auto interval = [this](const std::string& value) {
    const auto read = Interval::parse(value, every.steps);
    every = read.value_or(every);
    return read.has_value();
  };
  std::vector<SpecField> all{bare({"H", "STEPS, from 1, or qsr:ALPHA:STEPS", interval, every.name()})};
  if (kind == "outer")
    for (SpecField field :
         {number_field("momentum", momentum, 0, 0.999999), number_field("lr", learning_rate, 1e-6, 10),
          number_field("stream", stream, 1, 1e6), number_field("overlap", overlap, 0, 1e9)})
      all.push_back(field);
  return all;
}

std::optional<RoundSteps> RoundSteps::parse(const std::string& text, const std::optional<RoundSteps>& defaults) {
  const Row* const row = row_of(spec_name(text));
  if (!row) return {};
  RoundSteps how = defaults.value_or(row->defaults);
  read_spec(text, how.fields());
  if (how.kind == "outer" && how.stream == 1 && how.overlap < 0) how.overlap = 0;
  const std::int64_t turn = how.every.steps / how.stream;
  if (turn < 1) refuse(text, ": ", how.stream, " fragments need at least as many steps in H, not ", how.every.steps);
  if (how.overlap > turn)
    refuse(text, ": overlap=", how.overlap, " reaches past the next fragment's turn: at most ", turn, " steps");
  return how;
}

std::string RoundSteps::name() const {
  if (kind != "outer") return kind + ":" + every.name();
  std::string text = "outer:H=" + every.name() + ",momentum=" + digits(momentum) + ",lr=" + digits(learning_rate);
  if (stream > 1 || overlap != 0) text += ",stream=" + std::to_string(stream);
  if (overlap >= 0 && (stream > 1 || overlap > 0)) text += ",overlap=" + std::to_string(overlap);
  return text;
}

}  // namespace tandem
