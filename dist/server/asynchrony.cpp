#include "dist/server/asynchrony.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "dist/server/rules.h"

namespace tandem {

// "3" or "3,grace=2"
static void read_quorum(Asynchrony& a, const std::string& text, const std::string& bound) {
  const std::string before = ",grace=";
  const std::size_t comma = std::min(bound.find(before), bound.size());
  const auto workers = parsed<int>(bound.substr(0, comma));
  const auto grace = comma < bound.size() ? parsed<double>(bound.substr(comma + before.size())) : a.grace;
  if (!workers || *workers < 1 || !grace || !(*grace >= 0 && *grace <= 1e6))
    refuse(text, ": write quorum:WORKERS or quorum:WORKERS,grace=SECONDS, with one worker at least");
  a.quorum = *workers;
  a.grace = *grace;
}

static const std::pair<const char*, Asynchrony::Kind> kinds[] = {{"bsp", Asynchrony::Kind::bsp},
                                                                 {"ssp", Asynchrony::Kind::ssp},
                                                                 {"asp", Asynchrony::Kind::asp},
                                                                 {"quorum", Asynchrony::Kind::quorum},
                                                                 {"ringmaster", Asynchrony::Kind::ringmaster},
                                                                 {"fedbuff", Asynchrony::Kind::fedbuff},
                                                                 {"rennala", Asynchrony::Kind::rennala}};
static std::optional<Asynchrony::Kind> kind_called(const std::string& name) {
  for (const auto& [called, kind] : kinds)
    if (name == called) return kind;
  return {};
}

// "R=4" of ringmaster, "B=4" of the others
static void read_constant(Asynchrony& a, const std::string& text, const std::string& constant) {
  const bool ringmaster = a.kind == Asynchrony::Kind::ringmaster;
  const std::string before = ringmaster ? "R=" : "B=";
  const auto number = constant.starts_with(before) ? parsed<int>(constant.substr(2)) : std::nullopt;
  if (!number || *number < 1)
    refuse(text, ringmaster ? ": write ringmaster:R=UPDATES, from 1: a push that is so late is dropped"
                            : ": write fedbuff:B=PUSHES or rennala:B=PUSHES, from 1: so many are one step");
  (ringmaster ? a.bound : a.batch) = *number;
  if (a.kind == Asynchrony::Kind::rennala) a.bound = 1;
}

Asynchrony Asynchrony::parse(const std::string& text) {
  Asynchrony a;
  const std::size_t plus = text.find('+');
  const std::string first = text.substr(0, plus), kind = first.substr(0, first.find(':'));
  const auto known = kind_called(kind);
  if (!known) {
    a.rule = text;
  } else {
    const std::string bound = first.substr(std::min(first.size(), kind.size() + 1));
    a.kind = *known;
    const auto [end, error] = std::from_chars(bound.data(), bound.data() + bound.size(), a.staleness);
    const bool number = error == std::errc() && end == bound.data() + bound.size() && a.staleness >= 0;
    if (a.kind == Kind::quorum)
      read_quorum(a, text, bound);
    else if (a.kind == Kind::ringmaster || a.of_batches())
      read_constant(a, text, bound);
    else if (kind == "ssp" ? !number : first != kind)
      refuse(text, ": write ssp:STEPS for workers that are at most so many steps apart, bsp, or asp");
    if (plus != std::string::npos)
      a.rule = text.substr(plus + 1);
    else if (!a.takes_each())
      a.rule = a.of_means() ? "asgd-m" : "asgd";
  }
  const auto rule = make_rule(a.rule);  // refuses what there is not
  if ((a.of_means() || a.of_batches()) && (rule->keeps().square_avg || rule->keeps().own || rule->keeps().sent))
    refuse(text, ": with ", kind, a.kind == Kind::bsp ? " nothing is late, and" : "",
           " the update is one for all workers: leave ", a.rule, " out");
  return a;
}

bool Asynchrony::is_one(const std::string& text) {
  const std::string name = text.substr(0, text.find_first_of(":+"));
  const auto rules = rule_names();
  return kind_called(name) || std::find(rules.begin(), rules.end(), name) != rules.end();
}

std::string Asynchrony::forms() {
  return "bsp, ssp:STEPS, quorum:WORKERS,grace=SECONDS, ringmaster:R=UPDATES, fedbuff:B=PUSHES, rennala:B=PUSHES or an "
         "update rule of the "
         "parameter server: " +
         listed(rule_names());
}

void Asynchrony::check_workers(const std::string& name, int workers) const {
  if (quorum > workers) refuse(name, ": there are ", workers, " workers: choose a quorum of as many or fewer");
}

std::string Asynchrony::text() const {
  if (kind == Kind::asp) return rule;
  std::ostringstream how;
  if (kind == Kind::quorum)
    how << "quorum:" << quorum << ",grace=" << grace;
  else if (kind == Kind::ringmaster)
    how << "ringmaster:R=" << bound;
  else if (of_batches())
    how << (kind == Kind::fedbuff ? "fedbuff" : "rennala") << ":B=" << batch;
  else
    how << (kind == Kind::bsp ? "bsp" : "ssp:" + std::to_string(staleness));
  return how.str() + "+" + rule;
}

}  // namespace tandem
