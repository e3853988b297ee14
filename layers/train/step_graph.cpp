#include "layers/train/step_graph.h"

#include <cstdio>

namespace tandem {

StepGraph::StepGraph(Backend& backend, bool waits, Parts parts, const std::string& why_not)
    : backend_(backend), parts_(std::move(parts)), never_(!backend.records()) {
  if (!waits && parts_.update && !never_) {  // nothing waits: all parts are one recording
    parts_.backward = [whole = parts_] {
      whole.backward();
      if (whole.exchange) whole.exchange();
      whole.update();
    };
    parts_.exchange = parts_.update = nullptr;
  }
  if (!why_not.empty()) cannot(why_not);
}

void StepGraph::cannot(const std::string& why) {
  if (!never_) std::fprintf(stderr, "the step runs eagerly, it cannot be recorded: %s\n", why.c_str());
  never_ = true;
}

void StepGraph::run(const std::function<void()>& backward, const std::function<void()>& update) const {
  backward();
  if (parts_.exchange) parts_.exchange();
  if (update) update();
  if (parts_.finish) parts_.finish();
}

void StepGraph::operator()(const Batch& batch, bool eager) {
  if (!never_ && batch.other_labels.defined()) cannot("mixup draws another proportion for every batch");
  if (never_ || eager) return run(parts_.backward, parts_.update);
  const Key key{batch.images.raw(),   batch.labels.raw(),   batch.samples.defined() ? batch.samples.raw() : nullptr,
                batch.images.shape(), batch.images.dtype(), batch.over_ranks()};
  if (key == key_) {
    other_memory_ = 0;
    return run(recorded_backward_, recorded_update_);
  }
  if (recorded_backward_ && ++other_memory_ < 3) return run(parts_.backward, parts_.update);
  if (other_memory_ > 0 && key.shape == key_.shape) {
    cannot("every batch comes in other memory");
    return run(parts_.backward, parts_.update);
  }
  recorded_backward_ = recorded_update_ = nullptr;  // freed before the next graphs allocate memory
  recorded_backward_ = backend_.record(parts_.backward);
  if (parts_.update) recorded_update_ = backend_.record(parts_.update);
  key_ = key;
  other_memory_ = 0;
  run(recorded_backward_, recorded_update_);
}

}  // namespace tandem
