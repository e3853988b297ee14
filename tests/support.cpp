#include "tests/support.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/random.h"

namespace tandem::test {

namespace fs = std::filesystem;

fs::path source(const std::string& path) { return fs::path(__FILE__).parent_path().parent_path() / path; }

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  require(in.good(), file.string(), ": cannot be read (the tests run in the root of the source tree)");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// ---- PyTorch's dumps ------------------------------------------------------------------------------------------------
namespace {

template <class T>
std::vector<double> decoded(const std::string& bytes) {
  std::vector<double> v(bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < v.size(); i++) {
    T element;
    std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
    v[i] = static_cast<double>(element);
  }
  return v;
}

}  // namespace

// safetensors: the length of the header (8 bytes, little-endian), a JSON header, the tensors.
Dumps::Dumps(const fs::path& file)
    : file_(file.string()), attributes_(std::make_shared<nlohmann::json>(nlohmann::json::object())) {
  const std::string all = contents(file);
  std::uint64_t length = 0;
  require(all.size() >= sizeof length, file_, ": not a safetensors file");
  std::memcpy(&length, all.data(), sizeof length);
  const std::string data = all.substr(8 + length);
  const nlohmann::json header = nlohmann::json::parse(all.substr(8, length));
  for (auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      for (auto& [dump, text] : entry.items()) (*attributes_)[dump] = nlohmann::json::parse(text.get<std::string>());
      continue;
    }
    Dump d;
    for (std::int64_t extent : entry["shape"]) d.shape.append(extent);
    const std::size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    const std::string bytes = data.substr(begin, end - begin), type = entry["dtype"];
    if (type == "F32")
      d.values = decoded<float>(bytes);
    else if (type == "F64")
      d.values = decoded<double>(bytes);
    else if (type == "I32")
      d.values = decoded<std::int32_t>(bytes);
    else
      fail(file_, ": ", name, " has the type ", type);
    tensors_[name] = std::move(d);
  }
}

const Dumps& Dumps::of(const std::string& name) {
  static std::map<std::string, Dumps> files;
  auto found = files.find(name);
  if (found == files.end())
    found = files.emplace(name, Dumps(source("tests/reference/" + name + ".safetensors"))).first;
  return found->second;
}

const Dump& Dumps::at(const std::string& tensor) const {
  auto found = tensors_.find(tensor);
  require(found != tensors_.end(), file_, " holds no ", tensor);
  return found->second;
}

const nlohmann::json& Dumps::attributes(const std::string& dump) const {
  require(attributes_->contains(dump), file_, " holds no case ", dump);
  return (*attributes_)[dump];
}

std::vector<std::string> Dumps::cases() const {
  std::vector<std::string> names;
  for (auto& [name, value] : attributes_->items()) names.push_back(name);
  return names;
}

// ---- comparing ------------------------------------------------------------------------------------------------------
Difference difference(const std::vector<double>& got, const std::vector<double>& want, double floor) {
  Difference worst;
  if (got.size() != want.size()) return {INFINITY, 0, double(got.size()), double(want.size())};
  double largest = floor;
  for (double w : want) largest = std::max(largest, std::abs(w));
  for (std::size_t i = 0; i < got.size(); i++) {
    double error = std::abs(got[i] - want[i]) / largest;
    if (!(error <= std::numeric_limits<double>::max())) error = INFINITY;
    if (error > worst.error) worst = {error, i, got[i], want[i]};
  }
  return worst;
}

testing::AssertionResult close(const std::string& name, const std::vector<double>& got, const std::vector<double>& want,
                               double tolerance, double floor) {
  if (got.size() != want.size())
    return testing::AssertionFailure() << name << ": got " << got.size() << " elements, expected " << want.size();
  Difference d = difference(got, want, floor);
  if (d.error <= tolerance) return testing::AssertionSuccess();
  return testing::AssertionFailure() << name << "[" << d.index << "]: got " << d.got << ", expected " << d.want << " ("
                                     << d.error << " of the largest, " << tolerance << " allowed)";
}

testing::AssertionResult refused(const std::function<void()>& action, std::initializer_list<std::string> parts) {
  try {
    action();
  } catch (const Error& e) {
    for (const std::string& part : parts)
      if (std::string(e.what()).find(part) == std::string::npos)
        return testing::AssertionFailure() << "the message does not say \"" << part << "\": " << e.what();
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "nothing was thrown";
}

// ---- backends -------------------------------------------------------------------------------------------------------
const std::vector<BackendKind>& backends() {
  static const std::vector<BackendKind> kinds = [] {
    std::vector<BackendKind> all{{"reference", [](int threads) { return reference_backend(threads); }},
                                 {"cpu", [](int threads) { return cpu_backend(threads); }}};
    try {
      cuda_backend(0);
      all.push_back({"cuda", [](int) { return cuda_backend(0); }});
    } catch (const Error&) {  // built without CUDA, or no GPU here
    }
    return all;
  }();
  return kinds;
}

// ---- folders --------------------------------------------------------------------------------------------------------
TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "tandem-test-XXXXXX").string();
  require(mkdtemp(name.data()) != nullptr, "no temporary folder: ", std::strerror(errno));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<double> numbers(const std::string& name, std::int64_t n, double low, double high, double step) {
  std::uint64_t seed = 1469598103934665603u;
  for (unsigned char c : name) seed = (seed ^ c) * 1099511628211u;
  Philox random(seed, Stream::test);
  std::vector<double> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; i++) {
    double x = low + (high - low) * uniform(random.word(static_cast<std::uint32_t>(i)));
    v[i] = step > 0 ? std::round(x / step) * step : x;
  }
  return v;
}

}  // namespace tandem::test
