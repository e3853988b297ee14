// Carries blocks out of a backend's memory and back, beside the computation, on two lanes: one out, one in, each in the
// order of the calls. The memory plan (autograd/memory_plan.h) decides what moves when.
//
// A mover is used by one thread. A device's mover (pinned copies, unified memory) orders its copies against the
// device's queue by events: out() and in() begin behind what is queued, and what is queued after wait() or forget()
// comes behind the copy; the host never waits. So such copies can be part of a recorded step, when each one has been
// waited for or forgotten by its end.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

class Backend;

struct MoverRates {
  double out = 0, in = 0;  // bytes per second, measured; 0: nothing was moved yet
};

class Mover {
 public:
  using CopyId = int;  // a copy outside
  struct Moved {
    bool out;
    std::size_t bytes;
    double begin, end;  // as now()
  };
  virtual ~Mover() = default;
  // Begins to copy out. The bytes must not change, nor the block be given back, before done(id).
  virtual CopyId out(const void* from, std::size_t bytes) = 0;
  virtual void in(CopyId id, void* to) = 0;  // begins to copy back
  virtual bool done(CopyId id) = 0;          // the copy that was begun last, or it failed
  virtual std::string wait(CopyId id) = 0;   // for it. What went wrong (a full disk); empty: nothing
  virtual void forget(CopyId id) = 0;        // its room outside is free again; waits for a copy under way
  virtual double now() = 0;                  // seconds, by the clock in which copies take their time
  // An operation has run: for a virtual clock
  virtual void ran(double flops, double bytes) { (void)flops, (void)bytes; }
  virtual MoverRates rates() const = 0;
  // What has been moved since the last call, for a trace. A device is waited for.
  virtual std::vector<Moved> moved() { return std::exchange(moved_, {}); }
  virtual void timed(bool on) { (void)on; }     // off: a device's copies from now on are in neither of these two
  virtual std::string description() const = 0;  // "a scratch file in /tmp (direct)"

 protected:
  std::vector<Moved> moved_;
};

// To a scratch file in `folder` (empty: $TMPDIR, then /tmp), which has no name and so ends with the process, however
// that ends. It goes past the page cache where the file system can. Throws UsageError when no file can be made there.
std::unique_ptr<Mover> file_mover(const std::string& folder = {});

// Pinned memory of the host, at most so many bytes of it; 0: half of what is available. Copies run on two queues of the
// backend's (core/queue_mover.h).
std::unique_ptr<Mover> pinned_mover(Backend& backend, std::size_t room = 0);

// Managed memory of CUDA that prefers the host. `budget`: what the run may take of the card. The sum of managed memory
// stays below what is free beside that, since a program with more of it than the card has free can hang the GPU. Throws
// where there is no CUDA.
std::unique_ptr<Mover> unified_mover(Backend& backend, std::size_t budget);

// A device that is not there: operations and copies take the time that these rates say, on a virtual clock, while the
// bytes move from host memory to host memory. The whole plan runs as it would beside a GPU; only the clock is not real.
struct SimulatedRates {
  double flops = 1e12, memory = 1e11;  // of operations: per second; bytes touched per second
  double out = 1e10, in = 1e10;        // of the copy engines, bytes per second
  std::size_t room = std::size_t(-1);  // outside; what does not fit fails as on a full disk
};
std::unique_ptr<Mover> simulated_mover(const SimulatedRates& rates = {});

}  // namespace tandem
