#include "layers/train/running_mean.h"

#include "core/launch.h"

namespace tandem {
namespace {

template <class T>
struct AddLoss {  // one index only
  RunningMean::Sums* sums;
  const T* loss;
  double pictures;
  TANDEM_HD void operator()(std::int64_t) const {
    sums->last = double(*loss);
    sums->loss += sums->last * pictures;
  }
};

}  // namespace

RunningMean::RunningMean(Backend& backend) : sums_(backend, {std::int64_t(sizeof(Sums))}, DType::u8) { begin(0); }

void RunningMean::begin(double loss) {
  const Sums sums{loss, 0};
  sums_.backend().upload(sums_.raw_write(), &sums, sizeof sums);
}

void RunningMean::add(const Tensor& loss, double pictures) {
  auto* sums = reinterpret_cast<Sums*>(sums_.raw_write());
  dispatch_wide(loss.dtype(), "loss", [&]<class T> {
    launch(sums_.backend(), 1, AddLoss<T>{sums, loss.data<T>(), pictures});
  });
}

RunningMean::Sums RunningMean::read() const {
  Sums sums;
  sums_.backend().download(&sums, sums_.raw(), sizeof sums);
  return sums;
}

}  // namespace tandem
