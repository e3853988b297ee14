#include "dist/server/work_leases.h"

namespace tandem {

std::optional<std::int64_t> WorkLeases::draw(int worker) {
  if (stopped_) return {};
  std::int64_t lease;
  if (!again_.empty()) {
    lease = again_.front();
    again_.pop_front();
  } else if (next_ < end_) {
    lease = next_++;
  } else {
    return {};
  }
  held_by_[lease] = worker;
  return lease;
}

bool WorkLeases::done(std::int64_t lease) {
  if (held_by_.erase(lease) == 0) return false;
  done_++;
  return true;
}

void WorkLeases::lost(int worker) {
  for (auto l = held_by_.begin(); l != held_by_.end();)
    if (l->second == worker) {
      if (!stopped_) again_.push_back(l->first);
      l = held_by_.erase(l);
    } else {
      ++l;
    }
}

}  // namespace tandem
