#include "layers/train/own_part.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "core/random.h"

namespace tandem {

std::unique_ptr<OwnPart> OwnPart::of(const BatchSource& whole, const OwnPartOptions& options) {
  auto part = whole.part(options.worker, options.workers, options.shares);
  return std::unique_ptr<OwnPart>(part ? new OwnPart(whole, std::move(part), options) : nullptr);
}

OwnPart::OwnPart(const BatchSource& whole, std::unique_ptr<BatchSource> part, const OwnPartOptions& options)
    : parts_(whole.parts(options.workers)), part_(std::move(part)), options_(options) {
  part_->share(options.place, options.places);
  for (int w = 0; w < options.workers; w++) {
    all_ += parts_.of(w);
    taking_part_.push_back(w);
  }
  per_epoch_ = (all_ + parts_.batch - 1) / parts_.batch;
  for (std::size_t c = 0; c < parts_.pictures[0].size() && options.worker + options.place == 0; c++)
    if (std::all_of(parts_.pictures.begin(), parts_.pictures.end(), [&](const auto& of) { return of[c] == 0; }))
      std::fprintf(stderr, "note: --partition: no worker has pictures of class %zu\n", c);
}

std::int64_t OwnPart::position(std::int64_t epoch, std::int64_t index) const {
  if (options_.epochs > 0) return epoch * part_->batches_per_epoch() + index;
  return (epoch * per_epoch_ + index) * options_.shares / options_.workers;
}

void OwnPart::start(std::int64_t epoch, std::int64_t first) {
  next_ = position(epoch, options_.epochs > 0 ? 0 : first);
  end_ = position(epoch + std::max<std::int64_t>(1, options_.epochs), 0);
  if (options_.epochs > 0) {
    const auto number = std::max<std::int64_t>(1, std::llround(options_.sample * options_.workers));
    const auto round = std::uint32_t(epoch / options_.epochs);
    const auto order = permutation(options_.workers, Philox(parts_.seed, Stream::participants, round), number);
    taking_part_.assign(order.begin(), order.begin() + number);
    std::sort(taking_part_.begin(), taking_part_.end());
    if (first >= per_epoch_ || weight() == 0) end_ = next_;
  }
  const std::int64_t own = part_->batches_per_epoch();
  part_->start(next_ / own, next_ % own);
}

Batch OwnPart::following() {
  const std::int64_t own = part_->batches_per_epoch();
  Batch batch;
  if (!part_->next(batch)) {
    part_->start(next_ / own);
    part_->next(batch);
  }
  batch = weighted(std::move(batch));
  if (options_.shares > 1) batch.index = next_ % per_epoch_;
  next_++;
  return batch;
}

Batch OwnPart::make(std::int64_t epoch, std::int64_t index) {
  const std::int64_t at = position(epoch, index), own = part_->batches_per_epoch();
  Batch batch = weighted(part_->make(at / own, at % own));
  batch.global = parts_.batch * (options_.epochs > 0 ? options_.workers : 1);
  return batch;
}

Batch OwnPart::weighted(Batch batch) const {
  batch.own_weight = (options_.averaged ? weight() : 1) * batch.weight();
  return batch;
}

double OwnPart::weight(int worker) const {
  double all = 0;
  for (int w : taking_part_) all += double(parts_.of(w));
  const bool takes_part = std::binary_search(taking_part_.begin(), taking_part_.end(), worker);
  return takes_part ? double(parts_.of(worker)) / all : 0;
}

std::map<std::string, std::string> OwnPart::description() const {
  auto about = part_->description();
  about["partition"] = parts_.name;
  return about;
}

}  // namespace tandem
