// A vector of the parameters in host memory, for exchanges.
#pragma once
#include <memory>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

struct OnHost {
  std::shared_ptr<void> pinned;  // null: the vector is already in host memory
  Buffer of(Tensor& t) {
    if (!t.backend().on_device()) return buffer(t);
    if (!pinned) pinned = t.backend().pinned(t.bytes());
    return {pinned.get(), t.numel(), t.dtype()};
  }
  Buffer download(Tensor& t) {
    const Buffer b = of(t);
    if (pinned) t.backend().download(b.data, t.raw(), t.bytes());
    return b;
  }
  void upload(Tensor& t) {
    if (pinned) t.backend().upload(t.raw_write(), pinned.get(), t.bytes());
  }
};

}  // namespace tandem
