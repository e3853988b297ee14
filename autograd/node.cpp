#include "autograd/node.h"

#include "autograd/variable.h"
#include "core/backend.h"
#include "core/elementwise.h"
#include "core/trace/trace.h"

namespace tandem {

// ---- mode -----------------------------------------------------------------------------------------------------------
static const std::string no_scope;
Mode::Mode() : scope(&no_scope) {}

Mode& mode() {
  static thread_local Mode m;
  return m;
}

// ---- nodes ----------------------------------------------------------------------------------------------------------
static std::atomic<std::uint64_t> nodes{0};
std::uint64_t living_nodes() { return nodes.load(std::memory_order_relaxed); }
Node::~Node() { nodes.fetch_sub(1, std::memory_order_relaxed); }

// Deleting a node releases its inputs, which may release theirs. A list replaces recursion, so that long chains do not
// overflow the stack.
void Node::destroy(const Node* node) {
  static thread_local const Node* dead = nullptr;
  static thread_local bool draining = false;
  node->next_dead_ = dead;
  dead = node;
  if (draining) return;
  draining = true;
  while (dead) {
    const Node* n = dead;
    dead = n->next_dead_;
    delete n;
  }
  draining = false;
}

Node::Node(const char* name) : op(name), scope(mode().scope) {
  static thread_local std::uint64_t created = 0;
  sequence = ++created;
  nodes.fetch_add(1, std::memory_order_relaxed);
}

static std::string place_of(const std::string& op, const std::string& scope) {
  return scope.empty() ? op : op + " in " + scope;
}
std::string Node::where() const { return place_of(op, *scope); }

const Tensor& Node::kept(int i) const {
  const Saved& s = saved[i];
  if (s.tensor.defined() && s.tensor.writes().now() != s.writes) {
    const std::string name = s.tensor.writes().name();
    fail(name.empty() ? "a tensor" : name, " changed since it was saved for the backward pass of ", where(),
         ": write to it after backward(), or compute the loss again");
  }
  return s.tensor;
}

void Node::release() {
  saved.clear();
  inputs.clear();
  released_ = true;
}

Leaf::Leaf(Tensor v, std::string n) : Node("leaf"), value(std::move(v)), name(std::move(n)) {
  shape = value.shape();
  dtype = value.dtype();
}

// ---- gradient slots -------------------------------------------------------------------------------------------------
// The tensor that holds the sum of an input's gradients; add: it holds a part of the sum already.
static GradientSlot::Destination sum_of(Node& input) {
  Leaf* leaf = input.leaf();
  if (!leaf) return {&input.gradient, input.gradient.defined()};
  // A gradient that is being sent must not change.
  if (leaf->handed_on && leaf->has_grad)
    fail("the gradient of ", leaf->name.empty() ? "a leaf" : leaf->name,
         " is already being exchanged, and backward() adds to it: zero the gradients before another pass; an operation "
         "that calls backward() in its own names the parameters it uses there among its inputs");
  leaf->handed_on = false;
  return {&leaf->grad, leaf->has_grad};
}

GradientSlot::Destination GradientSlot::destination(Backend& backend, const Shape& shape, DType dtype) {
  const auto [g, add] = sum_of(*input_);
  Leaf* leaf = input_->leaf();
  if (!g->defined())
    *g = Tensor(backend, shape, dtype);
  else if (!leaf && !g->unique())
    *g = g->clone();  // a residual connection gave the same gradient to two inputs
  if (leaf) leaf->has_grad = true;
  return {g, add};
}

void GradientSlot::accumulate(Tensor t) {
  const auto [g, add] = sum_of(*input_);
  Leaf* leaf = input_->leaf();
  if (!g->defined()) {
    *g = leaf && !t.unique() ? t.clone() : std::move(t);
  } else if (!add) {
    g->copy_from(t);
  } else if (leaf || g->unique()) {
    add_into(*g, t);
  } else if (t.unique()) {
    add_into(t, *g);
    *g = std::move(t);
  } else {
    Tensor sum = Tensor::like(*g);
    tandem::add(*g, t, sum);
    *g = std::move(sum);
  }
  if (leaf) leaf->has_grad = true;
}

// ---- inputs ---------------------------------------------------------------------------------------------------------
void check_inputs(const char* op, const Tensor& x, std::initializer_list<const Tensor*> parameters,
                  std::initializer_list<const Tensor*> others) {
  require(x.defined(), op, ": the first input is empty");
  for (const auto& [tensors, are_parameters] : {std::pair{parameters, true}, std::pair{others, false}})
    for (const Tensor* t : tensors)
      if (t && t->defined()) check_operand(op, x.backend(), x, *t, are_parameters);
}

// ---- the engine -----------------------------------------------------------------------------------------------------
// The gradient of a node is the sum over all its consumers, so its backward may run only after theirs. A first pass
// from the root counts the consumers of each node. Nodes whose count is zero are in a ready queue. Running a node
// decrements the counts of its inputs. Among the ready nodes the newest runs first: its saved tensors were made last,
// so memory is freed in the reverse order of its allocation. Nothing is recursive: a chain of 200,000 operations needs
// no more stack than one.
//
// Runs one pass at a time; each thread has its own engine.
class Engine {
 public:
  void run(const Variable& root, const BackwardOptions& options) {
    MemoryUse use(Use::backward);
    require(root.defined(), "backward() starts from a loss with one element, this one is undefined");
    require(root.value().numel() == 1, "backward() starts from a loss with one element, this one has the shape ",
            root.shape());
    require(root.requires_grad(),
            "backward(): nothing that leads to this loss requires a gradient (was it computed under NoGrad, or is all "
            "of it frozen?)");
    require(!std::exchange(runs_, true),
            "backward() was called within a backward pass of this thread, by a hook or by an operation's backward: "
            "call it after that one. To compute a module again in backward, set its `recompute`");
    static std::atomic<std::uint64_t> visits{0};  // shared, since threads may visit a leaf one after the other
    visit_ = visits.fetch_add(1, std::memory_order_relaxed) + 1;
    struct Leave {
      Engine& pass;
      ~Leave() { pass.leave(); }
    } leave{*this};
    count(root.node().pointer());
    Tensor seed = Tensor::full(root.backend(), root.shape(), options.seed, root.dtype());
    if (root.leaf()) {
      GradientSlot(root.leaf()).accumulate(seed);
      finished(*root.leaf());
    } else {
      root.node()->gradient = std::move(seed);
      push(Ref<Node>(root.node()));
    }
    while (!ready_.empty()) {
      std::pop_heap(ready_.begin(), ready_.end(), older);
      Ref<Node> node = std::move(ready_.back());
      ready_.pop_back();
      step(*node, options.keep);
    }
    for (Leaf* leaf : options.leaves) finished(*leaf);
  }

 private:
  static bool older(const Ref<Node>& a, const Ref<Node>& b) { return a->sequence < b->sequence; }
  void push(Ref<Node> node) {
    ready_.push_back(std::move(node));
    std::push_heap(ready_.begin(), ready_.end(), older);
  }
  // Called when this leaf's gradient is complete in this pass.
  void finished(Leaf& leaf) {
    if (!leaf.grad.defined()) leaf.grad = Tensor::like(leaf.value);
    if (!std::exchange(leaf.has_grad, true)) leaf.grad.fill(0);
    if (std::exchange(leaf.fired_, visit_) != visit_ && leaf.hook) leaf.hook(leaf);
  }

  void enter(Node* node) {
    node->visit_ = visit_;
    node->pending_ = 0;
    node->gradient = Tensor();  // from an earlier pass that threw an exception
    stack_.push_back(node);
  }

  // The pass has ended or thrown an exception.
  void leave() {
    runs_ = false;
    stack_.clear();
    ready_.clear();
  }

  void count(Node* root) {
    enter(root);
    while (!stack_.empty()) {
      Node* node = stack_.back();
      stack_.pop_back();
      if (node->released_)
        fail("backward() ran a second time through ", node->where(),
             ": its saved tensors were released; pass keep = true to the first call");
      for (const Ref<Node>& input : node->inputs) {
        if (!input) continue;
        if (input->visit_ != visit_) enter(input.pointer());
        input->pending_++;
      }
    }
  }

  void step(Node& node, bool keep) {
    slots_.clear();
    for (const Ref<Node>& input : node.inputs) slots_.emplace_back(input.pointer());
    Tensor dy = std::exchange(node.gradient, Tensor());
    // A node has no gradient if no consumer depends on it.
    Trace::Lane* lane = tracing();
    Trace::Event event{.name = node.op, .kind = "op", .where = node.scope};
    if (lane) {
      event = lane->begin(event);
      event.flops =
          node.flops() * double(std::count_if(slots_.begin(), slots_.begin() + std::min<long>(2, node.inputs.size()),
                                              [](const GradientSlot& s) { return s.wanted(); }));
      event.bytes = double(dy.defined() ? dy.bytes() : 0);
      for (const Saved& s : node.saved) event.bytes += s.tensor.defined() ? double(s.tensor.bytes()) : 0;
      for (const Ref<Node>& input : node.inputs)
        event.bytes += input ? double(input->shape.numel()) * double(size_of(input->dtype)) : 0;
    }
    if (dy.defined()) {
      const Restored scope(mode().scope, node.scope);
      TapeWatcher* watcher = mode().watcher;
      if (watcher) watcher->before(node);
      node.backward(std::move(dy), slots_);
      if (watcher) watcher->after(node);
    }
    if (lane) lane->add_now(event);
    if (mode().check) check(node);
    for (const Ref<Node>& input : node.inputs) {
      if (!input || --input->pending_ > 0) continue;
      if (Leaf* leaf = input->leaf())
        finished(*leaf);
      else
        push(input);
    }
    if (!keep) node.release();
  }

  static void check(Node& node) {
    for (std::size_t i = 0; i < node.inputs.size(); i++) {
      Node* input = node.inputs[i].pointer();
      if (!input) continue;
      Leaf* leaf = input->leaf();
      const Tensor& g = leaf ? leaf->grad : input->gradient;
      if (g.defined() && (!leaf || leaf->has_grad) && !all_finite(g))
        throw NotFinite("the backward pass of " + node.where() +
                        " produced a value that is not finite (gradient of input " + std::to_string(i) +
                        (leaf && !leaf->name.empty() ? ", " + leaf->name : "") + ")");
    }
  }

  bool runs_ = false;
  std::uint64_t visit_ = 0;
  std::vector<Node*> stack_;
  std::vector<Ref<Node>> ready_;  // a heap; the newest node is on top
  std::vector<GradientSlot> slots_;
};

void backward(const Variable& root, const BackwardOptions& options) {
  static thread_local Engine engine;  // keeps its vectors from step to step
  engine.run(root, options);
}

// ---- variables ------------------------------------------------------------------------------------------------------
Variable::Variable(Tensor value, bool requires_grad, std::string name) {
  if (!requires_grad) {
    value_ = std::move(value);
    return;
  }
  require(!value.defined() || (value.dtype() != DType::i32 && value.dtype() != DType::u8), "a Variable of ",
          value.defined() ? name_of(value.dtype()) : "", " has no gradient");
  leaf_ = new Leaf(std::move(value), std::move(name));
  node_ = Ref<Node>(leaf_);
}

bool needs_tape(Operands inputs) {
  return mode().record &&
         std::any_of(inputs.begin(), inputs.end(), [](const Variable* v) { return v->requires_grad(); });
}

void add_to_tape(Node& node, Operands inputs, std::initializer_list<Tensor> saved, const Tensor& y) {
  for (const Variable* v : inputs) node.inputs.push_back(v->node());
  for (const Tensor& t : saved) node.saved.emplace_back(t, t.defined() ? t.writes().now() : 0);
  node.shape = y.shape();
  node.dtype = y.dtype();
  if (mode().watcher) mode().watcher->recorded(node, inputs, y);
}

Variable finish(Tensor y, Ref<Node> node, const char* op, Operands inputs) {
  if (Trace::Lane* lane = tracing()) {
    double bytes = double(y.bytes());
    for (const Variable* v : inputs) bytes += v->defined() ? double(v->value().bytes()) : 0;
    lane->until_now(
        {.name = op, .kind = "op", .where = mode().scope, .flops = node ? node->flops() : 0, .bytes = bytes});
  }
  if (mode().check && y.dtype() != DType::i32 && y.dtype() != DType::u8 && !all_finite(y))
    throw NotFinite(place_of(op, *mode().scope) + " produced a value that is not finite (output " +
                    (std::ostringstream() << y.shape()).str() + ")");
  return Variable(std::move(y), std::move(node));
}

}  // namespace tandem
