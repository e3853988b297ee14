// Optimizers. An update is one fused pass over ranges of the flat parameter vector.
//
//   for each batch:
//     optimizer.learning_rate(…);  // where it varies
//     flat.zero_gradients();
//     flat.backward(loss);
//     optimizer.step(&loss.value());
//
// A step has three parts: measure(range) computes partial sums (the squared norm of the gradient), which a strategy may
// combine over ranks; check_gradients() decides on the device whether all values are finite and by how much the
// gradient is clipped; apply(range) updates the parameters. The values that change from step to step are read from
// StepState in device memory, so that a recorded step can be replayed. A gradient that is not finite sets a flag there:
// this step and the following steps are not applied until the host has read the flag.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/step.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

// The result of a step.
enum class StepResult {
  made,        // the parameters are updated
  overflow,    // f16: the loss scale was too large for these gradients, and is smaller now; no update
  not_finite,  // the loss or a gradient is NaN or infinite; no update
  queued       // not known yet: the host has not read the state
};

// The action of step() when a loss or gradient is not finite.
enum class IfNotFinite {
  fail,  // throws NotFinite; the parameters keep their values, and the next step is a normal one
  skip,  // returns not_finite; the next step is a normal one
  wait   // returns queued, for any step, without waiting for the device: the caller calls read_state() from time to
         // time. For recorded steps (layers/train/step_graph.h), and for fit()
};

class Optimizer {
 public:
  // weight_decay: not on batch norm parameters and biases, unless decay_everything. vectors: the names of the vectors
  // beside the parameters that the update reads and writes.
  explicit Optimizer(double rate, double weight_decay = 0, bool decay_everything = false,
                     std::vector<std::string> vectors = {});
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;  // as in --optimizer: "sgd"

  // Allocates the optimizer's state on the parameters' backend. Call it once, after the flat parameters are built. seed
  // is for StepState's random numbers.
  void bind(FlatParameters& flat, std::uint64_t seed = 0);
  FlatParameters& flat() const {
    check_bound();
    return *flat_;
  }

  double learning_rate() const { return learning_rate_; }
  void learning_rate(double rate);  // from the next step on
  void epoch(std::uint32_t epoch);  // of the random numbers, from the next forward pass on
  // The gradients are a sum; divided by `samples` they are the mean (gradient accumulation). Takes effect at the next
  // step.
  void gradients_are_sums_of(double samples);
  // The gradients are this rank's share of a mean over the pictures of all ranks, but the rank updates with its share
  // only. Multiplied by this number they are the mean over its own pictures. Takes effect at the next step; bind() sets
  // the number to 1.
  void gradients_are_shares_of(int ranks);
  std::optional<LossScaling> loss_scaling;      // for f16; set before bind()
  Variable scaled(const Variable& loss) const;  // the loss times the loss scale: call backward() on this
  double clip_norm = 0;                         // gradients with a larger norm are scaled down to it; 0: never
  IfNotFinite if_not_finite = IfNotFinite::fail;

  // The whole update on one machine, after backward(). `loss`, if given, must be finite too.
  StepResult step(const Tensor* loss = nullptr);

  // The parts of step(), for strategies and recorded steps.
  void sync_hyperparameters();      // sends values set since the last call to the device. check_gradients() calls it;
                                    // before a replayed step the caller must
  void update(const Tensor* loss);  // updates with the present gradients; does not wait for the result
  // The first part of update(), which skips it if it was called before: measures all gradients that this rank counts.
  // Where layers are divided among ranks, the rank of slice 0 counts the replicated gradients and every rank its
  // slices. The strategy then adds sums() over the ranks that hold the slices, and calls update().
  void measure_all();
  StepResult result();                          // reads the result of the last step and acts according to if_not_finite
  virtual void measure(Range range, bool add);  // sums() += squared norm of the gradients in range
  Tensor& sums() { return sums_; }              // f32: the squared norm, and further sums over ranks of the optimizer
  void check_gradients(const Tensor* loss);     // sums → StepState: finite? clip factor
  // Updates the values in range. Does nothing if state().not_finite is set; multiplies gradients by
  // state().gradient_scale, the product of clipping, accumulation, the ranks' shares and the loss scale.
  virtual void apply(Range range) = 0;
  // Called instead of apply() when a parameter server applies the update: changes `gradients` into the values that are
  // sent to the server, clipped and with weight decay. Unless needs_whole_gradient() it may be called before
  // check_gradients(), for each range as soon as the range is final. Throws Error for an optimizer whose update a
  // server cannot compute.
  virtual void finish_gradients(Range range);

  // Whether all gradients must be known before the factor on them is known
  bool needs_whole_gradient() const { return clip_norm > 0 || loss_scaling; }

  const Tensor& state() const { return state_; }  // StepState on the device
  StepState read_state() const;                   // waits for the device
  void clear_not_finite();
  double gradient_norm() const;  // of the last step, before clipping; waits for the device

  // The state that checkpoints store: vectors as long as the parameter vector (zero after bind()), and from
  // read_state() the numbers of applied and skipped steps and the loss scale with its counter. The scale is restored
  // only if loss scaling was on when it was saved and is on now.
  const std::vector<std::pair<std::string, Tensor>>& vectors() const;
  void resume_at(const StepState& then);

 protected:
  virtual void allocate() {}  // called by bind(): further state
  // The i-th vector, for the update; null if there are fewer.
  template <class T>
  T* vector(std::size_t i) {
    return i < vectors_.size() ? vectors_[i].second.template write<T>() : nullptr;
  }
  FlatParameters* flat_ = nullptr;
  Tensor rates_;  // f32 [elements/64, 2]: learning-rate scale and weight decay of each block of 64

  // The weight decay of a segment; called by bind for every segment.
  virtual double decay_of(const ParameterRange& parameter) const {
    return parameter.decay || decay_everything_ ? weight_decay_ : 0;
  }
  void check_bound() const;
  // value, or throws Error: "the weight decay -1 must be finite and at least 0".
  static double not_negative(const char* what, double value);
  // The same for the options of a derived class: "SGD: momentum 1 must be at least 0 and below 1".
  static void below_one(const char* what, double value);
  static void positive(const char* what, double value);
  const StepState* device_state() const { return reinterpret_cast<const StepState*>(state_.raw()); }

  Tensor state_, sums_;

 private:
  void check_clip() const;
  double weight_decay_, learning_rate_ = 0, samples_ = 1, ranks_ = 1;
  bool decay_everything_, measured_ = false;
  std::vector<std::pair<std::string, Tensor>> vectors_;
  StepState host_;       // its first fields: the values for the device
  bool staged_ = false;  // true: they have been sent
};

// Stochastic gradient descent, as in PyTorch: v = μ·v + (g + wd·w); w −= lr·v, or with Nesterov w −= lr·(g + wd·w +
// μ·v).
struct SGDOptions {
  double learning_rate = 0.1, momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;  // not on batch norm parameters and biases, unless decay_everything
  bool decay_everything = false;
};

class SGD : public Optimizer {
 public:
  explicit SGD(const SGDOptions& options);
  std::string name() const override { return "sgd"; }
  void apply(Range range) override;
  void finish_gradients(Range range) override;
  const SGDOptions& options() const { return options_; }

 private:
  SGDOptions options_;
};

// Adam with decoupled weight decay (Loshchilov and Hutter 2019), as in PyTorch: w −= lr·wd·w; m = β₁·m + (1−β₁)·g;
// v = β₂·v + (1−β₂)·g²; w −= lr·m̂/(√v̂ + ε) with m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ).
struct AdamWOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
  double weight_decay = 1e-2;  // not on batch norm parameters and biases, unless decay_everything
  bool decay_everything = false;
  bool decoupled = true;  // false: Adam, whose weight decay is a part of the gradient, g + wd·w
};

class AdamW : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options);
  std::string name() const override { return options_.decoupled ? "adamw" : "adam"; }
  void apply(Range range) override;

 protected:
  void allocate() override;

 private:
  AdamWOptions options_;
  Tensor corrections_;  // 1/(1−β₁ᵗ), 1/√(1−β₂ᵗ)
};

// Adam (Kingma and Ba 2015), as in PyTorch.
struct AdamOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
  double weight_decay = 0;  // not on batch norm parameters and biases, unless decay_everything
  bool decay_everything = false;
};

class Adam : public AdamW {
 public:
  explicit Adam(const AdamOptions& o)
      : AdamW({o.learning_rate, o.beta1, o.beta2, o.epsilon, o.weight_decay, o.decay_everything, false}) {}
};

// RMSprop (Hinton 2012), as in PyTorch: v = α·v + (1−α)·g²; m = μ·m + g/(√v + ε); w −= lr·m, with g + wd·w as g.
struct RMSpropOptions {
  double learning_rate = 1e-2, alpha = 0.99, epsilon = 1e-8, momentum = 0;
  double weight_decay = 0;  // not on batch norm parameters and biases, unless decay_everything
  bool decay_everything = false;
};

class RMSprop : public Optimizer {
 public:
  explicit RMSprop(const RMSpropOptions& options);
  std::string name() const override { return "rmsprop"; }
  void apply(Range range) override;

 private:
  RMSpropOptions options_;
};

// Layer-wise adaptive rates for large batches (You, Gitman and Ginsburg 2017): the step of every weight tensor is
// proportional to the tensor's norm. λ = η·‖w‖/(‖g‖ + wd·‖w‖); v = μ·v + lr·λ·(g + wd·w); w −= v. Batch norm parameters
// and biases have λ = 1 and no decay. Tensors whose norm or gradient is zero have λ = 1.
struct LARSOptions {
  // trust: η. The paper uses 0.001 with rates above 1, for batches of thousands; this default is for SGD's rates.
  double learning_rate = 0.1, momentum = 0.9, weight_decay = 5e-4, trust = 0.02;
};

class LARS : public Optimizer {
 public:
  explicit LARS(const LARSOptions& options);
  std::string name() const override { return "lars"; }
  void measure(Range range, bool add) override;  // sums(): Σ‖g‖², then ‖w‖² and ‖g‖² of every segment
  void apply(Range range) override;

 protected:
  void allocate() override;

 private:
  LARSOptions options_;
  Tensor bounds_;    // i32 [segments, 2]: first block of 64, and one past the last
  Tensor adaptive_;  // i32 [elements/64]: the segment of each block, −1 where λ = 1
  Tensor partial_;   // [elements/64, 2]: Σw², Σg² of each block
};

}  // namespace tandem
