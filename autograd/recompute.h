// Which operations the memory plan may run a second time instead of keeping their result: the cheap ones, whose time is that of
// reading memory. By the operation's name, so that no operation knows of it.
#pragma once
#include <span>
#include <vector>

#include "autograd/node.h"

namespace tandem {

struct Recomputation {
  std::vector<int> inputs, saved;  // what it needs of the operation's inputs and of what its node saved
  // The operation's result again, bit for bit, from these (inputs first; an optional input that was not given is undefined).
  Tensor (*compute)(const Attributes& attributes, std::span<const Tensor> sources);
  int doubles_per_channel = 0;  // that it borrows meanwhile
};

const Recomputation* recomputation_of(const Node& node);  // null: none

}  // namespace tandem
