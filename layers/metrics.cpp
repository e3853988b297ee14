#include "layers/metrics.h"

#include <cerrno>
#include <cstring>

#include "core/json.h"
#include "layers/options.h"

namespace tandem {

std::string json_object(const MetricFields& fields) {
  std::string line = "{";
  for (const auto& [name, value] : fields) {
    if (line.size() > 1) line += ",";
    line += json_quoted(name) + ":";
    if (auto* text = std::get_if<std::string>(&value))
      line += json_quoted(*text);
    else if (auto* whole = std::get_if<std::int64_t>(&value))
      line += std::to_string(*whole);
    else
      line += json_number(std::get<double>(value));
  }
  return line + "}";
}

MetricsFile::MetricsFile(const std::string& path) : path_(path) {
  if (path.empty()) return;
  file_ = std::fopen(path.c_str(), "w");
  if (!file_) throw UsageError("--metrics " + path + ": cannot be written: " + std::strerror(errno));
}

MetricsFile::~MetricsFile() {
  if (file_) std::fclose(file_);
}

void MetricsFile::write(const MetricFields& fields) {
  if (!file_) return;
  std::string line = json_object(fields) + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0)
    fail(path_, ": the metrics could not be written: ", std::strerror(errno));
}

}  // namespace tandem
