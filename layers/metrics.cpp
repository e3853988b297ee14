#include "layers/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>

#include "layers/options.h"

namespace tandem {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\')
      out += std::string("\\") + char(c);
    else if (c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else
      out += char(c);
  }
  return out + "\"";
}

}  // namespace

std::string json_object(const MetricFields& fields) {
  std::string line = "{";
  for (const auto& [name, value] : fields) {
    if (line.size() > 1) line += ",";
    line += quoted(name) + ":";
    if (auto* text = std::get_if<std::string>(&value))
      line += quoted(*text);
    else if (auto* whole = std::get_if<std::int64_t>(&value))
      line += std::to_string(*whole);
    else if (double v = std::get<double>(value); std::isfinite(v)) {
      char number[32];
      std::snprintf(number, sizeof number, "%.7g", v);
      line += number;
    } else
      line += "null";
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
