#include "layers/optim/flat_parameters.h"

#include <algorithm>
#include <iterator>

#include "core/backend.h"
#include "core/text.h"

namespace tandem {
namespace {

std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
std::int64_t aligned(std::int64_t n) { return rounded_up(n, FlatParameters::alignment); }

}  // namespace

FlatParameters::FlatParameters(Module& model, Backend& backend, std::uint64_t seed, const FlatMemory& memory,
                               DType dtype) {
  model.name_tree();
  const Parameters parameters = model.parameters();
  require(!parameters.empty(), "the model has no parameters");
  const std::int64_t size = lay_out(parameters);
  auto room = [&](std::int64_t n) { return memory ? memory(backend, n) : Tensor::zeros(backend, {n}, dtype); };
  MemoryUse parameters_use(Use::parameters);
  values = room(size);
  {
    MemoryUse use(Use::gradients);
    gradients = room(size);
  }
  values.copy_from(initial_values(parameters, seed, dtype));
  bind(parameters);
  bind_statistics(model, dtype);
}

// Every slice is allocated with the size of the first, which is the largest, so that all ranks have the same layout.
std::int64_t FlatParameters::lay_out(const Parameters& parameters) {
  std::int64_t whole = 0, local = 0;
  for (auto& [name, p] : parameters) {
    if (p->slice.count > 1) {
      require(slice_.count == 1 || slice_ == p->slice, "the parameter ", name, " is slice ", p->slice.index, " of ",
              p->slice.count, ", others are slice ", slice_.index, " of ", slice_.count,
              ": all layers of a model are cut over the same ranks");
      slice_ = p->slice;
    }
    parameter_ranges_.push_back({.name = name,
                                 .shape = p->slice.of(p->shape),
                                 .whole = p->shape,
                                 .slice = p->slice,
                                 .global_begin = whole,
                                 .length = p->slice.of(p->shape).numel(),
                                 .learning_rate_scale = p->learning_rate_scale,
                                 .decay = p->decay,
                                 .frozen = p->frozen});
    whole += aligned(p->shape.numel());
    parameters_ += p->shape.numel();
  }
  for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice}) {
    if (owner == OwnerClass::slice) slices_begin_ = local;
    for (ParameterRange& s : parameter_ranges_) {
      if (s.owner() != owner) continue;
      s.local_begin = local;
      local += aligned(Slice{0, s.slice.count}.of(s.whole).numel());
    }
    local = rounded_up(local, cut);
  }
  return local;
}

Tensor FlatParameters::initial_values(const Parameters& parameters, std::uint64_t seed, DType dtype) {
  std::vector<double> initial(std::size_t(values.numel()), 0.0);
  for (std::size_t i = 0; i < parameter_ranges_.size(); i++) {
    const ParameterRange& s = parameter_ranges_[i];
    const Parameter& p = *parameters[i].second;
    const std::int64_t first = s.slice.offset(s.whole);
    const auto into = std::span(initial).subspan(std::size_t(s.local_begin), std::size_t(s.length));
    if (p.variable.defined()) {  // trained or loaded before: its values are copied
      const std::vector<double> now = p.variable.value().values();
      const bool all = p.variable.shape() == s.whole;
      require(all || p.variable.shape() == s.shape, "the parameter ", s.name, " has values of shape ",
              p.variable.shape(), ", expected ", s.shape);
      std::copy_n(now.begin() + (all ? first : 0), s.length, into.begin());
    } else {
      draw(p.initial, s.whole, seed, s.global_begin, into, values.backend().threads(), first);
    }
  }
  return Tensor::of(values.backend(), values.shape(), initial, dtype);
}

void FlatParameters::bind(const Parameters& parameters) {
  for (std::size_t i = 0; i < parameter_ranges_.size(); i++) {
    ParameterRange& s = parameter_ranges_[i];
    Parameter& p = *parameters[i].second;
    s.writes = values.storage()->add_segment(s.name);
    Tensor value = values.range(s.local_begin, s.shape);
    value.count_on(s.writes);
    if (Leaf* before = p.variable.defined() ? p.variable.leaf() : nullptr) before->replaced = true;
    handles_.push_back(Variable(value, true, s.name));
    s.leaf = handles_.back().leaf();
    s.leaf->grad = gradients.range(s.local_begin, s.shape);
    // A constant is not on the tape; its gradient stays zero
    p.variable = s.frozen ? Variable(value) : handles_.back();
    if (!s.frozen) leaves_.push_back(s.leaf);
  }
  for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice}) {
    const std::size_t before = trainable_.size();
    for (const ParameterRange& s : parameter_ranges_) {
      if (s.frozen || s.owner() != owner) continue;
      const Range range{s.local_begin / cut * cut, rounded_up(s.local_begin + s.length, cut)};
      if (trainable_.size() == before || trainable_.back().end < range.begin)
        trainable_.push_back(range);
      else
        trainable_.back().end = range.end;
    }
  }
}

void FlatParameters::bind_statistics(Module& model, DType dtype) {
  std::int64_t count = 0;
  auto all_buffers = model.buffers();
  for (auto& [name, s] : all_buffers) {
    buffer_ranges_.push_back({name, count, s->shape.numel()});
    count += aligned(s->shape.numel());
  }
  buffers = Tensor::zeros(backend(), {count}, dtype);
  for (std::size_t i = 0; i < all_buffers.size(); i++) {
    ModuleBuffer& s = *all_buffers[i].second;
    Tensor before = s.tensor;
    s.tensor = buffers.range(buffer_ranges_[i].begin, s.shape);
    if (before.defined())
      s.tensor.copy_from(before);
    else
      s.tensor.fill(s.initial);
  }
}

Range FlatParameters::all(OwnerClass owner) const {
  return owner == OwnerClass::replicated ? Range{0, slices_begin_} : Range{slices_begin_, numel()};
}

std::vector<Range> FlatParameters::ranges(OwnerClass owner) const {
  std::vector<Range> its;
  std::copy_if(trainable_.begin(), trainable_.end(), std::back_inserter(its),
               [&](const Range& r) { return (r.begin >= slices_begin_) == (owner == OwnerClass::slice); });
  return its;
}

const ParameterRange& FlatParameters::parameter_range(const std::string& name) const {
  const auto found = std::ranges::find(parameter_ranges_, name, &ParameterRange::name);
  if (found == parameter_ranges_.end())
    fail("no parameter is called ", name, "; there are: ", joined(parameter_ranges_, ", ", &ParameterRange::name));
  return *found;
}

// FNV-1a hash of everything that must be equal on all ranks.
std::uint64_t FlatParameters::layout_hash(OwnerClass owner) const {
  std::uint64_t h = 1469598103934665603u;
  auto mix = [&](const void* p, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) h = (h ^ static_cast<const unsigned char*>(p)[i]) * 1099511628211u;
  };
  for (const ParameterRange& s : parameter_ranges_) {
    mix(s.name.data(), s.name.size());
    for (std::int64_t e : s.whole) mix(&e, sizeof e);
    mix(&s.global_begin, sizeof s.global_begin);
    const int count = owner == OwnerClass::slice ? s.slice.count : 1;
    mix(&count, sizeof count);
    if (count > 1) mix(&s.slice.index, sizeof s.slice.index);
  }
  return h;
}

void FlatParameters::backward(const Variable& loss, double seed, bool final) {
  const Restored scope(final_, final);  // nested passes have separate results
  for (const Leaf* leaf : leaves_)
    require(!leaf->replaced, "backward: the parameter ", leaf->name,
            " belongs to other FlatParameters now, which were made of this model "
            "later: use those");
  tandem::backward(loss, {.leaves = leaves_, .seed = seed});
}

void FlatParameters::zero_gradients() {
  for (Leaf* leaf : leaves_) leaf->has_grad = false;
}

bool FlatParameters::gradients_complete() const {
  return std::all_of(leaves_.begin(), leaves_.end(), [](Leaf* leaf) { return leaf->has_grad; });
}

void FlatParameters::on_gradient(std::function<void(const ParameterRange&)> hook) {
  for (const ParameterRange& s : parameter_ranges_) {
    s.leaf->handed_on = false;
    s.leaf->hook = nullptr;
    if (hook)
      s.leaf->hook = [this, hook, index = &s - parameter_ranges_.data()](Leaf& leaf) {
        if (!final_) return;
        leaf.handed_on = true;
        hook(parameter_ranges_[index]);
      };
  }
}

void FlatParameters::count_writes(Range range) {
  for (const ParameterRange& s : parameter_ranges_)
    if (s.local_begin < range.end && s.local_begin + s.length > range.begin) s.writes->bump();
}

}  // namespace tandem
