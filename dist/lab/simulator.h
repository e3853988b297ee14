// Simulates asynchronous training on one machine. K virtual workers compute real gradients, one after the other, in the
// order of a virtual clock. The update rules are those of the server. One binary on one machine gives the same bits in
// every run. Delays and virtual times are the same on every machine, accuracies up to rounding.
//
// A worker's step takes a time drawn from a Gamma distribution (as Hakimi et al., arXiv 1907.11612, have it), then its
// gradient crosses its link. The servers are spread evenly over the workers' machines. Links are not shared, and
// servers take no time; this simplification is ours.
#pragma once
#include <map>
#include <memory>

#include "dist/server/rules.h"
#include "layers/train/fit.h"

namespace tandem {

struct VirtualCluster {
  int workers = 8;
  // Seconds of a step: mean, and shape of the distribution; shape 0: always the mean
  double compute = 0.128, shape = 100;
  std::map<int, double> slower = {};  // worker → how many times as long its steps take
  double latency = 0, bandwidth = 0;  // of a worker's link: seconds, and bytes a second each way; 0: infinite
};

struct SimulatorOptions {
  // As --strategy: "ddc-asgd", "ssp:3", … (dist/server/asynchrony.h), or "all-reduce", or local-sgd:H,
  // post-local-sgd:H, cocod-sgd:H, easgd:H and outer:H=…, whose workers make H steps of their own between two
  // exchanges.
  std::string strategy = "ddc-asgd";
  std::shared_ptr<const Rule> rule = {};  // one of your own, in place of that of an asynchronous strategy
  VirtualCluster cluster = {};
  int epochs = 1;          // of all workers together
  Schedule schedule = {};  // by pictures applied, as on the server
  std::uint64_t seed = 1;
  std::string metrics = {};  // file for JSON lines, as fit() writes them; their seconds are virtual
  bool progress = true;      // a line an epoch on stderr
  // On the validation and test data, in epochs: 10: after epochs 10, 20, …; 0.25: four times an epoch. And at the end.
  double evaluate_every = 1;
  double until = 2;        // ends with the evaluation that reaches this accuracy, 0 to 1, on the test data or else the
                           // validation data; 2: never
  Settings settings = {};  // what else decides how the run goes (the loss, say): a part of its name in the metrics
};

struct SimulatorReport {
  struct Point {
    double epoch = 0, seconds = 0;  // virtual, since the start
    std::optional<double> validation_accuracy{}, test_accuracy{};
  };
  std::vector<EpochReport> epochs;   // seconds are virtual
  std::vector<Point> evaluations;    // in the order of time, at least one update apart
  double seconds = 0;                // virtual, of all
  std::vector<std::int64_t> delays;  // delays[τ]: pushes that were so late
  double gap = 0;                    // mean ‖w_now − w_sent‖/√P at a push
  double correction = 0;             // mean ‖c‖/‖g‖
  std::int64_t dropped = 0;          // pushes that were too late; their batches were trained again
  double participation = 1;          // the share of all pushes that was applied
  std::int64_t refused = 0;          // pushes with a value that is not finite
  bool reached = false;              // SimulatorOptions::until
  bool diverged = false;             // a run of them: it was ended
  double computing = 0;  // seconds, not virtual, in which this process loaded batches and computed gradients
};

// Throws UsageError for a strategy that there is not and for slow workers that there are not; costs nothing.
void check_simulation(const SimulatorOptions& options);

// Trains; afterwards the model holds the servers' weights. A worker costs as many vectors as its rule keeps for it, 1
// to 3. Throws UsageError as check_simulation() does, for more workers than the memory holds.
SimulatorReport simulate(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
                         const SimulatorOptions& options);

}  // namespace tandem
