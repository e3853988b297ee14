// Rounds over own epochs, for workers whose data differ. From the common weights θ each worker makes E epochs over its
// own part, s_i steps of SGD with momentum ρ, which ends at θ_i. p_i is its share of the pictures of those that take
// part.
//
//   fedavg    θ −= Δ with Δ = Σ p_i(θ − θ_i)                             (McMahan et al. 2017)
//   fedprox   as fedavg; each gradient at w gets + μ(w − θ)              (Li et al. 2020)
//   scaffold  as fedavg; after each step w −= η(c − c_i). At the end of the round c_i' = c_i − c + (θ − θ_i)/(s_i·η),
//             and c += (1/n)Σ(c_i' − c_i) with all n workers             (Karimireddy et al. 2020, option II)
//   fednova   Δ = (Σ p_i·a_i)·Σ p_i(θ − θ_i)/a_i with a_i = (s_i − ρ(1 − ρ^s_i)/(1 − ρ))/(1 − ρ)   (Wang et al. 2020)
//
// A server optimizer takes Δ as its gradient instead (Hsu et al. 2019; Reddi et al. 2021).
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/spec.h"
#include "dist/strategies/rounds.h"

namespace tandem {

struct Federated {
  enum class Kind { fedavg, fedprox, scaffold, fednova };
  enum class Server { none, momentum, adam, yogi, adagrad };
  Kind kind = Kind::fedavg;
  std::int64_t epochs = 10;  // E
  double mu = 0.01;          // of fedprox
  double sample = 1;         // the share of the workers that takes part in a round; they are drawn for each
  Server server = Server::none;
  double rate = 0;        // of the server optimizer; 0: 1 with momentum, else 0.01
  std::string text = {};  // "fedavg:epochs=10,sample=0.1"

  // Nothing: the text names no such method. Throws UsageError for bad arguments.
  static std::optional<Federated> parse(const std::string& text);
  static std::vector<std::string> names();
  std::vector<SpecField> fields();
  const std::string& name() const { return text; }
  // What one worker sends after a round, and its use of the sum over all. The simulator has one for each worker.
  std::unique_ptr<RoundMethod> method() const;
  void adjust(RoundsOptions& options) const {
    options.own_epochs = epochs;
    options.sample = sample;
  }
};

double normalised_steps(double steps, double momentum, bool nesterov = false);  // a_i of fednova
// θ −= Δ without an optimizer. momentum: m = 0.9·m + Δ; θ −= γ·m. The others: m = β₁·m + (1 − β₁)Δ,
// θ −= γ·m/(√v + τ), with v = β₂·v + (1 − β₂)Δ² (adam), v −= (1 − β₂)Δ²·sign(v − Δ²) (yogi), v += Δ² (adagrad, β₁ = 0);
// β₁ = 0.9, β₂ = 0.99, τ = 0.001, and v = τ² at first. delta: Δ/factor. The kernel is in averages.kernel.cpp.
void server_step(const Federated& how, Tensor& theta, Tensor& m, Tensor& v, const Tensor& delta, double factor = 1);
constexpr double server_tau = 1e-3;

}  // namespace tandem
