#include "autograd/memory_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "autograd/variable.h"
#include "core/backend.h"
#include "core/clock.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr int most = 12;  // times that a step is planned anew because it took another time than predicted
constexpr int never = std::numeric_limits<int>::max() / 2;

std::uint64_t hash_of(const Node& node, bool backward) {
  std::uint64_t h = backward ? 0x9e3779b97f4a7c15u : 0x2545f4914f6cdd1du;
  auto mix = [&](std::uint64_t v) { h = (h ^ v) * 0x100000001b3u; };
  for (const char* c = node.op; *c; c++) mix(std::uint64_t(*c));
  mix(std::uint64_t(node.dtype));
  for (std::int64_t size : node.shape) mix(std::uint64_t(size));
  return h;
}

}  // namespace

const char* name_of(SwapMode swap) {
  static constexpr const char* names[] = {"off", "auto", "swap", "recompute"};
  return names[static_cast<int>(swap)];
}

// ---- a step ---------------------------------------------------------------------------------------------------------
MemoryPlan::MemoryPlan(Backend& backend, std::unique_ptr<Mover> mover, const MemoryPlanOptions& options)
    : backend_(backend),
      mover_(std::move(mover)),
      options_(options),
      thread_(std::this_thread::get_id()),
      clock_(backend.follower()) {
  require(options.budget > 0, "a memory plan needs a budget");
  backend_.memory().peak_since_mark();
  backend_.memory().budget(options.budget, [this](std::size_t bytes) { return relieve(bytes); });
}

MemoryPlan::~MemoryPlan() {
  backend_.memory().budget(0);
  leave();
}

void MemoryPlan::begin() {
  require(!active_ && std::this_thread::get_id() == thread_,
          "a memory plan follows one step at a time, on the thread that made it");
  entries_.clear(), hashes_.clear(), leaving_.clear(), discarding_.clear(), held_.clear(), returning_.clear();
  record_ = {};
  now_ = {};
  resident_ = base_ = 0;
  moments_.clear();
  plan_ = nullptr;
  on_plan_ = true;
  const bool learns =
      plans_.empty() || std::any_of(plans_.begin(), plans_.end(), [](auto& p) { return !p.second.settled; });
  timed_ = !backend_.recording() && (learns || tracing() || !backend_.asynchronous());
  if (mover_) mover_->timed(timed_);
  outside_ = std::max(outside_, backend_.memory().peak_since_mark());
  requests_ = memory_requests();
  outer_ = std::exchange(mode().watcher, this);
  began_ = now();
  if (const Trace::Lane* lane = tracing()) traced_from_ = lane->now();
  take_time(Tick::acted);
  active_ = true;
}

void MemoryPlan::end() {
  require(active_, "a memory plan's step has ended already");
  note_base();
  take_time(Tick::ended);
  record_.events.push_back({.base = base_});  // what ran after the last operation on the tape
  hashes_.push_back(0);
  if (timed_)
    read_times();
  else {
    now_.seconds = measured_.seconds;
    now_.stall = measured_.stall;
  }
  finish_record();
  now_.planned = plan_ && on_plan_ && hashes_.size() == plan_->hashes.size();
  measured_ = now_;
  steps_++;
  leave();
  if (timed_) trace_copies();
  plan_next();
}

// Brings back every tensor that is swapped out or discarded: after the step nothing depends on the plan.
void MemoryPlan::leave() noexcept {
  if (!active_) return;
  returns_ = true;
  for (Entry& e : entries_) {
    if (!e.storage) continue;
    try {
      if (e.at == At::leaving) mover_->forget(e.copy), e.at = At::here;
      if (e.at != At::here) bring_back(*e.storage);
    } catch (const std::exception& error) {  // reading it says so again
      std::fprintf(stderr, "a tensor that a step kept could not be brought back: %s\n", error.what());
    }
    e.storage->keep(nullptr, 0);
  }
  mode().watcher = outer_;
  active_ = returns_ = false;
}

// Lanes of their own in the trace that this thread writes to.
void MemoryPlan::trace_copies() {
  if (!mover_) return;
  const std::vector<Mover::Moved> moved = mover_->moved();
  Trace::Lane* here = tracing();
  if (!here) return;
  auto ns = [&](double time) { return traced_from_ + std::int64_t(1e9 * (time - began_)); };
  for (const Mover::Moved& m : moved)
    here->trace()
        .lane(m.out ? "copies out" : "copies in")
        .keep({.name = m.out ? "swap out" : "swap in",
               .kind = "copy",
               .begin = ns(m.begin),
               .end = ns(m.end),
               .bytes = double(m.bytes)});
}

double MemoryPlan::now() const {
  if (mover_) return mover_->now();
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void MemoryPlan::take_time(Tick tick, int id) {
  if (timed_) moments_.push_back({tick, id, clock_ ? double(clock_->mark()) : now()});
}

// Fills in the seconds of each event, stall and recomputation. Waits and recomputations nest within events and within
// each other; the time of an inner one is not counted in the outer one.
void MemoryPlan::read_times() {
  if (clock_) {
    const std::vector<std::int64_t> times = clock_->times([this] { return std::int64_t(1e9 * now()); });
    for (Moment& m : moments_) m.time = 1e-9 * double(times[std::size_t(m.time)]);
  }
  struct Open {
    double began, before;
  };
  std::vector<Open> open;
  std::size_t event = 0;
  double from = 0, within = 0;  // of the innermost: where it began; the seconds of those in it that have ended
  for (const Moment& m : moments_) {
    const double seconds = std::max(0.0, m.time - from - within);
    switch (m.tick) {
      case Tick::waits:
      case Tick::computes:
        open.push_back({from, within});
        from = m.time;
        within = 0;
        continue;
      case Tick::waited: now_.stall += seconds; break;
      case Tick::ended: record_.events[event++].seconds = seconds; break;
      default: break;
    }
    if (m.id >= 0 && saved(m.id).recompute >= 0) saved(m.id).recompute = seconds;
    if (m.tick == Tick::acted) from = m.time, within = 0;
    if (open.empty() || m.tick == Tick::ended || m.tick == Tick::acted) continue;
    within = open.back().before + m.time - from;
    from = open.back().began;
    open.pop_back();
  }
  now_.seconds = moments_.back().time - moments_.front().time;
}

// ---- following the step ---------------------------------------------------------------------------------------------
int MemoryPlan::known(const Tensor& t) const {
  if (!t.defined() || t.storage()->keeper() != this) return -1;
  return t.storage()->kept_as();
}

int MemoryPlan::entry_of(const Tensor& t) {
  if (const int id = known(t); id >= 0 || !t.defined()) return id;
  Storage& s = *t.storage();
  if (s.keeper() || !s.movable() || s.bytes() < options_.smallest || &s.backend() != &backend_) return -1;
  const int id = int(entries_.size());
  entries_.emplace_back().storage = &s;
  record_.saved.push_back({.bytes = s.block_bytes()});
  s.keep(this, id);
  return id;
}

// Updates the event's base: the peak since the last call, less the resident saved tensors. Called before resident_
// changes.
void MemoryPlan::note_base() {
  const std::size_t peak = backend_.memory().peak_since_mark();
  now_.peak = std::max(now_.peak, peak + backend_.memory().peak_of_data());
  base_ = std::max(base_, peak - std::min(peak, resident_));
}

void MemoryPlan::save(const Saved& kept, const Node& node) {
  const int id = entry_of(kept.tensor);
  if (id < 0) return;
  Entry& e = at(id);
  SavedRecord& s = saved(id);
  e.savers.push_back(node.sequence);
  if (e.made && e.made->writes != kept.writes) e.made.reset(), s.recompute = -1;  // written to since it was computed
  if (e.claimed)
    s.free_at = never;  // backward saves it anew: it stays
  else
    s.last_used = event();
  if (s.saved >= 0) return;
  note_base();
  resident_ += s.bytes;
  s.saved = event();
  s.free_at = never;
  held_.push_back(id);
}

void MemoryPlan::recorded(Node& node, std::span<const Variable* const> inputs, const Tensor& y) {
  if (!follows()) return;
  double bytes = double(y.bytes());
  for (const Variable* v : inputs) {
    if (!v->defined()) continue;
    bytes += double(v->value().bytes());
    if (const int id = known(v->value()); id >= 0 && !at(id).claimed) saved(id).last_used = event();
  }
  const std::size_t scratch = borrowed(node, inputs, y);
  for (std::size_t i = 0; i < node.saved.size(); i++) save(node.saved[i], node);
  const int made = remember(node, inputs, y);
  if (made >= 0) {
    saved(made).recompute = 0;
    saved(made).scratch = scratch;
    saved(made).marked = mode().recompute;
  }
  end_event(node, false, node.flops(), bytes, made);
}

void MemoryPlan::output_of_marked(const Tensor& y) {
  if (const int id = follows() ? known(y) : -1; id >= 0) saved(id).marked = false;
}

// Bytes that another run of the operation needs beside inputs and result: its temporary memory at the peak (already
// freed now), and other tensors that its node saved.
std::size_t MemoryPlan::borrowed(const Node& node, std::span<const Variable* const> inputs, const Tensor& y) {
  note_base();
  const MemoryStatistics memory = backend_.memory().statistics();
  const std::size_t live = memory.live_bytes - memory.data();
  std::size_t bytes = base_ - std::min(base_, live - std::min(live, resident_));
  auto holds = [](const Tensor& t, const Storage* s) { return t.defined() && t.storage().pointer() == s; };
  for (std::size_t i = 0; i < node.saved.size(); i++) {
    if (!node.saved[i].tensor.defined()) continue;
    const Storage* s = node.saved[i].tensor.storage().pointer();
    const bool given = holds(y, s) || std::any_of(inputs.begin(), inputs.end(), [&](const Variable* v) {
                         return v->defined() && holds(v->value(), s);
                       });
    if (!given) bytes += s->block_bytes();
  }
  return bytes;
}

// Notes how y can be recomputed. Returns y's number; −1: it cannot be recomputed.
int MemoryPlan::remember(const Node& node, std::span<const Variable* const> inputs, const Tensor& y) {
  const Recomputation* how =
      options_.swap == SwapMode::off || options_.swap == SwapMode::swap ? nullptr : recomputation_of(node);
  if (!how || !y.defined() || y.bytes() != y.storage()->bytes()) return -1;
  // It shares an input's memory
  for (const Variable* v : inputs)
    if (v->defined() && v->value().storage().pointer() == y.storage().pointer()) return -1;
  auto made = std::make_unique<Made>(Made{how, node.attributes(), {}, node.flops(), y.writes().now(), node.where()});
  std::vector<int> entries;
  for (int i : how->inputs) {
    const Variable* v = i < int(inputs.size()) ? inputs[std::size_t(i)] : nullptr;
    if (!add_source(*made, entries, v && v->defined() ? v->value() : Tensor())) return -1;
  }
  for (int i : how->saved)
    if (!add_source(*made, entries, node.saved[i].tensor)) return -1;
  const int id = entry_of(y);
  if (id < 0 || at(id).made) return -1;
  if (std::any_of(entries.begin(), entries.end(), [&](int source) { return source >= id; })) return -1;
  at(id).made = std::move(made);
  saved(id).sources = std::move(entries);
  return id;
}

// Adds t as an input of a recomputation. Parameters and small tensors are held; of other tensors, which must be entries
// of this plan, only a weak reference is. False: t is neither, so the result cannot be recomputed.
bool MemoryPlan::add_source(Made& made, std::vector<int>& entries, const Tensor& t) const {
  Source& source = made.sources.emplace_back();
  if (!t.defined()) return true;
  source.writes = t.writes().now();
  source.entry = known(t);
  if (source.entry >= 0) {
    source.weak = WeakTensor(t);
    entries.push_back(source.entry);
  } else {
    source.held = {t, source.writes};
  }
  return source.entry >= 0 || !t.storage()->movable() || t.storage()->bytes() < options_.smallest;
}

void MemoryPlan::end_event(const Node& node, bool backward, double flops, double bytes, int made) {
  if (mover_) mover_->ran(flops, bytes);
  take_time(Tick::ended, made);
  note_base();
  const int ended = event();
  record_.events.push_back({.base = std::exchange(base_, 0)});
  hashes_.push_back(hash_of(node, backward));
  if (ended == 0)
    if (const auto found = plans_.find(hashes_.back()); found != plans_.end()) plan_ = &found->second;
  on_plan_ = on_plan_ && plan_ && std::size_t(ended) < plan_->hashes.size() &&
             hashes_.back() == plan_->hashes[std::size_t(ended)];
  act(ended);
  requests_ = memory_requests();
  take_time(Tick::acted);
}

void MemoryPlan::before(Node& node) {
  if (!follows()) return;
  for (std::size_t i = 0; i < node.saved.size(); i++) {
    const int id = known(node.saved[i].tensor);
    if (id < 0) continue;
    at(id).pins++;
    if (!std::exchange(at(id).claimed, true)) saved(id).needed = event();
  }
  for (std::size_t i = 0; i < node.saved.size(); i++)
    if (known(node.saved[i].tensor) >= 0) bring_back(*node.saved[i].tensor.storage());
}

void MemoryPlan::after(Node& node) {
  if (!follows()) return;
  double bytes = 0;
  for (std::size_t i = 0; i < node.saved.size(); i++) {
    if (node.saved[i].tensor.defined()) bytes += double(node.saved[i].tensor.bytes());
    const int id = known(node.saved[i].tensor);
    if (id < 0) continue;
    at(id).pins--;
    std::erase(at(id).savers, node.sequence);
  }
  bytes += 2 * double(node.shape.numel()) * double(size_of(node.dtype));
  end_event(node, true, 2 * node.flops(), bytes);
}

void MemoryPlan::gone(Storage& storage) noexcept {
  const int id = storage.kept_as();
  Entry& e = at(id);
  SavedRecord& s = saved(id);
  // Waits for a copy under way
  if (e.at == At::leaving || e.at == At::outside || e.at == At::returning) mover_->forget(e.copy);
  const bool resident = e.at != At::outside && e.at != At::nowhere;
  if (e.at == At::returning)
    storage.give_back(e.block);
  else if (resident)
    storage.leave(Residency::evicted);
  if (s.saved >= 0 && resident) {
    note_base();
    resident_ -= s.bytes;
  }
  s.gone = memory_requests() == requests_ ? event() - 1 : event();
  e.storage = nullptr;
  ended_.push_back(std::move(e.made));
  if (ended_.size() > 1) return;  // within the loop below: a source may end with what was computed from it
  for (std::size_t k = 0; k < ended_.size(); k++) std::unique_ptr<Made>(std::move(ended_[k])).reset();
  ended_.clear();
}

// ---- planning -------------------------------------------------------------------------------------------------------
void MemoryPlan::finish_record() {
  for (SavedRecord& s : record_.saved)
    for (int source : s.sources)
      if (const SavedRecord& from = saved(source); from.gone >= 0 && from.gone < s.needed) s.recompute = -1;
}

MemoryMeans MemoryPlan::means() const {
  MemoryMeans m{.swap = may_swap() && options_.swap != SwapMode::recompute,
                .recompute = options_.swap == SwapMode::automatic || options_.swap == SwapMode::recompute,
                .slowdown = slowdown_};
  if (!mover_) return m;
  const MoverRates r = mover_->rates();
  if (r.out > 0) m.out = r.out;
  if (r.in > 0) m.in = r.in;
  return m;
}

// On a host, copies slow down the computation beside them. Estimates the slowdown per byte, and scales the record to
// computation alone.
void MemoryPlan::part_from_copies() {
  const double seconds = record_.seconds();
  double& alone = plan_->alone;
  if (measured_.swapped == 0) alone = alone > 0 ? std::min(alone, seconds) : seconds;
  if (measured_.swapped == 0 || alone <= 0 || seconds <= alone) return;
  slowdown_ = (seconds - alone) / (2 * double(measured_.swapped));
  for (EventRecord& e : record_.events) e.seconds *= alone / seconds;
  for (SavedRecord& s : record_.saved) s.recompute *= alone / seconds;
}

std::size_t MemoryPlan::room() const {
  const std::size_t others = backend_.memory().peak_of_data() + reserve_;
  return options_.budget - std::min(options_.budget, others);
}

void MemoryPlan::plan_next() {
  if (hashes_.empty()) return;
  Plan& p = plans_[hashes_.front()];
  plan_ = &p;
  reserve_ = std::min(reserve_ + std::exchange(lacking_, 0), options_.budget / 8);
  if (!accepted_) {
    const std::size_t data = backend_.memory().peak_of_data(),
                      least = std::max(outside_, smallest_budget(record_, means()));
    enough_ = std::max(enough_, least);
    if (p.made > 0) least_ = std::max(least_, least);
    accepted_ = steps_ >= 2 * options_.batches;
    if (accepted_ && least_ + data > options_.budget)
      refuse("the memory budget of ", readable_bytes(double(options_.budget)),
             " is too small for this step: the smallest that would do is ",
             readable_bytes(1.005 * double(enough_ + data)),  // never rounded below it
             " (", enough_ + data, " bytes)", broken_.empty() ? "" : "; nothing can be swapped: " + broken_);
  }
  const bool less_room = room() < p.room;
  if (!timed_) {
    p.settled = p.settled && measured_.planned && !less_room;
    return;
  }
  if (less_room) p.made = std::min(p.made, warm_up), p.best_seconds = 0;
  const double took = measured_.seconds;
  if (!measured_.planned)
    p.best_seconds = 0;
  else if (p.best_seconds == 0 || took < p.best_seconds) {
    p.best = p.choice;
    p.best_seconds = took;
  }
  p.settled = false;
  if (measured_.planned && p.made > warm_up) {
    const bool slower = took > 1.15 * p.best_seconds,
               as_predicted = std::abs(took - p.choice.forecast.seconds) <= 0.1 * took;
    p.settled = (p.made > most || as_predicted) && !slower;
    if (p.settled) return;
    if (++p.waited < 1 << std::min(p.made - warm_up, 4)) return;
    p.waited = 0;
    if (p.made > most || as_predicted) return p.made = most + 1, adopt(p.best);
  }
  part_from_copies();
  MemoryMeans m = means();
  if (p.made++ < warm_up && m.recompute) m.swap = false;
  p.room = room();
  MemoryChoice choice = choose_memory(record_, p.room, m, options_.items);
  if (!choice.fits) choice = choose_memory(record_, p.room, means(), options_.items);
  adopt(std::move(choice));
}

// For the steps to come that are as the last one.
void MemoryPlan::adopt(MemoryChoice choice) {
  Plan& p = *plan_;
  p.choice = std::move(choice);
  p.hashes = hashes_;
  p.leave_after.assign(hashes_.size(), {});
  p.fetch_after.assign(hashes_.size(), {});
  const Forecast& f = p.choice.forecast;
  for (std::size_t i = 0; i < p.choice.fates.size(); i++) {
    if (p.choice.fates[i] == Fate::keep) continue;
    p.leave_after[std::size_t(record_.saved[i].last_used)].push_back(int(i));
    if (f.fetch_after[i] >= 0) p.fetch_after[std::size_t(f.fetch_after[i])].push_back(int(i));
  }
  for (std::vector<int>& ids : p.fetch_after)
    std::sort(ids.begin(), ids.end(),
              [&](int a, int b) { return f.read_at[std::size_t(a)] < f.read_at[std::size_t(b)]; });
}

std::string MemoryPlan::report() const {
  char text[512];
  auto bytes = [](std::size_t b) { return readable_bytes(double(b)); };
  std::string line = "memory budget " + bytes(options_.budget);
  if (plan_) {
    const Forecast& f = plan_->choice.forecast;
    std::snprintf(
        text, sizeof text,
        ": of %zu saved tensors %s are swapped and %s computed again; predicted %.3g ms a step, %.3g ms of them "
        "waiting, peak %s",
        record_.saved.size(), bytes(f.swapped).c_str(), bytes(f.recomputed).c_str(), 1e3 * f.seconds, 1e3 * f.stall,
        bytes(f.peak).c_str());
    line += text;
  }
  std::snprintf(text, sizeof text, "; measured %.3g ms, %.3g ms, %s", 1e3 * measured_.seconds, 1e3 * measured_.stall,
                bytes(measured_.peak).c_str());
  line += text;
  if (!measured_.planned)
    line += " (on demand: the step was not the one that was planned)";
  else if (measured_.on_demand)
    line += " (" + counted(measured_.on_demand, "tensor") + " left on demand)";
  if (mover_ && measured_.swapped) line += "; " + mover_->description();
  if (!broken_.empty()) line += "; nothing is swapped any more: " + broken_;
  return line;
}

}  // namespace tandem
