// A batch of samples, and the interface of a source of batches. The training loop accesses data only through these.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem {

struct Batch {
  Tensor images;  // [b, H, W, C], f32 or bf16, normalised, on the training backend
  Tensor labels;  // i32 [b]
  // i32 [b], with mixup: image i is share · (a picture of labels[i]) + (1 − share) · (a picture of other_labels[i])
  Tensor other_labels;
  double share = 1;        // at least one half, the same for the whole batch
  Tensor samples;          // i32 [b]: the index of each picture in the data set, part of the random numbers' address
  std::int64_t index = 0;  // the number of this batch in its epoch, from 0
  std::int64_t epoch = 0;
  std::int64_t global = 0;  // pictures in this batch over all ranks: b / global is this rank's weight; 0: one rank
  double own_weight = 0;    // this rank's weight, where it draws from pictures of its own; 0: as above

  std::int64_t size() const { return samples.defined() ? samples.size(0) : 0; }
  std::int64_t over_ranks() const { return global > 0 ? global : size(); }
  double weight() const { return own_weight > 0 ? own_weight : double(size()) / double(over_ranks()); }
};

// The division of the pictures among the workers, if each has pictures of its own (datasets/partition.h).
struct Parts {
  std::string name = {};                           // "dirichlet:alpha=0.5 among 4 workers"
  std::vector<std::vector<double>> pictures = {};  // number by worker and class; empty: all draw from all pictures
  std::int64_t batch = 1;                          // pictures in a batch
  std::uint64_t seed = 0;                          // the run's seed
  std::int64_t of(int worker, std::size_t first = 0, std::size_t last = SIZE_MAX) const {  // pictures of these classes
    double sum = 0;
    for (std::size_t c = first; c < pictures[worker].size() && c <= last; c++) sum += pictures[worker][c];
    return std::int64_t(sum);
  }
  std::int64_t batches(int worker) const { return (of(worker) + batch - 1) / batch; }  // the last one may be smaller
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // Sets this rank's part of every batch from now on; fit() takes the numbers from the strategy.
  virtual void share(int rank, int world) = 0;
  virtual bool grows_with_ranks() const { return false; }  // the batch size is proportional to the number of ranks
  virtual std::int64_t batches_per_epoch() const = 0;
  virtual std::int64_t pictures_per_epoch() const = 0;  // over all ranks
  // Begins an epoch, at its batch `first` when resuming. Ends the current epoch.
  virtual void start(std::int64_t epoch, std::int64_t first = 0) {
    epoch_ = epoch;
    next_ = first;
  }
  // The next batch, or false at the end of the epoch. The batch is valid until the next call of next() or start(). The
  // default makes each batch when it is requested.
  virtual bool next(Batch& batch) {
    if (next_ >= batches_per_epoch()) return false;
    batch = make(epoch_, next_++);
    return true;
  }
  // Ends the current epoch. Memory in which next() makes batches is given back, unless recorded steps may read it
  // there; start() takes it again.
  virtual void rest() {}
  // Makes batch `index` of any epoch again, bit for bit, in separate memory.
  virtual Batch make(std::int64_t epoch, std::int64_t index) = 0;
  // The next make() will be for this batch: it may be made in advance.
  virtual void make_ahead(std::int64_t epoch, std::int64_t index) { (void)epoch, (void)index; }
  // parts(): the division among `workers` workers. part(): one worker's batches, with 1/shares of the usual size; null:
  // all draw from all pictures.
  virtual Parts parts([[maybe_unused]] int workers) const { return {}; }
  virtual std::unique_ptr<BatchSource> part([[maybe_unused]] int worker, [[maybe_unused]] int workers,
                                            [[maybe_unused]] int shares = 1) const {
    return nullptr;
  }
  // The settings, as text, with which a program prepares further pictures for a trained model. Saved with the weights.
  virtual std::map<std::string, std::string> description() const { return {}; }

 private:
  std::int64_t epoch_ = 0, next_ = 0;
};

}  // namespace tandem
