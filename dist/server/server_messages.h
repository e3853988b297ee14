// What the ranks of a parameter server say to each other: the words of a message header, and for each kind of message
// who sends it to whom, when, and which words it has. Bytes that go with it stand behind a semicolon.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "dist/job/frames.h"
#include "dist/server/channel.h"
#include "dist/server/shard_service.h"

namespace tandem {

// The places of the words in a header. A kind uses one name of a place; what it does not carry is 0.
namespace word {
enum : std::size_t {
  what,
  shard,
  first,  // the element of the shard that the bytes begin with
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
  // A worker to the owner of a shard. receive_buffer: the worker's block of memory where the answer is to be made;
  // none: the owner does not reach it, and sends parts.
  push_part = 1,  // shard, first, number; a part of a gradient. May come while the rest of it is still computed
  push,           // shard, number, samples, receive_buffer: all parts have been sent, apply them as one push
  push_here,      // shard, number, samples, receive_buffer, block and offset: where the gradient lies in the worker's
                  // memory
  pull,           // shard, number, receive_buffer: the weights alone, please
  blocked,        // shard, number; blocked: 1: it has that answer and waits for another shard's, 0: no longer (quorum)
  idle,           // shard, number: behind that exchange nothing is pushed for now; nobody need wait for it
  // The owner of a shard to a worker, for the exchange of that number.
  answer_part,  // shard, first, number; a part of the weights
  answer_end,   // shard, number, pushes, version, verdict; which exchanges are in the weights (ShardState::applied)
  answer_here,  // the same, and the weights are where `receive_buffer` said
  // Rank 0 to the owners of all shards, at the beginning. vector: 0 weights, 1 velocity; vectors: how many will come.
  first_part,  // shard, first, vector, vectors; a part of it
  // Rank 0 to the owners, for a checkpoint; and back.
  velocity_wanted,  // shard
  velocity_part,    // shard, first; a part of it
  // Every owner to who would take its place, every few seconds: what the rule keeps.
  snapshot_part,  // shard, first, number, vector, vectors; a part of it
  // When an owner is lost, everybody to who takes its place: how far is the copy that this rank was answered with last.
  offer,        // shard, pushes, version + 1, or 0: it has none; which exchanges are in it
  copy_wanted,  // to the one that has the newest: shard
  copy_part,    // and back: shard, first; a part of it
  // Everybody to rank 0.
  say,         // number; a text
  ask_owners,  // by a rank that has come back
  want,        // request: a lease, please. Ascending, also over the returns of a rank
  done,  // number: of the lease, verdict: whether all owners have taken it; its score and the seconds that it waited
         // for a quorum, four doubles
  stop_all,   // nobody is to draw a lease any more
  leaves,     // this worker draws no more leases
  bye,        // this rank has the last weights
  waits_for,  // what this rank waits for, a text. None: it works
  // Rank 0 to everybody.
  heard,     // number; all texts, a bundle (dist/job/frames.h)
  owners,    // to who asked: number: the generation of the membership; of each shard, an int
  lease_is,  // number (none: there is none for now), count: of consecutive ones that go by it, leases_done, request
  over,      // number: 1 if somebody has stopped it; leases_done
  end        // all have said bye: who hears it may go
};

inline What what_of(const MessageHeader& n) { return What(n[word::what]); }
// Others are for the rank, or for rank 0; they may come before training begins.
inline bool about_a_shard(const MessageHeader& n) { return n[word::what] < std::uint64_t(What::say); }
inline Verdict verdict_of(const MessageHeader& n) {  // what is no verdict counts as the worst
  return Verdict(std::min(n[word::verdict], std::uint64_t(Verdict::refused)));
}
inline MessageHeader header(What what, int shard = 0) { return {std::uint64_t(what), std::uint64_t(shard)}; }

// How far the weights of a shard are.
struct ShardState {
  std::uint64_t version = 0;             // updates
  std::int64_t pushes = 0;               // in them
  std::vector<ExchangeId> applied = {};  // of each worker, the last of its exchanges that is in them
};

}  // namespace tandem
