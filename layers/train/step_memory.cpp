#include <algorithm>

#include "core/backend.h"
#include "core/text.h"
#include "layers/export/summary.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

constexpr std::size_t unknown = std::size_t(-1);

std::size_t memory_left(Backend& backend) {
  const std::size_t left = backend.memory().left();
  if (left == unknown || backend.on_device()) return left;
  return left / std::size_t(std::max(1, local_size_from_environment()));  // the ranks of a host share it
}

}  // namespace

StepMemory step_memory(Module& model, const Tensor& images) {
  constexpr std::int64_t pictures = 2;          // batch norm needs two
  constexpr std::size_t batches_under_way = 4;  // the one in use, the next, and those that the loader has prepared
  Shape shape = images.shape();
  shape[0] = pictures;
  const ModelSummary s = summary(model, shape, images.dtype());
  const std::size_t picture = images.bytes() / std::size_t(std::max<std::int64_t>(1, images.size(0)));
  return {s.backward_peak_bytes / pictures * 11 / 10 + batches_under_way * picture, memory_left(images.backend())};
}

void require_memory(Module& model, const Batch& batch) {
  // No known model saves more than this multiple of a picture's size, so most runs need no exact estimate.
  constexpr std::size_t most = 8192;
  const Tensor& images = batch.images;
  if (images.rank() < 2 || images.bytes() < memory_left(images.backend()) / most) return;
  const StepMemory m = step_memory(model, images);
  const std::int64_t pictures = images.size(0), fits = m.fits();
  if (m.left == unknown || pictures <= fits) return;
  const auto held = images.backend().memory().statistics();
  refuse("a step on ", counted(pictures, "picture"), " needs ",
         readable_bytes(double(m.per_picture) * double(pictures)), " (", readable_bytes(double(m.per_picture)),
         " for activations and gradients of each picture), and ", readable_bytes(double(m.left)), " of ",
         images.backend().memory().name(), " are left beside ", by_use(held.live),
         fits > 0 ? ": a --batch of " + std::to_string(fits) + " fits (--accumulate makes steps of several)"
                  : ": not even one picture fits");
}

}  // namespace tandem
