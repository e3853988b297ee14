// Hybrid parallelism (after the patent CN108460457A). The body of a network is data parallel. Its last Linear, which
// has most of the parameters if there are many classes, is divided over the ranks of a host: rank g has the rows W_g,
// those of the classes C_g. Each rank trains its classes with the pictures of all ranks of the host:
//   X = all_gather(features) [B, F]      Z_g = X W_gᵀ + b_g [B, C_g]
//   m = max z,  s = Σ e^(z − m)          over the classes of all ranks
//   loss = mean of log s + m − (1 − ε)·z_y − ε/C·Σ z
//   dZ = (e^(z − m)/s − (1 − ε)·[c = y] − ε/C)·weight of the row
//   dW_g = dZᵀX                          complete: needs no sum over the host
//   dX = reduce_scatter(dZ W_g)          this rank's rows
// So the host transfers B·F numbers twice; a data-parallel layer transfers C·F. The division is better if a host's
// batch has fewer rows than there are classes. Between hosts the gradient of slice g is exchanged by the ranks that
// have slice g. Another strategy does that, and exchanges the body.
//
// PartialFC (An et al. 2021): with sample = r a step computes the softmax over the classes of the batch and randomly
// drawn others, in total a fraction r of each slice. It is a different loss.
//
// In training the divided layer returns its input features, and the task's loss computes the above. In evaluation it
// returns whole rows of logits.
//
// Threads: the training thread. All ranks of the host make the same calls in the same order; each call waits for all.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "autograd/variable.h"
#include "core/spec.h"
#include "dist/collectives/on_devices.h"
#include "layers/train/task.h"

namespace tandem {

class Module;

class SlicedClassifier : public std::enable_shared_from_this<SlicedClassifier> {
 public:
  // on_host: the ranks that together have the layer, in the order of their slices. sample: the fraction of a slice's
  // classes that a step trains.
  explicit SlicedClassifier(std::unique_ptr<Communicator> on_host, double sample = 1);

  static std::vector<SpecField> fields(double& sample) { return {number_field("sample", sample, above_zero, 1)}; }
  // "hybrid:sample=0.1" → its sample; throws UsageError.
  static double parse(const std::string& name);
  std::string name() const;  // the name that parse() accepts
  // Divides the model's last Linear, and computes the task's loss over the slices. Throws UsageError if the model has
  // no such layer, or the loss is not cross_entropy_loss(). With one rank on the host it divides nothing.
  void prepare(Module& model, Task& task);
  // Before the training on a backend, and after it. On a device the vectors go from device to device
  // (dist/collectives/on_devices.h); deadline: seconds that any wait may last. begin() throws UsageError if prepare()
  // was not called.
  void begin(Backend& backend, double deadline);
  void end() { ranks_->end(); }
  void step() const;  // throws UsageError if a step did not use the task's loss
  std::uint64_t sent_bytes() const { return ranks_->sent_bytes(); }

 private:
  // The layer. In training it returns x [b, F], and the caller must then call loss(). In eval mode it returns the
  // logits [b, C] of this rank's rows.
  Variable forward(const Variable& x, const Variable& w, const Variable& b, bool training);
  // x: the output of the layer in training. Returns the mean over this rank's rows; the gradients of w and b are
  // complete. smoothing, correct: as in cross_entropy().
  Variable loss(const Variable& x, const Tensor& labels, double smoothing, Tensor* correct);
  std::int64_t classes() const { return cuts_.back(); }
  std::int64_t first() const { return cuts_[std::size_t(ranks_->data().rank())]; }  // the first class of this rank
  std::int64_t width() const { return cuts_[std::size_t(ranks_->data().rank()) + 1] - first(); }
  Variable whole_rows(const Variable& x, const Variable& w, const Variable& b) const;
  std::vector<std::int32_t> sampled(const std::vector<double>& labels) const;

  const std::shared_ptr<DataAndFlags> ranks_;  // of the host
  const double sample_;
  bool prepared_ = false;
  std::string path_;                                    // of the Linear
  Cuts cuts_;                                           // where each slice begins
  const Variable *weight_ = nullptr, *bias_ = nullptr;  // the parameters
  const void* features_ = nullptr;                      // the last output of the layer in training; null: logits
  bool waits_ = false;                                  // loss() was not called since
};

}  // namespace tandem
