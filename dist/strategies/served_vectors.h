// The flat parameters as a server node exchanges them. A rank pushes its whole gradient, or, as one of a machine's
// ranks, its part of the machine's gradient (machine_share.h). It receives the new values of the same range. Vectors of
// a device pass through host memory. Threads: the training thread. Throws the errors of ServerNode.
#pragma once
#include <vector>

#include "dist/server/server.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/on_host.h"

namespace tandem {

class ServedVectors {
 public:
  // Both must outlive this object.
  ServedVectors(ServerNode& node, MachineShare& machine) : node_(node), machine_(machine) {}
  // Memory that other ranks of the host read, so that gradients are pushed or summed over the machine without a copy.
  FlatMemory memory();
  void bind(FlatParameters& flat);
  // Copies rank 0's values to all workers, for a loop that computes a gradient before its first pull.
  void broadcast_first();

  // Calls the node's begin() with the current values. scales: learning-rate factors, by range. velocity: to resume
  // training; undefined: zeros.
  void begin(ServerOptions options, WorkLeases leases, const std::vector<float>& scales, Tensor velocity);
  // Sums the machine's gradients: MachineShare::combine().
  bool combine(MachineShare::Step& step, Optimizer& optimizer) {
    return machine_.combine(step, gradients_, *flat_, optimizer);
  }
  void push(std::int64_t samples, const MetricSums& sums);
  void pull();
  void finish(bool takes);     // calls the node's finish(); takes: copies the last values too
  void velocity(Tensor into);  // writes the servers' velocity, if the rule has one; undefined: does nothing

 private:
  Buffer values() { return machine_.room(values_.of(flat_->values), pulled_); }  // memory for them
  // The first rank of a machine pushes the running statistics for the machine.
  Buffer buffers() { return machine_.leads() ? buffers_.of(flat_->buffers) : Buffer{}; }
  Buffer present_buffers() { return machine_.leads() ? buffers_.download(flat_->buffers) : Buffer{}; }
  void take();

  ServerNode& node_;
  MachineShare& machine_;
  FlatParameters* flat_ = nullptr;
  OnHost values_, gradients_, buffers_;
  std::vector<std::byte> pushed_, pulled_;  // for a machine's rank: its part of the gradients, and of the values
};

}  // namespace tandem
