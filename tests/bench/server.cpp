// What an exchange with the parameter server takes: rank 0 pushes a gradient of so many floats, with the update rule
// ASGD, and pulls the weights; the other ranks only serve. One line with medians over the rounds:
//   ELEMENTS PUSH PULL COPY      seconds: until the push is applied and acknowledged, until the weights are the
//   caller's, and of
//                                copying as many bytes in memory, once, by one thread
// An exchange is one push with the weights in its answer; PULL is an exchange without a gradient, PUSH the rest of one
// with.
//   tandem-run -n 2 --strategy asgd --servers 1 bench_server ELEMENTS
#include <cstdio>
#include <cstring>

#include "dist/job/job.h"
#include "dist/server/server.h"
#include "layers/train/options.h"
#include "tests/bench/timing.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc != 2 || std::atoll(argv[1]) < 1) refuse("how many floats? bench_server ELEMENTS");
    const std::int64_t n = (std::atoll(argv[1]) + 1023) / 1024 * 1024;
    ServerNode server_node(Job({.goes_on = true}).channel());
    const std::size_t bytes = std::size_t(n) * sizeof(float);
    auto gradient = server_node.memory(bytes), weights = server_node.memory(bytes);
    const Buffer g{gradient.get(), n, DType::f32}, w{weights.get(), n, DType::f32};
    constexpr int rounds = 15;
    server_node.begin(w, {}, std::vector<RuleBlock>(std::size_t(n / 64)),
                      {.how = Asynchrony::parse("asp+asgd"),
                       .servers = server_node.size() - 1,
                       .learning_rate = [](std::int64_t) { return 1e-3; },
                       .snapshots = 0},
                      {0, rounds + 1});
    if (server_node.trains()) {
      server_node.pull(w, {});
      std::vector<char> from(bytes, 1), to(bytes, 2);
      std::vector<double> exchange, pull, copy;
      for (int round = 0; server_node.lease(); round++) {
        const double whole = seconds_of([&] {
          server_node.push(g, {}, 1, {});
          server_node.pull(w, {});
        });
        const double alone = seconds_of([&] {
          server_node.ask();
          server_node.pull(w, {});
        });
        const double copied = seconds_of([&] {
          std::memcpy(to.data(), from.data(), bytes);
          from[round] = to[round + 1];
        });
        if (round == 0) continue;  // touches the memory for the first time
        exchange.push_back(whole), pull.push_back(alone), copy.push_back(copied);
      }
      const double e = median(exchange), p = median(pull);
      std::printf("%lld %.9f %.9f %.9f\n", static_cast<long long>(n), e - p, p, median(copy));
    }
    while (server_node.lease()) {}
    server_node.finish(w, {});
  });
}
