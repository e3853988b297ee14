#include "dist/strategies/averages.h"

#include "core/launch.h"

namespace tandem {
namespace {

template <class T>
struct TakeMean {
  const T* sum;
  T ranks;
  T* x;
  TANDEM_HD void operator()(std::int64_t i) const { x[i] = sum[i] / ranks; }
};

template <class T>
struct JoinMean {
  T ranks;
  T *x, *sent, *sum;
  TANDEM_HD void operator()(std::int64_t i) const { x[i] = sent[i] = sum[i] = sum[i] / ranks + (x[i] - sent[i]); }
};

template <class T>
struct ElasticAverage {
  T alpha;
  T *x, *z, *sum;
  TANDEM_HD void operator()(std::int64_t i) const {
    z[i] += sum[i];
    sum[i] = alpha * (x[i] - z[i]);
    x[i] -= sum[i];
  }
};

}  // namespace

void take_mean(Tensor& x, const Tensor& sum, int ranks) {
  dispatch_wide(x.dtype(), "the mean over ranks", [&]<class T> {
    launch(x.backend(), x.numel(), TakeMean<T>{sum.data<T>(), T(ranks), x.write<T>()});
  });
}

void join_mean(Tensor& x, Tensor& sent, Tensor& sum, int ranks) {
  dispatch_wide(x.dtype(), "the mean over ranks", [&]<class T> {
    launch(x.backend(), x.numel(), JoinMean<T>{T(ranks), x.write<T>(), sent.write<T>(), sum.write<T>()});
  });
}

void elastic_average(Tensor& x, Tensor& z, Tensor& sum, double alpha) {
  dispatch_wide(x.dtype(), "the centre of all ranks", [&]<class T> {
    launch(x.backend(), x.numel(), ElasticAverage<T>{T(alpha), x.write<T>(), z.write<T>(), sum.write<T>()});
  });
}

}  // namespace tandem
