// Carries blocks out of a backend's memory and back, beside the computation, on two lanes: one out, one in, each in the order of the
// calls. The memory plan (autograd/memory_plan.h) decides what moves when.
//
// A mover is used by one thread. A device's mover (pinned copies, unified memory) orders its copies against the device's queue by
// events: out() begins behind what is queued, and what is queued after wait() comes behind the copy.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

namespace tandem {

struct MoverRates {
  double out = 0, in = 0;  // bytes per second, measured; 0: nothing was moved yet
};

class Mover {
 public:
  using CopyId = int;  // a copy outside
  virtual ~Mover() = default;
  // Begins to copy out. The bytes must not change, nor the block be given back, before done(id).
  virtual CopyId out(const void* from, std::size_t bytes) = 0;
  virtual void in(CopyId id, void* to) = 0;  // begins to copy back
  virtual bool done(CopyId id) = 0;          // the copy that was begun last, or it failed
  virtual std::string wait(CopyId id) = 0;   // for it. What went wrong (a full disk); empty: nothing
  virtual void forget(CopyId id) = 0;        // its room outside is free again; waits for a copy under way
  virtual double now() = 0;                        // seconds, by the clock in which copies take their time
  virtual void ran(double flops, double bytes) { (void)flops, (void)bytes; }  // an operation has run: for a virtual clock
  virtual MoverRates rates() const = 0;
  virtual std::string description() const = 0;        // "a scratch file in /tmp (direct)"
};

// To a scratch file in `folder` (empty: $TMPDIR, then /tmp), which has no name and so ends with the process, however that ends. It
// goes past the page cache where the file system can. Throws UsageError when no file can be made there.
std::unique_ptr<Mover> file_mover(const std::string& folder = {});

// A device that is not there: operations and copies take the time that these rates say, on a virtual clock, while the bytes move
// from host memory to host memory. The whole plan runs as it would beside a GPU; only the clock is not real.
struct SimulatedRates {
  double flops = 1e12, memory = 1e11;   // of operations: per second; bytes touched per second
  double out = 1e10, in = 1e10;         // of the copy engines, bytes per second
  std::size_t room = std::size_t(-1);   // outside; what does not fit fails as on a full disk
};
std::unique_ptr<Mover> simulated_mover(const SimulatedRates& rates = {});

}  // namespace tandem
