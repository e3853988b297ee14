// A batch of samples, and the interface of what produces batches. The training loop uses nothing else of the data.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "core/tensor.h"

namespace tandem {

struct Batch {
  Tensor images;  // [b, H, W, C], f32 or bf16, normalised, on the training backend
  Tensor labels;  // i32 [b]
  // i32 [b], with mixup: image i is `share` of a picture of labels[i] and the rest of one of these
  Tensor other_labels;
  double share = 1;        // at least one half, the same for the whole batch
  Tensor samples;          // i32 [b]: which picture of the set each is, to address random numbers by
  std::int64_t index = 0;  // of this batch in its epoch, from 0
  std::int64_t epoch = 0;
  std::int64_t global = 0;  // pictures in this batch over all ranks: b / global is this rank's weight; 0: one rank

  std::int64_t size() const { return samples.defined() ? samples.size(0) : 0; }
  std::int64_t over_ranks() const { return global > 0 ? global : size(); }
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // This rank's part of every batch from now on; fit() asks the strategy.
  virtual void share(int rank, int world) = 0;
  virtual bool grows_with_ranks() const { return false; }  // a batch is as many times larger as ranks share it
  virtual std::int64_t batches_per_epoch() const = 0;
  virtual std::int64_t pictures_per_epoch() const = 0;  // over all ranks
  // Begins an epoch, at batch `first` of it when resuming; ends the one that was under way.
  virtual void start(std::int64_t epoch, std::int64_t first = 0) = 0;
  // The next batch, or false at the end of the epoch. Valid until the next call of next() or start().
  virtual bool next(Batch& batch) = 0;
  // Ends the epoch under way. Memory in which next() makes batches is given back, unless recorded steps may read it
  // there; start() takes it again.
  virtual void rest() {}
  // Batch `index` of any epoch once more, bit for bit, in memory of its own.
  virtual Batch make(std::int64_t epoch, std::int64_t index) = 0;
  // The next make() will be for this batch: it may be made meanwhile.
  virtual void make_ahead(std::int64_t epoch, std::int64_t index) { (void)epoch, (void)index; }
  // What a program must know to show a trained model further pictures, as text; saved beside the weights.
  virtual std::map<std::string, std::string> description() const { return {}; }
};

}  // namespace tandem
