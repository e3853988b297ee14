#include "layers/optim/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numbers>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

double between(double from, double to, double progress) {  // cosine annealing
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * progress));
}

double number(const std::string& text, const std::string& whole) {
  const auto v = parsed<double>(text);
  if (!v || !(*v > 0 && std::isfinite(*v))) refuse("--schedule ", whole, ": '", text, "' is not a positive number");
  return *v;
}

}  // namespace

double Schedule::factor(double step, double total, double steps_per_epoch) const {
  if (kind == Kind::one_cycle) {
    double top = std::max(1.0, rise * total - 1), last = std::max(top + 1, total - 1);
    if (step <= top) return between(1 / start, 1, step / top);
    return between(1, 1 / (start * finish), std::min(1.0, (step - top) / (last - top)));
  }
  double warm = warmup * steps_per_epoch;
  if (step < warm) return (step + 1) / warm;
  double epoch = step / steps_per_epoch;
  switch (kind) {
    case Kind::cosine: return between(1, 0, std::min(1.0, (step - warm) / std::max(1.0, total - warm)));
    case Kind::step: {
      double drops = every > 0 ? std::floor(epoch / every) : 0;
      for (double m : milestones) drops += epoch >= m;
      return std::pow(gamma, drops);
    }
    default: return 1;
  }
}

Schedule Schedule::parse(const std::string& text) {
  Schedule s;
  std::string rest = text;
  if (rest.starts_with("warmup:")) {
    const std::size_t plus = rest.find('+');
    if (plus == std::string::npos) refuse("--schedule ", text, ": expected warmup:EPOCHS+SCHEDULE");
    s.warmup = number(rest.substr(7, plus - 7), text);
    rest = rest.substr(plus + 1);
  }
  if (rest == "constant") return s;
  if (rest == "cosine" || (rest == "one-cycle" && s.warmup == 0)) {
    s.kind = rest == "cosine" ? Kind::cosine : Kind::one_cycle;
    return s;
  }
  const std::vector<std::string> parts = parts_of(rest, ':');  // step, its epochs, and perhaps gamma
  if (!rest.starts_with("step:") || parts.size() > 3 || parts[1].empty())
    refuse("--schedule ", text,
           ": choose constant, cosine, one-cycle, step:30:0.1, step:100,150:0.1, or warmup:5+ before one of them ",
           "(one-cycle warms up itself)");
  s.kind = Kind::step;
  if (parts.size() > 2) s.gamma = number(parts[2], text);
  for (const std::string& epoch : parts_of(parts[1], ',')) s.milestones.push_back(number(epoch, text));
  if (std::ranges::adjacent_find(s.milestones, std::greater_equal()) != s.milestones.end())
    refuse("--schedule ", text, ": its epochs must rise");
  if (s.milestones.size() == 1) {
    s.every = s.milestones[0];
    s.milestones.clear();
  }
  return s;
}

const char* name_of(RateScale scale) { return std::array{"none", "sqrt", "linear", "clipped"}[std::size_t(scale)]; }

double scaled(RateScale scale, double rate, int n) {
  return scale == RateScale::none ? rate : scale == RateScale::square_root ? rate * std::sqrt(n) : rate * n;
}

}  // namespace tandem
