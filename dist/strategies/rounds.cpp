#include "dist/strategies/rounds.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/elementwise.h"
#include "core/spec.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

using Kind = RoundSteps::Kind;

Tensor part(const Tensor& t, Range range) { return t.range(range.begin, {range.length()}); }

// ---- merges ---------------------------------------------------------------------------------------------------------
// x = mean + (x − sent)
struct MeanMerge : RoundMerge {
  void merge(Range, Tensor& x, Tensor& sent, Tensor& sum, int ranks) override { join_mean(x, sent, sum, ranks); }
};

// x −= α(x − z);  z += Σ α(x − z)
struct ElasticMerge : RoundMerge {
  Tensor z;
  int ranks;
  explicit ElasticMerge(int n) : ranks(n) {}
  void begin(const FlatParameters& flat) override { z = Replicas::vector(flat, flat.values.dtype()); }
  void start(const Tensor& x) override { z.copy_from(x); }
  void send(Range, Tensor& x, Tensor& sum) override { elastic_pull(x, z, sum, 0.9 / ranks); }
  void merge(Range, Tensor&, Tensor&, Tensor& sum, int) override { add_into(z, sum); }
  Tensor* centre() override { return &z; }
};

// Δ = θ − mean;  m = β·m + Δ;  θ = θ − γ(Δ + β·m);  x = θ + (x − sent)
struct OuterMerge : RoundMerge {
  OuterRates rates;
  Tensor theta, m;
  explicit OuterMerge(const OuterRates& r) : rates(r) {}
  void begin(const FlatParameters& flat) override {
    theta = Replicas::vector(flat, flat.values.dtype());
    m = Replicas::vector(flat, flat.values.dtype());
    m.fill(0);
  }
  void start(const Tensor& x) override { theta.copy_from(x); }
  void merge(Range range, Tensor& x, Tensor& sent, Tensor& sum, int ranks) override {
    Tensor t = part(theta, range), v = part(m, range);
    outer_step(x, sent, t, v, sum, ranks, rates);
  }
  void saved(StrategyState& state) override {
    if (rates.momentum > 0) state.vector("momentum", m);
  }
  bool acts_alone() const override { return true; }
};

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

// Ranges that begin at multiples of FlatParameters::cut. If the vector is short, some are empty.
std::vector<Range> cut_into(std::int64_t parts, std::int64_t numel) {
  std::vector<Range> ranges;
  for (std::int64_t p = 0, begin = 0; p < parts; p++) {
    const std::int64_t end =
        p + 1 == parts ? numel : numel * (p + 1) / parts / FlatParameters::cut * FlatParameters::cut;
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

// ---- the strategy ---------------------------------------------------------------------------------------------------
// The thread of a Reducer computes sums in buckets, on the host or on devices, while the next steps run or while the
// step waits. With each sum the ranks exchange stop requests and non-finite steps: Replicas::tell() and hear().
class Rounds : public Replicas {
 public:
  Rounds(std::unique_ptr<Communicator> communicator, const RoundSteps& how, const RoundsOptions& options)
      : Replicas(std::move(communicator), how.name(), false),
        how_(how),
        options_(options),
        merge_(make_merge(how, size())),
        exchanges_(size() > 1 || merge_->acts_alone()),
        reducer_(*communicator_, options.deadline) {}

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    optimizer.gradients_are_shares_of(size());
    compare_layouts(flat);
    all_.begin(flat.backend(), options_.deadline, options_.nccl);
    broadcast(flat, all_.data());
    fragments_ = cut_into(how_.stream, flat.numel());
    placed_ = shown_ = false;
    equal_ = true;
    made_ = turn_ = left_ = 0;
    if (!exchanges_) return;
    sum_ = vector(flat, flat.values.dtype(), shared_memory(flat.backend(), flat.values.bytes()));
    if (how_.overlap != 0) sent_ = vector(flat, flat.values.dtype());
    merge_->begin(flat);
  }
  void begin_epoch(std::int64_t epoch, const RunPlan& run) override {
    Strategy::begin_epoch(epoch, run);
    if (!std::exchange(planned_, true)) {
      steps_ = run.done;
      if (how_.kind == Kind::post_local && run.learning_rate) first_decay_ = first_decay(run);
    }
    if (std::exchange(shown_, false)) swap_with_centre();
  }
  // The run starts or continues from the weights before its first step. A loop that does not call begin_epoch()
  // continues from the centre.
  void exchange(const Tensor& loss) override {
    if (exchanges_ && (!placed_ || shown_)) merge_->start(flat_->values);
    placed_ = true;
    shown_ = false;
    Strategy::exchange(loss);
  }
  void finish(Optimizer& optimizer) override {
    if (made_ == 0) round_ = before_decay() ? 1 : how_.every.at(optimizer.learning_rate(), steps_, plan_);
    steps_++;
    made_++;
    equal_ = false;
    if (left_ > 0 && --left_ == 0) merge();
    if (!exchanges_ || not_finite_ >= 0 || made_ < round_ * (turn_ + 1) / how_.stream) return;
    if (left_ > 0) merge();
    if (not_finite_ >= 0) return;
    send(fragments_[std::size_t(turn_)], how_.overlap);
    if (++turn_ == how_.stream) made_ = turn_ = 0;
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    flush();
    if (size() > 1) compare_weights();
    return Strategy::end_epoch(mine);
  }
  void saved(StrategyState& state) override {
    if (flat_ && exchanges_) merge_->saved(state);
  }
  Measures end() override {
    if (flat_) {
      flush();
      compare_weights();
      optimizer_ = nullptr;
      flat_ = nullptr;
      all_.end();
      sum_ = sent_ = {};
      merge_ = make_merge(how_, size());
      planned_ = false;
    }
    return measured(reducer_, all_.sent_bytes(), bucket_);
  }
  ClockOffset watch(Trace& trace) override {
    const ClockOffset offset = Replicas::watch(trace);
    reducer_.watch(trace);
    return offset;
  }

 private:
  bool before_decay() const {
    if (how_.kind != Kind::post_local) return false;
    if (first_decay_ < 0)
      refuse(name(), " asks when the learning rate decays: call begin_epoch() before the first step, as fit() does");
    return steps_ < first_decay_;
  }
  // The weights of a non-finite step are kept for inspection until all ranks have received the report.
  bool bad() const { return how_.overlap != 0 && optimizer_->read_state().not_finite == 1; }

  // overlap: the steps after which the sum is used.
  void send(Range range, std::int64_t overlap) {
    constexpr const char* name = "sum of weights";  // on the trace
    sent_range_ = range;
    if (range.length() > 0 && !bad()) {
      Tensor x = part(flat_->values, range), sum = part(sum_, range);
      merge_->send(range, x, sum);
      if (sent_.defined()) part(sent_, range).copy_from(x);
      flat_->count_writes(flat_->all());
    }
    tell(*optimizer_);  // waits for the device: the data to sum is complete
    auto add = [&](Communicator& over, Buffer data, Combine how) {
      reducer_.add({.over = over,
                    .after = nullptr,
                    .begin = [=](Communicator& c) { return c.all_reduce(data, how); },
                    .name = name});
    };
    for (const Range& r : cut(range.length(), sum_.dtype(), options_.bucket_bytes)) {
      Tensor bucket = sum_.range(range.begin + r.begin, {r.length()});
      bucket_ = std::max(bucket_, r.length() * 4);
      add(all_.data(), buffer(bucket), Combine::sum);
    }
    add(all_.flags(), {told_, 2, DType::f32}, Combine::max);
    under_way_ = true;
    left_ = overlap == RoundSteps::until_next_turn ? std::numeric_limits<std::int64_t>::max() : overlap;
    if (overlap != 0) return;
    merge();
    equal_ = range.length() == flat_->numel();
  }
  void drain() override {
    if (!std::exchange(under_way_, false)) return;
    reducer_.waits();
    reducer_.finish();
    hear();
  }
  // Uses the sum. Waits for it if it has not arrived.
  void merge() {
    left_ = 0;
    drain();
    if (not_finite_ >= 0 || sent_range_.length() == 0 || bad()) return;
    Tensor x = part(flat_->values, sent_range_), sum = part(sum_, sent_range_);
    Tensor sent = sent_.defined() ? part(sent_, sent_range_) : x;
    merge_->merge(sent_range_, x, sent, sum, size());
    flat_->count_writes(flat_->all());
  }

  // Gives all ranks the same weights, which are evaluated and saved.
  void flush() {
    if (!exchanges_ || shown_) return;
    if (left_ > 0) merge();
    if (not_finite_ < 0 && (merge_->centre() ? made_ > 0 : !equal_)) send(flat_->all(), 0);
    made_ = turn_ = 0;
    equal_ = true;
    if (not_finite_ >= 0 || !merge_->centre()) return;
    swap_with_centre();
    shown_ = true;
  }
  void swap_with_centre() {
    Tensor& centre = *merge_->centre();
    sum_.copy_from(flat_->values);
    flat_->values.copy_from(centre);
    centre.copy_from(sum_);
    flat_->count_writes(flat_->all());
  }
  void compare_weights() {
    if (not_finite_ >= 0) return;
    flat_->backend().synchronize();
    compare_parameters(*flat_, steps_);
  }

  const RoundSteps how_;
  const RoundsOptions options_;
  std::unique_ptr<RoundMerge> merge_;
  const bool exchanges_;  // with other ranks, or by a merge that acts alone
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  DataAndFlags all_{communicator_};
  Tensor sum_;   // over ranks
  Tensor sent_;  // if sums overlap with steps: x as it was sent
  std::vector<Range> fragments_;
  Range sent_range_{};
  std::int64_t bucket_ = 0;                       // bytes of the largest, in f32
  std::int64_t steps_ = 0;                        // of the run
  std::int64_t round_ = 1, made_ = 0, turn_ = 0;  // length of this round; its steps so far; the next fragment
  std::int64_t left_ = 0;                         // steps until the sum in flight is used; 0: none is in flight
  std::int64_t first_decay_ = -1;                 // −1: unknown
  bool planned_ = false;                          // the run's plan is known
  bool placed_ = false, shown_ = false;           // a step was made; the model has the centre
  bool equal_ = true;                             // no step was made since all ranks had the same weights
  bool under_way_ = false;
  Reducer reducer_;  // last member: its thread ends first
};

constexpr std::pair<const char*, Kind> names[] = {{"local-sgd", Kind::local},
                                                  {"post-local-sgd", Kind::post_local},
                                                  {"cocod-sgd", Kind::cocod},
                                                  {"easgd", Kind::elastic},
                                                  {"outer", Kind::outer}};

}  // namespace

void RoundMerge::send(Range, Tensor& x, Tensor& sum) { sum.copy_from(x); }

std::unique_ptr<RoundMerge> make_merge(const RoundSteps& how, int ranks) {
  if (how.kind == Kind::elastic) return std::make_unique<ElasticMerge>(ranks);
  if (how.kind == Kind::outer) return std::make_unique<OuterMerge>(OuterRates{how.momentum, how.learning_rate});
  return std::make_unique<MeanMerge>();
}

// ---- names ----------------------------------------------------------------------------------------------------------
std::optional<Interval> Interval::parse(const std::string& text, std::int64_t steps) {
  Interval every{.steps = steps};
  std::string number = text;
  if (const std::string rule = "qsr:"; text.starts_with(rule)) {
    const std::size_t end = std::min(text.find(':', rule.size()), text.size());
    every.alpha = parsed<double>(text.substr(rule.size(), end - rule.size())).value_or(0);
    if (!(every.alpha > 0 && every.alpha < 1e9)) return {};
    if (end == text.size()) return every;
    number = text.substr(end + 1);
  }
  every.steps = parsed<std::int64_t>(number).value_or(0);
  return every.steps >= 1 ? std::optional(every) : std::nullopt;
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

std::optional<RoundSteps> RoundSteps::parse(const std::string& text, const RoundSteps& outer) {
  const std::string name = spec_name(text);
  const auto* known = std::find_if(std::begin(names), std::end(names), [&](auto& n) { return name == n.first; });
  if (known == std::end(names)) return {};
  RoundSteps how = known->second == Kind::outer ? outer : RoundSteps{.kind = known->second};
  const bool late = how.kind == Kind::cocod || how.kind == Kind::elastic;
  how.overlap = late ? until_next_turn : 0;
  std::int64_t overlap = until_next_turn;  // if it is not given
  auto interval = [&](const std::string& value) {
    const auto every = Interval::parse(value, how.every.steps);
    if (every) how.every = *every;
    return every.has_value();
  };
  std::vector<SpecField> fields{bare({"H", "STEPS, from 1, or qsr:ALPHA:STEPS", interval})};
  if (how.kind == Kind::outer) {
    fields.push_back(number_field("momentum", how.momentum, 0, 0.999999));
    fields.push_back(number_field("lr", how.learning_rate, 1e-6, 10));
    fields.push_back(number_field("stream", how.stream, 1, 1e6));
    fields.push_back(number_field("overlap", overlap, 0, 1e9));
  }
  read_spec(text, fields);
  if (how.kind == Kind::outer) how.overlap = overlap < 0 && how.stream == 1 ? 0 : overlap;
  const std::int64_t turn = how.every.steps / how.stream;
  if (turn < 1) refuse(text, ": ", how.stream, " fragments need at least as many steps in H, not ", how.every.steps);
  if (how.overlap > turn)
    refuse(text, ": overlap=", how.overlap, " reaches past the next fragment's turn: at most ", turn, " steps");
  return how;
}

std::string RoundSteps::name() const {
  const std::string is = names[int(kind)].first;
  if (kind != Kind::outer) return is + ":" + every.name();
  std::string text = is + ":H=" + every.name() + ",momentum=" + digits(momentum) + ",lr=" + digits(learning_rate);
  if (stream > 1 || overlap != 0) text += ",stream=" + std::to_string(stream);
  if (overlap >= 0 && (stream > 1 || overlap > 0)) text += ",overlap=" + std::to_string(overlap);
  return text;
}

std::unique_ptr<Strategy> rounds(std::unique_ptr<Communicator> communicator, const RoundSteps& how,
                                 const RoundsOptions& options) {
  return std::make_unique<Rounds>(std::move(communicator), how, options);
}

}  // namespace tandem
