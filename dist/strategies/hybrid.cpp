#include "dist/strategies/hybrid.h"

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"
#include "core/random.h"
#include "core/step.h"
#include "core/text.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/slice_softmax.h"
#include "layers/layers.h"

namespace tandem {
namespace {

// The last Linear in the order in which the modules were made.
Linear* last_linear(Module& module) {
  Linear* last = dynamic_cast<Linear*>(&module);
  for (auto& [name, child] : module.children())
    if (Linear* found = last_linear(*child)) last = found;
  return last;
}

// ---- rows of all ranks ----------------------------------------------------------------------------------------------
using Numbers = std::vector<double>;

// The rows of all ranks, each rank's after those of the rank before it.
struct Rows {
  std::shared_ptr<DataAndFlags> over;
  Cuts cuts;  // where the rows of each rank begin

  Cuts elements(const Tensor& of_rows) const {  // where the elements of each rank begin
    Cuts all = cuts;
    for (std::int64_t& c : all) c *= of_rows.numel() / of_rows.size(0);
    return all;
  }
  Tensor part(const Tensor& all, std::size_t rank) const { return all.slice(cuts[rank], cuts[rank + 1]); }
  Tensor own(const Tensor& all) const { return part(all, std::size_t(over->data().rank())); }
  // mine [b, …] → [B, …]
  Tensor gathered(const Tensor& mine) const {
    Shape shape = mine.shape();
    shape[0] = cuts.back();
    Tensor all(mine.backend(), shape, mine.dtype());
    own(all).copy_from(mine);
    mine.backend().synchronize();  // a communicator for a device expects that the device is done with the buffer
    over->data().all_gather(buffer(all), elements(mine)).wait();
    return all;
  }
};

struct GatherRows : Node {
  static constexpr auto name = "gather_rows";
  Rows rows;
  explicit GatherRows(const Rows& r) : Node(name), rows(r) {}
  // Every rank has one summand of the gradient of all rows.
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    if (!dy.unique()) dy = dy.clone();
    dy.backend().synchronize();
    rows.over->data().reduce_scatter(buffer(dy), Combine::sum, rows.elements(dy)).wait();
    slots[0].accumulate(rows.own(dy).clone());
  }
};

// ---- the loss -------------------------------------------------------------------------------------------------------
// saved: the slice of the logits, the labels' positions in it, and the logarithm of each row's Σ e^z. A rank's loss is
// the mean over its own rows.
struct SlicedCrossEntropy : Node {
  static constexpr auto name = "sliced_cross_entropy";
  Rows rows;
  SliceTargets targets;
  SlicedCrossEntropy(const Rows& r, const SliceTargets& t) : Node(name), rows(r), targets(t) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &z = kept(0), &positions = kept(1), &log_sum = kept(2);
    const std::int64_t own = rows.own(log_sum).size(0);
    NoGrad off;
    const Variable share(Tensor::full(z.backend(), {own}, 1 / double(own), dy.dtype()));
    const Tensor weight = rows.gathered((share * Variable(dy)).value());
    auto [dz, add] = slots[0].destination(z.backend(), z.shape(), z.dtype());
    slice_gradient(z, positions, log_sum, weight, targets, add, *dz);
  }
};

// In eval mode no gradient passes through the layer.
struct WholeRows : Node {
  static constexpr auto name = "whole_rows";
  WholeRows() : Node(name) {}
  void backward(Tensor, std::span<GradientSlot>) override {
    fail(where(), ": no gradient passes a layer that is cut over ranks in eval mode: train(), and use the task's loss");
  }
};

}  // namespace

SlicedClassifier::SlicedClassifier(std::unique_ptr<Communicator> on_host, double sample)
    : ranks_(std::make_shared<DataAndFlags>(std::move(on_host))), sample_(sample) {}

double SlicedClassifier::parse(const std::string& name) {
  double sample = 1;
  read_spec(name, fields(sample));
  return sample;
}

std::string SlicedClassifier::name() const { return sample_ < 1 ? "hybrid:sample=" + digits(sample_) : "hybrid"; }

void SlicedClassifier::begin(Backend& backend, double deadline) {
  if (!prepared_)
    refuse("hybrid: no layer is cut yet: call strategy->prepare(model, task, {}) before the flat parameters are made, ",
           "and train by task.loss");
  if (ranks_->data().size() > 1) ranks_->begin(backend, deadline);
}

void SlicedClassifier::step() const {
  if (waits_)
    refuse("hybrid: the loss of this step is not the task's, which knows that ", path_,
           " is cut over ranks: train by task.loss");
}

void SlicedClassifier::prepare(Module& model, Task& task) {
  prepared_ = true;
  const Communicator& ranks = ranks_->data();
  if (ranks.size() == 1) return;
  const CrossEntropy* const loss = task.loss.target<CrossEntropy>();
  if (!loss)
    refuse("hybrid: the softmax of this task's loss is not known to be one over slices: ",
           "train with cross_entropy_loss(), or choose all-reduce");
  model.name_tree();
  Linear* const last = last_linear(model);
  if (!last || last->has_relu())
    refuse("hybrid: the model has no Linear at its end, which could be cut over ranks: choose all-reduce");
  const std::int64_t outputs = last->outputs();
  const int n = ranks.size();
  if (outputs < n)
    refuse("hybrid: ", last->path(), " has ", outputs, " outputs, and ", n,
           " ranks of a host would share them: start fewer");
  path_ = last->path();
  cuts_.clear();
  for (int k = 0; k <= n; k++) cuts_.push_back(Slice{k, n}.begin(outputs));
  last->cut({ranks.rank(), n}, [self = shared_from_this()](const Variable& x, const Variable& w, const Variable& b,
                                                           bool training) { return self->forward(x, w, b, training); });
  task.loss = [self = shared_from_this(), plain = *loss](const Variable& outputs, const Tensor& labels,
                                                         Tensor* correct) {
    if (!self->features_) return plain(outputs, labels, correct);  // one rank, or eval mode: rows of logits
    if (outputs.value().raw() != self->features_)
      refuse("hybrid: the model goes on behind ", self->path_,
             ", its last Linear, which is cut over ranks: choose all-reduce");
    return self->loss(outputs, labels, plain.label_smoothing, correct);
  };
}

// ---- the layer and its loss -----------------------------------------------------------------------------------------
Variable SlicedClassifier::forward(const Variable& x, const Variable& w, const Variable& b, bool training) {
  weight_ = &w;
  bias_ = &b;
  features_ = nullptr;
  waits_ = false;
  require(x.rank() == 2, "hybrid: the input of ", path_, " must be [rows, features], not ", x.shape());
  require(mode().alone || ranks_->on_device() == x.backend().asynchronous(), "hybrid: ", path_,
          " is cut over ranks: call strategy->begin() before the model computes on ", x.backend().name());
  if (mode().alone) return pad(linear(x, w, b), 1, first(), classes() - first() - width());
  if (!training) return whole_rows(x, w, b);
  features_ = x.value().raw();
  waits_ = true;
  return x;
}

// The logits of all classes for this rank's rows. Each rank sends its slice of them.
Variable SlicedClassifier::whole_rows(const Variable& x, const Variable& w, const Variable& b) const {
  Communicator& ranks = ranks_->data();
  const Rows rows{ranks_, gather_cuts(ranks_->flags(), x.size(0))};
  const auto me = std::size_t(ranks.rank()), n = std::size_t(ranks.size());
  Tensor whole;
  {
    NoGrad off;
    const Tensor z = linear(Variable(rows.gathered(x.value())), w, b).value();
    std::vector<Tensor> to, from;  // by rank
    for (std::size_t k = 0; k < n; k++) {
      to.push_back(rows.part(z, k));
      from.push_back(Tensor(z.backend(), {x.size(0), cuts_[k + 1] - cuts_[k]}, z.dtype()));
    }
    from[me].copy_from(to[me]);
    z.backend().synchronize();
    std::vector<Work> works;
    for (std::size_t k = 0; k < n; k++) {
      if (k == me) continue;
      works.push_back(ranks.recv(int(k), buffer(from[k])));
      works.push_back(ranks.send(int(k), buffer(to[k])));
    }
    for (Work& work : works) work.wait();
    whole = cat(std::vector<Variable>(from.begin(), from.end()), 1).value();
  }
  return record<WholeRows>(whole, {&x, &w, &b}, {});
}

// The positions in the slice of the classes that a step uses, in order.
std::vector<std::int32_t> SlicedClassifier::sampled(const Numbers& labels) const {
  std::vector<bool> occurs(static_cast<std::size_t>(width()));
  std::uint32_t batch = 2166136261u;
  for (double y : labels) {
    batch = (batch ^ std::uint32_t(y)) * 16777619u;
    if (y >= double(first()) && y < double(first() + width())) occurs[std::size_t(y) - std::size_t(first())] = true;
  }
  StepState state;
  if (const Tensor& s = mode().step_state; s.defined()) s.backend().download(&state, s.raw(), sizeof state);
  const Philox random(state.seed, Stream::classes, state.epoch, batch + std::uint32_t(ranks_->data().rank()));
  const std::int64_t there = std::count(occurs.begin(), occurs.end(), true);
  std::int64_t others = width() - there, wanted = std::int64_t(std::ceil(sample_ * double(width()))) - there;
  std::vector<std::int32_t> chosen;
  for (std::int64_t c = 0; c < width(); c++) {
    bool takes = occurs[std::size_t(c)];
    if (!takes && double(random.word(std::uint32_t(c))) * 0x1p-32 * double(others--) < double(wanted)) {
      takes = true;
      wanted--;
    }
    if (takes) chosen.push_back(std::int32_t(c));
  }
  return chosen;
}

Variable SlicedClassifier::loss(const Variable& x, const Tensor& labels, double smoothing, Tensor* correct) {
  Scope scope(path_);
  waits_ = false;
  Backend& backend = x.backend();
  const Rows rows{ranks_, gather_cuts(ranks_->flags(), x.size(0))};
  const Variable all = record<GatherRows>(rows.gathered(x.value()), {&x}, {}, rows);
  const Tensor y = rows.gathered(labels);
  const Numbers on_host = backend.asynchronous() && sample_ == 1 ? Numbers() : y.values();
  for (double label : on_host)
    require(label >= 0 && label < double(classes()), "hybrid: the label ", label, ", but there are ", classes(),
            " classes: labels are 0 to ", classes() - 1);
  Tensor places;
  Variable w = *weight_, b = *bias_;
  double taking_part = double(classes());
  if (sample_ < 1) {
    const std::vector<std::int32_t> chosen = sampled(on_host);
    Numbers place(std::size_t(width()), -1);
    for (std::size_t i = 0; i < chosen.size(); i++) place[std::size_t(chosen[i])] = double(i);
    places = Tensor::of(backend, {width()}, place, DType::i32);
    const Tensor index =
        Tensor::of(backend, {std::int64_t(chosen.size())}, Numbers(chosen.begin(), chosen.end()), DType::i32);
    w = embedding(w, index);
    if (b.defined()) b = squeeze(embedding(unsqueeze(b, 1), index), 1);
    taking_part = 0;
    for (double n : gather_numbers(ranks_->flags(), {double(chosen.size())})) taking_part += n;
  }
  const Variable z = linear(all, w, b);
  const Tensor positions = slice_positions(y, first(), width(), places);
  const SliceTargets targets{.at_label = 1 - smoothing, .everywhere = smoothing / taking_part};
  const int slices = ranks_->data().size();
  const Tensor mine = slice_of_rows(z.value(), positions).reshape({1, rows.cuts.back(), slice_numbers});
  const Rows by_slice{ranks_, even_cuts(slices, slices)};
  const JoinedRows joined = join_slices(by_slice.gathered(mine), y, targets, classes());
  if (correct) {
    Tensor count = sum(Variable(rows.own(joined.right))).value().cast(DType::f64).reshape(correct->shape());
    add_into(count, correct->cast(DType::f64));
    correct->copy_from(count);
  }
  return record<SlicedCrossEntropy>(mean(Variable(rows.own(joined.loss))).value(), {&z},
                                    {z.value(), positions, joined.log_sum}, rows, targets);
}

}  // namespace tandem
