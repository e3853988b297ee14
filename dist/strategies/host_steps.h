// DASO's steps inside a host (daso.h): all-reduce over its ranks, and the schedule of exchanges between hosts. A
// derived class implements the exchange.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/daso_schedule.h"
#include "dist/strategies/replicas.h"

namespace tandem {

class SlicedClassifier;

struct DasoRanks {
  std::unique_ptr<Communicator> everybody;
  std::unique_ptr<Communicator> gradients, host;  // the ranks of this host, twice; a separate thread uses the first
  std::unique_ptr<Communicator> across;           // the ranks with the same local index as this one
};
struct DasoSettings {
  double deadline = 300;
  std::int64_t bucket_bytes = 0;      // bytes of gradient buckets, and of chunks between hosts: BucketOptions
  const NcclLibrary* nccl = nullptr;  // null: the installed one
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // divided over the ranks of a host (hybrid.h)
};

class HostSteps : public Replicas {
 public:
  HostSteps(DasoRanks ranks, std::unique_ptr<Strategy> on_host, const DasoOptions& options,
            const DasoSettings& settings, const std::string& name)
      : Replicas(std::move(ranks.everybody), name, ranks.across->size() == 1),
        o_(options),
        settings_(settings),
        on_host_(std::move(on_host)),
        host_(std::move(ranks.host)),
        across_(std::move(ranks.across)),
        schedule_(options) {
    ranks_.per_step = host_->size();
  }
  void prepare(Module& model, Task& task, const PrepareOptions& options) override {
    if (host_->size() == 1) Replicas::prepare(model, task, options);
    on_host_->prepare(model, task, options);  // statistics over the pictures of a host
  }
  FlatMemory memory() override { return on_host_->memory(); }
  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer_ = &optimizer;
    schedule_ = DasoSchedule(o_);
    batch_ = 0;
    last_ = -1;
    equal_ = true;
    compare_layouts(flat);
    on_host_->begin(flat, optimizer);
    optimizer.gradients_are_shares_of(hosts());
    for (DataAndFlags* ranks : {&in_host_, &between_}) ranks->begin(flat.backend(), settings_.deadline, settings_.nccl);
    // Rank 0's values, which the ranks of its host already have
    broadcast(flat, between_.data(), flat.slice().count > 1 ? &between_.data() : nullptr);
  }
  void begin_epoch(std::int64_t epoch, const RunPlan& run) override {
    Strategy::begin_epoch(epoch, run);
    const auto length = std::int64_t(std::llround(run.steps_per_epoch));
    batch_ = last_ < 0 ? std::clamp<std::int64_t>(run.done - epoch * length, 0, length) : 0;
    last_ = length - 1;
    schedule_.begin_epoch(epoch, run.epochs);
    if (hosts() > 1) epoch_begins();
  }
  void exchange(const Tensor& loss) override {
    if (stop_requested_) on_host_->request_stop();
    on_host_->exchange(loss);
  }
  void update(Optimizer& optimizer) override { on_host_->update(optimizer); }
  void finish(Optimizer&) override {
    // a rank of this host asked to stop: all ranks learn it in the next exchange
    if (on_host_->over(0)) request_stop();
    if (hosts() == 1) stop_ = on_host_->over(0);
    if (last_ < 0)
      refuse(name(), " asks how many steps an epoch has: call begin_epoch() before the first step, as fit() does");
    if (hosts() == 1 || not_finite_ >= 0) return;
    const DasoSchedule::Turn turn = schedule_.next(batch_, last_);
    batch_++;
    equal_ = false;
    take(turn);
    if (turn.blocks) equal_ = true;
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    flush();
    const EpochEnd all = Strategy::end_epoch(mine);
    if (batch_ > last_ && not_finite_ < 0 && all.trained.samples > 0)
      schedule_.end_epoch(all.trained.loss / all.trained.samples);
    return all;
  }
  void synchronize(Shared what, FlatParameters& flat, Optimizer& optimizer) override {
    if (what != Shared::buffers || o_.norms) Replicas::synchronize(what, flat, optimizer);
  }
  void saved(StrategyState& state) override {
    std::string text = schedule_.state();
    state.text("daso", text);
    schedule_.restore(text);
  }
  Measures end() override {
    if (flat_) {
      flush();
      if (not_finite_ < 0) compare_parameters(*flat_, batch_);
      flat_ = nullptr;
    }
    in_host_.end(), between_.end();
    return on_host_->end();
  }

 protected:
  virtual void take(const DasoSchedule::Turn& turn) = 0;
  virtual void epoch_begins() {}
  int hosts() const { return across_->size(); }
  // Makes the weights of all ranks equal, also if an epoch ended early.
  void flush() {
    if (hosts() == 1 || not_finite_ >= 0 || std::exchange(equal_, true)) return;
    take(schedule_.next(last_, last_));
  }

  const DasoOptions o_;
  const DasoSettings settings_;
  std::unique_ptr<Strategy> on_host_;
  std::shared_ptr<Communicator> host_, across_;
  DataAndFlags in_host_{host_}, between_{across_};  // the same ranks, also for device memory
  DasoSchedule schedule_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  std::int64_t batch_ = 0, last_ = -1;  // of the epoch; last_ = −1: no epoch has begun
  bool equal_ = true;
};

}  // namespace tandem
