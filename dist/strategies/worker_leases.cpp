#include "dist/strategies/worker_leases.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace tandem {

WorkLeases WorkerLeases::begin(std::int64_t first, std::int64_t end, std::int64_t most, std::int64_t per_epoch) {
  first_ = first;
  end_ = end;
  return follows() ? endless() : WorkLeases(std::min(first, end), end, most, per_epoch);
}

std::optional<std::int64_t> WorkerLeases::draw(const std::function<bool()>& asked_to_stop) {
  std::int64_t lease = run_is_over;
  if (!follows()) lease = node_.lease(asked_to_stop).value_or(run_is_over);
  lease = share_done(lease);
  coming_ = {};
  if (lease == run_is_over) return {};
  if (follows() && !node_.lease()) fail("the other machines have ended");
  return last_ = lease;
}

std::optional<std::int64_t> WorkerLeases::coming() const {
  if (!synchronous_) return follows() ? coming_ : node_.next_lease();
  const std::int64_t next = last_ + per_step_;
  return next < end_ ? std::optional(next) : std::nullopt;
}

std::int64_t WorkerLeases::share_done(std::int64_t number) {
  const auto numbers = machine_.of_leader({number, node_.leases_done()});
  done_ = numbers[1];
  return numbers[0];
}

std::int64_t WorkerLeases::steps(std::int64_t known) const {
  if (machine_.size() == 1) return (first_ + node_.leases_done()) / per_step_;
  return std::max(known, (first_ + done_) / per_step_);  // known: with this machine's unreported step
}

std::function<double(std::int64_t)> WorkerLeases::of_pushes(std::function<double(double)> rate) const {
  return [rate = std::move(rate), first = first_, per_step = per_step_](std::int64_t pushes) {
    return rate(double((first + pushes) / per_step));
  };
}

void WorkerLeases::announce(MachineShare::Step& step) const {
  if (const auto next = node_.next_lease(); next && machine_.leads()) step.next_lease = double(*next + 1);
}
void WorkerLeases::receive(const MachineShare::Step& step) {
  if (follows() && step.next_lease > 0) coming_ = std::int64_t(step.next_lease) - 1;
}

}  // namespace tandem
