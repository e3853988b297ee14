#include "dist/strategies/all_reduce.h"

#include <algorithm>
#include <cmath>

#include "core/backend.h"
#include "dist/collectives/algorithms.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/reducer.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/sync_batch_norm.h"
#include "dist/strategies/top_k.h"

namespace tandem {
namespace {

struct Bucket {
  Range range;
  std::vector<std::size_t> segments;
  std::size_t missing = 0;  // segments whose gradient is not final yet
  bool launched = false;
  std::vector<bf16> narrow = {};      // as it travels
  std::unique_ptr<TopK> top_k = {};   // or what of it does
  std::unique_ptr<Event> final = {};  // on a device: it is there
};

// Where the device works behind the host's back: backward only marks a bucket's event when its gradients are queued, which a
// recording can hold, and the exchange begins when the device has come there.
struct BehindTheHost {
  std::unique_ptr<Communicator> over;   // on the device's memory
  std::unique_ptr<Communicator> flags;  // apart: what is under way below `over` begins in an order of its own
  std::unique_ptr<Event> end;           // of backward
  std::shared_ptr<void> loss;           // this rank's, in the host's memory at the end of backward
  Tensor anywhere;  // NaN when a loss is not finite on some rank, else 0
  Tensor narrow;    // the gradients in bf16, when they travel so
};

class AllReduce : public Replicas {
 public:
  AllReduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options)
      : Replicas(std::move(communicator), name_of(options), true), options_(options), reducer_(*communicator_, options.deadline) {
    require(options.wire == DType::f32 || options.wire == DType::bf16, "all-reduce: gradients travel as f32 or bf16");
    require(options.top_k == 0 || options.wire == DType::f32, "all-reduce: the largest gradients travel as f32");
  }

  ~AllReduce() override { across_->gather = nullptr; }  // the model may live on

  void prepare(Module& model, Loss&, const PrepareOptions& options) override {
    if (!options.sync_batch_norm || size() == 1) return;
    sync_batch_norm(model, across_);
    syncs_ = true;
  }

  // Where ranks share memory, the vectors lie there.
  SpaceMemory memory() override {
    return [this](Backend& backend, std::int64_t elements) {
      auto shared = shared_memory(backend, std::size_t(elements) * sizeof(float));
      if (!shared) return Tensor::zeros(backend, {elements}, DType::f32);
      void* at = shared.get();
      return Tensor::wrap(backend, at, {elements}, DType::f32, std::move(shared));
    };
  }

  void begin(ParameterSpace& space, Optimizer&) override {
    space_ = &space;
    compare_layouts(space, syncs_ ? 1 : 0);
    behind_.reset();
    Backend& backend = space.backend();
    if (options_.top_k > 0 && (backend.asynchronous() || space.gradients.dtype() != DType::f32))
      refuse("TANDEM_WIRE=topk chooses among f32 gradients in the host's memory, not on ", backend.description(),
             ": leave it out, or choose bf16");
    if (backend.asynchronous()) {
      behind_ = std::make_unique<BehindTheHost>();
      behind_->flags = communicator_->split(0, rank());
      behind_->over =
          on_devices(communicator_, backend, options_.deadline, options_.nccl ? *options_.nccl : installed_nccl());
      behind_->end = backend.new_event();
      behind_->loss = backend.pinned(sizeof(double));
      behind_->anywhere = Tensor::zeros(backend, {1}, space.values.dtype());
      if (options_.wire == DType::bf16) behind_->narrow = Tensor::zeros(backend, {space.elements()}, DType::bf16);
      backend.synchronize();
    }
    spread(space, over());
    cut_buckets();
    if (syncs_) across_->gather = [this](const std::vector<double>& mine) { return of_all(mine); };
    space.on_gradient([this](const Segment& segment) { ready(std::size_t(&segment - space_->segments().data())); });
  }

  void exchange(const Tensor& loss) override {
    if (behind_) return exchange_on_device(loss);
    exchange([&] { return std::isfinite(loss.item()); });
  }
  void update(Optimizer& optimizer) override {
    if (behind_) {
      if (behind_->narrow.defined()) space_->gradients.copy_from(behind_->narrow);
      return optimizer.update(&behind_->anywhere);
    }
    const Tensor anywhere =
        Tensor::full(space_->backend(), {1}, flags_[0] > 0 ? std::nan("") : 0, space_->values.dtype());
    optimizer.update(&anywhere);
    // Whoever looks for the cause runs backward once more, by itself: then nothing may be sent.
    const bool made = optimizer.read_state().not_finite == 0;
    for (Bucket& b : buckets_)
      if (b.top_k) b.top_k->settle(made);
    rewind(made);
  }

  Measures end() override {
    if (space_) {
      compare_parameters(*space_, steps_);
      across_->gather = nullptr;
      std::exchange(space_, nullptr)->on_gradient(nullptr);
      for (Bucket& b : buckets_) b.final.reset();
      if (behind_) sent_ = behind_->over->bytes_sent();
      behind_.reset();
    }
    return measured(reducer_, std::max(sent_, communicator_->bytes_sent()),
                    buckets_.empty() ? 0 : buckets_[0].range.length() * 4);
  }

  ClockOffset watch(Trace& trace) override {
    const ClockOffset offset = Replicas::watch(trace);
    reducer_.watch(trace);
    return offset;
  }


 private:
  static const char* name_of(const AllReduceOptions& o) {
    return o.top_k > 0 ? "all-reduce (top-k)" : o.wire == DType::bf16 ? "all-reduce (bf16)" : "all-reduce";
  }
  Communicator& over() { return behind_ ? *behind_->over : *communicator_; }

  // Every rank's numbers, in the order of ranks, while buckets may be under way.
  std::vector<double> of_all(const std::vector<double>& mine) {
    auto all = std::make_shared<std::vector<double>>(mine.size() * std::size_t(size()));
    std::copy(mine.begin(), mine.end(), all->begin() + std::ptrdiff_t(mine.size()) * rank());
    reducer_.call({.over = *communicator_,
                   .after = nullptr,
                   .begin = [all](Communicator& over) { return over.all_gather(buffer(*all)); },
                   .name = "batch norm"});
    return *all;
  }

  // The loss is fetched, and the end of backward marked, behind what was queued for this step.
  void exchange_on_device(const Tensor& loss) {
    for (Bucket& b : buckets_)
      if (b.segments.empty()) pack(b);
    Queue& queue = space_->backend().queue();
    queue.fetch(behind_->loss.get(), loss.raw(), size_of(loss.dtype()));
    queue.mark(*behind_->end);
    exchange([&] {
      reducer_.waits();
      const void* fetched = behind_->loss.get();
      return std::isfinite(loss.dtype() == DType::f64 ? *static_cast<const double*>(fetched)
                                                      : double(*static_cast<const float*>(fetched)));
    });
    behind_->anywhere.fill(flags_[0] > 0 ? std::nan("") : 0);
    rewind(true);
  }

  // Of all buckets and the flags; `finite` is asked when this rank's backward is over.
  void exchange(const std::function<bool()>& finite) {
    if (!ordered_) agree_on_order();
    if (!behind_) reducer_.waits();
    for (std::size_t b : order_) launch(b);
    reducer_.add(
        {behind_ ? *behind_->flags : *communicator_, behind_ ? behind_->end.get() : nullptr, [&](Communicator& over) {
           flags_[0] = finite() ? 0 : 1;
           flags_[1] = stop_requested_ ? 1 : 0;
           return over.all_reduce({flags_, 2, DType::f32});
         }});
    reducer_.finish();
    stop_ = flags_[1] > 0;
    // Before they change: who fails here has the state of a whole step.
    if (options_.check_every > 0 && steps_ > 0 && steps_ % options_.check_every == 0)
      compare_parameters(*space_, steps_);
    steps_++;
  }

  // ---- buckets ---------------------------------------------------------------------------------------------------------
  void cut_buckets() {
    buckets_.clear();
    of_segment_.assign(space_->segments().size(), {});
    for (const Range& trained : space_->trainable())
      for (const Range& range : cut(trained.length(), space_->gradients.dtype(), options_.bucket_bytes))
        buckets_.push_back({.range = {trained.begin + range.begin, trained.begin + range.end}, .segments = {}});
    for (std::size_t s = 0; s < space_->segments().size(); s++) {
      const Segment& segment = space_->segments()[s];
      if (segment.frozen) continue;
      for (std::size_t b = 0; b < buckets_.size(); b++) {
        const Range& range = buckets_[b].range;
        if (range.end <= segment.local_begin || range.begin >= segment.local_begin + segment.length) continue;
        buckets_[b].segments.push_back(s);
        of_segment_[s].push_back(b);
      }
    }
    if (options_.top_k > 0)
      for (Bucket& b : buckets_) b.top_k = std::make_unique<TopK>(options_.top_k, b.range.length());
    if (behind_)
      for (Bucket& b : buckets_) b.final = space_->backend().new_event();
    order_.resize(buckets_.size());
    for (std::size_t b = 0; b < buckets_.size(); b++) order_[b] = b;
    ordered_ = false;
    finished_.clear();
    rewind(true);
  }

  void rewind(bool armed) {
    for (Bucket& b : buckets_) b.launched = false;
    restart();
    armed_ = armed;
  }
  void restart() {
    for (Bucket& b : buckets_) b.missing = b.segments.size();
    seen_.assign(of_segment_.size(), false);
    next_ = 0;
  }

  // Called by backward, in its thread, once for every segment: one that comes again begins another backward.
  void ready(std::size_t segment) {
    if (seen_[segment]) restart();
    seen_[segment] = true;
    for (std::size_t b : of_segment_[segment]) {
      if (--buckets_[b].missing > 0) continue;
      if (!ordered_) finished_.push_back(std::int32_t(b));
      if (behind_) pack(buckets_[b]);
    }
    if (behind_ || !armed_ || !ordered_) return;
    while (next_ < order_.size() && buckets_[order_[next_]].missing == 0) launch(order_[next_++]);
  }

  Tensor gradients(const Bucket& b) { return space_->gradients.range(b.range.begin, {b.range.length()}); }

  // Queued, and perhaps recorded: a bucket's gradients as they travel, and that they are there.
  void pack(Bucket& b) {
    if (behind_->narrow.defined()) behind_->narrow.range(b.range.begin, {b.range.length()}).copy_from(gradients(b));
    space_->backend().queue().mark(*b.final);
  }

  void launch(std::size_t at) {
    Bucket& b = buckets_[at];
    if (std::exchange(b.launched, true)) return;
    Tensor part =
        behind_ && behind_->narrow.defined() ? behind_->narrow.range(b.range.begin, {b.range.length()}) : gradients(b);
    const Buffer data = whole(part);
    auto* wide = static_cast<float*>(data.data);
    if (b.top_k) {
      reducer_.add({over(), nullptr, [&b, wide](Communicator& over) { return b.top_k->begin(over, wide); },
                    [&b, wide] { b.top_k->end(wide); }});
      return;
    }
    if (behind_ || options_.wire == DType::f32 || data.dtype != DType::f32) {
      reducer_.add({over(), b.final.get(), [data](Communicator& over) { return over.all_reduce(data); }});
      return;
    }
    b.narrow.resize(std::size_t(data.count));
    reducer_.add({over(), nullptr,
                  [&b, wide](Communicator& over) {
                    narrow(b.narrow.data(), wide, std::int64_t(b.narrow.size()));
                    return over.all_reduce(buffer(b.narrow));
                  },
                  [&b, wide] { widen(wide, b.narrow.data(), std::int64_t(b.narrow.size())); }});
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

  std::shared_ptr<AcrossRanks> across_ = std::make_shared<AcrossRanks>();  // asked by the batch norms
  bool syncs_ = false;
  AllReduceOptions options_;
  ParameterSpace* space_ = nullptr;
  std::unique_ptr<BehindTheHost> behind_;  // null where backward has computed what its hooks tell of
  std::vector<Bucket> buckets_;
  std::vector<std::vector<std::size_t>> of_segment_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> finished_;  // buckets in the order in which the first backward finished them
  bool ordered_ = false, armed_ = true;
  std::vector<bool> seen_;  // segments whose gradient came in this backward
  std::size_t next_ = 0;
  std::int64_t steps_ = 0;
  std::uint64_t sent_ = 0;   // by devices, in a run that has ended
  float flags_[2] = {0, 0};  // ranks whose loss is not finite; ranks that want to stop
  Reducer reducer_;          // last: its thread ends first
};

}  // namespace

std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options) {
  return std::make_unique<AllReduce>(std::move(communicator), options);
}

}  // namespace tandem
