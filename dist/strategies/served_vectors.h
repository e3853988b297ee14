// The flat parameters as a server node exchanges them. A rank pushes its part of its machine's gradient
// (machine_share.h; the whole gradient, if it is alone) and receives the new values of the same part. On a device the
// ranks of a machine exchange vectors from device to device; only a rank's part passes through host memory.
//
// Gradients are pushed while backward still runs. When a range is final, it is scaled, gets its weight decay and is
// sent. The servers stage it until push() confirms that the whole gradient is finite. Everything is sent after backward
// in these cases:
//   - a range alone does not determine what is sent: gradients are clipped by the norm of the whole, or summed over the
//     ranks of a machine;
//   - every server reads the gradient in place;
//   - backward only queues its work on a device, or runs in the user's own loop, which may run it twice.
//
// Threads: the training thread. All ranks of a machine make the same calls in the same order. Throws the errors of
// ServerNode.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/elementwise.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/final_ranges.h"
#include "dist/strategies/gradient_buckets.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/replicas.h"
#include "layers/optim/optimizer.h"

namespace tandem {

class ServedVectors {
 public:
  // Both must outlive this object.
  ServedVectors(ServerNode& node, MachineShare& machine) : node_(node), machine_(machine) {}
  // Memory that other ranks of the host read, so that gradients are pushed or summed over the machine without a copy.
  FlatMemory memory() {
    return memory_from([this](std::size_t bytes) {
      return machine_.size() > 1 ? machine_.flags().allocate(bytes) : node_.memory(bytes);
    });
  }

  // Call it first. Copies the values of the machine's leader to all its ranks, and determines the ranges of this rank's
  // part. early: ranges may be pushed while backward runs.
  void bind(FlatParameters& flat, Optimizer& optimizer, bool early) {
    flat_ = &flat;
    optimizer_ = &optimizer;
    const int size = machine_.size(), place = machine_.place();
    const std::int64_t n = flat.all(OwnerClass::replicated).end, blocks = n / FlatParameters::alignment;
    const Slice slice = flat.slice();
    if (slice.count > 1 && (slice.count != size || slice.index != place))
      fail("slice ", slice.index, " of ", slice.count, " on rank ", place, " of ", size,
           " of a machine: layers must be cut over the ranks of a machine, in their order");
    cuts_.clear();
    ranges_.clear();
    for (int r = 0; r <= size; r++) cuts_.push_back(blocks * r / size * FlatParameters::alignment);
    const Range piece{cuts_[std::size_t(place)], cuts_[std::size_t(place) + 1]};
    for (const Range& r : {piece, flat.all(OwnerClass::slice)})
      if (r.length() > 0) ranges_.push_back(r);
    if (ranges_.empty())
      refuse("the model's ", n, " parameters are too few for ", size, " ranks of a machine: start fewer");
    final_.reset();
    if (size > 1) {
      flat.backend().synchronize();
      machine_.data().broadcast(replicated(flat.values), 0).wait();
      if (flat.buffers.numel() > 0) machine_.data().broadcast(buffer(flat.buffers), 0).wait();
      flat.count_writes(flat.all());
    } else if (early && !flat.backend().on_device() && !flat.backend().asynchronous()) {
      const std::int64_t bytes = std::clamp<std::int64_t>(std::int64_t(flat.gradients.bytes()) / 64, 64 << 10, 1 << 20);
      final_.emplace(flat, cut(flat.all(), flat.gradients.dtype(), bytes));
    }
  }

  // Copies rank 0's values to all workers, for a loop that computes a gradient before its first pull.
  void broadcast_first() {
    for (auto [vector, host] : {std::pair(&flat_->values, &values_), std::pair(&flat_->buffers, &buffers_)}) {
      if (vector->numel() == 0) continue;
      const Buffer b = host->download(*vector);
      const std::string text(static_cast<const char*>(b.data), node_.rank() == 0 ? b.bytes() : 0);
      const std::string first = node_.gather(text)[0];
      std::memcpy(b.data, first.data(), first.size());
      host->upload(*vector);
    }
    flat_->count_writes(flat_->all());
  }

  // Rounds (parameter_server.h): the worker updates the values itself, and pushes Δ = θ − x.
  void begin_rounds() {
    theta_ = Tensor::like(flat_->values);
    m_ = Tensor::like(flat_->values);
    m_.fill(0);
  }

  // Calls the node's begin() with the current values. blocks: one per 64 elements of the parameters.
  // velocity: to resume training; undefined: zeros.
  void begin(ServerOptions options, WorkLeases leases, const std::vector<RuleBlock>& blocks, Tensor velocity) {
    OnHost host;
    std::vector<std::byte> velocity_part;
    Buffer v;
    if (velocity.defined()) v = packed(host.download(velocity, ranges_), velocity_part);
    std::vector<RuleBlock> blocks_part;
    for (const Range& r : ranges_)
      blocks_part.insert(blocks_part.end(), blocks.begin() + r.begin / FlatParameters::alignment,
                         blocks.begin() + r.end / FlatParameters::alignment);
    node_.begin(packed(values_.download(flat_->values, ranges_), pulled_), present_buffers(), std::move(blocks_part),
                std::move(options), std::move(leases), v);
  }

  // Without this call nothing is sent before combine().
  void step_begins() { sends_ = final_ && !optimizer_->needs_whole_gradient() && node_.pushes_parts(); }

  void ready(const ParameterRange& parameter) {  // its gradient is final
    if (!sends_) return;
    for (std::size_t r : final_->ready(parameter)) push_early((*final_)[r]);
  }

  // After backward: sums `step` and the gradients over the machine. This rank's part of the gradients is converted to
  // the pushed form (clipped by the norm of the whole, with weight decay); on a machine the other parts are undefined.
  // False: a gradient or the loss was not finite on some rank.
  bool combine(MachineShare::Step& step, const Tensor& loss) {
    Communicator& machine = machine_.flags();
    Optimizer& optimizer = *optimizer_;
    if (machine.size() > 1) {
      step.not_finite = std::isfinite(loss.item()) ? 0 : 1;
      machine_.sum(step);
      flat_->backend().synchronize();
      machine_.data().reduce_scatter(replicated(flat_->gradients), Combine::sum, cuts_).wait();
    }
    for (std::size_t r = 0; sends_ && r < final_->size(); r++)
      if (!final_->complete(r) || final_->empty(r)) push_early((*final_)[r]);
    if (final_) final_->restart();
    for (std::size_t i = 0; !sends_ && i < ranges_.size(); i++) optimizer.measure(ranges_[i], i > 0);
    if (machine.size() > 1) add_norms(machine, optimizer);
    const Tensor everywhere =
        step.not_finite > 0 ? Tensor::full(flat_->backend(), {1}, std::nan(""), flat_->values.dtype()) : loss;
    optimizer.check_gradients(&everywhere);
    const bool finite = optimizer.read_state().not_finite == 0;
    for (const Range& r : ranges_)
      if (finite && !sends_) optimizer.finish_gradients(r);
    sends_ = measured_ = false;  // a backward that searches for non-finite values sends nothing
    return finite;
  }

  // Writes Δ to the gradients. False: it is not finite.
  bool finish_round() {
    flat_->gradients.fill(0);
    add_scaled(flat_->gradients, theta_, 1, flat_->values);
    return all_finite(flat_->gradients);
  }
  void push(std::int64_t samples, const MetricSums& sums) {
    node_.push(packed(gradients_.download(flat_->gradients, ranges_), pushed_), present_buffers(), samples, sums);
  }
  void pull() {
    node_.pull(values(), buffers());
    take();
  }

  // Calls the node's finish(). takes: copies the last values too.
  void finish(bool takes) {
    node_.finish(values(), buffers());
    if (takes) take();
  }

  // Writes the servers' velocity, if the rule has one; undefined: does nothing.
  void velocity(Tensor into) {
    if (!into.defined()) return;
    OnHost host;
    std::vector<std::byte> memory;
    if (node_.velocity(part(host.of(into), memory))) unpack(memory, host, into);
  }
  Tensor& momentum() { return m_; }  // with rounds: the servers' m, to and from checkpoints

 private:
  Buffer replicated(Tensor& vector) const { return {vector.raw_write(), cuts_.back(), vector.dtype()}; }
  // This rank's part of a vector: in place if it is one range, otherwise in `memory`.
  Buffer part(Buffer vector, std::vector<std::byte>& memory) const {
    if (ranges_.size() == 1) return {vector.at(ranges_[0].begin), ranges_[0].length(), vector.dtype};
    std::int64_t n = 0;
    for (const Range& r : ranges_) n += r.length();
    memory.resize(std::size_t(n) * size_of(vector.dtype));
    return {memory.data(), n, vector.dtype};
  }

  // part(), after its elements were copied to `memory` if it is there.
  Buffer packed(Buffer vector, std::vector<std::byte>& memory) const {
    const Buffer all = part(vector, memory);
    if (ranges_.size() == 1) return all;  // in place
    std::byte* to = memory.data();
    for (const Range& r : ranges_) to = std::copy(vector.at(r.begin), vector.at(r.end), to);
    return all;
  }

  // Writes this rank's part to the vector, and then those of all ranks of the machine.
  void unpack(const std::vector<std::byte>& memory, OnHost& host, Tensor& vector) {
    const std::byte* from = memory.data();
    for (const Range& r : ranges_) {
      if (ranges_.size() == 1) break;  // it is in place
      const Buffer on_host = host.of(vector);
      const std::ptrdiff_t bytes = on_host.at(r.end) - on_host.at(r.begin);
      std::copy_n(from, bytes, on_host.at(r.begin));
      from += bytes;
    }
    host.upload(vector, ranges_);
    vector.backend().synchronize();
    machine_.data().all_gather(replicated(vector), cuts_).wait();
  }

  // The first rank of a machine pushes the running statistics for the machine.
  Buffer buffers() { return machine_.leads() ? buffers_.of(flat_->buffers) : Buffer{}; }
  Buffer present_buffers() { return machine_.leads() ? buffers_.download(flat_->buffers) : Buffer{}; }
  Buffer values() { return part(values_.of(flat_->values), pulled_); }
  void take() {
    unpack(pulled_, values_, flat_->values);
    if (flat_->buffers.numel() > 0) machine_.flags().broadcast(buffers_.of(flat_->buffers), 0).wait();
    buffers_.upload(flat_->buffers);
    flat_->count_writes(flat_->all());
    if (theta_.defined()) theta_.copy_from(flat_->values);
  }
  void push_early(Range range) {
    optimizer_->measure(range, std::exchange(measured_, true));
    optimizer_->finish_gradients(range);
    node_.push_part(buffer(flat_->gradients), range);
  }

  ServerNode& node_;
  MachineShare& machine_;
  FlatParameters* flat_ = nullptr;
  Optimizer* optimizer_ = nullptr;
  Cuts cuts_;                  // of the replicated range, which begins at 0
  std::vector<Range> ranges_;  // this rank's part: a piece of the replicated range, and the slices
  OnHost values_, gradients_, buffers_;
  std::vector<std::byte> pushed_, pulled_;  // if the part has several ranges: the gradients, and the values
  Tensor theta_, m_;                        // with rounds: θ, and the servers' m
  std::optional<FinalRanges> final_;        // ranges that may be pushed early
  bool sends_ = false, measured_ = false;   // measured_: a range of the step's gradient was measured
};

}  // namespace tandem
