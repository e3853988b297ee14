// Training on one batch only, to test that the model can learn.
#pragma once
#include <map>
#include <string>

#include "core/batch.h"

namespace tandem {

// Repeats the first batch of a source; an epoch has `steps` repetitions.
class OneBatch : public BatchSource {
 public:
  static constexpr std::int64_t steps = 300;
  std::int64_t size() const { return batch_.size(); }
  static constexpr double near_zero = 0.01;  // a loss below this ends the training
  explicit OneBatch(BatchSource& source) : source_(source), batch_(source.make(0, 0)) {}
  void share(int rank, int world) override {
    source_.share(rank, world);
    batch_ = source_.make(0, 0);
  }
  bool grows_with_ranks() const override { return source_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return steps; }
  std::int64_t pictures_per_epoch() const override { return steps * batch_.global; }
  Batch make(std::int64_t epoch, std::int64_t index) override {
    Batch b = batch_;
    b.epoch = epoch;
    b.index = index;
    return b;
  }
  std::map<std::string, std::string> description() const override { return source_.description(); }

 private:
  BatchSource& source_;
  Batch batch_;
};

}  // namespace tandem
