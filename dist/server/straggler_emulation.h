// Straggler emulation: prolongs a worker's step to a given time, by virtual time in the simulator and by sleeping
// elsewhere.
#pragma once
#include <map>
#include <string>

#include "core/batch.h"
#include "core/clock.h"
#include "core/random.h"

namespace tandem {

// Slow workers, as in "3:4,5:2" (rank:factor, of ranks 0 to ranks − 1), or "half:4": the second half of the ranks; if
// their number is odd, the smaller half. Throws UsageError.
// In the simulator also "classes:0-4" or "classes:0-4:8": workers with more than half of their pictures in these
// classes.
std::map<int, double> parse_slower(const std::string& slow, int ranks, const Parts& parts = {});
// Throws UsageError unless gamma_draw() supports the shape: 0, or from 0.01 to 1e9.
void check_shape(double shape);

// Workers that sleep until a step has taken a time drawn from a Gamma distribution, to show asynchrony on few cores.
struct StragglerEmulation {
  double mean = 0, shape = 100;       // seconds; 0: no worker sleeps. Shape 0: always the mean
  std::map<int, double> slower = {};  // rank → factor of its step times
  // "60" or "60:100" (milliseconds, shape) and "3:4,5:2" (rank:factor). Throws UsageError.
  static StragglerEmulation parse(const std::string& pace, const std::string& slow, int ranks);
  // The time drawn for a step, in seconds.
  double step_time(int rank, std::uint32_t step, std::uint64_t seed = 1) const;
  // Sleeps until that rank's step, which began at `began`, has taken its drawn time.
  void keep(int rank, std::uint32_t step, Clock::time_point began) const;
};

}  // namespace tandem
