// Copies blocks to a scratch file (core/mover.h). Copies out run one after another; so do copies in.
//
// O_DIRECT bypasses the page cache, which would keep in memory the bytes that are moved out of it. Addresses, offsets
// and lengths must be multiples of 4 KiB. Large blocks are (the allocator aligns them); smaller ones are copied through
// a buffer. Each copy has its own range of the file, which a later copy of the same size uses again.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
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
    unlink(name.c_str());  // the file exists as long as it is open
    fcntl(file_, F_SETFD, FD_CLOEXEC);
    direct_ = fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) | O_DIRECT) == 0;
  }
  ~FileMover() override {
    for (Lane* lane : {&out_, &in_})
      if (lane->last.valid()) lane->last.wait();
    close(file_);
  }

  CopyId out(const void* from, std::size_t bytes) override {
    Copy& c = copies_[++last_];
    c.bytes = bytes;
    std::vector<std::int64_t>& free = free_[in_pages(bytes)];
    if (free.empty()) {
      c.at = end_;
      end_ += std::int64_t(in_pages(bytes));
    } else {
      c.at = free.back();
      free.pop_back();
    }
    begin(c, out_, const_cast<void*>(from));
    return last_;
  }
  void in(CopyId id, void* to) override { begin(copies_.at(id), in_, to); }
  bool done(CopyId id) override {
    return copies_.at(id).result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  // A disk completes the request or fails, so no deadline is needed
  std::string wait(CopyId id) override { return copies_.at(id).result.get(); }
  void forget(CopyId id) override {
    wait(id);
    const Copy& c = copies_.at(id);
    free_[in_pages(c.bytes)].push_back(c.at);
    copies_.erase(id);
  }
  double now() override { return seconds_since(began_); }
  std::vector<Moved> moved() override {
    std::lock_guard lock(mutex_);
    return Mover::moved();
  }
  MoverRates rates() const override {
    std::lock_guard lock(mutex_);
    return {out_.rate.value(), in_.rate.value()};
  }
  std::string description() const override {
    return "a scratch file in " + folder_ +
           (direct_ ? "" : " (through the page cache: the file system has no O_DIRECT)");
  }

 private:
  using Result = std::shared_future<std::string>;  // the error; empty: none
  struct Copy {
    std::int64_t at = 0;
    std::size_t bytes = 0;
    Result result;  // the result of the last copy out or in
  };
  struct Lane {
    Result last;
    Rate rate;
  };

  // Each copy has its own thread, which begins when the last one of its lane has ended.
  void begin(Copy& c, Lane& lane, void* memory) {
    c.result =
        std::async(std::launch::async, [this, &lane, before = lane.last, at = c.at, bytes = c.bytes, memory]() mutable {
          if (before.valid()) before.wait();
          before = {};  // otherwise each result would keep all earlier ones
          return carry(lane, at, static_cast<std::byte*>(memory), bytes);
        });
    lane.last = c.result;
  }

  std::string carry(Lane& lane, std::int64_t at, std::byte* memory, std::size_t bytes) {
    const bool out = &lane == &out_;
    const double begin = now();
    std::string error = move(out, at, memory, bytes);
    std::lock_guard lock(mutex_);
    moved_.push_back({out, bytes, begin, now()});
    lane.rate.add(bytes, moved_.back().end - begin);
    return error;
  }

  std::string move(bool out, std::int64_t at, std::byte* memory, std::size_t bytes) {
    const bool straight = bytes >= CachingAllocator::large && reinterpret_cast<std::uintptr_t>(memory) % page == 0;
    const std::unique_ptr<std::byte, decltype(&std::free)> buffer(
        straight ? nullptr : static_cast<std::byte*>(std::aligned_alloc(page, std::min(piece, in_pages(bytes)))),
        std::free);
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t here = std::min(piece, bytes - done), whole = in_pages(here);
      std::byte* with = straight ? memory + done : buffer.get();
      if (out && !straight) std::memcpy(with, memory + done, here);
      for (std::size_t k = 0; k < whole;) {
        const auto position = off_t(at + std::int64_t(done + k));
        const ssize_t n =
            out ? pwrite(file_, with + k, whole - k, position) : pread(file_, with + k, whole - k, position);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
          return "the scratch file in " + folder_ + " could not be " + (out ? "written: " : "read: ") +
                 (n < 0 ? std::strerror(errno) : "it ends too early");
        k += std::size_t(n);
      }
      if (!out && !straight) std::memcpy(memory + done, with, here);
      done += here;
    }
    return {};
  }

  const std::string folder_;
  const Clock::time_point began_ = Clock::now();
  int file_;
  bool direct_ = false;
  std::map<CopyId, Copy> copies_;
  std::map<std::size_t, std::vector<std::int64_t>> free_;  // free ranges by their size
  std::int64_t end_ = 0;
  CopyId last_ = 0;
  mutable std::mutex mutex_;  // guards moved_ and the rates
  Lane out_, in_;
};

}  // namespace

std::unique_ptr<Mover> file_mover(const std::string& folder) {
  const char* temporary = std::getenv("TMPDIR");
  return std::make_unique<FileMover>(!folder.empty() ? folder : temporary && *temporary ? temporary : "/tmp");
}

}  // namespace tandem
