// Who am I, by the variables of each launcher; lists of hosts.
#include <gtest/gtest.h>

#include <map>

#include "dist/job/environment.h"
#include "dist/job/hosts.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

Place place(const std::map<std::string, std::string>& variables) {
  return place_in([&](const char* name) -> const char* {
    auto v = variables.find(name);
    return v == variables.end() ? nullptr : v->second.c_str();
  });
}

TEST(Environment, NothingIsOneProcess) {
  EXPECT_EQ(place({}).size, 1);
  EXPECT_EQ(place({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).size, 1);
  EXPECT_EQ(place({{"RANK", ""}, {"WORLD_SIZE", ""}}).size, 1);
}

TEST(Environment, EveryFamilyIsRead) {
  Place p = place({{"RANK", "3"},
                   {"WORLD_SIZE", "8"},
                   {"LOCAL_RANK", "1"},
                   {"LOCAL_WORLD_SIZE", "2"},
                   {"MASTER_ADDR", "node1"},
                   {"MASTER_PORT", "29400"}});
  EXPECT_EQ(p.family, "torchrun");
  EXPECT_EQ(p.rank, 3);
  EXPECT_EQ(p.size, 8);
  EXPECT_EQ(p.local_rank, 1);
  EXPECT_EQ(p.local_size, 2);
  EXPECT_EQ(p.master, "node1");
  EXPECT_EQ(p.port, 29400);
  EXPECT_FALSE(p.one_host());

  // torchrun's own store listens on the port that it names.
  p = place({{"RANK", "1"},
             {"WORLD_SIZE", "2"},
             {"LOCAL_WORLD_SIZE", "2"},
             {"MASTER_PORT", "29400"},
             {"TORCHELASTIC_USE_AGENT_STORE", "True"},
             {"TORCHELASTIC_RUN_ID", "none"}});
  EXPECT_EQ(p.port, 29401);
  EXPECT_TRUE(p.one_host());
  EXPECT_EQ(p.job, "TORCHELASTIC_RUN_ID=none,29401");
  p = place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29400"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  EXPECT_EQ(p.port, 29400) << "a rendezvous of its own (--standalone)";

  p = place({{"OMPI_COMM_WORLD_RANK", "1"},
             {"OMPI_COMM_WORLD_SIZE", "2"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
             {"PMIX_NAMESPACE", "12"},
             {"PMIX_RANK", "1"}});
  EXPECT_EQ(p.family, "Open MPI");
  EXPECT_TRUE(p.one_host());
  EXPECT_EQ(p.job, "PMIX_NAMESPACE=12");

  p = place({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(p.family, "MPICH");
  EXPECT_EQ(p.rank, 2);
  EXPECT_FALSE(p.one_host());
  EXPECT_TRUE(p.job.starts_with("parent=")) << p.job;

  p = place({{"MV2_COMM_WORLD_RANK", "2"}, {"MV2_COMM_WORLD_SIZE", "4"}, {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}});
  EXPECT_EQ(p.family, "MVAPICH");
  EXPECT_TRUE(p.one_host());

  p = place({{"SLURM_PROCID", "2"},
             {"SLURM_NTASKS", "4"},
             {"SLURM_LOCALID", "0"},
             {"SLURM_STEP_ID", "0"},
             {"SLURM_NODELIST", "gpu[07-12,15],login"},
             {"SLURM_JOB_ID", "1234567"},
             {"SLURM_NNODES", "2"}});
  EXPECT_EQ(p.family, "Slurm");
  EXPECT_EQ(p.master, "gpu07");
  EXPECT_EQ(p.port, 19567);
  EXPECT_EQ(p.job, "SLURM_JOB_ID=1234567,0");
  EXPECT_FALSE(p.one_host());

  p = place({{"PET_NNODES", "3"},
             {"PET_NODE_RANK", "2"},
             {"PET_NPROC_PER_NODE", "1"},
             {"PET_MASTER_ADDR", "job-0"},
             {"PET_MASTER_PORT", "29400"}});
  EXPECT_EQ(p.family, "Kubeflow");
  EXPECT_EQ(p.rank, 2);
  EXPECT_EQ(p.master, "job-0");
}

TEST(Environment, MpirunInsideSlurmIsMpirun) {
  EXPECT_EQ(place({{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "2"},
                   {"SLURM_PROCID", "0"},
                   {"SLURM_NTASKS", "2"},
                   {"SLURM_STEP_ID", "0"}})
                .family,
            "Open MPI");
}

TEST(Environment, WhatIsHalfThereIsRefusedByName) {
  EXPECT_TRUE(refused([] { place({{"RANK", "3"}}); }, {"RANK=3 is set, but WORLD_SIZE is not"}));
  EXPECT_TRUE(refused([] { place({{"WORLD_SIZE", "3"}}); }, {"WORLD_SIZE=3 is set, but RANK is not"}));
  EXPECT_TRUE(refused([] { place({{"OMPI_COMM_WORLD_SIZE", "3"}}); }, {"OMPI_COMM_WORLD_RANK is not", "Open MPI"}));
  EXPECT_TRUE(refused([] { place({{"PMI_RANK", "0"}}); }, {"PMI_SIZE is not"}));
  EXPECT_TRUE(refused([] { place({{"MV2_COMM_WORLD_RANK", "0"}}); }, {"MV2_COMM_WORLD_SIZE is not"}));
  EXPECT_TRUE(refused([] { place({{"PET_NNODES", "2"}}); }, {"PET_NODE_RANK is not"}));
  EXPECT_TRUE(refused([] { place({{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}); }, {"SLURM_NTASKS is not"}));
  EXPECT_TRUE(refused([] { place({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}); }, {"srun PROGRAM"}));
  EXPECT_TRUE(refused([] { place({{"RANK", "4"}, {"WORLD_SIZE", "4"}}); }, {"RANK=4", "from 0 to 3"}));
  EXPECT_TRUE(refused([] { place({{"RANK", "x"}, {"WORLD_SIZE", "4"}}); }, {"RANK=x"}));
  EXPECT_TRUE(refused(
      [] {
        place({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "70000"}});
      },
      {"MASTER_PORT=70000"}));
  EXPECT_TRUE(refused(
      [] {
        place({{"PET_NNODES", "2"}, {"PET_NODE_RANK", "0"}, {"PET_NPROC_PER_NODE", "4"}});
      },
      {"PET_NPROC_PER_NODE=4"}));
}

TEST(Environment, TheFirstHostOfSlurmsList) {
  EXPECT_EQ(first_slurm_host("a"), "a");
  EXPECT_EQ(first_slurm_host("a,b[1-3]"), "a");
  EXPECT_EQ(first_slurm_host("host[5-9]"), "host5");
  EXPECT_EQ(first_slurm_host("host[05,07]-eth,x"), "host05-eth");
  EXPECT_TRUE(refused([] { first_slurm_host("host[5"); }, {"host[5"}));
}

TEST(Hosts, ListsAndFiles) {
  auto hosts = hosts_in_list("a:4,b");
  ASSERT_EQ(hosts.size(), 2u);
  EXPECT_EQ(hosts[0].slots, 4);
  EXPECT_EQ(hosts[1].name, "b");
  hosts = hosts_in_text("# a cluster\nnode-1 slots=2\n\nnode-2:3  # the new one\nnode-3\n", "f");
  ASSERT_EQ(hosts.size(), 3u);
  EXPECT_EQ(hosts[0].slots, 2);
  EXPECT_EQ(hosts[1].slots, 3);
  EXPECT_EQ(hosts[2].slots, 1);
  EXPECT_TRUE(refused([] { hosts_in_text("a\nb\na slots=2\n", "f"); }, {"f:3", "a comes twice"}));
  EXPECT_TRUE(refused([] { hosts_in_text("a max=2\n", "f"); }, {"f:1", "max=2"}));
  EXPECT_TRUE(refused([] { hosts_in_text("a slots=0\n", "f"); }, {"f:1", "0 where a number"}));
  EXPECT_TRUE(refused([] { hosts_in_text("-oProxyCommand=x\n", "f"); }, {"no name of a host"}));
  EXPECT_TRUE(refused([] { hosts_in_text("# nothing\n", "f"); }, {"names no host"}));
  EXPECT_TRUE(refused([] { hosts_in_list("a:x"); }, {"x where a number"}));
}

}  // namespace
}  // namespace tandem::test
