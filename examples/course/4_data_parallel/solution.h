#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// Σ_r (b_r/B)·∇L_r: the gradient of each rank's mean is weighted with its share of the pictures.
inline void exchange_gradients(Communicator& ranks, std::span<double> gradient, double mine, double all) {
  for (double& g : gradient) g *= mine / all;
  ranks.all_reduce(buffer(gradient)).wait();
}

// Computes the same sums while backward still runs. The gradients are already multiplied by their weights.
class Buckets {
 public:
  Buckets(Communicator& ranks, std::span<double> gradient, std::size_t size)
      : ranks_(ranks), gradient_(gradient), size_(size), open_(gradient.size()) {}
  void ready(std::size_t from) {
    while (open_ >= from + size_) start(size_);
  }
  void finish() {
    while (open_ > 0) start(std::min(size_, open_));
    for (Work& sum : sums_) sum.wait();
  }

 private:
  void start(std::size_t count) {
    open_ -= count;
    sums_.push_back(ranks_.all_reduce(buffer(gradient_.subspan(open_, count))));
  }

  Communicator& ranks_;
  std::span<double> gradient_;
  std::size_t size_, open_;  // [0, open_) has not been sent
  std::vector<Work> sums_;
};

}  // namespace tandem::course
