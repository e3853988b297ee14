#include "layers/train/own_part.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>
#include <utility>

#include "core/random.h"

namespace tandem {

std::vector<int> participants(int workers, double sample, std::uint64_t seed, std::int64_t round) {
  const auto order = permutation(workers, Philox(seed, Stream::participants, std::uint32_t(round)));
  std::vector<int> first(order.begin(), order.begin() + std::max<std::ptrdiff_t>(1, std::lround(sample * workers)));
  std::sort(first.begin(), first.end());
  return first;
}

std::unique_ptr<OwnPart> OwnPart::of(const BatchSource& whole, const OwnPartOptions& options) {
  if (options.worker >= options.workers) return nullptr;
  auto part = whole.part(options.worker, options.workers, options.shares);
  if (!part) return nullptr;
  part->share(options.place, options.places);
  const Parts parts = whole.parts(options.workers);
  for (std::size_t c = 0; c < parts.pictures[0].size() && options.worker + options.place == 0; c++)
    if (std::all_of(parts.pictures.begin(), parts.pictures.end(), [&](const auto& worker) { return worker[c] == 0; }))
      std::fprintf(stderr, "note: --partition: no worker has pictures of class %zu\n", c);
  return std::unique_ptr<OwnPart>(new OwnPart(parts, std::move(part), options));
}

OwnPart::OwnPart(Parts parts, std::unique_ptr<BatchSource> part, const OwnPartOptions& options)
    : parts_(std::move(parts)),
      part_(std::move(part)),
      options_(options),
      own_(part_->batches_per_epoch()),
      per_epoch_(options.shares > 1 ? std::max<std::int64_t>(1, parts_.all() / parts_.batch) : 0) {
  for (int w = 0; w < options.workers && options.shares == 1; w++)
    per_epoch_ = options.epochs > 0 ? std::max(per_epoch_, parts_.batches(w)) : per_epoch_ + parts_.batches(w);
  steps_ = options.epochs > 0 ? own_ : per_epoch_;
}

void OwnPart::start(std::int64_t epoch, std::int64_t first) {
  begin_ = epoch * steps_;
  end_ = begin_ + steps_ * std::max<std::int64_t>(1, options_.epochs);
  const bool round = options_.epochs > 0;
  bool rests = round && first >= per_epoch_;
  if (round) {
    const auto [workers, sample, seed] = std::tuple{options_.workers, options_.sample, parts_.seed};
    const auto all = participants(workers, sample, seed, epoch / options_.epochs);
    rests = rests || !std::binary_search(all.begin(), all.end(), options_.worker);
  }
  next_ = rests ? end_ : begin_ + (round ? 0 : first);
  part_->start(next_ / own_, next_ % own_);
}

bool OwnPart::next(Batch& batch) {
  if (next_ == end_) return false;
  if (!part_->next(batch)) {
    part_->start(next_ / own_);
    part_->next(batch);
  }
  batch = weighed(std::move(batch));
  batch.index = (next_++ - begin_) % steps_;
  return true;
}

Batch OwnPart::make(std::int64_t epoch, std::int64_t index) {
  Batch batch = at(epoch * steps_ + index);
  batch.global = parts_.batch * (options_.epochs > 0 ? options_.workers : 1);
  return batch;
}
Batch OwnPart::at(std::int64_t n) { return weighed(part_->make(n / own_, n % own_)); }

Batch OwnPart::weighed(Batch batch) const {
  using Weight = OwnPartOptions::Weight;
  const double of_worker = options_.weight == Weight::pictures ? weight() : 1.0 / options_.workers;
  const bool mean = options_.weight != Weight::one;
  batch.own_weight = (mean ? of_worker : 1) * batch.weight();
  return batch;
}

}  // namespace tandem
