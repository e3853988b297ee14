#include "cuda/timeline.h"

#include <nvtx3/nvToolsExt.h>

#include "cuda/check.h"

namespace tandem::cuda {
namespace {

class StreamFollower final : public Follower {
 public:
  explicit StreamFollower(cudaStream_t stream) : stream_(stream) {}
  ~StreamFollower() override {
    for (cudaEvent_t e : events_) cudaEventDestroy(e);
  }
  void enter(const char* name) override { nvtxRangePushA(name); }
  void leave() override { nvtxRangePop(); }
  void passed(const char* name) override { nvtxMarkA(name); }
  // Spans end in destructors, which must not throw: times() reports a failure.
  std::int64_t mark() override {
    if (used_ == events_.size()) {
      events_.push_back(nullptr);
      remember(cudaEventCreate(&events_.back()));
    }
    if (failure_ == cudaSuccess) remember(cudaEventRecord(events_[used_], stream_));
    return std::int64_t(used_++);
  }
  // The host waits for one more event and reads both clocks there, to relate the device's clock to its own.
  std::vector<std::int64_t> times(const std::function<std::int64_t()>& now) override {
    if (used_ == 0) return {};
    CUDA_CHECK(failure_, "an event for the trace");
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    const std::int64_t last = mark();
    CUDA_CHECK(cudaEventSynchronize(events_[std::size_t(last)]));
    const std::int64_t here = now();
    std::vector<float> between(std::size_t(last), 0.f);
    for (std::size_t i = 0; i < between.size(); i++)
      CUDA_CHECK(cudaEventElapsedTime(&between[i], events_[i], events_[i + 1]));
    used_ = 0;
    std::vector<std::int64_t> all = times_of(0, between);
    const std::int64_t shift = here - all.back();
    for (std::int64_t& t : all) t += shift;
    return all;
  }

 private:
  void remember(cudaError_t status) {
    if (failure_ == cudaSuccess) failure_ = status;
  }
  cudaStream_t stream_;
  cudaError_t failure_ = cudaSuccess;
  std::vector<cudaEvent_t> events_;
  std::size_t used_ = 0;
};

}  // namespace

std::unique_ptr<Follower> follow(cudaStream_t stream) { return std::make_unique<StreamFollower>(stream); }

std::vector<std::int64_t> times_of(std::int64_t first, const std::vector<float>& between) {
  std::vector<std::int64_t> times{first};
  double ns = double(first);
  for (float ms : between) times.push_back(std::int64_t(ns += 1e6 * double(ms)));
  return times;
}

}  // namespace tandem::cuda
