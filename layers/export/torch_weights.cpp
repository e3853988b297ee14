#include "layers/export/torch_weights.h"

#include <algorithm>

#include "core/backend.h"
#include "core/files/safetensors.h"
#include "layers/export/summary.h"
#include "layers/optim/flat_parameters.h"
#include "layers/train/checkpoint.h"

namespace tandem {
namespace {

Shape channels_first(const Shape& s) { return {s[0], s[3], s[1], s[2]}; }

// The tensors whose axes have another order in the file. The key is the address of the first element, the value the
// shape in this model, viewed as [O, H, W, C].
std::map<const void*, Shape> permuted(Module& model, Backend& backend, const Shape& picture) {
  std::map<const void*, Shape> found;
  std::map<const void*, Shape> flattened;  // values that are flattened pictures: their shape [N, H, W, C]
  for (const Operation& o : operations_of(model, backend, picture)) {
    const Tensor& x = o.inputs.at(0);
    const auto was = flattened.find(x.raw());
    const bool rows = x.rank() == 2 && was != flattened.end();
    if (o.op == "conv2d") {
      found[o.inputs.at(1).raw()] = o.inputs[1].shape();
    } else if (o.op == "reshape" && x.rank() == 4 && o.output.rank() == 2 && o.output.size(0) == x.size(0)) {
      flattened[o.output.raw()] = x.shape();
    } else if (o.op == "linear" && rows) {
      const Shape& s = was->second;
      found[o.inputs.at(1).raw()] = {o.inputs[1].size(0), s[1], s[2], s[3]};
    } else if (rows && o.output.shape() == x.shape()) {  // element by element: dropout, an activation
      flattened[o.output.raw()] = was->second;
    }
  }
  return found;
}

// A tensor of the state_dict.
struct Entry {
  Tensor tensor;   // this rank's slice of a parameter that is cut over ranks
  Shape pictures;  // its shape in permuted(); of rank 0 if the axes have the same order
  Slice slice;
  Shape in_file, whole;  // shapes in the file: of the slice, of the whole parameter
};
std::map<std::string, Entry> state(Module& model, Backend& backend, const Shape& picture) {
  const auto pictures = permuted(model, backend, picture);
  std::map<std::string, Entry> all;
  for (auto& [name, p] : model.parameters()) {
    const Tensor value = p->variable.value();
    const auto found = pictures.find(value.raw());
    const Shape seen = found == pictures.end() ? Shape{} : found->second;
    const Shape in_file = value.rank() == 4 && seen.rank() ? channels_first(seen) : value.shape();
    Entry& e = all[name] = {value, seen, p->slice, in_file, in_file};
    if (p->slice.count > 1) e.whole[0] = p->shape[0];
  }
  for (auto& [name, s] : model.buffers()) all[name] = {s->tensor, {}, {}, s->shape, s->shape};
  return all;
}

constexpr const char* counter = "num_batches_tracked";

// The prefix that wrappers of the model have added to all names: "module." (DistributedDataParallel), "_orig_mod."
// (torch.compile), "model.net." (attributes that held the model), or several of them. It is empty or ends with a dot.
// Among the common prefixes of all names in the file, this one leads to the largest number of the model's names.
std::string wrapper_of(const SafetensorsFile& file, const std::map<std::string, Entry>& own) {
  if (file.tensors().empty()) return "";
  std::string shared = file.tensors().begin()->first;
  for (const auto& [name, entry] : file.tensors())
    while (!name.starts_with(shared)) shared.pop_back();
  std::string best;
  std::int64_t most = 0;
  for (std::size_t end = 0; end != std::string::npos; end = shared.find('.', end + 1)) {
    const std::string prefix = shared.substr(0, end == 0 ? 0 : end + 1);
    const auto found = std::count_if(own.begin(), own.end(), [&](const auto& e) { return file.has(prefix + e.first); });
    if (found > most) {
      most = found;
      best = prefix;
    }
  }
  return best;
}

std::string text(const Shape& s) { return (std::ostringstream() << s).str(); }

}  // namespace

void import_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path) {
  const SafetensorsFile file(path);
  if (const auto& m = file.metadata(); m.count("format") && m.at("format") == checkpoint_format)
    refuse(path, ": is a checkpoint of a training run, not weights from PyTorch: --resume goes on with it");
  auto all = state(model, backend, picture);
  const std::string prefix = wrapper_of(file, all);
  std::string lacking, other, unknown;
  auto list = [](std::string& to, const char* title, const std::string& what) {
    to += (to.empty() ? title : ", ") + what;
  };
  for (const auto& [name, entry] : all) {
    const Shape& expected = entry.whole;
    if (!file.has(prefix + name))
      list(lacking, "; only in the model: ", name + " " + text(expected));
    else if (const Shape& found = file.at(prefix + name).shape; found != expected)
      list(other, "; of another shape: ", name + " is " + text(found) + ", expected " + text(expected));
  }
  for (const auto& [name, entry] : file.tensors())
    if (!all.contains(name.substr(prefix.size())) && !name.ends_with(counter))
      list(unknown, "; only in the file: ", name + " " + text(entry.shape));
  if (const std::string problems = other + lacking + unknown; !problems.empty())
    refuse(path, ": does not fit this model", problems,
           "; is it another model, made for another number of classes, or do its names differ?");

  NoGrad off;
  for (auto& [name, entry] : all) {
    auto& [tensor, pictures, slice, in_file, whole] = entry;
    Tensor t(backend, in_file, tensor.dtype());
    file.read_part(prefix + name, slice.offset(whole), t);
    if (pictures.rank())
      t = transpose(Variable(t.reshape(channels_first(pictures))), {0, 2, 3, 1}).value().reshape(tensor.shape());
    tensor.copy_from(t);
  }
}

void export_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path,
                  const std::map<std::string, std::string>& about, Strategy* strategy) {
  NoGrad off;
  SafetensorsWriter writer;
  const std::int64_t zero = 0;
  for (auto& [name, entry] : state(model, backend, picture)) {
    auto& [tensor, pictures, slice, in_file, whole] = entry;
    Tensor t = tensor;
    if (pictures.rank()) t = transpose(Variable(t.reshape(pictures)), {0, 3, 1, 2}).value().reshape(in_file);
    t = gather_slices(t, slice, whole, strategy, !path.empty());
    if (path.empty()) continue;
    writer.add(name, t);
    constexpr std::string_view mean = "running_mean";  // PyTorch stores a counter beside each
    if (name.ends_with(mean))
      writer.add(name.substr(0, name.size() - mean.size()) + counter, "I64", {}, std::as_bytes(std::span(&zero, 1)));
  }
  if (path.empty()) return;
  for (const auto& [key, value] : about) writer.metadata(key, value);
  writer.metadata("format", "pt");
  writer.metadata("producer", "tandem");  // marks a file that a later export may replace
  writer.write(path);
}

}  // namespace tandem
