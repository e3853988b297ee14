#include "dist/server/work_leases.h"

#include <algorithm>

namespace tandem {

std::optional<std::int64_t> WorkLeases::draw(int worker, double share) {
  if (stopped_) return {};
  const std::int64_t wanted = std::max<std::int64_t>(1, std::int64_t(share * double(most_)));
  std::int64_t lease, count;
  if (!again_.empty()) {
    auto& [first, number] = again_.front();
    lease = first;
    count = std::min(wanted, number);
    first += count;
    number -= count;
    if (number == 0) again_.pop_front();
  } else if (next_ < end_) {
    lease = next_;
    count = std::min({wanted, end_ - next_, per_epoch_ - next_ % per_epoch_});
    next_ += count;
  } else {
    return {};
  }
  held_by_[lease] = {worker, count};
  return lease;
}

std::optional<WorkLeases::Held> WorkLeases::held(std::int64_t lease) const {
  const auto found = held_by_.find(lease);
  return found == held_by_.end() ? std::nullopt : std::optional(found->second);
}

bool WorkLeases::done(std::int64_t lease) {
  const auto found = held_by_.extract(lease);
  if (found) done_ += found.mapped().count;
  return !found.empty();
}

void WorkLeases::again(std::int64_t lease) {
  const auto found = held_by_.extract(lease);
  if (found && !stopped_) again_.push_back({lease, found.mapped().count});
}

void WorkLeases::lost(int worker) {
  for (const auto& [lease, held] : std::map(held_by_))
    if (held.worker == worker) again(lease);
}

}  // namespace tandem
