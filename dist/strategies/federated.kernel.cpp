#include "dist/strategies/federated.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/launch.h"
#include "core/spec.h"

namespace tandem {
namespace {

using Server = Federated::Server;
constexpr const char* names[] = {"fedavg", "fedprox", "scaffold", "fednova"};
constexpr const char* servers[] = {"none", "momentum", "adam", "yogi", "adagrad"};
constexpr double tau = 1e-3;

template <class T>
struct AddChange {
  T weight;
  const T *theta, *x;
  T* delta;
  TANDEM_HD void operator()(std::int64_t i) const { delta[i] += weight * (theta[i] - x[i]); }
};

template <class T>
struct AddScaled {
  T weight;
  const T* x;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] += weight * x[i]; }
};

template <class T>
struct NextControl {
  T inverse;
  const T *c, *theta, *x;
  T *own, *change;
  TANDEM_HD void operator()(std::int64_t i) const {
    const T next = own[i] - c[i] + inverse * (theta[i] - x[i]);
    change[i] += next - own[i];
    own[i] = next;
  }
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
    theta[i] -= rate * m[i] / (std::sqrt(v[i]) + T(tau));
  }
};

}  // namespace

std::optional<Federated> Federated::parse(const std::string& text) {
  const auto known = std::find(std::begin(names), std::end(names), spec_name(text));
  if (known == std::end(names)) return {};
  Federated how;
  how.kind = Kind(known - std::begin(names));
  const auto server = [&](const std::string& value) {
    const auto chosen = std::find(std::begin(servers), std::end(servers), value);
    how.server = Server(chosen - std::begin(servers));
    return chosen != std::end(servers);
  };
  std::vector<SpecField> fields{number_field("epochs", how.epochs, 1, 1e6),
                                number_field("sample", how.sample, above_zero, 1),
                                {"server", "none, momentum, adam, yogi or adagrad", server},
                                number_field("rate", how.rate, 0, 1e6)};
  if (how.kind == Kind::fedprox) fields.push_back(number_field("mu", how.mu, 0, 1e6));
  read_spec(text, fields);
  if (how.rate > 0 && how.server == Server::none)
    refuse(text, ": rate is of a server optimizer: name one with server=");
  if (how.rate == 0) how.rate = how.server <= Server::momentum ? 1 : 0.01;
  return how;
}

std::string Federated::name() const {
  std::string text = std::string(names[int(kind)]) + ":epochs=" + std::to_string(epochs);
  if (kind == Kind::fedprox) text += ",mu=" + digits(mu);
  if (sample < 1) text += ",sample=" + digits(sample);
  if (server != Server::none) text += std::string(",server=") + servers[int(server)] + ",rate=" + digits(rate);
  return text;
}

void add_change(Tensor& delta, const Tensor& theta, const Tensor& x, double weight) {
  dispatch_wide(delta.dtype(), "a worker's change", [&]<class T> {
    launch(delta.backend(), delta.numel(), AddChange<T>{T(weight), theta.data<T>(), x.data<T>(), delta.write<T>()});
  });
}
void add_scaled(Tensor& y, const Tensor& x, double weight) {
  dispatch_wide(y.dtype(), "a sum of changes", [&]<class T> {
    launch(y.backend(), y.numel(), AddScaled<T>{T(weight), x.data<T>(), y.write<T>()});
  });
}
void add_proximal(Tensor& g, const Tensor& w, const Tensor& theta, double mu) { add_change(g, w, theta, mu); }
void correct_drift(Tensor& w, const Tensor& c, const Tensor& own, double rate) { add_change(w, c, own, -rate); }

void next_control(Tensor& own, Tensor& change, const Tensor& c, const Tensor& theta, const Tensor& x,
                  double steps_rate) {
  dispatch_wide(own.dtype(), "a worker's control variate", [&]<class T> {
    launch(own.backend(), own.numel(),
           NextControl<T>{T(1 / steps_rate), c.data<T>(), theta.data<T>(), x.data<T>(), own.write<T>(),
                          change.write<T>()});
  });
}

double normalised_steps(double steps, double momentum) {
  return (steps - momentum * (1 - std::pow(momentum, steps)) / (1 - momentum)) / (1 - momentum);
}

ServerState::ServerState(const Federated& how, const Tensor& theta) {
  if (how.server != Server::none) m = Tensor::zeros(theta.backend(), theta.shape(), theta.dtype());
  if (how.server <= Server::momentum) return;
  v = Tensor::like(theta);
  v.fill(tau * tau);
}

void server_step(Tensor& theta, const Tensor& delta, ServerState& state, const Federated& how) {
  dispatch_wide(theta.dtype(), "the server's step", [&]<class T> {
    launch(theta.backend(), theta.numel(),
           ServerStep<T>{how.server, T(how.rate), T(how.server == Server::adagrad ? 0 : 0.9), delta.data<T>(),
                         theta.write<T>(), state.m.defined() ? state.m.write<T>() : nullptr,
                         state.v.defined() ? state.v.write<T>() : nullptr});
  });
}

}  // namespace tandem
