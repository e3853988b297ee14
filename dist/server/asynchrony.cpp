#include "dist/server/asynchrony.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "dist/server/rules.h"

namespace tandem {

Asynchrony Asynchrony::parse(const std::string& text) {
  Asynchrony a;
  const std::size_t plus = text.find('+');
  const std::string first = text.substr(0, plus), kind = first.substr(0, first.find(':'));
  if (kind != "bsp" && kind != "ssp" && kind != "asp") {
    a.rule = text;
  } else {
    const std::string bound = first.substr(std::min(first.size(), kind.size() + 1));
    a.kind = kind == "bsp" ? Kind::bsp : kind == "ssp" ? Kind::ssp : Kind::asp;
    const auto [end, error] = std::from_chars(bound.data(), bound.data() + bound.size(), a.staleness);
    const bool number = error == std::errc() && end == bound.data() + bound.size() && a.staleness >= 0;
    if (kind == "ssp" ? !number : first != kind)
      refuse(text, ": write ssp:STEPS for workers that are at most so many steps apart, bsp, or asp");
    if (plus != std::string::npos)
      a.rule = text.substr(plus + 1);
    else if (a.kind == Kind::bsp)
      a.rule = "asgd-m";
  }
  const auto rule = make_rule(a.rule);  // refuses what there is not
  if (a.kind == Kind::bsp && (rule->keeps().square_avg || rule->keeps().own || rule->keeps().sent))
    refuse(text, ": with bsp nothing is late, and the update is one for all workers: leave ", a.rule, " out");
  return a;
}

bool Asynchrony::is_one(const std::string& text) {
  const std::string name = text.substr(0, text.find_first_of(":+"));
  const auto rules = rule_names();
  return name == "bsp" || name == "ssp" || name == "asp" || std::find(rules.begin(), rules.end(), name) != rules.end();
}

std::string Asynchrony::text() const {
  if (kind == Kind::asp) return rule;
  return (kind == Kind::bsp ? "bsp+" : "ssp:" + std::to_string(staleness) + "+") + rule;
}

}  // namespace tandem
