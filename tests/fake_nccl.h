// A libnccl for tests, linked instead of the real one: ranks are threads, memory is that of twins (twin.h), streams are
// their queues. It is as strict as the real one is: communicators do not block, a call stands in its stream only when
// the error has been asked and was "success", ranks that call different things wait for ever, and so do those of a rank
// that is gone.
#pragma once
#include <nccl.h>

#include <atomic>

namespace tandem::test::fake_nccl {

// What goes wrong, of all communicators until the next calm().
struct Trouble {
  std::atomic<int> rank{-1};            // whose
  std::atomic<int> after{0};            // calls
  std::atomic<int> error{ncclSuccess};  // the asynchronous error, or that of the start
  std::atomic<bool> at_start{false};
  std::atomic<bool> silent{false};  // nothing is ever done
  std::atomic<int> started{0}, aborted{0};
};
inline Trouble trouble;
inline void calm() {
  trouble.rank = -1, trouble.after = 0, trouble.error = ncclSuccess, trouble.at_start = false, trouble.silent = false;
  trouble.started = trouble.aborted = 0;
}
inline thread_local int version = 22809;  // of this thread's rank; 0: it has no NCCL

}  // namespace tandem::test::fake_nccl
