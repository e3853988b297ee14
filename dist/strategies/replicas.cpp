#include "dist/strategies/replicas.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "core/checksum.h"
#include "core/trace/trace.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/reducer.h"

namespace tandem {

Replicas::Replicas(std::unique_ptr<Communicator> communicator, std::string name, bool synchronous)
    : communicator_(std::move(communicator)) {
  const int n = communicator_->size(), rank = communicator_->rank();
  ranks_ = {.strategy = std::move(name),
            .rank = rank,
            .size = n,
            .where = communicator_->where(rank),
            .batch_shares = n,
            .per_step = synchronous ? n : 1,
            .synchronous = synchronous,
            .evaluation_shares = n,
            .evaluation_share = rank};
}

void Replicas::broadcast(FlatParameters& flat, Communicator& over, Communicator* over_slices) {
  const Tensor replicated = part(flat.values, flat.all(OwnerClass::replicated)),
               slices = part(flat.values, flat.all(OwnerClass::slice));
  for (auto [from, values] : {std::pair(&over, replicated), {&over, flat.buffers}, {over_slices, slices}})
    if (from && values.numel() > 0) from->broadcast(buffer(values), 0).wait();
  flat.count_writes(flat.all());
}

Buffer OnHost::of(Tensor& t) {
  if (!t.backend().on_device()) return buffer(t);
  if (!pinned) pinned = t.backend().pinned(t.bytes());
  return {pinned.get(), t.numel(), t.dtype()};
}

Buffer OnHost::download(Tensor& t, const std::vector<Range>& ranges) {
  const Buffer b = of(t);
  for (const Range& r : ranges)
    if (pinned) t.backend().download(b.at(r.begin), part(t, r).raw(), part(t, r).bytes());
  return b;
}

void OnHost::upload(Tensor& t, const std::vector<Range>& ranges) {
  for (const Range& r : ranges)
    if (pinned) t.backend().upload(part(t, r).raw_write(), of(t).at(r.begin), part(t, r).bytes());
}

FlatMemory memory_from(std::function<std::shared_ptr<void>(std::size_t bytes)> allocate) {
  return [allocate = std::move(allocate)](Backend& backend, std::int64_t numel) {
    auto block = backend.on_device() ? nullptr : allocate(std::size_t(numel) * sizeof(float));
    if (!block) return Tensor::zeros(backend, {numel}, DType::f32);
    void* at = block.get();
    return Tensor::wrap(backend, at, {numel}, DType::f32, std::move(block));
  };
}

std::vector<double> gather_numbers(Communicator& over, const std::vector<double>& mine) {
  std::vector<double> all(mine.size() * std::size_t(over.size()));
  std::copy(mine.begin(), mine.end(), all.begin() + std::ptrdiff_t(mine.size()) * over.rank());
  over.all_gather(buffer(all)).wait();
  return all;
}

Cuts gather_cuts(Communicator& over, std::int64_t mine) {
  Cuts cuts{0};
  for (double length : gather_numbers(over, {double(mine)})) cuts.push_back(cuts.back() + std::int64_t(length));
  return cuts;
}

std::vector<std::string> gather_texts(Communicator& over, const std::string& mine) {
  const Cuts cuts = gather_cuts(over, std::int64_t(mine.size()));
  std::vector<std::uint8_t> text(static_cast<std::size_t>(cuts.back()));
  std::copy(mine.begin(), mine.end(), text.begin() + cuts[std::size_t(over.rank())]);
  over.all_gather(buffer(text), cuts).wait();
  std::vector<std::string> all;
  for (std::size_t r = 1; r < cuts.size(); r++) all.emplace_back(text.begin() + cuts[r - 1], text.begin() + cuts[r]);
  return all;
}

std::vector<std::string> Replicas::gather(const std::string& mine, Among) {
  drain();
  return gather_texts(*communicator_, mine);
}

Tensor Replicas::vector(const FlatParameters& flat, DType dtype, std::shared_ptr<void> memory) {
  Backend& backend = flat.backend();
  const Shape& shape = flat.values.shape();
  if (backend.on_device()) return Tensor(backend, shape, dtype);
  if (!memory)
    memory = {std::aligned_alloc(64, (std::size_t(shape.numel()) * size_of(dtype) + 63) / 64 * 64), std::free};
  void* at = memory.get();
  return Tensor::wrap(backend, at, shape, dtype, std::move(memory));
}

// Each rank requests rank 0's time twenty times, and uses the reply with the shortest round trip.
Strategy::ClockOffset Replicas::watch(Trace& trace) {
  drain();
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

void Replicas::synchronize(Shared what, FlatParameters& flat, Optimizer&) {
  if (what == Shared::optimizer) return;
  drain();
  if (what == Shared::averages && size() > 1 && !ranks_.synchronous) {
    OnHost host;
    communicator_->all_reduce(host.download(flat.values)).wait();
    host.upload(flat.values);
    join_mean(flat.values, flat.values, flat.values, size());
    flat.count_writes(flat.all());
  }
  if (size() == 1 || flat.buffers.numel() == 0) return;
  // All statistics and their squares: a variance over all ranks is the mean of the variances plus the variance of the
  // means. Values that are the same on all ranks (the largest is the smallest) are kept, to the bit.
  const std::vector<double> mine = flat.buffers.values();
  const std::size_t n = mine.size();
  const double weight = own_part_ ? size() * own_part_->weight() / own_part_->options().places : 1;  // of this rank
  std::vector<double> most(2 * n), v(2 * n);
  for (std::size_t i = 0; i < n; i++) {
    most[i] = mine[i];
    most[n + i] = -mine[i];
    v[i] = weight * mine[i];
    v[n + i] = weight * mine[i] * mine[i];
  }
  communicator_->all_reduce(buffer(most), Combine::max).wait();
  communicator_->all_reduce(buffer(v)).wait();
  for (double& x : v) x /= size();
  std::vector<bool> same;
  for (std::size_t i = 0; i < n; i++) same.push_back(most[i] == -most[n + i]);
  const auto& ranges = flat.buffer_ranges();
  for (const auto& var : ranges) {
    if (!var.name.ends_with("running_var")) continue;
    const std::string twin = var.name.substr(0, var.name.size() - 3) + "mean";
    auto mean = std::find_if(ranges.begin(), ranges.end(), [&](auto& s) { return s.name == twin; });
    if (mean == ranges.end()) continue;
    for (std::int64_t i = 0; i < var.length; i++) {
      const auto m = std::size_t(mean->begin + i), at = std::size_t(var.begin + i);
      v[at] += std::max(0.0, v[n + m] - v[m] * v[m]);
      same[at] = same[at] && same[m];
    }
  }
  v.resize(n);
  for (std::size_t i = 0; i < n; i++)
    if (same[i]) v[i] = mine[i];
  flat.buffers.copy_from(Tensor::of(flat.backend(), flat.buffers.shape(), v, flat.buffers.dtype()));
}

bool Replicas::saves_after_failure() {
  const std::vector<int> left = communicator_->group()->survivors();
  const int twice = 2 * int(left.size());
  return !left.empty() && left[0] == rank() && (twice > size() || (twice == size() && rank() == 0));
}

void Replicas::compare(Communicator& over, std::uint64_t mine, const std::string& what) {
  const auto all = gather_texts(over, std::to_string(mine));
  for (std::size_t r = 1; r < all.size(); r++)
    if (all[r] != all[0]) fail(over.where(0), " and ", over.where(int(r)), " ", what);
}

void Replicas::compare_layouts(const FlatParameters& flat, std::uint64_t kind) {
  const char* what = "do not train the same model: start all ranks with the same program and options";
  auto number = [&](OwnerClass owner) {
    std::uint64_t h = kind;
    for (const Range& r : flat.ranges(owner))  // the ranges that are exchanged
      h = (h * 31 + std::uint64_t(r.begin)) * 31 + std::uint64_t(r.end);
    return flat.layout_hash(owner) + h;
  };
  const Slice mine = flat.slice();
  compare(*communicator_, number(OwnerClass::replicated) + std::uint64_t(mine.count) * 0x9E3779B97F4A7C15u, what);
  slices_ = same_slice_ = nullptr;
  if (mine.count == 1) return;
  if (ranks_.per_step < mine.count)
    refuse(name(),
           ": each rank makes steps of its own, and the slices of a layer that is cut over ranks must step together: ",
           "choose all-reduce");
  const std::vector<double> index = gather_numbers(*communicator_, {double(mine.index)});
  for (int i = 0; i < mine.count; i++)
    if (const auto ranks = std::ranges::count(index, i); ranks * mine.count != size())
      fail("the model is cut into ", mine.count, " slices, and slice ", i, " is on ", ranks, " of ", size(),
           " ranks: every slice must be on as many ranks as the others");
  slices_ = communicator_->split(int(std::count(index.begin(), index.begin() + rank(), mine.index)), mine.index);
  same_slice_ = communicator_->split(mine.index, rank());
  compare(*same_slice_, number(OwnerClass::slice), what);
}

void add_norms(Communicator& over, Optimizer& optimizer) {
  Tensor& sums = optimizer.sums();
  std::vector<double> all = sums.values();
  over.all_reduce(buffer(all)).wait();
  sums.copy_from(Tensor::of(sums.backend(), sums.shape(), all, sums.dtype()));
}

void Replicas::compare_parameters(const FlatParameters& flat, std::int64_t steps) {
  auto checksum = [&](const Range& range) {
    Tensor values = part(flat.values, range);
    OnHost host;
    const Buffer bytes = host.download(values);
    Checksum sum;
    sum.add(bytes.data, bytes.bytes());
    return sum.value();
  };
  flat.backend().synchronize();
  const std::string what = "no longer have the same parameters (after " + std::to_string(steps) +
                           " steps): they run different programs, or a machine computes wrongly";
  compare(*communicator_, checksum(flat.all(OwnerClass::replicated)), what);
  if (same_slice_) compare(*same_slice_, checksum(flat.all(OwnerClass::slice)), what);
}

Measures Replicas::measured(const Reducer& reducer, std::uint64_t sent, std::int64_t bucket) {
  const auto [hidden, exposed] = reducer.seconds();
  const double all = hidden + exposed;
  return {{"sent_bytes", double(sent)},
          {"exchange_seconds", all},
          {"exposed_seconds", exposed},
          {"hidden_share", all > 0 ? 1 - exposed / all : 0},
          {"bucket_bytes", double(bucket)}};
}

}  // namespace tandem
