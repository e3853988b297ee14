#include "layers/replay.h"

#include <cstdio>

namespace tandem {

Replay::Replay(Backend& backend, std::function<void()> step, std::string why_not)
    : backend_(backend), step_(std::move(step)), never_(!backend.records()) {
  if (!why_not.empty()) cannot(why_not);
}

void Replay::cannot(const std::string& why) {
  if (!never_) std::fprintf(stderr, "the step runs eagerly, it cannot be recorded: %s\n", why.c_str());
  never_ = true;
}

void Replay::operator()(const Batch& batch, bool looked_at) {
  if (!never_ && batch.other_labels.defined()) cannot("mixup draws another proportion for every batch");
  if (never_ || looked_at) return step_();
  const Key key{batch.images.raw(), batch.labels.raw(), batch.samples.defined() ? batch.samples.raw() : nullptr,
                batch.images.shape(), batch.images.dtype()};
  if (key == key_) {
    strangers_ = 0;
    return recorded_();
  }
  if (recorded_ && ++strangers_ < 3) return step_();
  if (strangers_ > 0 && key.shape == key_.shape) {
    cannot("every batch comes in other memory");
    return step_();
  }
  recorded_ = nullptr;  // gone before the next one takes memory
  recorded_ = backend_.record(step_);
  key_ = key;
  strangers_ = 0;
  recorded_();
}

}  // namespace tandem
