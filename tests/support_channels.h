// Channels for ranks that are threads of a test, with faults: ranks that die and rejoin, messages that overtake each
// other.
#pragma once
#include <memory>
#include <vector>

#include "dist/server/channel.h"

namespace tandem::test {

struct ChannelFaults {
  struct Death {
    int rank;
    // its at-th call of send(), from 0, throws Killed; the other ranks then lose it. The count continues when it
    // rejoins
    std::int64_t at;
  };
  std::vector<Death> deaths = {};
  std::uint64_t delays = 0;       // seed; messages of different senders overtake each other. 0: no delays
  bool duplicates = false;        // with delays: sometimes a message without bytes arrives again, after others
  bool shared_memory = true;      // false: no rank reaches another's memory, as between hosts
  std::int64_t* sends = nullptr;  // counts calls of send() of all ranks; set when all channels are destroyed
};

// Channels for ranks that are threads. A message is sent when its bytes are in the receiver's memory; bytes that
// nothing keeps are copied by send(). A channel that is destroyed during an exception counts as a lost rank.
std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, const ChannelFaults& faults = {});
// A lost rank rejoins with a new channel. `other`: any channel of the job, which may be in use at the same time.
std::unique_ptr<Channel> in_process_return(Channel& other, int rank);

}  // namespace tandem::test
