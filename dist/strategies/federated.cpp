#include "dist/strategies/federated.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

using Server = Federated::Server;
constexpr const char* methods[] = {"fedavg", "fedprox", "scaffold", "fednova"};
constexpr const char* servers[] = {"none", "momentum", "adam", "yogi", "adagrad"};

// The local step is fit()'s own; an epoch of fit() is a round, at whose end all ranks exchange.
class FederatedRounds : public RoundMethod {
 public:
  explicit FederatedRounds(const Federated& how) : how_(how) {}

  void join(const OwnPart* own, const Optimizer& optimizer) override {
    const auto* sgd = dynamic_cast<const SGD*>(&optimizer);
    if (!own) refuse(how_.text, " is for workers with pictures of their own: add --partition equal, or another");
    if (!sgd) refuse(how_.text, ": the steps of a worker are those of --optimizer sgd");
    own_ = own;
    sgd_ = sgd->options();
  }
  void allocate(const FlatParameters& flat) override {
    const auto add = [&](Tensor& t, double value) {
      t = Replicas::vector(flat, flat.values.dtype());
      t.fill(value);
    };
    add(theta_, 0);
    if (how_.server != Server::none) add(m_, 0);
    if (how_.server > Server::momentum) add(v_, server_tau * server_tau);
    for (Tensor* t : {&control_, &own_control_, &change_})
      if (how_.kind == Federated::Kind::scaffold) add(*t, 0);
  }
  void release() override { theta_ = m_ = v_ = control_ = own_control_ = change_ = {}; }
  void equal(const Tensor& x) override { theta_.copy_from(x); }
  void begin_epoch(std::int64_t, const RunPlan& plan) override {
    // A checkpoint has c, but not the c_i of all ranks: they begin with c, without a correction
    if (control_.defined() && plan.resumed && !std::exchange(resumed_, true)) own_control_.copy_from(control_);
  }
  void before_update(const Tensor& x, Tensor& gradients) override {
    if (how_.kind == Federated::Kind::fedprox) add_scaled(gradients, x, how_.mu, theta_);
  }
  void after_update(Tensor& x, double rate) override {
    if (how_.kind == Federated::Kind::scaffold) add_scaled(x, control_, -rate, own_control_);
    rates_ += rate;
  }

  // Under scaffold a second sum follows, of the changes of c_i.
  Turn end(const Moment&) override {
    controls_ = how_.kind == Federated::Kind::scaffold && std::exchange(merged_, false);
    return {
        .sends = true, .waits = true, .merges = true, .again = how_.kind == Federated::Kind::scaffold && !controls_};
  }
  Turn next(const Moment&) override { return {}; }
  void send(Exchanged& e) override {
    if (controls_) return e.sum.copy_from(change_);
    const int worker = own_->options().worker;
    e.sum.fill(0);
    add_scaled(e.sum, theta_, own_->weight(worker) / steps_weight(worker), e.x);
    if (!control_.defined()) return;
    change_.fill(0);
    if (rates_ > 0) {
      add_scaled(change_, theta_, 1 / rates_, e.x);
      add_scaled(change_, control_, -1);
    }
    rates_ = 0;
    add_into(own_control_, change_);
  }
  void merge(Exchanged& e) override {
    merged_ = !controls_;
    if (controls_) return add_scaled(control_, e.sum, 1.0 / own_->options().workers);
    double steps = how_.kind == Federated::Kind::fednova ? 0 : 1;
    for (int i : own_->taking_part())
      if (how_.kind == Federated::Kind::fednova) steps += own_->weight(i) * steps_weight(i);
    server_step(how_, theta_, m_, v_, e.sum, steps);
    e.x.copy_from(theta_);
  }
  void go_back(Tensor& x) override { x.copy_from(theta_); }
  bool acts_alone() const override { return true; }
  void saved(StrategyState& state) override {
    for (auto [name, vector] : {std::pair{"control", control_}, {"server m", m_}, {"server v", v_}})
      if (vector.defined()) state.vector(name, vector);
  }

 private:
  double steps_weight(int worker) const {  // a_i of fednova
    if (how_.kind != Federated::Kind::fednova) return 1;
    return normalised_steps(double(own_->steps(worker)), sgd_.momentum, sgd_.nesterov);
  }

  const Federated how_;
  const OwnPart* own_ = nullptr;
  SGDOptions sgd_;
  Tensor theta_, m_, v_;                   // m, v: of the server optimizer
  Tensor control_, own_control_, change_;  // c, c_i, and the last change of c_i
  double rates_ = 0;                       // Σ η of the round's steps
  bool resumed_ = false;
  bool merged_ = false, controls_ = false;  // the weights of this round; the sum under way is that of changes
};

}  // namespace

std::vector<std::string> Federated::names() { return {std::begin(methods), std::end(methods)}; }

std::vector<SpecField> Federated::fields() {
  const auto chosen = [this](const std::string& value) {
    const auto at = std::find(std::begin(servers), std::end(servers), value);
    server = Server(at - std::begin(servers));
    return at != std::end(servers);
  };
  std::vector<SpecField> fields{number_field("epochs", epochs, 1, 1e6),
                                number_field("sample", sample, above_zero, 1),
                                {"server", "none, momentum, adam, yogi or adagrad", chosen, servers[int(server)]},
                                number_field("rate", rate, 0, 1e6)};
  if (kind == Federated::Kind::fedprox) fields.push_back(number_field("mu", mu, 0, 1e6));
  return fields;
}

std::optional<Federated> Federated::parse(const std::string& text) {
  const auto known = std::find(std::begin(methods), std::end(methods), spec_name(text));
  if (known == std::end(methods)) return {};
  Federated how{.kind = Federated::Kind(known - std::begin(methods)), .text = text};
  read_spec(text, how.fields());
  if (how.rate > 0 && how.server == Server::none)
    refuse(text, ": rate is of a server optimizer: name one with server=");
  if (how.rate == 0) how.rate = how.server <= Server::momentum ? 1 : 0.01;
  return how;
}

double normalised_steps(double steps, double momentum, bool nesterov) {
  if (nesterov) return normalised_steps(steps + 1, momentum) - 1;
  return (steps - momentum * (1 - std::pow(momentum, steps)) / (1 - momentum)) / (1 - momentum);
}

std::unique_ptr<RoundMethod> Federated::method() const { return std::make_unique<FederatedRounds>(*this); }

}  // namespace tandem
