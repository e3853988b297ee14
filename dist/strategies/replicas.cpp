#include "dist/strategies/replicas.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/checksum.h"
#include "core/trace/trace.h"
#include "dist/strategies/reducer.h"

namespace tandem {

Replicas::Replicas(std::unique_ptr<Communicator> communicator, std::string name, bool steps_together)
    : communicator_(std::move(communicator)) {
  const int n = communicator_->size(), rank = communicator_->rank();
  ranks_ = {.strategy = std::move(name),
            .rank = rank,
            .size = n,
            .where = communicator_->where(rank),
            .batch_shares = n,
            .per_step = steps_together ? n : 1,
            .evaluation_shares = n};
}

void Replicas::spread(ParameterSpace& space, Communicator& over) {
  for (Tensor* t : {&space.values, &space.statistics})
    if (t->elements() > 0) over.broadcast(buffer(*t), 0).wait();
  space.count_writes(space.all());
}

std::vector<std::string> Replicas::gather(const std::string& mine) {
  quiet();
  const auto n = std::size_t(size()), me = std::size_t(rank());
  std::vector<double> lengths(n);
  lengths[me] = double(mine.size());
  communicator_->all_gather(buffer(lengths)).wait();
  Cuts cuts{0};
  for (double length : lengths) cuts.push_back(cuts.back() + std::int64_t(length));
  std::vector<std::uint8_t> text(static_cast<std::size_t>(cuts.back()));
  std::copy(mine.begin(), mine.end(), text.begin() + cuts[me]);
  communicator_->all_gather(buffer(text), cuts).wait();
  std::vector<std::string> all;
  for (std::size_t r = 0; r < n; r++) all.emplace_back(text.begin() + cuts[r], text.begin() + cuts[r + 1]);
  return all;
}

// Rank 0 answers each rank's questions with its time; the quickest of twenty answers counts.
Strategy::ClockOffset Replicas::watch(Trace& trace) {
  quiet();
  ClockOffset best{.ns = 0, .error_ns = rank() == 0 ? 0 : std::numeric_limits<std::int64_t>::max()};
  std::vector<double> time(1);
  for (int r = 1; r < size(); r++)
    for (int i = 0; i < 20; i++) {
      if (rank() == 0) {
        communicator_->recv(r, buffer(time)).wait();
        time[0] = double(trace.now());
        communicator_->send(r, buffer(time)).wait();
      } else if (rank() == r) {
        const std::int64_t asked = trace.now();
        communicator_->send(0, buffer(time)).wait();
        communicator_->recv(0, buffer(time)).wait();
        const std::int64_t heard = trace.now(), error = (heard - asked + 1) / 2;
        if (error < best.error_ns) best = {std::int64_t(time[0]) - asked - error, error};
      }
    }
  return best;
}

void Replicas::synchronize(Shared what, ParameterSpace& space, Optimizer&) {
  if (what != Shared::statistics) return;
  quiet();
  if (size() == 1 || space.statistics.elements() == 0) return;
  // What is the same on all ranks stays as it is, to the bit.
  const std::vector<double> mine = space.statistics.values();
  std::vector<double> most = mine;
  for (double x : mine) most.push_back(-x);
  communicator_->all_reduce(buffer(most), Combine::max).wait();
  std::vector<bool> same;
  for (std::size_t i = 0; i < mine.size(); i++) same.push_back(most[i] == -most[mine.size() + i]);
  // Statistics, and the squares of all of them: a variance over all ranks is the mean of the variances and the
  // variance of the means.
  std::vector<double> v = mine;
  const std::size_t n = v.size();
  v.resize(2 * n);
  for (std::size_t i = 0; i < n; i++) v[n + i] = v[i] * v[i];
  communicator_->all_reduce(buffer(v)).wait();
  for (double& x : v) x /= size();
  const auto& segments = space.statistic_segments();
  for (const auto& var : segments) {
    if (!var.name.ends_with("running_var")) continue;
    const std::string twin = var.name.substr(0, var.name.size() - 3) + "mean";
    auto mean = std::find_if(segments.begin(), segments.end(), [&](auto& s) { return s.name == twin; });
    if (mean == segments.end()) continue;
    for (std::int64_t i = 0; i < var.length; i++) {
      const auto m = std::size_t(mean->begin + i), at = std::size_t(var.begin + i);
      v[at] += std::max(0.0, v[n + m] - v[m] * v[m]);
      same[at] = same[at] && same[m];
    }
  }
  v.resize(n);
  for (std::size_t i = 0; i < n; i++)
    if (same[i]) v[i] = mine[i];
  space.statistics.copy_from(Tensor::of(space.backend(), space.statistics.shape(), v, space.statistics.dtype()));
}

bool Replicas::saves_after_failure() {
  const std::vector<int> left = communicator_->group()->survivors();
  const int twice = 2 * int(left.size());
  return !left.empty() && left[0] == rank() && (twice > size() || (twice == size() && rank() == 0));
}

void Replicas::compare(std::uint64_t mine, const std::string& what) {
  std::vector<std::uint8_t> all(std::size_t(size()) * sizeof mine);
  std::memcpy(all.data() + std::size_t(rank()) * sizeof mine, &mine, sizeof mine);
  communicator_->all_gather(buffer(all)).wait();
  for (int r = 1; r < size(); r++)
    if (std::memcmp(all.data(), all.data() + std::size_t(r) * sizeof mine, sizeof mine) != 0)
      fail(communicator_->where(0), " and ", communicator_->where(r), " ", what);
}

void Replicas::compare_layouts(const ParameterSpace& space, std::uint64_t kind) {
  for (const Range& r : space.trainable())  // what is exchanged
    kind = (kind * 31 + std::uint64_t(r.begin)) * 31 + std::uint64_t(r.end);
  compare(space.layout_hash() + kind,
          "do not train the same model: start all ranks with the same program and options");
}

void Replicas::compare_parameters(const ParameterSpace& space, std::int64_t steps) {
  std::vector<std::byte> copy;
  const void* bytes = space.values.raw();
  if (space.backend().asynchronous()) {
    copy.resize(space.values.bytes());
    space.backend().download(copy.data(), bytes, copy.size());
    bytes = copy.data();
  }
  Checksum sum;
  sum.add(bytes, space.values.bytes());
  compare(sum.value(), "no longer have the same parameters (after " + std::to_string(steps) +
                 " steps): they run different programs, or a machine computes wrongly");
}

Measures Replicas::measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket) {
  const double exposed = reducer.exposed(), all = reducer.hidden() + exposed;
  return {{"sent_bytes", double(sent)},
          {"exchange_seconds", all},
          {"exposed_seconds", exposed},
          {"hidden_share", all > 0 ? 1 - exposed / all : 0},
          {"bucket_bytes", double(bucket)}};
}

}  // namespace tandem
