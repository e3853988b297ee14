// Copies blocks out of a backend's memory and back, concurrently with the computation, on two lanes: one for copies
// out, one for copies in, each in the order of the calls. The memory plan (autograd/memory_plan.h) decides which blocks
// are copied when.
//
// A mover is used by one thread. A device's mover (pinned copies, unified memory) orders its copies relative to the
// device's queue by events: the copies of out() and in() begin after the work queued so far, and work queued after
// wait() or forget() begins after the copy; the host never waits. So such copies can be part of a recorded step, if
// wait() or forget() is called for each copy before the step ends.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

class Backend;

struct MoverRates {
  double out = 0, in = 0;  // bytes per second, measured; 0: no copy yet
};

class Mover {
 public:
  using CopyId = int;  // a copy outside
  struct Moved {
    bool out;
    std::size_t bytes;
    double begin, end;  // in the time of now()
  };
  virtual ~Mover() = default;
  // Begins to copy out. Before done(id) is true, the bytes must not change and the block must not be given back.
  virtual CopyId out(const void* from, std::size_t bytes) = 0;
  virtual void in(CopyId id, void* to) = 0;  // begins to copy back
  virtual bool done(CopyId id) = 0;          // the copy of id that was begun last is done, or failed
  virtual std::string wait(CopyId id) = 0;   // waits for it. Returns the error (a full disk); empty: none
  virtual void forget(CopyId id) = 0;        // frees its memory outside; waits for a copy in progress
  virtual double now() = 0;                  // seconds, by the clock that measures copies
  // Reports that an operation has run: for a virtual clock
  virtual void ran(double flops, double bytes) { (void)flops, (void)bytes; }
  virtual MoverRates rates() const = 0;
  // The copies since the last call, for a trace. Waits for a device.
  virtual std::vector<Moved> moved() { return std::exchange(moved_, {}); }
  virtual void timed(bool on) { (void)on; }     // off: rates() and moved() leave out a device's copies from now on
  virtual std::string description() const = 0;  // "a scratch file in /tmp"

 protected:
  struct Rate {  // over the last second or two, since a disk's rate changes
    double bytes = 0, seconds = 0;
    void add(std::size_t more, double in) {
      if (seconds > 1) {
        bytes /= 2;
        seconds /= 2;
      }
      bytes += double(more);
      seconds += in;
    }
    double value() const { return seconds > 0 ? bytes / seconds : 0; }
  };
  std::vector<Moved> moved_;
};

// Copies to a scratch file in `folder` (empty: $TMPDIR, then /tmp). The file has no name, so the system deletes it when
// the process ends for any reason. It bypasses the page cache if the file system supports this. Throws UsageError when
// no file can be made there.
std::unique_ptr<Mover> file_mover(const std::string& folder = {});

// Copies to pinned memory of the host, at most `room` bytes; 0: half of the available memory. Copies run on two queues
// of the backend (core/queue_mover.h).
std::unique_ptr<Mover> pinned_mover(Backend& backend, std::size_t room = 0);

// Copies to CUDA managed memory whose preferred location is the host. `budget`: the bytes of GPU memory that the run
// may take. The sum of managed memory stays below the GPU memory that is free besides the budget, since a program with
// more managed memory than the GPU has free can hang the GPU. Throws without CUDA.
std::unique_ptr<Mover> unified_mover(Backend& backend, std::size_t budget);

// A simulated device: operations and copies take the time that follows from these rates, on a virtual clock, while the
// bytes are copied from host memory to host memory. The whole plan runs as it would with a GPU; only the clock is not
// real.
struct SimulatedRates {
  double flops = 1e12, memory = 1e11;  // floating-point operations; bytes read and written; both per second
  double out = 1e10, in = 1e10;        // bytes per second of the copy engines
  std::size_t room = std::size_t(-1);  // bytes outside; a copy that does not fit fails as on a full disk
};
std::unique_ptr<Mover> simulated_mover(const SimulatedRates& rates = {});

}  // namespace tandem
