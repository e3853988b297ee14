#include "autograd/memory_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "autograd/variable.h"
#include "core/text.h"
#include "core/backend.h"
#include "core/clock.h"

namespace tandem {
namespace {

constexpr int warm_up = 2;  // steps
constexpr int never = std::numeric_limits<int>::max() / 2;

std::uint64_t hash_of(const Node& node, bool backward) {
  std::uint64_t h = backward ? 0x9e3779b97f4a7c15u : 0x2545f4914f6cdd1du;
  auto mix = [&](std::uint64_t v) { h = (h ^ v) * 0x100000001b3u; };
  for (const char* c = node.op; *c; c++) mix(std::uint64_t(*c));
  mix(std::uint64_t(node.dtype));
  for (std::int64_t size : node.shape) mix(std::uint64_t(size));
  return h;
}

// Nothing that is computed again is recorded, checked or followed.
class Quiet {
 public:
  Quiet() : watcher_(std::exchange(mode().watcher, nullptr)), recorder_(std::exchange(mode().recorder, nullptr)),
            check_(std::exchange(mode().check, false)) {}
  ~Quiet() { mode().watcher = watcher_, mode().recorder = recorder_, mode().check = check_; }
  Quiet(const Quiet&) = delete;

 private:
  TapeWatcher* watcher_;
  Recorder* recorder_;
  bool check_;
  NoGrad no_tape_;
};

}  // namespace

const char* name_of(SwapMode swap) {
  static constexpr const char* names[] = {"off", "auto", "swap", "recompute"};
  return names[static_cast<int>(swap)];
}

// ---- a step ------------------------------------------------------------------------------------------------------------
MemoryPlan::MemoryPlan(Backend& backend, std::unique_ptr<Mover> mover, const MemoryPlanOptions& options)
    : backend_(backend), mover_(std::move(mover)), options_(options), thread_(std::this_thread::get_id()) {
  require(options.budget > 0, "a memory plan needs a budget");
  require(!backend.asynchronous(), "a memory plan moves memory of the host only, and ", backend.name(), " is a device");
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
  entries_.clear(), hashes_.clear(), leaving_.clear(), discarding_.clear(), held_.clear();
  record_ = {};
  now_ = {};
  resident_ = base_ = 0;
  stalled_ = computing_ = 0;
  plan_ = nullptr;
  on_plan_ = true;
  outside_ = std::max(outside_, backend_.memory().peak_since_mark());
  requests_ = backend_.memory().statistics().requests;
  outer_ = std::exchange(mode().watcher, this);
  began_ = last_ = now();
  active_ = true;
}

void MemoryPlan::end() {
  require(active_, "a memory plan's step has ended already");
  note_base();
  record_.events.push_back({now() - last_, base_});  // what ran after the last operation on the tape
  hashes_.push_back(0);
  finish_record();
  now_.seconds = now() - began_;
  now_.planned = plan_ && on_plan_ && hashes_.size() == plan_->hashes.size();
  measured_ = now_;
  steps_++;
  leave();
  plan_next();
}

// What is still away returns: after the step nothing depends on the plan.
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

double MemoryPlan::now() const {
  if (mover_) return mover_->now();
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// ---- following the step --------------------------------------------------------------------------------------------------
int MemoryPlan::known(const Tensor& t) const {
  if (!t.defined() || t.storage()->keeper() != this) return -1;
  return int(t.storage()->kept_as());
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

// The peak since the last call, less the saved tensors that were in memory all the while. Called whenever these change.
void MemoryPlan::note_base() {
  const std::size_t peak = backend_.memory().peak_since_mark();
  now_.peak = std::max(now_.peak, peak);
  base_ = std::max(base_, peak - std::min(peak, resident_));
}

void MemoryPlan::save(const Saved& kept, const Node& node) {
  const int id = entry_of(kept.tensor);
  if (id < 0) return;
  Entry& e = at(id);
  SavedRecord& s = saved(id);
  e.savers.push_back(node.sequence);
  if (e.made && e.made->writes != kept.writes) e.made.reset(), s.recompute = -1;  // written to since it was computed
  if (e.claimed) s.free_at = never;  // backward saves it anew: it stays
  else s.last_used = event();
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
  for (int i = 0; i < node.saved.size(); i++) save(node.saved[i], node);
  const int made = remember(node, inputs, y);
  const double seconds = end_event(node, false, node.flops(), bytes);
  if (made >= 0) saved(made).recompute = seconds;
}

// How y could be computed again. Its number; −1: it cannot.
int MemoryPlan::remember(const Node& node, std::span<const Variable* const> inputs, const Tensor& y) {
  const Recomputation* how = options_.swap == SwapMode::off || options_.swap == SwapMode::swap ? nullptr : recomputation_of(node);
  if (!how || !y.defined() || y.bytes() != y.storage()->bytes()) return -1;
  for (const Variable* v : inputs)
    if (v->defined() && v->value().storage().pointer() == y.storage().pointer()) return -1;  // it shares an input's memory
  auto made = std::make_unique<Made>(Made{how, node.attributes(), {}, y.writes().now(), node.where()});
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
  if (const int n = how->doubles_per_channel)
    saved(id).scratch = std::size_t(n) * CachingAllocator::size_class(8 * std::size_t(y.size(-1)));
  saved(id).sources = std::move(entries);
  return id;
}

// Parameters and what is small are held; of others only the place is remembered, and only of such as this plan knows.
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

double MemoryPlan::end_event(const Node& node, bool backward, double flops, double bytes) {
  if (mover_) mover_->ran(flops, bytes);
  const double seconds = std::max(0.0, now() - last_ - stalled_ - computing_);
  note_base();
  const int ended = event();
  record_.events.push_back({seconds, std::exchange(base_, 0)});
  hashes_.push_back(hash_of(node, backward));
  if (ended == 0)
    if (const auto found = plans_.find(hashes_.back()); found != plans_.end()) plan_ = &found->second;
  on_plan_ = on_plan_ && plan_ && std::size_t(ended) < plan_->hashes.size() && hashes_.back() == plan_->hashes[std::size_t(ended)];
  act(ended);
  requests_ = backend_.memory().statistics().requests;
  stalled_ = computing_ = 0;
  last_ = now();
  return seconds;
}

void MemoryPlan::before(Node& node) {
  if (!follows()) return;
  for (int i = 0; i < node.saved.size(); i++) {
    const int id = known(node.saved[i].tensor);
    if (id < 0) continue;
    at(id).pins++;
    if (!std::exchange(at(id).claimed, true)) saved(id).needed = event();
  }
  for (int i = 0; i < node.saved.size(); i++)
    if (known(node.saved[i].tensor) >= 0) bring_back(*node.saved[i].tensor.storage());
}

void MemoryPlan::after(Node& node) {
  if (!follows()) return;
  double bytes = 0;
  for (int i = 0; i < node.saved.size(); i++) {
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
  const int id = int(storage.kept_as());
  Entry& e = at(id);
  SavedRecord& s = saved(id);
  if (e.at == At::leaving || e.at == At::outside || e.at == At::returning) mover_->forget(e.copy);  // waits for a copy under way
  const bool resident = e.at != At::outside && e.at != At::nowhere;
  if (e.at == At::returning) storage.give_back(e.block);
  else if (resident) storage.leave(Residency::evicted);
  if (s.saved >= 0 && resident) {
    note_base();
    resident_ -= s.bytes;
  }
  s.gone = backend_.memory().statistics().requests == requests_ ? event() - 1 : event();
  e.storage = nullptr;
  ended_.push_back(std::move(e.made));
  if (ended_.size() > 1) return;  // within the loop below: a source may end with what was computed from it
  for (std::size_t k = 0; k < ended_.size(); k++) std::unique_ptr<Made>(std::move(ended_[k])).reset();
  ended_.clear();
}

// ---- moving --------------------------------------------------------------------------------------------------------------
void MemoryPlan::act(int event) {
  std::erase_if(held_, [&](int id) {
    if (!at(id).storage) return true;
    if (!is_free(at(id)) || saved(id).last_used < 0) return false;
    saved(id).free_at = event;
    return true;
  });
  std::erase_if(leaving_, [&](int id) {
    Entry& e = at(id);
    if (!e.storage || e.at != At::leaving) return true;
    if (e.claimed || e.wanted || !is_free(e) || !mover_->done(e.copy)) return false;
    finish_out(id);
    return true;
  });
  if (on_plan_) {
    for (int id : plan_->leave_after[std::size_t(event)]) {
      if (std::size_t(id) >= entries_.size() || !at(id).storage || at(id).at != At::here) continue;
      if (plan_->choice.fates[std::size_t(id)] == Fate::recompute) discarding_.push_back(id);
      else if (may_swap()) start_out(id);
    }
    for (int id : plan_->fetch_after[std::size_t(event)])
      if (std::size_t(id) < entries_.size() && at(id).storage) start_in(id);
  }
  std::erase_if(discarding_, [&](int id) {
    Entry& e = at(id);
    if (!e.storage || e.claimed || e.at != At::here) return true;
    if (!is_free(e)) return false;
    if (may_discard(e)) discard(id);
    return true;
  });
}

void MemoryPlan::start_out(int id) {
  Entry& e = at(id);
  e.writes = e.storage->whole()->now();
  e.copy = mover_->out(e.storage->data(), e.storage->bytes());
  e.at = At::leaving;
  leaving_.push_back(id);
}

// Waits for the copy, and gives the block back. False: it stays, because it could not be copied, or was written to meanwhile.
bool MemoryPlan::finish_out(int id) {
  Entry& e = at(id);
  const std::string error = mover_->wait(e.copy);
  if (!error.empty()) broken_ = error;
  if (!error.empty() || e.storage->whole()->now() != e.writes) {
    mover_->forget(e.copy);
    e.at = At::here;
    return false;
  }
  e.storage->leave(Residency::evicted);
  note_base();
  resident_ -= saved(id).bytes;
  e.at = At::outside;
  now_.swapped += saved(id).bytes;
  return true;
}

// Ahead of its use, where there is room.
void MemoryPlan::start_in(int id) {
  Entry& e = at(id);
  e.wanted = true;
  CachingAllocator& memory = backend_.memory();
  if (e.at != At::outside || memory.statistics().live_bytes + saved(id).bytes > options_.budget) return;
  note_base();
  e.block = e.storage->new_block();
  resident_ += saved(id).bytes;
  mover_->in(e.copy, e.block);
  e.at = At::returning;
}

void MemoryPlan::finish_in(int id) {
  Entry& e = at(id);
  const std::string error = mover_->wait(e.copy);
  if (!error.empty()) {
    e.storage->give_back(std::exchange(e.block, nullptr));
    resident_ -= saved(id).bytes;
    e.at = At::outside;
    fail("a tensor of ", readable_bytes(double(e.storage->bytes())), " that was swapped out cannot be brought back: ", error);
  }
  e.storage->arrive(std::exchange(e.block, nullptr));
  mover_->forget(e.copy);
  e.at = At::here;
}

void MemoryPlan::bring_back(Storage& storage) {
  require(std::this_thread::get_id() == thread_, "a tensor that a memory plan moved away was read on another thread: read it on the "
          "one that trains");
  const int id = int(storage.kept_as());
  Entry& e = at(id);
  if (e.at == At::here || e.at == At::leaving) return;
  if (e.at == At::nowhere) return compute(id);
  const double from = now(), before = stalled_;
  if (e.at == At::outside) {
    note_base();
    e.block = storage.new_block();
    resident_ += saved(id).bytes;
    mover_->in(e.copy, e.block);
    e.at = At::returning;
  }
  finish_in(id);
  const double waited = now() - from - (stalled_ - before);
  stalled_ += waited, now_.stall += waited;
}

// Every source is there when e is read next: a saved one ends with the oldest node that saved it, and nodes run from the youngest.
bool MemoryPlan::may_discard(const Entry& e) const {
  if (!e.made || e.savers.empty()) return false;
  return std::all_of(e.made->sources.begin(), e.made->sources.end(), [&](const Source& s) {
    if (s.entry < 0) return true;
    const Entry& source = entries_[std::size_t(s.entry)];
    return source.storage && !source.savers.empty() && source.savers.front() <= e.savers.back();
  });
}

void MemoryPlan::discard(int id) {
  for (Source& s : at(id).made->sources)  // a branch that backward does not reach may end before
    if (s.entry >= 0) s.held = {s.weak.lock(), s.writes};
  at(id).storage->leave(Residency::discarded);
  note_base();
  resident_ -= saved(id).bytes;
  at(id).at = At::nowhere;
  now_.recomputed += saved(id).bytes;
}

void MemoryPlan::compute(int id) {
  Made& made = *at(id).made;
  const double from = now(), before = stalled_ + computing_;
  Quiet quiet;
  MemoryUse use(Use::activations);
  std::vector<Tensor> sources;
  double bytes = double(saved(id).bytes);
  for (Source& s : made.sources) {
    Tensor t = s.held.tensor;
    if (t.defined()) {
      require(t.writes().now() == s.writes, made.where, " cannot be computed again: what it was computed from was written to");
      if (s.entry >= 0) bring_back(*t.storage());
      bytes += double(t.bytes());
    }
    sources.push_back(std::move(t));
  }
  note_base();
  Tensor y = made.how->compute(made.attributes, sources);
  at(id).storage->adopt(*y.storage());
  for (Source& s : made.sources)
    if (s.entry >= 0) s.held = {};
  sources.clear();
  resident_ += saved(id).bytes;
  at(id).at = At::here;
  if (mover_) mover_->ran(0, bytes);
  const double took = now() - from - (stalled_ + computing_ - before);
  computing_ += took;
  saved(id).recompute = took;
}

// What is needed last of what may leave.
int MemoryPlan::victim() {
  int best = -1;
  std::uint64_t when = std::numeric_limits<std::uint64_t>::max();
  for (int id = 0; id < int(entries_.size()); id++) {
    const Entry& e = at(id);
    if (saved(id).saved < 0 || e.at != At::here || !is_free(e) || !(may_swap() || may_discard(e))) continue;
    const std::uint64_t next = e.savers.empty() ? 0 : e.savers.back();
    if (next < when) when = next, best = id;
  }
  return best;
}

// Bytes that this gave back.
std::size_t MemoryPlan::evict(int id) {
  if (at(id).at == At::here && !may_swap()) {
    discard(id);
    return saved(id).bytes;
  }
  if (at(id).at == At::here) start_out(id);
  return finish_out(id) ? saved(id).bytes : 0;
}

std::size_t MemoryPlan::relieve(std::size_t bytes) {
  if (std::this_thread::get_id() != thread_) return bytes;  // this thread's next request makes room for it
  if (returns_) return bytes;
  if (!active_) return steps_ < warm_up ? bytes : 0;
  const double from = now(), before = stalled_ + computing_;
  std::size_t freed = 0;
  for (std::size_t k = 0; k < leaving_.size() && freed < bytes; k++)  // what is on its way already
    if (const int id = leaving_[k]; at(id).at == At::leaving && is_free(at(id))) freed += evict(id);
  for (int id = 0; freed < bytes && (id = victim()) >= 0; now_.on_demand++) freed += evict(id);
  for (int id = 0; id < int(entries_.size()) && freed < bytes; id++) {  // what came back too early
    if (at(id).at != At::returning || !at(id).storage) continue;
    finish_in(id);
    if (is_free(at(id)) && may_swap()) freed += evict(id), now_.on_demand++;
  }
  const double waited = now() - from - (stalled_ + computing_ - before);
  stalled_ += waited, now_.stall += waited;
  if (freed < bytes && !broken_.empty())
    fail("the memory budget of ", readable_bytes(double(options_.budget)), " cannot be kept: ", broken_, "; nothing is lost. Make room there, "
         "name another folder with --scratch, or choose a larger --memory-budget or --swap recompute");
  // The first steps show what the smallest budget is (backends prepare weights in the first): they may take what they must, and
  // end() refuses.
  return freed < bytes && steps_ < warm_up ? bytes - freed : 0;
}

// ---- planning ------------------------------------------------------------------------------------------------------------
void MemoryPlan::finish_record() {
  for (SavedRecord& s : record_.saved)
    for (int source : s.sources)
      if (const SavedRecord& from = saved(source); from.gone >= 0 && from.gone < s.needed) s.recompute = -1;
}

MemoryMeans MemoryPlan::means() const {
  MemoryMeans m{.swap = may_swap(), .recompute = options_.swap == SwapMode::automatic || options_.swap == SwapMode::recompute};
  if (!mover_) return m;
  const MoverRates r = mover_->rates();
  if (r.out > 0) m.out = r.out;
  if (r.in > 0) m.in = r.in;
  return m;
}

void MemoryPlan::plan_next() {
  if (hashes_.empty()) return;
  Plan& p = plans_[hashes_.front()];
  plan_ = &p;
  if (measured_.planned && p.made > warm_up) return;
  const MemoryMeans m = means();
  if (const std::size_t least = std::max(outside_, smallest_budget(record_, m)); least > options_.budget)
    refuse("the memory budget of ", readable_bytes(double(options_.budget)), " is too small for this step: the smallest that would do is ",
           readable_bytes(double(least)), " (", least, " bytes)");
  p.choice = choose_memory(record_, options_.budget, m);
  p.made++;
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
    std::sort(ids.begin(), ids.end(), [&](int a, int b) { return f.read_at[std::size_t(a)] < f.read_at[std::size_t(b)]; });
}

std::string MemoryPlan::report() const {
  char text[512];
  auto bytes = [](std::size_t b) { return readable_bytes(double(b)); };
  std::string line = "memory budget " + bytes(options_.budget);
  if (plan_) {
    const Forecast& f = plan_->choice.forecast;
    std::snprintf(text, sizeof text, ": of %zu saved tensors %s are swapped and %s computed again; predicted %.3g ms a step, %.3g ms of them "
                  "waiting, peak %s", record_.saved.size(), bytes(f.swapped).c_str(), bytes(f.recomputed).c_str(), 1e3 * f.seconds,
                  1e3 * f.stall, bytes(f.peak).c_str());
    line += text;
  }
  std::snprintf(text, sizeof text, "; measured %.3g ms, %.3g ms, %s", 1e3 * measured_.seconds, 1e3 * measured_.stall,
                bytes(measured_.peak).c_str());
  line += text;
  if (!measured_.planned) line += " (on demand: the step was not the one that was planned)";
  else if (measured_.on_demand) line += " (" + counted(measured_.on_demand, "tensor") + " left on demand)";
  if (mover_ && measured_.swapped) line += "; " + mover_->description();
  if (!broken_.empty()) line += "; nothing is swapped any more: " + broken_;
  return line;
}

}  // namespace tandem
