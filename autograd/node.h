// The tape. Every differentiable operation that runs adds a Node: its inputs, its attributes, the tensors it saved, and
// backward(). Saved tensors are data members, not captured in closures, so that they can be counted, shown, swapped and
// prefetched. Each stores the write count at which it was saved. Reading a saved tensor whose storage was written since
// then throws Error.
#pragma once
#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"

namespace tandem {

class Node;
class Variable;
struct Leaf;

// The inputs of an operation. An optional one that was not given is an empty Variable.
struct Operands : std::span<const Variable* const> {
  Operands(std::initializer_list<const Variable*> all) : span(all.begin(), all.size()) {}
  Operands(const std::vector<const Variable*>& all) : span(all) {}
};

// A tensor saved for backward, and its write count at that time.
struct Saved {
  Saved() = default;
  Saved(Tensor t, std::uint64_t w) : tensor(std::move(t)), writes(w) { count(1); }
  Saved(Saved&& o) noexcept = default;
  Saved& operator=(Saved o) noexcept {
    std::swap(tensor, o.tensor);
    std::swap(writes, o.writes);
    return *this;
  }
  ~Saved() { count(-1); }
  Tensor tensor;
  std::uint64_t writes = 0;

 private:
  void count(int change) {
    if (tensor.defined()) tensor.storage()->on_tape(change);
  }
};

// The arguments of an operation other than tensors: {{"stride", {2, 2}}, {"relu", {1}}}.
using Attributes = std::vector<std::pair<const char*, std::vector<double>>>;

// How the result of an operation is computed again, bit for bit, when the memory plan has discarded it.
struct Recomputation {
  std::vector<Tensor> sources;  // the inputs and saved tensors that compute needs; an empty tensor stays empty
  // Holds the operation's attributes and no tensor. Null: the operation cannot be run again.
  std::function<Tensor(std::span<const Tensor> sources)> compute;
};

// Receives the gradient of one input of a node. The gradient of a parameter is written directly into the parameter's
// range of the flat gradient vector, any other gradient into a tensor of the engine.
class GradientSlot {
 public:
  explicit GradientSlot(Node* input) : input_(input) {}
  bool wanted() const { return input_ != nullptr; }  // false: do not compute it (the gradient of the model's input)

  // The tensor into which backward() writes the gradient. add: the tensor already holds a partial sum (shared weights,
  // residual connections), so add to it instead of overwriting it.
  struct Destination {
    Tensor* tensor = nullptr;
    bool add = false;
  };
  Destination destination(Backend& backend, const Shape& shape, DType dtype);
  // Calls write(tensor, add) if the gradient is wanted. zero: an operand has no elements, so the gradient is zero, and
  // write is not called.
  template <class Write>
  void fill(Backend& backend, const Shape& shape, DType dtype, bool zero, const Write& write) {
    if (!wanted()) return;
    auto [gradient, add] = destination(backend, shape, dtype);
    if (!zero)
      write(*gradient, add);
    else if (!add)
      gradient->fill(0);
  }
  // Adds a finished gradient; uses its memory without a copy where possible.
  void accumulate(Tensor gradient);

 private:
  Node* input_;
};

class Node : public Counted {
 public:
  explicit Node(const char* op);
  virtual ~Node();
  // dy: the gradient of this node's only output. Calls slots[i].destination or .accumulate for every wanted input i.
  virtual void backward(Tensor dy, std::span<GradientSlot> slots) = 0;
  virtual Leaf* leaf() { return nullptr; }
  // Floating-point operations of the forward pass, two per multiply-add; 0 for memory-bound operations. The gradient of
  // each of the first two inputs costs the same number.
  virtual double flops() const { return 0; }
  virtual Attributes attributes() const { return {}; }
  // How the memory plan computes the result again. Called after the operation has run. Default: not possible.
  virtual Recomputation recompute([[maybe_unused]] Operands inputs) const { return {}; }

  const char* op;            // "conv2d"
  const std::string* scope;  // path of the module that ran it: "layer1.0.conv1"; never null
  Shape shape;               // of its output
  DType dtype = DType::f32;
  std::vector<Ref<Node>> inputs;  // null where an input needs no gradient
  std::vector<Saved> saved;
  Tensor gradient;         // of the output, while it is being summed
  std::uint64_t sequence;  // order of creation

  const Tensor& kept(int i) const;  // saved[i], checked against its write count
  std::string where() const;        // "conv2d in layer1.0.conv1"
  void release();                   // drops the saved tensors and the edges

  // Works without recursion, since a chain of nodes may have any length.
  static void destroy(const Node* node);

 private:
  friend class Engine;
  friend class GradientSlot;
  // State of the backward pass that visited this node.
  int pending_ = 0;          // consumers whose backward has not run yet
  std::uint64_t visit_ = 0;  // the number of the pass
  bool released_ = false;
  mutable const Node* next_dead_ = nullptr;
};

// A leaf: a parameter, or an input whose gradient was requested.
struct Leaf final : Node {
  Leaf(Tensor value, std::string name);
  void backward(Tensor, std::span<GradientSlot>) override {}
  Leaf* leaf() override { return this; }

  Tensor value, grad;     // grad is a range of the gradient vector once the flat parameters are built
  bool has_grad = false;  // grad holds a sum; false: the next backward overwrites it
  std::string name;
  // Called when the gradient is final, once per backward().
  std::function<void(Leaf&)> hook;
  bool replaced = false;   // newer flat parameters have a leaf in its place: this leaf is no longer used
  bool handed_on = false;  // set by a hook that sent the gradient: adding to it before it is zeroed throws Error

 private:
  friend class Engine;
  std::uint64_t fired_ = 0;  // the last pass that called the hook
};

struct BackwardOptions {
  std::span<Leaf* const> leaves = {};  // their hooks always run; a leaf that is not reached gets a zero gradient
  bool keep = false;                   // keep the tape for a second backward
  double seed = 1;                     // gradient of the root, for example the loss scale
};

// Computes the gradients of every leaf that root depends on. root has one element. If a leaf is an input of a node that
// gives it no gradient, its gradient is zero.
// Throws Error when it is called within a backward pass, by a hook or by a node's backward.
void backward(const Variable& root, const BackwardOptions& options = {});

// Thrown if mode().check is set and a value is not finite; names the operation that produced it.
struct NotFinite : Error {
  using Error::Error;
};

class Recorder;  // autograd/recorder.h

// The interface of an object that follows the tape while it is built and while it runs backward: the memory plan.
class TapeWatcher {
 public:
  virtual ~TapeWatcher() = default;
  // Called after node was added to the tape
  virtual void recorded(Node& node, Operands inputs, const Tensor& y) = 0;
  // y is the output of a module that is marked for recomputation (Module::recompute). y itself is not marked.
  virtual void output_of_marked(const Tensor& y) = 0;
  virtual void before(Node& node) = 0;  // its backward runs next
  virtual void after(Node& node) = 0;   // its backward has run; its saved tensors still exist
};

// Dropout calls so far: of this step, or of the thread if there is no step state. Assigning 0 begins a step.
struct DropoutCalls {
  DropoutCalls(std::uint64_t unnumbered = 0) : unnumbered(unnumbered) {}
  bool first_of(std::uint32_t layer) {  // true for the first call of this layer
    if (std::find(layers.begin(), layers.end(), layer) != layers.end()) return false;
    layers.push_back(layer);
    return true;
  }
  std::uint64_t unnumbered;           // calls without a layer number, and repeated calls of a layer
  std::vector<std::uint32_t> layers;  // the layers that have been called
};

// Per-thread settings that operations read while they run.
struct Mode {
  bool record = true;        // build the tape
  bool check = false;        // look for non-finite values after every operation
  bool recompute = false;    // within a module that is marked for recomputation in backward
  bool alone = false;        // operations that combine values of all ranks use only this rank's values
  const std::string* scope;  // path of the module that is running
  Tensor step_state;         // StepState on the device; empty outside training loops
  Tensor samples;            // i32: index in the data set of each picture of the batch (for dropout)
  std::uint64_t seed = 0;    // of random draws if there is no step state
  DropoutCalls draws;
  Recorder* recorder = nullptr;    // records every operation
  TapeWatcher* watcher = nullptr;  // follows the tape
  Mode();
};
Mode& mode();

// One switch of this thread's Mode, set to `value` until the end of the scope.
template <bool Mode::*field, bool value>
struct ModeScope : Restored<bool> {
  ModeScope() : Restored(mode().*field, value) {}
};
using NoGrad = ModeScope<&Mode::record, false>;  // no tape is built: for evaluation, and for a user's own updates
using Alone = ModeScope<&Mode::alone, true>;     // this rank runs the model without the others
using CheckForNonFinite = ModeScope<&Mode::check, true>;  // after every operation

std::uint64_t living_nodes();  // number of existing nodes, of all threads

}  // namespace tandem
