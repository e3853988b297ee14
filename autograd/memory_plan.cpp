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

// ---- a step ---------------------------------------------------------------------------------------------------------
MemoryPlan::MemoryPlan(Backend& backend, std::unique_ptr<Mover> mover, const MemoryPlanOptions& options)
    : backend_(backend), mover_(std::move(mover)), options_(options), clock_(backend.follower()) {
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
  staying_.clear();
  entries_.clear();
  hashes_.clear();
  laps_.clear();
  record_ = {};
  now_ = {};
  resident_ = base_ = 0;
  next_fetch_ = 0;
  plan_ = nullptr;
  on_plan_ = true;
  const bool settled =
      !plans_.empty() && std::all_of(plans_.begin(), plans_.end(), [](auto& p) { return p.second.settled; });
  timed_ = !backend_.recording() && (!settled || tracing() || !backend_.asynchronous());
  if (mover_) mover_->timed(timed_);
  outside_ = std::max(outside_, backend_.memory().peak_since_mark());
  before_event_ = others_live();
  most_before_ = std::max(most_before_, before_event_);
  requests_ = memory_requests();
  outer_ = std::exchange(mode().watcher, this);
  began_ = now();
  if (const Trace::Lane* lane = tracing()) traced_from_ = lane->now();
  doing_ = {};
  turn_to({});
  active_ = true;
}

void MemoryPlan::end() {
  require(active_, "a memory plan's step has ended already");
  note_base();
  turn_to({});
  record_.events.push_back({.base = base_});  // what ran after the last operation on the tape
  hashes_.push_back(0);
  now_.seconds = measured_.seconds;
  now_.stall = measured_.stall;
  if (timed_) read_times();
  for (SavedRecord& s : record_.saved)  // a source that is destroyed before cannot be used
    for (int source : s.sources)
      if (saved(source).gone >= 0 && saved(source).gone < s.needed) s.recompute = -1;
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
      if (e.at == At::leaving) mover_->forget(e.copy);
      bring_back(*e.storage);
    } catch (const std::exception& error) {  // a read of the tensor throws the same error
      std::fprintf(stderr, "a tensor that a step kept could not be brought back: %s\n", error.what());
    }
    e.storage->keep(nullptr, 0);
  }
  mode().watcher = outer_;
  active_ = returns_ = false;
}

// Writes copies to lanes of their own in the trace that this thread writes to.
void MemoryPlan::trace_copies() {
  const std::vector<Mover::Moved> moved = mover_ ? mover_->moved() : std::vector<Mover::Moved>();
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

// ---- times ----------------------------------------------------------------------------------------------------------
double MemoryPlan::now() const {
  return mover_ ? mover_->now() : std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void MemoryPlan::turn_to(const Doing& next) {
  if (timed_) laps_.push_back({doing_, event(), clock_ ? double(clock_->mark()) : now()});
  doing_ = next;
}

// Fills in the seconds of each event, stall and recomputation.
void MemoryPlan::read_times() {
  if (clock_) {
    const std::vector<std::int64_t> times = clock_->times([this] { return std::int64_t(1e9 * now()); });
    for (Lap& l : laps_) l.end = 1e-9 * double(times[std::size_t(l.end)]);
  }
  now_.stall = 0;
  now_.seconds = laps_.back().end - laps_.front().end;
  std::vector<double> again(record_.saved.size());  // of each tensor, the seconds of its recomputation
  for (std::size_t i = 1; i < laps_.size(); i++) {
    const auto& [did, event, end] = laps_[i];
    const double seconds = std::max(0.0, end - laps_[i - 1].end);
    double& sum = did.kind == Doing::event  ? record_.events[std::size_t(event)].seconds
                  : did.kind == Doing::wait ? now_.stall
                                            : again[std::size_t(did.id)];
    sum += seconds;
    if (did.id >= 0 && saved(did.id).recompute >= 0) saved(did.id).recompute = sum;
  }
}

// ---- following the step ---------------------------------------------------------------------------------------------
int MemoryPlan::known(const Tensor& t) const {
  return t.defined() && t.storage()->keeper() == this ? t.storage()->kept_as() : -1;
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
  now_.peak = std::max(now_.peak, peak + backend_.memory().statistics().peak_of_data);
  base_ = std::max(base_, peak - std::min(peak, resident_));
}

std::size_t MemoryPlan::others_live() const {
  const MemoryStatistics memory = backend_.memory().statistics();
  const std::size_t live = memory.live_bytes - memory.data();
  return live - std::min(live, resident_);
}

void MemoryPlan::save(const Saved& kept) {
  const int id = entry_of(kept.tensor);
  if (id < 0) return;
  SavedRecord& s = saved(id);
  if (at(id).rerun && at(id).rerun->writes != kept.writes) {  // written to since it was computed
    at(id).rerun.reset();
    s.recompute = -1;
  }
  if (s.needed >= 0)
    s.free_at = never;  // saved again during backward: it stays
  else
    s.last_used = event();
  if (s.saved >= 0) return;
  note_base();
  resident_ += s.bytes;
  s.saved = event();
  s.free_at = never;
  staying_.push_back(id);
}

void MemoryPlan::recorded(Node& node, Operands inputs, const Tensor& y) {
  if (!follows()) return;
  double bytes = double(y.bytes());
  for (const Variable* v : inputs) {
    if (!v->defined()) continue;
    bytes += double(v->value().bytes());
    if (const int id = known(v->value()); id >= 0 && saved(id).needed < 0) saved(id).last_used = event();
  }
  note_base();  // scratch: the bytes that the operation took besides its output; recomputing it takes them again
  const std::size_t others = before_event_ + y.storage()->block_bytes(), scratch = base_ - std::min(base_, others);
  for (std::size_t i = 0; i < node.saved.size(); i++) save(node.saved[i]);
  const int id = remember(node, inputs, y);
  if (id >= 0) saved(id).scratch = scratch;
  end_event(node, false, node.flops(), bytes, id);
}

void MemoryPlan::output_of_marked(const Tensor& y) {
  if (const int id = follows() ? known(y) : -1; id >= 0) saved(id).marked = false;
}

// Records how y can be computed again. Sources that are parameters or small are held. Other sources must be entries of
// this plan, and get only a weak reference. Returns y's number; −1: y cannot be computed again.
int MemoryPlan::remember(const Node& node, Operands inputs, const Tensor& y) {
  if (options_.swap == SwapMode::off || options_.swap == SwapMode::swap) return -1;
  Recomputation how = node.recompute(inputs);
  if (!how.compute || y.bytes() != y.storage()->bytes()) return -1;
  auto rerun = std::make_unique<Rerun>(Rerun{std::move(how.compute), {}, node.flops(), y.writes().now(), node.where()});
  std::vector<int> entries;
  for (Tensor& t : how.sources) {
    Source& source = rerun->sources.emplace_back();
    source.entry = known(t);
    source.held.writes = t.defined() ? t.writes().now() : 0;
    if (source.entry >= 0) {
      source.weak = WeakTensor(t);
      entries.push_back(source.entry);
    } else {
      if (t.defined() && t.storage()->movable() && t.storage()->bytes() >= options_.smallest) return -1;
      source.held = {std::move(t), source.held.writes};
    }
  }
  const int id = entry_of(y);
  if (id < 0 || at(id).rerun) return -1;
  if (std::any_of(entries.begin(), entries.end(), [&](int source) { return source >= id; })) return -1;
  at(id).rerun = std::move(rerun);
  SavedRecord& s = saved(id);
  s.recompute = 0;
  s.sources = std::move(entries);
  s.marked = mode().recompute;
  return id;
}

void MemoryPlan::end_event(const Node& node, bool backward, double flops, double bytes, int computed) {
  if (mover_) mover_->ran(flops, bytes);
  doing_.id = computed;
  turn_to({});
  note_base();
  const int ended = event();
  record_.events.push_back({.base = std::exchange(base_, 0)});
  hashes_.push_back(hash_of(node, backward));
  if (ended == 0)
    if (const auto found = plans_.find(hashes_.back()); found != plans_.end()) plan_ = &found->second;
  on_plan_ = on_plan_ && plan_ && std::size_t(ended) < plan_->hashes.size() &&
             hashes_.back() == plan_->hashes[std::size_t(ended)];
  act(ended);
  before_event_ = others_live();
  requests_ = memory_requests();
}

void MemoryPlan::before(Node& node) {
  if (!follows()) return;
  for (std::size_t i = 0; i < node.saved.size(); i++) {
    const int id = known(node.saved[i].tensor);
    if (id < 0) continue;
    at(id).pins++;
    at(id).needed_soon = true;
    if (saved(id).needed < 0) saved(id).needed = event();
  }
  for (std::size_t i = 0; i < node.saved.size(); i++)
    if (known(node.saved[i].tensor) >= 0) bring_back(*node.saved[i].tensor.storage());
}

void MemoryPlan::after(Node& node) {
  if (!follows()) return;
  double bytes = 2 * double(node.shape.numel()) * double(size_of(node.dtype));
  for (std::size_t i = 0; i < node.saved.size(); i++) {
    if (node.saved[i].tensor.defined()) bytes += double(node.saved[i].tensor.bytes());
    if (const int id = known(node.saved[i].tensor); id >= 0) at(id).pins--;
  }
  end_event(node, true, 2 * node.flops(), bytes);
}

void MemoryPlan::gone(Storage& storage) noexcept {
  const int id = storage.kept_as();
  Entry& e = at(id);
  // Waits for a copy in progress
  if (e.at == At::leaving || e.at == At::outside || e.at == At::returning) mover_->forget(e.copy);
  const bool resident = e.at != At::outside && e.at != At::discarded;
  if (e.at == At::returning)
    storage.give_back(e.block);
  else if (resident)
    storage.leave(Residency::evicted);
  if (saved(id).saved >= 0 && resident) {
    note_base();
    resident_ -= saved(id).bytes;
  }
  saved(id).gone = memory_requests() == requests_ ? event() - 1 : event();
  e.storage = nullptr;
  ended_.push_back(std::move(e.rerun));
  if (ended_.size() > 1) return;  // called from the loop below: a Rerun may hold the last reference to a source
  for (std::size_t k = 0; k < ended_.size(); k++) std::unique_ptr<Rerun>(std::move(ended_[k])).reset();
  ended_.clear();
}

// ---- planning -------------------------------------------------------------------------------------------------------
MemoryMeans MemoryPlan::means() const {
  MemoryMeans m{.swap = may_swap() && options_.swap != SwapMode::recompute,
                .recompute = options_.swap == SwapMode::automatic || options_.swap == SwapMode::recompute,
                .slowdown = slowdown_};
  const MoverRates r = mover_ ? mover_->rates() : MoverRates();
  if (r.out > 0) m.out = r.out;
  if (r.in > 0) m.in = r.in;
  return m;
}

// On a host, copies slow down the computation beside them. Estimates the slowdown per byte, and scales the record to
// computation alone.
void MemoryPlan::separate_copies() {
  const double seconds = record_.seconds();
  double& alone = plan_->alone;
  if (measured_.swapped == 0) alone = alone > 0 ? std::min(alone, seconds) : seconds;
  if (measured_.swapped == 0 || alone <= 0 || seconds <= alone) return;
  slowdown_ = (seconds - alone) / (2 * double(measured_.swapped));
  for (EventRecord& e : record_.events) e.seconds *= alone / seconds;
  for (SavedRecord& s : record_.saved) s.recompute *= alone / seconds;
}

std::size_t MemoryPlan::room() const {
  return options_.budget - std::min(options_.budget, backend_.memory().statistics().peak_of_data + reserve_);
}

// After the first steps: throws UsageError if the budget is too small.
void MemoryPlan::check_budget(bool first) {
  if (accepted_) return;
  const std::size_t data = backend_.memory().statistics().peak_of_data, step = smallest_budget(record_, means());
  most_in_ = std::max(most_in_, step - std::min(step, most_before_));
  const std::size_t enough = std::max(outside_, most_before_ + most_in_);
  if (!first) least_ = std::max({least_, outside_, step});
  accepted_ = steps_ >= 2 * options_.batches;
  if (accepted_ && least_ + data > options_.budget)
    refuse("the memory budget of ", readable_bytes(double(options_.budget)),
           " is too small for this step: the smallest that would do is ", enough + data, " bytes",
           broken_.empty() ? "" : "; nothing can be swapped: " + broken_);
}

// A plan is settled when steps take the time that it predicts, and no earlier choice was faster. After the first three
// plans, a new one is made only after 2 steps that differ from the forecast, later after 4, 8 and at most 16.
void MemoryPlan::plan_next() {
  Plan& p = plans_[hashes_.front()];
  plan_ = &p;
  reserve_ = std::min(reserve_ + std::exchange(lacking_, 0), options_.budget / 8);
  check_budget(p.times == 0);
  const bool less_room = room() < p.room;
  if (!timed_) {
    p.settled = p.settled && measured_.planned && !less_room;
    return;
  }
  if (less_room) p.times = std::min(p.times, warm_up);
  if (less_room || !measured_.planned) p.best_seconds = 0;
  const double took = measured_.seconds;
  if (measured_.planned && (p.best_seconds == 0 || took < p.best_seconds)) {
    p.best = p.choice;
    p.best_seconds = took;
  }
  p.settled = false;
  if (measured_.planned && p.times > warm_up) {
    const bool as_predicted = p.times > most || std::abs(took - p.choice.forecast.seconds) <= 0.1 * took;
    p.settled = as_predicted && took <= 1.15 * p.best_seconds;
    if (p.settled || ++p.differed < 1 << std::min(p.times - warm_up, 4)) return;
    p.differed = 0;
    if (as_predicted) {
      p.times = most + 1;
      return adopt(p.best);
    }
  }
  separate_copies();
  MemoryMeans m = means();
  if (p.times++ < warm_up && m.recompute) m.swap = false;
  p.room = room();
  MemoryChoice choice = choose_memory(record_, p.room, m, options_.items);
  if (!choice.fits) choice = choose_memory(record_, p.room, means(), options_.items);
  adopt(std::move(choice));
}

// Makes this the choice for the next steps that are like the last one.
void MemoryPlan::adopt(MemoryChoice choice) {
  Plan& p = *plan_;
  p.choice = std::move(choice);
  p.choice.fates.resize(record_.saved.size(), Fate::keep);
  p.hashes = hashes_;
  p.last_used.clear();
  p.fetches.clear();
  for (const SavedRecord& r : record_.saved) p.last_used.push_back(r.last_used);
  const Forecast& f = p.choice.forecast;
  for (std::size_t i = 0; i < f.fetch_after.size(); i++)
    if (f.fetch_after[i] >= 0) p.fetches.emplace_back(f.fetch_after[i], int(i));
  std::sort(p.fetches.begin(), p.fetches.end(), [&](auto& a, auto& b) {
    return std::pair(a.first, f.read_at[std::size_t(a.second)]) < std::pair(b.first, f.read_at[std::size_t(b.second)]);
  });
}

std::string MemoryPlan::report() const {
  auto bytes = [](std::size_t b) { return readable_bytes(double(b)); };
  std::string line = "memory budget " + bytes(options_.budget);
  if (plan_) {
    const Forecast& f = plan_->choice.forecast;
    line += printed(
        ": of %zu saved tensors %s are swapped and %s computed again; predicted %.3g ms a step, %.3g ms of them "
        "waiting, peak %s",
        record_.saved.size(), bytes(f.swapped).c_str(), bytes(f.recomputed).c_str(), 1e3 * f.seconds, 1e3 * f.stall,
        bytes(f.peak).c_str());
  }
  line += printed("; measured %.3g ms, %.3g ms, %s", 1e3 * measured_.seconds, 1e3 * measured_.stall,
                  bytes(measured_.peak).c_str());
  if (!measured_.planned)
    line += " (on demand: the step was not the one that was planned)";
  else if (measured_.on_demand)
    line += " (" + counted(measured_.on_demand, "tensor") + " left on demand)";
  if (mover_ && measured_.swapped) line += "; " + mover_->description();
  if (!broken_.empty()) line += "; nothing is swapped any more: " + broken_;
  return line;
}

}  // namespace tandem
