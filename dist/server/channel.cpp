#include "dist/server/channel.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <semaphore>
#include <utility>

namespace tandem {
namespace {

class ChannelOfOne : public Channel {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string where(int) const override { return "rank 0"; }
  std::vector<bool> living() const override { return {true}; }
  std::uint64_t generation() const override { return 0; }
  void on_message(Receiver receiver) override { receiver_ = std::move(receiver); }
  bool reaches(int) override { return true; }

  void send(int, const MessageHeader& header, std::span<const std::byte> bytes,
            std::shared_ptr<const void> keep) override {
    const auto place = place_of(bytes.data());
    sent_.push_back({header, bytes, place ? place->memory : std::move(keep), place.has_value()});
  }
  bool sent() const override { return sent_.empty(); }
  bool progress() override {
    if (sent_.empty()) return false;
    const Message m = std::move(sent_.front());
    sent_.pop_front();
    std::span<std::byte> bytes(const_cast<std::byte*>(m.bytes.data()), m.bytes.size());
    if (m.in_place) {
      receiver_.shared(0, m.header, bytes);
      return true;
    }
    if (const auto place = receiver_.place(0, m.header, bytes.size())) {
      require(place->size() == bytes.size(), bytes.size(), " bytes arrive where there is room for ", place->size());
      std::copy(bytes.begin(), bytes.end(), place->begin());
      bytes = *place;
    }
    receiver_.arrived(0, m.header, bytes);
    return true;
  }
  void rest() override { (void)woken_.try_acquire_for(std::chrono::milliseconds(5)); }
  void wake() override { woken_.release(); }
  void fail(int culprit, const std::string& text) override { throw CommunicationError(culprit, text); }

 private:
  struct Message {
    MessageHeader header;
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> keep;
    bool in_place;
  };
  std::shared_ptr<void> new_block(std::size_t bytes) override {
    return {std::calloc(std::max<std::size_t>(bytes, 1), 1), std::free};
  }
  Receiver receiver_;
  std::deque<Message> sent_;
  std::counting_semaphore<> woken_{0};
};

}  // namespace

std::shared_ptr<void> Channel::share(std::size_t bytes) {
  std::lock_guard lock(blocks_mutex_);  // blocks_ has the same order as the calls of new_block()
  auto block = new_block(bytes);
  blocks_.push_back({static_cast<const std::byte*>(block.get()), bytes, block});
  return block;
}

std::optional<Channel::Place> Channel::place_of(const void* p) const {
  const auto* at = static_cast<const std::byte*>(p);
  std::lock_guard lock(blocks_mutex_);
  for (std::size_t b = 0; b < blocks_.size(); b++)
    if (const Block& k = blocks_[b]; at >= k.begin && at < k.begin + k.bytes)
      if (auto memory = k.memory.lock()) return Place{std::move(memory), b, std::uint64_t(at - k.begin)};
  return {};
}

std::unique_ptr<Channel> channel_of_one() { return std::make_unique<ChannelOfOne>(); }

}  // namespace tandem
