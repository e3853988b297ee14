#include "layers/metrics.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

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

MetricsFile::MetricsFile(const std::string& path, bool append) : path_(path) {
  if (path.empty()) return;
  // Named by mistake, a program or a table of results must not be emptied; devices and pipes have nothing to lose.
  if (std::error_code none; std::filesystem::is_regular_file(path, none) && std::filesystem::file_size(path, none)) {
    constexpr std::string_view begins = R"({"event":)";
    std::string found(begins.size(), 0);
    std::ifstream(path).read(found.data(), std::streamsize(found.size()));
    if (found != begins)
      throw UsageError("--metrics " + path + ": is there and holds something else than metrics: choose another name");
  }
  file_ = std::fopen(path.c_str(), append ? "a+" : "w");
  if (!file_) throw UsageError("--metrics " + path + ": cannot be written: " + std::strerror(errno));
  // The last line of a run that was killed may be half a line.
  if (append && std::fseek(file_, -1, SEEK_END) == 0 && std::fgetc(file_) != '\n') std::fputc('\n', file_);
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
