#include "layers/checkpointed.h"

#include <utility>
#include <vector>

namespace tandem {
namespace {

// The end of the inner tape: its backward hands dy to what the module gave.
struct HandOnNode : Node {
  static constexpr auto name = "hand_on";
  Tensor dy;
  explicit HandOnNode(Tensor g) : Node(name), dy(std::move(g)) {}
  void backward(Tensor, std::span<GradientSlot> slots) override { slots[0].accumulate(std::move(dy)); }
};

// The statistics of a module, which within the scope are copies: the second run must not count the batch again.
class StatisticsAside {
 public:
  explicit StatisticsAside(Module& m) {
    for (auto& [name, s] : m.buffers()) kept_.emplace_back(s, std::exchange(s->tensor, s->tensor.clone()));
  }
  ~StatisticsAside() {
    for (auto& [buffer, tensor] : kept_) buffer->tensor = std::move(tensor);
  }
  StatisticsAside(const StatisticsAside&) = delete;

 private:
  std::vector<std::pair<ModuleBuffer*, Tensor>> kept_;
};

struct CheckpointNode : Node {
  static constexpr auto name = "checkpoint";
  Module* module;
  Mode then;
  CheckpointNode(Module* m, Mode mode) : Node(name), module(m), then(std::move(mode)) {}

  // inputs: x, then the module's parameters, whose gradients the inner pass sums. saved: x.
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    Variable x(kept(0), slots[0].wanted());
    {
      ModeOf forward(then);
      Variable end;
      {
        StatisticsAside aside(*module);
        const Variable y = (*module)(x);
        const Tensor zero = Tensor::zeros(dy.backend(), Shape{}, dy.dtype());
        end = record<HandOnNode>(zero, {&y}, {}, std::move(dy));
      }
      end.backward();
    }
    if (slots[0].wanted()) slots[0].accumulate(x.grad());
  }
};

}  // namespace

Variable Checkpointed::forward(const Variable& x) {
  std::vector<Variable> used{x};
  for (auto& [name, p] : module_->parameters())
    if (!p->frozen) used.push_back(*p);
  if (!needs_tape(used)) return (*module_)(x);
  Ref<Node> node(new CheckpointNode(module_, mode()));
  Tensor y;
  {
    NoGrad off;
    y = (*module_)(x).value();
  }
  std::vector<const Variable*> inputs;
  for (const Variable& v : used) node->inputs.push_back(v.node()), inputs.push_back(&v);
  keep(*node, {x.value()});
  if (mode().watcher) tell_watcher(*node, inputs, y);
  return finish(y, std::move(node), CheckpointNode::name);
}

std::unique_ptr<Checkpointed> checkpoint(Model module) { return std::make_unique<Checkpointed>(std::move(module)); }

}  // namespace tandem
