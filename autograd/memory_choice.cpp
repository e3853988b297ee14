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
      : it_(iteration),
        fates_(fates),
        budget_(budget),
        means_(means),
        state_(fates.size()),
        read_(fates.size()),
        arrives_(fates.size()),
        saved_after_(it_.events.size()),
        leave_after_(it_.events.size()),
        reads_(it_.events.size()) {
    load_.resize(it_.events.size() + 1), scratch_.resize(it_.events.size());
    for (std::size_t i = 0; i < fates.size(); i++) read_[i] = it_.saved[i].needed;
    for (int i = int(fates.size()) - 1; i >= 0; i--) place(i);  // what reads a tensor again has a larger number
    std::partial_sum(load_.begin(), load_.end(), load_.begin());
    for (std::size_t e = 0; e < it_.events.size(); e++) load_[e] += it_.events[e].base + scratch_[e];
    std::stable_sort(fetches_.begin(), fetches_.end(), [&](int a, int b) { return read_[at(a)] < read_[at(b)]; });
    result_.fetch_after.assign(fates.size(), -1);
    result_.live.reserve(it_.events.size());
  }

  Forecast run() {
    for (int event = 0; event < int(it_.events.size()); event++) {
      for (auto i = reads_[at(event)].rbegin(); i != reads_[at(event)].rend(); ++i) read(*i, event);  // sources first
      make_room(event);
      const std::size_t live = load_[at(event)] + staying_;
      if (live > result_.peak) result_.peak = live, result_.peak_at = event;
      result_.live.push_back(live);
      now_ += it_.events[at(event)].seconds;
      after(event);
    }
    result_.seconds = now_;
    result_.read_at = std::move(read_);
    return std::move(result_);
  }

 private:
  enum class State : std::uint8_t { here, leaving, outside, back };

  const SavedRecord& saved(int i) const { return it_.saved[at(i)]; }
  int end_of(int i) const { return saved(i).gone < 0 ? int(it_.events.size()) - 1 : saved(i).gone; }
  void hold(int i, int from, int to) {  // in memory in these events
    for (int e = from; e <= to; e++) load_[at(e)] += saved(i).bytes;
  }
  void enter(int i, int from, int to) {  // the same while load_ holds differences
    if (from <= to) load_[at(from)] += saved(i).bytes, load_[at(to) + 1] -= saved(i).bytes;
  }

  // Enters what is known of tensor i beforehand: all, but for one that is swapped, which depends on time.
  void place(int i) {
    const SavedRecord& s = saved(i);
    if (s.saved < 0) return;
    const int read = read_[at(i)];
    if (fates_[at(i)] == Fate::keep) return enter(i, s.saved + 1, end_of(i));
    reads_[at(read)].push_back(i);
    if (fates_[at(i)] == Fate::recompute) {
      result_.recomputed += s.bytes;
      for (int source : s.sources) read_[at(source)] = std::min(read_[at(source)], read);
      enter(i, s.saved + 1, std::max(s.free_at, s.last_used));
      enter(i, read, end_of(i));
      scratch_[at(read)] = std::max(scratch_[at(read)], s.scratch);
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
      now_ += saved(i).recompute;
      result_.recomputing += saved(i).recompute;
      return;
    }
    if (state_[at(i)] == State::here || state_[at(i)] == State::leaving) {  // it never left
      staying_ -= saved(i).bytes;
      hold(i, event, end_of(i));
      state_[at(i)] = State::back;
    } else {
      if (state_[at(i)] == State::outside) fetch(i, event);
      wait_until(arrives_[at(i)]);
    }
  }

  void wait_until(double time) {
    if (time > now_) result_.stall += time - now_, now_ = time;
  }

  void fetch(int i, int from) {
    hold(i, from, end_of(i));
    arrives_[at(i)] = in_free_ = std::max(in_free_, now_) + double(saved(i).bytes) / means_.in;
    now_ += means_.slowdown * double(saved(i).bytes);
    state_[at(i)] = State::back;
  }

  void leave(int i) {
    staying_ -= saved(i).bytes;
    state_[at(i)] = State::outside;
  }

  // Computation waits for copies out where the event does not fit beside what is on its way.
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
      out_free_ = std::max(out_free_, now_) + double(saved(i).bytes) / means_.out;
      now_ += means_.slowdown * double(saved(i).bytes);
      state_[at(i)] = State::leaving;
      outs_.emplace_back(out_free_, i);
    }
    std::erase_if(outs_, [&](const auto& out) {
      const auto [time, i] = out;
      if (state_[at(i)] != State::leaving) return true;
      if (time > now_ || saved(i).free_at > event) return false;
      leave(i);
      return true;
    });
    if (event >= turn_) fetch_ahead(event);
  }

  void fetch_ahead(int event) {
    for (; next_fetch_ < fetches_.size(); next_fetch_++) {
      const int i = fetches_[next_fetch_];
      if (state_[at(i)] == State::back || read_[at(i)] <= event) continue;
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
  std::vector<std::size_t> load_;     // bytes of each event, without those that are to be swapped and have not left
  std::vector<std::size_t> scratch_;  // of these, what computing again borrows
  std::size_t staying_ = 0;           // bytes of these
  std::vector<State> state_;
  std::vector<int> read_, fetches_;
  std::vector<double> arrives_;
  std::vector<std::vector<int>> saved_after_, leave_after_, reads_;  // tensors by event
  std::vector<std::pair<double, int>> outs_;                         // when they have left
  std::size_t next_fetch_ = 0;
  int turn_ = 0;  // nothing returns before the last one has begun to leave
  double now_ = 0, out_free_ = 0, in_free_ = 0;
  Forecast result_;
};

// ---- the choice -----------------------------------------------------------------------------------------------------
using Fates = std::vector<Fate>;

// Where recomputation may begin. The operations are cut into `parts` of like size, each where the fewest bytes cross
// the cut: these are kept, everything between is computed again from them, part by part (Chen et al. 2016, Training
// deep nets with sublinear memory cost).
Fates cut_in_parts(const IterationRecord& it, std::size_t parts) {
  const std::size_t n = it.saved.size();
  // Last reader of each; bytes across the cut before each; made before each
  std::vector<std::size_t> last(n), crossing(n + 2), before(n + 1);
  for (std::size_t i = 0; i < n; i++)
    if (it.saved[i].recompute >= 0)
      for (int source : it.saved[i].sources) last[at(source)] = i;
  for (std::size_t i = 0; i < n; i++) {
    before[i + 1] = before[i] + it.saved[i].bytes;
    if (last[i] > i) crossing[i + 1] += it.saved[i].bytes, crossing[last[i] + 1] -= it.saved[i].bytes;
  }
  std::partial_sum(crossing.begin(), crossing.end(), crossing.begin());
  Fates fates(n, Fate::keep);
  for (std::size_t i = 0; i < n; i++)
    if (it.saved[i].saved >= 0 && it.saved[i].can_leave() && it.saved[i].recompute >= 0) fates[i] = Fate::recompute;
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
constexpr std::size_t several_parts[] = {1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64};

class Chooser {
 public:
  Chooser(const IterationRecord& iteration, std::size_t budget, const MemoryMeans& means, const Knapsack& items)
      : it_(iteration), budget_(budget), means_(means), knapsack_(items) {
    for (std::size_t i = 0; i < it_.saved.size(); i++)
      if (it_.saved[i].saved >= 0 && it_.saved[i].can_leave() && (may_swap() || may_recompute(i)))
        (marked(i) ? marked_ : movable_).push_back(i);
    std::stable_sort(movable_.begin(), movable_.end(),
                     [&](std::size_t a, std::size_t b) { return worth(a) > worth(b); });
  }

  // The cost of swapping a byte is not known beforehand: a copy costs nothing while the lanes keep up with computation,
  // and its whole time beyond that. So several prices per byte are tried; the simulation gives the time of each choice,
  // and the best one is refined.
  MemoryChoice best() {
    MemoryChoice best = measured(Fates(it_.saved.size(), Fate::keep));
    if (best.fits) return best;
    std::vector<Fates> starts{best.fates};
    if (means_.recompute)
      for (std::size_t parts : several_parts)
        if (parts < it_.saved.size()) starts.push_back(cut_in_parts(it_, parts));
    const double whole = 1 / means_.out + 1 / means_.in;
    for (Fates& fates : starts) {
      const MemoryChoice start = measured(std::move(fates));
      for (double share : {0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0}) {
        MemoryChoice c = with_room(at_price(share * whole, start));
        if (better(c, best)) best = std::move(c);
        if (start.fits || !may_swap() || !means_.recompute) break;  // the price makes no difference
      }
    }
    return refined(std::move(best));
  }

  // With everything away that can be.
  std::size_t smallest() {
    std::size_t least = peak(Fates(it_.saved.size(), Fate::keep));
    if (means_.recompute)
      for (std::size_t parts : several_parts) least = std::min(least, peak(cut_in_parts(it_, parts)));
    return least;
  }

 private:
  bool may_swap() const { return means_.swap; }
  bool may_recompute(std::size_t i) const { return means_.recompute && it_.saved[i].recompute >= 0; }
  double worth(std::size_t i) const { return it_.saved[i].recompute / double(it_.saved[i].bytes + 1); }
  std::size_t peak(Fates fates) const {
    for (std::size_t i : movable_)
      if (may_swap() && fates[i] == Fate::keep) fates[i] = Fate::swap;
    for (std::size_t i : marked_) fates[i] = Fate::recompute;
    return simulate(it_, fates, 0, means_).peak;
  }
  bool marked(std::size_t i) const { return it_.saved[i].marked && may_recompute(i); }
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

  // While some event is over the budget: a knapsack chooses the tensors that leave memory during the fullest event, at
  // the least cost. price: seconds per swapped byte.
  MemoryChoice at_price(double price, MemoryChoice c) const {
    while (!c.fits) {
      const int full = c.forecast.peak_at;
      std::vector<std::size_t> items, sizes;
      std::vector<double> costs;
      std::vector<Fate> means;
      for (std::size_t i : movable_) {
        const SavedRecord& s = it_.saved[i];
        if (c.fates[i] != Fate::keep || full <= std::max(s.free_at, s.last_used) || full >= c.forecast.read_at[i])
          continue;
        const double swap = may_swap() ? price * double(s.bytes) : std::numeric_limits<double>::infinity();
        const bool again = may_recompute(i) && s.recompute < swap;
        items.push_back(i), sizes.push_back(s.bytes), means.push_back(again ? Fate::recompute : Fate::swap);
        costs.push_back((again ? s.recompute : swap) + 1e-15 * double(s.bytes));  // of equal ones the smaller
      }
      if (items.empty()) return c;
      const std::size_t all = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}),
                        over = c.forecast.peak - budget_;
      const std::vector<bool> kept = knapsack_(sizes, costs, all > over ? all - over : 0);
      Fates fates = c.fates;
      for (std::size_t k = 0; k < items.size(); k++)
        if (!kept[k]) fates[items[k]] = means[k];
      c = measured(std::move(fates));
    }
    return c;
  }

  // Uses free budget to recompute less. The tensors that are recomputed are sorted by recomputation time per byte; the
  // first n of them are kept instead, then the first m of the rest are swapped instead. n and m are found by bisection
  // on "fits and is faster".
  MemoryChoice with_room(MemoryChoice c) const {
    if (!c.fits || c.forecast.recomputed == 0) return c;
    for (Fate fate : {Fate::keep, Fate::swap}) {
      if (fate == Fate::swap && !may_swap()) break;
      std::vector<std::size_t> again;
      for (std::size_t i : movable_)  // the dearest first
        if (c.fates[i] == Fate::recompute) again.push_back(i);
      const Fates fates = c.fates;
      for (std::size_t low = 0, high = again.size() + 1; high - low > 1;) {
        const std::size_t middle = (low + high) / 2;
        Fates with = fates;
        for (std::size_t k = 0; k < middle; k++) with[again[k]] = fate;
        MemoryChoice next = measured(std::move(with));
        const bool improves = better(next, c);
        (improves ? low : high) = middle;
        if (improves) c = std::move(next);
      }
    }
    return c;
  }

  // Local search: changes the choice of one tensor (in small problems also of two) while that improves the result.
  MemoryChoice refined(MemoryChoice best) const {
    const std::size_t work = movable_.size() * it_.events.size();  // of one simulation, at most
    if (work > 2000000) return best;
    for (int round = 0; round < 4; round++) {
      bool any = false;
      for (std::size_t i : movable_) any = improve(best, {i}) || any;
      if (movable_.size() <= 24 && work < 2000)
        for (std::size_t i : movable_)
          for (std::size_t k : movable_)
            if (i < k) any = improve(best, {i, k}) || any;
      if (!any || work > 200000) break;
    }
    return best;
  }

  bool improve(MemoryChoice& best, std::initializer_list<std::size_t> tensors) const {
    bool any = false;
    Fates fates = best.fates;
    const int cases = tensors.size() == 1 ? 3 : 9;
    for (int k = 0; k < cases; k++) {
      int rest = k;
      bool possible = true;
      for (std::size_t i : tensors) {
        fates[i] = static_cast<Fate>(std::exchange(rest, rest / 3) % 3);
        possible =
            possible && (fates[i] != Fate::swap || may_swap()) && (fates[i] != Fate::recompute || may_recompute(i));
      }
      if (!possible || fates == best.fates) continue;
      if (MemoryChoice c = measured(fates); better(c, best)) best = std::move(c), any = true;
    }
    return any;
  }

  const IterationRecord& it_;
  const std::size_t budget_;
  const MemoryMeans means_;
  const Knapsack& knapsack_;
  std::vector<std::size_t> movable_, marked_;
};

}  // namespace

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
    for (std::size_t c = room + 1; c-- > size;)
      if (best[c - size] + values[i] > best[c]) best[c] = best[c - size] + values[i], taken[i][c] = true;
  }
  std::vector<bool> chosen(n);
  std::size_t left = room;
  for (std::size_t i = n; i-- > 0;)
    if (taken[i][left]) chosen[i] = true, left -= (sizes[i] + unit - 1) / unit;
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
