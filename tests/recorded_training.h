// A training by hand whose step is recorded where the device records it; with a plan, within a budget of memory.
#pragma once
#include <optional>
#include <vector>

#include "autograd/memory_plan.h"
#include "datasets/loader.h"
#include "layers/models/models.h"
#include "layers/optim/optimizer.h"
#include "layers/train/step_graph.h"

namespace tandem::test {

struct RecordedTraining {
  Backend& backend;
  Model model;
  FlatParameters flat;
  SGD sgd;
  Batch batch;
  Tensor loss;  // of the last step
  std::optional<MemoryPlan> plan = {};
  std::size_t peak_within = 0;  // bytes, of any pass within the plan
  StepGraph graph{backend, false, {.backward = [this] { pass(); }}, ""};

  // f16 scales the loss.
  RecordedTraining(Backend& b, Model m, double learning_rate, DType type = DType::f32)
      : backend(b),
        model(std::move(m)),
        flat(*model, b, 1),
        sgd({.learning_rate = learning_rate, .momentum = 0.9}),
        loss(b, Shape{}) {
    if (type == DType::f16) sgd.loss_scaling.emplace();
    sgd.bind(flat, 1);
    sgd.if_not_finite = IfNotFinite::wait;  // the step is recorded
    model->train();
  }
  // On `batch`.
  void step(bool eagerly = false) {
    sgd.sync_hyperparameters();
    graph(batch, eagerly);
    flat.count_writes(flat.all());
  }
  // So many steps on the loader's batches; returns the losses.
  std::vector<double> steps(int count, Loader& loader, bool eagerly = false) {
    std::vector<double> losses;
    for (int epoch = 0; int(losses.size()) < count; epoch++) {
      sgd.epoch(std::uint32_t(epoch));
      loader.start(epoch);
      while (int(losses.size()) < count && loader.next(batch)) {
        step(eagerly);
        losses.push_back(loss.item());
      }
    }
    return losses;
  }

 private:
  void pass() {
    std::optional<MemoryPlan::Step> within;
    mode().draws = 0;  // the same numbers in each step, eager or replayed
    if (plan) within.emplace(*plan);
    flat.zero_gradients();
    {
      Variable l = cross_entropy((*model)(Variable(batch.images)), batch.labels);
      flat.backward(sgd.scaled(l));
      loss.copy_from(l.value());
    }
    if (within) within->end(), peak_within = std::max(peak_within, plan->measured().peak);
    within.reset();
    sgd.step(&loss);
  }
};

}  // namespace tandem::test
