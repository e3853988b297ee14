// Metrics as JSON lines: one object per line, written and flushed at once, so that the file of a killed run can be
// read.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/files/files.h"

namespace tandem {

using MetricValue =
    std::variant<double, std::int64_t, std::string, std::vector<double>, std::vector<std::vector<double>>>;
using MetricFields = std::vector<std::pair<std::string, MetricValue>>;

// {"event":"epoch","epoch":1,…}; numbers that are not finite are written as null, since JSON cannot represent them.
std::string json_object(const MetricFields& fields);

class MetricsFile {
 public:
  MetricsFile() = default;
  // An empty path: writes nothing. Metrics of an earlier run are replaced. With append they are continued if their
  // first line has the same "run". Throws UsageError when the file cannot be written, contains something else, or
  // another process writes its metrics there.
  explicit MetricsFile(const std::string& path, bool append = false, const std::string& run = "");
  void write(const MetricFields& fields);  // throws Error when the disk is full

 private:
  std::string path_;
  FileLock lock_;
  OpenFile file_{nullptr, std::fclose};
};

}  // namespace tandem
