// The rank of this process and the number of ranks, from the environment that its launcher set: torchrun (and
// tandem-run, which uses the same names), Open MPI, MPICH, MVAPICH, Slurm, Kubeflow. A family that is incomplete is
// refused by name.
#pragma once
#include <functional>
#include <string>

#include "core/spec.h"

namespace tandem {

struct Place {
  std::string family = {};  // "torchrun", "Open MPI", …; empty: no variable is set
  int rank = 0, size = 1;
  int local_rank = -1, local_size = -1;  // on this host; −1: not set by the launcher
  std::string master = {};               // host of rank 0; empty: not set by the launcher
  int port = 0;                          // of rank 0; 0: not set by the launcher
  std::string job = {};  // the same for all ranks of a job on a host, and different for other jobs there
  // True if all ranks are known to be on this host. Without TANDEM_TOKEN they then use a local socket that is named
  // after `job` (rendezvous.h).
  bool one_host() const;
};

// Empty if a variable is not set.
using Variables = std::function<std::string(const char* name)>;
Variables process_environment();

// Reads the value of a variable or an option. Throws UsageError: "RANK=4: expected a whole number from 0 to 3". what:
// "RANK=".
void read_value(const std::string& what, const std::string& text, const SpecField& field);

// Throws UsageError that names the variables if a family is incomplete or inconsistent.
Place place_in(const Variables& variables = process_environment());

// The first host of Slurm's list: "node[07-12,15],login" → "node07".
std::string first_slurm_host(const std::string& list);

}  // namespace tandem
