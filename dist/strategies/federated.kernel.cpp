#include "dist/strategies/federated.h"

#include <cmath>

#include "core/launch.h"

namespace tandem {
namespace {

using Server = Federated::Server;

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

void server_step(const Federated& how, Tensor& theta, Tensor& m, Tensor& v, const Tensor& delta, double factor) {
  dispatch_wide(delta.dtype(), "the server's step", [&]<class T> {
    launch(delta.backend(), delta.numel(),
           ServerStep<T>{how.server, T(factor), T(how.rate), delta.data<T>(), theta.write<T>(),
                         m.defined() ? m.write<T>() : nullptr, v.defined() ? v.write<T>() : nullptr});
  });
}

}  // namespace tandem
