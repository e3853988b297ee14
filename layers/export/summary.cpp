#include "layers/export/summary.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <typeinfo>
#include <unordered_map>

#include "autograd/tape.h"
#include "core/backend.h"
#include "core/text.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {
namespace {

// "tandem::(anonymous namespace)::BasicBlock" → "BasicBlock".
std::string type_of(const Module& m) {
  int status = 0;
  char* text = abi::__cxa_demangle(typeid(m).name(), nullptr, nullptr, &status);
  std::string name = status == 0 && text ? text : typeid(m).name();
  std::free(text);
  std::size_t colon = name.rfind("::");
  return colon == name.npos ? name : name.substr(colon + 2);
}

// Prepares a model for a forward pass in training mode. The destructor restores hooks, mode, buffers and memory.
class Visit {
 public:
  Visit(Module& model, const Module::ForwardHook& hook) : model_(model), trains_(model, true) {
    model.name_tree(model.path());
    for (auto& [name, p] : model.parameters()) borrowed_ = borrowed_ || !p->variable.defined();
    for (auto& [name, s] : model.buffers()) {
      buffers_.emplace_back(s, s->tensor);
      if (!borrowed_) s->tensor = s->tensor.clone();
    }
    if (borrowed_) {
      backend_ = cpu_backend();
      flat_ = std::make_unique<FlatParameters>(model, *backend_, 0);
    }
    model.each([&](Module& m) { before_.emplace_back(&m, m.on_forward(hook)); });
  }
  ~Visit() {
    for (auto& [module, hook] : before_) module->on_forward(std::move(hook));
    for (auto& [buffer, before] : buffers_) buffer->tensor = before;
    if (borrowed_)
      for (auto& [name, p] : model_.parameters()) p->variable = Variable();
  }

 private:
  Module& model_;
  const InMode trains_;
  bool borrowed_ = false;
  const Restored<DropoutCalls> draws_{mode().draws, mode().draws};
  std::unique_ptr<Backend> backend_;  // outlives the flat parameters
  std::unique_ptr<FlatParameters> flat_;
  std::vector<std::pair<ModuleBuffer*, Tensor>> buffers_;
  std::vector<std::pair<Module*, Module::ForwardHook>> before_;
};

std::size_t bytes_of(const Node& n) { return std::size_t(n.shape.numel()) * size_of(n.dtype); }

// Simulates the engine: the newest node first. A node frees its saved tensors and its gradient; its inputs get
// gradients.
std::size_t peak_of(const std::vector<TapeEntry>& tape) {
  std::size_t now = 0, peak = 0;
  for (const TapeEntry& e : tape) now += e.saved_bytes;
  std::unordered_map<const Node*, std::size_t> gradients;
  if (!tape.empty()) now += gradients[tape.back().node] = bytes_of(*tape.back().node);
  for (auto e = tape.rbegin(); e != tape.rend(); ++e) {
    if (e->node->leaf()) continue;  // the gradients of parameters are allocated already
    for (std::size_t i = 0; i < e->node->inputs.size(); i++)
      if (Node* input = e->node->inputs[i].pointer(); input && !input->leaf())
        if (auto [it, fresh] = gradients.emplace(input, bytes_of(*input)); fresh) now += it->second;
    peak = std::max(peak, now);
    now -= e->saved_bytes + gradients[e->node];
  }
  return peak;
}

std::string count(double v) { return short_number(v, 5); }

// The number of columns on a terminal: bytes that begin a character.
std::size_t columns_of(const std::string& s) {
  return std::size_t(std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string aligned(const std::vector<std::vector<std::string>>& rows, std::size_t left) {
  std::vector<std::size_t> width(rows.empty() ? 0 : rows[0].size());
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], columns_of(row[i]));
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); i++) {
      const std::string gap(width[i] - columns_of(row[i]), ' ');
      line += (i ? "  " : "") + (i < left ? row[i] + gap : gap + row[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

ModelSummary summary(Module& model, const Shape& input, DType dtype) {
  ModelSummary out;
  out.input = input;
  out.dtype = dtype;
  std::map<std::string, std::size_t> row;  // by path
  Visit visit(model, [&](Module& m, const Variable& y) { out.modules[row.at(m.path())].output = y.shape(); });
  model.each([&](Module& m) {
    if (row.emplace(m.path(), out.modules.size()).second)
      out.modules.push_back({.path = m.path(), .type = type_of(m), .output = {}});
  });
  auto parameters = model.parameters();
  require(!parameters.empty(), "summary: the model has no parameters");
  Backend& backend = parameters.front().second->variable.backend();
  Variable y = model(Variable(Tensor::zeros(backend, input, dtype)));

  for (auto& [name, p] : parameters) {
    std::size_t dot = name.rfind('.');
    out.modules[row.at(dot == name.npos ? "" : name.substr(0, dot))].parameters += p->shape.numel();
    out.parameters += p->shape.numel();
    out.parameter_bytes += p->variable.value().bytes();
  }
  out.state_bytes = out.parameter_bytes;
  for (auto& [name, s] : model.buffers()) out.buffer_bytes += s->tensor.bytes();

  const double pictures = input.rank() > 0 && input[0] > 0 ? double(input[0]) : 1;
  std::vector<TapeEntry> tape = tape_of(y);
  for (const TapeEntry& e : tape) {
    auto at = row.find(*e.node->scope);
    ModuleSummary& m = out.modules[at == row.end() ? 0 : at->second];
    double macs = e.node->flops() / 2 / pictures;
    m.macs += macs;
    out.macs += macs;
    m.saved_bytes += e.saved_bytes;
    out.saved_bytes += e.saved_bytes;
  }
  out.backward_peak_bytes = peak_of(tape);
  return out;
}

std::string ModelSummary::text() const {
  std::vector<std::vector<std::string>> table{{"module", "type", "output", "parameters", "MACs", "kept for backward"}};
  for (const ModuleSummary& m : modules) {
    const std::size_t dot = m.path.rfind('.'), dots = std::size_t(std::count(m.path.begin(), m.path.end(), '.'));
    table.push_back(
        {m.path.empty() ? "(model)" : std::string(2 * dots, ' ') + m.path.substr(dot == m.path.npos ? 0 : dot + 1),
         m.type, m.output.rank() > 0 ? (std::ostringstream() << m.output).str() : "did not run",
         m.parameters ? count(double(m.parameters)) : "", m.macs > 0 ? count(m.macs) : "",
         m.saved_bytes ? readable_bytes(double(m.saved_bytes)) : ""});
  }
  std::ostringstream sums;
  sums << count(double(parameters)) << " parameters, " << readable_bytes(double(parameter_bytes)) << "; " << count(macs)
       << " multiply-adds per picture and forward pass\n"
       << "a training step on " << input << " " << name_of(dtype) << " keeps " << readable_bytes(double(saved_bytes))
       << " for backward; with gradients at most " << readable_bytes(double(backward_peak_bytes))
       << ", with parameters and " << state << " " << readable_bytes(double(training_bytes())) << " (estimated)\n";
  return aligned(table, 3) + sums.str();
}

std::vector<Operation> operations_of(Module& model, Backend& backend, const Shape& picture, Tensor* input,
                                     Tensor* output) {
  require(picture.rank() == 3, "a picture has the axes [H,W,C], not ", picture);
  bool complete = true;
  for (auto& [name, p] : model.parameters()) complete = complete && p->variable.defined();
  if (!complete) FlatParameters gives_memory(model, backend, 1);
  const InMode evaluates(model, false);
  NoGrad off;
  Alone alone;
  Recorder recorder;
  Variable x(Tensor::zeros(backend, {2, picture[0], picture[1], picture[2]}));
  Variable y = model(x);
  if (input) *input = x.value();
  if (output) *output = y.value();
  return std::move(recorder.operations);
}

}  // namespace tandem
