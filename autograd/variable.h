// Variable: a value, its gradient, and the node that computed it.
#pragma once
#include <utility>

#include "autograd/node.h"

namespace tandem {

class Variable {
 public:
  Variable() = default;
  // A constant, or (requires_grad) a leaf whose gradient backward() computes.
  Variable(Tensor value, bool requires_grad = false, std::string name = "");
  Variable(Tensor value, Ref<Node> node) : value_(std::move(value)), node_(std::move(node)) {}

  bool defined() const { return held().defined(); }
  const Tensor& value() const {
    if (!defined()) fail_undefined();
    return held();
  }
  const Shape& shape() const { return value().shape(); }
  std::int64_t size(int axis) const { return value().size(axis); }
  int rank() const { return value().rank(); }
  DType dtype() const { return value().dtype(); }
  Backend& backend() const { return value().backend(); }
  double item() const { return value().item(); }

  bool requires_grad() const { return static_cast<bool>(node_); }
  const Ref<Node>& node() const { return node_; }
  Leaf* leaf() const { return leaf_; }
  // The gradient of a leaf after backward(); empty when none was computed.
  Tensor grad() const { return leaf_ && leaf_->has_grad ? leaf_->grad : Tensor(); }
  void zero_grad() {
    if (leaf_) leaf_->has_grad = false;
  }  // the next backward() overwrites the gradient
  Variable detach() const { return Variable(value()); }
  void backward(const BackwardOptions& options = {}) const { tandem::backward(*this, options); }

 private:
  const Tensor& held() const { return leaf_ ? leaf_->value : value_; }
  Tensor value_;  // empty for a leaf: its value is stored in the leaf, which all handles share
  Ref<Node> node_;
  Leaf* leaf_ = nullptr;
};

inline std::ostream& operator<<(std::ostream& out, const Variable& v) { return out << v.value(); }

// Every operation ends with record<N>(y, inputs, saved, attributes…). It wraps y and, if an input requires a gradient,
// adds a node N(attributes…) to the tape. Inputs and saved tensors are given separately, because backward rarely needs
// all inputs. N::name is the name of the operation.
bool needs_tape(Operands inputs);
// Adds a new node to the tape: y = op(inputs). Reports it to mode().watcher.
void add_to_tape(Node& node, Operands inputs, std::initializer_list<Tensor> saved, const Tensor& y);
// Adds the operation to mode().recorder, which must not be null. `described` has the operation's attributes.
void add_to_recorder(const Node& described, Operands inputs, const Tensor& y);
// node may be null. Checks values if mode().check is set.
Variable finish(Tensor y, Ref<Node> node, const char* op, Operands inputs);

// Called before an operation of several inputs computes. All inputs must be on x's backend, and parameters must be f32,
// or f64 if x is f64. Null and empty tensors are ignored.
void check_inputs(const char* op, const Tensor& x, std::initializer_list<const Tensor*> parameters,
                  std::initializer_list<const Tensor*> others = {});

template <class N, class... Attributes>
Variable record(Tensor y, Operands inputs, std::initializer_list<Tensor> saved, Attributes&&... attributes) {
  Ref<Node> node;
  const bool on_tape = needs_tape(inputs);
  if (on_tape || mode().recorder) node = Ref<Node>(new N(std::forward<Attributes>(attributes)...));
  if (on_tape) add_to_tape(*node, inputs, saved, y);
  if (mode().recorder) add_to_recorder(*node, inputs, y);
  return finish(std::move(y), on_tape ? std::move(node) : Ref<Node>(), N::name, inputs);
}

}  // namespace tandem
