// Evaluation, and the parts of a step that training, evaluation and the search for NaN share.
#pragma once
#include <string>

#include "core/batch.h"
#include "layers/train/strategy.h"

namespace tandem {

// Sets the counters of dropout in mode() while a loop runs.
class Counters {
 public:
  explicit Counters(const Tensor& state)
      : state_(mode().step_state, state),
        samples_(mode().samples, mode().samples),
        draws_(mode().draws, mode().draws) {}
  void batch(const Batch& b) {
    mode().samples = b.samples;
    mode().draws = 0;
  }

 private:
  const Restored<Tensor> state_, samples_;
  const Restored<DropoutCalls> draws_;
};

// The metric sums of an epoch on this rank. Losses and correct rows are summed in device memory; the host reads the
// sums when needed, not after every step.
class EpochSums {
 public:
  explicit EpochSums(Backend& backend);
  void begin(const MetricSums& sums);                  // begins an epoch, or the rest of one, with these sums
  void count(std::int64_t samples);                    // of a batch, also if its step is a replay
  void add(const Tensor& loss, std::int64_t samples);  // the mean loss of a batch; only queues work on a device
  MetricSums read(double* last_loss = nullptr) const;  // waits for the device
  Tensor correct;                                      // i32 [1]: correct rows, which the loss counts

 private:
  Tensor loss_;  // the sum over samples, and the last loss
  double samples_ = 0;
};

// Sums over a source, in eval mode, without recording; the model's mode is restored. A signal that stops fit() also
// ends the evaluation early. together: ranks wait for each other in every batch, so all of them continue to the end,
// and the samples of each class are not counted. Otherwise they are counted if each sample has one class.
MetricSums evaluate_sums(Module& model, BatchSource& source, const Task& task, bool together = false);

// Mean loss and accuracy over a source, by task.evaluation. With a strategy: over the shares of all ranks; all
// ranks call it.
struct Evaluation {
  double loss = 0, accuracy = 0;
  std::vector<double> class_accuracy = {};  // of each class, where a sample has one; NaN: no sample
};
Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy = nullptr,
                    const Task& task = classification());
Evaluation mean_of(const MetricSums& s);

// Counts the pictures of an epoch by class and predicted class: i32 [classes, classes], row = label, column = predicted
// class. In eval mode and without recording; the model's mode is restored. Empty when the source has no batch.
Tensor confusion_matrix(Module& model, BatchSource& source);

// The loss of a batch. With mixup it is the sum of the two labels' losses, weighted by the batch's proportion.
Variable batch_loss(const Loss& loss, const Variable& logits, const Batch& batch, Tensor* correct = nullptr);

Shape picture_of(BatchSource& source);  // [H, W, C] of its pictures

// Runs a batch again, checks every value, and returns one line with the first operation whose result is not finite;
// empty: all results are finite.
std::string diagnose(Module& model, const Loss& loss, FlatParameters& flat, const Batch& batch);

}  // namespace tandem
