#include "autograd/tape.h"

#include <algorithm>
#include <map>
#include <regex>
#include <unordered_set>

#include "core/files/files.h"
#include "core/text.h"

namespace tandem {

std::vector<TapeEntry> tape_of(const Variable& root) {
  std::vector<TapeEntry> entries;
  if (!root.requires_grad()) return entries;
  std::unordered_set<const Node*> seen{root.node().pointer()};
  std::vector<Node*> stack{root.node().pointer()};  // no recursion: chains may be long
  std::unordered_set<const Storage*> counted;
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    entries.push_back({node, 0});
    if (Leaf* leaf = node->leaf()) counted.insert(leaf->value.storage().pointer());
    for (std::size_t i = 0; i < node->inputs.size(); i++)
      if (Node* input = node->inputs[i].pointer(); input && seen.insert(input).second) stack.push_back(input);
  }
  std::ranges::sort(entries, {}, [](const TapeEntry& e) { return e.node->sequence; });
  for (TapeEntry& e : entries)
    for (std::size_t i = 0; i < e.node->saved.size(); i++)
      if (const Tensor& t = e.node->saved[i].tensor; t.defined() && counted.insert(t.storage().pointer()).second)
        e.saved_bytes += t.bytes();
  return entries;
}

namespace {

std::string escaped(const std::string& text) { return std::regex_replace(text, std::regex(R"(["\\])"), R"(\$&)"); }

std::string text_of(const Shape& shape, DType dtype) {
  std::ostringstream out;
  if (shape.rank() > 0)
    out << shape;
  else
    out << "scalar";
  if (dtype != DType::f32) out << " " << name_of(dtype);
  return out.str();
}

}  // namespace

std::string dot_of(const Variable& root) {
  const std::vector<TapeEntry> tape = tape_of(root);
  std::map<std::string, std::string> modules;    // by path: the operations and leaves
  std::map<const Node*, std::string> ids, home;  // home: the module that uses a leaf first
  for (const TapeEntry& e : tape) ids.emplace(e.node, std::string("n").append(std::to_string(ids.size())));
  std::string edges;
  std::size_t saved = 0, operations = 0;
  for (const TapeEntry& e : tape) {
    const Node& n = *e.node;
    if (e.node->leaf()) continue;
    operations++;
    saved += e.saved_bytes;
    const std::string id = ids.at(e.node);
    std::string& module = modules[*n.scope];
    module += "    " + id + " [label=\"" + n.op + "\\n" + text_of(n.shape, n.dtype) +
              (e.saved_bytes ? "\\nsaves " + readable_bytes(double(e.saved_bytes)) : "") + "\"];\n";
    for (std::size_t i = 0; i < n.inputs.size(); i++) {
      if (Node* input = n.inputs[i].pointer()) {
        if (input->leaf()) home.emplace(input, *n.scope);
        edges += "  " + ids.at(input) + " -> " + id + (input->leaf() ? " [color=\"#9aa5b1\"]" : "") + ";\n";
      } else if (i == 0) {  // usually the pictures: a constant is not on the tape
        module += "    " + id + "_constant [label=\"constant\", shape=plaintext, style=\"\"];\n";
        edges += "  " + id + "_constant -> " + id + " [style=dashed, color=\"#9aa5b1\"];\n";
      }
    }
  }
  for (const TapeEntry& e : tape)
    if (const Leaf* leaf = e.node->leaf())
      modules[home[leaf]] += "    " + ids.at(leaf) + " [label=\"" + escaped(leaf->name.empty() ? "leaf" : leaf->name) +
                             "\\n" + text_of(leaf->shape, leaf->dtype) +
                             "\", shape=ellipse, fillcolor=\"#fdf0d5\", color=\"#d9a441\"];\n";
  std::string out = "digraph tape {\n  graph [fontname=\"Helvetica\", label=\"" + std::to_string(operations) +
                    " operations keep " + readable_bytes(double(saved)) +
                    " for backward\", labelloc=b, nodesep=0.25, ranksep=0.35];\n"
                    "  node [shape=box, style=\"rounded,filled\", fillcolor=\"#dbeafe\", color=\"#5b8def\", "
                    "fontname=\"Helvetica\", fontsize=11, margin=\"0.12,0.06\"];\n"
                    "  edge [color=\"#52606d\", arrowsize=0.7];\n";
  int boxes = 0;
  for (const auto& [path, lines] : modules)
    out += "  subgraph cluster_" + std::to_string(boxes++) + " {\n    label=\"" + escaped(path) +
           "\"; style=\"rounded,filled\"; color=\"#c3ccd6\"; fillcolor=\"#f8fafc\"; fontcolor=\"#52606d\"; "
           "fontsize=11; labeljust=l; labelloc=t;\n" +
           lines + "  }\n";
  return out + edges + "}\n";
}

void write_dot(const Variable& root, const std::string& path) { write_file(path, dot_of(root)); }

}  // namespace tandem
