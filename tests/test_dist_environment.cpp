// Rank and number of ranks by the variables of each launcher; lists of hosts.
#include <array>

#include "dist/job/environment.h"
#include "dist/job/hosts.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

// variables: "RANK=3 WORLD_SIZE=8"
Place place(const std::string& variables) {
  std::map<std::string, std::string> set;
  std::istringstream words(variables);
  for (std::string w; words >> w;) set[w.substr(0, w.find('='))] = w.substr(w.find('=') + 1);
  return place_in([&](const char* name) { return set[name]; });
}

TEST(Environment, NothingIsOneProcess) {
  for (const char* variables : {"", "RANK=0 WORLD_SIZE=1", "RANK= WORLD_SIZE="}) EXPECT_EQ(place(variables).size, 1);
}

// "torchrun, rank 3 of 8, 1 of 2 here, node1:29400"
std::string text_of(const Place& p) {
  const auto n = [](int i) { return std::to_string(i); };
  return p.family + ", rank " + n(p.rank) + " of " + n(p.size) + ", " + n(p.local_rank) + " of " + n(p.local_size) +
         " here, " + p.master + ":" + n(p.port) + (p.one_host() ? ", one host" : "");
}

TEST(Environment, EveryFamilyIsRead) {
  for (const auto& [variables, want, job] : std::vector<std::array<const char*, 3>>{
           {"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29400",
            "torchrun, rank 3 of 8, 1 of 2 here, node1:29400", "parent="},
           // torchrun's own store listens on the port that it names, but not with --standalone.
           {"RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=29400 TORCHELASTIC_USE_AGENT_STORE=True "
            "TORCHELASTIC_RUN_ID=none",
            "torchrun, rank 1 of 2, -1 of 2 here, :29401, one host", "TORCHELASTIC_RUN_ID=none,29401"},
           {"RANK=1 WORLD_SIZE=2 MASTER_PORT=29400 TORCHELASTIC_USE_AGENT_STORE=False",
            "torchrun, rank 1 of 2, -1 of -1 here, :29400", "parent="},
           {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
            "PMIX_NAMESPACE=12 PMIX_RANK=1",
            "Open MPI, rank 1 of 2, 1 of 2 here, :0, one host", "PMIX_NAMESPACE=12"},
           {"PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "MPICH, rank 2 of 4, 0 of 2 here, :0",
            "parent="},
           {"MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_SIZE=4",
            "MVAPICH, rank 2 of 4, -1 of 4 here, :0, one host", "parent="},
           {"SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_NODELIST=gpu[07-12,15],login "
            "SLURM_JOB_ID=1234567 SLURM_NNODES=2",
            "Slurm, rank 2 of 4, 0 of -1 here, gpu07:19567", "SLURM_JOB_ID=1234567,0"},
           {"PET_NNODES=3 PET_NODE_RANK=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=job-0 PET_MASTER_PORT=29400",
            "Kubeflow, rank 2 of 3, -1 of -1 here, job-0:29400", "parent="},
           // mpirun inside a Slurm job
           {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0",
            "Open MPI, rank 1 of 2, -1 of -1 here, :0", "parent="}}) {
    EXPECT_EQ(text_of(place(variables)), want) << variables;
    EXPECT_TRUE(place(variables).job.starts_with(job)) << place(variables).job;
  }
}

TEST(Environment, WhatIsHalfThereIsRefusedByName) {
  for (const auto& [variables, why] : std::vector<std::array<const char*, 2>>{
           {"RANK=3", "RANK=3 is set, but WORLD_SIZE is not"},
           {"WORLD_SIZE=3", "WORLD_SIZE=3 is set, but RANK is not"},
           {"OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_RANK is not (Open MPI)"},
           {"PMI_RANK=0", "PMI_SIZE is not"},
           {"MV2_COMM_WORLD_RANK=0", "MV2_COMM_WORLD_SIZE is not"},
           {"PET_NNODES=2", "PET_NODE_RANK is not"},
           {"SLURM_PROCID=0 SLURM_STEP_ID=0", "SLURM_NTASKS is not"},
           {"SLURM_NTASKS=4 SLURM_PROCID=0", "srun PROGRAM"},
           {"RANK=4 WORLD_SIZE=4", "RANK=4: expected a whole number from 0 to 3"},
           {"RANK=x WORLD_SIZE=4", "RANK=x"},
           {"RANK=0 WORLD_SIZE=4 MASTER_PORT=70000", "MASTER_PORT=70000"},
           {"PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=4", "PET_NPROC_PER_NODE=4"}})
    EXPECT_TRUE(refused([&, v = variables] { place(v); }, {why}));
}

TEST(Environment, TheFirstHostOfSlurmsList) {
  EXPECT_EQ(first_slurm_host("a"), "a");
  EXPECT_EQ(first_slurm_host("a,b[1-3]"), "a");
  EXPECT_EQ(first_slurm_host("host[5-9]"), "host5");
  EXPECT_EQ(first_slurm_host("host[05,07]-eth,x"), "host05-eth");
  EXPECT_REFUSED(first_slurm_host("host[5"), "host[5");
}

TEST(Hosts, ListsAndFiles) {
  const auto text = [](const std::vector<Host>& hosts) {
    std::string all;
    for (const Host& h : hosts) all += h.name + ":" + std::to_string(h.slots) + " ";
    return all;
  };
  EXPECT_EQ(text(hosts_in_list("a:4,b")), "a:4 b:1 ");
  EXPECT_EQ(text(hosts_in_text("# a cluster\nnode-1 slots=2\n\nnode-2:3  # the new one\nnode-3\n", "f")),
            "node-1:2 node-2:3 node-3:1 ");
  for (const auto& [file, where, why] :
       std::vector<std::array<const char*, 3>>{{"a\nb\na slots=2\n", "f:3", "a comes twice"},
                                               {"a max=2\n", "f:1", "max=2"},
                                               {"a slots=0\n", "f:1", "0 where a number"},
                                               {"-oProxyCommand=x\n", "f:1", "no name of a host"},
                                               {"# nothing\n", "f", "names no host"}})
    EXPECT_TRUE(refused([&, f = file] { hosts_in_text(f, "f"); }, {where, why}));
  EXPECT_REFUSED(hosts_in_list("a:x"), "x where a number");
  EXPECT_REFUSED(hosts_in_list("b,a:0"), "-H b,a:0: 0 where a number");
}

}  // namespace
}  // namespace tandem::test
