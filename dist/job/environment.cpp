#include "dist/job/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "core/error.h"
#include "layers/train/strategy.h"

namespace tandem {
namespace {

struct Family {
  const char *name, *rank, *size, *local_rank, *local_size;
};
// The order matters: mpirun inside a Slurm job also sees Slurm's variables, and a pod of Kubeflow may start torchrun.
constexpr Family families[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Kubeflow", "PET_NODE_RANK", "PET_NNODES", nullptr, nullptr},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
};

int number(const char* name, const std::string& text, int low, int high) {
  int v = 0;
  read_value(name + std::string("="), text, number_field(name, v, low, high));
  return v;
}

// The parent process and its start time, which are the same for all ranks that one launcher starts on a host.
std::string parent() {
  std::ifstream file("/proc/" + std::to_string(getppid()) + "/stat");
  file.ignore(4096, ')');  // the name, which may contain blanks
  std::string field;
  for (int i = 3; i <= 22; i++) file >> field;
  return std::to_string(getppid()) + "@" + field;
}

}  // namespace

void read_value(const std::string& what, const std::string& text, const SpecField& field) {
  if (!field.read(text)) refuse(what, text, ": expected ", field.expects);
}

Variables process_environment() {
  return [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
}

bool Place::one_host() const {
  if (local_size >= 0) return local_size == size;
  return master == "localhost" || master == "127.0.0.1" || master == "::1";
}

std::string first_slurm_host(const std::string& list) {
  const std::size_t open = list.find('['), comma = list.find(',');
  if (open == std::string::npos || comma < open) return list.substr(0, comma);
  const std::size_t end = list.find_first_of("-,]", open);
  if (end == std::string::npos) refuse("SLURM_NODELIST=", list, ": the bracket is not closed");
  const std::size_t close = list.find(']', open), after = list.find(',', close);
  return list.substr(0, open) + list.substr(open + 1, end - open - 1) + list.substr(close + 1, after - close - 1);
}

Place place_in(const Variables& variables) {
  const auto get = [&](const char* name) { return name ? variables(name) : std::string(); };
  Place p;
  for (const Family& f : families) {
    const std::string rank = get(f.rank), size = get(f.size);
    if (std::strcmp(f.name, "Slurm") == 0 && get("SLURM_STEP_ID").empty()) {  // in the batch script, not by srun
      if (!size.empty() && number(f.size, size, 1, 1 << 20) > 1)
        refuse("inside a Slurm job of ", size,
               " tasks, but not started by srun: start it with `srun PROGRAM …`, or unset "
               "SLURM_NTASKS for one process");
      continue;
    }
    if (rank.empty() && size.empty()) continue;
    if (rank.empty() || size.empty())
      refuse(size.empty() ? f.rank : f.size, "=", rank, size, " is set, but ", size.empty() ? f.size : f.rank,
             " is not (", f.name, "): set both, or none for one process");
    p.family = f.name;
    p.size = number(f.size, size, 1, 65535);
    p.rank = number(f.rank, rank, 0, p.size - 1);
    if (const std::string v = get(f.local_size); !v.empty()) p.local_size = number(f.local_size, v, 1, p.size);
    if (const std::string v = get(f.local_rank); !v.empty())
      p.local_rank = number(f.local_rank, v, 0, (p.local_size > 0 ? p.local_size : p.size) - 1);
    break;
  }
  if (p.size == 1) return p;

  const std::string per_pod = get("PET_NPROC_PER_NODE");
  if (p.family == "Kubeflow" && !per_pod.empty() && per_pod != "1")
    refuse("PET_NPROC_PER_NODE=", per_pod,
           ": a process for each needs a launcher in the pod, such as "
           "`torchrun --no_python PROGRAM …`");
  p.master = get("MASTER_ADDR");
  if (p.family == "Slurm" && p.master.empty()) {
    const std::string step = get("SLURM_STEP_NODELIST"), list = step.empty() ? get("SLURM_NODELIST") : step;
    if (list.empty())
      refuse("SLURM_PROCID is set, but SLURM_NODELIST is not (Slurm): set MASTER_ADDR to the host of rank 0");
    p.master = first_slurm_host(list);
    if (get("SLURM_NNODES") == "1") p.local_size = p.size;
    const std::string job = get("SLURM_JOB_ID");
    p.port = 15000 + std::atoi(job.substr(job.size() > 4 ? job.size() - 4 : 0).c_str());
  }
  const bool pods = p.family == "Kubeflow" && p.master.empty();
  if (pods) p.master = get("PET_MASTER_ADDR");
  const char* const port = pods ? "PET_MASTER_PORT" : "MASTER_PORT";
  if (const std::string v = get(port); !v.empty()) {
    p.port = number(port, v, 1, 65534);
    const std::string listens = get("TORCHELASTIC_USE_AGENT_STORE");  // "True" or "False"
    if (!listens.empty() && listens != "False") p.port++;  // torchrun itself listens on the port that it names
  }
  for (const char* name : {"TANDEM_JOB", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"})
    if (const std::string v = get(name); !v.empty() && p.job.empty()) {
      p.job = std::string(name) + "=" + v;
      for (const char* also : {"SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT"})
        if (const std::string w = get(also); !w.empty()) p.job += "," + w;
      if (p.job.starts_with("TORCH")) p.job += "," + std::to_string(p.port);  // its run id is "none" by default
    }
  if (p.job.empty()) p.job = "parent=" + parent();
  return p;
}

int rank_from_environment() { return place_in().rank; }
int local_rank_from_environment() { return std::max(0, place_in().local_rank); }
int local_size_from_environment() { return std::max(1, place_in().local_size); }

}  // namespace tandem
