// The choice of the algorithm for a convolution. The candidates are timed once. No fixed rule suits every CPU, because
// the crossing point between Winograd and direct convolution depends on caches, vector width and the version of the
// library.
#include "core/cpu/convolution.h"

#include <algorithm>
#include <array>

#include "core/clock.h"
#include "core/cpu/direct.h"
#include "core/cpu/simd.h"
#include "core/cpu/winograd.h"

namespace tandem::cpu {

const char* name_of(Algorithm a) { return std::array{"winograd", "direct", "oneDNN", "widened"}[std::size_t(a)]; }
const char* name_of(Pass p) { return std::array{"forward", "backward data", "backward filter"}[std::size_t(p)]; }

namespace {

// The fastest of several runs, since other programs may disturb a run. A candidate that is clearly slower is stopped
// early. The first run, which includes page faults and the creation of primitives, does not count.
template <class Run>
double milliseconds(const Run& run, double best_so_far) {
  run();
  double best = 1e30, spent = 0;
  for (int i = 0; i < 3 || (i < 10 && spent < 10); i++) {
    const auto start = Clock::now();
    run();
    const double t = 1e3 * seconds_since(start);
    best = std::min(best, t);
    spent += t;
    if (spent > 40 && (i > 0 || best > 1.5 * best_so_far)) break;
  }
  return best;
}

bool contains(const std::vector<Algorithm>& all, Algorithm a) {
  return std::find(all.begin(), all.end(), a) != all.end();
}

// Winograd where its tiles are well filled, direct for few channels: usually the fastest ones.
Algorithm by_rule(const ConvShape& s, const std::vector<Algorithm>& found) {
  if (contains(found, Algorithm::direct)) return Algorithm::direct;
  const bool library = contains(found, Algorithm::onednn);
  if (contains(found, Algorithm::winograd) && (winograd::filled(s) > 0.5 || !library)) return Algorithm::winograd;
  return library ? Algorithm::onednn : found[0];
}

// The bytes that a pass writes.
template <class T>
std::size_t output_bytes(const ConvCall<T>& c) {
  return c.pass == Pass::forward         ? sizeof(T) * std::size_t(c.s.y_numel())
         : c.pass == Pass::backward_data ? sizeof(T) * std::size_t(c.s.x_numel())
                                         : sizeof(float) * std::size_t(c.s.w_numel());
}

}  // namespace

template <class T>
std::vector<Algorithm> Convolution::applicable(const ConvShape& s, Pass pass, std::string* kernel_name) {
  std::vector<Algorithm> found;
  if (winograd::applicable(s) && !exact_) found.push_back(Algorithm::winograd);
  if (direct::applicable(s)) found.push_back(Algorithm::direct);
  const bool others = !found.empty();
  const OneDnn::Kernel kernel = library_.kernel<T>(s, pass);
  if (kernel_name) *kernel_name = kernel.name;
  if (!kernel.name.empty() && !(kernel.reference() && others)) found.push_back(Algorithm::onednn);
  if (dtype_of<T> == DType::bf16 && !others && !library_.kernel<float>(s, pass).name.empty())
    found.push_back(Algorithm::widened);
  if (found.empty()) found.push_back(Algorithm::onednn);  // its error message names what is missing
  return found;
}

// Trials prepare the weights each time (no key), as a training step does. When the result is to be added to an output,
// trials write to scratch memory instead.
template <class T>
Algorithm Convolution::choose(const ConvCall<T>& call) {
  for (const Choice& c : made_)
    if (c.pass == call.pass && c.dtype == dtype_of<T> && c.shape == call.s) return c.algorithm;
  Choice c{call.s, call.pass, dtype_of<T>, Algorithm::onednn, {}, {}};
  const auto found = applicable<T>(call.s, call.pass, &c.library_kernel);
  if (only_ && contains(found, *only_)) {
    c.algorithm = *only_;
  } else if (found.size() == 1) {
    c.algorithm = found[0];
  } else if (by_rule_) {
    c.algorithm = by_rule(call.s, found);
  } else {
    ConvCall<T> trial = call;
    trial.key = {};
    trial.add = false;
    const Scratch elsewhere(memory_, call.add ? output_bytes(call) : 0);
    if (call.add && call.pass == Pass::backward_data) trial.x = reinterpret_cast<T*>(elsewhere.data());
    if (call.add && call.pass == Pass::backward_filter) trial.w = reinterpret_cast<float*>(elsewhere.data());
    double best = 1e30;
    for (Algorithm a : found) {
      const double t = milliseconds([&] { run_with(a, trial); }, best);
      c.milliseconds.emplace_back(a, t);
      if (t < best) {
        best = t;
        c.algorithm = a;
      }
    }
  }
  made_.push_back(c);
  return c.algorithm;
}

template <class T>
void Convolution::run_with(Algorithm a, const ConvCall<T>& call) {
  if (call.epilogue.moments) call.epilogue.moments->clear();
  if (a == Algorithm::onednn) return library_.convolution(call);
  if (a == Algorithm::direct) return direct::run(call, memory_, threads_);
  const ConvShape& s = call.s;
  if (a == Algorithm::widened) {
    Scratch wide(memory_, sizeof(float) * std::size_t(s.x_numel() + s.y_numel()));
    float *x = wide.carve<float>(std::size_t(s.x_numel())), *y = wide.carve<float>(std::size_t(s.y_numel()));
    const bool add_pictures = call.add && call.pass == Pass::backward_data;
    if (call.pass != Pass::backward_data) convert(threads_, call.x, x, s.x_numel());
    if (call.pass != Pass::forward) convert(threads_, call.y, y, s.y_numel());
    library_.convolution<float>({call.pass, s, x, call.w, y, call.key, call.add && !add_pictures, call.epilogue});
    if (call.pass == Pass::backward_data) convert(threads_, x, call.x, s.x_numel(), add_pictures);
    if (call.pass == Pass::forward) convert(threads_, y, call.y, s.y_numel());
    return;
  }
  const bool rotated = call.pass == Pass::backward_data;
  if (call.pass == Pass::backward_filter || !winograd::wants_prepared(s, rotated))
    return winograd::run(call, nullptr, memory_, threads_);
  prepared_.with(
      call.key, rotated, winograd::prepared_bytes(s),
      [&](std::byte* to) { winograd::prepare(s, call.w, rotated, reinterpret_cast<float*>(to), threads_); },
      [&](std::byte* from) { winograd::run(call, reinterpret_cast<const float*>(from), memory_, threads_); });
}

template <class T>
void Convolution::run(const ConvCall<T>& call) {
  run_with(choose(call), call);
}

void Convolution::exact(bool on) {
  exact_ = on;
  made_.clear();
}
void Convolution::deterministic(bool on) {
  by_rule_ = on;
  made_.clear();
}
void Convolution::only(Algorithm a) {
  only_ = a;
  made_.clear();
}
void Convolution::forget(const void* owner) {
  prepared_.forget(owner);
  library_.forget(owner);
}

template std::vector<Algorithm> Convolution::applicable<float>(const ConvShape&, Pass, std::string*);
template std::vector<Algorithm> Convolution::applicable<bf16>(const ConvShape&, Pass, std::string*);
template void Convolution::run(const ConvCall<float>&);
template void Convolution::run(const ConvCall<bf16>&);

}  // namespace tandem::cpu
