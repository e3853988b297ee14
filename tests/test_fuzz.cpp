// Seeded mutations of small valid inputs on everything that reads bytes or text from outside (fuzz/targets.h). Input k
// of a format is a function of k only, so a failure can be had again. TANDEM_FUZZ_INPUTS: how many of each (2000).
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/random.h"
#include "tests/fuzz/targets.h"

namespace tandem::test {
namespace {

constexpr unsigned limit = 20;  // seconds for one input

// What the handler says when the process dies: set before every input.
char running[64];

void say_and_die(int signal) {
  (void)!write(2, running, std::strlen(running));
  if (signal == SIGALRM) (void)!write(2, ": it hangs\n", 11);
  std::signal(signal, SIG_DFL);
  raise(signal == SIGALRM ? SIGABRT : signal);
}

// Changes `b` in one to six ways.
Bytes mutated(const FuzzTarget& target, std::uint32_t number, std::uint32_t input) {
  const Philox random(1, Stream::test, number, input);
  std::uint32_t drawn = 0;
  auto draw = [&](std::size_t below) { return std::size_t((std::uint64_t{random.word(drawn++)} * below) >> 32); };
  Bytes b = target.seeds[draw(target.seeds.size())];
  constexpr std::uint64_t lengths[] = {0,       1,          2,          3,          7,          8,          16,
                                       127,     128,        255,        256,        0x7fff,     0x8000,     0xffff,
                                       0x10000, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 62, ~0ull};
  for (std::size_t change = 1 + draw(6); change > 0; change--) {
    const std::size_t at = draw(b.size() + 1), left = b.size() - at;
    switch (draw(8)) {
      case 0: b.resize(at); break;  // truncated
      case 1:
        if (left) b[at] ^= std::uint8_t(1u << draw(8));
        break;
      case 2:
        if (left) b[at] = std::uint8_t(draw(256));
        break;
      case 3: {  // a length field of 1 to 8 bytes, of either order
        const std::size_t width = std::size_t{1} << draw(4);
        const std::uint64_t v = lengths[draw(std::size(lengths))];
        const bool little = draw(2);
        for (std::size_t i = 0; i < std::min(width, left); i++)
          b[at + i] = std::uint8_t(v >> 8 * (little ? i : width - 1 - i));
        break;
      }
      case 4: {  // a piece of a seed is put in, or over what is there
        const Bytes& other = target.seeds[draw(target.seeds.size())];
        const std::size_t from = draw(other.size() + 1),
                          count = draw(std::min<std::size_t>(64, other.size() - from) + 1);
        if (draw(2)) b.erase(b.begin() + std::ptrdiff_t(at), b.begin() + std::ptrdiff_t(at + std::min(count, left)));
        b.insert(b.begin() + std::ptrdiff_t(at), other.begin() + std::ptrdiff_t(from),
                 other.begin() + std::ptrdiff_t(from + count));
        break;
      }
      case 5: b.erase(b.begin() + std::ptrdiff_t(at), b.begin() + std::ptrdiff_t(at + draw(left + 1))); break;
      case 6: {  // a digit, for formats with numbers in words
        auto digit = std::find_if(b.begin() + std::ptrdiff_t(at), b.end(), [](auto c) { return c >= '0' && c <= '9'; });
        if (digit != b.end()) *digit = std::uint8_t("0123456789-+.e,: "[draw(17)]);
        break;
      }
      case 7: b.insert(b.begin() + std::ptrdiff_t(at), 1 + draw(16), std::uint8_t(draw(256))); break;
    }
  }
  return b;
}

struct Fuzz : testing::TestWithParam<int> {};

TEST_P(Fuzz, TakesOrRefusesEverything) {
  const FuzzTarget& target = fuzz_targets()[GetParam()];
  for (const Bytes& seed : target.seeds) EXPECT_NO_THROW(target.run(seed));
  const char* text = std::getenv("TANDEM_FUZZ_INPUTS");
  const std::uint32_t inputs = text ? std::uint32_t(std::strtoul(text, nullptr, 10)) : 2000;
  void (*before[3])(int) = {std::signal(SIGALRM, say_and_die), std::signal(SIGSEGV, say_and_die),
                            std::signal(SIGABRT, say_and_die)};
  for (std::uint32_t i = 0; i < inputs; i++) {
    const Bytes input = mutated(target, std::uint32_t(GetParam()), i);
    std::snprintf(running, sizeof running, "%s, input %u", target.name.c_str(), i);
    alarm(limit);
    try {
      target.run(input);
    } catch (const std::exception& e) {
      FAIL() << running << " throws: " << e.what();
    }
  }
  alarm(0);
  std::signal(SIGALRM, before[0]);
  std::signal(SIGSEGV, before[1]);
  std::signal(SIGABRT, before[2]);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fuzz, testing::Range(0, int(fuzz_targets().size())),
                         [](const auto& info) { return fuzz_targets()[info.param].name; });

}  // namespace
}  // namespace tandem::test
