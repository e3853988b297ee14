// The flat parameters as a server node exchanges them. A rank pushes its part of its machine's gradient
// (machine_share.h; the whole gradient, if it is alone) and receives the new values of the same part. Vectors of a
// device pass through host memory.
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
#include <optional>
#include <vector>

#include "dist/strategies/final_ranges.h"
#include "dist/strategies/machine_share.h"
#include "layers/optim/optimizer.h"

namespace tandem {

class ServedVectors {
 public:
  // Both must outlive this object.
  ServedVectors(ServerNode& node, MachineShare& machine) : node_(node), machine_(machine) {}
  // Memory that other ranks of the host read, so that gradients are pushed or summed over the machine without a copy.
  FlatMemory memory();
  // Call it first. Copies the values of the machine's leader to all its ranks, and determines the ranges of this rank's
  // part. early: ranges may be pushed while backward runs.
  void bind(FlatParameters& flat, Optimizer& optimizer, bool early);
  // Copies rank 0's values to all workers, for a loop that computes a gradient before its first pull.
  void broadcast_first();
  // Rounds (parameter_server.h): the worker updates the values itself, and pushes Δ = θ − x.
  void begin_rounds();

  // Calls the node's begin() with the current values. blocks: one per 64 elements of the parameters.
  // velocity: to resume training; undefined: zeros.
  void begin(ServerOptions options, WorkLeases leases, const std::vector<RuleBlock>& blocks, Tensor velocity);
  void step_begins();                           // without this call nothing is sent before combine()
  void ready(const ParameterRange& parameter);  // its gradient is final
  // After backward: sums `step` and the gradients over the machine. This rank's part of the gradients is converted to
  // the pushed form (clipped by the norm of the whole, with weight decay); on a machine the other parts are undefined.
  // False: a gradient or the loss was not finite on some rank.
  bool combine(MachineShare::Step& step, const Tensor& loss);
  bool finish_round();  // writes Δ to the gradients. False: it is not finite
  void push(std::int64_t samples, const MetricSums& sums);
  void pull();
  void finish(bool takes);           // calls the node's finish(); takes: copies the last values too
  void velocity(Tensor into);        // writes the servers' velocity, if the rule has one; undefined: does nothing
  Tensor& momentum() { return m_; }  // with rounds: the servers' m, to and from checkpoints

 private:
  Buffer replicated(Buffer vector) const { return {vector.data, cuts_.back(), vector.dtype}; }
  // This rank's part of a vector: in place if it is one range, otherwise in `memory`.
  Buffer part(Buffer vector, std::vector<std::byte>& memory) const;
  Buffer packed(Buffer vector, std::vector<std::byte>& memory) const;  // and copies it there
  void unpack(const std::vector<std::byte>& memory, Buffer vector);    // the parts of all ranks of the machine
  // The first rank of a machine pushes the running statistics for the machine.
  Buffer buffers() { return machine_.leads() ? buffers_.of(flat_->buffers) : Buffer{}; }
  Buffer present_buffers() { return machine_.leads() ? buffers_.download(flat_->buffers) : Buffer{}; }
  Buffer values() { return part(values_.of(flat_->values), pulled_); }
  void take();
  void push_early(Range range);

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
