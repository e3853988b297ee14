// Task: the meaning of the model's outputs. It defines the training loss and the measurements of evaluation.
#pragma once
#include <concepts>
#include <functional>
#include <string>
#include <utility>

#include "autograd/node.h"

namespace tandem {

// outputs, targets → a scalar, the mean over the batch. `correct` (i32 [1], may be null) is incremented by the number
// of correct rows.
using Loss = std::function<Variable(const Variable& outputs, const Tensor& targets, Tensor* correct)>;
// The loss of classification: outputs [b, classes], targets i32 [b]. A strategy finds it with
// loss.target<CrossEntropy>().
struct CrossEntropy {
  double label_smoothing = 0;
  Variable operator()(const Variable& outputs, const Tensor& targets, Tensor* correct) const;
};
Loss cross_entropy_loss(double label_smoothing = 0);  // a CrossEntropy

struct Task {
  Loss loss;
  Loss evaluation = cross_entropy_loss();  // without label smoothing, for example
  bool has_accuracy = true;                // both losses count the correct rows
  std::string name = "classification";     // a part of the run's identity

  Task(Loss trained, Loss evaluated, bool accuracy, std::string called)
      : loss(std::move(trained)), evaluation(std::move(evaluated)), has_accuracy(accuracy), name(std::move(called)) {}
  // Classification with a user's own loss.
  template <std::convertible_to<Loss> F>
  Task(F trained) : loss(std::move(trained)) {}
};

Task classification(double label_smoothing = 0);
// Outputs and targets f32 [b, k]: the mean squared error. Its runs have no accuracy; the best epoch is the epoch with
// the smallest loss.
Task regression();
// Outputs [b, k], targets f32 [b, k] of 0 and 1: each of k labels applies or not. A row is correct if all its labels
// are.
Task multi_label();

}  // namespace tandem
