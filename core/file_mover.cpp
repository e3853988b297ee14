// Blocks in a scratch file (core/mover.h): one thread writes, one reads.
//
// O_DIRECT moves bytes between the block and the disk without the page cache, which would hold in memory what was moved
// out of it. It wants addresses, offsets and lengths in multiples of 4 KiB: large blocks have them (the allocator cuts
// them so), smaller ones go through a buffer. A room in the file belongs to one copy and is used again for one of the
// same size.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/memory.h"
#include "core/mover.h"

namespace tandem {
namespace {

constexpr std::size_t page = 4096, piece = std::size_t{4} << 20;

std::size_t in_pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

class FileMover : public Mover {
 public:
  explicit FileMover(std::string folder) : folder_(std::move(folder)) {
    std::string name = folder_ + "/tandem-XXXXXX";
    file_ = mkstemp(name.data());
    if (file_ < 0)
      refuse("no scratch file can be made in ", folder_, ": ", std::strerror(errno),
             "; name a folder on a disk with room with --scratch, or in TMPDIR");
    unlink(name.c_str());  // it lives as long as it is open
    fcntl(file_, F_SETFD, FD_CLOEXEC);
    direct_ = fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) | O_DIRECT) == 0;
    for (Lane* lane : {&out_, &in_}) lane->thread = std::thread([this, lane] { work(*lane); });
  }
  ~FileMover() override {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (Lane* lane : {&out_, &in_}) lane->thread.join();
    close(file_);
  }

  CopyId out(const void* from, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    Copy& c = copies_[++last_];
    c.bytes = bytes;
    c.memory = const_cast<void*>(from);
    std::vector<std::int64_t>& free = free_[in_pages(bytes)];
    if (free.empty()) {
      c.at = end_;
      end_ += std::int64_t(in_pages(bytes));
    } else {
      c.at = free.back();
      free.pop_back();
    }
    begin(c, out_, last_);
    return last_;
  }
  void in(CopyId id, void* to) override {
    std::lock_guard lock(mutex_);
    Copy& c = copies_.at(id);
    c.memory = to;
    begin(c, in_, id);
  }
  bool done(CopyId id) override {
    std::lock_guard lock(mutex_);
    return !copies_.at(id).busy;
  }
  std::string wait(CopyId id) override {
    std::unique_lock lock(mutex_);
    const Copy& c = copies_.at(id);
    changed_.wait(lock, [&] { return !c.busy; });  // a disk answers, or fails
    return c.error;
  }
  void forget(CopyId id) override {
    wait(id);
    std::lock_guard lock(mutex_);
    const auto c = copies_.find(id);
    free_[in_pages(c->second.bytes)].push_back(c->second.at);
    copies_.erase(c);
  }
  double now() override { return seconds_since(began_); }
  std::vector<Moved> moved() override {
    std::lock_guard lock(mutex_);
    return Mover::moved();
  }
  MoverRates rates() const override {
    std::lock_guard lock(mutex_);
    const auto rate = [](const Lane& l) { return l.seconds > 0 ? l.bytes / l.seconds : 0; };
    return {rate(out_), rate(in_)};
  }
  std::string description() const override {
    return "a scratch file in " + folder_ +
           (direct_ ? "" : " (through the page cache: the file system has no O_DIRECT)");
  }

 private:
  struct Copy {
    std::int64_t at = 0;
    std::size_t bytes = 0;
    void* memory = nullptr;
    bool busy = false;
    std::string error;
  };
  struct Lane {
    std::deque<CopyId> waiting;
    std::thread thread;
    double bytes = 0, seconds = 0;
  };

  void begin(Copy& c, Lane& lane, CopyId id) {
    c.busy = true;
    lane.waiting.push_back(id);
    changed_.notify_all();
  }

  void work(Lane& lane) {
    const std::unique_ptr<std::byte, decltype(&std::free)> buffer(
        static_cast<std::byte*>(std::aligned_alloc(page, piece)), std::free);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !lane.waiting.empty(); });
      if (lane.waiting.empty()) return;            // what was begun is finished first: its blocks are in use
      Copy& c = copies_.at(lane.waiting.front());  // a map's elements stay where they are
      lane.waiting.pop_front();
      lock.unlock();
      const auto began = Clock::now();
      std::string error = move(c, &lane == &out_, buffer.get());
      lock.lock();
      const double seconds = seconds_since(began), end = now();
      moved_.push_back({&lane == &out_, c.bytes, end - seconds, end});
      lane.bytes += double(c.bytes);
      lane.seconds += seconds;
      // The rate of the last second or two: disks change theirs
      if (lane.seconds > 1) lane.bytes /= 2, lane.seconds /= 2;
      c.error = std::move(error);
      c.busy = false;
      changed_.notify_all();
    }
  }

  std::string move(const Copy& c, bool out, std::byte* buffer) {
    auto* memory = static_cast<std::byte*>(c.memory);
    const bool straight = c.bytes >= CachingAllocator::large && reinterpret_cast<std::uintptr_t>(memory) % page == 0;
    for (std::size_t done = 0; done < c.bytes;) {
      const std::size_t here = std::min(piece, c.bytes - done), whole = in_pages(here);
      std::byte* with = straight ? memory + done : buffer;
      if (out && !straight) std::memcpy(buffer, memory + done, here);
      for (std::size_t k = 0; k < whole;) {
        const auto at = off_t(c.at + std::int64_t(done + k));
        const ssize_t n = out ? pwrite(file_, with + k, whole - k, at) : pread(file_, with + k, whole - k, at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
          return "the scratch file in " + folder_ + " could not be " + (out ? "written: " : "read: ") +
                 (n < 0 ? std::strerror(errno) : "it ends too early");
        k += std::size_t(n);
      }
      if (!out && !straight) std::memcpy(memory + done, buffer, here);
      done += here;
    }
    return {};
  }

  const std::string folder_;
  const Clock::time_point began_ = Clock::now();
  int file_;
  bool direct_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<CopyId, Copy> copies_;
  std::map<std::size_t, std::vector<std::int64_t>> free_;  // rooms by their size
  std::int64_t end_ = 0;
  CopyId last_ = 0;
  bool ends_ = false;
  Lane out_, in_;
};

}  // namespace

std::unique_ptr<Mover> file_mover(const std::string& folder) {
  const char* temporary = std::getenv("TMPDIR");
  return std::make_unique<FileMover>(!folder.empty() ? folder : temporary && *temporary ? temporary : "/tmp");
}

}  // namespace tandem
