// TensorBoard's event files: scalars and histograms over the steps of a run. `tensorboard --logdir DIR` shows them.
// Without a protobuf library (none.cpp) opening a file throws.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/files/files.h"
#include "core/tensor.h"

namespace tandem {

// The file of one run, events.out.tfevents.… in its folder. Every event is flushed when it is written, so the file of a
// killed run can be read.
class EventFile {
 public:
  explicit EventFile(const std::string& folder);  // makes the folder; throws UsageError when it cannot

  // Several values at one step. Throws Error when the disk is full.
  void scalars(std::int64_t step, const std::vector<std::pair<std::string, double>>& values);
  // Writes the distribution of a tensor's elements, without those that are not finite. Nothing is written if no element
  // is finite.
  void histogram(std::int64_t step, const std::string& tag, const Tensor& values);
  const std::string& path() const { return path_; }

 private:
  void write(const std::string& event);
  std::string path_;
  OpenFile file_{nullptr, std::fclose};
};

}  // namespace tandem
