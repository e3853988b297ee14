// Rounds over own epochs, for workers whose data differ. From the common weights θ each worker makes E epochs over its
// own part, s_i steps of SGD with momentum ρ, which ends at θ_i. p_i is its share of the pictures of those that take
// part.
//
//   fedavg    θ −= Δ with Δ = Σ p_i(θ − θ_i)                             (McMahan et al. 2017)
//   fedprox   as fedavg; each gradient at w gets + μ(w − θ)              (Li et al. 2020)
//   scaffold  as fedavg; after each step w −= η(c − c_i). At the end of the round c_i' = c_i − c + (θ − θ_i)/(s_i·η),
//   and
//             c += (1/n)Σ(c_i' − c_i) with all n workers                 (Karimireddy et al. 2020, option II)
//   fednova   Δ = (Σ p_i·a_i)·Σ p_i(θ − θ_i)/a_i with a_i = (s_i − ρ(1 − ρ^s_i)/(1 − ρ))/(1 − ρ)   (Wang et al. 2020)
//
// A server optimizer takes Δ as its gradient instead (Hsu et al. 2019; Reddi et al. 2021).
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/tensor.h"

namespace tandem {

struct Federated {
  enum class Kind { fedavg, fedprox, scaffold, fednova };
  enum class Server { none, momentum, adam, yogi, adagrad };
  Kind kind = Kind::fedavg;
  std::int64_t epochs = 10;  // E
  double mu = 0.01;          // of fedprox
  double sample = 1;         // the share of the workers that takes part in a round; they are drawn for each
  Server server = Server::none;
  double rate = 0;  // of the server optimizer; 0: 1 with momentum, else 0.01

  // "fedavg:epochs=10,sample=0.1". Nothing: the text names no such method. Throws UsageError for bad arguments.
  static std::optional<Federated> parse(const std::string& text);
  std::string name() const;  // parse() reads it
};

// The merges, element by element; all vectors have one length and type, f32, or f64 on the reference backend.
void add_change(Tensor& delta, const Tensor& theta, const Tensor& x, double weight);  // Δ += weight·(θ − x)
void add_scaled(Tensor& y, const Tensor& x, double weight);                           // y += weight·x
void add_proximal(Tensor& g, const Tensor& w, const Tensor& theta, double mu);        // g += μ(w − θ)
void correct_drift(Tensor& w, const Tensor& c, const Tensor& own, double rate);       // w −= η(c − c_i)
// own = own − c + (θ − x)/(s·η), and change += what it changed by.
void next_control(Tensor& own, Tensor& change, const Tensor& c, const Tensor& theta, const Tensor& x,
                  double steps_rate);
double normalised_steps(double steps, double momentum);  // a_i of fednova

// m and v, zero and τ² at first, are kept by the optimizers that need them.
struct ServerState {
  Tensor m, v;
  ServerState(const Federated& how, const Tensor& theta);
};
// θ −= Δ without an optimizer. momentum: m = 0.9·m + Δ; θ −= γ·m. The others: m = β₁·m + (1 − β₁)Δ,
// θ −= γ·m/(√v + τ), with v = β₂·v + (1 − β₂)Δ² (adam), v −= (1 − β₂)Δ²·sign(v − Δ²) (yogi), v += Δ² (adagrad, β₁ = 0);
// β₁ = 0.9, β₂ = 0.99, τ = 0.001.
void server_step(Tensor& theta, const Tensor& delta, ServerState& state, const Federated& how);

}  // namespace tandem
