#include "dist/server/send_queue.h"

#include <algorithm>

#include "dist/server/server_messages.h"

namespace tandem {

template <class F>
bool SendQueue::gone_well(const F& f) {
  try {
    return f();
  } catch (const CommunicationError&) {
    if (!forgives_) throw;
    return true;
  }
}

void SendQueue::send(int to, const MessageHeader& header, std::span<const std::byte> bytes,
                     std::shared_ptr<const void> keep) {
  gone_well([&] {
    sends_.push_back({std::move(keep), channel_.send(to, header, bytes)});
    return true;
  });
  if (to != rank()) bytes_ += std::int64_t(bytes.size());
}

void SendQueue::send_parts(int to, MessageHeader header, Buffer part, std::int64_t chunk,
                           const std::shared_ptr<const void>& keep) {
  const std::uint64_t first = header[word::first];
  for (std::int64_t begin = 0; begin < part.count; begin += chunk) {
    const Buffer some{part.at(begin), std::min(chunk, part.count - begin), part.dtype};
    header[word::first] = first + std::uint64_t(begin);
    send(to, header, {static_cast<const std::byte*>(some.data), some.bytes()}, keep);
  }
}

void SendQueue::let_go() {
  std::deque<Sending> before;  // done() may deliver messages, whose handlers may send answers
  before.swap(sends_);
  for (Sending& s : before)
    if (!gone_well([&] { return s.work.done(); })) sends_.push_back(std::move(s));
}

std::shared_ptr<void> SendQueue::share(std::size_t bytes) {
  std::lock_guard lock(mutex_);  // blocks_ has the same order as the channel's calls
  auto block = channel_.share(bytes);
  blocks_.push_back({static_cast<const std::byte*>(block.get()), bytes, block});
  return block;
}

std::optional<SendQueue::Place> SendQueue::place_of(const void* p) const {
  const auto* at = static_cast<const std::byte*>(p);
  std::lock_guard lock(mutex_);
  for (std::size_t b = 0; b < blocks_.size(); b++)
    if (const Block& k = blocks_[b]; at >= k.begin && at < k.begin + k.bytes && !k.memory.expired())
      return Place{b, std::uint64_t(at - k.begin)};
  return {};
}
std::shared_ptr<void> SendQueue::memory_of(const void* p) const {
  const auto place = place_of(p);
  std::lock_guard lock(mutex_);
  return place ? blocks_[place->block].memory.lock() : nullptr;
}

std::byte* SendQueue::at(int rank, Place place, std::size_t bytes) const {
  const std::span<std::byte> memory = channel_.shared_by(rank, int(place.block));
  require(place.offset <= memory.size() && bytes <= memory.size() - place.offset, where(rank), " names memory that ",
          where(this->rank()), " cannot reach");
  return memory.data() + place.offset;
}

}  // namespace tandem
