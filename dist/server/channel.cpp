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

  void send(int, const MessageHeader& header, std::span<const std::byte> sent,
            std::shared_ptr<const void> keep) override {
    const std::span<std::byte> bytes(const_cast<std::byte*>(sent.data()), sent.size());
    if (const auto place = place_of(sent.data()))
      return deliveries_.push_back(
          [this, header, bytes, memory = place->memory] { receiver_.shared(0, header, bytes); });
    deliveries_.push_back([this, header, bytes, keep = std::move(keep)] {
      const auto place = receiver_.place(0, header, bytes.size());
      require(!place || place->size() == bytes.size(), bytes.size(), " bytes arrive where there is room for ",
              place ? place->size() : 0);
      if (place) std::ranges::copy(bytes, place->begin());
      receiver_.arrived(0, header, place.value_or(bytes));
    });
  }
  bool sent() const override { return deliveries_.empty(); }
  bool progress() override {
    if (deliveries_.empty()) return false;
    const auto deliver = std::move(deliveries_.front());
    deliveries_.pop_front();
    deliver();
    return true;
  }
  void rest() override { (void)woken_.try_acquire_for(std::chrono::milliseconds(5)); }
  void wake() override { woken_.release(); }
  void fail(int culprit, const std::string& text) override { throw CommunicationError(culprit, text); }

 private:
  std::shared_ptr<void> new_block(std::size_t bytes) override {
    return {std::calloc(std::max<std::size_t>(bytes, 1), 1), std::free};
  }
  Receiver receiver_;
  std::deque<std::function<void()>> deliveries_;
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
