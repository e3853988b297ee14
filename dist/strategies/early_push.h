// Pushes gradients to the parameter server while backward still runs. When a range is final, it is scaled, gets its
// weight decay and is sent. The servers stage it until push() confirms that the whole gradient is finite. Everything is
// sent after backward in these cases:
//   - a range alone does not determine what is sent: gradients are clipped by the norm of the whole;
//   - every server reads the gradient in place;
//   - backward only queues its work on a device, or runs in the user's own loop, which may run it twice.
#pragma once
#include <optional>

#include "dist/server/server.h"
#include "dist/strategies/final_ranges.h"
#include "layers/optim/optimizer.h"

namespace tandem {

class EarlyPush {
 public:
  // gradients: of the flat parameters, in the form that the server node takes.
  EarlyPush(FlatParameters& flat, Optimizer& optimizer, ServerNode& node, bool allowed);

  void step_begins(bool sends);                 // false: nothing is sent before finish()
  void ready(const ParameterRange& parameter);  // its gradient is final
  // After backward: all gradients are converted to the pushed form. False: they, or the loss, are not finite.
  bool finish(const Tensor& loss);

 private:
  void part_is_final(Range part);

  FlatParameters& flat_;
  Optimizer& optimizer_;
  ServerNode& node_;
  std::optional<FinalRanges> final_;
  bool sends_ = false, measured_ = false;  // measured_: a part of the step's gradient was measured
};

}  // namespace tandem
