// Which rank of how many this process is, as its launcher put it into the environment: torchrun (and tandem-run, which
// uses the same names), Open MPI, MPICH, MVAPICH, Slurm, Kubeflow. A family that is half there is refused, by name.
#pragma once
#include <functional>
#include <string>

namespace tandem {

struct Place {
  std::string family = {};  // "torchrun", "Open MPI", …; empty: nothing was set
  int rank = 0, size = 1;
  int local_rank = -1, local_size = -1;  // on this host; −1: the launcher does not say
  std::string master = {};               // host of rank 0; empty: the launcher does not say
  int port = 0;                          // 0: any
  std::string job = {};                  // the same for all ranks of a job on a host, and for no other job there
  // All ranks are known to be on this host: then rank 0 chooses a port, and the others find it by the job's name.
  bool one_host() const;
};

// Null where a variable is not set.
using Variables = std::function<const char*(const char* name)>;
Variables process_environment();

// Throws UsageError that names the variables when a family is incomplete or makes no sense.
Place place_in(const Variables& variables = process_environment());

// The first host of Slurm's list: "node[07-12,15],login" → "node07".
std::string first_slurm_host(const std::string& list);

}  // namespace tandem
