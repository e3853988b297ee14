// A device's mover (core/mover.h): copies run on two separate queues. The derived class chooses the kind of memory
// outside the device.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/clock.h"
#include "core/mover.h"

namespace tandem {

// Order: a copy begins after a fork of the backend's queue. In wait() and forget() the backend's queue waits for the
// copy's own event. So a room may be used again at once: the next copy that uses it begins after the queue's wait for
// the last one.
class QueueMover : public Mover {
 public:
  QueueMover(Backend& backend, std::size_t most);  // most: limit of the bytes outside
  ~QueueMover() override;

  CopyId out(const void* from, std::size_t bytes) override;
  void in(CopyId id, void* to) override;
  bool done(CopyId id) override;  // must not be called in a recorded step
  std::string wait(CopyId id) override;
  void forget(CopyId id) override;
  double now() override { return seconds_since(began_); }
  MoverRates rates() const override { return {rate_of(out_), rate_of(in_)}; }
  std::vector<Moved> moved() override;
  void timed(bool on) override { timed_ = on; }

 protected:
  virtual std::shared_ptr<void> take(std::size_t bytes) = 0;  // memory outside; throws Error
  virtual void send_out(Queue& queue, void* room, const void* from, std::size_t bytes) = 0;
  virtual void send_in(Queue& queue, void* to, const void* room, std::size_t bytes) = 0;
  Backend& backend_;

 private:
  struct Room {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
    std::unique_ptr<Event> copied;
  };
  struct Copy {
    Room room;
    std::size_t bytes = 0;
    std::string error;
  };
  struct Lane {
    std::unique_ptr<Queue> queue;
    std::unique_ptr<Follower> clock;  // null: the device cannot measure copies
    std::vector<std::size_t> marked;  // bytes of the copy between each pair of marks
    double bytes = 0, seconds = 0;
  };
  Lane new_lane();
  Room room_for(std::size_t bytes, std::string& error);
  template <class F>
  void begin(Lane& lane, const Copy& copy, const F& send);
  void read(Lane& lane);
  static double rate_of(const Lane& lane) { return lane.seconds > 0 ? lane.bytes / lane.seconds : 0; }

  const Clock::time_point began_ = Clock::now();
  const std::size_t most_;
  std::size_t taken_ = 0;
  std::map<CopyId, Copy> copies_;
  std::multimap<std::size_t, Room> free_;  // by size
  CopyId last_ = 0;
  bool timed_ = true;
  std::unique_ptr<Event> fork_;
  Lane out_, in_;
};

}  // namespace tandem
