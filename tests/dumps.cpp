#include "tests/dumps.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files/safetensors.h"
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

std::vector<nlohmann::json> lines_of(const std::string& metrics) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(contents(metrics));
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line, nullptr, false));
  return lines;
}

// ---- PyTorch's dumps ------------------------------------------------------------------------------------------------
Dumps::Dumps(const fs::path& path) : file_(path.string()) {
  const SafetensorsFile file(path);
  for (auto& [name, entry] : file.tensors()) tensors_[name] = {entry.shape, file.values(name)};
  for (auto& [dump, text] : file.metadata()) attributes_[dump] = Attributes::parse(text);
}

const Dumps& Dumps::of(const char* name) {
  static std::map<std::string, Dumps> files;
  if (!files.count(name)) files.emplace(name, Dumps(source(std::string("tests/reference/") + name + ".safetensors")));
  return files.at(name);
}

const Dump& Dumps::at(const std::string& tensor) const {
  auto found = tensors_.find(tensor);
  require(found != tensors_.end(), file_, " holds no ", tensor);
  return found->second;
}

const Attributes& Dumps::attributes(const std::string& dump) const {
  auto found = attributes_.find(dump);
  require(found != attributes_.end(), file_, " holds no case ", dump);
  return found->second;
}

std::vector<std::string> Dumps::cases() const {
  std::vector<std::string> names;
  for (auto& [name, value] : attributes_) names.push_back(name);
  return names;
}

// ---- numbers --------------------------------------------------------------------------------------------------------
Numbers numbers(const std::string& name, std::int64_t n, double low, double high, double step) {
  std::uint64_t seed = 1469598103934665603u;
  for (unsigned char c : name) seed = (seed ^ c) * 1099511628211u;
  Philox random(seed, Stream::test);
  Numbers v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; i++) {
    double x = low + (high - low) * uniform(random.word(static_cast<std::uint32_t>(i)));
    v[i] = step > 0 ? std::round(x / step) * step : x;
  }
  return v;
}

Difference difference(const Numbers& got, const Numbers& want, double floor) {
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

double largest_gap(const Numbers& a, const Numbers& b) {
  require(a.size() == b.size(), "vectors of ", a.size(), " and ", b.size(), " elements are compared");
  double most = 0;
  for (std::size_t i = 0; i < a.size(); i++) {
    const double gap = std::abs(a[i] - b[i]);
    most = std::isnan(gap) ? INFINITY : std::max(most, gap);
  }
  return most;
}

}  // namespace tandem::test
