#include "dist/tickets.h"

namespace tandem {

std::optional<std::int64_t> Tickets::draw(int worker, double now) {
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
  leases_[ticket] = {worker, now};
  return ticket;
}

bool Tickets::done(std::int64_t ticket) {
  const bool leased = leases_.erase(ticket) > 0;
  bool waiting = false;  // it was late, and nobody has drawn it again yet
  for (auto a = again_.begin(); a != again_.end() && !waiting; ++a)
    if (*a == ticket) again_.erase(a), waiting = true;
  if (!leased && !waiting) return false;  // it was late, and whoever drew it again was faster
  done_++;
  return true;
}

void Tickets::lost(int worker) {
  for (auto l = leases_.begin(); l != leases_.end();)
    if (l->second.worker == worker) {
      if (!stopped_) again_.push_back(l->first);
      l = leases_.erase(l);
    } else {
      ++l;
    }
}

void Tickets::late(double now) {
  for (auto l = leases_.begin(); l != leases_.end();)
    if (now - l->second.since > deadline_) {
      if (!stopped_) again_.push_back(l->first);
      l = leases_.erase(l);
    } else {
      ++l;
    }
}

}  // namespace tandem
