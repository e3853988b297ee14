// Modules: a model is a tree of modules. A module declares parameters and buffers (shape and initial value) and defines
// forward(). Parameters have no memory until a FlatParameters is built over the tree.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "core/trace/trace.h"
#include "layers/initial.h"

namespace tandem {

// Slice `index` of `count` of a parameter whose rows (its first axis) are divided among ranks; count 1: the whole
// parameter. The first rows % count slices have one row more than the others.
struct Slice {
  int index = 0, count = 1;
  std::int64_t begin(std::int64_t rows) const {
    return rows / count * index + std::min<std::int64_t>(index, rows % count);
  }
  Shape of(const Shape& whole) const;              // throws Error if a slice would have no row
  std::int64_t offset(const Shape& whole) const {  // elements of the whole parameter before the slice
    return count == 1 ? 0 : begin(whole[0]) * (whole.numel() / whole[0]);
  }
  bool operator==(const Slice&) const = default;
};

struct Parameter {
  std::string name;  // within its module; FlatParameters prefixes the path
  Shape shape;       // of the whole parameter, also if this rank has a slice of it
  Slice slice = {};  // set before the flat parameters are built
  Initial initial;
  bool decay = true;  // false: no weight decay (batch norm parameters, biases)
  double learning_rate_scale = 1;
  bool frozen = false;  // read when the flat parameters are built: no gradient, no update
  Variable variable;    // empty until the flat parameters are built; a constant if frozen
  operator const Variable&() const;
};

// State that is saved but not trained: running mean and variance.
struct ModuleBuffer {
  std::string name;
  Shape shape;
  double initial = 0;
  Tensor tensor;
};

// While an object of this class exists, operations are recorded as part of module `path`. An empty path changes
// nothing. A trace shows the scope as a span. Memory allocated meanwhile counts as activations unless MemoryUse says
// otherwise.
class Scope {
 public:
  explicit Scope(const std::string& path)
      : scope_(mode().scope, path.empty() ? mode().scope : &path),
        span_(path.empty() ? "model" : "module", "module", &path),
        use_(memory_use() == Use::other ? Use::activations : memory_use()) {}

 private:
  const Restored<const std::string*> scope_;
  Span span_;
  MemoryUse use_;
};

class Module;

// Owns a module. Use it as model(x) and model->eval(); it converts to Module&.
class Model : public std::unique_ptr<Module> {
 public:
  Model() = default;
  template <class M>
  Model(std::unique_ptr<M> module) : std::unique_ptr<Module>(std::move(module)) {}
  Variable operator()(const Variable& x) const;
  operator Module&() const { return **this; }
};

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  virtual Variable forward(const Variable& x) = 0;
  // Calls forward() with this module's path set, so that errors and traces name the module.
  Variable operator()(const Variable& x);

  // Sets a hook that is called with every output of operator(), to inspect activations. Returns the previous hook. The
  // default is empty. The hook belongs to this object only.
  using ForwardHook = std::function<void(Module&, const Variable& output)>;
  ForwardHook on_forward(ForwardHook hook) { return std::exchange(forward_hook_, std::move(hook)); }

  // Under a memory plan: tensors between the module's input and output that it saves for backward are recomputed in
  // backward (convolution, batch norm, pooling, dropout, element-wise operations). If a module is marked, fit() makes a
  // plan.
  bool recompute = false;

  void train(bool on = true);  // for this module and all modules below it
  void eval() { train(false); }
  bool training() const { return training_; }
  const std::string& path() const { return path_; }  // "layer1.0.conv1"; set when the flat parameters are built

  // All parameters and buffers of the tree, in registration order, with full names. Naming a whole tree (an empty path)
  // also numbers the modules that draw random numbers.
  void name_tree(const std::string& path = "");
  std::vector<std::pair<std::string, Parameter*>> parameters();
  std::vector<std::pair<std::string, ModuleBuffer*>> buffers();
  // The parameter or buffer with this full name: model.parameter("conv1.weight").variable. Throws Error that lists the
  // names when there is none.
  Parameter& parameter(const std::string& name);
  ModuleBuffer& buffer(const std::string& name);
  const std::vector<std::pair<std::string, Model>>& children() const { return children_; }
  void each(const std::function<void(Module&)>& visit);  // this module and all modules below it, in that order

 protected:
  enum Draws { draws_random_numbers };
  explicit Module(Draws) : stream_(by_call) {}
  std::uint32_t stream() const { return *stream_; }  // number among the modules that draw; by_call before naming

  // The last call of every operator().
  Variable seen(Variable y) {
    if (forward_hook_) forward_hook_(*this, y);
    return y;
  }
  Parameter& parameter(std::string name, const Shape& shape, Initial initial, bool decay = true);
  ModuleBuffer& buffer(std::string name, const Shape& shape, double initial);
  template <class M, class... Arguments>
  M& child(std::string name, Arguments&&... arguments) {
    return adopt(std::move(name), std::make_unique<M>(std::forward<Arguments>(arguments)...));
  }
  template <class M>
  M& adopt(std::string name, std::unique_ptr<M> module) {
    M& m = *module;
    check_name(name);
    children_.emplace_back(std::move(name), std::move(module));
    return m;
  }

 private:
  // Throws Error when a child, parameter or buffer has this name already: checkpoints identify them by name.
  void check_name(const std::string& name) const;
  // Calls visit for this module and all modules below it, with the path of each.
  void walk(const std::string& path, const std::function<void(const std::string& path, Module&)>& visit);
  template <class T>  // the parameters or the buffers of the tree
  std::vector<std::pair<std::string, T*>> all(std::vector<std::unique_ptr<T>> Module::*own);

  std::optional<std::uint32_t> stream_;  // set for modules that draw random numbers
  std::string path_;
  ForwardHook forward_hook_;
  bool training_ = true;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<ModuleBuffer>> buffers_;
  std::vector<std::pair<std::string, Model>> children_;
};

// While an object of this class exists, the model is in training mode or in eval mode; then in its former mode.
class InMode {
 public:
  InMode(Module& model, bool training) : model_(model), before_(model.training()) { model_.train(training); }
  ~InMode() { model_.train(before_); }
  InMode(const InMode&) = delete;

 private:
  Module& model_;
  bool before_;
};

inline Variable Model::operator()(const Variable& x) const { return (**this)(x); }

// Applies its modules in order; they are named 0, 1, 2, …
class Sequential : public Module {
 public:
  template <class M, class... Arguments>
  M& add(Arguments&&... arguments) {
    return child<M>(std::to_string(children().size()), std::forward<Arguments>(arguments)...);
  }
  using Module::adopt, Module::child;  // under names of their own
  Variable forward(const Variable& x) override;
};

}  // namespace tandem
