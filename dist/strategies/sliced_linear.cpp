// The layer and the loss of hybrid.h.

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"
#include "core/random.h"
#include "core/step.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/slice_softmax.h"

namespace tandem {
namespace {

using Numbers = std::vector<double>;
using Over = std::shared_ptr<DataAndFlags>;

// Where the rows of each rank begin among the rows of all ranks.
Cuts rows_of_all(DataAndFlags& over, const Tensor& mine) {
  Cuts rows{0};
  for (double n : gather_numbers(over.flags(), {double(mine.size(0))})) rows.push_back(rows.back() + std::int64_t(n));
  return rows;
}

Cuts times(Cuts rows, std::int64_t n) {
  for (std::int64_t& r : rows) r *= n;
  return rows;
}

// The rows of all ranks: mine [b, …] → [B, …].
Tensor gather_rows(DataAndFlags& over, const Tensor& mine, const Cuts& rows) {
  const auto me = std::size_t(over.data().rank());
  Shape shape = mine.shape();
  shape[0] = rows.back();
  Tensor all(mine.backend(), shape, mine.dtype());
  all.slice(rows[me], rows[me + 1]).copy_from(mine);
  mine.backend().synchronize();  // a communicator for a device expects that the device is done with the buffer
  over.data().all_gather(buffer(all), times(rows, mine.numel() / mine.size(0))).wait();
  return all;
}

struct GatherRows : Node {
  static constexpr auto name = "gather_rows";
  Over over;
  Cuts rows;
  GatherRows(Over o, Cuts r) : Node(name), over(std::move(o)), rows(std::move(r)) {}
  // Every rank has one summand of the gradient of all rows.
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const auto me = std::size_t(over->data().rank());
    if (!dy.unique()) dy = dy.clone();
    dy.backend().synchronize();
    over->data().reduce_scatter(buffer(dy), Combine::sum, times(rows, dy.numel() / dy.size(0))).wait();
    slots[0].accumulate(dy.slice(rows[me], rows[me + 1]).clone());
  }
};

// ---- the loss -------------------------------------------------------------------------------------------------------
// saved: the slice of the logits, the labels' positions in it, and the logarithm of each row's Σ e^z. A rank's loss is
// the mean over its own rows.
struct SlicedCrossEntropy : Node {
  static constexpr auto name = "sliced_cross_entropy";
  Over over;
  Cuts rows;
  SliceTargets targets;
  SlicedCrossEntropy(Over o, Cuts r, const SliceTargets& t)
      : Node(name), over(std::move(o)), rows(std::move(r)), targets(t) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &z = kept(0), &positions = kept(1), &log_sum = kept(2);
    const auto me = std::size_t(over->data().rank());
    const std::int64_t own = rows[me + 1] - rows[me];
    NoGrad off;
    const Variable share(Tensor::full(z.backend(), {own}, 1 / double(own), dy.dtype()));
    const Tensor weight = gather_rows(*over, (share * Variable(dy)).value(), rows);
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
  const Cuts rows = rows_of_all(*ranks_, x.value());
  const auto me = std::size_t(ranks.rank()), n = std::size_t(ranks.size());
  Tensor whole;
  {
    NoGrad off;
    const Tensor z = linear(Variable(gather_rows(*ranks_, x.value(), rows)), w, b).value();
    std::vector<Tensor> to, from;  // by rank
    for (std::size_t k = 0; k < n; k++) {
      to.push_back(z.slice(rows[k], rows[k + 1]));
      from.push_back(Tensor(z.backend(), {rows[me + 1] - rows[me], cuts_[k + 1] - cuts_[k]}, z.dtype()));
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
  const Cuts rows = rows_of_all(*ranks_, x.value());
  const auto me = std::size_t(ranks_->data().rank());
  const Variable all = record<GatherRows>(gather_rows(*ranks_, x.value(), rows), {&x}, {}, ranks_, rows);
  const Tensor y = gather_rows(*ranks_, labels, rows);
  if (!backend.asynchronous())
    for (double label : y.values())
      require(label >= 0 && label < double(classes()), "hybrid: the label ", label, ", but there are ", classes(),
              " classes: labels are 0 to ", classes() - 1);
  Tensor places;
  Variable w = *weight_, b = *bias_;
  double taking_part = double(classes());
  if (sample_ < 1) {
    const std::vector<std::int32_t> chosen = sampled(y.values());
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
  const Tensor mine = slice_of_rows(z.value(), positions).reshape({1, rows.back(), slice_numbers});
  const JoinedRows joined = join_slices(gather_rows(*ranks_, mine, even_cuts(slices, slices)), y, targets, classes());
  const auto own = [&](const Tensor& of_rows) { return Variable(of_rows.slice(rows[me], rows[me + 1])); };
  if (correct) {
    Tensor count = sum(own(joined.right)).value().cast(DType::f64).reshape(correct->shape());
    add_into(count, correct->cast(DType::f64));
    correct->copy_from(count);
  }
  return record<SlicedCrossEntropy>(mean(own(joined.loss)).value(), {&z}, {z.value(), positions, joined.log_sum},
                                    ranks_, rows, targets);
}

}  // namespace tandem
