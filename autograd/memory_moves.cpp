// How the memory plan moves tensors (autograd/memory_plan.h): swapping out and in by the mover, discarding and
// recomputing, and eviction on demand.
#include <algorithm>
#include <cstdio>

#include "autograd/memory_plan.h"
#include "autograd/variable.h"
#include "core/backend.h"
#include "core/text.h"

namespace tandem {
void MemoryPlan::act(int event) {
  std::erase_if(staying_, [&](int id) {
    const Entry& e = at(id);
    if (!e.storage || e.needed_soon) return true;
    const bool free = is_free(id) && saved(id).last_used >= 0;
    if (free) saved(id).free_at = std::min(saved(id).free_at, event);
    const bool planned = on_plan_ && std::size_t(id) < plan_->choice.fates.size();
    const Fate fate = planned ? plan_->choice.fates[std::size_t(id)] : Fate::keep;
    const bool due = fate != Fate::keep && event >= plan_->last_used[std::size_t(id)];
    if (e.at == At::here && due && fate == Fate::swap && may_swap()) start_out(id);
    if (e.at == At::here && due && fate == Fate::recompute && free) discard(id);
    if (e.at == At::leaving && free && !backend_.asynchronous() && mover_->done(e.copy)) finish_out(id);
    return e.at != At::leaving && free && (fate == Fate::keep || due);
  });
  if (!on_plan_) return;
  const std::vector<std::pair<int, int>>& fetches = plan_->fetches;
  while (next_fetch_ < fetches.size() && fetches[next_fetch_].first <= event && start_in(fetches[next_fetch_].second))
    next_fetch_++;
}

// ---- out ------------------------------------------------------------------------------------------------------------
void MemoryPlan::start_out(int id) {
  Entry& e = at(id);
  e.writes = e.storage->whole()->now();
  e.copy = mover_->out(e.storage->data(), e.storage->bytes());
  e.at = At::leaving;
}

// Waits for the copy and frees the block. False: the tensor stays in memory, because the copy failed or the tensor was
// written to during the copy.
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

// ---- in -------------------------------------------------------------------------------------------------------------
// Begins to copy the tensor back before it is used. False: the budget has no room for it yet.
bool MemoryPlan::start_in(int id) {
  if (std::size_t(id) >= entries_.size()) return true;
  at(id).needed_soon = true;
  if (!at(id).storage || at(id).at != At::outside) return true;
  const std::size_t needed = backend_.memory().statistics().live_bytes + saved(id).bytes,
                    over = needed - std::min(needed, options_.budget);
  if (over > 0 && !(backend_.asynchronous() && evict(over, At::leaving, false) >= over)) return false;
  fetch(id);
  return true;
}

void MemoryPlan::fetch(int id) {
  Entry& e = at(id);
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
    fail("a tensor of ", readable_bytes(double(e.storage->bytes())),
         " that was swapped out cannot be brought back: ", error);
  }
  e.storage->arrive(std::exchange(e.block, nullptr));
  mover_->forget(e.copy);
  e.at = At::here;
}

void MemoryPlan::bring_back(Storage& storage) {
  require(std::this_thread::get_id() == thread_,
          "a tensor that a memory plan moved away was read on another thread: read it on the one that trains");
  const int id = storage.kept_as();
  if (at(id).at == At::discarded) return compute(id);
  if (at(id).at != At::outside && at(id).at != At::returning) return;
  const Activity waits(*this, {Doing::wait});
  if (at(id).at == At::outside) fetch(id);
  finish_in(id);
}

// ---- recomputation --------------------------------------------------------------------------------------------------
// Does nothing if the tensor cannot be computed again in this step.
void MemoryPlan::discard(int id) {
  Entry& e = at(id);
  if (!e.rerun) return;
  for (const Source& s : e.rerun->sources)
    if (s.entry >= 0 && !at(s.entry).storage) return;
  for (Source& s : e.rerun->sources)
    if (s.entry >= 0) s.held = {s.weak.lock(), s.held.writes};  // else a branch that backward skips could release it
  e.storage->leave(Residency::discarded);
  note_base();
  resident_ -= saved(id).bytes;
  e.at = At::discarded;
  now_.recomputed += saved(id).bytes;
}

void MemoryPlan::compute(int id) {
  const Activity computes(*this, {Doing::recompute, id});
  Rerun& rerun = *at(id).rerun;
  MemoryUse use(Use::activations);
  double bytes = double(saved(id).bytes);
  std::vector<Tensor> sources;
  for (Source& s : rerun.sources) {
    const Tensor& t = sources.emplace_back(s.held.tensor);
    if (!t.defined()) continue;
    require(t.writes().now() == s.held.writes, rerun.where,
            " cannot be computed again: what it was computed from was written to");
    if (s.entry >= 0) bring_back(*t.storage());
    bytes += double(t.bytes());
  }
  note_base();
  const std::size_t base = base_;
  {
    Mode again;  // without a tape, hooks or checks, as a part of the same module
    again.record = false;
    again.scope = mode().scope;
    const Restored present(mode(), std::move(again));
    at(id).storage->adopt(*rerun.compute(sources).storage());
  }
  note_base();
  base_ = base;  // the temporary memory is not part of the event
  sources.clear();
  for (Source& s : rerun.sources)
    if (s.entry >= 0) s.held = {Tensor(), s.held.writes};
  resident_ += saved(id).bytes;
  at(id).at = At::here;
  if (mover_) mover_->ran(rerun.flops, bytes);
}

// ---- on demand ------------------------------------------------------------------------------------------------------
// Evicts tensors that are in this state, the oldest first: backward needs them last. Returns the bytes freed.
std::size_t MemoryPlan::evict(std::size_t bytes, At from, bool needed_soon_too) {
  std::size_t freed = 0;
  for (int id = 0; id < int(entries_.size()) && freed < bytes; id++) {
    if (saved(id).saved < 0 || at(id).at != from || !is_free(id) || (!needed_soon_too && at(id).needed_soon)) continue;
    if (from != At::leaving && !may_swap()) continue;
    if (from == At::returning) finish_in(id);
    if (from != At::leaving) start_out(id);
    if (finish_out(id)) freed += saved(id).bytes;
    now_.on_demand += from != At::leaving;
  }
  return freed;
}

std::size_t MemoryPlan::relieve(std::size_t bytes) {
  if (std::this_thread::get_id() != thread_) return bytes;  // this thread's next request makes room for it
  if (returns_) return bytes;
  if (!active_) return lacks(bytes);
  const Activity waits(*this, {Doing::wait});
  std::size_t freed = 0;
  for (const At from : {At::leaving, At::here, At::returning})  // at last the tensors that came back too early
    if (freed < bytes) freed += evict(bytes - freed, from);
  if (freed < bytes && !broken_.empty())
    fail(
        "the memory budget of ", readable_bytes(double(options_.budget)), " cannot be kept: ", broken_,
        "; nothing is lost. Make room there, name another folder with --scratch, or choose a larger --memory-budget or "
        "--swap recompute");
  return freed < bytes ? lacks(bytes - freed) : 0;
}

// The first steps determine the smallest budget (backends prepare weights in the first), and end() throws. A later step
// is not stopped when another user of the allocator has taken memory.
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
