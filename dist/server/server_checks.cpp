#include "dist/server/server_checks.h"

#include <cstdio>

#include "core/error.h"
#include "core/text.h"
#include "dist/server/rules.h"

namespace tandem {

void check_servers(int servers, int ranks) {
  if (servers < 0 || servers >= ranks)
    refuse("--servers ", servers, ": there are ", ranks, " ranks, and one at least must train");
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
  const bool synchronous = how.kind == Asynchrony::Kind::bsp, delayed = how.rule.starts_with("delayed-nesterov");
  if (o.momentum > 0 && !keeps.velocity && !keeps.own)
    std::fprintf(stderr, "note: %s has no momentum: %g is not used. Try %s\n", name.c_str(), o.momentum,
                 instead_of_momentum(how, optimizer.learning_rate()).c_str());
  else if (o.momentum > 0.5 && how.takes_each() && keeps.velocity && !keeps.own && !delayed && workers > 1)
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
