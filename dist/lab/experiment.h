// An experiment: strategies × numbers of workers × clusters, each tuned with the same budget, in simulated runs
// (dist/lab/simulator.h). The fields of a plan are documented in dist/lab/PLAN.md.
//
// A cell is one strategy with one number of workers on one cluster. The search of a cell tries `search` points of a
// lattice: learning rates a factor of two apart, momenta, and the strategy's own constants that the plan puts in
// braces. A winning value at the end of a list makes the search go on beyond it; momenta end at 0.98.
//   1. Every learning rate of the plan, with its first momentum and the first value of every constant.
//   2. Until `search` points are tried: of the tried points, best first, the first that has an untried neighbour. The
//   neighbours of a
//      point are, in this order, η×2, η/2, the next larger and smaller momentum
//      (with the η on the lattice that leaves η/(1 − μ) nearest to what it was), the next larger and smaller value of
//      each constant.
//   3. The best `finalists` points are run with the other tuning seeds. The best mean over all tuning seeds is chosen.
//   4. Final runs with seeds 1, 2, … and all epochs. Only these look at the test pictures.
// Steps 1 to 3 use the held-out pictures, `tuning_epochs` epochs and the seeds 1001, 1002, … (`tuning_seed`); a run
// that diverged scores −1. The score is the accuracy at the end. By choice of the plan it is the time to the target,
// and accuracy among those that miss it.
//
// Every run is a line of a file as soon as it ends. The search is a function of these results alone: an experiment can
// be interrupted anywhere, and the order in which parallel runs end does not matter.
#pragma once
#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dist/lab/simulator.h"

namespace tandem {

// ---- the plan -------------------------------------------------------------------------------------------------------
// A strategy of a plan. Values in braces are searched: "ringmaster:R={2,4}+asgd:clip={1,4}".
struct SearchedStrategy {
  struct Constant {
    std::string name;            // "R"; "H" where the text has none, as in "local-sgd:{4,8}"
    std::vector<double> values;  // ascending, two at least
    int first = 0;               // the index in `values` of the one that was listed first
    bool whole = false;          // R, B, every, H: whole numbers from 1
    // The i-th value. Negative i and i past the end continue the list geometrically; none: there is no further value.
    std::optional<double> at(int i) const;
  };
  std::string text;                 // as the plan has it
  std::vector<std::string> pieces;  // of the text around the braces: one more than constants
  std::vector<Constant> constants;
  bool momentum = true;  // whether its rule keeps a velocity. If not, no momentum is searched

  // Throws UsageError for braces that are no list of numbers and for a strategy that there is not.
  static SearchedStrategy parse(const std::string& text);
  std::vector<double> first() const;                            // the constants with which a search begins
  std::string filled(const std::vector<double>& values) const;  // "ringmaster:R=2+asgd:clip=1", for simulate()
};

struct PlannedCluster {
  std::string name = "even";
  double shape = 100;                      // of the Gamma distribution of step times; 0: they are all equal
  double slow_share = 0, slow_factor = 1;  // the last ⌊share·workers⌋ workers take so many times as long
  double latency = 0, bandwidth = 0;       // of the links, seconds and bytes a second; bandwidth 0: unlimited
  VirtualCluster of(int workers) const;
};

struct Plan {
  std::string title, data_set = "fashion-mnist", model = "lenet5", dtype = "f32", schedule = "constant";
  bool augment = false;
  int epochs = 4, batch = 64, val = 5000;
  double weight_decay = 5e-4;
  double evaluate_every = 1;     // epochs between evaluations in final runs
  std::optional<double> target;  // accuracy on test pictures, 0 to 1, whose time is reported
  bool by_time = false;  // the search is for the shortest time to the target on held-out pictures, where runs end
  std::vector<SearchedStrategy> strategies;  // the first is the one that the others are compared with
  std::vector<int> workers;
  std::vector<PlannedCluster> clusters = {PlannedCluster{}};
  std::vector<double> rates;                         // ascending, each the first times a power of two
  std::vector<double> momenta = {0.9, 0.7, 0.5, 0};  // as listed: the search begins with the first
  int search = 12;                                   // points that are tried for each cell
  int tuning_epochs = 0;                             // read_plan() makes 0 the value of epochs
  int tuning_seeds = 3, finalists = 3, seeds = 5;
  std::uint64_t tuning_seed = 1001;  // the first; final runs have 1, 2, …
  bool synthetic = false;            // the data set is made up (--data synthetic)
  std::string data;                  // how many pictures it has, and their checksum; empty before it was loaded
};
// Reads a JSON object with these names. Throws UsageError "plan.json:7: …" with the line of what is wrong.
Plan read_plan(const std::string& path);

struct Cell {
  const SearchedStrategy* strategy = nullptr;
  int workers = 1;
  std::string cluster;
};
std::vector<Cell> cells_of(const Plan& plan);  // in the order in which they are carried out; they point into the plan

// ---- runs -----------------------------------------------------------------------------------------------------------
struct Trial {
  std::string strategy;  // with its constants filled in
  int workers = 1;
  std::string cluster;  // by name
  double rate = 0, momentum = 0;
  int epochs = 1;
  std::uint64_t seed = 1;
  bool final = false;  // measured on test pictures; otherwise on held-out pictures
  auto operator<=>(const Trial&) const = default;
};

struct AccuracyAt {
  double epoch = 0, seconds = 0, accuracy = 0;  // epochs of all workers together; virtual seconds since the start
  bool operator==(const AccuracyAt&) const = default;
};

struct Outcome {
  bool diverged = false;
  double accuracy = 0;                  // at the end; 0 and without meaning when it diverged
  std::vector<AccuracyAt> evaluations;  // up to the end or the divergence
  std::vector<double> delays;           // delays[τ]: pushes that were so late
  double participation = 1, dropped = 0, refused = 0, gap = 0, correction = 0;  // as SimulatorReport has them
  double wall_seconds = 0;                                                      // of the computation
  std::string made_by;  // version, CPU model, oneDNN and instructions
};
using Results = std::map<Trial, Outcome>;

// What the file holds; a last line that was cut off is left out. A file that is not there is empty. Throws UsageError
// with the line when it is another experiment's or holds something else.
Results read_results(const std::string& path, const Plan& plan);
std::string this_build();  // Outcome::made_by of runs that are made here: "0.1.0, git 1a2b3c4, AMD EPYC, oneDNN 2.6.3,
                           // AVX2, 1 thread"

// ---- the search -----------------------------------------------------------------------------------------------------
struct TriedPoint {
  Trial trial;                      // with the first tuning seed
  double score = 0;                 // held-out accuracy; −1: diverged; above 1: the target was reached in `seconds`
  std::optional<double> seconds{};  // with Plan::by_time, to the target
};
struct Search {
  std::vector<TriedPoint> tried;  // in the order in which they were tried
  std::vector<Trial> missing;     // the runs that it needs next; empty: it is done
  std::optional<Trial> chosen;    // when it is done. Its epochs, seed and final are those of the first final run
  std::vector<double> constants;  // of what was chosen: values for the strategy's braces
  bool edge = false;  // a neighbour of what was chosen was not tried, or its momentum is the largest that there is
};
Search search(const Plan& plan, const Results& results, const Cell& cell);
std::string chosen_text(const Search& search, const Cell& cell);  // "η 0.064, μ 0.9, R 4"; it has chosen

// Runs what is missing, `jobs` trials at a time, each in a thread of its own by run(trial); appends each to `path`.
// ended(trial, outcome) is called for each, by one thread at a time. Throws what run() throws, when the other runs
// under way have ended.
Results carry_out(const Plan& plan, const std::string& path, int jobs, const std::function<Outcome(const Trial&)>& run,
                  const std::function<void(const Trial&, const Outcome&)>& ended);

// The state of an experiment as lines of text: points tried and final runs of each cell, and the hours that are left
// with `jobs` jobs.
std::string experiment_status(const Plan& plan, const Results& results, int jobs);

// ---- statistics -----------------------------------------------------------------------------------------------------
struct Mean {
  double value = NAN, error = NAN;  // standard error; NaN with fewer than two
  std::size_t count = 0;
};
Mean mean_of(const std::vector<double>& values);
double t_quantile(
    std::size_t degrees_of_freedom);  // 97.5 % of Student's t: the half width of a 95 % interval in standard errors

// Over the final runs of a cell. Censored runs are counted and are not part of the mean.
struct CensoredMean {
  Mean mean;  // of the runs that have a value
  std::size_t runs = 0, diverged = 0, not_reached = 0;
  std::size_t at_first = 0;  // reached at the first evaluation: their times are too long, and are part of the mean
};
// Over pairs of final runs of two cells that have the same seed.
struct Paired {
  double value = NAN, low = NAN, high = NAN;  // with a 95 % t-interval; its ends are NaN with fewer than two pairs
  std::size_t pairs = 0, censored = 0;        // pairs with a value, and pairs without
};

// The final runs of a cell, by seed; empty before its search is done.
std::map<std::uint64_t, const Outcome*> final_runs(const Plan& plan, const Results& results, const Cell& cell);
CensoredMean test_accuracy(const Plan& plan, const Results& results, const Cell& cell);
Paired advantage(const Plan& plan, const Results& results, const Cell& cell,
                 const Cell& other);  // accuracy minus the other's
// Virtual seconds to the first evaluation at or above the target, interpolated from the one before (the very first: its
// own time, an upper bound); none: it was not reached.
std::optional<double> time_to(double target, const Outcome& outcome);
CensoredMean time_to_target(const Plan& plan, const Results& results, const Cell& cell);  // the plan has a target
// The geometric mean of time / other's, of pairs that reach the target after their first evaluation.
Paired time_ratio(const Plan& plan, const Results& results, const Cell& cell, const Cell& other);

// ---- what is shown --------------------------------------------------------------------------------------------------
std::string points(const Mean& m);          // of a hundred: "92.50 ± 0.12", or "–"
std::string seconds_text(const Mean& m);    // "38.9 ± 1.6", or "–"
std::string target_text(const Plan& plan);  // "82 %"; the plan has a target
std::string censored_text(const CensoredMean& c,
                          int planned);  // "2 of 5 diverged, 1 of 5 not run"; empty: every run is in the mean
struct PairedText {
  std::string value;     // "+4.05" or "–"
  std::string interval;  // "[+3.69, +4.41]"; empty with fewer than two pairs
  std::string pairs;     // "4 of 5 pairs"; empty where all planned pairs are in the value, and where none was run
};
PairedText text_of(const Paired& p, const char* form, double unit,
                   int planned);  // numbers times `unit`, printed by `form`
// Markdown: accuracies with what was chosen, the first strategy against each other one, and times to the target.
std::string experiment_table(const Plan& plan, const Results& results);
std::string experiment_page(const Plan& plan, const Results& results);  // HTML

// ---- checks ---------------------------------------------------------------------------------------------------------
// n rows (or all, when there are fewer) drawn by `seed` of those whose computation took at most `longest` seconds.
std::vector<Trial> rows_to_check(const Results& results, int n, std::uint64_t seed, double longest);
// Why a row that was run again contradicts the results; empty: it does not. If the same version (without uncommitted
// changes) made both on the same CPU (name, oneDNN, instructions, threads), all must be equal to the bit. Otherwise
// training may have amplified other roundings, as another seed would. The virtual times of common evaluations must be
// the same, and, if neither diverged, delays and participation where both end at the same evaluation. Accuracies may
// differ by 3 standard deviations of the same trial's results over its seeds, and
// - of another version on the same CPU always by 1 point, at every evaluation; neither or both must diverge;
// - on another CPU always by 3 points, at the end only; where one diverged, only times are compared.
std::string contradiction(const Results& results, const Trial& trial, const Outcome& again);

}  // namespace tandem
