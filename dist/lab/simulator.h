// Simulates asynchronous training on one machine. K virtual workers compute real gradients, one after the other, in the
// order of a virtual clock. The update rules are those of the server. One binary on one machine gives the same bits in
// every run. Delays and virtual times are the same on every machine, accuracies up to rounding.
//
// A worker's step takes a time drawn from a Gamma distribution (as in Hakimi et al., arXiv 1907.11612). Then its
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
  std::map<int, double> slower = {};  // worker → factor of its step times
  double latency = 0, bandwidth = 0;  // of a worker's link: seconds, and bytes per second each way; 0: infinite
};

struct SimulatorOptions {
  // As --strategy: "ddc-asgd", "ssp:3", … (dist/server/asynchrony.h), or "all-reduce", or local-sgd:H,
  // post-local-sgd:H, cocod-sgd:H, easgd:H and outer:H=…, whose workers make H local steps between two exchanges, or
  // fedavg, fedprox, scaffold and fednova (federated.h).
  std::string strategy = "ddc-asgd";
  std::shared_ptr<const Rule> rule = {};  // the user's own rule, instead of that of an asynchronous strategy
  VirtualCluster cluster = {};
  int epochs = 1;          // of all workers together
  Schedule schedule = {};  // by batches applied, as on the server
  std::uint64_t seed = 1;
  std::string metrics = {};  // file for JSON lines in the format of fit(); seconds are virtual
  bool progress = true;      // prints a line per epoch on stderr
  // Interval of evaluations on validation and test data, in epochs. 10: after epochs 10, 20, …; 0.25: four times per
  // epoch. There is also one at the end.
  double evaluate_every = 1;
  // Stops after the evaluation that reaches this accuracy, 0 to 1, on the test data or else the validation data.
  // 2: never.
  double until = 2;
  // Other settings that affect the run (for example the loss); a part of its name in the metrics.
  Settings settings = {};
};

struct SimulatorReport {
  struct Point {
    double epoch = 0, seconds = 0;  // virtual, since the start
    std::optional<double> validation_accuracy{}, test_accuracy{};
  };
  std::vector<EpochReport> epochs;     // seconds are virtual
  std::vector<Point> evaluations;      // in the order of time, at least one update apart
  std::vector<double> class_accuracy;  // of the last evaluation
  double seconds = 0;                  // virtual, of the whole run
  std::vector<std::int64_t> delays;    // delays[τ]: pushes with delay τ
  double gap = 0;                      // mean ‖w_now − w_sent‖/√P at a push
  double correction = 0;               // mean ‖c‖/‖g‖
  std::int64_t dropped = 0;            // pushes that were too late; their batches were trained again
  double participation = 1;            // the fraction of pushes that were applied
  std::int64_t refused = 0;            // pushes with a value that is not finite
  bool reached = false;                // SimulatorOptions::until
  bool diverged = false;               // consecutive refused pushes ended the run
  double computing = 0;  // seconds, not virtual, in which this process loaded batches and computed gradients
};

// Throws UsageError for an unknown strategy or unknown slow workers; takes no time.
void check_simulation(const SimulatorOptions& options);

// Trains. Afterwards the model holds the servers' weights. A worker needs 1 to 3 vectors as long as the weights, or up
// to 8 under federated.h. Throws UsageError as check_simulation() does, and for more workers than fit in memory.
SimulatorReport simulate(Module& model, const Loss& loss, const SGDOptions& sgd, Backend& backend, const FitData& data,
                         const SimulatorOptions& options);

}  // namespace tandem
