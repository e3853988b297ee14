#include "dist/strategies/hybrid.h"

#include "core/backend.h"
#include "core/text.h"
#include "layers/layers.h"

namespace tandem {
namespace {

// The last Linear in the order in which the modules were made.
Linear* last_linear(Module& module) {
  Linear* last = dynamic_cast<Linear*>(&module);
  for (auto& [name, child] : module.children())
    if (Linear* found = last_linear(*child)) last = found;
  return last;
}

}  // namespace

SlicedClassifier::SlicedClassifier(std::unique_ptr<Communicator> on_host, double sample)
    : ranks_(std::make_shared<DataAndFlags>(std::move(on_host))), sample_(sample) {}

double SlicedClassifier::parse(const std::string& name) {
  double sample = 1;
  read_spec(name, fields(sample));
  return sample;
}

std::string SlicedClassifier::name() const { return sample_ < 1 ? "hybrid:sample=" + digits(sample_) : "hybrid"; }

void SlicedClassifier::begin(Backend& backend, double deadline) {
  if (!prepared_)
    refuse("hybrid: no layer is cut yet: call strategy->prepare(model, task, {}) before the flat parameters are made, ",
           "and train by task.loss");
  if (ranks_->data().size() > 1) ranks_->begin(backend, deadline);
}

void SlicedClassifier::step() const {
  if (waits_)
    refuse("hybrid: the loss of this step is not the task's, which knows that ", path_,
           " is cut over ranks: train by task.loss");
}

void SlicedClassifier::prepare(Module& model, Task& task) {
  prepared_ = true;
  const Communicator& ranks = ranks_->data();
  if (ranks.size() == 1) return;
  const CrossEntropy* const loss = task.loss.target<CrossEntropy>();
  if (!loss)
    refuse("hybrid: the softmax of this task's loss is not known to be one over slices: ",
           "train with cross_entropy_loss(), or choose all-reduce");
  model.name_tree();
  Linear* const last = last_linear(model);
  if (!last || last->has_relu())
    refuse("hybrid: the model has no Linear at its end, which could be cut over ranks: choose all-reduce");
  const std::int64_t outputs = last->outputs();
  const int n = ranks.size();
  if (outputs < n)
    refuse("hybrid: ", last->path(), " has ", outputs, " outputs, and ", n,
           " ranks of a host would share them: start fewer");
  path_ = last->path();
  cuts_.clear();
  for (int k = 0; k <= n; k++) cuts_.push_back(Slice{k, n}.begin(outputs));
  last->cut({ranks.rank(), n}, [self = shared_from_this()](const Variable& x, const Variable& w, const Variable& b,
                                                           bool training) { return self->forward(x, w, b, training); });
  task.loss = [self = shared_from_this(), plain = *loss](const Variable& outputs, const Tensor& labels,
                                                         Tensor* correct) {
    if (!self->features_) return plain(outputs, labels, correct);  // one rank, or eval mode: rows of logits
    if (outputs.value().raw() != self->features_)
      refuse("hybrid: the model goes on behind ", self->path_,
             ", its last Linear, which is cut over ranks: choose all-reduce");
    return self->loss(outputs, labels, plain.label_smoothing, correct);
  };
}

}  // namespace tandem
