#include "layers/optim/space.h"

#include <algorithm>

#include "core/backend.h"

namespace tandem {
namespace {

std::int64_t aligned(std::int64_t n) {
  return (n + ParameterSpace::alignment - 1) / ParameterSpace::alignment * ParameterSpace::alignment;
}

}  // namespace

ParameterSpace::ParameterSpace(Module& model, Backend& backend, std::uint64_t seed, const SpaceMemory& memory,
                               DType dtype) {
  model.name_tree();
  auto parameters = model.parameters();
  require(!parameters.empty(), "the model has no parameters");
  std::int64_t size = 0;
  for (auto& [name, p] : parameters) {
    Segment s{.name = name,
              .shape = p->shape,
              .global_begin = size,
              .local_begin = size,
              .length = p->shape.elements(),
              .learning_rate_scale = p->learning_rate_scale,
              .decay = p->decay,
              .frozen = p->frozen};
    size += aligned(s.length);
    parameters_ += s.length;
    segments_.push_back(s);
  }
  size = (size + cut - 1) / cut * cut;
  auto room = [&](std::int64_t n) { return memory ? memory(backend, n) : Tensor::zeros(backend, {n}, dtype); };
  MemoryUse parameters_use(Use::parameters);
  values = room(size);
  {
    MemoryUse use(Use::gradients);
    gradients = room(size);
  }

  std::vector<double> initial(size, 0.0);
  for (std::size_t i = 0; i < segments_.size(); i++) {
    const Segment& s = segments_[i];
    const Parameter& p = *parameters[i].second;
    if (p.variable.defined()) {  // trained or loaded before: the values move in
      std::vector<double> now = p.variable.value().values();
      std::copy(now.begin(), now.end(), initial.begin() + s.local_begin);
    } else {
      draw(p.initial, p.shape, seed, s.global_begin, std::span(initial).subspan(s.local_begin, s.length),
           backend.threads());
    }
  }
  values.copy_from(Tensor::of(backend, {size}, initial, dtype));

  for (std::size_t i = 0; i < segments_.size(); i++) {
    Segment& s = segments_[i];
    Parameter& p = *parameters[i].second;
    s.writes = values.storage()->add_segment(s.name);
    Tensor value = values.range(s.local_begin, s.shape);
    value.count_on(s.writes);
    handles_.push_back(Variable(value, true, s.name));
    s.leaf = handles_.back().leaf();
    s.leaf->grad = gradients.range(s.local_begin, s.shape);
    p.variable = s.frozen ? Variable(value) : handles_.back();  // a constant leaves no tape; its gradient stays zero
    if (s.frozen) continue;
    leaves_.push_back(s.leaf);
    const Range range{s.local_begin / cut * cut, (s.local_begin + s.length + cut - 1) / cut * cut};
    if (trainable_.empty() || trainable_.back().end < range.begin)
      trainable_.push_back(range);
    else
      trainable_.back().end = range.end;
  }

  std::int64_t count = 0;
  auto all_statistics = model.statistics();
  for (auto& [name, s] : all_statistics) {
    statistic_segments_.push_back({name, count, s->shape.elements()});
    count += aligned(s->shape.elements());
  }
  statistics = Tensor::zeros(backend, {count}, dtype);
  for (std::size_t i = 0; i < all_statistics.size(); i++) {
    Statistic& s = *all_statistics[i].second;
    Tensor before = s.tensor;
    s.tensor = statistics.range(statistic_segments_[i].begin, s.shape);
    if (before.defined())
      s.tensor.copy_from(before);
    else
      s.tensor.fill(s.initial);
  }
}

const Segment& ParameterSpace::segment(const std::string& name) const {
  std::string names;
  for (const Segment& s : segments_) {
    if (s.name == name) return s;
    names += (names.empty() ? "" : ", ") + s.name;
  }
  fail("no parameter is called ", name, "; there are: ", names);
}

// FNV-1a over everything two ranks must agree on.
std::uint64_t ParameterSpace::layout_hash() const {
  std::uint64_t h = 1469598103934665603u;
  auto mix = [&](const void* p, std::size_t n) {
    for (std::size_t i = 0; i < n; i++) h = (h ^ static_cast<const unsigned char*>(p)[i]) * 1099511628211u;
  };
  for (const Segment& s : segments_) {
    mix(s.name.data(), s.name.size());
    for (std::int64_t e : s.shape) mix(&e, sizeof e);
    mix(&s.global_begin, sizeof s.global_begin);
    mix(&s.slices, sizeof s.slices);
  }
  return h;
}

void ParameterSpace::backward(const Variable& loss, double seed, bool final) {
  struct Restore {  // a pass within a pass has its own answer
    bool &place, before;
    ~Restore() { place = before; }
  } restore{final_, std::exchange(final_, final)};
  tandem::backward(loss, {.leaves = leaves_, .seed = seed});
}

void ParameterSpace::zero_gradients() {
  for (Leaf* leaf : leaves_) leaf->has_grad = false;
}

bool ParameterSpace::gradients_complete() const {
  return std::all_of(leaves_.begin(), leaves_.end(), [](Leaf* leaf) { return leaf->has_grad; });
}

void ParameterSpace::on_gradient(std::function<void(const Segment&)> hook) {
  for (const Segment& s : segments_) {
    s.leaf->handed_on = false;
    if (!hook)
      s.leaf->hook = nullptr;
    else
      s.leaf->hook = [this, hook, index = &s - segments_.data()](Leaf& leaf) {
        if (!final_) return;
        leaf.handed_on = true;
        hook(segments_[index]);
      };
  }
}

void ParameterSpace::count_writes(Range range) {
  for (const Segment& s : segments_)
    if (s.local_begin < range.end && s.local_begin + s.length > range.begin) s.writes->bump();
}

}  // namespace tandem
