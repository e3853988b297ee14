// A Linear that is divided over the ranks of a host, and the softmax cross-entropy over its slices, as described in
// hybrid.h. Threads: the training thread. All ranks of the host make the same calls in the same order; each call waits
// for all.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "autograd/variable.h"
#include "dist/collectives/communicator.h"

namespace tandem {

class SlicedLinear {
 public:
  // sample: the fraction of a slice's classes that a step trains.
  SlicedLinear(std::shared_ptr<Communicator> over, std::string path, std::int64_t outputs, double sample);

  // The layer. In training it returns x [b, F], and the caller must then call loss(). In eval mode it returns the
  // logits [b, C] of this rank's rows.
  Variable forward(const Variable& x, const Variable& w, const Variable& b, bool training);
  // x: the output of the layer in training. Returns the mean over this rank's rows; the gradients of w and b are
  // complete. smoothing, correct: as in cross_entropy().
  Variable loss(const Variable& x, const Tensor& labels, double smoothing, Tensor* correct);

  // The last output of the layer in training; null: it computed logits.
  const void* handed_on() const { return features_; }

  bool waits() const { return waits_; }              // loss() was not called since
  const std::string& path() const { return path_; }  // of the Linear

 private:
  std::int64_t classes() const { return cuts_.back(); }
  std::int64_t begin() const { return cuts_[std::size_t(over_->rank())]; }  // the first class of this rank
  std::int64_t width() const { return cuts_[std::size_t(over_->rank()) + 1] - begin(); }
  Variable whole_rows(const Variable& x, const Variable& w, const Variable& b) const;
  std::vector<double> labels_of_all(const Tensor& labels, const Cuts& rows) const;
  std::vector<std::int32_t> sampled(const std::vector<double>& labels) const;
  Tensor positions(const std::vector<double>& labels, const std::vector<std::int32_t>& chosen, Backend& backend) const;

  std::shared_ptr<Communicator> over_;
  std::string path_;
  double sample_;
  Cuts cuts_;                                           // where each slice begins
  const Variable *weight_ = nullptr, *bias_ = nullptr;  // the parameters
  const void* features_ = nullptr;
  bool waits_ = false;
};

}  // namespace tandem
