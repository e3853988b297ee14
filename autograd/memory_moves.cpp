// How the memory plan moves tensors (autograd/memory_plan.h): swapping out and in by the mover, discarding and
// recomputing, and eviction on demand.
#include <algorithm>
#include <cstdio>
#include <limits>

#include "autograd/memory_plan.h"
#include "autograd/variable.h"
#include "core/backend.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr int deepest = 16;  // the longest chain of recomputations that eviction on demand makes

// While it lives, operations are not recorded on the tape or by a recorder, not checked, and not followed by the plan.
class Quiet {
 public:
  Quiet()
      : watcher_(std::exchange(mode().watcher, nullptr)),
        recorder_(std::exchange(mode().recorder, nullptr)),
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
    if (e.claimed || e.wanted || !is_free(e) || backend_.asynchronous() || !mover_->done(e.copy)) return false;
    finish_out(id);
    return true;
  });
  if (on_plan_) {
    for (int id : plan_->leave_after[std::size_t(event)]) {
      if (std::size_t(id) >= entries_.size() || !at(id).storage || at(id).at != At::here) continue;
      if (plan_->choice.fates[std::size_t(id)] == Fate::recompute)
        discarding_.push_back(id);
      else if (may_swap())
        start_out(id);
    }
    for (int id : plan_->fetch_after[std::size_t(event)])
      if (std::size_t(id) < entries_.size()) returning_.push_back(id);
  }
  while (!returning_.empty() && start_in(returning_.front())) returning_.pop_front();
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

// Waits for the copy and frees the block. False: the tensor stays in memory, because the copy failed or the tensor was
// written to meanwhile.
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

// Begins to copy the tensor back before it is used. False: the budget has no room for it yet.
bool MemoryPlan::start_in(int id) {
  Entry& e = at(id);
  e.wanted = true;
  if (!e.storage || e.at != At::outside) return true;
  const std::size_t needed = backend_.memory().statistics().live_bytes + saved(id).bytes,
                    over = needed - std::min(needed, options_.budget);
  if (over > 0 && !(backend_.asynchronous() && finish_leaving(over, false) >= over)) return false;
  note_base();
  e.block = e.storage->new_block();
  resident_ += saved(id).bytes;
  mover_->in(e.copy, e.block);
  e.at = At::returning;
  return true;
}

void MemoryPlan::finish_in(int id) {
  Entry& e = at(id);
  const std::string error = mover_->wait(e.copy);
  if (!error.empty()) {
    e.storage->give_back(std::exchange(e.block, nullptr));
    resident_ -= saved(id).bytes;
    e.at = At::outside;
    fail("a tensor of ", readable_bytes(double(e.storage->bytes())),
         " that was swapped out cannot be brought back: ", error);
  }
  e.storage->arrive(std::exchange(e.block, nullptr));
  mover_->forget(e.copy);
  e.at = At::here;
}

void MemoryPlan::bring_back(Storage& storage) {
  require(std::this_thread::get_id() == thread_,
          "a tensor that a memory plan moved away was read on another thread: read it on the "
          "one that trains");
  const int id = storage.kept_as();
  Entry& e = at(id);
  if (e.at == At::here || e.at == At::leaving) return;
  if (e.at == At::nowhere) return compute(id);
  const Timing waits(*this, Tick::waits, Tick::waited);
  if (e.at == At::outside) {
    note_base();
    e.block = storage.new_block();
    resident_ += saved(id).bytes;
    mover_->in(e.copy, e.block);
    e.at = At::returning;
  }
  finish_in(id);
}

// True: every input of e's recomputation exists when e is read next. Backward runs from the youngest node to the
// oldest, and a saved tensor lives until the backward of the oldest node that saved it.
bool MemoryPlan::may_discard(const Entry& e) const {
  if (!e.made || e.savers.empty()) return false;
  return std::all_of(e.made->sources.begin(), e.made->sources.end(), [&](const Source& s) {
    if (s.entry < 0) return true;
    const Entry& source = entries_[std::size_t(s.entry)];
    return source.storage && !source.savers.empty() && source.savers.front() <= e.savers.back();
  });
}

void MemoryPlan::discard(int id) {
  at(id).depth = 1;
  for (Source& s : at(id).made->sources) {
    if (s.entry < 0) continue;
    s.held = {s.weak.lock(), s.writes};  // a branch that backward does not reach may end before
    if (at(s.entry).at == At::nowhere) at(id).depth = std::max(at(id).depth, at(s.entry).depth + 1);
  }
  at(id).storage->leave(Residency::discarded);
  note_base();
  resident_ -= saved(id).bytes;
  at(id).at = At::nowhere;
  now_.recomputed += saved(id).bytes;
}

void MemoryPlan::compute(int id) {
  Made& made = *at(id).made;
  const Timing computes(*this, Tick::computes, Tick::computed, id);
  Quiet quiet;
  MemoryUse use(Use::activations);
  std::vector<Tensor> sources;
  double bytes = double(saved(id).bytes);
  for (Source& s : made.sources) {
    Tensor t = s.held.tensor;
    if (t.defined()) {
      require(t.writes().now() == s.writes, made.where,
              " cannot be computed again: what it was computed from was written to");
      if (s.entry >= 0) bring_back(*t.storage());
      bytes += double(t.bytes());
    }
    sources.push_back(std::move(t));
  }
  note_base();
  const std::size_t base = base_;
  Tensor y = made.how->compute(made.attributes, sources);
  note_base();
  base_ = base;  // what was borrowed is not of the event
  at(id).storage->adopt(*y.storage());
  for (Source& s : made.sources)
    if (s.entry >= 0) s.held = {};
  sources.clear();
  resident_ += saved(id).bytes;
  at(id).at = At::here;
  if (mover_) mover_->ran(made.flops, bytes);
}

// Waits for copies out, the oldest first, until `bytes` bytes are free. Returns the bytes freed.
std::size_t MemoryPlan::finish_leaving(std::size_t bytes, bool wanted_too) {
  std::size_t freed = 0;
  for (std::size_t k = 0; k < leaving_.size() && freed < bytes; k++) {
    const Entry& e = at(leaving_[k]);
    if (e.at != At::leaving || !is_free(e) || (!wanted_too && (e.claimed || e.wanted))) continue;
    if (finish_out(leaving_[k])) freed += saved(leaving_[k]).bytes;
  }
  return freed;
}

// The tensor to evict: of those that may leave, the one whose backward is furthest away. −1: none.
int MemoryPlan::victim() {
  int best = -1;
  std::uint64_t when = std::numeric_limits<std::uint64_t>::max();
  auto deep = [&](const Entry& e) {
    return std::any_of(e.made->sources.begin(), e.made->sources.end(), [&](const Source& s) {
      return s.entry >= 0 && at(s.entry).at == At::nowhere && at(s.entry).depth >= deepest;
    });
  };
  for (int id = 0; id < int(entries_.size()); id++) {
    const Entry& e = at(id);
    if (saved(id).saved < 0 || e.at != At::here || !is_free(e) || !(may_swap() || (may_discard(e) && !deep(e))))
      continue;
    const std::uint64_t next = e.savers.empty() ? 0 : e.savers.back();
    if (next < when) when = next, best = id;
  }
  return best;
}

// Returns the bytes freed.
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
  if (!active_) return lacks(bytes);
  const Timing waits(*this, Tick::waits, Tick::waited);
  std::size_t freed = finish_leaving(bytes, true);  // what is on its way already
  for (int id = 0; freed < bytes && (id = victim()) >= 0; now_.on_demand++) freed += evict(id);
  for (int id = 0; id < int(entries_.size()) && freed < bytes; id++) {  // what came back too early
    if (at(id).at != At::returning || !at(id).storage) continue;
    finish_in(id);
    if (is_free(at(id)) && may_swap()) freed += evict(id), now_.on_demand++;
  }
  if (freed < bytes && !broken_.empty())
    fail("the memory budget of ", readable_bytes(double(options_.budget)), " cannot be kept: ", broken_,
         "; nothing is lost. Make room there, "
         "name another folder with --scratch, or choose a larger --memory-budget or --swap recompute");
  return freed < bytes ? lacks(bytes - freed) : 0;
}

// The first steps show what the smallest budget is (backends prepare weights in the first), and end() refuses. A later
// one is not ended by what others have taken meanwhile.
std::size_t MemoryPlan::lacks(std::size_t bytes) {
  if (!accepted_) return bytes;
  if (!std::exchange(warned_, true))
    std::fprintf(stderr, "warning: the memory budget of %s is passed by %s %s\n",
                 readable_bytes(double(options_.budget)).c_str(), readable_bytes(double(bytes)).c_str(),
                 active_ ? "in a step, since nothing could leave; later steps keep as much free" : "between two steps");
  if (active_) lacking_ = std::max(lacking_, bytes);
  return bytes;
}

}  // namespace tandem
