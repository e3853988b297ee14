// The choice of the algorithm for a convolution. Each candidate is timed once. No fixed rule suits every CPU, because
// the crossing point between Winograd and direct convolution depends on caches, vector width and the version of the
// library.
#include "core/cpu/convolution.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "core/cpu/direct.h"
#include "core/cpu/prepared.h"
#include "core/cpu/simd.h"
#include "core/cpu/winograd.h"
#include "core/error.h"

namespace tandem::cpu {

const char* name_of(Algorithm a) {
  switch (a) {
    case Algorithm::winograd: return "winograd";
    case Algorithm::direct: return "direct";
    case Algorithm::onednn: return "oneDNN";
    case Algorithm::widened: return "widened";
  }
  return "?";
}
const char* name_of(Pass p) {
  return p == Pass::forward ? "forward" : p == Pass::backward_data ? "backward data" : "backward filter";
}

namespace {

// The fastest of several runs, since other programs may disturb a run. A candidate that is clearly slower is stopped
// early. The first run, which includes page faults and the creation of primitives, does not count.
template <class Run>
double milliseconds(const Run& run, double best_so_far) {
  using Clock = std::chrono::steady_clock;
  run();
  double best = 1e30, spent = 0;
  for (int i = 0; i < 3 || (i < 10 && spent < 10); i++) {
    const auto start = Clock::now();
    run();
    const double t = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    best = std::min(best, t);
    spent += t;
    if (spent > 40 && (i > 0 || best > 1.5 * best_so_far)) break;
  }
  return best;
}

// to[i] (+)= from[i], from one type to another.
template <class From, class To>
void convert(const From* from, To* to, std::int64_t n, bool add, int threads) {
  const int lanes = n < 65536 ? 1 : threads;
  in_parts(lanes, [&](int lane) {
    std::int64_t i = n / VL * lane / lanes * VL;
    const std::int64_t end = lane == lanes - 1 ? n : n / VL * (lane + 1) / lanes * VL;
    for (; i + VL <= end; i += VL) store(to + i, add ? load(to + i) + load(from + i) : load(from + i));
    for (; i < end; i++) to[i] = To(add ? float(to[i]) + float(from[i]) : float(from[i]));
  });
}

void check(const ConvShape& s) {
  require(s.groups > 0 && s.c_in % s.groups == 0 && s.c_out % s.groups == 0, "conv2d: ", s.c_in, " input and ", s.c_out,
          " output channels do not divide into ", s.groups, " groups");
  require(s.n > 0 && s.c_in > 0 && s.c_out > 0 && s.kh > 0 && s.kw > 0 && s.stride_h > 0 && s.stride_w > 0 &&
              s.out_h() > 0 && s.out_w() > 0,
          "conv2d: a filter of ", s.kh, "×", s.kw, " (stride ", s.stride_h, ",", s.stride_w, ", padding ", s.pad_h, ",",
          s.pad_w, ", dilation ", s.dilation_h, ",", s.dilation_w, ") leaves nothing of pictures [", s.n, ",", s.h, ",",
          s.w, ",", s.c_in, "]: check the padding");
}

}  // namespace

struct Convolution::State {
  State(Scratch& scratch, int threads)
      : scratch(scratch), threads(std::max(threads, 1)), library(scratch, this->threads), prepared(scratch) {}
  Scratch& scratch;
  int threads;
  OneDnn library;
  PreparedWeights prepared;
  bool exact = false, by_rule = false;
  std::optional<Algorithm> only;
  std::vector<Choice> made;

  template <class T>
  std::vector<Algorithm> candidates(const ConvShape& s, Pass pass, std::string* kernel_name) {
    std::vector<Algorithm> found;
    if (winograd::applicable(s) && !exact) found.push_back(Algorithm::winograd);
    if (direct::applicable(s)) found.push_back(Algorithm::direct);
    const OneDnn::Kernel kernel = library.kernel<T>(s, pass);
    if (kernel_name) *kernel_name = kernel.name;
    const bool usable = !kernel.name.empty() && !(kernel.reference() && !found.empty());
    if (usable) found.push_back(Algorithm::onednn);
    const bool others = found.size() > (usable ? 1u : 0u);
    if (dtype_of<T> == DType::bf16 && !others && !library.kernel<float>(s, pass).name.empty())
      found.push_back(Algorithm::widened);
    if (found.empty()) found.push_back(Algorithm::onednn);  // which then says what is missing
    return found;
  }

  // Winograd where its tiles are well filled, direct for few channels: usually the fastest ones.
  static Algorithm rule(const ConvShape& s, const std::vector<Algorithm>& found) {
    auto has = [&](Algorithm a) { return std::find(found.begin(), found.end(), a) != found.end(); };
    if (has(Algorithm::direct)) return Algorithm::direct;
    if (has(Algorithm::winograd) && (winograd::filled(s) > 0.5 || !has(Algorithm::onednn))) return Algorithm::winograd;
    return has(Algorithm::onednn) ? Algorithm::onednn : found[0];
  }

  // trial(a) runs algorithm a as often as wanted, without lasting effect other than on outputs that are overwritten
  // anyway.
  template <class T, class Trial>
  Algorithm choose(const ConvShape& s, Pass pass, const Trial& trial) {
    for (const Choice& c : made)
      if (c.pass == pass && c.dtype == dtype_of<T> && c.shape == s) return c.algorithm;
    check(s);
    Choice c{s, pass, dtype_of<T>, Algorithm::onednn, {}, {}};
    const auto found = candidates<T>(s, pass, &c.library_kernel);
    if (only && std::find(found.begin(), found.end(), *only) != found.end())
      c.algorithm = *only;
    else if (found.size() == 1)
      c.algorithm = found[0];
    else if (by_rule)
      c.algorithm = rule(s, found);
    else {
      double best = 1e30;
      for (Algorithm a : found) {
        const double t = milliseconds([&] { trial(a); }, best);
        c.milliseconds.emplace_back(a, t);
        if (t < best) best = t, c.algorithm = a;
      }
    }
    made.push_back(c);
    return c.algorithm;
  }

  // Calls use(filters): transformed and kept by key, or null where Winograd would rather transform them on the way.
  template <class Use>
  void with_filters(const ConvShape& s, const float* w, WeightKey key, bool rotated, const Use& use) {
    if (!winograd::wants_prepared(s, rotated)) return use(static_cast<const float*>(nullptr));
    prepared.with(
        key, rotated, winograd::prepared_bytes(s),
        [&](std::byte* to) { winograd::prepare(s, w, rotated, reinterpret_cast<float*>(to), threads); },
        [&](std::byte* from) { use(reinterpret_cast<const float*>(from)); });
  }

  template <class T>
  void forward(Algorithm a, const ConvShape& s, const T* x, const float* w, WeightKey key, T* y, const Epilogue& e) {
    if (e.moments) e.moments->clear();
    if (a == Algorithm::onednn) return library.forward(s, x, w, key, y, e);
    if (a == Algorithm::direct) return direct::forward(s, x, w, y, e, scratch, threads);
    if (a == Algorithm::widened) {
      Block memory(scratch, 4 * std::size_t(s.x_numel() + s.y_numel()) + 128);
      float *wide_x = memory.carve<float>(s.x_numel()), *wide_y = memory.carve<float>(s.y_numel());
      convert(x, wide_x, s.x_numel(), false, threads);
      library.forward<float>(s, wide_x, w, key, wide_y, e);
      return convert(wide_y, y, s.y_numel(), false, threads);
    }
    with_filters(s, w, key, false, [&](const float* u) { winograd::forward(s, x, w, u, y, e, scratch, threads); });
  }
  template <class T>
  void backward_data(Algorithm a, const ConvShape& s, const T* dy, const float* w, WeightKey key, T* dx, bool add) {
    if (a == Algorithm::onednn) return library.backward_data(s, dy, w, key, dx, add);
    if (a == Algorithm::direct) return direct::backward_data(s, dy, w, dx, add, scratch, threads);
    if (a == Algorithm::widened) {
      Block memory(scratch, 4 * std::size_t(s.x_numel() + s.y_numel()) + 128);
      float *wide_dx = memory.carve<float>(s.x_numel()), *wide_dy = memory.carve<float>(s.y_numel());
      convert(dy, wide_dy, s.y_numel(), false, threads);
      library.backward_data<float>(s, wide_dy, w, key, wide_dx, false);
      return convert(wide_dx, dx, s.x_numel(), add, threads);
    }
    with_filters(s, w, key, true,
                 [&](const float* u) { winograd::backward_data(s, dy, w, u, dx, add, scratch, threads); });
  }
  template <class T>
  void backward_filter(Algorithm a, const ConvShape& s, const T* x, const T* dy, float* dw, bool add) {
    if (a == Algorithm::onednn) return library.backward_filter(s, x, dy, dw, add);
    if (a == Algorithm::direct) return direct::backward_filter(s, x, dy, dw, add, scratch, threads);
    if (a == Algorithm::widened) {
      Block memory(scratch, 4 * std::size_t(s.x_numel() + s.y_numel()) + 128);
      float *wide_x = memory.carve<float>(s.x_numel()), *wide_dy = memory.carve<float>(s.y_numel());
      convert(x, wide_x, s.x_numel(), false, threads);
      convert(dy, wide_dy, s.y_numel(), false, threads);
      return library.backward_filter<float>(s, wide_x, wide_dy, dw, add);
    }
    winograd::backward_filter(s, x, dy, dw, add, scratch, threads);
  }
};

Convolution::Convolution(Scratch& scratch, int threads) : state_(std::make_unique<State>(scratch, threads)) {}
Convolution::~Convolution() = default;

// Trials prepare the weights each time (no key), as a training step does.
template <class T>
void Convolution::forward(const ConvShape& s, const T* x, const float* w, WeightKey key, T* y,
                          const Epilogue& epilogue) {
  const Algorithm a =
      state_->choose<T>(s, Pass::forward, [&](Algorithm a) { state_->forward(a, s, x, w, {}, y, epilogue); });
  state_->forward(a, s, x, w, key, y, epilogue);
}

// Trials do not write to an output that is to be added to; they write to scratch memory.
template <class T>
void Convolution::backward_data(const ConvShape& s, const T* dy, const float* w, WeightKey key, T* dx, bool add) {
  std::optional<Block> elsewhere;
  const Algorithm a = state_->choose<T>(s, Pass::backward_data, [&](Algorithm a) {
    if (add && !elsewhere) elsewhere.emplace(state_->scratch, sizeof(T) * std::size_t(s.x_numel()));
    state_->backward_data(a, s, dy, w, {}, add ? reinterpret_cast<T*>(elsewhere->data()) : dx, false);
  });
  elsewhere.reset();
  state_->backward_data(a, s, dy, w, key, dx, add);
}

template <class T>
void Convolution::backward_filter(const ConvShape& s, const T* x, const T* dy, float* dw, bool add) {
  std::optional<Block> elsewhere;
  const Algorithm a = state_->choose<T>(s, Pass::backward_filter, [&](Algorithm a) {
    if (add && !elsewhere) elsewhere.emplace(state_->scratch, sizeof(float) * std::size_t(s.w_numel()));
    state_->backward_filter(a, s, x, dy, add ? reinterpret_cast<float*>(elsewhere->data()) : dw, false);
  });
  elsewhere.reset();
  state_->backward_filter(a, s, x, dy, dw, add);
}

void Convolution::exact(bool on) { state_->exact = on, state_->made.clear(); }
void Convolution::deterministic(bool on) { state_->by_rule = on, state_->made.clear(); }
void Convolution::only(Algorithm a) { state_->only = a, state_->made.clear(); }
std::vector<Choice> Convolution::choices() const { return state_->made; }
OneDnn& Convolution::library() { return state_->library; }
void Convolution::forget(const void* owner) { state_->prepared.forget(owner), state_->library.forget(owner); }

template <class T>
std::vector<Algorithm> Convolution::applicable(const ConvShape& s, Pass pass) {
  check(s);
  return state_->candidates<T>(s, pass, nullptr);
}

template std::vector<Algorithm> Convolution::applicable<float>(const ConvShape&, Pass);
template std::vector<Algorithm> Convolution::applicable<bf16>(const ConvShape&, Pass);
template void Convolution::forward(const ConvShape&, const float*, const float*, WeightKey, float*, const Epilogue&);
template void Convolution::forward(const ConvShape&, const bf16*, const float*, WeightKey, bf16*, const Epilogue&);
template void Convolution::backward_data(const ConvShape&, const float*, const float*, WeightKey, float*, bool);
template void Convolution::backward_data(const ConvShape&, const bf16*, const float*, WeightKey, bf16*, bool);
template void Convolution::backward_filter(const ConvShape&, const float*, const float*, float*, bool);
template void Convolution::backward_filter(const ConvShape&, const bf16*, const bf16*, float*, bool);

}  // namespace tandem::cpu
