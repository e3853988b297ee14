// Ranks that are threads of one process, each with its own communicator. Strict: a send is complete when it has been
// received, so code that would deadlock on a network with small buffers deadlocks here. For tests, and for learning
// with a debugger.
//
//   auto ranks = in_process(4);
//   std::thread([&] { ranks[1]->all_reduce(buffer(x)).wait(); });
//
// A rank whose communicator is destroyed has left: ranks that wait for it get an error.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "dist/collectives/algorithms.h"

namespace tandem {

// What goes wrong at the message with this index, counted over all ranks in the order of sending.
struct Fault {
  enum class Kind : std::uint8_t {
    none,
    lost,    // the message is never delivered, and its sender does not know
    killed,  // its sender throws Killed, out of whatever it was doing
    stopped  // its sender does nothing from here on until the others have given up
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
// Filled in when the last communicator is gone.
struct Outcome {
  std::int64_t messages = 0;
  int faulty = -1;                  // the rank that the fault hit
  std::vector<int> waits_for = {};  // after a failure: the rank that each rank waited for then; −1: for nobody
};

std::vector<std::unique_ptr<Communicator>> in_process(int ranks, const InProcessOptions& options = {});

}  // namespace tandem
