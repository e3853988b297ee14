// The gradient on its way to the parameter server. A range that is final is weighed, gets its weight decay and is sent
// while backward goes on; the servers keep it until push() says that the whole is finite. All of it goes after backward
// where
//   - a range alone does not say what is sent of it: gradients are clipped by the norm of the whole;
//   - every server reads it where it lies;
//   - backward only queues its work, on a device, or is that of a loop of one's own, which may run it twice.
#pragma once
#include <optional>

#include "dist/server/server.h"
#include "dist/strategies/final_ranges.h"
#include "layers/optim/optimizer.h"

namespace tandem {

class EarlyPush {
 public:
  // gradients: of the flat parameters, as the server node takes them.
  EarlyPush(FlatParameters& flat, Optimizer& optimizer, ServerNode& node, bool allowed);

  void step_begins(bool sends);                 // false: nothing goes before finish()
  void ready(const ParameterRange& parameter);  // its gradient is final
  // After backward: all gradients become what is pushed. False: they, or the loss, are not finite.
  bool finish(const Tensor& loss);

 private:
  void part_is_final(Range part);

  FlatParameters& flat_;
  Optimizer& optimizer_;
  ServerNode& node_;
  std::optional<FinalRanges> final_;
  bool sends_ = false, measured_ = false;  // measured_: some of the step's gradient is
};

}  // namespace tandem
