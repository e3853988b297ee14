#include "dist/shard.h"

#include <cmath>

#include "core/backend.h"

namespace tandem {

Shard::Shard(const Rule& rule, const Tensor& first, std::vector<float> scales, int workers)
    : rule_(rule),
      values_(first.clone()),
      scales_(std::move(scales)),
      workers_(std::size_t(workers)),
      mean_delay_(workers - 1) {
  require(std::int64_t(scales_.size()) * 64 == first.elements(), "a shard of ", first.elements(), " elements has ",
          scales_.size(), " scales, one for each 64 are wanted");
  MemoryUse use(Use::optimizer);
  auto zeros = [&] { return Tensor::zeros(first.backend(), first.shape(), first.dtype()); };
  if (rule.keeps().velocity) velocity_ = zeros();
  for (Worker& w : workers_) {
    w.sent = values_.clone();
    if (rule.keeps().squares) w.squares = zeros();
    if (rule.keeps().own) w.own = zeros();
  }
}

template <class T>
RuleVectors<T> Shard::vectors(Worker& worker, const Tensor& gradient) const {
  auto write = [](Tensor& t) { return t.defined() ? t.write<T>() : nullptr; };
  return {values_.write<T>(),    gradient.data<T>(), write(velocity_), worker.sent.data<T>(),
          write(worker.squares), write(worker.own),  scales_.data()};
}

const Tensor& Shard::pull(int worker) {
  Worker& w = workers_[std::size_t(worker)];
  w.sent.copy_from(values_);
  w.version = version_;
  return w.sent;
}

std::int64_t Shard::push(int worker, const Tensor& gradient, double learning_rate, double momentum) {
  Worker& w = workers_[std::size_t(worker)];
  require(gradient.shape() == values_.shape() && gradient.dtype() == values_.dtype(), "a gradient of ",
          gradient.elements(), " ", name_of(gradient.dtype()), " was pushed to a shard of ", values_.elements(), " ",
          name_of(values_.dtype()));
  const auto delay = std::int64_t(version_ - w.version);
  mean_delay_ = 0.98 * mean_delay_ + 0.02 * double(delay);
  const Hyper hyper{learning_rate, momentum, double(delay), mean_delay_};
  if (values_.dtype() == DType::f64)
    rule_.push(vectors<double>(w, gradient), values_.elements(), hyper);
  else
    rule_.push(vectors<float>(w, gradient), values_.elements(), hyper);
  version_++;
  return delay;
}

double Shard::correction(int worker, const Tensor& gradient) const {
  Worker& w = workers_[std::size_t(worker)];
  return rule_.correction(vectors<float>(w, gradient), values_.elements(),
                          {.delay = double(version_ - w.version), .mean_delay = mean_delay_});
}

double Shard::gap(int worker) const {
  const float *w = values_.data<float>(), *sent = workers_[std::size_t(worker)].sent.data<float>();
  double squares = 0;
  for (std::int64_t i = 0; i < values_.elements(); i++) squares += double(w[i] - sent[i]) * double(w[i] - sent[i]);
  return std::sqrt(squares / double(values_.elements()));
}

}  // namespace tandem
