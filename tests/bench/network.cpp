// All-reduce of f32 sums as a strategy uses it, in memory from allocate(): for every size a line with the bytes and the
// median over seven batches of the seconds that one takes. The peers (peers/network_mpi.c, peers/network_gloo.py) do
// the same.
//   tandem-run -n 2 bench_network BYTES…
#include <cstdio>

#include "dist/job/job.h"
#include "layers/train/options.h"
#include "tests/bench/timing.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    auto c = Job().communicator();
    for (int i = 1; i < argc; i++) {
      const std::int64_t bytes = std::atoll(argv[i]);
      if (bytes < 4) refuse("how many bytes? bench_network BYTES…, each from 4");
      const std::int64_t calls = std::clamp<std::int64_t>((4 << 20) / bytes, 1, 500);
      std::vector<float> own;
      auto shared = c->allocate(std::size_t(bytes));
      if (!shared) own.resize(std::size_t(bytes / 4));
      const Buffer data{shared ? shared.get() : own.data(), bytes / 4, DType::f32};
      std::vector<double> seconds;
      for (int batch = -1; batch < 7; batch++) {
        c->barrier().wait();
        const double took = seconds_of([&] { c->all_reduce(data).wait(); }, calls);
        if (batch >= 0) seconds.push_back(took);  // the first one warms up
      }
      if (c->rank() == 0) std::printf("%lld %.9f\n", static_cast<long long>(bytes), median(seconds));
    }
    c->barrier().wait();
  });
}
