#include "layers/train/replay.h"

#include <cstdio>

namespace tandem {

Replay::Replay(Backend& backend, std::function<void()> backward, std::function<void()> exchange,
               std::function<void()> update, std::string why_not)
    : backend_(backend),
      backward_(std::move(backward)),
      exchange_(std::move(exchange)),
      update_(std::move(update)),
      never_(!backend.records()) {
  if (!why_not.empty()) cannot(why_not);
}

void Replay::cannot(const std::string& why) {
  if (!never_) std::fprintf(stderr, "the step runs eagerly, it cannot be recorded: %s\n", why.c_str());
  never_ = true;
}

void Replay::run(const std::function<void()>& backward, const std::function<void()>& update) const {
  backward();
  if (exchange_) exchange_();
  if (update) update();
}

void Replay::operator()(const Batch& batch, bool looked_at) {
  if (!never_ && batch.other_labels.defined()) cannot("mixup draws another proportion for every batch");
  if (never_ || looked_at) return run(backward_, update_);
  const Key key{batch.images.raw(), batch.labels.raw(), batch.samples.defined() ? batch.samples.raw() : nullptr,
                batch.images.shape(), batch.images.dtype(), batch.over_ranks()};
  if (key == key_) {
    strangers_ = 0;
    return run(recorded_backward_, recorded_update_);
  }
  if (recorded_backward_ && ++strangers_ < 3) return run(backward_, update_);
  if (strangers_ > 0 && key.shape == key_.shape) {
    cannot("every batch comes in other memory");
    return run(backward_, update_);
  }
  recorded_backward_ = recorded_update_ = nullptr;  // gone before the next ones take memory
  recorded_backward_ = backend_.record(backward_);
  if (update_) recorded_update_ = backend_.record(update_);
  key_ = key;
  strangers_ = 0;
  run(recorded_backward_, recorded_update_);
}

}  // namespace tandem
