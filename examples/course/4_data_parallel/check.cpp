#include <thread>

#include "core/clock.h"
#include "examples/course/check.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

struct Net : Module {
  Linear& fc1 = child<Linear>("fc1", 6, 8);
  Linear& fc2 = child<Linear>("fc2", 8, 3);
  Variable forward(const Variable& x) override { return fc2(relu(fc1(x))); }
};

// Trains on rows [begin, end) of each step's batch of 10; `exchange` is called between backward and the step.
using Exchange = std::function<void(std::span<double> gradient)>;
Numbers trained(std::int64_t begin, std::int64_t end, const Exchange& exchange) {
  const auto backend = reference_backend();
  Net model;
  FlatParameters flat(model, *backend, 1, {}, DType::f64);
  SGD sgd({.learning_rate = 0.2, .momentum = 0.9});
  sgd.bind(flat);
  for (int step = 0; step < 5; step++) {
    Numbers x, y;
    for (std::int64_t i = begin; i < end; i++) {
      for (int k = 0; k < 6; k++) x.push_back(std::sin(double(7 * i + 3 * k + 11 * step)));
      y.push_back(double((i + step) % 3));
    }
    const Variable input(Tensor::of(*backend, {end - begin, 6}, x, DType::f64));
    flat.zero_gradients();
    flat.backward(cross_entropy(model(input), Tensor::of(*backend, {end - begin}, y, DType::i32)));
    exchange({flat.gradients.write<double>(), std::size_t(flat.numel())});
    sgd.step();
  }
  return flat.values.values();
}

void n_ranks_are_one_machine(Communicator& ranks) {
  constexpr std::int64_t all = 10;
  const Cuts cuts = even_cuts(all, ranks.size());
  const std::int64_t begin = cuts[std::size_t(ranks.rank())], end = cuts[std::size_t(ranks.rank()) + 1];
  auto by = [&](double weight) {
    return trained(begin, end, [&](std::span<double> gradient) {
      for (double& g : gradient) g *= weight;
      ranks.all_reduce(buffer(gradient)).wait();
    });
  };
  const Numbers right = trained(0, all, [](std::span<double>) {});
  const Numbers alone = trained(begin, end, [](std::span<double>) {});
  const Numbers sums = by(1), even = by(1.0 / ranks.size());
  const Numbers yours = trained(begin, end, [&](std::span<double> gradient) {
    exchange_gradients(ranks, gradient, double(end - begin), double(all));
  });
  expect_equal(named(ranks) + ", weights after 5 steps", yours, right, 1e-12,
               {{alone, "Each rank has trained alone: the gradients were not exchanged."},
                {sums, "This is the sum of the ranks' means. Weigh each by mine/all before you add them."},
                {even, "You divide by n, and the shares differ in size. Weigh each by mine/all."}});
}

void buckets_are_right(Communicator& ranks) {
  constexpr std::size_t count = 20, size = 6;  // three buckets from the end, and a rest of two
  Numbers x(count, -1000), right;
  for (std::size_t i = 0; i < count; i++) {
    right.push_back(0);
    for (int r = 0; r < ranks.size(); r++) right[i] += double(i) + 100.0 * r;
  }
  const std::uint64_t before = ranks.traffic().bytes;
  bool at_once = false;
  Buckets buckets(ranks, x, size);
  for (std::size_t from : {std::size_t(17), std::size_t(11), std::size_t(5), std::size_t(0)}) {
    for (std::size_t i = from; i < count && x[i] == -1000; i++) x[i] = double(i) + 100.0 * ranks.rank();
    buckets.ready(from);
    at_once = at_once || (from == 11 && ranks.traffic().bytes > before);
  }
  buckets.finish();
  expect_equal(named(ranks) + ", buckets", x, right, 1e-12, {},
               "A bucket is summed once, when all its numbers are final; the rest in finish().");
  expect(at_once || ranks.size() != 2 || ranks.traffic().transport != "this process",
         named(ranks) + ": no sum had begun when the first bucket was complete",
         "Start a bucket's sum in ready(), or nothing overlaps with backward.");
}

// Emulates a backward pass of four parts of 10 ms each, and measures the wait for the sums after it.
void overlap(Communicator& ranks, std::string& remark) {
  Numbers x(400000, 1);
  const auto start = Clock::now();
  auto ms = [&] { return 1000 * seconds_since(start); };
  Buckets buckets(ranks, x, 100000);
  for (int part = 3; part >= 0; part--) {
    while (ms() < 10.0 * (4 - part)) std::this_thread::yield();
    buckets.ready(std::size_t(part) * 100000);
  }
  const double backward = ms();
  buckets.finish();
  if (ranks.rank() == 0)
    remark =
        "backward of " + digits(backward, 3) + " ms, then " + digits(ms() - backward, 2) + " ms of waiting for sums";
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 4, "synchronous data parallelism", [] {
    on_ranks({1, 2, 3, 4}, n_ranks_are_one_machine);
    on_ranks({2, 3}, buckets_are_right);
    std::string remark;
    on_ranks({2}, [&](Communicator& ranks) { overlap(ranks, remark); });
    return remark;
  });
}
