// What --strategy says of training by a parameter server: how far the workers may be apart, and what is done with a gradient
// that comes late.
#pragma once
#include <string>

namespace tandem {

struct Asynchrony {
  enum class Kind {
    bsp,  // bulk synchronous: the mean of all workers' gradients is one update
    ssp,  // stale synchronous: nobody is more than `staleness` steps ahead of the slowest; every push is an update
    asp   // asynchronous: nobody waits
  } kind = Kind::asp;
  int staleness = 0;
  std::string rule = "ddc-asgd";  // for make_rule()

  // "ddc-asgd" (and every other rule), "bsp", "ssp:3", "ssp:3+ddc-asgd", "asp+asgd". Without a rule ssp and asp have ddc-asgd,
  // and bsp, where nothing is late, asgd-m.
  // Throws UsageError that says what there is.
  static Asynchrony parse(const std::string& text);
  static bool is_one(const std::string& text);  // begins as one of these
  std::string text() const;  // "ddc-asgd", "ssp:3+ddc-asgd"
};

}  // namespace tandem
