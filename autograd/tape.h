// Inspecting a tape: a list of its nodes, and a picture of it.
#pragma once
#include <string>
#include <vector>

#include "autograd/variable.h"

namespace tandem {

// One node, and the bytes that it alone keeps alive for backward: each saved storage is counted once, at the first node
// in order of creation that saved it; memory of leaves (parameters) is not counted, since it exists anyway.
struct TapeEntry {
  Node* node;
  std::size_t saved_bytes;
};

// All nodes that root depends on and that a gradient flows to, leaves included, in order of creation. Call it before
// backward(), which releases the tape. The pointers are valid as long as root exists.
std::vector<TapeEntry> tape_of(const Variable& root);

// The tape in Graphviz's language: operations with shape and saved bytes, in boxes of their modules; leaves by name.
// Render it with `dot -Tsvg`.
std::string dot_of(const Variable& root);
void write_dot(const Variable& root, const std::string& path);  // throws UsageError when the file cannot be written

}  // namespace tandem
