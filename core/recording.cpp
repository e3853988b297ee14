#include "core/recording.h"

#include <cstdio>

namespace tandem {

void Recording::operator()() {
  if (recorded_) return capture_->replay();
  if (!why_eager_.empty() || calls_++ < eager_calls) return step_();
  capture_->begin();
  try {
    step_();  // queues nothing: every launch becomes a node
    why_eager_ = capture_->end();
  } catch (
      // NotRecordable, or a library that cannot be captured; a real error is thrown again by the eager call below
      const Error& e) {
    capture_->end();
    why_eager_ = e.what();
  } catch (...) {
    capture_->end();  // the stream must not stay in capture mode
    throw;
  }
  recorded_ = why_eager_.empty();
  if (recorded_) return capture_->replay();
  capture_.reset();  // the eager steps need its memory
  std::fprintf(stderr, "the step runs eagerly, it cannot be recorded: %s\n", why_eager_.c_str());
  step_();
}

}  // namespace tandem
