#include "autograd/tape.h"

#include <algorithm>
#include <map>
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
  std::sort(entries.begin(), entries.end(),
            [](const TapeEntry& a, const TapeEntry& b) { return a.node->sequence < b.node->sequence; });
  for (TapeEntry& e : entries)
    for (std::size_t i = 0; i < e.node->saved.size(); i++)
      if (const Tensor& t = e.node->saved[i].tensor; t.defined() && counted.insert(t.storage().pointer()).second)
        e.saved_bytes += t.bytes();
  return entries;
}

namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string text_of(const Shape& shape, DType dtype) {
  std::ostringstream out;
  if (shape.rank() > 0)
    out << shape;
  else
    out << "scalar";
  if (dtype != DType::f32) out << " " << name_of(dtype);
  return out.str();
}

// Modules nest as their paths do: layer1.0.conv1 lies in layer1.0, which lies in layer1.
struct Cluster {
  std::map<std::string, Cluster> inner;
  std::vector<std::string> lines;
};

void write(std::string& out, const Cluster& c, const std::string& path, int depth, int& number) {
  const std::string indent(2 * std::size_t(depth) + 2, ' ');
  for (const std::string& line : c.lines) out += indent + line + "\n";
  for (const auto& [name, inner] : c.inner) {
    std::string full = path.empty() ? name : path + "." + name;
    out += indent + "subgraph cluster_" + std::to_string(number++) + " {\n" + indent + "  label=\"" + escaped(full) +
           "\"; style=\"rounded,filled\"; color=\"#c3ccd6\"; fillcolor=\"" + (depth % 2 ? "#eef2f6" : "#f8fafc") +
           "\"; fontcolor=\"#52606d\"; fontsize=11; labeljust=l; labelloc=t;\n";
    write(out, inner, full, depth + 1, number);
    out += indent + "}\n";
  }
}

}  // namespace

std::string dot_of(const Variable& root) {
  std::vector<TapeEntry> tape = tape_of(root);
  Cluster top;
  auto cluster = [&](const std::string& path) -> Cluster& {
    Cluster* c = &top;
    for (std::size_t begin = 0; begin < path.size();) {
      std::size_t end = std::min(path.find('.', begin), path.size());
      c = &c->inner[path.substr(begin, end - begin)];
      begin = end + 1;
    }
    return *c;
  };
  std::map<const Node*, std::string> names;
  for (const TapeEntry& e : tape) names.emplace(e.node, std::string("n").append(std::to_string(names.size())));
  auto id = [&](const Node* n) { return names.at(n); };
  std::map<const Node*, std::string> home;  // of a leaf: the module that uses it first
  std::string edges;
  std::size_t saved = 0, operations = 0;
  for (const TapeEntry& e : tape) {
    Node* n = e.node;
    if (n->leaf()) continue;
    operations++;
    saved += e.saved_bytes;
    std::string label = std::string(n->op) + "\\n" + text_of(n->shape, n->dtype);
    if (e.saved_bytes) label += "\\nsaves " + readable_bytes(double(e.saved_bytes));
    cluster(*n->scope).lines.push_back(id(n) + " [label=\"" + label + "\"];");
    for (std::size_t i = 0; i < n->inputs.size(); i++) {
      Node* input = n->inputs[i].pointer();
      if (input) {
        if (input->leaf()) home.emplace(input, *n->scope);
        edges += "  " + id(input) + " -> " + id(n) + (input->leaf() ? " [color=\"#9aa5b1\"]" : "") + ";\n";
      } else if (i == 0) {  // the pictures, mostly: a constant is not on the tape
        std::string constant = id(n) + "_constant";
        cluster(*n->scope).lines.push_back(constant + " [label=\"constant\", shape=plaintext, style=\"\"];");
        edges += "  " + constant + " -> " + id(n) + " [style=dashed, color=\"#9aa5b1\"];\n";
      }
    }
  }
  for (const TapeEntry& e : tape)
    if (Leaf* leaf = e.node->leaf())
      cluster(home[e.node])
          .lines.push_back(id(e.node) + " [label=\"" + escaped(leaf->name.empty() ? "leaf" : leaf->name) + "\\n" +
                           text_of(leaf->value.shape(), leaf->value.dtype()) +
                           "\", shape=ellipse, fillcolor=\"#fdf0d5\", color=\"#d9a441\"];");
  std::string out = "digraph tape {\n  graph [fontname=\"Helvetica\", label=\"" + std::to_string(operations) +
                    " operations keep " + readable_bytes(double(saved)) +
                    " for backward\", labelloc=b, nodesep=0.25, ranksep=0.35];\n"
                    "  node [shape=box, style=\"rounded,filled\", fillcolor=\"#dbeafe\", color=\"#5b8def\", "
                    "fontname=\"Helvetica\", fontsize=11, margin=\"0.12,0.06\"];\n"
                    "  edge [color=\"#52606d\", arrowsize=0.7];\n";
  int number = 0;
  write(out, top, "", 0, number);
  return out + edges + "}\n";
}

void write_dot(const Variable& root, const std::string& path) { write_file(path, dot_of(root)); }

}  // namespace tandem
