#include "dist/server/tickets.h"

namespace tandem {

std::optional<std::int64_t> Tickets::draw(int worker) {
  if (stopped_) return {};
  std::int64_t ticket;
  if (!again_.empty()) {
    ticket = again_.front();
    again_.pop_front();
  } else if (next_ < end_) {
    ticket = next_++;
  } else {
    return {};
  }
  leases_[ticket] = worker;
  return ticket;
}

bool Tickets::done(std::int64_t ticket) {
  if (leases_.erase(ticket) == 0) return false;
  done_++;
  return true;
}

void Tickets::lost(int worker) {
  for (auto l = leases_.begin(); l != leases_.end();)
    if (l->second == worker) {
      if (!stopped_) again_.push_back(l->first);
      l = leases_.erase(l);
    } else {
      ++l;
    }
}

}  // namespace tandem
