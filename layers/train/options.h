// The options that every training program shares, their defaults and their checks.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "datasets/dataset.h"
#include "layers/optim/optimizer.h"
#include "layers/train/fit.h"

namespace tandem {

struct Options {
  std::string data = {};  // folder with the data sets, or "synthetic"; empty: $TANDEM_DATA, then data/
  // Programs that take any data set give one here, and then offer --data-set, --size and --skip-broken.
  std::string data_set = {};
  FolderOptions folder = {};
  std::string model = "smallcnn";
  FitOptions fit = {.epochs = 8};  // but its schedule and settings, which fit_options() fills in
  // Pictures of a step, of which each rank has its share; asynchronous: of a worker's push. 0: --batch auto
  int batch = 128;
  bool chooses_batch = false;  // the program calls choose_batch() (layers/train/choose_batch.h), so --batch may be auto
  int batch_per_rank = 0;      // above 0, instead of batch: so many on each rank
  double learning_rate = 0.05;
  std::string schedule = "one-cycle";
  std::string optimizer = "sgd";  // sgd, lars, adamw, adam, rmsprop
  double momentum = 0.9, weight_decay = 5e-4, label_smoothing = 0, clip = 0;
  bool nesterov = true, augment = false;
  int cutout = 0;                          // side of the square in pixels; 0: none
  double mixup = 0;                        // α; 0: none
  std::vector<float> mean = {}, std = {};  // of the pictures' channels, or one for all; empty: those of the data set
  std::string device = "cpu";              // cpu, reference, cuda, cuda:1
  DType dtype = DType::f32;                // of activations; parameters stay f32
  int threads = 0;                         // 0: default_threads() (core/team.h)
  int val = 0;                             // training pictures held back for choices
  bool deterministic = false, exact_conv = false, tf32 = false;
  std::set<std::string> given = {};        // the names that were on the command line
  std::vector<std::string> accepted = {};  // the names that the program has; empty: all
};

// What fit() is to do: options.fit, with the schedule and with what else decides how the run goes.
FitOptions fit_options(const Options& options);

struct OptionSpec {
  std::string name, help, fallback;             // "--batch", what it is, the default as text
  std::function<void(const std::string&)> set;  // throws UsageError on a bad value
  bool flag = false;                            // takes no value
  bool repeats = false;                         // may be given again
  std::function<std::string()> value = {};      // the field's, as text
  bool decides = false;  // it decides what a step computes: a part of the run's identity. Read of the options that all
                         // programs share
};

// Reads argv over `defaults`. --help prints and exits with 0. Throws UsageError. Of several ranks only rank 0 keeps its
// standard output: all have the same to print.
// `only`: the options that this program accepts (empty: all), so that none is accepted and ignored. `own`: further
// options of the program.
Options parse_options(int argc, char** argv, const std::string& description, const Options& defaults = {},
                      const std::vector<std::string>& only = {}, const std::vector<OptionSpec>& own = {});

// Throws UsageError for the first line of a table (option_checks.cpp) that holds: options that contradict each other or
// do nothing together, and files that would overwrite each other. parse_options calls it.
void check_options_agree(const Options& options);

// Which of a host's GPUs `--device cuda` is: one for each rank there, and around again where there are more ranks.
int device_of_rank(int local_rank, int devices);
// Of the CPU backend's threads, how many a rank has that shares its host's cores with others; `allowed`: the cores to
// which its launcher has bound it.
int threads_of_rank(int local_size, int cores, int allowed);
// The device that the options ask for. Throws UsageError when it is not to be had, with the cause.
std::unique_ptr<Backend> make_backend(const Options& options);

// The optimizer that the options ask for.
std::unique_ptr<Optimizer> make_optimizer(const Options& options);

// Runs body and turns what it throws into one line on stderr: exit status 2 for a UsageError or a file that cannot be
// read, 1 for a failed run, 128 + the signal where that stopped the training (130 after Ctrl-C, 143 after SIGTERM).
int run_program(int argc, char** argv, const std::function<void()>& body);

// --help prints and exits with 0. Throws UsageError. Words that belong to no option go to `words`, or are refused.
void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs,
                        std::vector<std::string>* words = nullptr);

}  // namespace tandem
