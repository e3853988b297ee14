// Synchronous data parallelism in blocking calls: the shortest correct version of all-reduce.
#pragma once
#include <memory>
#include <utility>

#include "dist/strategies/hybrid.h"
#include "dist/strategies/replicas.h"

namespace tandem {

// For gradients in host memory. After backward the gradients of all ranks are summed, and
// every rank makes the same step. Each rank's gradient is already weighted by its share of the whole batch.
class NaiveAllReduce : public Replicas {
 public:
  NaiveAllReduce(std::unique_ptr<Communicator> communicator, std::shared_ptr<SlicedClassifier> classifier = nullptr)
      : Replicas(std::move(communicator), "naive-" + (classifier ? classifier->name() : std::string("all-reduce")),
                 true),
        classifier_(std::move(classifier)) {}
  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    Replicas::prepare(model, task, options);
    if (classifier_) classifier_->prepare(model, task);
  }
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    compare_layouts(flat);
    broadcast(flat, *communicator_, same_slice_.get());
  }
  void exchange(const Tensor& loss) override {
    loss_ = loss.clone();  // not finite on any rank: not finite on all
    float stop = stop_requested_;
    for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice})
      for (const Range& r : flat_->ranges(owner)) {
        Tensor gradients = flat_->gradients.range(r.begin, {r.length()});
        (owner == OwnerClass::replicated ? communicator_ : same_slice_)->all_reduce(buffer(gradients)).wait();
      }
    for (Buffer sum : {buffer(loss_), Buffer{&stop, 1, DType::f32}}) communicator_->all_reduce(sum).wait();
    stop_ = stop > 0;
    measure_slices(*optimizer_);
  }

 private:
  std::shared_ptr<SlicedClassifier> classifier_;  // hybrid.h; null: none is cut
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
};

}  // namespace tandem
