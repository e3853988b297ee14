#include "dist/server/asynchrony.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/spec.h"
#include "core/text.h"
#include "dist/server/rules.h"
#include "layers/optim/optimizer.h"

namespace tandem {

static constexpr const char* kinds[] = {"bsp", "ssp", "asp", "quorum", "ringmaster", "fedbuff", "rennala"};

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
  const auto known = std::ranges::find(kinds, kind);
  if (known == std::end(kinds)) {
    a.rule = text;
  } else {
    a.kind = Kind(known - kinds);
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

bool Asynchrony::is_one(const std::string& text) { return std::ranges::count(names(), spec_name(text)) > 0; }

std::vector<std::string> Asynchrony::names() {
  std::vector<std::string> all = rule_names();
  all.insert(all.end(), std::begin(kinds), std::end(kinds));
  return all;
}

std::string Asynchrony::options(const std::string& name) {
  const auto known = std::ranges::find(kinds, name);
  if (known == std::end(kinds)) return rule_options(name);
  Asynchrony a{.kind = Kind(known - kinds)};
  std::vector<SpecField> fields = fields_of(a);
  if (!fields.empty()) fields[0].value.clear();  // required
  return described(fields);
}

void Asynchrony::check_workers(const std::string& name, int workers) const {
  if (quorum > workers)
    refuse(name, ": there ", workers == 1 ? "is " : "are ", counted(workers, "worker"),
           ": choose a quorum of as many or fewer");
}

std::string Asynchrony::text() const {
  if (kind == Kind::asp) return rule;
  std::string text = kinds[int(kind)];
  Asynchrony printed = *this;
  std::string between = ":";
  for (const SpecField& f : fields_of(printed))
    text += std::exchange(between, ",") + (f.bare ? "" : f.key + "=") + f.value;
  return text + "+" + rule;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
void check_servers(int servers, int ranks) {
  if (servers < 0 || servers >= ranks)
    refuse("--servers ", servers, ": of ", counted(ranks, "rank"), " one at least must train");
}

const SGDOptions& served_sgd(const Optimizer& optimizer, const Asynchrony& how) {
  const auto* sgd = dynamic_cast<const SGD*>(&optimizer);
  if (!sgd)
    refuse("--optimizer ", optimizer.name(), ": the parameter server's rules (", how.text(),
           ") are of SGD. Choose --optimizer sgd, or a strategy whose ranks make their own steps: all-reduce, "
           "local-sgd:8");
  return sgd->options();
}

// The options that replace the momentum that a rule lacks. Measured with 4 workers (dist/lab/DEFAULTS.md).
static std::string instead_of_momentum(const Asynchrony& how, double rate) {
  if (how.rule == "rescaled") return "--strategy outer+rescaled";
  if (how.kind == Asynchrony::Kind::rennala) return "--lr " + digits(double(how.batch) * rate);
  const double times = how.kind == Asynchrony::Kind::fedbuff ? 2 * double(how.batch) : how.rule == "sa-asgd" ? 4 : 2;
  return "--lr " + digits(times * rate) + " --clip 1";
}

void note_ineffective_options(const Asynchrony& how, const Optimizer& optimizer, int workers, bool deterministic) {
  const SGDOptions& o = served_sgd(optimizer, how);
  const std::string name = how.text();
  const Rule::Keeps keeps = make_rule(how.rule)->keeps();
  const bool synchronous = how.kind == Asynchrony::Kind::bsp;
  if (o.momentum > 0 && !keeps.velocity && !keeps.own)
    std::fprintf(stderr, "note: %s has no momentum: %g is not used. Try %s\n", name.c_str(), o.momentum,
                 instead_of_momentum(how, optimizer.learning_rate()).c_str());
  else if (o.momentum > 0.5 && how.takes_each() && keeps.velocity && !keeps.own && !keeps.averages && workers > 1)
    std::fprintf(stderr, "note: under %s late gradients add momentum of their own to %g. Try %s\n", name.c_str(),
                 o.momentum,
                 how.rule.starts_with("gap-aware") ? ("--lr " + digits(optimizer.learning_rate() / 2)).c_str()
                                                   : "--momentum 0.3");
  else if (o.nesterov)
    std::fprintf(stderr, "note: under %s the momentum is the update rule's, not Nesterov's\n", name.c_str());
  if (optimizer.clip_norm > 0 && synchronous && workers > 1)
    std::fprintf(stderr, "note: --clip: under %s each rank clips the gradient of its share, not their mean\n",
                 name.c_str());
  if (deterministic && !synchronous && workers > 1)
    std::fprintf(stderr, "note: --deterministic: each gradient is, but not the order in which they arrive (%s)\n",
                 name.c_str());
}

}  // namespace tandem
