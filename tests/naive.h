// DASO in blocking calls, with the course's merge. All groups exchange in every turn and wait for the sum, so nothing
// is broadcast inside a host. The sum is merged in the turn in which the schedule merges it.
#pragma once
#include <utility>

#include "dist/strategies/daso.h"
#include "examples/course/6_local_steps/solution.h"
#include "tests/dumps.h"

namespace tandem::test {

// Exchanges in its own schedule, so that the rounds around it have nothing left to do.
class NaiveDaso : public Daso {
 public:
  NaiveDaso(const DasoOptions& o, std::unique_ptr<Communicator> across) : Daso(o), across_(std::move(across)) {}
  void allocate(const FlatParameters& flat) override { values_ = flat.values; }
  void begin_epoch(std::int64_t epoch, const RunPlan& plan) override {
    Daso::begin_epoch(epoch, plan);
    common_ = values_.values(), error_.assign(common_.size(), 0);
  }
  Turn end(const Moment&) override { return {}; }  // next() has exchanged after the last step
  Turn next(const Moment& now) override {
    const Turn turn = Daso::next(now);
    const int hosts = across_->size();
    Numbers x = values_.values(), sent = sent_, sum = sum_;
    auto merge = [&] {
      if (!o_.keep_progress) return course::daso_merge(x, sum, double(turn.weight), hosts);
      for (std::size_t i = 0; i < x.size(); i++) x[i] = sum[i] / hosts + (x[i] - sent[i]);
    };
    if (turn.merges && o_.merge_first) merge();
    if (turn.sends) sent_ = sum_ = x, add_up(turn);
    if (turn.merges && !o_.merge_first) merge();
    if (turn.waits) common_ = x = sum_;
    values_.copy_from(Tensor::of(values_.backend(), values_.shape(), x, values_.dtype()));
    return {};
  }

 private:
  // sum_: over hosts; of a blocking exchange, the mean.
  void add_up(const Turn& turn) {
    const bool narrow = this->narrow();
    const int hosts = across_->size();
    std::vector<bf16> small(sum_.size());
    for (std::size_t i = 0; i < sum_.size() && narrow; i++) {
      const double all = o_.differences ? sum_[i] - common_[i] + error_[i] : sum_[i];
      small[i] = bf16(float(all));
      error_[i] = all - double(float(small[i]));
    }
    across_->all_reduce(narrow ? buffer(small) : buffer(sum_)).wait();
    for (std::size_t i = 0; i < sum_.size() && turn.waits; i++)
      sum_[i] = (narrow ? double(float(small[i])) : sum_[i]) / hosts + (narrow && o_.differences ? common_[i] : 0);
  }
  std::unique_ptr<Communicator> across_;
  Tensor values_;
  Numbers sent_, sum_, common_, error_;
};

inline std::unique_ptr<Strategy> naive_daso(RoundRanks ranks, const DasoOptions& options,
                                            const std::shared_ptr<SlicedClassifier>& classifier = nullptr) {
  auto across = std::make_shared<std::unique_ptr<Communicator>>(ranks.across->split(0, ranks.across->rank()));
  return rounds(std::move(ranks), "naive-" + options.name(),
                [=] { return std::make_unique<NaiveDaso>(options, std::move(*across)); }, {.classifier = classifier});
}

}  // namespace tandem::test
