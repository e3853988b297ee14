// Optimizers: one fused pass over ranges of the flat parameter vector, aware of its segments.
//
// A step is measure(range) → partial sums (the squared norm of the gradient), which a strategy may combine over ranks, then
// judge() on the device: is everything finite, by how much is the gradient clipped; then apply(range). What varies from step
// to step is read from StepState in device memory, so that a recorded step replays unchanged. A gradient that is not finite
// sets a flag there, and from then on nothing is applied until the caller has looked.
#pragma once
#include "core/step.h"
#include "layers/space.h"

namespace tandem {

class Optimizer {
 public:
  explicit Optimizer(double learning_rate) : learning_rate_(learning_rate) {}
  virtual ~Optimizer() = default;

  // Allocates its state beside the parameters. Call once, after the space is built. seed is for StepState's random numbers.
  void bind(ParameterSpace& space, std::uint64_t seed = 0);
  ParameterSpace& space() const { return *space_; }

  double learning_rate() const { return learning_rate_; }
  void learning_rate(double rate) { learning_rate_ = rate; }  // from the next step on
  void epoch(std::uint32_t epoch) { host_.epoch = epoch; }
  double clip_norm = 0;  // gradients with a larger norm are scaled down to it; 0: never

  // The whole of it for one machine: stage(), and after backward step(). `loss`, if given, must be finite too.
  void stage();  // sends learning rate and epoch to the device; before the forward pass
  void step(const Tensor* loss = nullptr);

  // Its parts, for strategies.
  void measure(Range range, bool add);  // sums() += squared norm of the gradients in range
  Tensor& sums() { return sums_; }      // [1], f32
  void judge(const Tensor* loss);       // sums → StepState: finite? clip factor
  virtual void apply(Range range) = 0;

  const Tensor& state() const { return state_; }  // StepState on the device
  StepState read_state() const;                   // waits for the device
  void clear_not_finite();
  double gradient_norm() const;  // of the last step, before clipping; waits for the device

 protected:
  virtual void allocate() = 0;
  ParameterSpace* space_ = nullptr;
  Tensor rates_;  // f32 [elements/64, 2]: learning-rate scale and weight decay of each block of 64

  // The weight decay of a segment; called by bind for every segment.
  virtual double decay_of(const Segment& segment) const = 0;

  Tensor state_;

 private:
  double learning_rate_;
  StepState host_;
  Tensor sums_;
};

// Stochastic gradient descent, as PyTorch's: v = μ·v + (g + wd·w); w −= lr·v, or with Nesterov w −= lr·(g + wd·w + μ·v).
struct SGDOptions {
  double learning_rate = 0.1, momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;  // not on batch norm parameters and biases, unless decay_everything
  bool decay_everything = false;
};

class SGD : public Optimizer {
 public:
  explicit SGD(const SGDOptions& options);
  void apply(Range range) override;
  const Tensor& velocity() const { return velocity_; }

 protected:
  void allocate() override;
  double decay_of(const Segment& segment) const override;

 private:
  SGDOptions options_;
  Tensor velocity_;
};

}  // namespace tandem
