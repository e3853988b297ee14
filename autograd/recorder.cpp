#include "autograd/recorder.h"

#include <cstring>

namespace tandem {

double Operation::attribute(const char* name, std::size_t i) const {
  for (const auto& [key, values] : attributes)
    if (std::strcmp(key, name) == 0 && i < values.size()) return values[i];
  fail(where(), " has no attribute ", name);
}

void add_to_recorder(const Node& described, Operands inputs, const Tensor& y) {
  Operation o{
      .op = described.op, .module = *mode().scope, .attributes = described.attributes(), .inputs = {}, .output = y};
  for (const Variable* v : inputs) o.inputs.push_back(v->defined() ? v->value() : Tensor());
  while (!o.inputs.empty() && !o.inputs.back().defined()) o.inputs.pop_back();
  mode().recorder->operations.push_back(std::move(o));
}

}  // namespace tandem
