// The update rules against memory copy: each is timed on 10 million floats, alternating with a copy of as many, and the
// bytes that it must read and write are divided by that time. `ratio` is rule / copy: 1 is what the memory gives, above
// it a rule gains from reading where it writes. Best times, one thread.
//   bench_rules [repetitions] [JSONL file]
#include <cstdio>
#include <cstring>

#include "core/files/files.h"
#include "core/text.h"
#include "dist/server/rules.h"
#include "tests/bench/timing.h"

using namespace tandem;

constexpr std::int64_t n = 10'000'000;

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 15;
  auto vector = [](float scale) {
    std::vector<float> v(n);
    for (std::int64_t i = 0; i < n; i++) v[std::size_t(i)] = scale * (float(i * 7 % 1001) / 500 - 1);
    return v;
  };
  std::vector<float> w = vector(0.1f), g = vector(0.01f), velocity(n), sent = vector(0.1001f), square_avg(n), own(n);
  const std::vector<RuleBlock> blocks(n / 64);
  const RuleVectors<float> x{w.data(),          g.data(),   velocity.data(), sent.data(),
                             square_avg.data(), own.data(), blocks.data()};
  std::string lines;
  for (const std::string& name : rule_names()) {
    const auto rule = make_rule(name);
    const Rule::Keeps keeps = rule->keeps();
    // w is read and written, g read; and what is kept, of which w_sent is only read.
    const int vectors = 3 + 2 * keeps.velocity + keeps.sent + 2 * keeps.square_avg + 2 * keeps.own;
    double best = 1e9, copy = 1e9;
    for (int r = 0; r < repetitions; r++) {
      best = std::min(best, seconds_of([&] {
                        rule->push(x, n, {.learning_rate = 1e-6, .momentum = 0.9, .delay = 3, .mean_delay = 3});
                      }));
      copy = std::min(copy, seconds_of([&] { std::memcpy(velocity.data(), g.data(), n * sizeof(float)); }));
    }
    const double ours = vectors * n * 4e-9 / best, peer = 2 * n * 4e-9 / copy;
    std::printf("%-10s %2d vectors  %6.2f ms  %6.2f GB/s  copy %6.2f GB/s  ratio %.2f\n", name.c_str(), vectors,
                best * 1e3, ours, peer, ours / peer);
    lines += printed(R"({"bench":"rule/%s","ours":%.4g,"peer":%.4g,"ratio":%.3g,"unit":"GB/s"})", name.c_str(), ours,
                     peer, ours / peer) +
             "\n";
  }
  if (argc > 2) write_file(argv[2], lines);
}
