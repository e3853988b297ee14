#include "examples/course/check.h"
#include "dist/strategies/daso.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

const Numbers start{3, -1, 2, 0.5};

// The gradient of a rank's loss ½Σ a_i(w_i − c_i)²; a and c differ between ranks.
double gradient(int rank, int step, std::size_t i, double w) {
  return (1 + 0.5 * std::sin(rank + double(i))) * (w - std::cos(double(rank * 3 + step) + double(i)));
}
void step_of(int rank, int step, std::span<double> w) {
  for (std::size_t i = 0; i < w.size(); i++) w[i] -= 0.1 * gradient(rank, step, i, w[i]);
}
void take_mean(std::vector<Numbers>& w) {
  for (std::size_t i = 0; i < start.size(); i++) {
    double sum = 0;
    for (const Numbers& v : w) sum += v[i] / double(w.size());
    for (Numbers& v : w) v[i] = sum;
  }
}

// Computes all ranks in one process. Takes means after steps s with (s + offset) % H == 0; at_end: also after the last.
Numbers played(int ranks, int rank, int steps, int H, int offset = 0, bool at_end = true, bool means = true) {
  std::vector<Numbers> w(std::size_t(ranks), start);
  for (int s = 1; s <= steps; s++) {
    for (int r = 0; r < ranks; r++) step_of(r, s, w[std::size_t(r)]);
    if (means && ((s + offset) % H == 0 || (at_end && s == steps))) take_mean(w);
  }
  return w[std::size_t(rank)];
}

void local_steps_are_right(Communicator& ranks) {
  const int n = ranks.size(), rank = ranks.rank();
  for (const auto& [steps, H] : {std::pair{6, 1}, {6, 3}, {8, 3}}) {
    Numbers w = start;
    int made = 0;
    local_sgd(ranks, w, steps, H, [&] { step_of(rank, ++made, w); });
    const std::string where = named(ranks) + ", " + std::to_string(steps) + " steps, H = " + std::to_string(H);
    expect(made == steps, where + ": step() was called " + std::to_string(made) + " times", "Call it once a step.");
    expect_equal(
        where, w, played(n, rank, steps, H), 1e-12,
        {{played(n, rank, steps, H, 0, true, false), "Each rank trained alone: no mean was taken."},
         {played(n, rank, steps, H, 0, false), "After the last step all ranks take the mean, too."},
         {played(n, rank, steps, H, 1), "The mean comes one step early: after step H, 2H, …, counted from 1."},
         {played(n, rank, steps, H, H - 1), "The mean comes one step late: after step H, 2H, …, counted from 1."}},
        "Take the mean: the sum over all ranks, of doubles, divided by their number.");
  }
}

std::string letters(int last, const std::function<course::Turn(int)>& turn) {
  std::string text;
  for (int b = 0; b <= last; b++) {
    const course::Turn t = turn(b);
    text += t.blocks && !t.sends ? '?'
            : t.blocks           ? (t.merges ? 'B' : 'b')
            : t.sends            ? (t.merges ? 'x' : 's')
            : t.merges           ? 'm'
                                 : '-';
  }
  return text;
}

void turns_are_right() {
  for (const auto& [B, W] : {std::pair{0, 0}, {1, 1}, {2, 1}, {4, 1}, {4, 0}, {4, 3}, {4, 4}, {8, 2}})
    for (int last : {8, 9, 12, 15}) {
      Daso schedule({.B = B, .W = W, .warm_up = 0, .cool_down = 0});
      schedule.begin_epoch(0, {});
      const std::string right = letters(last, [&](int b) {
        const auto t = schedule.next({.batch = b, .last = last});
        return course::Turn{t.sends, t.waits, t.merges};
      });
      const std::string yours = letters(last, [&](int b) { return turn_after(b, last, B, W); });
      expect(yours == right,
             "B = " + std::to_string(B) + ", W = " + std::to_string(W) + ": " + yours + " should be " + right +
                 " (s sends, m merges, x both, b sends and blocks, B merges, sends and blocks)",
             "A sum begins with batches 0, B, 2B, … and the last one (with each when B = 0), and is merged W later.");
    }
}

void merge_is_right() {
  for (double waited : {1.0, 3.0, 0.0}) {
    const Numbers x{1, -2}, sum{6, 3};
    const double weight = waited > 0 ? 2 * waited : 1, hosts = 3;
    auto with = [&](double w, double n) {
      return Numbers{(w * x[0] + sum[0]) / (w + n), (w * x[1] + sum[1]) / (w + n)};
    };
    Numbers yours = x;
    daso_merge(yours, sum, waited, hosts);
    expect_equal("the merge, W = " + digits(waited), yours, with(weight, hosts), 1e-14,
                 {{with(waited, hosts), "The host's own weights count 2W times, or once when W = 0."},
                  {with(weight, 1), "The sum holds the weights of all P hosts: divide by 2W + P."}});
  }
}

// With H = 1, and with DASO's B = 0, a step equals that of one machine with the mean gradient.
void every_step_is_one_machine(Communicator& ranks) {
  const int n = ranks.size(), rank = ranks.rank(), steps = 5;
  Numbers one = start, local = start, daso = start;
  for (int s = 1; s <= steps; s++) {
    for (std::size_t i = 0; i < one.size(); i++) {
      double g = 0;
      for (int r = 0; r < n; r++) g += gradient(r, s, i, one[i]) / n;
      one[i] -= 0.1 * g;
    }
    step_of(rank, s, daso);
    if (!turn_after(s - 1, steps - 1, 0, 0).blocks) continue;
    ranks.all_reduce(buffer(daso)).wait();
    for (double& v : daso) v /= n;
  }
  int made = 0;
  local_sgd(ranks, local, steps, 1, [&] { step_of(rank, ++made, local); });
  expect_equal("H = 1 compared with one machine", local, one, 1e-12);
  expect_equal("B = 0 compared with one machine", daso, one, 1e-12, {}, "With B = 0 every batch blocks.");
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 6, "local steps and DASO", [] {
    on_ranks({2, 3, 4}, local_steps_are_right);
    turns_are_right();
    merge_is_right();
    on_ranks({2, 4}, every_step_is_one_machine);
    return "";
  });
}
