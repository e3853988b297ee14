// The command line of training programs, and the objects that they make from it.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "layers/optim/optimizer.h"
#include "layers/train/fit.h"

namespace tandem {

inline constexpr const char* usual_schedule = "one-cycle";  // of programs that name no other

// Reads argv; options that are not given have the values of `defaults`. --help prints and exits with 0. Throws
// UsageError. With several ranks only rank 0 keeps its standard output, since all print the same.
// `only`: the options that this program accepts (empty: all), so that no option is accepted and ignored. `own`: further
// options of the program.
RunConfig parse_options(int argc, char** argv, const std::string& description,
                        const RunConfig& defaults = {.epochs = 8}, const std::vector<std::string>& only = {},
                        const std::vector<OptionSpec>& own = {});

// Throws UsageError for the first line of a table (option_checks.cpp) that applies: options that contradict each other
// or have no effect together, and files that would overwrite each other. parse_options calls it.
void check_options_agree(const RunConfig& options);

// The index of the host's GPU that `--device cuda` means: one GPU per rank, assigned cyclically if there are more
// ranks.
int device_of_rank(int local_rank, int devices);
// The number of CPU backend threads of a rank that shares its host's cores with other ranks; `allowed`: the number of
// cores to which its launcher has bound it.
int threads_of_rank(int local_size, int cores, int allowed);
// The backend that the options select. Throws UsageError with the cause when it is not available.
std::unique_ptr<Backend> make_backend(const RunConfig& options);

// The optimizer that the options select.
std::unique_ptr<Optimizer> make_optimizer(const RunConfig& options);

// Runs body and prints an exception as one line on stderr. Returns the exit status: 2 for a UsageError or a file that
// cannot be read, 1 for a failed run, 128 + the signal that stopped the training (130 after Ctrl-C, 143 after SIGTERM).
int run_program(int argc, char** argv, const std::function<void()>& body);

// Sets the options that were given, and returns them. --help prints and exits with 0. Throws UsageError. Words that
// belong to no option go to `words`, or are refused.
GivenOptions parse_command_line(int argc, char** argv, const std::string& description,
                                const std::vector<OptionSpec>& specs, std::vector<std::string>* words = nullptr);

}  // namespace tandem
