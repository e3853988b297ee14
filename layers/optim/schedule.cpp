#include "layers/optim/schedule.h"

#include <cmath>
#include <numbers>
#include <sstream>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

double between(double from, double to, double progress) {  // cosine annealing
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * progress));
}

double number(const std::string& text, const std::string& whole) {
  const auto v = parsed<double>(text);
  require(v && *v > 0 && std::isfinite(*v), "schedule '", whole, "': '", text, "' is not a positive number");
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
    std::size_t plus = rest.find('+');
    require(plus != std::string::npos, "schedule '", text, "': warmup:EPOCHS+SCHEDULE");
    s.warmup = number(rest.substr(7, plus - 7), text);
    rest = rest.substr(plus + 1);
  }
  if (rest == "constant") return s;
  if (rest == "cosine") {
    s.kind = Kind::cosine;
    return s;
  }
  if (rest == "one-cycle" && s.warmup == 0) {
    s.kind = Kind::one_cycle;
    return s;
  }
  if (rest.starts_with("step:")) {
    s.kind = Kind::step;
    std::string list = rest.substr(5);
    if (std::size_t colon = list.find(':'); colon != std::string::npos) {
      s.gamma = number(list.substr(colon + 1), text);
      list = list.substr(0, colon);
    }
    std::istringstream in(list);
    for (std::string item; std::getline(in, item, ',');) s.milestones.push_back(number(item, text));
    for (std::size_t i = 1; i < s.milestones.size(); i++)
      require(s.milestones[i] > s.milestones[i - 1], "schedule '", text, "': its epochs must rise");
    require(!s.milestones.empty() && !list.ends_with(','), "schedule '", text, "': step:EPOCHS[:GAMMA]");
    if (s.milestones.size() == 1) {
      s.every = s.milestones[0];
      s.milestones.clear();
    }
    return s;
  }
  fail("no schedule '", text,
       "': constant, cosine, one-cycle, step:30:0.1, step:100,150:0.1, or warmup:5+ before one of them ",
       "(one-cycle warms up itself)");
}

std::optional<RateScale> rate_scale_in(const std::string& text) {
  for (RateScale s : {RateScale::none, RateScale::square_root, RateScale::linear, RateScale::clipped})
    if (text == name_of(s)) return s;
  return {};
}

const char* name_of(RateScale scale) {
  switch (scale) {
    case RateScale::none: return "none";
    case RateScale::square_root: return "sqrt";
    case RateScale::linear: return "linear";
    default: return "clipped";
  }
}

double scaled(RateScale scale, double rate, int n) {
  return scale == RateScale::none ? rate : scale == RateScale::square_root ? rate * std::sqrt(n) : rate * n;
}

}  // namespace tandem
