#include "dist/server/server_checks.h"

#include <cstdio>

#include "core/error.h"
#include "dist/server/rules.h"

namespace tandem {

void check_servers(int servers, int ranks) {
  if (servers >= ranks) refuse("--servers ", servers, ": there are ", ranks, " ranks, and one at least must train");
}

const SGDOptions& served_sgd(const Optimizer& optimizer, const Asynchrony& how) {
  const auto* sgd = dynamic_cast<const SGD*>(&optimizer);
  if (!sgd)
    refuse("--optimizer ", optimizer.name(), ": the parameter server's rules (", how.text(),
           ") are of SGD. Choose --optimizer sgd, or a strategy whose ranks make their own steps: all-reduce, local-sgd:8");
  return sgd->options();
}

void tell_what_does_not_hold(const Asynchrony& how, const SGDOptions& o, double clip, int workers, bool deterministic) {
  const std::string name = how.text();
  const Rule::Keeps keeps = make_rule(how.rule)->keeps();
  const bool synchronous = how.kind == Asynchrony::Kind::bsp;
  if (o.momentum > 0 && !keeps.velocity && !keeps.own)
    std::fprintf(stderr, "note: %s has no momentum: %g is not used\n", name.c_str(), o.momentum);
  else if (o.nesterov)
    std::fprintf(stderr, "note: under %s the momentum is the update rule's, not Nesterov's\n", name.c_str());
  if (clip > 0 && synchronous && workers > 1)
    std::fprintf(stderr, "note: --clip: under %s each rank clips the gradient of its share, not their mean\n", name.c_str());
  if (deterministic && !synchronous && workers > 1)
    std::fprintf(stderr, "note: --deterministic: each gradient is, but not the order in which they arrive (%s)\n", name.c_str());
}

}  // namespace tandem
