#include "dist/server/straggler_emulation.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/text.h"
#include "dist/job/environment.h"

namespace tandem {

static double number(const std::string& option, const std::string& text, double low) {
  double v = 0;
  read_value(option + ": ", text, number_field(option, v, low, 1e9));
  return v;
}

void check_shape(double shape) {
  if (shape != 0 && !(shape >= 0.01 && shape <= 1e9))
    refuse("a Gamma distribution of shape ", shape, ": expected 0 (always the mean), or 0.01 to 1e9");
}

std::map<int, double> parse_slower(const std::string& slow, int ranks, const Parts& parts) {
  std::map<int, double> slower;
  std::istringstream items(slow);
  for (std::string item; std::getline(items, item, ',');) {
    if (item.starts_with("classes:")) {
      std::size_t first = 0, last = 0;
      char behind;
      const std::vector<std::string> words = parts_of(item, ':');
      if (parts.pictures.empty() || words.size() < 2 || words.size() > 3 ||
          std::sscanf(words[1].c_str(), "%zu-%zu%c", &first, &last, &behind) != 2)
        refuse(
            "--slow ", slow,
            ": classes:FIRST-LAST or classes:FIRST-LAST:FACTOR is for build/simulate with --partition; elsewhere, and "
            "without it, RANK:FACTOR");
      if (first > last || last >= parts.pictures[0].size())
        refuse("--slow ", slow, ": there are classes 0 to ", parts.pictures[0].size() - 1, ", the lower number first");
      const double factor = words.size() == 3 ? number("--slow " + slow, words[2], 0.001) : 4;
      for (int w = 0; w < ranks; w++)
        if (2 * parts.of(w, first, last) > parts.of(w)) slower[w] = factor;
      continue;
    }
    const std::size_t colon = item.find(':');
    if (colon == std::string::npos) refuse("--slow ", slow, ": expected RANK:FACTOR, as in --slow 3:4, or half:FACTOR");
    const std::string who = item.substr(0, colon);
    const double factor = number("--slow " + slow, item.substr(colon + 1), 0.001);
    const double first = who == "half" ? ranks - ranks / 2 : number("--slow " + slow, who, 0);
    const int end = who == "half" ? ranks : int(first) + 1;
    if (end > ranks || first != std::floor(first))
      refuse("--slow ", slow, ": there is no ", who, " among 0 to ", ranks - 1);
    for (int rank = int(first); rank < end; rank++) slower[rank] = factor;
  }
  return slower;
}

StragglerEmulation StragglerEmulation::parse(const std::string& pace, const std::string& slow, int ranks) {
  StragglerEmulation p;
  if (!pace.empty()) {
    const std::size_t colon = pace.find(':');
    p.mean = number("--pace " + pace, pace.substr(0, colon), 0) / 1e3;
    if (colon != std::string::npos) p.shape = number("--pace " + pace, pace.substr(colon + 1), 0);
    check_shape(p.shape);
  }
  p.slower = parse_slower(slow, ranks);
  if (!p.slower.empty() && p.mean == 0) refuse("--slow ", slow, ": say how long a step takes too: --pace MILLISECONDS");
  return p;
}

double StragglerEmulation::step_time(int rank, std::uint32_t step, std::uint64_t seed) const {
  const auto slow = slower.find(rank);
  return mean * (slow == slower.end() ? 1 : slow->second) *
         gamma_draw(shape, Philox(seed, Stream::step_time, std::uint32_t(rank), step));
}

void StragglerEmulation::keep(int rank, std::uint32_t step, Clock::time_point began) const {
  if (mean <= 0) return;
  std::this_thread::sleep_for(std::chrono::duration<double>(step_time(rank, step) - seconds_since(began)));
}

}  // namespace tandem
