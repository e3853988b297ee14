// Ranks that are threads of one process, each with its own communicator. It is strict: a send is complete when it was
// received, so code that would deadlock on a network with small buffers deadlocks here. For tests, and for learning
// with a debugger.
//
//   auto ranks = in_process(4);
//   std::thread([&] { ranks[1]->all_reduce(buffer(x)).wait(); });
//
// If a rank's communicator is destroyed, the rank has left: ranks that wait for it get an error.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "dist/collectives/algorithms.h"

namespace tandem {

// The fault at the message with this index, counted over all ranks in the order of sending.
struct Fault {
  enum class Kind : std::uint8_t {
    none,
    lost,    // the message is never delivered; its sender is not informed
    killed,  // its sender throws Killed from the current call
    stopped  // its sender does nothing more until the others have given up
  } kind = Kind::none;
  std::int64_t at = -1;
};
struct Killed : Error {
  using Error::Error;
};

struct InProcessOptions {
  double deadline = 300;  // seconds that any wait may last
  ChoiceTable table = {};
  Fault fault = {};
  struct Outcome* outcome = nullptr;
};
// Filled in when the last communicator is destroyed.
struct Outcome {
  std::int64_t messages = 0;
  int faulty = -1;                  // the rank with the fault
  std::vector<int> waits_for = {};  // after a failure: the rank for which each rank waited; −1: none
};

std::vector<std::unique_ptr<Communicator>> in_process(int ranks, const InProcessOptions& options = {});

}  // namespace tandem
