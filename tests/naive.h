// DASO in blocking calls, with the course's merge. All groups exchange in every turn and wait for the sum, so nothing
// is broadcast inside a host. The sum is merged in the turn in which the schedule merges it.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "dist/strategies/all_reduce.h"
#include "dist/strategies/host_steps.h"
#include "examples/course/6_local_steps/solution.h"

namespace tandem::test {

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
      if (!o_.keep_progress) return course::daso_merge(x, sum, double(turn.weight), hosts());
      for (std::size_t i = 0; i < x.size(); i++) x[i] = sum[i] / hosts() + (x[i] - sent[i]);
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
  auto on_host = all_reduce(std::move(ranks.gradients), {.classifier = std::move(classifier)});
  return std::make_unique<NaiveDaso>(std::move(ranks), std::move(on_host), options);
}

}  // namespace tandem::test
