// The ranks of one host: collectives in shared memory. Each rank reduces its share of the elements: it reads the
// others' memory and writes the result into it, so no byte is sent. Data in memory from allocate() is reduced in place.
// Other buffers are copied in chunks through slots of 256 KiB. Each element is combined in the order of the ranks, so
// all ranks have the same bits.
//
// A collective consists of rounds. A round ends when all ranks have arrived. A rank that waits long sleeps on a futex,
// so that the others can use its core.
#pragma once
#include <memory>

#include "dist/collectives/communicator.h"

namespace tandem {

// `base`: connects the ranks of this host with messages (over_messages, or a split of it); it implements send, recv and
// split. All ranks call this, and it waits for all. Throws Error if they cannot share memory.
std::unique_ptr<Communicator> on_node(std::unique_ptr<Communicator> base);

}  // namespace tandem
