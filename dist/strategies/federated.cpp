#include "dist/strategies/federated.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "core/elementwise.h"
#include "core/spec.h"
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

  void join(const OwnPart* own, Optimizer& optimizer) override {
    how_.check(own != nullptr, dynamic_cast<const SGD*>(&optimizer));
    own_ = own;
    optimizer_ = &optimizer;
  }
  void allocate(const FlatParameters& flat) override {
    all_.emplace(how_, own_->parts(0), dynamic_cast<const SGD&>(*optimizer_).options(),
                 Replicas::vector(flat, flat.values.dtype()));
    if (how_.kind == Federated::Kind::scaffold) control_ = {all_->control.clone(), all_->control.clone()};
  }
  void release() override {
    all_.reset();
    control_ = {};
  }
  void equal(const Tensor& x) override { all_->theta.copy_from(x); }
  void begin_epoch(std::int64_t epoch, const RunPlan& plan) override {
    all_->begin(epoch / how_.epochs);
    // A checkpoint has c, but not the c_i of all ranks: they begin with c, without a correction
    if (control_.own.defined() && plan.resumed && !std::exchange(resumed_, true)) control_.own.copy_from(all_->control);
    for (auto [name, vector] : optimizer_->vectors()) vector.fill(0);
  }
  void before_update(FlatParameters& flat) override { all_->add_proximal(flat.gradients, flat.values); }
  void after_update(FlatParameters& flat, double rate) override { all_->correct(flat.values, control_, rate); }

  Turn next(const Moment&) override { return {}; }
  Turn end(const Moment&) override {
    controls_ = how_.kind == Federated::Kind::scaffold && merged_;
    return {
        .sends = true, .waits = true, .merges = true, .again = how_.kind == Federated::Kind::scaffold && !controls_};
  }
  void send(Exchanged& e) override {
    if (controls_)
      e.sum.copy_from(control_.change);
    else
      all_->send(e.sum, e.x, own_->worker(), control_);
  }
  void merge(Exchanged& e) override {
    merged_ = !controls_;
    if (controls_) return all_->merge_controls(e.sum);
    all_->merge(e.sum);
    e.x.copy_from(all_->theta);
  }
  void go_back(Tensor& x) override { x.copy_from(all_->theta); }
  bool acts_alone() const override { return true; }
  void saved(StrategyState& state) override {
    for (auto [name, vector] : {std::pair{"control", all_->control}, {"server m", all_->m}, {"server v", all_->v}})
      if (vector.defined()) state.vector(name, vector);
  }

 private:
  const Federated how_;
  const OwnPart* own_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  std::optional<FederatedMerge> all_;
  ControlVariate control_;
  bool resumed_ = false;
  bool merged_ = false, controls_ = false;  // scaffold's second sum is that of the changes of c_i
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
  if (kind == Kind::fedprox) fields.push_back(number_field("mu", mu, 0, 1e6));
  return fields;
}

std::optional<Federated> Federated::parse(const std::string& text) {
  const auto known = std::find(std::begin(methods), std::end(methods), spec_name(text));
  if (known == std::end(methods)) return {};
  Federated how;
  how.kind = Kind(known - std::begin(methods));
  read_spec(text, how.fields());
  if (how.rate > 0 && how.server == Server::none)
    refuse(text, ": rate is of a server optimizer: name one with server=");
  if (how.rate == 0) how.rate = how.server <= Server::momentum ? 1 : 0.01;
  return how;
}

std::string Federated::name() const {
  std::string text = std::string(methods[int(kind)]) + ":epochs=" + std::to_string(epochs);
  if (kind == Kind::fedprox) text += ",mu=" + digits(mu);
  if (sample < 1) text += ",sample=" + digits(sample);
  if (server != Server::none) text += std::string(",server=") + servers[int(server)] + ",rate=" + digits(rate);
  return text;
}

void Federated::check(bool parts, bool sgd) const {
  if (!parts) refuse(name(), " is for workers with pictures of their own: add --partition equal, or another");
  if (!sgd) refuse(name(), ": the steps of a worker are those of --optimizer sgd");
}

double normalised_steps(double steps, double momentum, bool nesterov) {
  if (nesterov) return normalised_steps(steps + 1, momentum) - 1;
  return (steps - momentum * (1 - std::pow(momentum, steps)) / (1 - momentum)) / (1 - momentum);
}

FederatedMerge::FederatedMerge(const Federated& how, const Parts& parts, const SGDOptions& sgd, const Tensor& at)
    : theta(at), how_(how), parts_(parts), sgd_(sgd) {
  const auto zeros = [&] { return Tensor::zeros(at.backend(), at.shape(), at.dtype()); };
  if (how.kind == Federated::Kind::scaffold) control = zeros();
  if (how.server != Server::none) m = zeros();
  if (how.server <= Server::momentum) return;
  v = zeros();
  v.fill(Federated::tau * Federated::tau);
}

void FederatedMerge::begin(std::int64_t round) {
  taking_part_ = participants(int(parts_.pictures.size()), how_.sample, parts_.seed, round);
}
double FederatedMerge::share(int worker) const {
  double all = 0;
  for (int i : taking_part_) all += double(parts_.of(i));
  return std::binary_search(taking_part_.begin(), taking_part_.end(), worker) ? double(parts_.of(worker)) / all : 0;
}
double FederatedMerge::steps_weight(int worker) const {
  if (how_.kind != Federated::Kind::fednova) return 1;
  return normalised_steps(double(steps(worker)), sgd_.momentum, sgd_.nesterov);
}
void FederatedMerge::add_proximal(Tensor& g, const Tensor& w) const {
  if (how_.kind == Federated::Kind::fedprox) add_change(g, w, theta, how_.mu);
}
void FederatedMerge::correct(Tensor& w, ControlVariate& c, double rate) const {
  if (how_.kind != Federated::Kind::scaffold) return;
  add_change(w, control, c.own, -rate);
  c.rates += rate;
}
void FederatedMerge::send(Tensor& sum, const Tensor& x, int worker, ControlVariate& c) const {
  const double p = share(worker);
  sum.fill(0);
  if (p > 0) add_change(sum, theta, x, p / steps_weight(worker));
  if (!control.defined()) return;
  c.change.fill(0);
  if (c.rates > 0) {
    add_change(c.change, theta, x, 1 / std::exchange(c.rates, 0));
    add_scaled(c.change, control, -1);
  }
  add_into(c.own, c.change);
}
void FederatedMerge::merge(Tensor& sum) {
  double steps = 0;
  for (int i : taking_part_) steps += share(i) * steps_weight(i);
  if (how_.kind == Federated::Kind::fednova) add_scaled(sum, sum, steps - 1);
  server_step(*this, sum, how_);
}
void FederatedMerge::merge_controls(const Tensor& sum) {
  add_scaled(control, sum, 1.0 / double(parts_.pictures.size()));
}

std::unique_ptr<Strategy> federated(std::unique_ptr<Communicator> communicator, const Federated& how,
                                    RoundsOptions options) {
  options.own_epochs = how.epochs;
  options.sample = how.sample;
  return rounds(
      {.everybody = std::move(communicator)}, how.name(), [how] { return std::make_unique<FederatedRounds>(how); },
      options);
}

}  // namespace tandem
