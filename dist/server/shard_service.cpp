#include "dist/server/shard_service.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/elementwise.h"
#include "core/math.h"

namespace tandem {

using Kind = Asynchrony::Kind;

namespace {

// y = Σ weight_i · x_i, in the order of i.
void add_weighted(Tensor& y, const Tensor& x, double weight, bool first) {
  dispatch_wide(y.dtype(), "server", [&]<class T> {
    T* out = y.write<T>();
    const T *in = x.data<T>(), w = T(weight);
    const std::int64_t n = y.numel();
#pragma omp simd
    for (std::int64_t i = 0; i < n; i++) out[i] = first ? w * in[i] : fused(w, in[i], out[i]);
  });
}
void divide(Tensor& y, double by) {
  dispatch_wide(y.dtype(), "server", [&]<class T> {
    T* out = y.write<T>();
    const std::int64_t n = y.numel();
#pragma omp simd
    for (std::int64_t i = 0; i < n; i++) out[i] /= T(by);
  });
}

}  // namespace

double ShardCounts::participation() const {
  const auto sum = [](const std::vector<std::int64_t>& v) {
    return double(std::accumulate(v.begin(), v.end(), std::int64_t{0}));
  };
  const double used = sum(applied), all = used + sum(dropped) + sum(refused) + double(left_out);
  return all > 0 ? used / all : 1;
}

Measures measures_of_delays(const ShardCounts& shard) {
  Measures all;
  const auto& delays = shard.delays;
  double pushes = 0, sum = 0;
  for (std::size_t d = 0; d < delays.size(); d++) {
    pushes += double(delays[d]);
    sum += double(d) * double(delays[d]);
  }
  if (pushes > 0) {
    all.push_back({"mean_delay", sum / pushes});
    all.push_back({"participation", shard.participation()});
  }
  for (std::size_t d = 0; d < delays.size();) {  // by one up to 15, then by powers of two
    const std::size_t end = d < 16 ? d + 1 : 2 * d;
    double count = 0;
    for (std::size_t k = d; k < std::min(end, delays.size()); k++) count += double(delays[k]);
    if (count > 0)
      all.push_back({"delay_" + std::to_string(d) + (end > d + 1 ? "_to_" + std::to_string(end - 1) : ""), count});
    d = end;
  }
  return all;
}

ShardService::ShardService(const Rule& rule, const Tensor& first, std::vector<RuleBlock> blocks, int workers,
                           ServerOptions options)
    : options_(std::move(options)),
      shard_(rule, first, std::move(blocks), workers),
      workers_(std::size_t(workers)),
      applied_(std::size_t(workers)) {
  for (auto* count : {&counts_.applied, &counts_.dropped, &counts_.refused}) count->resize(workers_.size());
  if (options_.how.of_means() || options_.how.of_batches()) mean_ = Tensor::like(first);
}

bool ShardService::finite(int worker, const Tensor& gradient) {
  if (workers_[std::size_t(worker)].samples > 0 && all_finite(gradient)) return true;
  counts_.refused[std::size_t(worker)]++;
  workers_[std::size_t(worker)].verdict = Verdict::refused;
  return false;
}

void ShardService::record(bool push, int worker) {
  if (options_.record) events_.push_back({push, worker, workers_[std::size_t(worker)].waits});
}

void ShardService::count(int worker, std::int64_t delay, std::int64_t samples) {
  const std::size_t at = std::min(std::size_t(delay), longest_delay);
  if (counts_.delays.size() <= at) counts_.delays.resize(at + 1);
  counts_.delays[at]++;
  counts_.applied[std::size_t(worker)]++;
  counts_.pushes++;
  counts_.samples += samples;
  counts_.version = shard_.version();
}

bool ShardService::begins(int worker, ExchangeId exchange, const Tensor& into) {
  Worker& w = workers_[std::size_t(worker)];
  if (exchange <= w.seen) return false;
  w.seen = w.waits = exchange;
  w.into = into;
  w.made = w.pushes = false;
  w.verdict = Verdict::taken;
  return true;
}

void ShardService::push(int worker, ExchangeId exchange, const Tensor& gradient, std::int64_t samples,
                        const Tensor& into) {
  if (!begins(worker, exchange, into)) return;
  Worker& w = workers_[std::size_t(worker)];
  w.pushes = w.here = true;
  w.pause = {exchange, Pause::none};
  w.samples = samples;
  w.clock++;
  // Another owner has applied it, but could not confirm it.
  if (exchange <= applied_[std::size_t(worker)]) return;
  if (drops(worker)) {  // not marked as applied: another owner checks it again
    w.verdict = Verdict::dropped;
    counts_.dropped[std::size_t(worker)]++;
    return;
  }
  // Under bsp the whole step is refused; otherwise the others make their steps without this gradient.
  if (options_.how.kind != Kind::bsp && !finite(worker, gradient)) {
    applied_[std::size_t(worker)] = exchange;
    return;
  }
  w.gradient = gradient;
  if (options_.how.of_means()) return;  // until enough workers have pushed
  if (!options_.how.of_batches()) return apply(worker);
  collect(worker, options_.how.kind == Kind::fedbuff ? 1 / std::sqrt(1 + double(shard_.delay(worker))) : 1);
  if (std::int64_t(collected_.size()) == options_.how.batch) apply_collected(worker, double(options_.how.batch));
}

void ShardService::pull(int worker, ExchangeId exchange, const Tensor& into) {
  if (!begins(worker, exchange, into)) return;
  Worker& w = workers_[std::size_t(worker)];
  if (!w.here && w.clock == 0) {  // a new worker begins at the slowest worker's clock
    w.clock = slowest();
    if (w.clock == UINT64_MAX) w.clock = 0;
  }
  // With bsp the others wait for a new worker only from its first push on: they hold leases already, and it holds none.
  w.here = w.here || options_.how.kind != Kind::bsp;
}

void ShardService::idle(int worker, ExchangeId exchange, Pause pause) {
  Worker& w = workers_[std::size_t(worker)];
  if (exchange >= w.seen) w.pause = std::max(w.pause, {exchange, pause});
}
void ShardService::lost(int worker) {
  Worker& w = workers_[std::size_t(worker)];
  w = {.seen = w.seen, .here = false, .gradient = {}, .into = {}};
}
void ShardService::returned(int worker) {
  shard_.forget(worker);
  workers_[std::size_t(worker)].clock = 0;
}

void ShardService::apply(int worker) {
  Worker& w = workers_[std::size_t(worker)];
  w.made = options_.how.kind != Kind::ssp;  // answered at once
  record(true, worker);
  if (w.made) record(false, worker);
  const double rate = options_.learning_rate(counts_.pushes);
  const Tensor gradient = std::exchange(w.gradient, {});
  count(worker, shard_.push(worker, gradient, rate, options_.momentum, w.made ? &w.into : nullptr), w.samples);
  applied_[std::size_t(worker)] = w.waits;
}

void ShardService::collect(int worker, double weight) {
  Worker& w = workers_[std::size_t(worker)];
  add_weighted(mean_, std::exchange(w.gradient, {}), weight, collected_.empty());
  record(true, worker);
  collected_.push_back({worker, w.waits, shard_.delay(worker), w.samples});
}
// latest: the worker whose τ is the step's.
void ShardService::apply_collected(int latest, double sum_of_weights) {
  divide(mean_, sum_of_weights);
  shard_.push(latest, mean_, options_.learning_rate(counts_.pushes), options_.momentum);
  for (const Collected& c : std::exchange(collected_, {})) {
    applied_[std::size_t(c.worker)] = c.exchange;
    count(c.worker, c.delay, c.samples);
  }
}
std::uint64_t ShardService::slowest() const {
  std::uint64_t clock = UINT64_MAX;
  for (const Worker& w : workers_)
    if (w.here && !w.idle()) clock = std::min(clock, w.clock);
  return clock;
}
bool ShardService::nobody_pushes() const {
  return std::ranges::all_of(workers_,
                             [](const Worker& w) { return !w.here || w.idle() || (w.waits > 0 && !w.pushes); });
}

// True if all workers that can push have pushed, or if a quorum has pushed and the grace time is over.
bool ShardService::enough_pushed(double now) {
  int pushed = 0, missing = 0;
  for (const Worker& w : workers_) {
    pushed += w.gradient.defined();
    missing += !w.gradient.defined() && w.here && !w.idle();
  }
  const Asynchrony& how = options_.how;
  due_ = how.kind == Kind::quorum && pushed >= how.quorum ? std::min(due_, now + how.grace) : never;
  return pushed > 0 && (missing == 0 || now >= due_);
}

// Applies the mean over all samples. The workers' gradients are added in the order of their ranks. A worker with as
// many samples as the first has the weight 1, so with equal numbers of samples it is the plain mean.
void ShardService::apply_mean() {
  due_ = never;
  std::vector<int> pushed;
  bool good = true;
  for (std::size_t m = 0; m < workers_.size(); m++) {
    const Tensor& gradient = workers_[m].gradient;
    if (!gradient.defined()) continue;
    pushed.push_back(int(m));
    good = (options_.how.kind != Kind::bsp || finite(int(m), gradient)) && good;
  }
  int latest = pushed[0];
  double sum = 0;
  const auto first = double(workers_[std::size_t(latest)].samples);
  for (int m : pushed) {
    Worker& w = workers_[std::size_t(m)];
    if (good) {
      const double weight = double(w.samples) / first;
      sum += weight;
      if (shard_.delay(m) > shard_.delay(latest)) latest = m;
      collect(m, weight);
      continue;
    }
    w.gradient = {};
    applied_[std::size_t(m)] = w.waits;
    if (w.verdict != Verdict::taken) continue;
    w.verdict = Verdict::left_out;
    counts_.left_out++;
  }
  if (good) apply_collected(latest, sum);
}

std::vector<ShardService::Answer> ShardService::answers(double now) {
  if (options_.how.of_means() && enough_pushed(now)) apply_mean();
  if (!collected_.empty() && nobody_pushes())
    apply_collected(collected_.back().worker, double(collected_.size()));  // the last step may have fewer pushes
  const std::uint64_t slowest = this->slowest();
  std::vector<Answer> all;
  for (std::size_t m = 0; m < workers_.size(); m++) {
    Worker& w = workers_[m];
    if (w.waits == 0 || w.gradient.defined()) continue;  // the others have not pushed yet
    if (!collected_.empty() && !w.pushes) continue;
    if (options_.how.kind == Kind::ssp && w.pushes && w.clock > slowest + std::uint64_t(options_.how.staleness))
      continue;
    if (!w.made) {
      shard_.pull(int(m), w.into);
      record(false, int(m));
    }
    all.push_back({int(m), std::exchange(w.waits, 0), std::exchange(w.into, {}), w.verdict});
  }
  return all;
}

void ShardService::go_on(std::uint64_t version, std::int64_t pushes, const std::vector<ExchangeId>& applied) {
  shard_.go_on_at(version);
  applied_ = applied;
  counts_.version = version;
  counts_.pushes = pushes;
}

}  // namespace tandem
