// A parameter server in blocking calls: the shortest correct version of bsp.
#pragma once
#include <memory>
#include <utility>

#include "core/elementwise.h"
#include "dist/strategies/replicas.h"

namespace tandem {

// Rank 0 is the only server: it receives every rank's gradient, adds them in the
// order of ranks, makes the step and broadcasts the new weights.
class NaiveServer : public Replicas {
 public:
  explicit NaiveServer(std::unique_ptr<Communicator> communicator)
      : Replicas(std::move(communicator), "naive-server", true) {}
  void begin(FlatParameters& flat, Optimizer&) override {
    flat_ = &flat;
    compare_layouts(flat);
    broadcast(flat, *communicator_);
  }
  void exchange(const Tensor& loss) override {
    loss_ = loss.clone();  // the loss goes with the gradient: where one is not finite, no step is made
    for (Tensor* mine : {&flat_->gradients, &loss_}) {
      if (rank() > 0) communicator_->send(0, buffer(*mine)).wait();
      for (int r = 1; rank() == 0 && r < size(); r++) {
        Tensor theirs = Tensor::like(*mine);
        communicator_->recv(r, buffer(theirs)).wait();
        add_into(*mine, theirs);
      }
    }
    float stop = stop_requested_;
    communicator_->all_reduce({&stop, 1, DType::f32}).wait();
    stop_ = stop > 0;
  }
  void update(Optimizer& optimizer) override {
    if (rank() == 0) optimizer.update(&loss_);
    communicator_->broadcast(buffer(flat_->values), 0).wait();
    flat_->count_writes(flat_->all());
  }

 private:
  FlatParameters* flat_ = nullptr;
};

}  // namespace tandem
