#include "datasets/loader.h"

#include <chrono>
#include <cmath>

namespace tandem {

// ---- the epoch ------------------------------------------------------------------------------------------------------
std::vector<std::int32_t> epoch_order(std::int64_t n, bool shuffle, std::uint64_t seed, std::int64_t epoch) {
  return permutation(n, Philox(seed, Stream::shuffle, std::uint32_t(epoch)), shuffle ? n : 0);
}

Cut::Cut(std::int64_t pictures, std::int64_t batch, int world, bool drop_last)
    : pictures_(pictures), batch_(batch), world_(world) {
  // The last batch may lack world − 1 pictures; the one before can give up at most batch − world
  bool left_out = drop_last || batch < 2 * world - 1;
  batches = left_out ? pictures / batch : (pictures + batch - 1) / batch;
  if (pictures < world) batches = 0;
  if (left_out) pictures_ = batches * batch;
}

std::int64_t Cut::begin(std::int64_t k) const {
  if (k >= batches) return batches ? pictures_ : 0;
  return k == batches - 1 ? std::min(k * batch_, pictures_ - world_) : k * batch_;
}

std::pair<std::int64_t, std::int64_t> Cut::share(std::int64_t k, int rank) const {
  std::int64_t first = begin(k), size = begin(k + 1) - first;
  return {first + size * rank / world_, first + size * (rank + 1) / world_};
}

// Jöhnk 1964: for uniform u and v with u^(1/α) + v^(1/α) ≤ 1, u^(1/α) divided by that sum is Beta(α, α). Computed in
// logarithms, since the powers underflow for a small α.
double draw_share(double alpha, std::uint64_t seed, std::uint32_t epoch, std::uint32_t batch) {
  Philox random(seed, Stream::mixup, epoch, batch);
  for (std::uint32_t i = 0;; i++) {
    Words r = random.block(i);
    double x = std::log(1 - double(uniform(r.w[0]))) / alpha, y = std::log(1 - double(uniform(r.w[1]))) / alpha;
    double high = std::max(x, y), low = std::min(x, y);
    if (high + std::log1p(std::exp(low - high)) <= 0) return 1 / (1 + std::exp(low - high));
  }
}

// ---- the loader -----------------------------------------------------------------------------------------------------
namespace {
// The trace of the calling thread. The loader's threads write to separate lanes of it.
Trace* trace_here() { return thread_lane() ? &thread_lane()->trace() : nullptr; }
}  // namespace

BatchWork batch_work(const Pictures& p, const Tensor& images, const Tensor& labels, const LoaderOptions& options) {
  BatchWork work{.pictures = images.data<std::uint8_t>(),
                 .labels = labels.data<std::int32_t>(),
                 .height = p.height(),
                 .width = p.width(),
                 .channels = p.channels(),
                 .augment = options.augment,
                 .seed = options.seed};
  for (std::int64_t c = 0; c < work.channels; c++) {
    work.mean[c] = 255 * p.mean[c];
    work.inverse[c] = 1 / (255 * p.std[c]);
  }
  return work;
}

Loader::Loader(const Pictures& pictures, LoaderOptions options, Backend& backend, const Loader* whole)
    : pictures_(pictures), options_(std::move(options)), backend_(backend), cut_(1, 1, 1, false) {
  check(pictures_);
  const LoaderOptions& o = options_;
  const std::string who = "loader of " + pictures_.name;
  const std::int64_t side = std::min(pictures_.height(), pictures_.width());
  require(o.batch > 0 && o.batch_per_rank >= 0, who, ": a batch of ", std::min(o.batch, o.batch_per_rank), " pictures");
  require(o.prefetch >= 0 && o.prefetch <= 64, who, ": prefetch is ", o.prefetch, ", expected 0 to 64");
  require(o.dtype != DType::u8 && o.dtype != DType::i32, who, ": batches of ", name_of(o.dtype),
          ", expected f32, bf16 or f16");
  require(backend.supports(o.dtype), who, ": the ", backend.name(), " backend has no ", name_of(o.dtype),
          " on this machine: use f32");
  require(o.augment.pad_crop >= 0 && o.augment.pad_crop < side, who, ": cropping after padding by ", o.augment.pad_crop,
          " pixels, expected less than the picture's ", side);
  if (o.augment.cutout < 0 || o.augment.cutout > side)
    refuse(who, ": a cutout of ", o.augment.cutout, " pixels, expected at most the picture's ", side);
  require(o.mixup >= 0 && o.mixup <= 4, who, ": mixup's alpha is ", o.mixup, ", expected 0 to 4");
  images_ = pictures_.images;
  labels_ = pictures_.labels;
  if (backend.on_device()) {
    options_.prefetch = 0;
    MemoryUse use(Use::data);
    images_ = whole ? whole->images_ : pictures_.images.to(backend);
    labels_ = whole ? whole->labels_ : pictures_.labels.to(backend);
    device_order_ = Tensor(backend, {count()}, DType::i32);
  }
  work_ = batch_work(pictures_, images_, labels_, options_);
  share(o.rank, o.world);
}

std::vector<Part> Loader::all_parts(int workers) const {
  const std::span<const std::int32_t> labels(pictures_.labels.data<std::int32_t>(), std::size_t(pictures_.count()));
  return parts_of(options_.partition, labels, pictures_.classes, workers, options_.seed);
}

Parts Loader::parts(int workers) const {
  if (options_.partition.kind == Partition::Kind::shared) return {};
  Parts parts{.name = options_.partition.name() + " among " + std::to_string(workers) + " workers",
              .batch = options_.batch,
              .seed = options_.seed};
  for (const Part& part : all_parts(workers)) {
    parts.pictures.emplace_back(std::size_t(pictures_.classes));
    for (std::int32_t i : part) parts.pictures.back()[std::size_t(pictures_.labels.data<std::int32_t>()[i])]++;
  }
  return parts;
}

std::unique_ptr<BatchSource> Loader::part(int worker, int workers, int shares) const {
  if (options_.partition.kind == Partition::Kind::shared) return nullptr;
  LoaderOptions own = options_;
  own.only = std::move(all_parts(workers)[std::size_t(worker)]);
  own.batch = (own.batch + shares - 1) / shares;
  own.drop_last = false;
  return std::make_unique<Loader>(pictures_, std::move(own), backend_, this);
}

void Loader::share(int rank, int world) {
  halt();
  const std::string who = "loader of " + pictures_.name;
  LoaderOptions& o = options_;
  require(world > 0 && rank >= 0 && rank < world, who, ": rank ", rank, " of ", world);
  const std::int64_t batch = o.batch_per_rank > 0 ? o.batch_per_rank * world : o.batch;
  if (batch < world)
    refuse("--batch ", batch, " over ", world,
           " ranks: a rank would have no picture: use a larger --batch, or fewer ranks");
  o.rank = rank;
  o.world = world;
  cut_ = Cut(count(), batch, world, o.drop_last);
  if (cut_.batches == 0)
    refuse(who, ": ", count(), " pictures do not fill a batch of ", o.drop_last ? batch : world,
           world > 1 ? " over all ranks" : "", ": use a smaller ",
           o.batch_per_rank > 0 ? "--batch-per-rank" : "--batch", " or --val", world > 1 ? ", or fewer ranks" : "");
  most_ = (std::min(batch, count()) + world - 1) / world;
  epoch_ = -1;
  order_.clear();
  memory_.clear();
  if (backend_.on_device()) take_memory();  // kept permanently: a recorded step reads its batch there
}

Batch Loader::allocate() const {
  MemoryUse use(Use::data);
  Batch m;
  m.images = Tensor(backend_, {most_, pictures_.height(), pictures_.width(), pictures_.channels()}, options_.dtype);
  m.labels = Tensor(backend_, {most_}, DType::i32);
  m.samples = Tensor(backend_, {most_}, DType::i32);
  if (options_.mixup > 0) m.other_labels = Tensor(backend_, {most_}, DType::i32);
  return m;
}

void Loader::take_memory() {
  for (int i = 0; i <= options_.prefetch; i++) memory_.push_back(allocate());  // one more for the caller
  ring_.assign(memory_.size(), {});
}

void Loader::rest() {
  if (backend_.on_device() || backend_.records()) return;
  halt();
  made_ = given_ = cut_.batches;
  memory_.clear();
  ring_.clear();
}

std::vector<std::int32_t> Loader::order_of(std::int64_t epoch) const {
  std::vector<std::int32_t> order = epoch_order(count(), options_.shuffle, options_.seed, epoch);
  for (std::int32_t& i : order) i = options_.only.empty() ? i : options_.only[std::size_t(i)];
  return order;
}

// `order` points to the batch's first picture. The batch is the used part of `memory`.
Batch Loader::fill(const Batch& memory, const std::int32_t* order, std::int64_t epoch, std::int64_t index,
                   int threads) {
  Span span("make batch", "op", nullptr, index);
  Batch out;
  auto [first, last] = cut_.share(index, options_.rank);
  std::int64_t b = last - first;
  out.images = memory.images.slice(0, b);
  out.labels = memory.labels.slice(0, b);
  out.samples = memory.samples.slice(0, b);
  out.index = index;
  out.epoch = epoch;
  out.global = cut_.begin(index + 1) - cut_.begin(index);

  BatchWork work = work_;
  work.order = order;
  work.epoch = std::uint32_t(epoch);
  make_batch(backend_, work, out, threads);
  if (options_.mixup > 0) {
    out.share = draw_share(options_.mixup, options_.seed, std::uint32_t(epoch), std::uint32_t(index));
    out.other_labels = memory.other_labels.slice(0, b);
    mix_pairs(backend_, out);
  }
  if (options_.transform) options_.transform(out);
  return out;
}

void Loader::start(std::int64_t epoch, std::int64_t first) {
  require(epoch >= 0 && epoch <= UINT32_MAX && first >= 0 && first <= cut_.batches, "loader of ", pictures_.name,
          ": cannot start epoch ", epoch, " at batch ", first, " of ", cut_.batches);
  halt();
  if (memory_.empty()) take_memory();
  if (epoch != epoch_ || order_.empty()) order_ = order_of(epoch);
  order_pointer_ = order_.data();
  if (backend_.on_device()) {
    backend_.upload(device_order_.raw_write(), order_.data(), device_order_.bytes());
    order_pointer_ = device_order_.data<std::int32_t>();
  }
  epoch_ = epoch;
  made_ = given_ = first;
  error_ = nullptr;
  if (options_.prefetch > 0) thread_ = std::jthread(std::bind_front(&Loader::work_ahead, this), first, trace_here());
}

void Loader::halt() {
  ahead_ = {};   // waits for the batch that is made in advance
  thread_ = {};  // asks the thread to stop, and waits until it has finished its current batch
}

void Loader::work_ahead(std::stop_token stop, std::int64_t first, Trace* trace) {
  OnLane on(trace, "loader of " + pictures_.name);
  const std::size_t slots = memory_.size();
  try {
    for (std::int64_t k = first; k < cut_.batches; k++) {
      {
        std::unique_lock lock(mutex_);
        moved_.wait(lock, stop, [&] { return k < given_ + options_.prefetch; });
        if (stop.stop_requested()) return;
      }
      const std::size_t slot = std::size_t(k) % slots;
      ring_[slot] = fill(memory_[slot], order_pointer_ + cut_.share(k, options_.rank).first, epoch_, k, 1);
      std::lock_guard lock(mutex_);
      made_ = k + 1;
      moved_.notify_all();
    }
  } catch (...) {
    std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    moved_.notify_all();
  }
}

bool Loader::next(Batch& batch) {
  require(epoch_ >= 0, "loader of ", pictures_.name, ": call start(epoch) before next()");
  if (given_ == cut_.batches) return false;
  if (options_.prefetch == 0) {
    batch = fill(memory_[0], order_pointer_ + cut_.share(given_, options_.rank).first, epoch_, given_,
                 backend_.on_device() ? 0 : backend_.threads());
    given_++;
    return true;
  }
  Span span("wait for a batch", "wait", nullptr, given_);
  std::unique_lock lock(mutex_);
  bool arrived = moved_.wait_for(lock, std::chrono::seconds(300), [&] { return made_ > given_ || error_; });
  require(arrived, "loader of ", pictures_.name, ": no batch came for 300 s, at batch ", given_, " of epoch ", epoch_,
          ": is the transform stuck?");
  if (made_ == given_) std::rethrow_exception(error_);
  batch = ring_[std::size_t(given_++) % ring_.size()];
  moved_.notify_all();
  return true;
}

void Loader::make_ahead(std::int64_t epoch, std::int64_t index) {
  if (options_.prefetch == 0) return;
  ahead_ = {};  // one at a time
  ahead_ = std::async(std::launch::async, [this, epoch, index, trace = trace_here()] {
    OnLane on(trace, "loader of " + pictures_.name);
    return make_here(epoch, index);
  });
}

Batch Loader::make(std::int64_t epoch, std::int64_t index) {
  if (ahead_.valid()) {
    Span span("wait for a batch", "wait", nullptr, index);
    Batch made = ahead_.get();
    if (made.epoch == epoch && made.index == index) return made;
  }
  Batch made = make_here(epoch, index);
  // Raises the peak of Use::data, so that a memory budget counts the batch of make_ahead() from the first call on
  if (options_.prefetch > 0 && !std::exchange(made_one_, true)) allocate();
  return made;
}

Batch Loader::make_here(std::int64_t epoch, std::int64_t index) {
  require(epoch >= 0 && epoch <= UINT32_MAX && index >= 0 && index < cut_.batches, "loader of ", pictures_.name,
          ": there is no batch ", index, " in epoch ", epoch, ", which has ", cut_.batches);
  if (epoch != epoch_ && epoch != made_epoch_) {
    made_order_ = order_of(epoch);
    made_epoch_ = epoch;
  }
  auto [first, last] = cut_.share(index, options_.rank);
  const std::int32_t* order = (epoch == epoch_ ? order_ : made_order_).data() + first;
  Tensor device;  // freed after the kernel that reads it is queued
  if (backend_.on_device()) {
    device = Tensor(backend_, {last - first}, DType::i32);
    backend_.upload(device.raw_write(), order, device.bytes());
    order = device.data<std::int32_t>();
  }
  return fill(allocate(), order, epoch, index, backend_.on_device() ? 0 : 1);
}

}  // namespace tandem
