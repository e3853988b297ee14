// A device's mover (core/mover.h): copies run on two separate queues of the backend, to memory outside the device.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/backend.h"
#include "core/mover.h"

namespace tandem {

// The memory outside: pinned or managed.
struct OutsideMemory {
  std::string description;
  std::size_t most;                                        // limit of its bytes
  std::function<std::shared_ptr<void>(std::size_t)> take;  // throws Error
  std::function<void(Queue& queue, void* outside, const void* from, std::size_t bytes)> copy_out;
  std::function<void(Queue& queue, void* to, const void* outside, std::size_t bytes)> copy_in;
};

std::unique_ptr<Mover> queue_mover(Backend& backend, OutsideMemory outside);

}  // namespace tandem
