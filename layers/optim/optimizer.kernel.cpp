// The common part of all optimizers, and SGD.
#include <cmath>

#include "core/math.h"
#include "layers/optim/update.h"

namespace tandem {
namespace {

// Runs for one index. Decides on the device whether this step may be applied, and computes the clip factor.
template <class T>
struct CheckStep {
  StepState* state;
  const T* squared_norm;
  const T* loss;  // may be null
  float clip;
  bool scaled;
  LossScaling scaling;
  TANDEM_HD void operator()(std::int64_t) const {
    T sum = *squared_norm;
    const float average = scaled ? state->gradient_average / state->loss_scale : state->gradient_average;
    if (loss && !(*loss - *loss == 0)) {  // the loss scale is not the cause
      state->not_finite = 1;
      return;
    }
    if (!check_step(*state, sum - sum == 0, scaled, scaling)) return;
    float norm = static_cast<float>(std::sqrt(sum)) * average;
    state->gradient_scale = average * (clip > 0 && norm > clip ? clip / norm : 1.f);
    state->step++;
  }
};

template <class T, bool momentum, bool nesterov>
struct UpdateSGD {
  const StepState* state;
  const float* rates;  // learning-rate scale, weight decay per block of 64
  float mu;
  const T* g;
  T *w, *v;
  TANDEM_HD void operator()(std::int64_t i) const {
    const float* r = rates + i / FlatParameters::alignment * 2;
    T gradient = fused(T(r[1]), w[i], g[i] * T(state->gradient_scale));
    T direction = gradient;
    if (momentum) {
      T velocity = fused(T(mu), v[i], gradient);
      v[i] = velocity;
      direction = nesterov ? fused(T(mu), velocity, gradient) : velocity;
    }
    w[i] = fused(-T(state->learning_rate) * T(r[0]), direction, w[i]);
  }
};

template <class T>
struct WholeGradient {  // the gradient as UpdateSGD reads it
  const StepState* state;
  bool checked;  // check_gradients() has set gradient_scale; false: uses gradient_average
  const float* rates;
  T* g;
  const T* w;
  TANDEM_HD void operator()(std::int64_t i) const {
    const float scale = checked ? state->gradient_scale : state->gradient_average;
    g[i] = fused(T(rates[i / FlatParameters::alignment * 2 + 1]), w[i], g[i] * T(scale));
  }
};

}  // namespace

Optimizer::Optimizer(double rate, double weight_decay, bool decay_everything, std::vector<std::string> vectors)
    : weight_decay_(not_negative("the weight decay", weight_decay)), decay_everything_(decay_everything) {
  learning_rate(rate);
  for (std::string& name : vectors) vectors_.emplace_back(std::move(name), Tensor());
}

void Optimizer::bind(FlatParameters& flat, std::uint64_t seed) {
  MemoryUse use(Use::optimizer);
  flat_ = &flat;
  Backend& backend = flat.backend();
  std::vector<double> rates(flat.numel() / FlatParameters::alignment * 2, 0.0);
  for (const ParameterRange& s : flat.parameter_ranges()) {
    not_negative(("the learning rate scale of " + s.name).c_str(), s.learning_rate_scale);
    for (std::int64_t b = s.local_begin / FlatParameters::alignment;
         b * FlatParameters::alignment < s.local_begin + s.length; b++) {
      rates[2 * b] = s.frozen ? 0 : s.learning_rate_scale;
      rates[2 * b + 1] = s.frozen ? 0 : decay_of(s);
    }
  }
  check_clip();
  rates_ = Tensor::of(backend, {std::int64_t(rates.size())}, rates);
  state_ = Tensor::zeros(backend, {std::int64_t(sizeof(StepState))}, DType::u8);
  sums_ = Tensor::zeros(backend, {1}, flat.values.dtype());
  host_ = {.seed = seed, .epoch = host_.epoch};
  staged_ = measured_ = false;
  ranks_ = 1;
  if (loss_scaling) {
    const auto& [first, most, patience] = *loss_scaling;
    require(first > 0 && most >= first && std::isfinite(most) && patience > 0, "the loss scale ", first, " to ", most,
            ", doubled after ", patience, " steps: all three must be finite and positive");
    host_.loss_scale = first;
  }
  backend.upload(state_.raw_write(), &host_, sizeof host_);
  for (auto& [name, vector] : vectors_) vector = Tensor::zeros(backend, {flat.numel()}, flat.values.dtype());
  allocate();
  sync_hyperparameters();
}

void Optimizer::check_bound() const { require(flat_ != nullptr, "the optimizer is not bound: call bind(flat) first"); }

double Optimizer::not_negative(const char* what, double value) {
  require(std::isfinite(static_cast<float>(value)) && value >= 0, what, " ", value, " must be finite and at least 0");
  return value;
}

void Optimizer::below_one(const char* what, double value) {
  require(value >= 0 && value < 1, what, " ", value, " must be at least 0 and below 1");
}

void Optimizer::positive(const char* what, double value) {
  require(value > 0 && std::isfinite(value), what, " ", value, " must be finite and positive");
}

const std::vector<std::pair<std::string, Tensor>>& Optimizer::vectors() const {
  check_bound();
  return vectors_;
}

void Optimizer::check_clip() const {
  require(clip_norm >= 0, "the norm ", clip_norm,
          " that gradients are clipped to must be at least 0 (0: they are not)");
}

void Optimizer::learning_rate(double rate) { learning_rate_ = not_negative("the learning rate", rate); }

void Optimizer::epoch(std::uint32_t epoch) {
  staged_ = staged_ && epoch == host_.epoch;
  host_.epoch = epoch;
  if (flat_) sync_hyperparameters();
}

void Optimizer::gradients_are_sums_of(double samples) {
  require(std::isfinite(samples) && samples > 0, "the gradients cannot be a sum of ", samples, " samples");
  samples_ = samples;
}

void Optimizer::gradients_are_shares_of(int ranks) {
  require(ranks > 0, "the gradients cannot be shares of ", ranks, " ranks");
  ranks_ = ranks;
}

void Optimizer::sync_hyperparameters() {
  check_bound();
  const float rate = static_cast<float>(learning_rate_), average = static_cast<float>(ranks_ / samples_);
  if (staged_ && rate == host_.learning_rate && average == host_.gradient_average) return;
  host_.learning_rate = rate;
  host_.gradient_average = average;
  state_.backend().upload(state_.raw_write(), &host_, step_from_host);  // the device writes the rest
  staged_ = true;
}

StepResult Optimizer::step(const Tensor* loss) {
  require(flat().gradients_complete(), "step() before backward(): there are no gradients");
  update(loss);
  return result();
}

void Optimizer::measure_all() {
  bool add = false;
  for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice}) {
    if (owner == OwnerClass::replicated && flat().slice().index > 0) continue;
    for (const Range& r : flat_->ranges(owner)) measure(r, std::exchange(add, true));
  }
  if (!add) sums_.fill(0);
  measured_ = true;
}

void Optimizer::update(const Tensor* loss) {
  require(measured_ || flat().slice().count == 1, name(),
          ": layers are cut over ranks, and the norms of their gradients were not added up: train by all-reduce, ",
          "or call measure_all() and add up sums() over the slices");
  if (!measured_) measure_all();
  measured_ = false;
  check_gradients(loss);
  for (const Range& r : flat_->trainable()) {
    apply(r);
    flat_->count_writes(r);
  }
}

StepResult Optimizer::result() {
  if (if_not_finite == IfNotFinite::wait) return StepResult::queued;
  const StepState s = read_state();
  if (s.not_finite == 0) return StepResult::made;
  if (s.not_finite == 2) return StepResult::overflow;
  if (s.not_finite == 1) clear_not_finite();
  if (if_not_finite == IfNotFinite::skip) return StepResult::not_finite;
  throw NotFinite(
      "step " + std::to_string(s.step + s.skipped + 1) +
      ": the loss or its gradient is not finite; the parameters are those before this step. A smaller learning "
      "rate usually helps; mode().check = true finds the operation");
}

void Optimizer::measure(Range range, bool add) {
  flat().backend().squared_norm(flat_->gradients.range(range.begin, {range.length()}), sums_, add);
}

void Optimizer::finish_gradients(Range) {
  fail(name(), ": its steps are made where the parameters are, not by a server");
}

Variable Optimizer::scaled(const Variable& loss) const {
  check_bound();
  if (!loss_scaling) return loss;
  auto state = std::make_shared<Tensor>(state_);
  void* scale = static_cast<std::byte*>(state->raw_write()) + offsetof(StepState, loss_scale);
  return loss * Variable(Tensor::wrap(state->backend(), scale, {}, DType::f32, state));
}

void Optimizer::check_gradients(const Tensor* loss) {
  sync_hyperparameters();
  check_clip();
  if (loss) {
    require(loss->defined(), "step(loss): the loss must have one element, this one is undefined");
    require(loss->numel() == 1, "step(loss): the loss must have one element, this one has the shape ", loss->shape());
  }
  auto* state = reinterpret_cast<StepState*>(state_.raw_write());
  dispatch_wide(sums_.dtype(), "optimizer", [&]<class T> {
    launch(flat_->backend(), 1,
           CheckStep<T>{state, sums_.data<T>(), loss ? loss->data<T>() : nullptr, static_cast<float>(clip_norm),
                        loss_scaling.has_value(), loss_scaling.value_or(LossScaling())});
  });
}

StepState Optimizer::read_state() const {
  check_bound();
  StepState s;
  // Not the backend of flat_, since the flat parameters of fit() no longer exist after fit() has returned
  state_.backend().download(&s, state_.raw(), sizeof s);
  return s;
}

void Optimizer::clear_not_finite() {
  StepState now = read_state();
  if (now.not_finite == 1) now.not_finite = 3;
  state_.backend().upload(state_.raw_write(), &now, sizeof now);
}

double Optimizer::gradient_norm() const {
  check_bound();
  return std::sqrt(sums_.slice(0, 1).item()) * read_state().gradient_average;
}

void Optimizer::resume_at(const StepState& then) {
  StepState now = read_state();
  now.step = then.step;
  now.skipped = then.skipped;
  if (loss_scaling) {
    now.loss_scale = then.loss_scale;
    now.unscaled_steps = then.unscaled_steps;
  }
  state_.backend().upload(state_.raw_write(), &now, sizeof now);
}

// ---- SGD ------------------------------------------------------------------------------------------------------------
SGD::SGD(const SGDOptions& o)
    : Optimizer(o.learning_rate, o.weight_decay, o.decay_everything,
                o.momentum > 0 ? std::vector<std::string>{"velocity"} : std::vector<std::string>{}),
      options_(o) {
  below_one("SGD: momentum", o.momentum);
  require(!o.nesterov || o.momentum > 0, "SGD: Nesterov needs a momentum");
}

void SGD::finish_gradients(Range range) {
  dispatch_wide(flat().values.dtype(), "SGD", [&]<class T> {
    update_blocks(*this, range,
                  WholeGradient<T>{device_state(), needs_whole_gradient(), rates_.data<float>(),
                                   flat_->gradients.write<T>(), flat_->values.data<T>()});
  });
}

void SGD::apply(Range range) {
  dispatch_wide(flat().values.dtype(), "SGD", [&]<class T> {
    auto run = [&]<bool momentum, bool nesterov> {
      update_blocks(
          *this, range,
          UpdateSGD<T, momentum, nesterov>{device_state(), rates_.data<float>(), float(options_.momentum),
                                           flat_->gradients.data<T>(), flat_->values.write<T>(), vector<T>(0)});
    };
    if (options_.nesterov)
      run.template operator()<true, true>();
    else if (options_.momentum > 0)
      run.template operator()<true, false>();
    else
      run.template operator()<false, false>();
  });
}

}  // namespace tandem
