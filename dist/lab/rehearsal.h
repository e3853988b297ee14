// A rehearsal: a training program on hosts that this machine lays out for it (dist/lab/hosts.sh: namespaces joined by links of a given
// rate), once for each strategy and link. build/rehearse prints what it measures.
//
// The prediction for a link comes from the same strategy's run without a limit. Let C be that run's seconds, W the bytes that one host sent
// divided by the link's rate, o the share of C during which the strategy's exchange may run beside computation, and b the share of W that
// must wait for the end of that (the answer of a parameter server):
//   seconds = C + max(0, (1 − b)·W − o·C) + b·W
// The model is our choice. It leaves out latency and what ranks lose by waiting for each other.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace tandem {

struct Rehearsal {
  int hosts = 2, ranks = 1;  // ranks: of each host
  double delay = 0;          // milliseconds, one way
  double pace = 0;           // milliseconds that a step takes before its exchange; 0: as it comes
  double target = 0;         // a test accuracy in [0, 1]; 0: none
  // A strategy may have a setting of its environment before it: TANDEM_WIRE=bf16/all-reduce. Links as tc names them: 200mbit, 1gbit; none: no limit.
  std::vector<std::string> strategies, links;
  std::vector<std::string> program;            // with its arguments; has to know --metrics
  std::string hosts_script;                    // the path of hosts.sh
};

struct RehearsedRun {
  std::string setup, strategy, link;
  double seconds = 0;                       // of training
  double exposed = 0;                       // seconds in which rank 0 waited for exchanges
  double bytes = 0;                         // that left the host which sent most
  double steps = 0;
  std::optional<double> accuracy, reached;  // on the test pictures; seconds of training until the target
};

// One run. Throws Error with the end of what the program printed where it fails, UsageError where hosts cannot be made.
RehearsedRun rehearse(const Rehearsal& rehearsal, const std::string& strategy, const std::string& link);

std::string setup_of(const Rehearsal& rehearsal);  // hosts, ranks, delay, target and program, as one text
double bytes_per_second(const std::string& link);  // of "200mbit"; infinity for none. Throws UsageError.
double predicted_seconds(const RehearsedRun& unlimited, const std::string& link);

// How many steps between two exchanges of all weights (a strategy's H) make waiting at most `share` of the time on this link, where
// `all_reduce` is a run of all-reduce without a limit: it exchanges the weights' size in every step.
int steps_between(const RehearsedRun& all_reduce, const std::string& link, double share = 0.05);

// The runs as a table; then, where there are several links, seconds predicted and measured of each strategy on each, and for every link
// the fastest strategy whose accuracy is at most 0.3 points below that of all-reduce.
std::string rehearsal_table(const std::vector<RehearsedRun>& runs, const Rehearsal& rehearsal);

// A run as a line of JSON, and back, so that a rehearsal that was interrupted goes on.
std::string line_of(const RehearsedRun& run);
RehearsedRun run_of(const std::string& line);

}  // namespace tandem
