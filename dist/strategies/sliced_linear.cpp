// The layer and the loss of hybrid.h.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/ops.h"
#include "core/backend.h"
#include "core/random.h"
#include "core/step.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/slice_softmax.h"

namespace tandem {
namespace {

using Numbers = std::vector<double>;
using Over = std::shared_ptr<Communicator>;

// Where the rows of each rank begin among the rows of all ranks.
Cuts rows_of_all(Communicator& over, const Tensor& mine) {
  Cuts rows{0};
  for (double n : gather_numbers(over, {double(mine.size(0))})) rows.push_back(rows.back() + std::int64_t(n));
  return rows;
}

Cuts times(Cuts rows, std::int64_t n) {
  for (std::int64_t& r : rows) r *= n;
  return rows;
}

// The rows of all ranks: mine [b, …] → [B, …].
Tensor gather_rows(Communicator& over, const Tensor& mine, const Cuts& rows) {
  Shape shape = mine.shape();
  shape[0] = rows.back();
  const Cuts cuts = times(rows, mine.numel() / mine.size(0));
  Tensor all(mine.backend(), shape, mine.dtype());
  OnHost host;
  const Buffer b = host.of(all);
  mine.backend().download(b.at(cuts[std::size_t(over.rank())]), mine.raw(), mine.bytes());
  over.all_gather(b, cuts).wait();
  host.upload(all);
  return all;
}

struct GatherRows : Node {
  static constexpr auto name = "gather_rows";
  Over over;
  Cuts rows;
  GatherRows(Over o, Cuts r) : Node(name), over(std::move(o)), rows(std::move(r)) {}
  // Every rank has one summand of the gradient of all rows.
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const auto me = std::size_t(over->rank());
    const std::int64_t columns = dy.numel() / dy.size(0);
    if (!dy.unique()) dy = dy.clone();
    OnHost host;
    const Buffer all = host.download(dy);
    over->reduce_scatter(all, Combine::sum, times(rows, columns)).wait();
    Shape shape = dy.shape();
    shape[0] = rows[me + 1] - rows[me];
    Tensor mine(dy.backend(), shape, dy.dtype());
    dy.backend().upload(mine.raw_write(), all.at(rows[me] * columns), mine.bytes());
    slots[0].accumulate(std::move(mine));
  }
};

// ---- the loss -------------------------------------------------------------------------------------------------------
// saved: the slice of the logits, labels, and the logarithm of each row's Σ e^z. A rank's loss is the mean over its own
// rows.
struct SlicedCrossEntropy : Node {
  static constexpr auto name = "sliced_cross_entropy";
  Over over;
  Cuts rows;
  SliceGradient how;
  SlicedCrossEntropy(Over o, Cuts r, const SliceGradient& h)
      : Node(name), over(std::move(o)), rows(std::move(r)), how(h) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &z = kept(0), &labels = kept(1), &log_sum = kept(2);
    const auto me = std::size_t(over->rank());
    const Numbers each = gather_numbers(*over, {dy.item() / double(rows[me + 1] - rows[me])});
    Numbers weight;
    for (std::size_t k = 0; k < each.size(); k++)
      weight.insert(weight.end(), std::size_t(rows[k + 1] - rows[k]), each[k]);
    auto [dz, add] = slots[0].destination(z.backend(), z.shape(), z.dtype());
    how.add = add;
    slice_gradient(z, labels, log_sum, Tensor::of(z.backend(), log_sum.shape(), weight, log_sum.dtype()), how, *dz);
  }
};

// Results for whole rows, combined from all slices in the same order on all ranks.
struct JoinedRows {
  Numbers log_sum;
  // For this rank's rows: the sum of the losses, and the number of rows whose largest logit is the label's
  double total = 0, right = 0;
};
// mine: of slice_of_rows().
JoinedRows join(Communicator& over, const Numbers& mine, const Cuts& rows, double smoothing, double everywhere) {
  const Numbers all = gather_numbers(over, mine);
  const auto me = std::size_t(over.rank());
  const double* const end = all.data() + all.size();
  JoinedRows joined;
  for (std::int64_t r = 0; r < rows.back(); r++) {
    double largest = -INFINITY, first = 0, label = 0, logits = 0, sum = 0;
    for (const double* s = &all[std::size_t(r * slice_numbers)]; s < end; s += mine.size()) {
      if (s[0] > largest) {
        largest = s[0];
        first = s[3];
      }
      label += s[2];
      logits += s[4];
    }
    for (const double* s = &all[std::size_t(r * slice_numbers)]; s < end; s += mine.size())
      sum += s[1] * std::exp(s[0] - largest);
    joined.log_sum.push_back(std::log(sum) + largest);
    if (r < rows[me] || r >= rows[me + 1]) continue;
    joined.total += joined.log_sum.back() - (1 - smoothing) * label - everywhere * logits;
    joined.right += first;
  }
  return joined;
}

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
  if (mode().alone) return pad(linear(x, w, b), 1, first(), classes() - first() - width());
  if (!training) return whole_rows(x, w, b);
  features_ = x.value().raw();
  waits_ = true;
  return x;
}

// The logits of all classes for this rank's rows. Each rank sends its slice of them.
Variable SlicedClassifier::whole_rows(const Variable& x, const Variable& w, const Variable& b) const {
  const Cuts rows = rows_of_all(*on_host_, x.value());
  const auto me = std::size_t(on_host_->rank()), n = std::size_t(on_host_->size());
  std::vector<Variable> parts;
  {
    NoGrad off;
    Tensor z = linear(Variable(gather_rows(*on_host_, x.value(), rows)), w, b).value();
    OnHost sent;
    const Buffer mine = sent.download(z);
    std::vector<OnHost> hosts(n);
    std::vector<Work> works;
    for (std::size_t k = 0; k < n; k++) {
      Tensor part(z.backend(), {rows[me + 1] - rows[me], cuts_[k + 1] - cuts_[k]}, z.dtype());
      parts.push_back(Variable(part));
      if (k == me) {
        part.copy_from(z.slice(rows[me], rows[me + 1]));
        continue;
      }
      works.push_back(on_host_->recv(int(k), hosts[k].of(part)));
      works.push_back(
          on_host_->send(int(k), {mine.at(rows[k] * width()), (rows[k + 1] - rows[k]) * width(), mine.dtype}));
    }
    for (Work& work : works) work.wait();
    for (std::size_t k = 0; k < n; k++) {
      Tensor part = parts[k].value();
      if (k != me) hosts[k].upload(part);
    }
    parts = {cat(parts, 1)};
  }
  return record<WholeRows>(parts[0].value(), {&x, &w, &b}, {});
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
  const Philox random(state.seed, Stream::classes, state.epoch, batch + std::uint32_t(on_host_->rank()));
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

// The position of each row's class among the chosen ones; −1 if the class is another rank's.
Tensor SlicedClassifier::positions(const Numbers& labels, const std::vector<std::int32_t>& chosen,
                                   Backend& backend) const {
  Numbers places;
  for (double y : labels) {
    const auto at = std::lower_bound(chosen.begin(), chosen.end(), std::int64_t(y) - first());
    places.push_back(at != chosen.end() && *at == std::int64_t(y) - first() ? double(at - chosen.begin()) : -1);
  }
  return Tensor::of(backend, {std::int64_t(labels.size())}, places, DType::i32);
}

Variable SlicedClassifier::loss(const Variable& x, const Tensor& labels, double smoothing, Tensor* correct) {
  Scope scope(path_);
  waits_ = false;
  const Cuts rows = rows_of_all(*on_host_, x.value());
  const std::int64_t own = rows[std::size_t(on_host_->rank()) + 1] - rows[std::size_t(on_host_->rank())];
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Variable all = record<GatherRows>(gather_rows(*on_host_, x.value(), rows), {&x}, {}, on_host_, rows);
  const Numbers y = gather_rows(*on_host_, labels, rows).values();
  for (double label : y)
    require(label >= 0 && label < double(classes()), "hybrid: the label ", label, ", but there are ", classes(),
            " classes: labels are 0 to ", classes() - 1);
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(width()));
  std::iota(chosen.begin(), chosen.end(), 0);
  Variable w = *weight_, b = *bias_;
  double taking_part = double(classes());
  if (sample_ < 1) {
    chosen = sampled(y);
    const Tensor index =
        Tensor::of(x.backend(), {std::int64_t(chosen.size())}, Numbers(chosen.begin(), chosen.end()), DType::i32);
    w = embedding(w, index);
    if (b.defined()) b = squeeze(embedding(unsqueeze(b, 1), index), 1);
    taking_part = 0;
    for (double n : gather_numbers(*on_host_, {double(chosen.size())})) taking_part += n;
  }
  const Variable z = linear(all, w, b);
  const Tensor local = positions(y, chosen, x.backend());
  const double everywhere = smoothing / taking_part;
  const JoinedRows joined = join(*on_host_, slice_of_rows(z.value(), local), rows, smoothing, everywhere);
  if (correct) correct->fill(correct->item() + joined.right);
  const Tensor mean = Tensor::of(x.backend(), {}, {joined.total / double(own)}, wide),
               log_sum = Tensor::of(x.backend(), {rows.back()}, joined.log_sum, wide);
  return record<SlicedCrossEntropy>(mean, {&z}, {z.value(), local, log_sum}, on_host_, rows,
                                    SliceGradient{.at_label = 1 - smoothing, .everywhere = everywhere});
}

}  // namespace tandem
