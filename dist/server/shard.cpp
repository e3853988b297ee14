#include "dist/server/shard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/elementwise.h"

namespace tandem {

Shard::Shard(const Rule& rule, const Tensor& first, std::vector<RuleBlock> blocks, int workers)
    : rule_(rule),
      values_(first.clone()),
      blocks_(std::move(blocks)),
      workers_(std::size_t(workers)),
      mean_delay_(workers - 1) {
  require(std::int64_t(blocks_.size()) * 64 == first.numel(), "a shard of ", first.numel(), " elements has ",
          blocks_.size(), " blocks, one for each 64 elements are wanted");
  MemoryUse use(Use::optimizer);
  auto zeros = [&] { return Tensor::zeros(first.backend(), first.shape(), first.dtype()); };
  if (rule.keeps().velocity) velocity_ = zeros();
  for (Worker& w : workers_) {
    w.sent = values_;  // the same memory: until its first pull, w − w_sent is 0
    if (rule.keeps().square_avg) w.square_avg = zeros();
    if (rule.keeps().own) w.own = zeros();
  }
}

template <class T>
RuleVectors<T> Shard::vectors(Worker& worker, const Tensor& gradient) const {
  auto write = [](Tensor& t) { return t.defined() ? t.write<T>() : nullptr; };
  return {values_.write<T>(),       gradient.data<T>(), write(velocity_), worker.sent.data<T>(),
          write(worker.square_avg), write(worker.own),  blocks_.data()};
}

void Shard::was_sent(Worker& w, const Tensor& at) {
  w.sent = at;
  w.version = version_;
}

const Tensor& Shard::pull(int worker, const Tensor& into) {
  std::memcpy(Tensor(into).raw_write(), values_.raw(), values_.bytes());
  was_sent(workers_[std::size_t(worker)], into);
  return into;
}

std::int64_t Shard::push(int worker, const Tensor& gradient, double learning_rate, double momentum,
                         const Tensor* into) {
  Worker& w = workers_[std::size_t(worker)];
  require(gradient.shape() == values_.shape() && gradient.dtype() == values_.dtype(), "a gradient of ",
          gradient.numel(), " ", name_of(gradient.dtype()), " was pushed to a shard of ", values_.numel(), " ",
          name_of(values_.dtype()));
  const std::int64_t delay = this->delay(worker);
  mean_delay_ = 0.98 * mean_delay_ + 0.02 * double(delay);
  const Hyper hyper{learning_rate,
                    momentum,
                    double(delay),
                    mean_delay_,
                    version_,
                    int(workers_.size()),
                    last_ ? last_->learning_rate : learning_rate};
  // With `into` the push works in blocks that stay in a core's cache, so the copy of the weights needs no further pass.
  dispatch_wide(values_.dtype(), "a shard", [&]<class T> {
    const RuleVectors<T> all = vectors<T>(w, gradient);
    T* out = into ? Tensor(*into).write<T>() : nullptr;
    const std::int64_t length = values_.numel(), block = out && !rule_.sees_tensors() ? 8192 : length;
    for (std::int64_t i = 0; i < length; i += block) {
      const std::int64_t n = std::min(block, length - i);
      rule_.push(all.from(i), n, hyper);
      if (out) std::memcpy(out + i, all.w + i, std::size_t(n) * sizeof(T));
    }
  });
  version_++;
  last_ = hyper;
  if (into) was_sent(w, *into);
  return delay;
}

double Shard::correction(int worker, const Tensor& gradient) const {
  Worker& w = workers_[std::size_t(worker)];
  Hyper hyper = last_.value_or(Hyper{});
  hyper.delay = double(version_ - w.version);
  hyper.mean_delay = mean_delay_;
  hyper.rate_before = hyper.learning_rate;
  return rule_.correction(vectors<float>(w, gradient), values_.numel(), hyper);
}

double Shard::gap(int worker) const {
  const float *w = values_.data<float>(), *sent = workers_[std::size_t(worker)].sent.data<float>();
  double squares = 0;
  for (std::int64_t i = 0; i < values_.numel(); i++) squares += double(w[i] - sent[i]) * double(w[i] - sent[i]);
  return std::sqrt(squares / double(values_.numel()));
}

void Shard::go_on_with(const Tensor& velocity) {
  for (Tensor* t : {&velocity_, &workers_[0].own})  // worker 0's is the sum of all; the others' begin with zero
    if (t->defined()) t->copy_from(velocity);
}

std::vector<Tensor> Shard::kept() const {
  std::vector<Tensor> all;
  auto add = [&](const Tensor& t) {
    if (t.defined()) all.push_back(t);
  };
  add(velocity_);
  for (const Worker& w : workers_) {
    add(w.square_avg);
    add(w.own);
  }
  return all;
}

void Shard::go_on_at(std::uint64_t version) {
  version_ = version;
  for (Worker& w : workers_) was_sent(w, values_);
}

void Shard::forget(int worker) {
  Worker& w = workers_[std::size_t(worker)];
  was_sent(w, values_);
  if (w.square_avg.defined()) w.square_avg.fill(0);
  if (w.own.defined()) w.own.fill(0);
  if (!w.own.defined() || !velocity_.defined()) return;
  velocity_.fill(0);
  for (const Worker& m : workers_) add_into(velocity_, m.own);
}

}  // namespace tandem
