// Asynchronous data parallelism by the parameter server (server.h): what the patent CN109902818A and NFDT describe.
// Every rank pushes the gradients of its batches and goes on with the weights that come back; what is done with a
// gradient that comes late is the update rule's matter (rules.h). Batches are drawn as leases, so that who is faster
// trains more of them. With bsp the ranks wait for each other, and what they compute is what all_reduce.h computes.
//
// Learning rate, momentum and schedule are the servers', as functions of the pushes that they have applied; clipping
// and weight decay are done where the gradient is made. A push is the gradient of a whole --batch, and a step of its
// own, for which the learning rate was chosen; with bsp it is that of a worker's share of the batch, as under
// all_reduce.h.
//
// With `round` a worker makes steps of its own, and pushes what a round of them has changed: an asynchronous outer
// optimizer (worker_round.h).
#pragma once
#include <memory>
#include <optional>

#include "dist/collectives/communicator.h"
#include "dist/server/channel.h"
#include "dist/server/server.h"
#include "dist/server/straggler_emulation.h"
#include "dist/strategies/rounds.h"
#include "layers/train/strategy.h"

namespace tandem {

class MachineShare;
class SlicedClassifier;

struct ParameterServerOptions {
  Asynchrony how = {};
  std::optional<RoundSteps> round = {};  // H, β and γ; without fragments
  int servers = 0;                       // the last so many ranks only serve; 0: all ranks train, and serve
  DType wire = DType::f32;               // or bf16
  double deadline = 300, patience = 30;  // server.h
  double snapshots = 10;                 // seconds between two; 0: none
  StragglerEmulation stragglers = {};
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // of a machine: cut over its ranks (hybrid.h)
  ServerNode::Tells tells = {};                            // server.h
};

// Throws UsageError from begin() for an optimizer whose steps no server makes, and CommunicationError once rank 0 is
// lost.
std::unique_ptr<Strategy> parameter_server(std::unique_ptr<Channel> channel,
                                           const ParameterServerOptions& options = {});
// With a machine as one worker (machine_share.h); lane: between the ranks that have this one's place on their machines.
// Option `servers` is refused.
std::unique_ptr<Strategy> parameter_server_of_machines(std::unique_ptr<MachineShare> machine,
                                                       std::unique_ptr<Channel> lane,
                                                       const ParameterServerOptions& options = {});

}  // namespace tandem
