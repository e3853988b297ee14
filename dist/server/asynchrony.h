// The synchronization mode of a parameter-server --strategy: how far the workers may be apart, and how a late gradient
// is handled.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tandem {

class Optimizer;
struct SGDOptions;

struct Asynchrony {
  enum class Kind {
    bsp,  // bulk synchronous: the mean of all workers' gradients is one update
    ssp,  // stale synchronous: no worker is more than `staleness` steps ahead of the slowest; every push is an update
    asp,  // asynchronous: no worker waits
    // After `quorum` workers have pushed, the server waits `grace` more seconds for the other live workers with work.
    // The mean of the pushes that have arrived is one update. A later push is part of the next update. Elastic and
    // decoupled DiLoCo have a quorum and a grace time; this server implementation is ours.
    quorum,
    // The last three: no worker waits. A push that is `bound` or more updates late is dropped. `batch` pushes make one
    // step with their mean.
    ringmaster,  // ringmaster:R=4, R is the bound (Maranjyan et al., arXiv 2501.16168)
    // fedbuff:B=4, B is the batch; each push is multiplied by 1/√(1 + τ) (Nguyen et al. 2021; factor from a secondary
    // source)
    fedbuff,
    rennala  // rennala:B=4, B is the batch, of gradients at the current weights: bound 1 (Tyurin and Richtárik 2022)
  } kind = Kind::asp;
  int staleness = 0, quorum = 0;
  double grace = 1;  // our choice
  std::int64_t bound = INT64_MAX, batch = 1;
  std::string rule = "ddc-asgd";  // as for make_rule()

  // An update combines the pushes of several workers, which wait for it
  bool of_means() const { return kind == Kind::bsp || kind == Kind::quorum; }
  bool of_batches() const { return kind == Kind::fedbuff || kind == Kind::rennala; }
  bool takes_each() const { return kind == Kind::asp || kind == Kind::ssp; }  // every push is an update

  // "ddc-asgd" (and every other rule), "bsp", "ssp:3", "ssp:3+ddc-asgd", "asp+asgd", "quorum:3",
  // "quorum:3,grace=2+asgd". Default rules: ddc-asgd for ssp and asp; asgd-m for bsp and quorum, whose updates are
  // means; asgd for ringmaster, fedbuff and rennala. Throws UsageError that lists the valid forms.
  static Asynchrony parse(const std::string& text);
  static bool is_one(const std::string& text);          // starts with one of these names
  static std::vector<std::string> names();              // all of these names
  static std::string options(const std::string& name);  // the options of that name, by described() in core/spec.h
  std::string text() const;                             // "ddc-asgd", "ssp:3+ddc-asgd"
  // Throws UsageError, which begins with `name`, if the quorum is larger than `workers`
  void check_workers(const std::string& name, int workers) const;
};

struct ServerOptions {
  Asynchrony how = {};
  int servers = 0;  // the last `servers` ranks only serve; 0: all ranks train and serve
  double momentum = 0.9;
  // The learning rate after this number of pushes was applied to a shard. It counts no samples, because an epoch's
  // smaller last batch is a step too.
  std::function<double(std::int64_t pushes)> learning_rate = {};
  DType wire = DType::f32;   // type of gradients; bf16 halves the bytes
  double snapshots = 10;     // minimum seconds between two snapshots; 0: none
  std::uint64_t memory = 0;  // bytes that this rank has for snapshots; 0: unknown
  bool record = false;       // record the order of events
  // If workers have pictures of their own: those that are lost with a worker, "its 600 pictures, of classes 0, 4"
  std::function<std::string(int worker)> data_of = {};
};

// Throws UsageError if no rank would train. Call it before the rendezvous if possible.
void check_servers(int servers, int ranks);
// The optimizer's options, for the servers' rules. Throws UsageError for an optimizer that no server implements.
const SGDOptions& served_sgd(const Optimizer& optimizer, const Asynchrony& how);
// Prints notes on stderr: settings of a program that have no effect under a parameter server.
void note_ineffective_options(const Asynchrony& how, const Optimizer& optimizer, int workers, bool deterministic);

}  // namespace tandem
