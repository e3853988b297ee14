// The arithmetic of the memory plan (autograd/memory_plan.h), without tensors: a record of one iteration, a simulation
// of the iteration for a choice of keep, swap or recompute for each saved tensor, and the choice that fits a memory
// budget in the least time.
//
// An iteration is a sequence of events, in the order in which they ran: the operations of the forward pass, then the
// nodes of the backward pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tandem {

struct EventRecord {
  double seconds = 0;    // of computation
  std::size_t base = 0;  // bytes in use in addition to the saved tensors, at the event's peak
};

// A storage that was saved for backward. Events are given by their number; −1: never.
struct SavedRecord {
  std::size_t bytes = 0;          // of its block
  int saved = -1;                 // it counts as saved after this event; before, it is part of the base
  int last_used = 0;              // the last event that uses it before backward reads it
  int free_at = 0;                // after this event no object besides the tape references it
  int needed = -1;                // the first event that reads it in backward
  int gone = -1;                  // it is destroyed after this event
  double recompute = -1;          // seconds to recompute it; < 0: it cannot be recomputed
  std::size_t scratch = 0;        // bytes of scratch memory that recomputing it takes
  bool marked = false;            // it is recomputed where possible, without a choice
  std::vector<int> sources = {};  // the saved tensors that it is computed from, all with smaller numbers
  bool can_leave() const { return needed > free_at + 1 && needed > last_used + 1; }
};

struct IterationRecord {
  std::vector<EventRecord> events;
  std::vector<SavedRecord> saved;
  double seconds() const;  // of computation, without stalls and recomputation
};

enum class Fate : std::uint8_t { keep, swap, recompute };

// Which fates a program permits. off: the plan only observes; automatic: all.
enum class SwapMode : std::uint8_t { off, automatic, swap, recompute };
const char* name_of(SwapMode swap);  // "auto"

// The permitted choices, and the speed of copies.
struct MemoryMeans {
  bool swap = true, recompute = true;
  double out = 1e9, in = 1e9;  // bytes per second, of copies out and of copies in
  double slowdown = 0;         // seconds that computation takes longer for each byte copied at the same time
};

// The predicted course of one iteration.
struct Forecast {
  double seconds = 0, stall = 0;            // stall: computation waits for a copy
  std::vector<std::size_t> live;            // bytes in use in each event
  std::size_t peak = 0;                     // the largest element of live
  int peak_at = 0;                          // the event with this peak
  std::size_t swapped = 0, recomputed = 0;  // bytes
  std::vector<int> fetch_after;  // per saved tensor: the event after which its copy in begins; −1: when it is read
  std::vector<int> read_at;      // the event that first needs it, also as a source of another tensor
};

// Copies out begin after the last use, in order; where memory is short, computation waits for them. Copies in begin in
// the order in which the tensors are needed, each as soon as every event until the tensor is destroyed has room for it.
Forecast simulate(const IterationRecord& iteration, std::span<const Fate> fates, std::size_t budget,
                  const MemoryMeans& means);

// The 0–1 knapsack problem: which items to take, so that their sizes sum to at most `capacity` and the sum of their
// values is as large as possible. Sizes are counted in units of their common divisor, so the result is exact. Where the
// capacity has more than knapsack_units of these units, sizes are rounded up to a coarser unit.
std::vector<bool> knapsack(std::span<const std::size_t> sizes, std::span<const double> values, std::size_t capacity);
constexpr std::size_t knapsack_units = 4096;
using Knapsack = std::function<std::vector<bool>(std::span<const std::size_t> sizes, std::span<const double> values,
                                                 std::size_t capacity)>;

struct MemoryChoice {
  std::vector<Fate> fates;
  Forecast forecast;
  bool fits = false;  // the forecast's peak is within the budget
};
MemoryChoice choose_memory(const IterationRecord& iteration, std::size_t budget, const MemoryMeans& means,
                           const Knapsack& items = knapsack);

// The smallest budget for which choose_memory() finds a choice that fits.
std::size_t smallest_budget(const IterationRecord& iteration, const MemoryMeans& means);

}  // namespace tandem
