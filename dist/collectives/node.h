// The ranks of one host: collectives in shared memory. Each rank reduces its share of the elements, reading the others'
// memory and writing the result into it, so that no byte is sent. What lies in memory from allocate() is reduced in
// place; other buffers go through slots of 256 KiB, in chunks. One rank computes each element for all: the results are
// the same bits.
//
// A collective consists of a few rounds. A round ends when all ranks have arrived. A rank that waits long sleeps on a
// futex, so that the others can use its core.
#pragma once
#include <memory>

#include "dist/collectives/communicator.h"

namespace tandem {

// `base`: the ranks of this host, by messages (over_messages, or a split of it); it carries send, recv and split. All
// ranks call this, and it waits for all. Throws Error when they cannot share memory.
std::unique_ptr<Communicator> on_node(std::unique_ptr<Communicator> base);

}  // namespace tandem
