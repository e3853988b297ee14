// Update rules: what the owner of a shard does with a gradient that comes late. The worker computed it at the weights
// it was sent; τ other gradients have been applied since. Every rule is element-wise, so that its result does not
// depend on how the vector is cut into shards. Formulas, constants and where they come from: rules.cpp.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem {

// The vectors of one shard and one worker. Those that a rule does not keep may be null.
template <class T>
struct RuleVectors {
  T* w = nullptr;                 // the shard's weights
  const T* g = nullptr;           // the gradient, with weight decay in it
  T* velocity = nullptr;          // the shard's; where a rule also keeps `own`, their sum
  const T* sent = nullptr;        // w as this worker was last sent it
  T* square_avg = nullptr;        // this worker's running mean of g²
  T* own = nullptr;               // this worker's velocity
  const float* scales = nullptr;  // of the learning rate, one for each block of 64 elements; 0: frozen
};

struct Hyper {  // at the moment of a push
  double learning_rate = 0.1, momentum = 0.9;
  double delay = 0, mean_delay = 0;  // τ and its running mean τ̄
  std::uint64_t before = 0;          // pushes that the shard has applied
  int workers = 1;
  double rate_before = 0.1;  // the learning rate of the shard's push before this one; with the first: of this one
};

class Rule {
 public:
  struct Keeps {  // which vectors
    bool velocity = false, sent = false, square_avg = false, own = false;
  };
  virtual ~Rule() = default;
  virtual std::string name() const = 0;
  virtual Keeps keeps() const = 0;
  // The norm down to which a worker clips its whole gradient, weight decay not yet in it, before it is pushed; 0: it
  // does not.
  virtual double clip() const { return 0; }
  // elements: a multiple of 64. Any thread, for different vectors.
  virtual void push(const RuleVectors<float>& x, std::int64_t numel, const Hyper& hyper) const = 0;
  virtual void push(const RuleVectors<double>& x, std::int64_t numel, const Hyper& hyper) const = 0;
  // ‖c‖/‖g‖, how much the rule would correct this gradient for its lateness; 0 where it does not.
  virtual double correction(const RuleVectors<float>& x, std::int64_t numel, const Hyper& hyper) const = 0;
};

// "ddc-asgd", or with constants of its own: "ddc-asgd:lambda=20,decay=0.9". Every rule has `clip`. Throws UsageError
// that lists names or constants.
std::unique_ptr<Rule> make_rule(const std::string& text);
std::vector<std::string> rule_names();
std::string listed(const std::vector<std::string>& names);  // "a, b, c"

}  // namespace tandem
