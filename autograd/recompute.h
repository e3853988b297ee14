// The operations that the memory plan may run a second time instead of keeping their result. They are identified by the
// type of their nodes, so operations contain no code for this, and a user's operation with the same name is not
// mistaken for one of them.
#pragma once
#include <span>
#include <vector>

#include "autograd/node.h"

namespace tandem {

struct Recomputation {
  std::vector<int> inputs, saved;  // the operation's inputs and the node's saved tensors that compute needs
  // Returns the operation's result again, bit for bit, from these tensors (inputs first; an optional input that was not
  // given is undefined).
  Tensor (*compute)(const Attributes& attributes, std::span<const Tensor> sources);
};

const Recomputation* recomputation_of(const Node& node);  // null: the operation cannot be run again

}  // namespace tandem
