// Asynchronous data parallelism with the parameter server (server.h), as described in the patent CN109902818A and NFDT.
// Every rank pushes the gradients of its batches and continues with the weights that it receives. The update rule
// determines how a late gradient is applied (rules.h). Batches are leased one by one, so a faster worker trains more of
// them. With bsp the ranks wait for each other and compute the same as with all_reduce.h.
//
// The servers compute learning rate, momentum and schedule, as functions of the pushes that they have applied. The
// worker does clipping and weight decay. A push is the gradient of a whole --batch and one step, at the learning rate
// that was chosen for that batch. With bsp it is the gradient of a worker's share of the batch, as with all_reduce.h.
//
// With `round` it is an asynchronous outer optimizer (Liu et al. 2024, arXiv 2401.09135). From the weights θ that the
// servers sent, a worker makes H local steps with any optimizer, whose state stays on the worker. It pushes
//
//   Δ = θ − x
//
// as a gradient for the servers' update rule (delayed-nesterov; γ is its learning rate, β its momentum), and continues
// from the weights in the answer. No worker waits, or under quorum:K it waits only for K workers and the grace time. A
// slower worker makes fewer steps per round: H_w = ⌊v_w/v_max·H⌋ (coordinator.h).
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "dist/server/asynchrony.h"
#include "dist/server/channel.h"
#include "dist/strategies/local_steps.h"
#include "dist/strategies/machine_share.h"
#include "layers/train/strategy.h"

namespace tandem {

class SlicedClassifier;

struct ParameterServerOptions : ServerOptions {  // momentum, learning_rate, memory and data_of are set by the strategy
  std::optional<RoundSteps> round = {};          // H, β and γ; without fragments
  double deadline = 300, patience = 30;          // server.h
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // of a machine: divided over its ranks (hybrid.h)
  std::function<void(const std::string&)> notify = {};     // server.h
};

// machine: with a machine as one worker (machine_share.h); then the channel connects the ranks with this one's place on
// their machines, and option `servers` is refused. Throws UsageError from begin() for an optimizer that no server
// implements, and CommunicationError after rank 0 is lost.
std::unique_ptr<Strategy> parameter_server(std::unique_ptr<Channel> channel, const ParameterServerOptions& options = {},
                                           std::unique_ptr<MachineShare> machine = {});

}  // namespace tandem
