// An experiment: strategies × numbers of workers, each with a tuned learning rate, in many simulated runs (dist/lab/simulator.h).
//
// One rule tunes the learning rate of every pair of strategy and number of workers. For the first number of workers in the plan, all
// rates of the grid are tried for a quarter of the epochs, the better half for half the epochs, and the better half of these for
// all epochs. Every other number starts with the rate of the nearest number that is already tuned. Then twice and half the rate are
// tried for all epochs, and further in the better direction while that improves, so the grid has no edges. Only validation
// pictures and separate seeds are used for this. The final runs use other seeds and the test pictures.
//
// Every run is written as a line of a file when it ends, so that an interrupted experiment can be continued.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct Plan {
  std::string title, data_set = "fashion-mnist", model = "lenet5", dtype = "f32", schedule = "constant";
  int epochs = 4, batch = 64, val = 5000;
  double momentum = 0.9, weight_decay = 5e-4, shape = 100;
  bool augment = false;
  std::vector<std::string> strategies;  // the first is the one that the others are compared with
  std::vector<int> workers;
  std::vector<double> rates;  // ascending
  int tuning_seeds = 1, seeds = 5;
  int tuning_epochs = 0;  // of the runs that choose; 0: all epochs. Fewer are cheaper, and favour rates that begin fast
};
// A JSON object with these names. Throws UsageError that names what is wrong or unknown.
Plan read_plan(const std::string& path);

struct Trial {
  std::string strategy;
  int workers = 1;
  double rate = 0;
  int epochs = 1;
  std::uint64_t seed = 1;
  bool final = false;  // looks at test pictures
  bool operator==(const Trial&) const = default;
};

struct Outcome {
  double validation = 0, test = 0;  // accuracy at the end; 0 when it diverged
  bool diverged = false;
  std::vector<double> accuracies, seconds;  // after each epoch: on test pictures in final runs; virtual seconds so far
  std::vector<double> delays;               // how many pushes were so late
  double gap = 0, correction = 0, participation = 1;  // as SimulatorReport has them
};

using Results = std::vector<std::pair<Trial, Outcome>>;

// What the file holds; lines that it lacks half of (the run was cut off) are dropped. A file that is not there is empty.
// Throws UsageError when it is another experiment's.
Results read_results(const std::string& path, const Plan& plan);

// Runs what is missing, `jobs` trials at a time, each in a thread of its own by run(trial); appends each to `path`.
// ended(trial, outcome) is called for each, by one thread at a time.
Results carry_out(const Plan& plan, const std::string& path, int jobs, const std::function<Outcome(const Trial&)>& run,
                  const std::function<void(const Trial&, const Outcome&)>& ended);

// The rate that the results chose for a strategy and a number of workers; 0: not known yet.
double chosen_rate(const Plan& plan, const Results& results, const std::string& strategy, int workers);

struct Mean {
  double value = NAN, error = NAN;  // standard error; NaN with fewer than two
  std::size_t count = 0;
};
Mean mean_of(const std::vector<double>& values);
std::string points(const Mean& m, bool difference = false);  // of a hundred: "92.50 ± 0.12", "+0.31 ± 0.09", or "–"
// Of the final runs' accuracy on test pictures; and by how much it is more than another strategy's, pair by pair of one seed.
Mean test_accuracy(const Results& results, const std::string& strategy, int workers);
Mean advantage(const Results& results, const std::string& strategy, const std::string& other, int workers);

// Markdown: accuracies with the learning rates that were chosen, and the first strategy against each other one.
std::string experiment_table(const Plan& plan, const Results& results);
std::string experiment_page(const Plan& plan, const Results& results);

}  // namespace tandem
