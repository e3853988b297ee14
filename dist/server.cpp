#include "dist/server.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "core/backend.h"
#include "core/elementwise.h"
#include "dist/shard.h"
#include "layers/space.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// A note's words.
enum Word : std::size_t { what, shard_of, first_element, number, samples_in };
enum What : std::uint64_t {
  push_part = 1,  // of gradient `number` of this worker, for a shard; samples_in: what it was made of
  answer_part,    // of a shard's weights after that push; samples_in: all that are applied there
  no_more,        // this worker pushes nothing any more
  last_part       // of a shard's weights when no worker pushes any more
};

}  // namespace

std::vector<std::int64_t> shard_cuts(std::int64_t elements, int servers) {
  const std::int64_t blocks = (elements + ParameterSpace::cut - 1) / ParameterSpace::cut;
  std::vector<std::int64_t> cuts;
  for (int s = 0; s <= servers; s++) cuts.push_back(std::min(elements, blocks * s / servers * ParameterSpace::cut));
  return cuts;
}

// All of it but what `mutex` guards is the thread's own.
class Member::Thread {
 public:
  Thread(std::unique_ptr<Channel> channel, const Tensor& first, std::vector<float> scales, ServerOptions options)
      : channel_(std::move(channel)),
        options_(std::move(options)),
        dtype_(first.dtype()),
        cuts_(shard_cuts(first.elements(), servers())),
        rule_(make_rule(options_.how.rule)),
        landing_(Tensor::like(first)),
        landed_(std::size_t(servers())),
        said_(std::size_t(servers())) {
    if (options_.servers > channel_->size())
      refuse("--servers ", options_.servers, ": there are ", channel_->size(), " ranks");
    const int ranks = channel_->size(), here = channel_->rank();
    counts_.applied.resize(std::size_t(ranks)), counts_.refused.resize(std::size_t(ranks));
    if (here < servers()) {
      const std::int64_t begin = cuts_[std::size_t(here)], length = cuts_[std::size_t(here) + 1] - begin;
      shard_.emplace(*rule_, first.slice(begin, begin + length),
                     std::vector<float>(scales.begin() + begin / 64, scales.begin() + (begin + length) / 64), ranks);
      workers_.resize(std::size_t(ranks));
      for (Worker& w : workers_) w.staged = Tensor::like(shard_->values());
      if (options_.how.kind == Asynchrony::Kind::bsp) mean_ = Tensor::like(shard_->values());
    }
    channel_->on_message(
        {.place = [this](int from, const Note& n, std::size_t bytes) { return place(from, n, bytes); },
         .arrived = [this](int from, const Note& n, std::span<std::byte> b) { arrived(from, n, b.size()); }});
    thread_ = std::thread([this] { run(); });
  }
  ~Thread() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    channel_->wake();
    thread_.join();
  }

  // ---- the training thread's --------------------------------------------------------------------------------------------
  void push(const Tensor& gradient, std::int64_t samples) {
    require(gradient.dtype() == dtype_ && gradient.elements() == cuts_.back(), "push: a gradient of ",
            gradient.elements(), " ", name_of(gradient.dtype()), ", and the servers have ", cuts_.back(), " ",
            name_of(dtype_));
    std::lock_guard lock(mutex_);
    require(answered_ == pushed_, "push before the answer to the last one: pull() first");
    pushed_++;
    job_ = {&gradient, samples};
    fresh_ = true;
    channel_->wake();
  }
  void pull(Tensor& weights) {
    const auto begin = Clock::now();
    wait("the answer to a push", [&] { return answered_ == pushed_; });
    counts_.waited += std::chrono::duration<double>(Clock::now() - begin).count();
    weights.copy_from(landing_);
  }
  void finish(Tensor& weights) {
    {
      std::lock_guard lock(mutex_);
      leaves_ = true;
    }
    channel_->wake();
    wait("the other workers to end", [&] { return lasted_ == servers(); });
    weights.copy_from(landing_);
  }
  std::int64_t samples_applied() const {
    std::lock_guard lock(mutex_);
    return *std::min_element(said_.begin(), said_.end());
  }
  Counts counts() const {
    std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  struct Worker {
    Tensor staged;             // of its push, until all of this shard's part is here
    std::int64_t arrived = 0;  // elements
    std::uint64_t step = 0;    // pushes applied, or refused
    std::int64_t samples = 0;
    bool waits = false;  // for an answer
    bool left = false;
  };
  struct Job {
    const Tensor* gradient = nullptr;
    std::int64_t samples = 0;
  };

  int servers() const { return options_.servers > 0 ? options_.servers : channel_->size(); }
  std::int64_t length(int shard) const { return cuts_[std::size_t(shard) + 1] - cuts_[std::size_t(shard)]; }

  template <class Done>
  void wait(const char* what, const Done& done) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(options_.deadline), [&] { return done() || failed_; }))
      throw CommunicationError(-1, std::string("rank ") + std::to_string(channel_->rank()) + " waited for " + what +
                                       " longer than " + std::to_string(int(options_.deadline)) + " s");
    if (failed_) std::rethrow_exception(failed_);
  }

  // ---- the member's thread ----------------------------------------------------------------------------------------------
  void run() {
    try {
      for (;;) {
        Job job;
        bool leaves = false;
        {
          std::lock_guard lock(mutex_);
          if (end_ && (sends_.empty() || lasted_ < servers())) return;  // a failed run does not wait for others
          if (std::exchange(fresh_, false)) job = job_;
          leaves = std::exchange(leaves_, false);
        }
        if (job.gradient)
          for (int s = 0; s < servers(); s++)
            send_parts(s, s, push_part, *job.gradient, cuts_[std::size_t(s)], std::uint64_t(job.samples));
        if (leaves)
          for (int s = 0; s < servers(); s++) send(s, {no_more, std::uint64_t(s)}, {});
        const bool some = channel_->progress();
        std::deque<Work> before;  // done() may bring new messages, and these new answers
        before.swap(sends_);
        for (Work& w : before)
          if (!w.done()) sends_.push_back(std::move(w));
        if (!some) channel_->rest();
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      failed_ = std::current_exception();
      changed_.notify_all();
    }
  }

  void send(int to, const Note& note, std::span<const std::byte> bytes) {
    sends_.push_back(channel_->send(to, note, bytes));
    std::lock_guard lock(mutex_);
    counts_.bytes += std::int64_t(bytes.size());
  }
  // A shard's part of a vector that begins at element `at` of `from`, in messages of `chunk` elements.
  void send_parts(int to, int shard, What kind, const Tensor& from, std::int64_t at, std::uint64_t samples) {
    const std::size_t size = size_of(dtype_);
    const auto* data = static_cast<const std::byte*>(from.raw());
    for (std::int64_t begin = 0; begin < length(shard); begin += options_.chunk) {
      const std::int64_t n = std::min(options_.chunk, length(shard) - begin);
      send(to, {kind, std::uint64_t(shard), std::uint64_t(begin), 0, samples},
           {data + std::size_t(at + begin) * size, std::size_t(n) * size});
    }
  }

  std::span<std::byte> place(int from, const Note& n, std::size_t bytes) {
    if (bytes == 0) return {};
    const std::size_t size = size_of(dtype_);
    const auto shard = int(n[shard_of]);
    if (n[shard_of] >= std::uint64_t(servers()) || bytes % size != 0 ||
        n[first_element] + bytes / size > std::uint64_t(length(shard)))
      return {};  // the channel refuses it by name
    if (n[what] == push_part) {
      if (!shard_ || shard != channel_->rank()) return {};
      return {static_cast<std::byte*>(workers_[std::size_t(from)].staged.raw_write()) + n[first_element] * size, bytes};
    }
    return {static_cast<std::byte*>(landing_.raw_write()) +
                (std::uint64_t(cuts_[std::size_t(shard)]) + n[first_element]) * size,
            bytes};
  }

  void arrived(int from, const Note& n, std::size_t bytes) {
    const auto elements = std::int64_t(bytes / size_of(dtype_));
    if (n[what] == push_part) {
      Worker& w = workers_[std::size_t(from)];
      w.samples = std::int64_t(n[samples_in]);
      if ((w.arrived += elements) < length(channel_->rank())) return;
      w.arrived = 0;
      w.waits = true;
      if (options_.how.kind != Asynchrony::Kind::bsp) apply(from);
      answer();
    } else if (n[what] == no_more) {
      workers_[std::size_t(from)].left = true;
      answer();
      if (std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.left; }))
        for (int m = 0; m < channel_->size(); m++)
          send_parts(m, channel_->rank(), last_part, shard_->pull(m), 0, std::uint64_t(samples_));
    } else {
      const auto shard = std::size_t(n[shard_of]);
      if ((landed_[shard] += elements) < length(int(shard))) return;
      landed_[shard] = 0;
      std::lock_guard lock(mutex_);
      said_[shard] = std::int64_t(n[samples_in]);
      if (n[what] == last_part)
        lasted_++;
      else if (++shards_answered_ == servers())
        shards_answered_ = 0, answered_++;
      changed_.notify_all();
    }
  }

  bool finite(int worker, const Tensor& gradient) {
    if (all_finite(gradient)) return true;
    std::lock_guard lock(mutex_);
    counts_.refused[std::size_t(worker)]++;
    return false;
  }
  void push_to_shard(int worker, const Tensor& gradient, std::int64_t samples) {
    const auto delay = std::size_t(shard_->push(worker, gradient, options_.learning_rate(samples_), options_.momentum));
    samples_ += samples;
    std::lock_guard lock(mutex_);
    if (counts_.delays.size() <= delay) counts_.delays.resize(delay + 1);
    counts_.delays[delay]++;
    counts_.version = shard_->version(), counts_.samples = samples_;
  }
  void apply(int worker) {
    Worker& w = workers_[std::size_t(worker)];
    w.step++;
    if (!finite(worker, w.staged)) return;
    push_to_shard(worker, w.staged, w.samples);
    std::lock_guard lock(mutex_);
    counts_.applied[std::size_t(worker)]++;
  }
  // The mean of the gradients of all who push, added up in the order of their ranks.
  void apply_together() {
    std::int64_t samples = 0;
    int count = 0;
    bool good = true;
    for (std::size_t m = 0; m < workers_.size(); m++) {
      Worker& w = workers_[m];
      if (!w.waits) continue;
      good = finite(int(m), w.staged) && good;
      if (count++ == 0)
        mean_.copy_from(w.staged);
      else
        add_into(mean_, w.staged);
      samples += w.samples;
      w.step++;
    }
    if (!good) return;
    scale_by(mean_, 1.0 / count);
    push_to_shard(0, mean_, samples);
    std::lock_guard lock(mutex_);
    for (std::size_t m = 0; m < workers_.size(); m++) counts_.applied[m] += workers_[m].waits;
  }

  // Who waits for an answer and may have it gets it.
  void answer() {
    std::uint64_t slowest = UINT64_MAX;
    std::size_t wait = 0, all = 0;
    for (const Worker& w : workers_) {
      if (w.left) continue;
      slowest = std::min(slowest, w.step);
      wait += w.waits, all++;
    }
    if (options_.how.kind == Asynchrony::Kind::bsp) {
      if (wait < all || all == 0) return;
      apply_together();
    }
    for (std::size_t m = 0; m < workers_.size(); m++) {
      Worker& w = workers_[m];
      if (!w.waits) continue;
      if (options_.how.kind == Asynchrony::Kind::ssp && w.step > slowest + std::uint64_t(options_.how.staleness))
        continue;
      w.waits = false;
      send_parts(int(m), channel_->rank(), answer_part, shard_->pull(int(m)), 0, std::uint64_t(samples_));
    }
  }
  static void scale_by(Tensor& t, double factor) {
    auto run = [&](auto* x) {
      using T = std::remove_pointer_t<decltype(x)>;
      for (std::int64_t i = 0; i < t.elements(); i++) x[i] *= T(factor);
    };
    if (t.dtype() == DType::f64)
      run(t.write<double>());
    else
      run(t.write<float>());
  }

  std::unique_ptr<Channel> channel_;
  ServerOptions options_;
  DType dtype_;
  std::vector<std::int64_t> cuts_;
  std::unique_ptr<Rule> rule_;
  Tensor landing_;                    // answers: the second vector, published by pull()
  std::vector<std::int64_t> landed_;  // elements of each shard's answer
  std::optional<Shard> shard_;
  std::vector<Worker> workers_;  // as this shard sees them
  Tensor mean_;
  std::int64_t samples_ = 0;  // applied on this shard
  int shards_answered_ = 0;
  std::deque<Work> sends_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Job job_;
  bool fresh_ = false, leaves_ = false, end_ = false;
  std::uint64_t pushed_ = 0, answered_ = 0;
  int lasted_ = 0;
  std::vector<std::int64_t> said_;  // samples applied, by each shard's last answer
  std::exception_ptr failed_;
  Counts counts_;
  std::thread thread_;  // last
};

Member::Member(std::unique_ptr<Channel> channel, const Tensor& first, std::vector<float> scales, ServerOptions options)
    : thread_(std::make_unique<Thread>(std::move(channel), first, std::move(scales), std::move(options))) {}
Member::~Member() = default;
void Member::push(const Tensor& gradient, std::int64_t samples) { thread_->push(gradient, samples); }
void Member::pull(Tensor& weights) { thread_->pull(weights); }
std::int64_t Member::samples_applied() const { return thread_->samples_applied(); }
void Member::finish(Tensor& weights) { thread_->finish(weights); }
Member::Counts Member::counts() const { return thread_->counts(); }

}  // namespace tandem
