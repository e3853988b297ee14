// The arithmetic of the memory plan (autograd/memory_plan.h), apart from tensors: what one iteration did, a simulation
// of it for a choice of keep, swap or recompute for each saved tensor, and the choice that fits a budget at the least
// time.
//
// An iteration is a row of events: operations forward, nodes backward, in the order in which they ran.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tandem {

struct EventRecord {
  double seconds = 0;    // of computation
  std::size_t base = 0;  // bytes in use beside the saved tensors, at the event's peak
};

// A storage that was saved for backward. Events by their number; −1: never.
struct SavedRecord {
  std::size_t bytes = 0;          // of its block
  int saved = -1;                 // it counts as saved after this event, before that it belongs to the base
  int last_used = 0;              // the last one before backward reads it
  int free_at = 0;                // after this one nobody but the tape holds it
  int needed = -1;                // the first one that reads it in backward
  int gone = -1;                  // it ends after this one
  double recompute = -1;          // seconds; < 0: it cannot be computed again
  std::size_t scratch = 0;        // bytes that computing it again borrows
  bool marked = false;            // it is computed again where it can be, not chosen
  std::vector<int> sources = {};  // the saved tensors that it is computed from, all with smaller numbers
  bool can_leave() const { return needed > free_at + 1 && needed > last_used + 1; }
};

struct IterationRecord {
  std::vector<EventRecord> events;
  std::vector<SavedRecord> saved;
  double seconds() const;  // of computation, without stalls and recomputation
};

enum class Fate : std::uint8_t { keep, swap, recompute };

// What may be chosen from, and how fast copies are.
struct MemoryMeans {
  bool swap = true, recompute = true;
  double out = 1e9, in = 1e9;  // bytes per second, of the two lanes
  double slowdown = 0;         // seconds that computation takes longer for each byte copied beside it
};

// One iteration as it would go.
struct Forecast {
  double seconds = 0, stall = 0, recomputing = 0;  // stall: computation waits for a copy
  std::vector<std::size_t> live;                   // bytes in use in each event
  std::size_t peak = 0;                            // the most of them
  int peak_at = 0;                                 // the event
  std::size_t swapped = 0, recomputed = 0;         // bytes
  std::vector<int> fetch_after;  // of each saved tensor: the event after which its return begins; −1: when it is read
  std::vector<int> read_at;      // when it is needed, as a source of another too
};

// Copies out begin after the last use, in order; where memory is short, computation waits for them. Copies in begin as
// early as there is room until they are read, in the order of need.
Forecast simulate(const IterationRecord& iteration, std::span<const Fate> fates, std::size_t budget,
                  const MemoryMeans& means);

// The 0–1 knapsack: which items to take, so that their sizes sum to at most `capacity` and their values to the most.
// Counts in units of the sizes' common divisor, so it is exact; where the capacity has more than knapsack_units of
// them, sizes are rounded up to a coarser one.
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

// The least budget with which choose_memory() finds a choice that fits.
std::size_t smallest_budget(const IterationRecord& iteration, const MemoryMeans& means);

}  // namespace tandem
