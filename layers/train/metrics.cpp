#include "layers/train/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/files/json.h"
#include "core/text.h"
#include "layers/train/options.h"

namespace tandem {

static std::string json_text(const std::string& text) { return json_quoted(text); }
static std::string json_text(std::int64_t whole) { return std::to_string(whole); }
static std::string json_text(double number) { return json_number(number); }
template <class T>
static std::string json_text(const std::vector<T>& values) {
  return "[" + joined(values, ",", [](const T& v) { return json_text(v); }) + "]";
}

std::string json_object(const MetricFields& fields) {
  const auto value = [](const auto& v) { return json_text(v); };
  const auto text = [&](const auto& field) { return json_quoted(field.first) + ":" + std::visit(value, field.second); };
  return "{" + joined(fields, ",", text) + "}";
}

// The run that the first line of a metrics file names.
static std::string run_in(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  try {
    return parse_json(line).value("run", "");
  } catch (const std::exception&) {  // a truncated line names none
    return "";
  }
}

MetricsFile::MetricsFile(const std::string& path, bool append, const std::string& run) : path_(path) {
  if (path.empty()) return;
  check_replaceable("--metrics", path, R"({"event":)", "metrics");
  std::error_code none;
  if (append && !run.empty() && std::filesystem::is_regular_file(path, none) &&
      std::filesystem::file_size(path, none) && run_in(path) != run)
    refuse("--metrics ", path, ": holds the metrics of another run than the one that is resumed: name that run's own ",
           "file, or a new one");
  file_ = open_file(path, "a+");
  if (file_ && std::filesystem::is_regular_file(path, none)) {
    lock_.take(path, "--metrics " + path, "writes its metrics there: wait for its end, or name another file");
    if (!append && ftruncate(fileno(file_.get()), 0) != 0) fail(path, ": cannot be emptied: ", std::strerror(errno));
  }
  if (!file_) refuse("--metrics ", path, ": ", cannot_write(path, errno));
  // The last line of a run that was killed may be incomplete.
  if (append && std::fseek(file_.get(), -1, SEEK_END) == 0 && std::fgetc(file_.get()) != '\n')
    std::fputc('\n', file_.get());
}

void MetricsFile::write(const MetricFields& fields) {
  if (!file_) return;
  std::string line = json_object(fields) + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() || std::fflush(file_.get()) != 0)
    fail(path_, ": the metrics could not be written: ", std::strerror(errno));
}

}  // namespace tandem
