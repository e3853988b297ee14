// Update rules: how the owner of a shard applies a late gradient. The worker computed the gradient at the weights that
// it had received; τ other gradients have been applied since then. Every rule but heloco is element-wise, so its result
// does not depend on how the vector is divided into shards; heloco treats a tensor that two shards share as two
// tensors. rules.cpp has the formulas, the constants and their sources.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem {

// A block of 64 elements of the vector.
struct RuleBlock {
  float scale = 1;          // the learning-rate factor; 0: frozen
  std::int32_t tensor = 0;  // the index of the tensor that it belongs to
};

// The vectors of one shard and one worker. A vector that the rule does not keep may be null.
template <class T>
struct RuleVectors {
  T* w = nullptr;                     // the shard's weights
  const T* g = nullptr;               // the gradient, including weight decay
  T* velocity = nullptr;              // the shard's; if the rule also keeps `own`, the sum of these
  const T* sent = nullptr;            // the weights w that were last sent to this worker
  T* square_avg = nullptr;            // this worker's running mean of g²
  T* own = nullptr;                   // this worker's velocity
  const RuleBlock* blocks = nullptr;  // one per 64 elements

  RuleVectors from(std::int64_t i) const {  // the elements from i on, a multiple of 64
    const auto at = [i](auto* vector) { return vector ? vector + i : nullptr; };
    return {at(w), at(g), at(velocity), at(sent), at(square_avg), at(own), blocks + i / 64};
  }
};

struct Hyper {  // values at the time of a push
  double learning_rate = 0.1, momentum = 0.9;
  double delay = 0, mean_delay = 0;  // τ and its running mean τ̄
  std::uint64_t before = 0;          // pushes that the shard has applied
  int workers = 1;
  double rate_before = 0.1;  // the learning rate of the shard's previous push; at the first push: of this one
};

class Rule {
 public:
  struct Keeps {  // which vectors the rule keeps
    bool velocity = false, sent = false, square_avg = false, own = false;
    bool averages = false;  // the velocity is a mean of gradients, so that late ones add no momentum of their own
  };
  virtual ~Rule() = default;
  virtual std::string name() const = 0;
  virtual Keeps keeps() const = 0;
  virtual bool sees_tensors() const { return false; }  // then push() gets whole vectors, else any part of them
  // A worker clips its whole gradient to this norm, before weight decay is added and before it is pushed. 0: no
  // clipping.
  virtual double clip() const { return 0; }
  // elements: a multiple of 64. Any thread may call it, for different vectors.
  virtual void push(const RuleVectors<float>& x, std::int64_t numel, const Hyper& hyper) const = 0;
  virtual void push(const RuleVectors<double>& x, std::int64_t numel, const Hyper& hyper) const = 0;
  // ‖c‖/‖g‖: the relative size of the rule's correction of this gradient for its delay; 0 if it has none.
  virtual double correction(const RuleVectors<float>& x, std::int64_t numel, const Hyper& hyper) const = 0;
};

// "ddc-asgd", or with constants: "ddc-asgd:lambda=20,decay=0.9". Every rule has `clip`. Throws UsageError that lists
// the names or constants.
std::unique_ptr<Rule> make_rule(const std::string& text);
std::unique_ptr<Rule> averaging_rule(double share);  // for running statistics
std::vector<std::string> rule_names();
std::string rule_options(const std::string& name);  // the options of that rule, by described() in core/spec.h

}  // namespace tandem
