#include "autograd/memory_choice.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

std::size_t at(int i) { return std::size_t(i); }

// ---- one iteration, simulated ---------------------------------------------------------------------------------------
class Simulation {
 public:
  Simulation(const IterationRecord& iteration, std::span<const Fate> fates, std::size_t budget,
             const MemoryMeans& means)
      : it_(iteration), fates_(fates), budget_(budget), means_(means) {
    result_.fetch_after.assign(fates.size(), -1);
    for (const SavedRecord& s : it_.saved) result_.read_at.push_back(s.needed);
    std::vector<std::size_t> scratch(at(events_));
    for (int i = int(fates.size()) - 1; i >= 0; i--)
      place(i, scratch);  // tensors that are recomputed from a tensor have larger numbers
    std::partial_sum(load_.begin(), load_.end(), load_.begin());
    for (int e = 0; e < events_; e++) load_[at(e)] += it_.events[at(e)].base + scratch[at(e)];
    std::stable_sort(fetches_.begin(), fetches_.end(), [&](int a, int b) { return read_at(a) < read_at(b); });
  }

  Forecast run() {
    for (int event = 0; event < events_; event++) {
      for (auto i = reads_[at(event)].rbegin(); i != reads_[at(event)].rend(); ++i) read(*i, event);  // sources first
      make_room(event);
      result_.live.push_back(load_[at(event)] + staying_);
      result_.seconds += it_.events[at(event)].seconds;
      after(event);
    }
    const auto fullest = std::max_element(result_.live.begin(), result_.live.end());
    result_.peak = fullest == result_.live.end() ? 0 : *fullest;
    result_.peak_at = int(fullest - result_.live.begin());
    return std::move(result_);
  }

 private:
  enum class State : std::uint8_t { here, leaving, outside, back };

  const SavedRecord& saved(int i) const { return it_.saved[at(i)]; }
  int read_at(int i) const { return result_.read_at[at(i)]; }
  int end_of(int i) const { return saved(i).gone < 0 ? events_ - 1 : saved(i).gone; }

  // Adds the memory use of tensor i that is known in advance; for a swapped tensor it depends on times. During these
  // calls load_ holds the differences between one event and the next.
  void place(int i, std::vector<std::size_t>& scratch) {
    const SavedRecord& s = saved(i);
    auto stays = [&](int from, int to) {
      if (from > to) return;
      load_[at(from)] += s.bytes;
      load_[at(to + 1)] -= s.bytes;
    };
    if (s.saved < 0) return;
    if (fates_[at(i)] == Fate::keep) return stays(s.saved + 1, end_of(i));
    const int read = read_at(i);
    reads_[at(read)].push_back(i);
    if (fates_[at(i)] == Fate::recompute) {
      result_.recomputed += s.bytes;
      for (int source : s.sources) result_.read_at[at(source)] = std::min(read_at(source), read);
      stays(s.saved + 1, std::max(s.free_at, s.last_used));
      stays(read, end_of(i));
      scratch[at(read)] = std::max(scratch[at(read)], s.scratch);
    } else {
      result_.swapped += s.bytes;
      fetches_.push_back(i);
      saved_after_[at(s.saved)].push_back(i);
      leave_after_[at(s.last_used)].push_back(i);
      turn_ = std::max(turn_, s.last_used);
    }
  }

  void read(int i, int event) {
    if (fates_[at(i)] == Fate::recompute) {
      result_.seconds += saved(i).recompute;
    } else if (state_[at(i)] == State::here || state_[at(i)] == State::leaving) {  // it never left
      staying_ -= saved(i).bytes;
      hold(i, event);
    } else {
      if (state_[at(i)] == State::outside) fetch(i, event);
      wait_until(arrives_[at(i)]);
    }
  }

  void hold(int i, int from) {  // in memory from this event on
    for (int e = from; e <= end_of(i); e++) load_[at(e)] += saved(i).bytes;
    state_[at(i)] = State::back;
  }

  void wait_until(double time) {
    const double wait = std::max(0.0, time - result_.seconds);
    result_.stall += wait;
    result_.seconds += wait;
  }

  // Occupies a lane from now on, or from when it is free. Returns the time at which the copy is done.
  double copy(int i, double& lane, double rate) {
    lane = std::max(lane, result_.seconds) + double(saved(i).bytes) / rate;
    result_.seconds += means_.slowdown * double(saved(i).bytes);
    return lane;
  }

  void fetch(int i, int from) {
    hold(i, from);
    arrives_[at(i)] = copy(i, in_free_, means_.in);
  }

  void leave(int i) {
    staying_ -= saved(i).bytes;
    state_[at(i)] = State::outside;
  }

  // Computation waits for copies out if the event does not fit into memory together with the tensors that are being
  // copied.
  void make_room(int event) {
    for (const auto& [time, i] : outs_) {
      if (load_[at(event)] + staying_ <= budget_) return;
      if (state_[at(i)] != State::leaving || saved(i).free_at >= event) continue;
      wait_until(time);
      leave(i);
    }
  }

  void after(int event) {
    for (int i : saved_after_[at(event)]) staying_ += saved(i).bytes;
    for (int i : leave_after_[at(event)]) {
      state_[at(i)] = State::leaving;
      outs_.emplace_back(copy(i, out_free_, means_.out), i);
    }
    std::erase_if(outs_, [&](const auto& out) {
      const auto [time, i] = out;
      if (state_[at(i)] != State::leaving) return true;
      if (time > result_.seconds || saved(i).free_at > event) return false;
      leave(i);
      return true;
    });
    if (event >= turn_) fetch_ahead(event);
  }

  void fetch_ahead(int event) {
    for (; next_fetch_ < fetches_.size(); next_fetch_++) {
      const int i = fetches_[next_fetch_];
      if (state_[at(i)] == State::back || read_at(i) <= event) continue;
      if (state_[at(i)] != State::outside) return;
      for (int e = event + 1; e <= end_of(i); e++)
        if (load_[at(e)] + staying_ + saved(i).bytes > budget_) return;
      result_.fetch_after[at(i)] = event;
      fetch(i, event + 1);
    }
  }

  const IterationRecord& it_;
  const std::span<const Fate> fates_;
  const std::size_t budget_;
  const MemoryMeans means_;
  const int events_ = int(it_.events.size());
  std::vector<std::size_t> load_ = std::vector<std::size_t>(at(events_ + 1));  // bytes of each event, without staying_
  std::size_t staying_ = 0;  // bytes of swapped tensors that have not left yet
  std::vector<State> state_ = std::vector<State>(fates_.size());
  std::vector<double> arrives_ = std::vector<double>(fates_.size());
  using ByEvent = std::vector<std::vector<int>>;  // tensors
  ByEvent saved_after_ = ByEvent(at(events_)), leave_after_ = saved_after_, reads_ = saved_after_;
  std::vector<int> fetches_;                  // the tensors that are swapped, by first read
  std::vector<std::pair<double, int>> outs_;  // (time at which it is done, tensor) of each copy out
  std::size_t next_fetch_ = 0;
  int turn_ = 0;  // the event after which the last copy out begins; no copy in begins before
  double out_free_ = 0, in_free_ = 0;
  Forecast result_;  // seconds: the time so far
};

// ---- the choice -----------------------------------------------------------------------------------------------------
using Fates = std::vector<Fate>;

// Recomputation in parts. The operations are cut into `parts` of similar size, each cut where the fewest bytes cross
// it. The tensors that cross a cut are kept, and all others are recomputed from them, part by part (Chen et al. 2016,
// Training deep nets with sublinear memory cost).
Fates cut_in_parts(const IterationRecord& it, std::size_t parts) {
  const std::size_t n = it.saved.size();
  // Last reader of each; bytes across the cut before each; bytes of the tensors before each
  std::vector<std::size_t> last(n), crossing(n + 2), before(n + 1);
  Fates fates(n, Fate::keep);
  for (std::size_t i = 0; i < n; i++) {
    const SavedRecord& s = it.saved[i];
    if (s.recompute < 0) continue;
    for (int source : s.sources) last[at(source)] = i;
    if (s.saved >= 0 && s.can_leave()) fates[i] = Fate::recompute;
  }
  for (std::size_t i = 0; i < n; i++) {
    before[i + 1] = before[i] + it.saved[i].bytes;
    if (last[i] <= i) continue;
    crossing[i + 1] += it.saved[i].bytes;
    crossing[last[i] + 1] -= it.saved[i].bytes;
  }
  std::partial_sum(crossing.begin(), crossing.end(), crossing.begin());
  for (std::size_t k = 1; k < parts; k++) {
    const std::size_t size = before[n] / parts, middle = k * size;
    std::size_t cut = 0, least = std::size_t(-1);
    for (std::size_t p = 1; p < n; p++)
      if (before[p] + size / 2 >= middle && before[p] <= middle + size / 2 && crossing[p] < least) {
        cut = p;
        least = crossing[p];
      }
    for (std::size_t i = 0; i < cut; i++)
      if (last[i] >= cut) fates[i] = Fate::keep;
  }
  return fates;
}
constexpr std::size_t few = 24;  // tensors: small problems are searched more thoroughly
constexpr std::size_t several_parts[] = {1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64};

class Chooser {
 public:
  Chooser(const IterationRecord& iteration, std::size_t budget, const MemoryMeans& means, const Knapsack& items)
      : it_(iteration), budget_(budget), means_(means), knapsack_(items) {
    for (std::size_t i = 0; i < it_.saved.size(); i++)
      if (it_.saved[i].saved >= 0 && it_.saved[i].can_leave() && (means_.swap || may(Fate::recompute, i)))
        (it_.saved[i].marked && may(Fate::recompute, i) ? marked_ : movable_).push_back(i);
    auto seconds_per_byte = [&](std::size_t i) { return it_.saved[i].recompute / double(it_.saved[i].bytes + 1); };
    std::ranges::stable_sort(movable_, std::greater(), seconds_per_byte);
  }

  // The cost of swapping a byte is not known beforehand: a copy costs nothing while the lanes keep up with computation,
  // and its whole time beyond that. So several prices per byte are tried. The simulation gives the time of each choice,
  // and the best one is refined.
  MemoryChoice best() const {
    MemoryChoice best = measured(Fates(it_.saved.size(), Fate::keep));
    if (best.fits) return best;
    std::vector<Fates> starts = cuts();
    const double whole = 1 / means_.out + 1 / means_.in;
    const bool large = movable_.size() * it_.events.size() > 2000000;
    for (Fates& fates : starts) {
      const MemoryChoice start = measured(std::move(fates));
      for (double share : {0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0}) {
        MemoryChoice c = improved(at_price(share * whole, start), movable_.size() <= few, large ? 8 : 32);
        if (better(c, best)) best = std::move(c);
        if (start.fits || !means_.swap || !means_.recompute) break;  // the price makes no difference
      }
    }
    return improved(std::move(best), true, large ? 32 : movable_.size());
  }

  // The peak when every tensor that can leave memory has left.
  std::size_t smallest() const {
    std::size_t least = std::size_t(-1);
    for (Fates& fates : cuts()) {
      for (std::size_t i : movable_)
        if (means_.swap && fates[i] == Fate::keep) fates[i] = Fate::swap;
      least = std::min(least, measured(std::move(fates)).forecast.peak);
    }
    return least;
  }

 private:
  bool may(Fate fate, std::size_t i) const {
    if (fate == Fate::keep) return true;
    return fate == Fate::swap ? means_.swap : means_.recompute && it_.saved[i].recompute >= 0;
  }
  std::vector<Fates> cuts() const {  // all kept, and cut_in_parts() for several numbers of parts
    std::vector<Fates> all{Fates(it_.saved.size(), Fate::keep)};
    if (means_.recompute)
      for (std::size_t parts : several_parts)
        if (parts == 1 || parts < it_.saved.size()) all.push_back(cut_in_parts(it_, parts));
    return all;
  }
  MemoryChoice measured(Fates fates) const {
    for (std::size_t i : marked_) fates[i] = Fate::recompute;
    Forecast f = simulate(it_, fates, budget_, means_);
    const bool fits = f.peak <= budget_;
    return {std::move(fates), std::move(f), fits};
  }
  static bool better(const MemoryChoice& a, const MemoryChoice& b) {
    if (a.fits != b.fits) return a.fits;
    if (!a.fits) return a.forecast.peak < b.forecast.peak;
    return std::pair(a.forecast.seconds, a.forecast.swapped + a.forecast.recomputed) <
           std::pair(b.forecast.seconds, b.forecast.swapped + b.forecast.recomputed);
  }

  // While an event exceeds the budget, a knapsack chooses the tensors that leave memory during the fullest event, at
  // the least cost. price: seconds per swapped byte.
  MemoryChoice at_price(double price, MemoryChoice c) const {
    while (!c.fits) {
      const int full = c.forecast.peak_at;
      std::vector<std::size_t> items, sizes;
      std::vector<double> costs;
      std::vector<Fate> fates;
      for (std::size_t i : movable_) {
        const SavedRecord& s = it_.saved[i];
        if (c.fates[i] != Fate::keep || full <= std::max(s.free_at, s.last_used) || full >= c.forecast.read_at[i])
          continue;
        const double swap = means_.swap ? price * double(s.bytes) : std::numeric_limits<double>::infinity();
        const bool again = may(Fate::recompute, i) && s.recompute < swap;
        items.push_back(i);
        sizes.push_back(s.bytes);
        fates.push_back(again ? Fate::recompute : Fate::swap);
        costs.push_back((again ? s.recompute : swap) + 1e-15 * double(s.bytes));  // in a tie, the smaller one
      }
      if (items.empty()) return c;
      const std::size_t all = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}),
                        over = c.forecast.peak - budget_;
      const std::vector<bool> kept = knapsack_(sizes, costs, all > over ? all - over : 0);
      Fates next = c.fates;
      for (std::size_t k = 0; k < items.size(); k++)
        if (!kept[k]) next[items[k]] = fates[k];
      c = measured(std::move(next));
    }
    return c;
  }

  // Local search over all tensors, or over those that are recomputed. They are sorted by recomputation time per byte
  // and cut into 1, 2, 4, … `most` runs. Each run is given each fate, and the change is kept if it improves the choice.
  // In small problems two tensors also exchange their fates.
  MemoryChoice improved(MemoryChoice best, bool all, std::size_t most) const {
    std::vector<std::size_t> tensors;
    for (std::size_t i : movable_)
      if (all || best.fates[i] == Fate::recompute) tensors.push_back(i);
    auto try_one = [&](Fates fates) {
      if (fates == best.fates) return;
      if (MemoryChoice c = measured(std::move(fates)); better(c, best)) best = std::move(c);
    };
    const std::size_t n = tensors.size();
    most = std::min(most, n);
    for (std::size_t runs = std::min<std::size_t>(1, n); runs > 0; runs = runs < most ? std::min(2 * runs, most) : 0)
      for (std::size_t k = 0; k < runs; k++)
        for (Fate fate : {Fate::keep, Fate::swap, Fate::recompute}) {
          Fates fates = best.fates;
          for (std::size_t i = k * n / runs; i < (k + 1) * n / runs; i++)
            if (may(fate, tensors[i])) fates[tensors[i]] = fate;
          try_one(std::move(fates));
        }
    for (std::size_t i = 0; n <= few && i < n * n; i++) {
      Fates fates = best.fates;
      Fate &a = fates[tensors[i / n]], &b = fates[tensors[i % n]];
      std::swap(a, b);
      if (may(a, tensors[i / n]) && may(b, tensors[i % n])) try_one(std::move(fates));
    }
    return best;
  }

  const IterationRecord& it_;
  const std::size_t budget_;
  const MemoryMeans means_;
  const Knapsack& knapsack_;
  std::vector<std::size_t> movable_, marked_;  // movable_: by recomputation time per byte, the longest first
};

}  // namespace

const char* name_of(SwapMode swap) {
  static constexpr const char* names[] = {"off", "auto", "swap", "recompute"};
  return names[int(swap)];
}

double IterationRecord::seconds() const {
  return std::accumulate(events.begin(), events.end(), 0.0,
                         [](double sum, const EventRecord& e) { return sum + e.seconds; });
}

Forecast simulate(const IterationRecord& iteration, std::span<const Fate> fates, std::size_t budget,
                  const MemoryMeans& means) {
  return Simulation(iteration, fates, budget, means).run();
}

std::vector<bool> knapsack(std::span<const std::size_t> sizes, std::span<const double> values, std::size_t capacity) {
  std::size_t unit = 0;
  for (std::size_t s : sizes) unit = std::gcd(unit, s);
  unit = std::max<std::size_t>(1, std::max(unit, (capacity + knapsack_units - 1) / knapsack_units));
  const std::size_t n = sizes.size(), room = capacity / unit;
  std::vector<double> best(room + 1, 0);
  std::vector<std::vector<bool>> taken(n, std::vector<bool>(room + 1));
  for (std::size_t i = 0; i < n; i++) {
    const std::size_t size = (sizes[i] + unit - 1) / unit;
    for (std::size_t c = room + 1; c-- > size;) {
      taken[i][c] = best[c - size] + values[i] > best[c];
      best[c] = std::max(best[c], best[c - size] + values[i]);
    }
  }
  std::vector<bool> chosen(n);
  std::size_t left = room;
  for (std::size_t i = n; i-- > 0;) {
    chosen[i] = taken[i][left];
    if (chosen[i]) left -= (sizes[i] + unit - 1) / unit;
  }
  return chosen;
}

MemoryChoice choose_memory(const IterationRecord& iteration, std::size_t budget, const MemoryMeans& means,
                           const Knapsack& items) {
  return Chooser(iteration, budget, means, items).best();
}

std::size_t smallest_budget(const IterationRecord& iteration, const MemoryMeans& means) {
  return Chooser(iteration, 0, means, knapsack).smallest();
}

}  // namespace tandem
