// The messages between the ranks of a parameter server: a struct for each kind, with its sender, receiver, time and
// bytes. packed() writes a struct to a message's header, unpacked() reads it.
#pragma once
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "dist/server/channel.h"
#include "dist/server/shard_service.h"

namespace tandem {
namespace message {

// A "copy" of a shard is its weights, followed by the number of each worker's last exchange that they contain.

struct OfShard {
  std::uint64_t shard = 0;
};
struct OfExchange {
  std::uint64_t shard = 0, exchange = 0;
};

// ---- a worker to the owner of a shard -------------------------------------------------------------------------------
// Bytes: a part of a gradient that begins at element `first` of the shard. It may be sent before the rest is computed.
// last: when all parts have arrived, they are applied as one push. samples = 0: the gradient is not finite.
struct Push : OfExchange {
  std::uint64_t first = 0, last = false;
  std::int64_t samples = 0;
};
struct Pull : OfExchange {};  // requests the weights without a push
struct Idle : OfExchange {    // whether the worker can push after that exchange
  Pause pause = Pause::idle;
};
// ---- the owner of a shard to a worker -------------------------------------------------------------------------------
struct Answer : OfExchange {  // to a push or a pull. Bytes: a copy
  std::uint64_t version = 0;
  std::int64_t pushes = 0;  // in that version
  Verdict verdict = Verdict::taken;
};
// ---- rank 0 and the owners ------------------------------------------------------------------------------------------
struct VelocityWanted : OfShard {};  // from rank 0, for a checkpoint
struct Velocity : OfShard {};        // the reply. Bytes: as long as the weights
// ---- fail-over ------------------------------------------------------------------------------------------------------
struct Snapshot : OfShard {};  // an owner to its successor, every few seconds. Bytes: the rule's vectors, concatenated
struct Offer : OfShard {       // when an owner is lost, all ranks to its successor: the version of this rank's copy
  std::uint64_t has = false, version = 0;
};
struct CopyWanted : OfShard {};  // the successor to a rank with the newest copy
// The reply, and rank 0's initial values for each owner. Bytes: a copy; after it, to resume training, the velocity.
struct Copy : OfShard {
  std::uint64_t version = 0;
  std::int64_t pushes = 0;
};
// ---- any rank to rank 0 ---------------------------------------------------------------------------------------------
struct Say {  // bytes: a text
  std::uint64_t gathering;
};
struct AskOwners {};  // from a rejoined rank
struct Want {         // requests a lease. Numbers increase, also across the rejoins of a rank
  std::uint64_t request;
};
struct Done {  // a lease was applied, or not. waited: seconds that the worker waited for a quorum
  std::int64_t lease;
  Verdict verdict;  // of all owners
  double loss, correct, samples, waited;
};
struct StopAll {};   // no rank may draw another lease
struct Leaves {};    // this worker draws no more leases
struct Bye {};       // this rank has received the last weights
struct WaitsFor {};  // bytes: what this rank waits for, as text; none: it works
// ---- rank 0 to the other ranks --------------------------------------------------------------------------------------
struct Heard {  // bytes: all texts of a gathering, a bundle (dist/job/membership.h)
  std::uint64_t gathering;
};
struct Owners {  // reply to AskOwners. Bytes: the owner of each shard, an int
  std::uint64_t generation;
};
struct LeaseIs {  // count: consecutive leases; 0: none is available now
  std::uint64_t request;
  std::int64_t lease, count, leases_done;
};
struct Over {  // stopped: a rank has stopped the run
  std::uint64_t stopped;
  std::int64_t leases_done;
};
struct End {};  // all ranks have sent Bye: the receiver may exit

}  // namespace message

using Message =
    std::variant<message::Push, message::Pull, message::Idle, message::Answer, message::VelocityWanted,
                 message::Velocity, message::Snapshot, message::Offer, message::CopyWanted, message::Copy, message::Say,
                 message::AskOwners, message::Want, message::Done, message::StopAll, message::Leaves, message::Bye,
                 message::WaitsFor, message::Heard, message::Owners, message::LeaseIs, message::Over, message::End>;

// Handles a Message by one function for each kind.
template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

// The first word is the kind's number in Message, the others are the struct.
template <class M>
MessageHeader packed(const M& m) {
  static_assert(std::is_trivially_copyable_v<M> && sizeof(M) <= sizeof(MessageHeader) - sizeof(std::uint64_t));
  MessageHeader header{Message(m).index()};
  std::memcpy(&header[1], &m, sizeof m);
  return header;
}
template <std::size_t kind = 0>
Message unpacked(const MessageHeader& header) {
  if constexpr (kind == std::variant_size_v<Message>) {
    fail("message ", header[0], " is no message of a parameter server");
  } else {
    if (header[0] != kind) return unpacked<kind + 1>(header);
    std::variant_alternative_t<kind, Message> m;
    std::memcpy(static_cast<void*>(&m), &header[1], sizeof m);
    return m;
  }
}

template <class M>
void send(Channel& channel, int to, const M& m) {
  channel.send(to, packed(m));
}
// content: a string or vector, which is kept until it is sent.
template <class M, class Content>
void send(Channel& channel, int to, const M& m, Content content) {
  const auto keep = std::make_shared<Content>(std::move(content));
  channel.send(to, packed(m), std::as_bytes(std::span(*keep)), keep);
}

// The content of a message: a text, or numbers.
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
template <class T>
std::vector<T> numbers_in(std::span<const std::byte> bytes) {
  std::vector<T> all(bytes.size() / sizeof(T));
  if (!all.empty()) std::memcpy(all.data(), bytes.data(), all.size() * sizeof(T));
  return all;
}

}  // namespace tandem
