#include "dist/strategies/local_sgd.h"

#include <algorithm>
#include <utility>

#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/weight_sums.h"

namespace tandem {
namespace {

// The shortest correct version of local-sgd. Every rank makes `steps` steps of its own, then all go on from the mean of
// their weights.
class NaiveLocalSgd : public Replicas {
 public:
  NaiveLocalSgd(std::unique_ptr<Communicator> communicator, std::int64_t steps)
      : Replicas(std::move(communicator), "naive-local-sgd:" + std::to_string(steps), false), steps_(steps) {}
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer.gradients_are_shares_of(size());
    compare_layouts(flat);
    broadcast(flat, *communicator_);
  }
  void finish(Optimizer& optimizer) override {
    if (++made_ % steps_ == 0 && agree(optimizer)) take_mean_of_all(*flat_);
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    if (made_ % steps_ != 0) take_mean_of_all(*flat_);
    made_ = 0;
    return Strategy::end_epoch(mine);
  }

 private:
  FlatParameters* flat_ = nullptr;
  std::int64_t steps_, made_ = 0;
};

constexpr std::pair<const char*, LocalSteps::Kind> names[] = {{"local-sgd", LocalSteps::Kind::local},
                                                              {"post-local-sgd", LocalSteps::Kind::post_local},
                                                              {"cocod-sgd", LocalSteps::Kind::cocod},
                                                              {"easgd", LocalSteps::Kind::elastic}};

class LocalSgd : public WeightSums {
 public:
  LocalSgd(std::unique_ptr<Communicator> communicator, const LocalSteps& how, const LocalSgdOptions& options)
      : WeightSums(std::move(communicator), how.name(), options), how_(how) {
    require(how.every.steps >= 1, how.name(), ": at least one step lies between exchanges");
  }

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    WeightSums::begin(flat, optimizer);
    if (size() == 1) return;
    sum_ = vector(shared_memory(flat.backend(), flat.values.bytes()));
    if (overlaps()) other_ = vector();
  }

  void begin_epoch(std::int64_t epoch, const RunPlan& run) override {
    if (!planned_) look_for_decay(run);
    WeightSums::begin_epoch(epoch, run);
    if (!centred_) set_centre();
    if (std::exchange(shown_, false)) swap_with_centre();
  }
  void look_for_decay(const RunPlan& run) {
    if (!run.learning_rate) return;
    const double total = double(run.epochs) * run.steps_per_epoch;
    first_decay_ = std::int64_t(total / 2);
    double largest = 0, before = 0;
    for (std::int64_t step = 0; double(step) < total; step++) {
      const double r = run.learning_rate(double(step));
      if (r < 0.9 * before || r < 0.5 * largest) {
        first_decay_ = step;
        break;
      }
      largest = std::max(largest, r);
      before = r;
    }
  }

  void exchange(const Tensor& loss) override {
    if (!centred_ || shown_) set_centre();  // a loop that does not call begin_epoch() goes on from the centre
    Strategy::exchange(loss);
  }
  void finish(Optimizer& optimizer) override {
    if (made_ == 0) until_ = how_.every.at(optimizer.learning_rate(), steps_, plan_);
    const std::int64_t until = before_decay() ? 1 : until_;
    steps_++;
    made_++;
    if (size() == 1 || not_finite_ >= 0 || made_ < until) return;
    made_ = 0;
    if (overlaps())
      start_next_average();
    else
      mean_of_all();
    equal_ = !overlaps();
  }

  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override {
    if (what == Shared::averages && size() > 1) {
      mean_of_all();
      what = Shared::buffers;
    }
    Replicas::synchronize(what, flat, optimizer);
  }
  Measures end() override {
    const Measures measures = WeightSums::end();
    other_ = {};
    centred_ = shown_ = false;
    return measures;
  }

 private:
  bool elastic() const { return how_.kind == LocalSteps::Kind::elastic; }
  bool overlaps() const { return elastic() || how_.kind == LocalSteps::Kind::cocod; }
  bool before_decay() const {
    if (how_.kind != LocalSteps::Kind::post_local) return false;
    if (first_decay_ < 0)
      refuse(name(), " asks when the learning rate decays: call begin_epoch() before the first step, as fit() does");
    return steps_ < first_decay_;
  }

  void mean_of_all() {
    sum_.copy_from(flat_->values);
    start(flat_->all());
    drain();
    fresh_ = false;
    if (not_finite_ >= 0) return;
    take_mean(flat_->values, sum_, size());
    flat_->count_writes(flat_->all());
  }
  // The last sum is used, and then the next is under way.
  void start_next_average() {
    drain();
    if (not_finite_ >= 0) return;
    use();
    start(flat_->all());
  }
  // The weights of a step that is to be looked at stay as they are.
  void use() {
    const bool fresh = std::exchange(fresh_, false), mine = !bad();
    if (elastic()) {
      if (!fresh) sum_.fill(0);
      if (mine) elastic_average(flat_->values, other_, sum_, 0.9 / size());
    } else if (fresh && mine) {
      join_mean(flat_->values, other_, sum_, size());
    } else {
      other_.copy_from(flat_->values);
      sum_.copy_from(flat_->values);
    }
    flat_->count_writes(flat_->all());
  }
  void set_centre() {
    centred_ = true;
    shown_ = false;
    if (elastic() && size() > 1) other_.copy_from(flat_->values);
  }
  void swap_with_centre() {
    sum_.copy_from(flat_->values);
    flat_->values.copy_from(other_);
    other_.copy_from(sum_);
    flat_->count_writes(flat_->all());
  }

  void drain() override {
    if (!under_way()) return;
    WeightSums::drain();
    fresh_ = true;
  }

  void flush() override {
    if (size() == 1 || shown_) return;
    if (elastic()) return show_centre();
    drain();
    if (fresh_ && not_finite_ < 0) use();
    if (!(equal_ && made_ == 0) && not_finite_ < 0) mean_of_all();
    made_ = 0;
    equal_ = true;
  }
  void show_centre() {
    if (made_ > 0) start_next_average();
    drain();
    made_ = 0;
    if (not_finite_ >= 0) return;
    if (std::exchange(fresh_, false)) add_into(other_, sum_);
    swap_with_centre();
    shown_ = true;
  }

  LocalSteps how_;
  Tensor other_;                          // cocod: x as it went into sum_; easgd: the centre, or x while that is shown
  std::int64_t made_ = 0, until_ = 1;     // steps since the last exchange; those that lie between two
  std::int64_t first_decay_ = -1;         // the step before which the learning rate first decays; −1: unknown
  bool equal_ = true;                     // after the last exchange all ranks had the same weights
  bool fresh_ = false;                    // a sum has arrived and is not used yet
  bool centred_ = false, shown_ = false;  // easgd: there is a centre; the model has it
};

}  // namespace

std::optional<LocalSteps> LocalSteps::parse(const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  const auto* known = std::find_if(std::begin(names), std::end(names), [&](auto& n) { return name == n.first; });
  if (known == std::end(names)) return {};
  LocalSteps how{.kind = known->second};
  if (name != text) {
    const auto every = Interval::parse(text.substr(name.size() + 1), how.every.steps);
    if (!every) refuse(text, ": write ", name, ":STEPS, from 1, or ", name, ":qsr:ALPHA:STEPS");
    how.every = *every;
  }
  return how;
}

std::string LocalSteps::name() const { return std::string(names[int(kind)].first) + ":" + every.name(); }

std::unique_ptr<Strategy> local_sgd(std::unique_ptr<Communicator> communicator, const LocalSteps& how,
                                    const LocalSgdOptions& options) {
  return std::make_unique<LocalSgd>(std::move(communicator), how, options);
}
std::unique_ptr<Strategy> naive_local_sgd(std::unique_ptr<Communicator> communicator, std::int64_t steps) {
  return std::make_unique<NaiveLocalSgd>(std::move(communicator), steps);
}

}  // namespace tandem
