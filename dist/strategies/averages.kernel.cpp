#include "dist/strategies/averages.h"

#include "core/launch.h"
#include "dist/strategies/federated.h"

namespace tandem {
namespace {

using Server = Federated::Server;

template <class T>
struct JoinMean {
  T ranks;
  const T *sent, *sum;
  T* x;
  TANDEM_HD void operator()(std::int64_t i) const { x[i] = sum[i] / ranks + (x[i] - sent[i]); }
};

template <class T>
struct ElasticPull {
  T alpha;
  const T* z;
  T *x, *pull;
  TANDEM_HD void operator()(std::int64_t i) const {
    pull[i] = alpha * (x[i] - z[i]);
    x[i] -= pull[i];
  }
};

template <class T>
struct StaleMean {
  T weight, ranks;
  const T* sum;
  T* x;
  TANDEM_HD void operator()(std::int64_t i) const { x[i] = (weight * x[i] + sum[i]) / (weight + ranks); }
};

template <class T>
struct NarrowDifference {
  const T *x, *common;
  T* error;
  bf16* narrow;
  TANDEM_HD void operator()(std::int64_t i) const {
    const T all = x[i] - common[i] + error[i];
    narrow[i] = bf16(float(all));
    error[i] = all - T(float(narrow[i]));
  }
};

template <class T>
struct OuterStep {
  T ranks, beta, gamma;
  const T *sum, *sent;
  T *x, *theta, *m;
  TANDEM_HD void operator()(std::int64_t i) const {
    const T mean = sum[i] / ranks, delta = theta[i] - mean, since = x[i] - sent[i];
    m[i] = beta * m[i] + delta;
    theta[i] = mean + ((1 - gamma) * delta - gamma * beta * m[i]);  // θ − γ(Δ + β·m), without rounding Δ if γ is 1
    x[i] = theta[i] + since;
  }
};

template <class T>
struct AddScaled {
  T weight;
  const T *x, *z;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] += weight * (z ? x[i] - z[i] : x[i]); }
};

template <class T>
struct ServerStep {
  Server server;
  T factor, rate;
  const T* delta;
  T *theta, *m, *v;
  TANDEM_HD void operator()(std::int64_t i) const {
    const T d = factor * delta[i], square = d * d;
    if (server == Server::none) {
      theta[i] -= d;
      return;
    }
    const T beta = server == Server::adagrad ? 0 : T(0.9), rest = T(0.01);  // rest: 1 − β₂
    m[i] = beta * m[i] + (server == Server::momentum ? 1 : 1 - beta) * d;
    if (server == Server::adam) v[i] += rest * (square - v[i]);
    if (server == Server::yogi) v[i] -= rest * square * T(v[i] > square ? 1 : v[i] < square ? -1 : 0);
    if (server == Server::adagrad) v[i] += square;
    theta[i] -= rate * m[i] / (server == Server::momentum ? 1 : std::sqrt(v[i]) + T(server_tau));
  }
};

}  // namespace

void join_mean(Tensor& x, const Tensor& sent, const Tensor& sum, int ranks) {
  dispatch_wide(x.dtype(), "the mean over ranks", [&]<class T> {
    launch(x.backend(), x.numel(), JoinMean<T>{T(ranks), sent.data<T>(), sum.data<T>(), x.write<T>()});
  });
}

void elastic_pull(Tensor& x, const Tensor& z, Tensor& pull, double alpha) {
  dispatch_wide(x.dtype(), "the centre of all ranks", [&]<class T> {
    launch(x.backend(), x.numel(), ElasticPull<T>{T(alpha), z.data<T>(), x.write<T>(), pull.write<T>()});
  });
}

void stale_mean(Tensor& x, const Tensor& sum, double weight, int ranks) {
  dispatch_wide(x.dtype(), "the mean over hosts", [&]<class T> {
    launch(x.backend(), x.numel(), StaleMean<T>{T(weight), T(ranks), sum.data<T>(), x.write<T>()});
  });
}

void narrow_difference(Tensor& narrow, Tensor& error, const Tensor& x, const Tensor& common) {
  dispatch_wide(x.dtype(), "the difference in bf16", [&]<class T> {
    launch(x.backend(), x.numel(),
           NarrowDifference<T>{x.data<T>(), common.data<T>(), error.write<T>(), narrow.write<bf16>()});
  });
}

void outer_step(Tensor& x, const Tensor& sent, Tensor& theta, Tensor& m, const Tensor& sum, int ranks,
                const OuterRates& rates) {
  dispatch_wide(x.dtype(), "the outer step", [&]<class T> {
    launch(x.backend(), x.numel(),
           OuterStep<T>{T(ranks), T(rates.momentum), T(rates.learning_rate), sum.data<T>(), sent.data<T>(),
                        x.write<T>(), theta.write<T>(), m.write<T>()});
  });
}

void add_scaled(Tensor& y, const Tensor& x, double weight, const Tensor& z) {
  dispatch_wide(y.dtype(), "a scaled sum", [&]<class T> {
    launch(y.backend(), y.numel(),
           AddScaled<T>{T(weight), x.data<T>(), z.defined() ? z.data<T>() : nullptr, y.write<T>()});
  });
}

void server_step(const Federated& how, Tensor& theta, Tensor& m, Tensor& v, const Tensor& delta, double factor) {
  dispatch_wide(delta.dtype(), "the server's step", [&]<class T> {
    launch(delta.backend(), delta.numel(),
           ServerStep<T>{how.server, T(factor), T(how.rate), delta.data<T>(), theta.write<T>(),
                         m.defined() ? m.write<T>() : nullptr, v.defined() ? v.write<T>() : nullptr});
  });
}

}  // namespace tandem
