#include "dist/strategies/federated.h"

#include <cmath>

#include "core/launch.h"

namespace tandem {
namespace {

using Server = Federated::Server;

template <class T>
struct AddChange {
  T weight;
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] += weight * (b ? a[i] - b[i] : a[i]); }
};

template <class T>
struct ServerStep {
  Server server;
  T rate, beta;  // beta: of m
  const T* delta;
  T *theta, *m, *v;
  TANDEM_HD void operator()(std::int64_t i) const {
    const T d = delta[i], square = d * d, rest = T(0.01);  // rest: 1 − β₂
    if (server == Server::none) {
      theta[i] -= d;
      return;
    }
    if (server == Server::momentum) {
      m[i] = beta * m[i] + d;
      theta[i] -= rate * m[i];
      return;
    }
    m[i] = beta * m[i] + (1 - beta) * d;
    if (server == Server::adam) v[i] += rest * (square - v[i]);
    if (server == Server::yogi) v[i] -= rest * square * T(v[i] > square ? 1 : v[i] < square ? -1 : 0);
    if (server == Server::adagrad) v[i] += square;
    theta[i] -= rate * m[i] / (std::sqrt(v[i]) + T(Federated::tau));
  }
};

}  // namespace

void add_change(Tensor& y, const Tensor& a, const Tensor& b, double weight) {
  dispatch_wide(y.dtype(), "a worker's change", [&]<class T> {
    launch(y.backend(), y.numel(), AddChange<T>{T(weight), a.data<T>(), b.data<T>(), y.write<T>()});
  });
}

void add_scaled(Tensor& y, const Tensor& x, double weight) {
  dispatch_wide(y.dtype(), "a scaled sum", [&]<class T> {
    launch(y.backend(), y.numel(), AddChange<T>{T(weight), x.data<T>(), nullptr, y.write<T>()});
  });
}

void server_step(FederatedMerge& at, const Tensor& delta, const Federated& how) {
  dispatch_wide(delta.dtype(), "the server's step", [&]<class T> {
    launch(delta.backend(), delta.numel(),
           ServerStep<T>{how.server, T(how.rate), T(how.server == Server::adagrad ? 0 : 0.9), delta.data<T>(),
                         at.theta.write<T>(), at.m.defined() ? at.m.write<T>() : nullptr,
                         at.v.defined() ? at.v.write<T>() : nullptr});
  });
}

}  // namespace tandem
