#include "dist/strategies/machine_share.h"

#include "core/error.h"
#include "dist/job/membership.h"
#include "dist/strategies/replicas.h"

namespace tandem {

MachineShare::MachineShare(std::unique_ptr<Communicator> on_host, std::vector<int> ranks, int job_size)
    : on_host_(std::move(on_host)), ranks_(std::move(ranks)), job_size_(job_size) {
  require(int(ranks_.size()) == size(), "a machine of ", size(), " ranks, of which ", ranks_.size(), " are named");
}

std::array<std::int64_t, 2> MachineShare::of_leader(std::array<std::int64_t, 2> numbers) {
  double n[] = {double(numbers[0]), double(numbers[1])};
  on_host_->broadcast({n, 2, DType::f64}, 0).wait();
  return {std::int64_t(n[0]), std::int64_t(n[1])};
}

std::vector<std::string> MachineShare::gather(const std::string& mine) { return gather_texts(*on_host_, mine); }

std::vector<std::string> MachineShare::gather(const std::string& mine, const Gather& among_leaders) {
  if (size() == 1) return among_leaders(mine);
  const auto here = gather(bundle({std::to_string(rank()), mine}));
  const std::string everywhere = gather(leads() ? bundle(among_leaders(bundle(here))) : "")[0];
  std::vector<std::string> all(static_cast<std::size_t>(job_size_));
  for (const std::string& machine : unbundle(everywhere)) {
    if (machine.empty()) continue;  // the machine is lost
    for (const std::string& text : unbundle(machine)) {
      const auto sent = unbundle(text);
      all[std::stoul(sent[0])] = sent[1];
    }
  }
  return all;
}

void MachineShare::sum(Step& step) {
  double* const numbers[] = {&step.not_finite, &step.stops,        &step.samples,     &step.next_lease,
                             &step.sums.loss,  &step.sums.correct, &step.sums.samples};
  std::vector<double> all;
  for (const double* n : numbers) all.push_back(*n);
  on_host_->all_reduce(buffer(all)).wait();
  for (std::size_t i = 0; i < all.size(); i++) *numbers[i] = all[i];
}

}  // namespace tandem
