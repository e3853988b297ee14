#include "dist/strategies/all_reduce.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/backend.h"
#include "core/text.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/sync_batch_norm.h"

namespace tandem {
namespace {

// Additional state for an asynchronous device. There backward only queues work, and marks an event after each bucket. A
// recorded step can contain both. The exchange of a bucket begins when the device has reached its event.
struct BehindTheHost {
  std::unique_ptr<Event> end;  // of backward
  std::shared_ptr<void> loss;  // this rank's, in host memory at the end of backward
  double fetched(DType type) const {
    return type == DType::f64 ? *static_cast<double*>(loss.get()) : double(*static_cast<float*>(loss.get()));
  }
};

class AllReduce : public Replicas {
 public:
  AllReduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options)
      : Replicas(std::move(communicator), name_of(options), true),
        options_(options),
        reducer_(*communicator_, options.deadline) {
    const int compressions = int(options.wire != DType::f32) + int(options.top_k > 0) + int(options.power_sgd > 0);
    require((options.wire == DType::f32 || options.wire == DType::bf16) && compressions <= 1,
            "all-reduce: gradients are sent as f32, or in one of the forms bf16, top-k and PowerSGD");
  }

  ~AllReduce() override { *across_ = nullptr; }  // the model may outlive this object

  BatchSource& batches(BatchSource& train, int accumulate) override {
    if (options_.classifier && !train.parts(size()).pictures.empty())
      refuse(name(), ": the ranks of a machine share the layer that is cut, and with --partition have batches of ",
             "different sizes: choose hybrid+daso, or hybrid+ before an update rule");
    return Replicas::batches(train, accumulate);
  }
  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    if (options_.classifier) options_.classifier->prepare(model, task);
    if (!options.sync_batch_norm || size() == 1) return;
    sync_batch_norm(model, across_);
    syncs_ = true;
  }

  // If ranks share memory, the vectors are in it.
  FlatMemory memory() override {
    return memory_from([this](std::size_t bytes) { return communicator_->allocate(bytes); });
  }

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    if (options_.classifier) options_.classifier->begin(flat.backend(), options_.deadline);
    compare_layouts(flat, syncs_ ? 1 : 0);
    buckets_.clear();
    behind_.reset();
    Backend& backend = flat.backend();
    if (backend.asynchronous())
      behind_.reset(new BehindTheHost{.end = backend.new_event(), .loss = backend.pinned(sizeof(double))});
    anywhere_ = Tensor::zeros(backend, {1}, flat.values.dtype());
    add_buckets(OwnerClass::replicated, between_);
    if (same_slice_ && same_slice_->size() > 1) add_buckets(OwnerClass::slice, between_slices_.emplace(same_slice_));
    broadcast(flat, between_.data(), buckets_.size() > 1 ? &between_slices_->data() : nullptr);
    if (syncs_)  // buckets may be in flight
      *across_ = [this](const std::vector<double>& mine) {
        std::vector<double> all(mine.size() * std::size_t(size()));
        std::copy(mine.begin(), mine.end(), all.begin() + std::ptrdiff_t(mine.size()) * rank());
        const auto gather = [&](Communicator& over) { return over.all_gather(buffer(all)); };
        reducer_.wait(reducer_.add({.over = *communicator_, .begin = gather, .name = "batch norm"}));
        return all;
      };
    flat.on_gradient([this](const ParameterRange& parameter) {
      for (auto& b : buckets_) b->ready(parameter);
    });
  }

  void exchange(const Tensor& loss) override {
    if (options_.classifier) options_.classifier->step();
    if (behind_) {
      for (auto& b : buckets_) b->pack_rest();
      Queue& queue = flat_->backend().queue();
      queue.fetch(behind_->loss.get(), loss.raw(), size_of(loss.dtype()));
      queue.mark(*behind_->end);
    } else {
      reducer_.waits();
    }
    for (auto& b : buckets_) b->agree();
    for (auto& b : buckets_) b->flush();
    reducer_.add({between_.flags(), behind_ ? behind_->end.get() : nullptr, [&](Communicator& over) {
                    if (behind_) reducer_.waits();
                    flags_[0] = std::isfinite(behind_ ? behind_->fetched(loss.dtype()) : loss.item()) ? 0 : 1;
                    flags_[1] = stop_requested_ ? 1 : 0;
                    return over.all_reduce({flags_, 2, DType::f32});
                  }});
    reducer_.finish();
    stop_ = flags_[1] > 0;
    anywhere_.fill(flags_[0] > 0 ? std::nan("") : 0);
    if (slices_) {
      arrived();
      optimizer_->measure_all();
      add_norms(*slices_, *optimizer_);
    }
    // Before the update: a rank that fails here has the state of a complete step.
    if (options_.check_every > 0 && steps_ > 0 && steps_ % options_.check_every == 0)
      compare_parameters(*flat_, steps_);
    steps_++;
    if (behind_) rewind(true);
  }
  void update(Optimizer& optimizer, const Tensor&) override {
    if (!slices_) arrived();
    optimizer.update(&anywhere_);
    if (!behind_) rewind(optimizer.read_state().not_finite == 0);
  }

  Measures end() override {
    if (flat_) {
      compare_parameters(*flat_, steps_);
      *across_ = nullptr;
      std::exchange(flat_, nullptr)->on_gradient(nullptr);
      bucket_bytes_ = buckets_[0]->largest();
      buckets_.clear();
      behind_.reset();
      anywhere_ = {};
      between_.end();
      if (between_slices_) between_slices_->end();
      if (options_.classifier) options_.classifier->end();
    }
    // The slices share the wire of the job
    const std::uint64_t sent = std::max(between_.sent_bytes(), between_slices_ ? between_slices_->sent_bytes() : 0);
    const std::uint64_t of_layer = options_.classifier ? options_.classifier->sent_bytes() : 0;
    return measured(reducer_, sent + of_layer, bucket_bytes_);
  }

  ClockOffset watch(Trace& trace) override {
    const ClockOffset offset = Replicas::watch(trace);
    reducer_.watch(trace);
    return offset;
  }

 private:
  void add_buckets(OwnerClass owner, DataAndFlags& between) {
    between.begin(flat_->backend(), options_.deadline);
    buckets_.push_back(std::make_unique<GradientBuckets>(*flat_, flat_->ranges(owner), between, reducer_, options_));
  }
  void arrived() {
    for (auto& b : buckets_) b->arrived();
  }
  void rewind(bool made) {
    for (auto& b : buckets_) b->rewind(made);
  }

  static std::string name_of(const AllReduceOptions& o) {
    std::string text = (o.classifier ? o.classifier->name() + "+" : "") + "all-reduce";
    if (o.power_sgd > 0) text += " (powersgd:" + std::to_string(o.power_sgd) + ")";
    if (o.top_k > 0) text += " (topk:" + digits(o.top_k) + ")";
    return text + (o.wire == DType::bf16 ? " (bf16)" : "");
  }

  std::shared_ptr<GatherNumbers> across_ = std::make_shared<GatherNumbers>();  // used by the batch norms
  bool syncs_ = false;
  AllReduceOptions options_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  // Null if a gradient is already computed when backward calls its hook
  std::unique_ptr<BehindTheHost> behind_;
  Tensor anywhere_;                             // NaN if the loss of any rank is not finite, else 0
  DataAndFlags between_{communicator_};         // all ranks
  std::optional<DataAndFlags> between_slices_;  // those with the same slice
  // For the replicated ranges, and for slices that several ranks have
  std::vector<std::unique_ptr<GradientBuckets>> buckets_;
  std::int64_t steps_ = 0, bucket_bytes_ = 0;
  float flags_[2] = {0, 0};  // ranks whose loss is not finite; ranks with a stop request
  Reducer reducer_;          // last member: its thread ends first
};

}  // namespace

std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options) {
  return std::make_unique<AllReduce>(std::move(communicator), options);
}

}  // namespace tandem
