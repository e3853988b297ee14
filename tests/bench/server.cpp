// What an exchange with the parameter server takes: rank 0 pushes a gradient of so many floats, with the update rule ASGD, and
// pulls the weights; the other ranks only serve. One line with medians over the rounds:
//   ELEMENTS PUSH PULL COPY      seconds: until the push is applied and acknowledged, until the weights are the caller's, and of
//                                copying as many bytes in memory, once, by one thread
// An exchange is one push with the weights in its answer; PULL is an exchange without a gradient, PUSH the rest of one with.
//   tandem-run -n 2 --strategy asgd --servers 1 bench_server ELEMENTS
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "dist/server/server.h"
#include "dist/job/job.h"
#include "layers/train/options.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc != 2) refuse("how many floats? bench_server ELEMENTS");
    const std::int64_t n = (std::atoll(argv[1]) + 1023) / 1024 * 1024;
    Member member(Job({.goes_on = true}).channel());
    const std::size_t bytes = std::size_t(n) * sizeof(float);
    auto gradient = member.memory(bytes), weights = member.memory(bytes);
    const Buffer g{gradient.get(), n, DType::f32}, w{weights.get(), n, DType::f32};
    constexpr int rounds = 15;
    member.begin(w, {}, std::vector<float>(std::size_t(n / 64), 1.f),
                 {.how = Asynchrony::parse("asp+asgd"),
                  .servers = member.size() - 1,
                  .learning_rate = [](std::int64_t) { return 1e-3; },
                  .snapshots = 0},
                 {0, rounds + 1});
    if (member.trains()) {
      member.pull(w, {});
      std::vector<char> from(bytes, 1), to(bytes, 2);
      std::vector<double> exchange, pull, copy;
      auto since = [](auto begin) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
      for (int round = 0; member.ticket(); round++) {
        auto begin = std::chrono::steady_clock::now();
        member.push(g, {}, 1, {});
        member.pull(w, {});
        const double whole = since(begin);
        begin = std::chrono::steady_clock::now();
        member.ask();
        member.pull(w, {});
        const double alone = since(begin);
        begin = std::chrono::steady_clock::now();
        std::memcpy(to.data(), from.data(), bytes);
        from[std::size_t(round)] = to[std::size_t(round) + 1];
        const double copied = since(begin);
        if (round == 0) continue;  // touches the memory for the first time
        exchange.push_back(whole), pull.push_back(alone), copy.push_back(copied);
      }
      auto median = [](std::vector<double>& v) {
        std::sort(v.begin(), v.end());
        return v[v.size() / 2];
      };
      const double e = median(exchange), p = median(pull);
      std::printf("%lld %.9f %.9f %.9f\n", static_cast<long long>(n), e - p, p, median(copy));
    }
    while (member.ticket()) {}
    member.finish(w, {});
  });
}
