// The batches of one worker, where each has pictures of its own (datasets/partition.h). They go on without end: a part
// is shuffled anew when it is used up.
//
//   shares > 1   all workers step together, as often as the pictures of all fill batches
//   shares = 1   each batch is a step by itself, and an epoch has those of all workers
//   epochs > 0   an epoch is one over the worker's own part, and fit() gets `epochs` of them at a time: a round
#pragma once
#include <memory>
#include <vector>

#include "core/batch.h"

namespace tandem {

struct OwnPartOptions {
  int worker = 0, workers = 1;
  int place = 0, places = 1;  // this rank's share of the worker's batches
  int shares = 1;             // the worker's batches have 1/shares of the usual size
  // Of this worker in the mean over workers, p_i or 1/workers; one: its gradients are not averaged with others
  enum class Weight { one, equal, pictures } weight = Weight::one;
  std::int64_t epochs = 0;  // 0: steps together
  double sample = 1;        // with epochs: the share of the workers that takes part in a round
};

// The workers that take part in a round, in ascending order. They are drawn for each.
std::vector<int> participants(int workers, double sample, std::uint64_t seed, std::int64_t round);

class OwnPart final : public BatchSource {
 public:
  // Null: all workers draw from all pictures, or this one has none since it only serves.
  static std::unique_ptr<OwnPart> of(const BatchSource& whole, const OwnPartOptions& options);

  void share(int, int) override {}
  std::int64_t batches_per_epoch() const override { return per_epoch_; }  // in a round: of the largest part
  std::int64_t pictures_per_epoch() const override { return parts_.all(); }
  void start(std::int64_t epoch, std::int64_t first) override;  // a round begins anew, unless it has ended
  bool next(Batch& batch) override;
  void rest() override { part_->rest(); }
  Batch make(std::int64_t epoch, std::int64_t index) override;  // its `global` is that of a whole batch
  using BatchSource::make_ahead;
  Batch at(std::int64_t n);  // the worker's n-th batch in the run
  void make_ahead(std::int64_t n) { part_->make_ahead(n / own_, n % own_); }
  Parts parts(int) const override { return parts_; }
  std::map<std::string, std::string> description() const override { return part_->description(); }
  int worker() const { return options_.worker; }
  int workers() const { return options_.workers; }
  std::int64_t pictures() const { return parts_.of(options_.worker); }                 // of this worker
  double weight() const { return double(pictures()) / double(pictures_per_epoch()); }  // p_i

 private:
  OwnPart(Parts parts, std::unique_ptr<BatchSource> part, const OwnPartOptions& options);
  Batch weighed(Batch batch) const;

  const Parts parts_;
  const std::unique_ptr<BatchSource> part_;
  const OwnPartOptions options_;
  std::int64_t own_, steps_, per_epoch_;  // batches of the part; steps of this rank in an epoch, and of the run
  std::int64_t begin_ = 0, next_ = 0, end_ = 0;
};

}  // namespace tandem
