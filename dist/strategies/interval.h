// How many steps a rank makes of its own between two exchanges: a number, or more and more of them as the learning rate
// η decays, by the quadratic synchronization rule (Gu et al., ICLR 2024): max(steps, ⌊(α/η)²⌋). Where the rate rises, η
// is the one that it rises to, so that a warm-up does not begin with few exchanges.
#pragma once
#include <optional>
#include <string>

#include "layers/train/strategy.h"

namespace tandem {

struct Interval {
  std::int64_t steps = 8;
  double alpha = 0;  // 0: always `steps`

  // "100"; "qsr:0.2": at least `steps`; "qsr:0.2:4": at least 4. Nothing where `text` is none of these.
  static std::optional<Interval> parse(const std::string& text, std::int64_t steps);
  std::string name() const;  // "100", "qsr:0.2:4"
  // Of the round that begins with this step, at its rate.
  std::int64_t at(double rate, std::int64_t step, const RunPlan& plan) const;
};

}  // namespace tandem
