// Straggler emulation: how long a worker's step takes, where that is to be imitated: in the simulator's virtual time,
// and by sleeping.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "core/clock.h"
#include "core/random.h"

namespace tandem {

// One draw from the Gamma distribution with this shape and mean 1; shape 0: 1.
double gamma_draw(double shape, const Philox& random);

// Workers whose steps take longer, as in "3:4,5:2" (rank:factor, of ranks 0 to ranks − 1), or "half:4": the
// second half of them, of an odd number the smaller one. Throws UsageError.
std::map<int, double> parse_slower(const std::string& slow, int ranks);
// Throws UsageError for a shape of which gamma_draw() makes no times: 0, and 0.01 and more.
void check_shape(double shape);

// Workers that sleep until a step has taken as long as a Gamma distribution says, so that asynchrony can be shown on
// few cores.
struct StragglerEmulation {
  double mean = 0, shape = 100;       // seconds; 0: nobody sleeps. Shape 0: always the mean
  std::map<int, double> slower = {};  // rank → how many times as long its steps take
  // "60" or "60:100" (milliseconds, shape) and "3:4,5:2" (rank:factor). Throws UsageError.
  static StragglerEmulation parse(const std::string& pace, const std::string& slow, int ranks);
  // Sleeps until that rank's step, which began then, has taken as long as it shall; no longer where `stops` says so.
  void keep(int rank, std::uint32_t step, Clock::time_point began, const std::function<bool()>& stops) const;
};

}  // namespace tandem
