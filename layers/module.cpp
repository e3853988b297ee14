#include "layers/module.h"

#include "core/files/json.h"
#include "core/text.h"

namespace tandem {
namespace {

template <class T>
T* named(const char* what, const std::string& name, const std::vector<std::pair<std::string, T*>>& all) {
  for (const auto& [full, one] : all)
    if (full == name) return one;
  const std::string names = joined(all, " ", [](const auto& one) { return one.first; });
  fail("the model has no ", what, " ", name, "; there are: ", names.empty() ? "none" : names);
}

}  // namespace

Shape Slice::of(const Shape& whole) const {
  if (count == 1) return whole;
  require(index >= 0 && index < count && whole.rank() > 0 && whole[0] >= count, "a parameter of shape ", whole,
          " has no slice ", index, " of ", count,
          " along its first axis: cut it over at most as many ranks as it has rows");
  Shape mine = whole;
  mine[0] = whole[0] / count + (index < whole[0] % count);
  return mine;
}

Parameter::operator const Variable&() const {
  require(variable.defined(), "the parameter ", name,
          " has no memory yet: build a FlatParameters over the model first");
  require(variable.requires_grad() != frozen, "the parameter ", name, " was ", frozen ? "frozen" : "unfrozen",
          " after its FlatParameters was built: build another over the model (it keeps the values) and bind the "
          "optimizer to "
          "that");
  return variable;
}

Variable Module::operator()(const Variable& x) {
  Scope scope(path_);
  if (!recompute || mode().recompute) return seen(forward(x));
  Variable y;
  {
    ModeScope<&Mode::recompute, true> marked;
    y = forward(x);
  }
  if (mode().watcher) mode().watcher->output_of_marked(y.value());
  return seen(std::move(y));
}

void Module::each(const std::function<void(Module&)>& visit) {
  walk(path_, [&](const std::string&, Module& m) { visit(m); });
}

void Module::train(bool on) {
  each([on](Module& m) { m.training_ = on; });
}

void Module::walk(const std::string& path, const std::function<void(const std::string& path, Module&)>& visit) {
  visit(path, *this);
  for (auto& [name, module] : children_) module->walk(path.empty() ? name : path + "." + name, visit);
}

void Module::name_tree(const std::string& path) {
  walk(path, [](const std::string& at, Module& m) { m.path_ = at; });
  if (!path.empty()) return;
  std::uint32_t next = 0;
  each([&](Module& m) {
    if (m.stream_) m.stream_ = next++;
  });
}

void Module::check_name(const std::string& name) const {
  const bool control = std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  require(!name.empty() && name.find_first_of("./") == std::string::npos && !control && is_utf8(name) &&
              name != "__metadata__",
          "the name ", json_quoted(name),
          " of a module's part cannot be a key of a checkpoint: choose another, of UTF-8 text "
          "without dots, slashes and control characters, and not __metadata__");
  const bool taken = std::any_of(children_.begin(), children_.end(), [&](auto& c) { return c.first == name; }) ||
                     std::any_of(parameters_.begin(), parameters_.end(), [&](auto& p) { return p->name == name; }) ||
                     std::any_of(buffers_.begin(), buffers_.end(), [&](auto& b) { return b->name == name; });
  require(!taken, "the module has a child, parameter or buffer \"", name, "\" already: choose another name");
}

template <class T>
std::vector<std::pair<std::string, T*>> Module::all(std::vector<std::unique_ptr<T>> Module::*own) {
  std::vector<std::pair<std::string, T*>> found;
  walk(path_, [&](const std::string& at, Module& m) {
    for (auto& part : m.*own) found.emplace_back(at.empty() ? part->name : at + "." + part->name, part.get());
  });
  return found;
}

std::vector<std::pair<std::string, Parameter*>> Module::parameters() { return all(&Module::parameters_); }
std::vector<std::pair<std::string, ModuleBuffer*>> Module::buffers() { return all(&Module::buffers_); }

Parameter& Module::parameter(const std::string& name) { return *named("parameter", name, parameters()); }
ModuleBuffer& Module::buffer(const std::string& name) { return *named("buffer", name, buffers()); }

Parameter& Module::parameter(std::string name, const Shape& shape, Initial initial, bool decay) {
  check_name(name);
  return *parameters_.emplace_back(
      new Parameter{.name = std::move(name), .shape = shape, .initial = initial, .decay = decay, .variable = {}});
}

ModuleBuffer& Module::buffer(std::string name, const Shape& shape, double initial) {
  check_name(name);
  return *buffers_.emplace_back(
      new ModuleBuffer{.name = std::move(name), .shape = shape, .initial = initial, .tensor = {}});
}

Variable Sequential::forward(const Variable& x) {
  Variable y = x;
  for (auto& [name, module] : children()) y = (*module)(y);
  return y;
}

}  // namespace tandem
