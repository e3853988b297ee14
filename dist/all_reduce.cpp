#include "dist/all_reduce.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "core/backend.h"
#include "dist/algorithms.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// Reduces what it is given, in that order, in a thread of its own. While it is idle the communicator is its caller's.
class Reducer {
 public:
  explicit Reducer(Communicator& communicator) : communicator_(communicator), thread_([this] { run(); }) {}
  ~Reducer() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    changed_.notify_all();
    communicator_.wake();
    thread_.join();
  }

  void reduce(Buffer data, DType wire) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back({data, wire});
      if (open_++ == 0) since_ = Clock::now();
    }
    changed_.notify_all();
    communicator_.wake();
  }
  double seconds() const {  // in which something was under way
    std::lock_guard lock(mutex_);
    return seconds_;
  }
  // Until all is reduced; throws what went wrong.
  void finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_ == 0 || failed_; });
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  struct Item {
    Buffer data;
    DType wire;
  };
  struct UnderWay {
    Buffer data;
    std::vector<bf16> narrow;
    Work work;
  };

  void run() {
    std::deque<UnderWay> works;
    try {
      for (;;) {
        std::vector<Item> fresh;
        {
          std::unique_lock lock(mutex_);
          if (works.empty()) changed_.wait(lock, [&] { return end_ || !queue_.empty(); });
          if (end_) return;
          fresh.swap(queue_);
        }
        for (const Item& item : fresh) start(works, item);
        std::int64_t closed = 0;
        while (!works.empty() && works.front().work.done()) {
          UnderWay& u = works.front();
          widen(static_cast<float*>(u.data.data), u.narrow.data(), std::int64_t(u.narrow.size()));
          works.pop_front();
          closed++;
        }
        if (closed > 0) {
          std::lock_guard lock(mutex_);
          open_ -= closed;
          if (open_ == 0) seconds_ += std::chrono::duration<double>(Clock::now() - since_).count();
          changed_.notify_all();
        } else if (!works.empty()) {
          communicator_.rest();
        }
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      failed_ = std::current_exception();
      changed_.notify_all();
    }
  }
  void start(std::deque<UnderWay>& works, const Item& item) {
    works.push_back({item.data, {}, {}});
    UnderWay& u = works.back();
    Buffer b = item.data;
    if (item.wire == DType::bf16 && b.dtype == DType::f32) {
      u.narrow.resize(std::size_t(b.count));
      narrow(u.narrow.data(), static_cast<const float*>(b.data), b.count);
      b = buffer(u.narrow);
    }
    u.work = communicator_.all_reduce(b);
  }

  Communicator& communicator_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Item> queue_;
  std::int64_t open_ = 0;  // given and not yet reduced
  Clock::time_point since_;
  double seconds_ = 0;
  bool end_ = false;
  std::exception_ptr failed_;
  std::thread thread_;
};

struct Bucket {
  Range range;
  std::vector<std::size_t> segments;
  std::size_t missing = 0;  // segments whose gradient is not final yet
  bool launched = false;
};

class AllReduce : public Strategy {
 public:
  AllReduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options)
      : communicator_(std::move(communicator)), options_(options), reducer_(*communicator_) {
    require(options.wire == DType::f32 || options.wire == DType::bf16, "all-reduce: gradients travel as f32 or bf16");
  }

  std::string name() const override { return options_.wire == DType::bf16 ? "all-reduce (bf16)" : "all-reduce"; }
  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  std::string where() const override { return communicator_->where(rank()); }
  double scaled_learning_rate(double rate) const override { return rate * size(); }

  // Where ranks share memory, the vectors lie there.
  SpaceMemory memory() override {
    return [this](Backend& backend, std::int64_t elements) {
      auto shared = backend.on_device() ? nullptr : communicator_->allocate(std::size_t(elements) * sizeof(float));
      if (!shared) return Tensor::zeros(backend, {elements}, DType::f32);
      void* at = shared.get();
      return Tensor::wrap(backend, at, {elements}, DType::f32, std::move(shared));
    };
  }

  void begin(ParameterSpace& space) override {
    require(!space.backend().on_device(),
            "the all-reduce strategy works on the host's memory so far: use --device cpu");
    space_ = &space;
    compare_layouts();
    for (Tensor* t : {&space.values, &space.statistics})
      if (t->elements() > 0) communicator_->broadcast(whole(*t), 0).wait();
    space.count_writes(space.all());
    cut_buckets();
    space.on_gradient([this](const Segment& segment) { ready(std::size_t(&segment - space_->segments().data())); });
  }

  void step(Optimizer& optimizer, const Variable& loss) override {
    if (!ordered_) agree_on_order();
    for (std::size_t b : order_) launch(b);
    flags_[0] = std::isfinite(loss.item()) ? 0 : 1;
    flags_[1] = wish_ ? 1 : 0;
    reducer_.reduce({flags_, 2, DType::f32}, DType::f32);
    const auto begin = Clock::now();
    reducer_.finish();
    exposed_ += std::chrono::duration<double>(Clock::now() - begin).count();
    stop_ = flags_[1] > 0;
    // Before they change: who fails here has the state of a whole step.
    if (options_.check_every > 0 && steps_ > 0 && steps_ % options_.check_every == 0) compare_parameters();
    const Tensor anywhere =
        Tensor::full(space_->backend(), {1}, flags_[0] > 0 ? std::nan("") : 0, space_->values.dtype());
    optimizer.step(&anywhere);
    // Whoever looks for the cause runs backward once more, by itself: then nothing may be sent.
    rewind(optimizer.read_state().not_finite == 0);
    steps_++;
  }

  void end() override {
    compare_parameters();
    space_->on_gradient(nullptr);
  }

  void request_stop() override { wish_ = true; }

  std::vector<std::pair<std::string, double>> measures() const override {
    const double all = reducer_.seconds();
    return {{"sent_bytes", double(communicator_->bytes_sent())},
            {"exchange_seconds", all},
            {"exposed_seconds", exposed_},
            {"hidden_share", all > 0 ? 1 - exposed_ / all : 0},
            {"bucket_bytes", buckets_.empty() ? 0 : double(buckets_[0].range.length()) * 4}};
  }

  void merge_statistics(ParameterSpace& space) override {
    if (size() == 1 || space.statistics.elements() == 0) return;
    // Statistics, and the squares of all of them: a variance over all ranks is the mean of the variances and the
    // variance of the means.
    std::vector<double> v = space.statistics.values();
    const std::size_t n = v.size();
    v.resize(2 * n);
    for (std::size_t i = 0; i < n; i++) v[n + i] = v[i] * v[i];
    communicator_->all_reduce(buffer(v)).wait();
    for (double& x : v) x /= size();
    const auto& segments = space.statistic_segments();
    for (const auto& var : segments) {
      if (!var.name.ends_with("running_var")) continue;
      const std::string twin = var.name.substr(0, var.name.size() - 3) + "mean";
      auto mean = std::find_if(segments.begin(), segments.end(), [&](auto& s) { return s.name == twin; });
      if (mean == segments.end()) continue;
      for (std::int64_t i = 0; i < var.length; i++) {
        const auto m = std::size_t(mean->begin + i);
        v[std::size_t(var.begin + i)] += std::max(0.0, v[n + m] - v[m] * v[m]);
      }
    }
    v.resize(n);
    space.statistics.copy_from(Tensor::of(space.backend(), space.statistics.shape(), v, space.statistics.dtype()));
  }

  // The lowest rank of those that hold the majority; of two halves the one with rank 0 has it.
  bool saves_after_failure() override {
    const std::vector<int> left = communicator_->survivors();
    const int twice = 2 * int(left.size());
    return !left.empty() && left[0] == rank() && (twice > size() || (twice == size() && rank() == 0));
  }

  Score combine(const Score& mine) override {
    std::vector<double> v{mine.loss, mine.correct, mine.samples};
    communicator_->all_reduce(buffer(v)).wait();
    return {v[0], v[1], v[2]};
  }

 private:
  static Buffer whole(Tensor& t) { return {t.raw_write(), t.elements(), t.dtype()}; }

  // ---- buckets ---------------------------------------------------------------------------------------------------------
  void cut_buckets() {
    const std::int64_t total = space_->elements(), size = std::int64_t(size_of(space_->gradients.dtype()));
    std::int64_t bytes = options_.bucket_bytes;
    if (bytes <= 0) bytes = std::clamp<std::int64_t>(total * size / 8, 256 << 10, 4 << 20);
    const std::int64_t length = std::max<std::int64_t>(1, bytes / size / ParameterSpace::cut) * ParameterSpace::cut;
    buckets_.clear();
    of_segment_.assign(space_->segments().size(), {});
    for (std::int64_t begin = 0; begin < total; begin += length)
      buckets_.push_back({.range = {begin, std::min(total, begin + length)}, .segments = {}});
    for (std::size_t s = 0; s < space_->segments().size(); s++) {
      const Segment& segment = space_->segments()[s];
      for (std::int64_t b = segment.local_begin / length; b * length < segment.local_begin + segment.length; b++) {
        buckets_[std::size_t(b)].segments.push_back(s);
        of_segment_[s].push_back(std::size_t(b));
      }
    }
    order_.resize(buckets_.size());
    for (std::size_t b = 0; b < buckets_.size(); b++) order_[b] = b;
    ordered_ = false;
    rewind(true);
  }

  void rewind(bool armed) {
    for (Bucket& b : buckets_) b.missing = b.segments.size(), b.launched = false;
    armed_ = armed;
    next_ = 0;
  }

  // Called by backward, in its thread.
  void ready(std::size_t segment) {
    for (std::size_t b : of_segment_[segment])
      if (buckets_[b].missing > 0 && --buckets_[b].missing == 0 && !ordered_) finished_.push_back(std::int32_t(b));
    if (!armed_ || !ordered_) return;
    while (next_ < order_.size() && buckets_[order_[next_]].missing == 0) launch(order_[next_++]);
  }

  void launch(std::size_t b) {
    if (std::exchange(buckets_[b].launched, true)) return;
    const Range r = buckets_[b].range;
    Tensor part = space_->gradients.range(r.begin, {r.length()});
    reducer_.reduce(whole(part), options_.wire);
  }

  void agree_on_order() {
    for (std::size_t b = 0; b < buckets_.size(); b++)
      if (std::find(finished_.begin(), finished_.end(), std::int32_t(b)) == finished_.end())
        finished_.push_back(std::int32_t(b));
    finished_.resize(buckets_.size());
    communicator_->broadcast(buffer(finished_), 0).wait();
    for (std::size_t i = 0; i < order_.size(); i++) order_[i] = std::size_t(finished_[i]);
    ordered_ = true;
  }

  // ---- what must be equal ----------------------------------------------------------------------------------------------
  // Throws Error that names the first rank whose number is not rank 0's.
  void compare(std::uint64_t mine, const std::string& what) {
    std::vector<std::uint8_t> all(std::size_t(size()) * sizeof mine);
    std::memcpy(all.data() + std::size_t(rank()) * sizeof mine, &mine, sizeof mine);
    communicator_->all_gather(buffer(all)).wait();
    for (int r = 1; r < size(); r++)
      if (std::memcmp(all.data(), all.data() + std::size_t(r) * sizeof mine, sizeof mine) != 0)
        fail(communicator_->where(0), " and ", communicator_->where(r), " ", what);
  }
  void compare_layouts() {
    compare(space_->layout_hash(), "do not train the same model: start all ranks with the same program and options");
  }
  void compare_parameters() {
    // FNV-1a over words: a difference in any bit shows.
    std::uint64_t h = 1469598103934665603u;
    const auto* words = static_cast<const std::uint32_t*>(space_->values.raw());
    for (std::size_t i = 0; i < space_->values.bytes() / sizeof *words; i++) h = (h ^ words[i]) * 1099511628211u;
    compare(h, "no longer have the same parameters (after " + std::to_string(steps_) +
                   " steps): they run different programs, or a machine computes wrongly");
  }

  std::unique_ptr<Communicator> communicator_;
  AllReduceOptions options_;
  ParameterSpace* space_ = nullptr;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<std::size_t>> of_segment_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> finished_;  // buckets in the order in which the first backward finished them
  bool ordered_ = false, armed_ = true, wish_ = false;
  std::size_t next_ = 0;
  std::int64_t steps_ = 0;
  double exposed_ = 0;       // seconds that a step waited for the network after backward
  float flags_[2] = {0, 0};  // ranks whose loss is not finite; ranks that want to stop
  Reducer reducer_;          // last: its thread ends first
};

}  // namespace

std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options) {
  return std::make_unique<AllReduce>(std::move(communicator), options);
}

}  // namespace tandem
