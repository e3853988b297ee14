#include "dist/strategies/outer.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/weight_sums.h"

namespace tandem {
namespace {

// The shortest correct version, in double on the host: after H steps Δ = θ − mean of x; m = β·m + Δ; x = θ = θ − γ(Δ +
// β·m).
class NaiveOuter : public Replicas {
 public:
  NaiveOuter(std::unique_ptr<Communicator> communicator, const OuterSteps& how)
      : Replicas(std::move(communicator), "naive-" + how.name(), false), how_(how) {}
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer.gradients_are_shares_of(size());
    compare_layouts(flat);
    broadcast(flat, *communicator_);
    theta_.clear(), m_.assign(std::size_t(flat.numel()), 0);
  }
  void exchange(const Tensor& loss) override {
    if (theta_.empty()) theta_ = flat_->values.values();
    Strategy::exchange(loss);
  }
  void finish(Optimizer& optimizer) override {
    if (++made_ % how_.every.steps == 0 && agree(optimizer)) outer_step();
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    if (made_ % how_.every.steps != 0) outer_step();
    made_ = 0;
    return Strategy::end_epoch(mine);
  }

 private:
  void outer_step() {
    take_mean_of_all(*flat_);
    const std::vector<double> mean = flat_->values.values();
    for (std::size_t i = 0; i < mean.size(); i++) {
      const double delta = theta_[i] - mean[i];
      m_[i] = how_.momentum * m_[i] + delta;
      theta_[i] -= how_.learning_rate * (delta + how_.momentum * m_[i]);
    }
    flat_->values.copy_from(Tensor::of(flat_->backend(), flat_->values.shape(), theta_, flat_->values.dtype()));
    flat_->count_writes(flat_->all());
  }

  OuterSteps how_;
  FlatParameters* flat_ = nullptr;
  std::vector<double> theta_, m_;
  std::int64_t made_ = 0;
};

class Outer : public WeightSums {
 public:
  Outer(std::unique_ptr<Communicator> communicator, const OuterSteps& how, const LocalSgdOptions& options)
      : WeightSums(std::move(communicator), how.name(), options), how_(how) {}

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    WeightSums::begin(flat, optimizer);
    sum_ = vector(shared_memory(flat.backend(), flat.values.bytes()));
    theta_ = vector();
    m_ = vector();
    m_.fill(0);
    if (how_.overlap != 0) sent_ = vector();
    fragments_ = cut_into(how_.stream, flat.numel());
    placed_ = false;
    equal_ = true;
    made_ = turn_ = left_ = 0;
  }
  // θ is where the run begins, or goes on.
  void exchange(const Tensor& loss) override {
    if (!std::exchange(placed_, true)) theta_.copy_from(flat_->values);
    WeightSums::exchange(loss);
  }
  void finish(Optimizer& optimizer) override {
    if (made_ == 0) round_ = how_.every.at(optimizer.learning_rate(), steps_, plan_);
    steps_++;
    made_++;
    equal_ = false;
    if (left_ > 0 && --left_ == 0) merge();
    if (not_finite_ >= 0 || made_ < round_ * (turn_ + 1) / how_.stream) return;
    if (left_ > 0) merge();
    if (not_finite_ >= 0) return;
    send(fragments_[std::size_t(turn_)], how_.overlap);
    if (++turn_ == how_.stream) made_ = turn_ = 0;
  }
  Measures end() override {
    const Measures measures = WeightSums::end();
    theta_ = m_ = sent_ = {};
    return measures;
  }
  void saved(StrategyState& state) override {
    if (how_.momentum > 0 && m_.defined()) state.vector("momentum", m_);
  }

 private:
  // Ranges that begin at multiples of FlatParameters::cut; of a short vector some are empty.
  static std::vector<Range> cut_into(std::int64_t parts, std::int64_t numel) {
    std::vector<Range> ranges;
    for (std::int64_t p = 0, begin = 0; p < parts; p++) {
      const std::int64_t end =
          p + 1 == parts ? numel : numel * (p + 1) / parts / FlatParameters::cut * FlatParameters::cut;
      ranges.push_back({begin, end});
      begin = end;
    }
    return ranges;
  }

  // overlap: the steps after which the sum is used.
  void send(Range range, std::int64_t overlap) {
    sent_range_ = range;
    copy(sum_, flat_->values);
    if (sent_.defined()) copy(sent_, flat_->values);
    start(range);
    left_ = overlap == OuterSteps::until_next_turn ? std::numeric_limits<std::int64_t>::max() : overlap;
    if (overlap == 0) merge();
  }
  void copy(Tensor& to, const Tensor& from) {
    if (sent_range_.length() > 0) part(to).copy_from(part(from));
  }
  Tensor part(const Tensor& t) const { return t.range(sent_range_.begin, {sent_range_.length()}); }

  // The sum has arrived, or is waited for: the outer step of what was sent.
  void merge() {
    left_ = 0;
    drain();
    if (not_finite_ >= 0 || sent_range_.length() == 0) return;
    Tensor x = part(flat_->values), theta = part(theta_), m = part(m_);
    outer_step(x, sent_.defined() ? part(sent_) : x, theta, m, part(sum_), size(), {how_.momentum, how_.learning_rate});
    flat_->count_writes(flat_->all());
  }
  void flush() override {
    if (left_ > 0) merge();
    if (!equal_ && not_finite_ < 0 && !(made_ == 0 && how_.stream == 1 && how_.overlap == 0)) send(flat_->all(), 0);
    made_ = turn_ = 0;
    equal_ = true;
  }

  const OuterSteps how_;
  Tensor theta_, m_;
  Tensor sent_;  // where sums overlap with steps: x as it went into sum_
  std::vector<Range> fragments_;
  Range sent_range_{};
  std::int64_t round_ = 1, made_ = 0, turn_ = 0;  // steps of this round, in all and so far; the fragment that is next
  std::int64_t left_ = 0;                         // steps until the sum that is under way is used; 0: none is
  bool equal_ = true, placed_ = false;            // no step was made since all ranks had the same weights; θ is known
};

}  // namespace

std::optional<OuterSteps> OuterSteps::parse(const std::string& text, OuterSteps how) {
  const std::string name = text.substr(0, text.find(':'));
  if (name != "outer") return {};
  bool streams = false, overlaps = false;
  for (std::size_t at = name.size(); at < text.size();) {  // at the ':' or ',' before key=value
    const std::size_t end = std::min(text.find(',', at + 1), text.size());
    const std::string item = text.substr(at + 1, end - at - 1), key = item.substr(0, item.find('='));
    const std::string value = item.substr(std::min(item.size(), key.size() + 1));
    auto number = [&](auto& into, double least, double most) {
      const auto v = parsed<std::remove_reference_t<decltype(into)>>(value);
      if (!v || !(double(*v) >= least && double(*v) <= most))
        refuse(text, ": '", item, "': write ", key, "=NUMBER, from ", digits(least), " to ", digits(most));
      into = *v;
    };
    if (key == "H") {
      const auto every = Interval::parse(value, how.every.steps);
      if (!every) refuse(text, ": '", item, "': write H=STEPS, from 1, or H=qsr:ALPHA:STEPS");
      how.every = *every;
    } else if (key == "momentum") {
      number(how.momentum, 0, 0.999999);
    } else if (key == "lr") {
      number(how.learning_rate, 1e-6, 10);
    } else if (key == "stream") {
      number(how.stream, 1, 1e6), streams = true;
    } else if (key == "overlap") {
      number(how.overlap, 0, 1e9), overlaps = true;
    } else {
      refuse(text, ": '", item,
             "': outer has H, momentum, lr, stream and overlap, as in outer:H=100,momentum=0.5,lr=0.7");
    }
    at = end;
  }
  if (streams && !overlaps) how.overlap = until_next_turn;
  const std::int64_t turn = how.every.steps / how.stream;
  if (turn < 1) refuse(text, ": ", how.stream, " fragments need at least as many steps in H, not ", how.every.steps);
  if (how.overlap > turn)
    refuse(text, ": overlap=", how.overlap, " reaches past the next fragment's turn: at most ", turn, " steps");
  return how;
}

std::string OuterSteps::name() const {
  std::string text = "outer:H=" + every.name() + ",momentum=" + digits(momentum) + ",lr=" + digits(learning_rate);
  if (stream > 1 || overlap != 0) text += ",stream=" + std::to_string(stream);
  if (overlap >= 0 && (stream > 1 || overlap > 0)) text += ",overlap=" + std::to_string(overlap);
  return text;
}

std::unique_ptr<Strategy> outer(std::unique_ptr<Communicator> communicator, const OuterSteps& how,
                                const LocalSgdOptions& options) {
  return std::make_unique<Outer>(std::move(communicator), how, options);
}
std::unique_ptr<Strategy> naive_outer(std::unique_ptr<Communicator> communicator, const OuterSteps& how) {
  return std::make_unique<NaiveOuter>(std::move(communicator), how);
}

}  // namespace tandem
