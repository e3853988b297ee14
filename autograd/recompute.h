// Which operations the memory plan may run a second time instead of keeping their result. They are known by the type of
// their nodes, so no operation knows of it, and one of a user's own that has the same name is not taken for one of
// these.
#pragma once
#include <span>
#include <vector>

#include "autograd/node.h"

namespace tandem {

struct Recomputation {
  std::vector<int> inputs, saved;  // what it needs of the operation's inputs and of what its node saved
  // The operation's result again, bit for bit, from these (inputs first; an optional input that was not given is
  // undefined).
  Tensor (*compute)(const Attributes& attributes, std::span<const Tensor> sources);
};

const Recomputation* recomputation_of(const Node& node);  // null: none

}  // namespace tandem
