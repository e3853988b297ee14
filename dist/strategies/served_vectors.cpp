#include "dist/strategies/served_vectors.h"

#include <cstring>
#include <string>
#include <utility>

#include "core/backend.h"

namespace tandem {

FlatMemory ServedVectors::memory() {
  return [this](Backend& backend, std::int64_t numel) {
    const std::size_t bytes = std::size_t(numel) * sizeof(float);
    std::shared_ptr<void> block;
    if (!backend.on_device()) block = machine_.size() > 1 ? machine_.allocate(bytes) : node_.memory(bytes);
    if (!block) return Tensor::zeros(backend, {numel}, DType::f32);
    void* at = block.get();
    return Tensor::wrap(backend, at, {numel}, DType::f32, std::move(block));
  };
}

void ServedVectors::bind(FlatParameters& flat) {
  flat_ = &flat;
  machine_.begin(flat);
}

void ServedVectors::broadcast_first() {
  for (auto [vector, host] : {std::pair(&flat_->values, &values_), std::pair(&flat_->buffers, &buffers_)}) {
    if (vector->numel() == 0) continue;
    const Buffer b = host->download(*vector);
    const std::string text(static_cast<const char*>(b.data), node_.rank() == 0 ? b.bytes() : 0);
    const std::string first = node_.gather(text)[0];
    std::memcpy(b.data, first.data(), first.size());
    host->upload(*vector);
  }
  flat_->count_writes(flat_->all());
}

void ServedVectors::begin(ServerOptions options, WorkLeases leases, const std::vector<float>& scales, Tensor velocity) {
  OnHost host;
  std::vector<std::byte> velocity_part;
  Buffer v;
  if (velocity.defined()) v = machine_.pack(host.download(velocity), velocity_part);
  node_.begin(machine_.pack(values_.download(flat_->values), pulled_), present_buffers(), machine_.pack_scales(scales),
              std::move(options), std::move(leases), v);
}

void ServedVectors::push(std::int64_t samples, const MetricSums& sums) {
  node_.push(machine_.pack(gradients_.download(flat_->gradients), pushed_), present_buffers(), samples, sums);
}

void ServedVectors::pull() {
  node_.pull(values(), buffers());
  take();
}

void ServedVectors::finish(bool takes) {
  node_.finish(values(), buffers());
  if (takes) take();
}

void ServedVectors::take() {
  machine_.unpack(pulled_, values_.of(flat_->values));
  if (flat_->buffers.numel() > 0) machine_.broadcast(buffers_.of(flat_->buffers));
  values_.upload(flat_->values);
  buffers_.upload(flat_->buffers);
  flat_->count_writes(flat_->all());
}

void ServedVectors::velocity(Tensor into) {
  if (!into.defined()) return;
  OnHost host;
  std::vector<std::byte> part;
  const Buffer b = host.of(into);
  if (!node_.velocity(machine_.room(b, part))) return;
  machine_.unpack(part, b);
  host.upload(into);
}

}  // namespace tandem
