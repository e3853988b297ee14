#include "dist/strategies/local_sgd.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/backend.h"
#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

// The shortest correct version of local-sgd. Every rank makes `steps` steps of its own, then all go on from the mean of their weights.
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

class LocalSgd : public Replicas {
 public:
  LocalSgd(std::unique_ptr<Communicator> communicator, const LocalSteps& how, const LocalSgdOptions& options)
      : Replicas(std::move(communicator), how.name(), false), how_(how), options_(options), reducer_(*communicator_, options.deadline) {
    require(how.steps >= 1, how.name(), ": at least one step lies between exchanges");
  }

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    optimizer.gradients_are_shares_of(size());
    compare_layouts(flat);
    Backend& backend = flat.backend();
    if (backend.asynchronous()) {
      flags_ = communicator_->split(0, rank());  // separate: what is under way below over_ begins in an order of its own
      over_ = on_devices(communicator_, backend, options_.deadline, options_.nccl ? *options_.nccl : installed_nccl());
      ready_ = backend.new_event();
      backend.synchronize();
    }
    broadcast(flat, communicator());
    buckets_ = cut(flat.numel(), flat.values.dtype(), options_.bucket_bytes);
    if (size() == 1) return;
    sum_ = vector(flat, flat.values.dtype(), shared_memory(backend, flat.values.bytes()));
    if (how_.kind == LocalSteps::Kind::cocod || elastic()) other_ = vector(flat, flat.values.dtype());
  }

  void begin_epoch(std::int64_t epoch, const RunPlan& run) override {
    Strategy::begin_epoch(epoch, run);
    if (!std::exchange(planned_, true)) look_for_decay(run);
    if (!centred_) set_centre();
    if (std::exchange(shown_, false)) swap_with_centre();
  }
  void look_for_decay(const RunPlan& run) {
    steps_ = run.done;
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
      largest = std::max(largest, r), before = r;
    }
  }

  void exchange(const Tensor& loss) override {
    if (!centred_ || shown_) set_centre();  // a loop that does not call begin_epoch() goes on from the centre
    Strategy::exchange(loss);
  }
  void finish(Optimizer&) override {
    const std::int64_t until = steps_between();
    steps_++, made_++;
    if (size() == 1 || not_finite_ >= 0 || made_ < until) return;
    made_ = 0;
    if (overlaps())
      start_next_average();
    else
      mean_of_all();
    equal_ = !overlaps();
  }

  EpochEnd end_epoch(const EpochEnd& mine) override {
    flush();
    if (size() > 1 && not_finite_ < 0) compare_weights();
    return Strategy::end_epoch(mine);
  }
  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override {
    if (what == Shared::averages && size() > 1) {
      mean_of_all();
      what = Shared::buffers;
    }
    Replicas::synchronize(what, flat, optimizer);
  }
  Measures end() override {
    if (flat_) {
      flush();
      if (not_finite_ < 0) compare_weights();
      optimizer_ = nullptr, flat_ = nullptr;
      if (over_) sent_by_devices_ = over_->traffic().bytes;
      over_.reset(), flags_.reset(), ready_.reset();
      sum_ = other_ = {};
      centred_ = shown_ = planned_ = false;
    }
    return measured(reducer_, std::max(sent_by_devices_, communicator_->traffic().bytes),
                    buckets_.empty() ? 0 : buckets_[0].length() * 4);
  }

  ClockOffset watch(Trace& trace) override {
    const ClockOffset offset = Replicas::watch(trace);
    reducer_.watch(trace);
    return offset;
  }

 private:
  Communicator& communicator() { return over_ ? *over_ : *communicator_; }
  bool elastic() const { return how_.kind == LocalSteps::Kind::elastic; }
  bool overlaps() const { return elastic() || how_.kind == LocalSteps::Kind::cocod; }
  bool bad() const { return optimizer_->read_state().not_finite == 1; }  // waits for the device
  std::int64_t steps_between() const {
    if (how_.kind != LocalSteps::Kind::post_local) return how_.steps;
    if (first_decay_ < 0)
      refuse(name(), " asks when the learning rate decays: call begin_epoch() before the first step, as fit() does");
    return steps_ < first_decay_ ? 1 : how_.steps;
  }

  void mean_of_all() {
    sum_.copy_from(flat_->values);
    reducer_.waits();
    start();
    arrive();
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
    start();
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
    centred_ = true, shown_ = false;
    if (elastic() && size() > 1) other_.copy_from(flat_->values);
  }
  void swap_with_centre() {
    sum_.copy_from(flat_->values);
    flat_->values.copy_from(other_);
    other_.copy_from(sum_);
    flat_->count_writes(flat_->all());
  }

  // Sums over all ranks, of sum_ and of what this one has to tell.
  void start() {
    tell(*optimizer_);
    if (ready_) flat_->backend().queue().mark(*ready_);
    for (const Range& r : buckets_) {
      Tensor part = sum_.range(r.begin, {r.length()});
      reducer_.add({.over = communicator(),
                    .after = ready_.get(),
                    .begin = [data = buffer(part)](Communicator& c) { return c.all_reduce(data); },
                    .name = name_});
    }
    reducer_.add({.over = flags_ ? *flags_ : *communicator_,
                  .after = ready_.get(),
                  .begin = [this](Communicator& c) { return c.all_reduce({told_, 2, DType::f32}, Combine::max); },
                  .name = name_});
    under_way_ = true;
  }
  void drain() override {
    if (!under_way_) return;
    reducer_.waits();
    arrive();
  }
  void arrive() {
    reducer_.finish();
    under_way_ = false, fresh_ = true;
    hear();
  }

  // All ranks have the same weights.
  void flush() {
    if (size() == 1 || shown_) return;
    if (elastic()) return show_centre();
    drain();
    if (fresh_ && not_finite_ < 0) use();
    if (!(equal_ && made_ == 0) && not_finite_ < 0) mean_of_all();
    made_ = 0, equal_ = true;
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
  void compare_weights() {
    flat_->backend().synchronize();
    compare_parameters(*flat_, steps_);
  }

  static constexpr const char* name_ = "sum of weights";  // on the trace
  LocalSteps how_;
  LocalSgdOptions options_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  std::unique_ptr<Communicator> over_, flags_;  // on a device: on its memory, and beside that
  std::unique_ptr<Event> ready_;                // on a device: what is to be summed is there
  std::vector<Range> buckets_;
  Tensor sum_;                              // over ranks; weights change only when all of it has arrived
  Tensor other_;                            // cocod: x as it went into sum_; easgd: the centre, or x while that is shown
  std::int64_t steps_ = 0, made_ = 0;       // in all; since the last exchange
  std::int64_t first_decay_ = -1;           // the step before which the learning rate first decays; −1: unknown
  bool equal_ = true;                       // after the last exchange all ranks had the same weights
  bool under_way_ = false, fresh_ = false;  // a sum; one that has arrived and is not used yet
  bool planned_ = false;                    // the run's plan is known
  bool centred_ = false, shown_ = false;    // easgd: there is a centre; the model has it
  std::uint64_t sent_by_devices_ = 0;       // in a run that has ended
  Reducer reducer_;                         // last: its thread ends first
};

}  // namespace

std::optional<LocalSteps> LocalSteps::parse(const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  const auto* known = std::find_if(std::begin(names), std::end(names), [&](auto& n) { return name == n.first; });
  if (known == std::end(names)) return {};
  LocalSteps how{.kind = known->second};
  if (name != text) {
    const char *from = text.data() + name.size() + 1, *to = text.data() + text.size();
    const auto [end, error] = std::from_chars(from, to, how.steps);
    if (error != std::errc() || end != to || how.steps < 1) refuse(text, ": write ", name, ":STEPS, from 1");
  }
  return how;
}

std::string LocalSteps::name() const { return std::string(names[int(kind)].first) + ":" + std::to_string(steps); }

std::unique_ptr<Strategy> local_sgd(std::unique_ptr<Communicator> communicator, const LocalSteps& how,
                                    const LocalSgdOptions& options) {
  return std::make_unique<LocalSgd>(std::move(communicator), how, options);
}
std::unique_ptr<Strategy> naive_local_sgd(std::unique_ptr<Communicator> communicator, std::int64_t steps) {
  return std::make_unique<NaiveLocalSgd>(std::move(communicator), steps);
}

}  // namespace tandem
