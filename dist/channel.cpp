#include "dist/channel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

namespace tandem {
namespace {

struct Parcel {
  int from, to;
  Note note;
  std::span<const std::byte> bytes;
  enum State { waiting, taken, delivered } state = waiting;  // taken: its bytes are being copied
};

// All that the ranks share, behind one lock.
struct Post {
  explicit Post(int ranks)
      : inbox(std::size_t(ranks)), left(std::size_t(ranks), false), woken(std::size_t(ranks), false) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<std::shared_ptr<Parcel>>> inbox;
  std::vector<bool> left, woken;
  std::string failed;
  int culprit = -1;
};

class InProcessChannel : public Channel {
 public:
  InProcessChannel(std::shared_ptr<Post> post, int rank, double deadline)
      : post_(std::move(post)), rank_(rank), deadline_(deadline) {}
  ~InProcessChannel() override {
    std::lock_guard lock(post_->mutex);
    post_->left[std::size_t(rank_)] = true;
    post_->changed.notify_all();
  }
  int rank() const override { return rank_; }
  int size() const override { return int(post_->inbox.size()); }
  void on_message(Receiver receiver) override { receiver_ = std::move(receiver); }

  Work send(int to, const Note& note, std::span<const std::byte> bytes) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    auto parcel = std::make_shared<Parcel>(Parcel{rank_, to, note, bytes});
    std::lock_guard lock(post_->mutex);
    post_->inbox[std::size_t(to)].push_back(parcel);
    post_->changed.notify_all();
    return Work(std::make_unique<Sending>(*this, parcel));
  }

  bool progress() override {
    std::shared_ptr<Parcel> parcel;
    {
      std::lock_guard lock(post_->mutex);
      if (!post_->failed.empty()) throw CommunicationError(post_->culprit, post_->failed);
      auto& inbox = post_->inbox[std::size_t(rank_)];
      if (!receiver_.place || inbox.empty()) return false;
      parcel = inbox.front();
      inbox.pop_front();
      parcel->state = Parcel::taken;
    }
    const std::span<std::byte> room = receiver_.place(parcel->from, parcel->note, parcel->bytes.size());
    const bool fits = room.size() == parcel->bytes.size();
    if (fits && !room.empty()) std::memcpy(room.data(), parcel->bytes.data(), room.size());
    {
      std::lock_guard lock(post_->mutex);
      parcel->state = Parcel::delivered;
      if (!fits && post_->failed.empty()) {
        post_->failed = "rank " + std::to_string(parcel->from) + " sends " + std::to_string(parcel->bytes.size()) +
                        " bytes where rank " + std::to_string(rank_) + " has room for " + std::to_string(room.size());
        post_->culprit = parcel->from;
      }
      post_->changed.notify_all();
    }
    if (!fits) return progress();  // throws
    receiver_.arrived(parcel->from, parcel->note, room);
    return true;
  }

  void rest() override {
    std::unique_lock lock(post_->mutex);
    post_->changed.wait_for(lock, std::chrono::milliseconds(5), [&] {
      return post_->woken[std::size_t(rank_)] || !post_->failed.empty() ||
             (receiver_.place && !post_->inbox[std::size_t(rank_)].empty());
    });
    post_->woken[std::size_t(rank_)] = false;
  }
  void wake() override {
    std::lock_guard lock(post_->mutex);
    post_->woken[std::size_t(rank_)] = true;
    post_->changed.notify_all();
  }

 private:
  class Sending : public Work::Operation {
   public:
    Sending(InProcessChannel& channel, std::shared_ptr<Parcel> parcel)
        : channel_(channel), parcel_(std::move(parcel)) {}
    ~Sending() override {  // given up: nobody may read its memory any more
      std::unique_lock lock(channel_.post_->mutex);
      auto& inbox = channel_.post_->inbox[std::size_t(parcel_->to)];
      if (auto at = std::find(inbox.begin(), inbox.end(), parcel_); at != inbox.end()) inbox.erase(at);
      channel_.post_->changed.wait(lock,
                                   [&] { return parcel_->state != Parcel::taken || parcel_->to == parcel_->from; });
    }
    bool advance() override {
      if (!delivered()) channel_.progress();
      return delivered();
    }
    void wait() override {
      const auto begin = std::chrono::steady_clock::now();
      while (!advance()) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > channel_.deadline_)
          throw CommunicationError(parcel_->to, "rank " + std::to_string(parcel_->to) +
                                                    " does not take a message of rank " +
                                                    std::to_string(parcel_->from));
        channel_.rest();
      }
    }

   private:
    bool delivered() {
      std::lock_guard lock(channel_.post_->mutex);
      if (parcel_->state == Parcel::delivered) return true;
      if (channel_.post_->left[std::size_t(parcel_->to)])
        throw CommunicationError(parcel_->to, "rank " + std::to_string(parcel_->from) + " sends a message to rank " +
                                                  std::to_string(parcel_->to) + ", which has left");
      return false;
    }
    InProcessChannel& channel_;
    std::shared_ptr<Parcel> parcel_;
  };

  std::shared_ptr<Post> post_;
  int rank_;
  double deadline_;
  Receiver receiver_;
};

}  // namespace

std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, double deadline) {
  require(ranks > 0, "in_process_channels: ", ranks, " ranks");
  auto post = std::make_shared<Post>(ranks);
  std::vector<std::unique_ptr<Channel>> all;
  for (int r = 0; r < ranks; r++) all.push_back(std::make_unique<InProcessChannel>(post, r, deadline));
  return all;
}

}  // namespace tandem
