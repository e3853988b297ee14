#include "core/launch.h"
#include "layers/train/evaluate.h"

namespace tandem {
namespace {

struct LossSum {
  double sum = 0, last = 0;
};

template <class T>
struct AddLoss {  // one index only
  LossSum* all;
  const T* loss;
  double samples;
  TANDEM_HD void operator()(std::int64_t) const {
    all->last = double(*loss);
    all->sum += all->last * samples;
  }
};

}  // namespace

EpochSums::EpochSums(Backend& backend)
    : correct(Tensor::zeros(backend, {1}, DType::i32)), loss_(backend, {std::int64_t(sizeof(LossSum))}, DType::u8) {
  begin({});
}

void EpochSums::begin(const MetricSums& sums) {
  const LossSum loss{sums.loss, 0};
  loss_.backend().upload(loss_.raw_write(), &loss, sizeof loss);
  correct.fill(sums.correct);
  samples_ = sums.samples;
}

void EpochSums::count(std::int64_t samples) { samples_ += double(samples); }

void EpochSums::add(const Tensor& loss, std::int64_t samples) {
  auto* all = reinterpret_cast<LossSum*>(loss_.raw_write());
  dispatch_wide(loss.dtype(), "loss", [&]<class T> {
    launch(loss_.backend(), 1, AddLoss<T>{all, loss.data<T>(), double(samples)});
  });
}

MetricSums EpochSums::read(double* last_loss) const {
  LossSum loss;
  loss_.backend().download(&loss, loss_.raw(), sizeof loss);
  if (last_loss) *last_loss = loss.last;
  return {loss.sum, double(correct.item()), samples_};
}

}  // namespace tandem
