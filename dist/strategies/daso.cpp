#include "dist/strategies/daso.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/hybrid.h"

namespace tandem {
namespace {

class Daso : public HostSteps {
 public:
  Daso(DasoRanks ranks, std::unique_ptr<Strategy> on_host, const DasoOptions& o, const DasoSettings& settings,
       const std::string& name)
      : HostSteps(std::move(ranks), std::move(on_host), o, settings, name), reducer_(*across_, settings.deadline) {}

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    HostSteps::begin(flat, optimizer);
    chunks_.clear();  // no chunk has both replicated values and slices
    for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice})
      for (Range r : cut(flat.all(owner).length(), flat.values.dtype(), settings_.bucket_bytes))
        chunks_.push_back({r.begin + flat.all(owner).begin, r.end + flat.all(owner).begin});
  }
  Measures end() override {
    Measures m = HostSteps::end();
    common_ = error_ = narrow_ = {};
    for (Sync& s : syncs_) s = {};
    const Measures between =
        measured(reducer_, between_.sent_bytes() + in_host_.sent_bytes() + communicator_->traffic().bytes, 0);
    for (std::size_t i = 0; i < 3; i++) m[i].second += between[i].second;  // bytes, seconds, exposed seconds
    m[3].second = m[1].second > 0 ? 1 - m[2].second / m[1].second : 0;
    return m;
  }
  ClockOffset watch(Trace& trace) override {
    on_host_->watch(trace);
    reducer_.watch(trace);
    return Replicas::watch(trace);
  }

 private:
  // An exchange between hosts by the ranks of its group. The other ranks record that it is in flight.
  struct Sync {
    Tensor sum, sent;
    std::vector<Reducer::Pending> pending = {};
    int group = 0;
    float told[2] = {0, 0};
  };
  bool member(const Sync& s) const { return s.group == host_->rank(); }
  // The range that this rank sends and receives: all weights for a member of the group, the slices for other ranks.
  Range part(const Sync& s) const { return member(s) ? flat_->all() : flat_->all(OwnerClass::slice); }
  Tensor part(const Sync& s, const Tensor& whole) const { return whole.range(part(s).begin, {part(s).length()}); }
  bool narrow() const { return schedule_.blocking() && o_.bf16; }
  bool differs() const { return narrow() && o_.differences; }

  void epoch_begins() override {
    active_ = 0;
    if (!narrow()) return;
    const DType wide = flat_->values.dtype();
    if (!narrow_.defined()) narrow_ = vector(*flat_, DType::bf16);
    if (!o_.differences) return;
    if (!common_.defined()) common_ = vector(*flat_, wide), error_ = vector(*flat_, wide);
    common_.copy_from(flat_->values);
    error_.fill(0);
  }
  void take(const DasoSchedule::Turn& turn) override {
    Sync& before = syncs_[now_];
    if (turn.merges && o_.merge_first) merge(before, turn.weight);
    if (not_finite_ >= 0) return;
    if (turn.sends) start(syncs_[now_ = 1 - now_], turn.blocks);
    if (turn.merges && !o_.merge_first) merge(before, turn.weight);
    if (turn.blocks) overwrite(syncs_[now_]);
  }

  void start(Sync& s, bool blocks) {
    s.group = active_;
    active_ = (active_ + 1) % host_->size();
    if (differs()) narrow_difference(narrow_, error_, flat_->values, common_);  // the same on all ranks of a host
    s.pending.clear();
    if (part(s).length() == 0) return;
    Tensor& x = flat_->values;
    if (narrow() && !o_.differences) narrow_.copy_from(x);
    if (!narrow()) keep(s.sum, x);
    if (!blocks && o_.keep_progress) keep(s.sent, x);
    tell(*optimizer_);  // waits for the device: the data to send is complete
    std::copy_n(told_, 2, s.told);
    auto add = [&](Communicator& over, Buffer data, Combine how) {
      s.pending.push_back(reducer_.add({.over = over,
                                        .after = nullptr,
                                        .begin = [=](Communicator& c) { return c.all_reduce(data, how); },
                                        .name = "sum of hosts"}));
    };
    for (const Range& r : chunks_) {
      if (r.begin < part(s).begin) continue;
      Tensor chunk = (narrow() ? narrow_ : s.sum).range(r.begin, {r.length()});
      add(between_.data(), buffer(chunk), Combine::sum);
    }
    add(between_.flags(), {s.told, 2, DType::f32}, Combine::max);
  }
  void keep(Tensor& copy, const Tensor& x) {
    if (!copy.defined()) copy = vector(*flat_, x.dtype());
    copy.copy_from(x);
  }
  // Waits for the exchange. False: a rank's step was not finite, so the weights are not changed.
  bool arrives(Sync& s) {
    for (Reducer::Pending p : s.pending) reducer_.waits(), reducer_.wait(p);
    in_host_.flags().broadcast({s.told, 2, DType::f32}, s.group).wait();
    std::copy_n(s.told, 2, told_);
    hear();
    return not_finite_ < 0;
  }
  void share(const Sync& s) {
    flat_->backend().synchronize();
    Tensor replicated = flat_->values.range(0, {flat_->all(OwnerClass::replicated).end});
    in_host_.data().broadcast(buffer(replicated), s.group).wait();
    flat_->count_writes(flat_->all());
  }
  void merge(Sync& s, std::int64_t weight) {
    if (!arrives(s)) return;
    if (part(s).length() > 0) {
      Tensor x = part(s, flat_->values), sum = part(s, s.sum);
      if (o_.keep_progress) {
        Tensor sent = part(s, s.sent);
        join_mean(x, sent, sum, hosts());
      } else {
        stale_mean(x, sum, weight > 0 ? 2.0 * double(weight) : 1, hosts());
      }
    }
    share(s);
  }
  void overwrite(Sync& s) {
    if (!arrives(s)) return;
    if (part(s).length() > 0) {
      Tensor x = part(s, flat_->values);
      if (differs())
        add_mean(x, part(s, common_), part(s, narrow_), hosts());
      else
        x.copy_from(part(s, narrow() ? narrow_ : s.sum)), take_mean(x, x, hosts());
    }
    share(s);
    if (differs()) common_.copy_from(flat_->values);
  }

  std::vector<Range> chunks_;
  std::array<Sync, 2> syncs_;  // an exchange may begin before the last one is merged
  std::size_t now_ = 0;
  int active_ = 0;
  Tensor common_, error_, narrow_;  // the last common state; the rounding error; the data to send
  Reducer reducer_;                 // last member: its thread ends first
};

}  // namespace

std::unique_ptr<Strategy> daso(DasoRanks ranks, const DasoOptions& options, const DasoSettings& settings) {
  auto on_host = all_reduce(std::move(ranks.gradients), {.bucket_bytes = settings.bucket_bytes,
                                                         .deadline = settings.deadline,
                                                         .nccl = settings.nccl,
                                                         .classifier = settings.classifier});
  const std::string name = (settings.classifier ? settings.classifier->name() + "+" : "") + options.name();
  return std::make_unique<Daso>(std::move(ranks), std::move(on_host), options, settings, name);
}

}  // namespace tandem
