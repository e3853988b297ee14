#include "dist/strategies/machine_share.h"

#include <cmath>
#include <cstring>
#include <sstream>

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
  broadcast({n, 2, DType::f64});
  return {std::int64_t(n[0]), std::int64_t(n[1])};
}

std::vector<std::string> MachineShare::gather(const std::string& mine) { return gather_texts(*on_host_, mine); }

std::vector<std::string> MachineShare::gather(const std::string& mine, const Gather& among_leaders) {
  if (size() == 1) return among_leaders(mine);
  const auto here = gather(bundle({std::to_string(rank()), mine}));
  const std::string everywhere = gather_texts(*on_host_, leads() ? bundle(among_leaders(bundle(here))) : "")[0];
  std::vector<std::string> all(static_cast<std::size_t>(job_size_));
  for (const std::string& machine : unbundle(everywhere)) {
    if (machine.empty()) continue;  // the machine is lost
    for (const std::string& text : unbundle(machine)) {
      const auto said = unbundle(text);
      all[std::stoul(said[0])] = said[1];
    }
  }
  return all;
}

void MachineShare::begin(FlatParameters& flat) {
  if (size() == 1) return;
  const std::int64_t n = flat.all(OwnerClass::replicated).end, blocks = n / FlatParameters::alignment;
  const Slice slice = flat.slice();
  std::ostringstream mine;
  mine << flat.layout_hash(OwnerClass::replicated) << ' ' << slice.count;
  for (const std::string& theirs : gather_texts(*on_host_, mine.str()))
    require(theirs == mine.str(),
            "the ranks of a machine do not train the same model: start all with the same program and options");
  if (slice.count > 1 && (slice.count != size() || slice.index != place()))
    fail("slice ", slice.index, " of ", slice.count, " on rank ", place(), " of ", size(),
         " of a machine: layers must be cut over "
         "the ranks of a machine, in their order");
  cuts_.clear(), ranges_.clear();
  for (int r = 0; r <= size(); r++) cuts_.push_back(blocks * r / size() * FlatParameters::alignment);
  const Range piece{cuts_[std::size_t(place())], cuts_[std::size_t(place()) + 1]}, slices = flat.all(OwnerClass::slice);
  for (const Range& r : {piece, slices})
    if (r.length() > 0) ranges_.push_back(r);
  if (ranges_.empty())
    refuse("the model's ", n, " parameters are too few for ", size(), " ranks of a machine: start fewer");
  OnHost values, buffers;
  broadcast(replicated(values.download(flat.values)));
  values.upload(flat.values);
  if (flat.buffers.numel() > 0) broadcast(buffers.download(flat.buffers)), buffers.upload(flat.buffers);
  flat.count_writes(flat.all());
}

std::int64_t MachineShare::part_numel() const {
  std::int64_t n = 0;
  for (const Range& r : ranges_) n += r.length();
  return n;
}

Buffer MachineShare::pack(Buffer vector, std::vector<std::byte>& memory) const {
  const Buffer part = room(vector, memory);
  if (size() == 1) return part;
  std::byte* to = memory.data();
  for (const Range& r : ranges_) {
    const std::size_t bytes = std::size_t(r.length()) * size_of(vector.dtype);
    std::memcpy(to, vector.at(r.begin), bytes);
    to += bytes;
  }
  return part;
}

Buffer MachineShare::room(Buffer vector, std::vector<std::byte>& memory) const {
  if (size() == 1) return vector;
  memory.resize(std::size_t(part_numel()) * size_of(vector.dtype));
  return {memory.data(), part_numel(), vector.dtype};
}

std::vector<float> MachineShare::pack_scales(const std::vector<float>& scales) const {
  if (size() == 1) return scales;
  std::vector<float> part;
  for (const Range& r : ranges_)
    part.insert(part.end(), scales.begin() + r.begin / FlatParameters::alignment,
                scales.begin() + r.end / FlatParameters::alignment);
  return part;
}

void MachineShare::unpack(const std::vector<std::byte>& part, Buffer vector) {
  if (size() == 1) return;
  const std::byte* from = part.data();
  for (const Range& r : ranges_) {
    const std::size_t bytes = std::size_t(r.length()) * size_of(vector.dtype);
    std::memcpy(vector.at(r.begin), from, bytes);
    from += bytes;
  }
  on_host_->all_gather(replicated(vector), cuts_).wait();
}

bool MachineShare::combine(Step& step, OnHost& gradients, FlatParameters& flat, Optimizer& optimizer) {
  double* const numbers[] = {&step.not_finite, &step.stops,        &step.samples,     &step.next_lease,
                             &step.sums.loss,  &step.sums.correct, &step.sums.samples};
  std::vector<double> all;
  for (const double* n : numbers) all.push_back(*n);
  on_host_->all_reduce(buffer(all)).wait();
  for (std::size_t i = 0; i < all.size(); i++) *numbers[i] = all[i];

  on_host_->reduce_scatter(replicated(gradients.download(flat.gradients)), Combine::sum, cuts_).wait();
  gradients.upload(flat.gradients);
  for (std::size_t i = 0; i < ranges_.size(); i++) optimizer.measure(ranges_[i], i > 0);
  std::vector<double> norms = optimizer.sums().values();
  on_host_->all_reduce(buffer(norms)).wait();
  optimizer.sums().copy_from(Tensor::of(flat.backend(), optimizer.sums().shape(), norms, optimizer.sums().dtype()));
  const Tensor loss = Tensor::full(flat.backend(), {1}, step.not_finite > 0 ? std::nan("") : 0, flat.values.dtype());
  optimizer.check_gradients(&loss);
  const bool finite = optimizer.read_state().not_finite == 0;
  if (finite)
    for (const Range& r : ranges_) optimizer.finish_gradients(r);
  return finite;
}

}  // namespace tandem
