#include "dist/strategies/rounds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "dist/collectives/on_devices.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

// Fragments begin at multiples of FlatParameters::cut. If the vector is short, some are empty.
Range fragment_of(const Turn& turn, std::int64_t numel) {
  auto begin = [&](std::int64_t f) {
    return f == turn.fragments ? numel : numel * f / turn.fragments / FlatParameters::cut * FlatParameters::cut;
  };
  return {begin(turn.fragment), begin(turn.fragment + 1)};
}

class Rounds : public Replicas {
 public:
  Rounds(RoundRanks ranks, const std::string& name, std::function<std::unique_ptr<RoundMethod>()> make,
         const RoundsOptions& options)
      : Replicas(std::move(ranks.everybody), (options.classifier ? options.classifier->name() + "+" : "") + name,
                 ranks.across && ranks.across->size() == 1),
        options_(options),
        make_(std::move(make)),
        across_(ranks.across ? std::move(ranks.across) : communicator_),
        host_(ranks.host ? std::move(ranks.host) : alone()),
        reducer_(*across_, options.deadline) {
    if (ranks.gradients)
      steps_by_ = all_reduce(
          std::move(ranks.gradients),
          {.bucket_bytes = options.bucket_bytes, .deadline = options.deadline, .classifier = options.classifier});
    ranks_.per_step = host_->size();
  }

  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    if (host_->size() == 1) Strategy::prepare(model, task, options);
    steps_by_->prepare(model, task, options);  // statistics over the pictures of a host
  }
  FlatMemory memory() override { return steps_by_->memory(); }
  BatchSource& batches(BatchSource& train, int accumulate) override {
    OwnPart* own = own_part(train, accumulate,
                            {.worker = across_->rank(),
                             .workers = groups(),
                             .place = host_->rank(),
                             .places = host_->size(),
                             .shares = options_.own_epochs > 0 ? 1 : groups(),
                             .epochs = options_.own_epochs,
                             .sample = options_.sample});
    return own ? *own : Replicas::batches(train, accumulate);
  }

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    method_ = make_();
    method_->join(own_part_.get(), optimizer);
    exchanges_ = groups() > 1 || method_->acts_alone();
    compare_layouts(flat);
    steps_by_->begin(flat, optimizer);
    optimizer.gradients_are_shares_of(own_part_ ? 1 : groups());
    between_.begin(flat.backend(), options_.deadline);
    if (host_->size() > 1) in_host_.begin(flat.backend(), options_.deadline);
    // Rank 0's values, which the ranks of its host already have
    broadcast(flat, between_.data(), flat.slice().count > 1 ? &between_.data() : nullptr);
    planned_ = placed_ = shown_ = false;
    equal_ = true;
    steps_ = batch_ = 0;
    last_ = -1;
    if (!exchanges_) return;
    auto shared = flat.backend().on_device() ? nullptr : across_->allocate(flat.values.bytes());
    flights_[0].sum = vector(flat, flat.values.dtype(), std::move(shared));
    method_->allocate(flat);
  }

  void begin_epoch(std::int64_t epoch, const RunPlan& run) override {
    Strategy::begin_epoch(epoch, run);
    const auto length = std::int64_t(std::llround(run.steps_per_epoch));
    const bool first = !std::exchange(planned_, true);
    if (first) steps_ = run.done;
    if (first && rank() == 0) note_whole_rounds(name(), options_.own_epochs, int(run.epochs));
    done_ = epoch * length;
    batch_ = first ? std::clamp<std::int64_t>(run.done - epoch * length, 0, length) : 0;
    last_ = length - 1;
    group_ = 0;
    method_->begin_epoch(epoch, run);
    if (std::exchange(shown_, false)) swap_with_centre();
    if (exchanges_ && equal_) method_->equal(flat_->values);
    round_ = options_.own_epochs > 0 && batch_ < length;  // false: a resumed run begins at the end of a round
    equal_ = equal_ && !round_;                           // ranks that make no step in the round need the sum too
    for (auto [name, vector] : optimizer_->vectors())
      if (round_) vector.fill(0);
  }
  std::int64_t steps(std::int64_t known) const override { return options_.own_epochs > 0 ? done_ : known; }

  // The run starts or continues from the weights before its first step. A loop that does not call begin_epoch()
  // continues from the centre.
  void exchange(const Tensor& loss) override {
    if (exchanges_ && (!placed_ || shown_)) method_->start(flat_->values);
    placed_ = true;
    shown_ = false;
    if (stop_requested_) steps_by_->request_stop();
    steps_by_->exchange(loss);
  }
  void update(Optimizer& optimizer, const Tensor& loss) override {
    method_->before_update(flat_->values, flat_->gradients);
    steps_by_->update(optimizer, loss);
  }
  void finish(Optimizer&) override {
    // If a rank of this host asked to stop, the next exchange sends the request to all ranks.
    if (steps_by_->over(0)) request_stop();
    if (groups() == 1) stop_ = steps_by_->over(0);
    if (!exchanges_ || not_finite_ >= 0) return;
    method_->after_update(flat_->values, optimizer_->learning_rate());
    const Turn turn = method_->next(now());
    steps_++;
    batch_++;
    take(turn);
    equal_ = turn.waits && turn.fragments == 1;
  }

  // If each rank makes its own steps, the flags of the last exchange decide, which are the same on all ranks.
  std::optional<std::string> not_finite(const StepState& state) const override {
    if (ranks_.synchronous || size() == 1) return Strategy::not_finite(state);
    if (not_finite_ < 0) return {};
    return state.not_finite == 1 ? "" : communicator_->where(not_finite_);
  }

  EpochEnd end_epoch(const EpochEnd& mine) override {
    flush();
    if (groups() > 1 && not_finite_ < 0) compare_parameters(*flat_, steps_);
    EpochEnd all = Strategy::end_epoch(mine);
    if (round_) all.epochs = std::min(mine.epochs + options_.own_epochs - 1, plan_.epochs);
    if (options_.own_epochs > 0) all.steps = done_ = all.epochs * (last_ + 1);
    if (batch_ > last_ && not_finite_ < 0 && all.trained.samples > 0)
      method_->end_epoch(all.trained.loss / all.trained.samples);
    return all;
  }
  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override {
    if (what != Shared::buffers || options_.merges_statistics) Replicas::synchronize(what, flat, optimizer);
  }
  bool saves_after_failure() override {
    const bool saves = Replicas::saves_after_failure();
    if (saves && method_) method_->go_back(flat_->values);
    return saves;
  }
  void saved(StrategyState& state) override {
    if (method_ && exchanges_) method_->saved(state);
  }

  Measures end() override {
    if (flat_) {
      flush();
      drain();
      if (not_finite_ < 0) compare_parameters(*flat_, steps_);
      flat_ = nullptr;
      optimizer_ = nullptr;
      between_.end();
      in_host_.end();
      flights_ = {};
      method_->release();
    }
    std::uint64_t sent = between_.sent_bytes();
    if (across_ != communicator_) sent += in_host_.sent_bytes() + communicator_->traffic().bytes;
    Measures m = measured(reducer_, sent, bucket_);
    const Measures inside = steps_by_->end();
    for (std::size_t i = 0; i < inside.size(); i++) m[i].second += inside[i].second;
    m[3].second = m[1].second > 0 ? 1 - m[2].second / m[1].second : 0;  // the hidden share of both
    return m;
  }
  ClockOffset watch(Trace& trace) override {
    const ClockOffset offset = Replicas::watch(trace);
    steps_by_->watch(trace);
    reducer_.watch(trace);
    return offset;
  }

 private:
  struct Flight {
    Exchanged exchange;  // of this rank's slices and, if it is in the group, of the fragment
    Tensor sum, sent;    // whole vectors
    std::vector<Reducer::Pending> pending = {};
    int group = 0;  // the local index of the ranks that exchange
    // Maxima over all ranks: size() − rank if its step was not finite; 1 if a rank was asked to stop
    float flags[2] = {0, 0};
    bool open = false, under_way = false;  // not merged; not arrived
  };
  int groups() const { return across_->size(); }
  Moment now() const { return {.step = steps_, .batch = batch_, .last = last_, .rate = optimizer_->learning_rate()}; }
  // The weights of a non-finite step are kept for inspection until all ranks have received the report.
  bool bad() const { return optimizer_->read_state().not_finite == 1; }

  void take(const Turn& turn) {
    Flight& before = flights_[flight_];
    if (turn.merges && turn.merges_first) merge(before, turn.weight);
    if (not_finite_ >= 0) return;
    if (turn.sends) send(turn);
    if (turn.merges && !turn.merges_first) merge(before, turn.weight);
    if (turn.waits) merge(flights_[flight_], turn.weight);
  }

  void send(const Turn& turn) {
    if (flights_[flight_].open) flight_ = 1 - flight_;
    Flight& f = flights_[flight_];
    f.group = std::exchange(group_, (group_ + 1) % host_->size());
    const bool member = f.group == host_->rank();
    const Range slices = flat_->all(OwnerClass::slice), range = member ? fragment_of(turn, flat_->numel()) : slices;
    auto copy = [&](Tensor& whole) {
      if (!whole.defined()) whole = vector(*flat_, flat_->values.dtype());
      return part(whole, range);
    };
    const Tensor x = part(flat_->values, range);
    Exchanged& e = f.exchange;
    e = {.range = range,
         .x = x,
         .sent = turn.waits ? x : copy(f.sent),
         .sum = copy(f.sum),
         .ranks = groups(),
         .turn = turn};
    if (bad()) e.x = x.clone();
    method_->send(e);
    // Multiplies x_i by n·p_i, so that the mean is Σ p_i·x_i.
    if (own_part_ && options_.own_epochs == 0 && e.sum.dtype() == flat_->values.dtype())
      add_scaled(e.sum, e.sum, groups() * own_part_->weight() - 1);
    if (!turn.waits) e.sent.copy_from(e.x);
    e.x = x;
    flat_->count_writes(flat_->all());
    f.flags[0] = bad() ? float(size() - rank()) : 0;  // waits for the device: the data to sum is complete
    f.flags[1] = stop_requested_ ? 1 : 0;
    f.pending.clear();
    f.open = f.under_way = true;
    if (!member && range.length() == 0) return;
    auto add = [&](Communicator& over, Buffer data, Combine how) {
      f.pending.push_back(reducer_.add(
          {.over = over, .begin = [=](Communicator& c) { return c.all_reduce(data, how); }, .name = "sum of weights"}));
    };
    const std::int64_t border = std::clamp(slices.begin, range.begin, range.end);
    for (Range r : {Range{range.begin, border}, Range{border, range.end}})  // no bucket has slices and others
      for (const Range& bucket : cut(r, flat_->values.dtype(), options_.bucket_bytes)) {
        Tensor piece = e.sum.range(bucket.begin - range.begin, {bucket.length()});
        bucket_ = std::max(bucket_, bucket.length() * 4);
        add(between_.data(), buffer(piece), Combine::sum);
      }
    add(between_.flags(), {f.flags, 2, DType::f32}, Combine::max);
  }

  // Waits for the sum and its flags.
  void arrive(Flight& f) {
    if (!std::exchange(f.under_way, false)) return;
    for (Reducer::Pending p : f.pending) reducer_.wait(p);
    if (host_->size() > 1) in_host_.flags().broadcast({f.flags, 2, DType::f32}, f.group).wait();
    if (f.flags[0] > 0) not_finite_ = size() - int(f.flags[0]);
    if (f.flags[1] > 0) stop_ = true;
  }
  void drain() override {
    for (Flight& f : flights_) arrive(f);
  }

  void merge(Flight& f, std::int64_t weight) {
    if (!std::exchange(f.open, false)) return;
    arrive(f);
    if (not_finite_ >= 0) return;
    f.exchange.turn.weight = weight;
    if (f.exchange.range.length() > 0 && !bad()) method_->merge(f.exchange);
    if (host_->size() > 1) {  // the group's weights, on all ranks of the host
      flat_->backend().synchronize();
      Tensor replicated = part(flat_->values, flat_->all(OwnerClass::replicated));
      in_host_.data().broadcast(buffer(replicated), f.group).wait();
    }
    flat_->count_writes(flat_->all());
    if (f.exchange.turn.waits) method_->equal(flat_->values);
  }

  // Gives all ranks the same weights, which are evaluated and saved.
  void flush() {
    if (!exchanges_ || shown_) return;
    for (bool again = not_finite_ < 0 && !std::exchange(equal_, true); again;) {
      const Turn turn = method_->end(now());
      take(turn);
      again = turn.again && not_finite_ < 0;
    }
    if (not_finite_ >= 0 || !method_->centre()) return;
    swap_with_centre();
    shown_ = true;
  }
  void swap_with_centre() {
    Tensor &centre = *method_->centre(), &copy = flights_[0].sum;
    copy.copy_from(flat_->values);
    flat_->values.copy_from(centre);
    centre.copy_from(copy);
    flat_->count_writes(flat_->all());
  }

  const RoundsOptions options_;
  const std::function<std::unique_ptr<RoundMethod>()> make_;
  std::unique_ptr<RoundMethod> method_;
  std::unique_ptr<Strategy> steps_by_ = std::make_unique<Strategy>();
  std::shared_ptr<Communicator> across_, host_;
  DataAndFlags between_{across_}, in_host_{host_};  // the same ranks, also for device memory
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  std::array<Flight, 2> flights_;  // an exchange may begin before the last one is merged
  std::size_t flight_ = 0;
  int not_finite_ = -1;  // the first rank whose step was not finite, by those flags; −1: none
  int group_ = 0;        // the local index of the ranks that exchange next
  std::int64_t steps_ = 0, batch_ = 0, last_ = -1;  // of the run, and of the epoch
  std::int64_t bucket_ = 0;                         // bytes of the largest, in f32
  bool exchanges_ = false;                          // with other ranks, or by a method that acts alone
  std::int64_t done_ = 0;                           // with own epochs: steps before this round
  bool round_ = false;                              // of own epochs: it is under way
  bool planned_ = false;                            // the run's plan is known
  bool placed_ = false, shown_ = false;             // a step was made; the model has the centre
  bool equal_ = true;                               // no step was made since all ranks had the same weights
  Reducer reducer_;                                 // last member: its thread ends first
};

}  // namespace

void RoundMethod::merge(Exchanged& e) { join_mean(e.x, e.sent, e.sum, e.ranks); }

void note_whole_rounds(const std::string& name, std::int64_t own_epochs, int planned) {
  if (own_epochs == 0 || planned % own_epochs == 0) return;
  std::fprintf(stderr, "note: --epochs %d ends within a round of %s: it is made to its end\n", planned, name.c_str());
}

std::unique_ptr<Strategy> rounds(RoundRanks ranks, const std::string& name,
                                 std::function<std::unique_ptr<RoundMethod>()> make, const RoundsOptions& options) {
  return std::make_unique<Rounds>(std::move(ranks), name, std::move(make), options);
}

}  // namespace tandem
