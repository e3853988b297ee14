// TensorBoard's event files: scalars and histograms over the steps of a run, looked at with `tensorboard --logdir DIR`.
// Where there is no protobuf library (tensorboard_none.cpp) opening one refuses.
#pragma once
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "layers/optim/flat_parameters.h"

namespace tandem {

// One run's file, events.out.tfevents.… in its folder. Every event is flushed as it is written, so a killed run can be
// read.
class EventFile {
 public:
  explicit EventFile(const std::string& folder);  // makes the folder; throws UsageError when it cannot
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Several values at one step. Throws Error when the disk is full.
  void scalars(std::int64_t step, const std::vector<std::pair<std::string, double>>& values);
  // The distribution of a tensor's elements. Those that are not finite are left out; nothing is written if none is
  // left.
  void histogram(std::int64_t step, const std::string& tag, const Tensor& values);
  const std::string& path() const { return path_; }

 private:
  void write(const std::string& event);
  std::string path_;
  std::FILE* file_ = nullptr;
};

// While it lives, every module's output is written as a histogram, "activations/layer1.0.conv1", when it runs. It uses
// the hook of each module (Module::on_forward) and puts back what was there.
class WatchActivations {
 public:
  WatchActivations(Module& model, EventFile& file, std::int64_t step);
  ~WatchActivations();
  WatchActivations(const WatchActivations&) = delete;

 private:
  std::vector<std::pair<Module*, Module::ForwardHook>> before_;
};

// "gradients/conv1.weight", of every parameter, after a backward pass.
void write_gradients(const FlatParameters& flat, EventFile& file, std::int64_t step);

}  // namespace tandem
