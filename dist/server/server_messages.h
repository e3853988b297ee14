// The messages between the ranks of a parameter server: the words of a message header, and for each kind of message its
// sender, receiver, time and words. The bytes of a message are listed after a semicolon.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "dist/job/frames.h"
#include "dist/server/channel.h"
#include "dist/server/shard_service.h"

namespace tandem {

// The positions of the words in a header. A kind uses at most one name of a position; unused words are 0.
namespace word {
enum : std::size_t {
  what,
  shard,
  first,  // index in the shard of the first element in the bytes
  count = 2,
  number,  // of an exchange, a lease, a gathering, a snapshot
  samples = 4,
  pushes = 4,
  leases_done = 4,
  blocked = 4,
  receive_buffer = 5,
  version = 5,
  request = 5,
  vectors = 5,
  block = 6,
  verdict = 6,
  vector = 6,
  offset = 7
};
constexpr std::uint64_t none = UINT64_MAX;  // no lease, no receive_buffer
}  // namespace word

enum class What : std::uint64_t {
  // A worker to the owner of a shard. receive_buffer: the worker's block of memory for the answer; none: the owner does
  // not reach it and sends parts.
  push_part = 1,  // shard, first, number; a part of a gradient. May be sent before the rest is computed
  push,           // shard, number, samples, receive_buffer: all parts have been sent, apply them as one push
  push_here,  // shard, number, samples, receive_buffer, block and offset: the gradient's place in the worker's memory
  pull,       // shard, number, receive_buffer: request for the weights without a push
  blocked,    // shard, number; blocked: 1: it has this answer and waits for another shard's, 0: no longer (quorum)
  idle,       // shard, number: no push follows that exchange for now; no worker need wait for it
  // The owner of a shard to a worker, for the exchange of that number.
  answer_part,  // shard, first, number; a part of the weights
  answer_end,   // shard, number, pushes, version, verdict; which exchanges are in the weights (ShardState::applied)
  answer_here,  // as answer_end; the weights are in `receive_buffer`
  // Rank 0 to the owners of all shards, at the beginning. vector: 0 weights, 1 velocity; vectors: how many are sent.
  first_part,  // shard, first, vector, vectors; a part of it
  // Rank 0 to the owners, for a checkpoint; and the reply.
  velocity_wanted,  // shard
  velocity_part,    // shard, first; a part of it
  // Every owner to its successor, every few seconds: the rule's vectors.
  snapshot_part,  // shard, first, number, vector, vectors; a part of it
  // When an owner is lost, all ranks to its successor: the version of the copy that this rank last received.
  offer,        // shard, pushes, version + 1, or 0: it has no copy; which exchanges are in it
  copy_wanted,  // to the rank with the newest copy: shard
  copy_part,    // the reply: shard, first; a part of it
  // Any rank to rank 0.
  say,         // number; a text
  ask_owners,  // from a rejoined rank
  want,        // request: request for a lease. Numbers increase, also across the rejoins of a rank
  // number: of the lease, verdict: whether all owners took it; score and seconds it waited for a quorum, four doubles
  done,
  stop_all,   // no rank may draw another lease
  leaves,     // this worker draws no more leases
  bye,        // this rank has received the last weights
  waits_for,  // what this rank waits for, as text. Empty: it works
  // Rank 0 to the other ranks.
  heard,     // number; all texts, a bundle (dist/job/frames.h)
  owners,    // reply to ask_owners: number: the generation of the membership; the owner of each shard, an int
  lease_is,  // number (none: none available now), count: consecutive leases under it, leases_done, request
  over,      // number: 1 if a rank has stopped the run; leases_done
  end        // all ranks have sent bye: the receiver may exit
};

inline What what_of(const MessageHeader& n) { return What(n[word::what]); }
// The other messages are for the rank, or for rank 0; they may arrive before training begins.
inline bool about_a_shard(const MessageHeader& n) { return n[word::what] < std::uint64_t(What::say); }
inline Verdict verdict_of(const MessageHeader& n) {  // an invalid value counts as the worst
  return Verdict(std::min(n[word::verdict], std::uint64_t(Verdict::refused)));
}
inline MessageHeader header(What what, int shard = 0) { return {std::uint64_t(what), std::uint64_t(shard)}; }

// The version of a shard's weights.
struct ShardState {
  std::uint64_t version = 0;             // updates applied
  std::int64_t pushes = 0;               // pushes in these updates
  std::vector<ExchangeId> applied = {};  // for each worker, its last applied exchange
};

}  // namespace tandem
