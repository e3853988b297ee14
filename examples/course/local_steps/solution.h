// Steps of one's own in blocking calls: the shortest correct versions of local-sgd and of outer.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/strategies/host_steps.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/rounds.h"
#include "examples/course/data_parallel/solution.h"

namespace tandem {

// Every rank makes `steps` steps of its own, then all go on from the mean of
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

// In double on the host: after H steps Δ = θ − mean of x; m = β·m + Δ; x = θ = θ − γ(Δ +
// β·m).
class NaiveOuter : public Replicas {
 public:
  NaiveOuter(std::unique_ptr<Communicator> communicator, const RoundSteps& how)
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

  RoundSteps how_;
  FlatParameters* flat_ = nullptr;
  std::vector<double> theta_, m_;
  std::int64_t made_ = 0;
};

// DASO. All groups exchange at every turn and wait for it, so nothing is broadcast inside a
// host; the sum is used when its turn to be merged has come.
class NaiveDaso : public HostSteps {
 public:
  NaiveDaso(DasoRanks ranks, std::unique_ptr<Strategy> on_host, const DasoOptions& o)
      : HostSteps(std::move(ranks), std::move(on_host), o, {}, "naive-" + o.name()) {}

 private:
  using Numbers = std::vector<double>;
  void epoch_begins() override { common_ = flat_->values.values(), error_.assign(common_.size(), 0); }
  void take(const DasoSchedule::Turn& turn) override {
    if (!agree(*optimizer_)) return;
    Numbers x = flat_->values.values(), sent = sent_, sum = sum_;
    auto merge = [&] {
      const double w = turn.weight > 0 ? 2.0 * double(turn.weight) : 1, P = hosts();
      for (std::size_t i = 0; i < x.size(); i++)
        x[i] = o_.keep_progress ? sum[i] / P + (x[i] - sent[i]) : (w * x[i] + sum[i]) / (w + P);
    };
    if (turn.merges && o_.merge_first) merge();
    if (turn.sends) sent_ = sum_ = x, add_up(turn);
    if (turn.merges && !o_.merge_first) merge();
    if (turn.blocks)
      for (std::size_t i = 0; i < x.size(); i++) x[i] = sum_[i];
    flat_->values.copy_from(Tensor::of(flat_->backend(), flat_->values.shape(), x, flat_->values.dtype()));
    flat_->count_writes(flat_->all());
    if (turn.blocks) common_ = flat_->values.values();
  }
  // sum_: over hosts; of a blocking exchange, the mean.
  void add_up(const DasoSchedule::Turn& turn) {
    const bool narrow = schedule_.blocking() && o_.bf16;
    std::vector<bf16> small(sum_.size());
    for (std::size_t i = 0; i < sum_.size() && narrow; i++) {
      const double all = o_.differences ? sum_[i] - common_[i] + error_[i] : sum_[i];
      small[i] = bf16(float(all));
      error_[i] = all - double(float(small[i]));
    }
    across_->all_reduce(narrow ? buffer(small) : buffer(sum_)).wait();
    for (std::size_t i = 0; i < sum_.size() && turn.blocks; i++)
      sum_[i] = (narrow ? double(float(small[i])) : sum_[i]) / hosts() + (narrow && o_.differences ? common_[i] : 0);
  }
  Numbers sent_, sum_, common_, error_;
};

inline std::unique_ptr<Strategy> naive_daso(DasoRanks ranks, const DasoOptions& options,
                                            std::shared_ptr<SlicedClassifier> classifier = nullptr) {
  auto on_host = std::make_unique<NaiveAllReduce>(std::move(ranks.gradients), std::move(classifier));
  return std::make_unique<NaiveDaso>(std::move(ranks), std::move(on_host), options);
}

}  // namespace tandem
