#include "examples/course/check.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

double number(int rank, std::size_t i) { return 100.0 * (rank + 1) + double(i); }

void sums_are_right(Communicator& ranks, std::size_t count) {
  const int n = ranks.size();
  Numbers x, sum(count), mean(count);
  for (std::size_t i = 0; i < count; i++) {
    x.push_back(number(ranks.rank(), i));
    for (int r = 0; r < n; r++) sum[i] += number(r, i);
    mean[i] = sum[i] / n;
  }
  const Numbers mine = x;
  Numbers half = mine;  // after the first half: one piece has its sums, and others have sums of some ranks
  for (int step = n - 2, piece = (ranks.rank() + 1) % n; step >= 0; step--, piece = (piece + 1) % n)
    for (std::size_t i = count * std::size_t(piece) / std::size_t(n);
         i < count * std::size_t(piece + 1) / std::size_t(n); i++)
      for (int k = 1; k <= step + 1; k++) half[i] += number((ranks.rank() + n * 2 - k) % n, i);
  const std::uint64_t before = ranks.traffic().bytes;
  ring_all_reduce(ranks, x);
  const double sent = double(ranks.traffic().bytes - before);
  const std::string where = named(ranks) + ", " + std::to_string(count) + " numbers";
  expect_equal(where, x, sum, 1e-12,
               {{mine, "x has not changed: add the received numbers to x."},
                {mean, "This is the mean. All-reduce computes the sum."},
                {half, "The first half is right. The second half hands the finished pieces on, around the ring."}},
               "Draw three ranks: in step s rank r sends piece r - s and receives piece r - s - 1, all modulo n.");
  const std::size_t largest = (count + std::size_t(n) - 1) / std::size_t(n);
  const double bound = 2.0 * (n - 1) * double(largest * sizeof(double));
  expect(sent <= bound, where + ": " + digits(sent) + " bytes sent, where " + digits(bound) + " are enough",
         "Each step sends one piece, an n-th of the numbers, and there are 2(n - 1) steps.");
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 3, "ring all-reduce", [] {
    for (std::size_t count : {12, 7, 3, 1000})
      on_ranks({2, 3, 4, 5}, [&](Communicator& ranks) { sums_are_right(ranks, count); });
    const std::int64_t calm = on_ranks({4}, [](Communicator&) {}), messages = on_ranks({4}, [](Communicator&ranks) {
                                                                     Numbers x(8);
                                                                     ring_all_reduce(ranks, x);
                                                                   });
    expect(messages - calm <= 4 * 6, "4 ranks: " + std::to_string(messages - calm) + " messages, where 24 are enough",
           "Each rank sends one message in each of the 2(n - 1) steps.");
    return messages ? "4 ranks: 6 messages and 2(n - 1)/n of the numbers sent by each, the least there can be" : "";
  });
}
