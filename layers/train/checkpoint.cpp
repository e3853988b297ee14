#include "layers/train/checkpoint.h"

#include <fstream>
#include <map>

#include "core/backend.h"
#include "core/checksum.h"
#include "core/files/safetensors.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr const char* format_version = "1";
constexpr const char* setting = "setting ";
const std::string of_strategy = "strategy/";

// A tensor of the file, and this rank's part of it.
struct Entry {
  Tensor tensor;
  Slice slice;
  Shape whole;
};
using Named = std::map<std::string, Entry>;

void add_segments(Named& all, const std::string& prefix, const FlatParameters& flat, const Tensor& vector) {
  for (const ParameterRange& s : flat.parameter_ranges())
    all[prefix + s.name] = {vector.range(s.local_begin, s.shape), s.slice, s.whole};
}

void add_vectors(Named& all, const std::string& prefix, const FlatParameters& flat, const Tensor& values,
                 const Tensor& buffers) {
  add_segments(all, prefix, flat, values);
  for (const auto& s : flat.buffer_ranges())
    all[prefix + s.name] = {buffers.range(s.begin, {s.length}), {}, {s.length}};
}

void read(const SafetensorsFile& file, const std::string& name, Entry& into) {
  file.read_part(name, into.slice.offset(into.whole), into.tensor);
}

// The numbers of a position, and of f16's loss scale, with their names in a file: f(name, number) for each.
void each_number(auto& position, const auto& f) {
  f("epoch", position.epoch);
  f("batch", position.batch);
  f("batches", position.batches);
  f("step", position.step);
  f("loss", position.running_sums.loss);
  f("correct", position.running_sums.correct);
  f("samples", position.running_sums.samples);
  f("best epoch", position.best_epoch);
  f("best", position.best.first);
  f("best, second", position.best.second);
}
void each_number_of_scale(auto&& state, const auto& f) {
  f("loss scale", state.loss_scale);
  f("steps at this scale", state.unscaled_steps);
  f("skipped steps", state.skipped);
}

StrategyState state_of(Strategy* strategy, StrategyState state = {}) {
  if (strategy) strategy->saved(state);
  return state;
}

Named tensors_of(const Training& t) {
  Named all;
  add_vectors(all, "", t.flat, t.flat.values, t.flat.buffers);
  for (const auto& [name, vector] : t.optimizer.vectors()) add_segments(all, "optimizer/" + name + "/", t.flat, vector);
  for (const auto& [name, vector] : state_of(t.strategy).vectors)
    add_segments(all, of_strategy + name + "/", t.flat, vector);
  if (t.ema) add_vectors(all, "average/", t.flat, t.ema->values, t.ema->buffers);
  return all;
}

std::string checksum(const std::map<std::string, std::string>& metadata, const auto& names, const auto& bytes_of) {
  Checksum sum;
  for (const auto& [key, value] : metadata)
    if (key != "checksum") {
      sum.add(key);
      sum.add(value);
    }
  for (const auto& [name, ignored] : names) {
    sum.add(name);
    const std::vector<std::byte> bytes = bytes_of(name);
    sum.add(bytes.data(), bytes.size());
  }
  return hex(sum.value());
}

// Opens a file and verifies all its bytes.
class Opened : public SafetensorsFile {
 public:
  explicit Opened(const std::string& path) : SafetensorsFile(path) {
    const auto& m = metadata();
    if (!m.count("format") || m.at("format") != checkpoint_format)
      refuse(path, ": is a safetensors file, but not a checkpoint of a training run (weights of PyTorch are read by ",
             "--import-torch)");
    if (text("version") != format_version)
      refuse(path, ": is a checkpoint of version ", text("version"), ", this program reads version ", format_version);
    const std::string now = checksum(m, tensors(), [&](const std::string& n) { return bytes(n); });
    if (text("checksum") != now)
      refuse(path, ": is damaged (its checksum is ", text("checksum"), ", its contents give ", now,
             "): use an earlier checkpoint");
  }
  const std::string& text(const std::string& key) const {
    auto found = metadata().find(key);
    if (found == metadata().end()) refuse(path().string(), ": lacks '", key, "' in its metadata");
    return found->second;
  }
  template <class T>
  void read(const std::string& key, T& into) const {
    const std::string& t = text(key);
    const auto v = parsed<T>(t);
    constexpr bool real = std::is_floating_point_v<T>;
    if (!v || (!real && *v < 0))
      refuse(path().string(), ": '", key, "' is '", t, "', expected a ", real ? "number" : "whole number");
    into = *v;
  }
  RunPosition position() const {
    RunPosition at;
    each_number(at, [&](const char* key, auto& number) { read(key, number); });
    if (metadata().count("run")) at.run = text("run");
    at.ended = metadata().count("ended") != 0;
    return at;
  }
  // The state when the file was written. Without f16 no step is skipped, and older files do not have the scale.
  StepState state(StepState s) const {
    if (metadata().count("loss scale"))
      each_number_of_scale(s, [&](const char* key, auto& number) { read(key, number); });
    read("step", s.step);
    s.step -= s.skipped;
    return s;
  }
  // The texts whose names have this beginning, by the rest of their names.
  std::map<std::string, std::string> texts(const std::string& beginning) const {
    std::map<std::string, std::string> all;
    for (const auto& [key, value] : metadata())
      if (key.starts_with(beginning)) all[key.substr(beginning.size())] = value;
    return all;
  }
  // Throws UsageError if a tensor is missing or has another shape. It is called before any tensor is read.
  void check(const Named& wanted) const {
    const std::string file = path().string();
    const auto model = metadata().find(std::string(setting) + "--model");
    const std::string whose = model == metadata().end() ? "" : " (it was saved with --model " + model->second + ")";
    for (const auto& [name, part] : wanted) {
      if (!has(name)) refuse(file, ": is of another model: it has no ", name, whose);
      if (at(name).shape != part.whole)
        refuse(file, ": is of another model: ", name, " is ", at(name).shape, " there and ", part.whole, " here",
               whose);
    }
    for (const auto& [name, entry] : tensors())
      if (name.find('/') == std::string::npos && !wanted.count(name))
        refuse(file, ": is of another model: this one has no ", name, whose);
  }
};

}  // namespace

static std::map<std::string, std::string> metadata_of(const Training& training, const RunPosition& at,
                                                      const Settings& settings) {
  std::map<std::string, std::string> m{{"format", checkpoint_format},
                                       {"version", format_version},
                                       {"layout", hex(training.flat.layout_hash(OwnerClass::replicated))},
                                       {"optimizer", training.optimizer.name()}};
  auto put = [&](const char* key, const auto& number) {
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(number)>>)
      m[key] = digits(number, 17);
    else
      m[key] = std::to_string(number);
  };
  each_number(at, put);
  if (training.optimizer.loss_scaling) each_number_of_scale(training.optimizer.read_state(), put);
  for (const auto& [name, text] : state_of(training.strategy).texts) m[of_strategy + name] = text;
  if (!at.run.empty()) m["run"] = at.run;
  if (at.ended) m["ended"] = "no better validation";
  for (const auto& [name, value] : settings) m[setting + name] = value;
  return m;
}

void save_checkpoint(const std::string& file, const Training& training, const RunPosition& at,
                     const Settings& settings) {
  Named tensors = tensors_of(training);
  for (auto& [name, part] : tensors)
    part.tensor = gather_slices(part.tensor, part.slice, part.whole, training.strategy, !file.empty());
  if (file.empty()) return;
  std::map<std::string, std::string> m = metadata_of(training, at, settings);
  SafetensorsWriter writer;
  for (const auto& [name, part] : tensors) writer.add(name, part.tensor);
  m["checksum"] = checksum(m, tensors, [&](const std::string& name) {
    const Tensor& t = tensors.at(name).tensor;
    std::vector<std::byte> bytes(t.bytes());
    if (!bytes.empty()) t.backend().download(bytes.data(), t.raw(), bytes.size());
    return bytes;
  });
  for (const auto& [key, value] : m) writer.metadata(key, value);
  writer.write(file);
}

static std::vector<std::string> differences_from(const Opened& opened, const Settings& settings) {
  std::map<std::string, std::string> then = opened.texts(setting), now(settings.begin(), settings.end());
  if (then.contains("partition")) now.try_emplace("partition", "shared");
  auto shown = [](const std::string& value) { return value.empty() ? "not given" : value; };
  std::vector<std::string> differences;
  for (const auto& [name, value] : now)
    if (!then.count(name))
      differences.push_back(name + " is " + shown(value) + " and was not recorded");
    else if (then[name] != value)
      differences.push_back(name + " was " + shown(then[name]) + " and is " + shown(value));
  return differences;
}

RunPosition load_checkpoint(const std::string& file, const Training& training, const Settings& settings,
                            std::vector<std::string>* differences) {
  const Opened opened(file);
  Training held = training;
  const bool average = opened.has("average/" + training.flat.parameter_ranges().front().name);
  if (!average) held.ema = nullptr;
  Named model;
  add_vectors(model, "", training.flat, training.flat.values, training.flat.buffers);
  opened.check(model);
  if (opened.text("optimizer") != training.optimizer.name())
    refuse(file, ": was saved with --optimizer ", opened.text("optimizer"), ", this run uses ",
           training.optimizer.name());
  Named wanted = tensors_of(held);
  std::erase_if(wanted, [&](auto& one) { return one.first.starts_with(of_strategy) && !opened.has(one.first); });
  for (const auto& [name, entry] : opened.tensors())
    if (name.starts_with("optimizer/") && !wanted.count(name))
      refuse(file, ": holds ", name,
             ", of which this run's optimizer has no use: give the same --optimizer and --momentum");
  for (const auto& [name, part] : wanted)
    if (!opened.has(name))
      refuse(file, ": holds no ", name, ", which this run's optimizer needs: give the same --optimizer and --momentum");
  opened.check(wanted);
  if (opened.text("layout") != hex(training.flat.layout_hash(OwnerClass::replicated)))
    refuse(file, ": is of another model: the same tensors in another order");

  const RunPosition at = opened.position();
  const StepState state = opened.state(training.optimizer.read_state());
  for (auto& [name, part] : wanted) read(opened, name, part);
  training.flat.count_writes(training.flat.all());
  training.optimizer.resume_at(state);
  state_of(training.strategy, {.texts = opened.texts(of_strategy), .vectors = {}});
  if (training.ema && !average) {
    training.ema->values.copy_from(training.flat.values);
    training.ema->buffers.copy_from(training.flat.buffers);
  }

  if (differences) *differences = differences_from(opened, settings);
  return at;
}

std::vector<std::string> differences_from(const std::string& file, const Settings& settings) {
  return differences_from(Opened(file), settings);
}

RunPosition position_in(const std::string& file) { return Opened(file).position(); }

void load_weights(const std::string& file, FlatParameters& flat) {
  const Opened opened(file);
  Named model;
  add_vectors(model, "", flat, flat.values, flat.buffers);
  opened.check(model);
  for (auto& [name, part] : model) read(opened, opened.has("average/" + name) ? "average/" + name : name, part);
  flat.count_writes(flat.all());
}

std::string run_of(const Settings& settings) {
  Checksum sum;
  for (const auto& [name, value] : settings) {
    sum.add(name);
    sum.add(value);
  }
  return hex(sum.value());
}

Settings surroundings(const Backend& backend) {
  static const std::string program = [] {
    std::ifstream in("/proc/self/exe", std::ios::binary);
    Checksum sum;
    for (std::string part(1 << 16, '\0'); in.read(part.data(), std::streamsize(part.size())) || in.gcount() > 0;)
      sum.add(part.data(), std::size_t(in.gcount()));
    return hex(sum.value());
  }();
  return {{"program", program},
          {"device", backend.description()},
          {"threads", std::to_string(backend.threads())},
          {"--deterministic", backend.deterministic() ? "yes" : "no"}};
}

}  // namespace tandem
