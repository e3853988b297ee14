// The batches of one worker, if each worker has its own part of the pictures (datasets/partition.h). They have no end:
// a part is shuffled again after its last batch. An epoch has as many batches as the pictures of all workers fill.
//
//   shares > 1   all workers step together, each with a batch of 1/shares of the usual size
//   shares = 1   each batch is a step by itself
//   epochs > 0   rounds: in each, a worker that takes part makes this number of epochs over its own part
#pragma once
#include <memory>
#include <vector>

#include "core/batch.h"

namespace tandem {

struct OwnPartOptions {
  int worker = 0, workers = 1;
  int place = 0, places = 1;  // this rank's share of the worker's batches
  int shares = 1;
  bool averaged = false;  // the gradients of all workers are summed, each weighted with its share of the pictures
  std::int64_t epochs = 0;
  double sample = 1;  // the share of the workers that take part in a round; they are drawn again for each round
};

class OwnPart final : public BatchSource {
 public:
  // Null: all workers draw from all pictures.
  static std::unique_ptr<OwnPart> of(const BatchSource& whole, const OwnPartOptions& options);

  void share(int, int) override {}
  std::int64_t batches_per_epoch() const override { return per_epoch_; }
  std::int64_t pictures_per_epoch() const override { return all_; }
  void start(std::int64_t epoch, std::int64_t first) override;  // restarts a round, unless first is its end
  bool more() const { return next_ < end_; }
  bool next(Batch& batch) override { return more() && (batch = following(), true); }
  Batch following();  // also after the end
  void rest() override { part_->rest(); }
  Batch make(std::int64_t epoch, std::int64_t index) override;  // its `global` is that of a whole batch
  Parts parts(int) const override { return parts_; }
  std::map<std::string, std::string> description() const override;
  const OwnPartOptions& options() const { return options_; }
  const std::vector<int>& taking_part() const { return taking_part_; }  // workers, in ascending order
  double weight(int worker) const;  // p_i: its share of the pictures of all that take part; 0: it does not
  double weight() const { return weight(options_.worker); }
  std::int64_t steps(int worker) const { return options_.epochs * parts_.batches(worker); }  // in a round

 private:
  OwnPart(const BatchSource& whole, std::unique_ptr<BatchSource> part, const OwnPartOptions& options);
  Batch weighted(Batch batch) const;
  std::int64_t position(std::int64_t epoch, std::int64_t index) const;  // of this batch among the worker's own batches

  const Parts parts_;
  const std::unique_ptr<BatchSource> part_;
  const OwnPartOptions options_;
  std::int64_t all_ = 0, per_epoch_ = 0;  // pictures of all workers; see batches_per_epoch()
  std::int64_t next_ = 0, end_ = 0;       // as position() counts
  std::vector<int> taking_part_;
};

}  // namespace tandem
