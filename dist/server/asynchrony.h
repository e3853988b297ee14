// What --strategy says of training by a parameter server: how far the workers may be apart, and what is done with a
// gradient that comes late.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct Asynchrony {
  enum class Kind {
    bsp,  // bulk synchronous: the mean of all workers' gradients is one update
    ssp,  // stale synchronous: nobody is more than `staleness` steps ahead of the slowest; every push is an update
    asp,  // asynchronous: nobody waits
    // Once `quorum` workers have pushed, the others that live and have work are waited for `grace` seconds more; the
    // mean of what has come is one update. What comes later is part of the next one. Elastic and decoupled DiLoCo have
    // both; how a server does it is ours.
    quorum,
    // Nobody waits, and a push that is `bound` updates late or later is dropped; `batch` pushes are one step with their
    // mean.
    ringmaster,  // ringmaster:R=4, the bound (Maranjyan et al., arXiv 2501.16168)
    fedbuff,  // fedbuff:B=4, the batch; each push times 1/√(1 + τ) (Nguyen et al. 2021; that factor from a secondary
              // source)
    rennala  // rennala:B=4, the batch, of gradients of the present weights: the bound is 1 (Tyurin and Richtárik 2022)
  } kind = Kind::asp;
  int staleness = 0, quorum = 0;
  double grace = 1;  // our choice
  std::int64_t bound = INT64_MAX, batch = 1;
  std::string rule = "ddc-asgd";  // for make_rule()

  // An update is of several workers, who wait for it
  bool of_means() const { return kind == Kind::bsp || kind == Kind::quorum; }
  bool of_batches() const { return kind == Kind::fedbuff || kind == Kind::rennala; }
  bool takes_each() const { return kind == Kind::asp || kind == Kind::ssp; }  // every push is an update

  // "ddc-asgd" (and every other rule), "bsp", "ssp:3", "ssp:3+ddc-asgd", "asp+asgd", "quorum:3",
  // "quorum:3,grace=2+asgd". Without a rule ssp and asp have ddc-asgd, bsp and quorum, whose updates are of means,
  // asgd-m, and ringmaster, fedbuff and rennala asgd. Throws UsageError that says what there is.
  static Asynchrony parse(const std::string& text);
  static bool is_one(const std::string& text);  // begins as one of these
  static std::string forms();                   // what parse() reads, as a user writes it
  std::string text() const;                     // "ddc-asgd", "ssp:3+ddc-asgd"
  // Throws UsageError, which begins with the name, for a larger quorum
  void check_workers(const std::string& name, int workers) const;
};

}  // namespace tandem
