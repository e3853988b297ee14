// The team of threads: who runs what, that parts may wait for each other, and that nobody spins for long.
#include <sched.h>
#include <sys/time.h>

#include "autograd/ops.h"
#include "core/machine.h"
#include "core/team.h"
#include "tests/bench/timing.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

TEST(Team, RunsEveryPartOnce) {
  for (int call = 0; call < 3000; call++) {
    const int parts = 1 + call % 6;
    std::vector<int> runs(std::size_t(parts), 0);
    in_parts(parts, [&](int part) { runs[part]++; });
    ASSERT_EQ(runs, std::vector<int>(std::size_t(parts), 1)) << "call " << call;
  }
}

TEST(Team, PartsMayWaitForEachOther) {
  for (int parts : {2, 3, 7})
    for (int call = 0; call < 100; call++) {
      team::Barrier barrier(parts);
      std::atomic<int> arrived{0}, early{0};
      in_parts(parts, [&](int) {
        for (int round = 1; round <= 3; round++) {
          arrived++;
          barrier.wait();
          if (arrived < round * parts) early++;
          barrier.wait();
        }
      });
      ASSERT_EQ(early, 0) << "a part passed the barrier before all had come";
    }
}

TEST(Team, InsideAPartPartsRunOneAfterAnother) {
  std::vector<int> seen(4 * 4, 0);
  in_parts(4, [&](int outer) {
    EXPECT_TRUE(team::inside());
    in_parts(4, [&](int inner) { seen[outer * 4 + inner] = inner == 0 ? 1 : seen[outer * 4 + inner - 1] + 1; });
  });
  for (int i = 0; i < 16; i++) EXPECT_EQ(seen[i], i % 4 + 1);
  EXPECT_FALSE(team::inside());
}

TEST(Team, EveryThreadHasItsOwn) {
  std::atomic<int> sum{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < 200; i++) in_parts(3, [&](int part) { sum += part; });
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(sum, 4 * 200 * 3);
}

TEST(Team, AForkedProcessWorksAloneAndEnds) {
  in_parts(3, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    int sum = 0;
    in_parts(3, [&](int part) { sum += part; });
    std::exit(sum == 3 ? 0 : 1);
  }
  int status = -1;
  for (int waited = 0; waitpid(child, &status, WNOHANG) == 0; waited++) {
    if (waited == 100) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_EQ(status, 0);
}

// libgomp's threads would use 3 to 15 ms of every pause, each.
TEST(Team, LeavesTheCoresSoonAfterItsWork) {
  for (const auto& kind : backends()) {
    auto b = kind.make();
    if (b->on_device()) continue;
    NoGrad off;
    const Variable x(Tensor::zeros(*b, {64, 256})), w(Tensor::zeros(*b, {256, 256}));
    const Variable pictures(Tensor::zeros(*b, {8, 16, 16, 16})), filters(Tensor::zeros(*b, {32, 3, 3, 16}));
    double used = 0;
    constexpr int pauses = 20;
    for (int i = 0; i < pauses; i++) {
      linear(x, w, Variable());
      conv2d(pictures, filters, Variable(), {.stride = 2});
      const double before = cpu_seconds();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      used += cpu_seconds() - before;
    }
    EXPECT_LT(used / pauses, 1e-3) << kind.name << ": seconds of CPU in a pause of 20 ms";
  }
}

// Kernels of oneDNN whose stack pointer points into the heap: a handler that runs in one destroys what lies there.
TEST(Team, ASignalDuringAProductHarmsNothing) {
  static std::atomic<int> signals{0};
  signals = 0;
  struct sigaction count {
  }, before{};
  count.sa_handler = [](int) { signals++; };
  sigaction(SIGALRM, &count, &before);
  const itimerval often{{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &often, nullptr);
  for (const auto& kind : backends()) {
    auto b = kind.make();
    if (b->on_device()) continue;
    NoGrad off;
    const Variable x(Tensor::zeros(*b, {128, 784})), w(Tensor::zeros(*b, {256, 784})), g(Tensor::zeros(*b, {256, 128}));
    for (const int until = signals + 100; signals < until;) {
      linear(x, w, Variable());
      matmul(g, x);
    }
  }
  const itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
}

TEST(Team, HasTheCoresOfTheAffinityMask) {
  if (std::getenv("OMP_NUM_THREADS")) GTEST_SKIP() << "OMP_NUM_THREADS decides";
  int on_one = 0;
  std::thread([&] {
    cpu_set_t mask, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
      if (CPU_ISSET(cpu, &mask)) CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    on_one = default_threads();
  }).join();
  EXPECT_EQ(on_one, 1);
  EXPECT_GE(default_threads(), 1);
  EXPECT_GT(core_quota(), 0);
}

}  // namespace
}  // namespace tandem::test
