#include "dist/server/asynchrony.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/spec.h"
#include "dist/server/rules.h"

namespace tandem {

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

// The options of each kind. The first one is required.
static std::vector<SpecField> fields_of(Asynchrony& a) {
  using Kind = Asynchrony::Kind;
  switch (a.kind) {
    case Kind::ssp: return {bare(number_field("steps", a.staleness, 0, 1e9))};
    case Kind::quorum: return {bare(number_field("workers", a.quorum, 1, 1e9)), number_field("grace", a.grace, 0, 1e6)};
    case Kind::ringmaster: return {number_field("R", a.bound, 1, 1e9)};
    case Kind::fedbuff:
    case Kind::rennala: return {number_field("B", a.batch, 1, 1e9)};
    default: return {};
  }
}

Asynchrony Asynchrony::parse(const std::string& text) {
  Asynchrony a;
  const std::size_t plus = text.find('+');
  const std::string first = text.substr(0, plus), kind = spec_name(text);
  const auto known = kind_called(kind);
  if (!known) {
    a.rule = text;
  } else {
    a.kind = *known;
    read_spec(first, fields_of(a));
    if (first == kind && !fields_of(a).empty())
      refuse(text, ": write ", kind, ":", fields_of(a)[0].key, "=NUMBER, ", fields_of(a)[0].expects);
    if (a.kind == Kind::rennala) a.bound = 1;
    if (plus != std::string::npos)
      a.rule = text.substr(plus + 1);
    else if (!a.takes_each())
      a.rule = a.of_means() ? "asgd-m" : "asgd";
  }
  const auto rule = make_rule(a.rule);  // refuses a rule that does not exist
  if ((a.of_means() || a.of_batches()) && (rule->keeps().square_avg || rule->keeps().own || rule->keeps().sent))
    refuse(text, ": with ", kind, a.kind == Kind::bsp ? " nothing is late, and" : "",
           " the update is one for all workers: leave ", a.rule, " out");
  return a;
}

bool Asynchrony::is_one(const std::string& text) {
  const std::string name = spec_name(text);
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
