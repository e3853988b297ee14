// Hybrid parallelism (after the patent CN108460457A). The body of a network is data parallel. Its last Linear, which
// has most of the parameters where there are many classes, is cut over the ranks of a host: rank g has the rows W_g,
// those of the classes C_g. Each rank learns its classes from the pictures of all ranks of the host:
//   X = all_gather(features) [B, F]      Z_g = X W_gᵀ + b_g [B, C_g]
//   m = max z,  s = Σ e^(z − m)          over the classes of all ranks
//   loss = mean of log s + m − (1 − ε)·z_y − ε/C·Σ z
//   dZ = (e^(z − m)/s − (1 − ε)·[c = y] − ε/C)·weight of the row
//   dW_g = dZᵀX                          complete: no rank of the host has a part of it
//   dX = reduce_scatter(dZ W_g)          this rank's rows
// So the host moves B·F numbers twice, and a data-parallel layer C·F: it wins where a host's batch has fewer rows than
// there are classes. Between hosts the gradient of slice g goes to the ranks that have slice g; that, and the exchange
// of the body, is another strategy's.
//
// PartialFC (An et al. 2021): with sample = r a step computes the softmax over the classes that occur in the batch, and
// as many others, drawn at random, as make r of each slice. It is another loss.
//
// In training the cut layer hands its features on, and the task's loss does the above. In evaluation it gives whole
// rows of logits.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "dist/collectives/communicator.h"
#include "layers/train/task.h"

namespace tandem {

class Module;
class SlicedLinear;

class SlicedClassifier {
 public:
  // on_host: the ranks that together have the layer, in the order of their slices.
  // Sample: the share of a slice's classes that a step learns.
  explicit SlicedClassifier(std::unique_ptr<Communicator> on_host, double sample = 1);

  // "hybrid:sample=0.1" → its sample; throws UsageError.
  static double parse(const std::string& name);
  std::string name() const;  // that name
  // Cuts the model's last Linear, and computes the task's loss over the slices. Throws UsageError where the model has
  // no such layer, or the loss is not cross_entropy_loss(). With one rank on the host nothing is cut.
  void prepare(Module& model, Task& task);
  // Throw UsageError in a loop of the user's own: where prepare() was not called, and where a step did not use the
  // task's loss.
  void begin() const;
  void step() const;
  std::uint64_t sent_bytes() const { return on_host_->traffic().bytes; }

 private:
  std::shared_ptr<Communicator> on_host_;
  const double sample_;
  bool prepared_ = false;
  std::shared_ptr<SlicedLinear> layer_;                          // null: none is cut
  std::shared_ptr<bool> waits_ = std::make_shared<bool>(false);  // the layer has run, and its loss was not asked for
};

}  // namespace tandem
