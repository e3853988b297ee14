// The methods as strategies in blocking calls: the shortest correct versions, on the course's solutions where these are
// their heart. The tests hold the framework's strategies to them.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "dist/strategies/host_steps.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/rounds.h"
#include "dist/strategies/sliced_linear.h"
#include "examples/course/4_data_parallel/solution.h"
#include "examples/course/6_local_steps/solution.h"
#include "examples/course/7_cut_softmax/solution.h"

namespace tandem::test {

// ---- synchronous data parallelism -----------------------------------------------------------------------------------
// For gradients in host memory. After backward the gradients of all ranks are summed, and
// every rank makes the same step. Each rank's gradient is already weighted by its share of the whole batch.
class NaiveAllReduce : public Replicas {
 public:
  NaiveAllReduce(std::unique_ptr<Communicator> communicator, std::shared_ptr<SlicedClassifier> classifier = nullptr)
      : Replicas(std::move(communicator), "naive-" + (classifier ? classifier->name() : std::string("all-reduce")),
                 true),
        classifier_(std::move(classifier)) {}
  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    Replicas::prepare(model, task, options);
    if (classifier_) classifier_->prepare(model, task);
  }
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    compare_layouts(flat);
    broadcast(flat, *communicator_, same_slice_.get());
  }
  void exchange(const Tensor& loss) override {
    loss_ = loss.clone();  // not finite on any rank: not finite on all
    float stop = stop_requested_;
    for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice})
      for (const Range& r : flat_->ranges(owner)) {
        Tensor gradients = flat_->gradients.range(r.begin, {r.length()});
        course::Numbers g = gradients.values();
        course::exchange_gradients(owner == OwnerClass::replicated ? *communicator_ : *same_slice_, g, 1, 1);
        gradients.copy_from(Tensor::of(gradients.backend(), gradients.shape(), g, gradients.dtype()));
      }
    for (Buffer sum : {buffer(loss_), Buffer{&stop, 1, DType::f32}}) communicator_->all_reduce(sum).wait();
    stop_ = stop > 0;
    measure_slices(*optimizer_);
  }

 private:
  std::shared_ptr<SlicedClassifier> classifier_;  // hybrid.h; null: none is cut
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
};

// ---- steps of one's own ---------------------------------------------------------------------------------------------
// In double on the host: after H steps Δ = θ − mean of x; m = β·m + Δ; x = θ = θ − γ(Δ +
// β·m).
class NaiveOuter : public Replicas {
 public:
  NaiveOuter(std::unique_ptr<Communicator> communicator, const RoundSteps& how)
      : Replicas(std::move(communicator), "naive-" + how.name(), false), how_(how) {}
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer.gradients_are_shares_of(size());
    compare_layouts(flat);
    broadcast(flat, *communicator_);
    theta_.clear(), m_.assign(std::size_t(flat.numel()), 0);
  }
  void exchange(const Tensor& loss) override {
    if (theta_.empty()) theta_ = flat_->values.values();
    Strategy::exchange(loss);
  }
  void finish(Optimizer& optimizer) override {
    if (++made_ % how_.every.steps == 0 && agree(optimizer)) outer_step();
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    if (made_ % how_.every.steps != 0) outer_step();
    made_ = 0;
    return Strategy::end_epoch(mine);
  }

 private:
  void outer_step() {
    take_mean_of_all(*flat_);
    const std::vector<double> mean = flat_->values.values();
    for (std::size_t i = 0; i < mean.size(); i++) {
      const double delta = theta_[i] - mean[i];
      m_[i] = how_.momentum * m_[i] + delta;
      theta_[i] -= how_.learning_rate * (delta + how_.momentum * m_[i]);
    }
    flat_->values.copy_from(Tensor::of(flat_->backend(), flat_->values.shape(), theta_, flat_->values.dtype()));
    flat_->count_writes(flat_->all());
  }

  RoundSteps how_;
  FlatParameters* flat_ = nullptr;
  std::vector<double> theta_, m_;
  std::int64_t made_ = 0;
};

// DASO. All groups exchange at every turn and wait for it, so nothing is broadcast inside a
// host; the sum is used when its turn to be merged has come.
class NaiveDaso : public HostSteps {
 public:
  NaiveDaso(DasoRanks ranks, std::unique_ptr<Strategy> on_host, const DasoOptions& o)
      : HostSteps(std::move(ranks), std::move(on_host), o, {}, "naive-" + o.name()) {}

 private:
  using Numbers = std::vector<double>;
  void epoch_begins() override { common_ = flat_->values.values(), error_.assign(common_.size(), 0); }
  void take(const DasoSchedule::Turn& turn) override {
    if (!agree(*optimizer_)) return;
    Numbers x = flat_->values.values(), sent = sent_, sum = sum_;
    auto merge = [&] {
      if (!o_.keep_progress) return course::daso_merge(x, sum, double(turn.weight), hosts());
      for (std::size_t i = 0; i < x.size(); i++) x[i] = sum[i] / hosts() + (x[i] - sent[i]);
    };
    if (turn.merges && o_.merge_first) merge();
    if (turn.sends) sent_ = sum_ = x, add_up(turn);
    if (turn.merges && !o_.merge_first) merge();
    if (turn.blocks)
      for (std::size_t i = 0; i < x.size(); i++) x[i] = sum_[i];
    flat_->values.copy_from(Tensor::of(flat_->backend(), flat_->values.shape(), x, flat_->values.dtype()));
    flat_->count_writes(flat_->all());
    if (turn.blocks) common_ = flat_->values.values();
  }
  // sum_: over hosts; of a blocking exchange, the mean.
  void add_up(const DasoSchedule::Turn& turn) {
    const bool narrow = schedule_.blocking() && o_.bf16;
    std::vector<bf16> small(sum_.size());
    for (std::size_t i = 0; i < sum_.size() && narrow; i++) {
      const double all = o_.differences ? sum_[i] - common_[i] + error_[i] : sum_[i];
      small[i] = bf16(float(all));
      error_[i] = all - double(float(small[i]));
    }
    across_->all_reduce(narrow ? buffer(small) : buffer(sum_)).wait();
    for (std::size_t i = 0; i < sum_.size() && turn.blocks; i++)
      sum_[i] = (narrow ? double(float(small[i])) : sum_[i]) / hosts() + (narrow && o_.differences ? common_[i] : 0);
  }
  Numbers sent_, sum_, common_, error_;
};

inline std::unique_ptr<Strategy> naive_daso(DasoRanks ranks, const DasoOptions& options,
                                            std::shared_ptr<SlicedClassifier> classifier = nullptr) {
  auto on_host = std::make_unique<NaiveAllReduce>(std::move(ranks.gradients), std::move(classifier));
  return std::make_unique<NaiveDaso>(std::move(ranks), std::move(on_host), options);
}

// ---- a last layer that is cut over ranks ----------------------------------------------------------------------------
struct NaiveHybrid {
  using Numbers = std::vector<double>;
  std::shared_ptr<Communicator> over;
  Cuts rows;
  std::int64_t B, F, n, first, last;  // rows of all ranks, features, classes of this slice; this rank's rows
  Numbers x, w, p;                    // X [B, F], W_g [n, F]; softmax − target [B, n]
  NaiveHybrid(std::shared_ptr<Communicator> o, Cuts r, const Tensor& features, const Tensor& weight)
      : over(std::move(o)),
        rows(std::move(r)),
        B(rows.back()),
        F(features.size(1)),
        n(weight.size(0)),
        first(rows[std::size_t(over->rank())]),
        last(rows[std::size_t(over->rank()) + 1]),
        x(gathered(features, F)),
        w(weight.values()) {}
  Numbers gathered(const Tensor& mine, std::int64_t columns) {
    Numbers all(std::size_t(B * columns)), here = mine.values();
    Cuts cuts = rows;
    for (std::int64_t& c : cuts) c *= columns;
    std::copy(here.begin(), here.end(), all.begin() + first * columns);
    over->all_gather(buffer(all), cuts).wait();
    return all;
  }
  // The mean over this rank's rows. begin, classes: where this slice begins, of so many.
  double loss(const Tensor& labels, const Numbers& bias, std::int64_t begin, std::int64_t classes, double smoothing,
              double& right) {
    const Numbers y = gathered(labels, 1);
    const auto C = std::size_t(n), D = std::size_t(F);
    Numbers z(std::size_t(B) * C), sums(y.size());  // logits; of each row, their sum over all classes
    for (std::size_t i = 0; i < z.size(); i++) {
      z[i] = std::inner_product(&x[i / C * D], &x[i / C * D] + D, &w[i % C * D], bias[i % C]);
      sums[i / C] += z[i];
    }
    over->all_reduce(buffer(sums)).wait();
    course::SoftmaxRows soft = course::cut_softmax(*over, z, y, std::size_t(begin));
    p = std::move(soft.p);
    for (std::size_t i = 0; i < p.size(); i++)
      p[i] -= smoothing / double(classes) + (double(begin) + double(i % C) == y[i / C] ? 1 - smoothing : 0);
    double total = 0;
    for (std::size_t r = std::size_t(first); r < std::size_t(last); r++) {
      total += soft.total[r] - (1 - smoothing) * soft.own[r] - smoothing / double(classes) * sums[r];
      right += soft.own[r] == soft.largest[r];
    }
    return total / double(last - first);
  }
  void backward(const Tensor& dy, std::span<GradientSlot> slots) const {
    const Numbers each = of_all(*over, {dy.item() / double(last - first)});  // the weight of a row, of each rank
    Numbers dz = p, db(static_cast<std::size_t>(n));
    for (std::size_t i = 0, k = 0; i < dz.size(); i++) {
      while (std::int64_t(i) / n >= rows[k + 1]) k++;
      dz[i] *= each[k];
      db[i % std::size_t(n)] += dz[i];
    }
    const course::CutGradients d = course::cut_backward(*over, dz, x, w, std::size_t(F));
    auto give = [&](std::size_t slot, const Shape& s, std::span<const double> v) {
      if (slots[slot].wanted()) slots[slot].accumulate(Tensor::of(dy.backend(), s, v, dy.dtype()));
    };
    give(0, {last - first, F}, std::span(d.dx).subspan(std::size_t(first * F), std::size_t((last - first) * F)));
    give(1, {n, F}, d.dw);
    give(2, {n}, db);
  }
};
struct NaiveHybridNode : Node {
  static constexpr auto name = "naive_hybrid";
  std::shared_ptr<const NaiveHybrid> hybrid;
  explicit NaiveHybridNode(std::shared_ptr<const NaiveHybrid> h) : Node(name), hybrid(std::move(h)) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override { hybrid->backward(dy, slots); }
};

inline Variable naive_sliced_loss(const SlicedLinear& layer, const Variable& x, const Tensor& labels, double smoothing,
                                  Tensor* correct) {
  const auto naive = std::make_shared<NaiveHybrid>(layer.over(), rows_of_all(*layer.over(), x.value()), x.value(),
                                                   layer.weight().value());
  const std::vector<double> none(static_cast<std::size_t>(layer.width()));
  double right = 0;
  const double mean = naive->loss(labels, layer.bias().defined() ? layer.bias().value().values() : none, layer.begin(),
                                  layer.classes(), smoothing, right);
  if (correct) correct->fill(correct->item() + right);
  const Tensor loss = Tensor::of(x.backend(), {}, {mean}, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  return record<NaiveHybridNode>(loss, {&x, &layer.weight(), &layer.bias()}, {}, naive);
}

}  // namespace tandem::test
