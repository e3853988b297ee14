// The loader: shuffles, cuts the epoch into batches, shares them among ranks, augments, normalises, and works ahead.
//
// Random numbers are functions of counters. The shuffle depends on (seed, epoch), the crop and the flip of a picture on
// (seed, epoch, picture), and neither on ranks, threads, prefetching or resumption. Any batch can be made again, bit
// for bit. Mixup (Zhang et al. 2018) mixes pictures 2i and 2i + 1 of a batch, which are independent after the shuffle,
// with a proportion drawn from (seed, epoch, batch). All ranks draw the same proportion. Ranks with shares of even size
// mix the same pairs as one rank would; the last picture of an odd share is not mixed.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "core/backend.h"
#include "core/batch.h"
#include "core/random.h"
#include "core/trace/trace.h"
#include "datasets/dataset.h"

namespace tandem {

struct Augment {
  int pad_crop = 0;   // surround with this many black pixels, then cut the old size out of it at random
  bool flip = false;  // mirror left and right, with probability one half
  int cutout = 0;     // side of a square around a random pixel that is set to the mean (DeVries and Taylor 2017)
  // With pad_crop: surround with the picture's own reflection, which leaves out its edge, not with black
  bool reflect = false;
  bool alternate = false;  // with flip: mirrored in every other epoch instead, which half of them first is drawn once

  // The usual recipe for pictures of this side: 4 pixels up to 32 × 32, an eighth of the side above, and flips.
  static Augment usual(int side) { return {.pad_crop = std::min(std::max(4, side / 8), side - 1), .flip = true}; }
};

struct LoaderOptions {
  std::int64_t batch = 128;         // pictures in a batch, of which each rank has its share
  std::int64_t batch_per_rank = 0;  // above 0, instead of batch: so many for each rank
  DType dtype = DType::f32;         // or bf16
  bool shuffle = true;
  Augment augment = {};
  double mixup = 0;        // α of Beta(α, α), at most 4; 0: pictures stay as they are
  bool drop_last = false;  // leave out the pictures that do not fill a last batch
  std::uint64_t seed = 0;
  int rank = 0, world = 1;
  int prefetch = 2;  // batches a thread makes ahead; 0: made by next(), on the backend's threads
  std::function<void(Batch&)> transform = {};  // changes each batch once it is made, in the thread that made it
};

// How an epoch of n pictures is divided into batches. Each batch has `batch` pictures, the last one the remaining ones.
// Each rank takes a contiguous share of a batch; shares differ by at most one picture. No share is empty: a last batch
// with fewer pictures than ranks takes some from the batch before it, or is left out when that one is too small.
struct Cut {
  Cut(std::int64_t pictures, std::int64_t batch, int world, bool drop_last);
  std::int64_t batches = 0;                  // 0: fewer pictures than ranks, or, with drop_last, than a batch
  std::int64_t begin(std::int64_t k) const;  // position in the shuffled epoch where batch k begins; k ≤ batches
  std::pair<std::int64_t, std::int64_t> share(std::int64_t k, int rank) const;  // positions [first, second)

 private:
  std::int64_t pictures_, batch_;
  int world_;
};

// The order of n pictures in an epoch: the same for every rank.
std::vector<std::int32_t> shuffled(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

// Where a picture is cut out of its padded self: output (y, x) shows input (y + dy, x' + dx), where x' is x or, when it
// is mirrored, w − 1 − x.
struct Crop {
  std::int32_t dy, dx;
  bool flip;
};
TANDEM_HD inline Crop draw_crop(const Augment& a, std::uint64_t seed, std::uint32_t epoch, std::int32_t sample) {
  Words r = Philox(seed, Stream::augment, epoch, std::uint32_t(sample)).block(0);
  if (a.alternate) r.w[2] = Philox(seed, Stream::augment, 0, std::uint32_t(sample)).block(0).w[2] ^ (epoch << 31);
  std::uint64_t choices = 2 * std::uint64_t(a.pad_crop) + 1;
  return {std::int32_t((r.w[0] * choices) >> 32) - a.pad_crop, std::int32_t((r.w[1] * choices) >> 32) - a.pad_crop,
          a.flip && (r.w[2] >> 31)};
}

// The index in [0, n) that index i refers to when a picture is extended by its reflection; −n < i < 2n − 1.
TANDEM_HD inline std::int64_t reflected(std::int64_t i, std::int64_t n) {
  return i < 0 ? -i : i < n ? i : 2 * (n - 1) - i;
}

// The square that cutout blanks: rows [top, bottom) and columns [left, right), cut off where it leaves the picture.
struct Square {
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;
};
TANDEM_HD inline Square draw_cutout(const Augment& a, std::uint64_t seed, std::uint32_t epoch, std::int32_t sample,
                                    std::int64_t height, std::int64_t width) {
  Words r = Philox(seed, Stream::augment, epoch, std::uint32_t(sample)).block(1);
  std::int64_t top = std::int64_t((r.w[0] * std::uint64_t(height)) >> 32) - a.cutout / 2, bottom = top + a.cutout;
  std::int64_t left = std::int64_t((r.w[1] * std::uint64_t(width)) >> 32) - a.cutout / 2, right = left + a.cutout;
  return {top > 0 ? top : 0, bottom < height ? bottom : height, left > 0 ? left : 0, right < width ? right : width};
}

// The proportion in which batch `batch` of an epoch is mixed: the larger of λ and 1 − λ, λ from Beta(alpha, alpha).
// Mixing both pictures of a pair, λ and 1 − λ give the same two results.
double draw_share(double alpha, std::uint64_t seed, std::uint32_t epoch, std::uint32_t batch);

// Making one batch (loader.kernel.cpp). Pointers are of the backend's memory.
struct BatchWork {
  const std::uint8_t* pictures = nullptr;
  const std::int32_t *labels = nullptr, *order = nullptr;  // of the whole set; the pictures that make up the batch
  std::int64_t height = 0, width = 0, channels = 0;
  Augment augment;
  std::uint64_t seed = 0;
  std::uint32_t epoch = 0;
  float mean[4] = {}, inverse[4] = {};  // y = (byte − mean) · inverse
};
// By host threads, a picture at a time; or, with threads = 0, by launch(), a pixel at a time, as a device does it.
// Both give the same bits.
void make_batch(Backend& backend, const BatchWork& work, Batch& batch, int threads);
// Mixes pairs of pictures in place, batch.share of one with the rest of the other, and sets batch.other_labels.
void mix_pairs(Backend& backend, Batch& batch);

// For use by one thread. On a backend with on_device() the pictures are copied to the device once, and next() queues
// one kernel that makes the batch there. That does not wait, so `prefetch` is ignored.
class Loader final : public BatchSource {
 public:
  // Throws when the pictures do not fit together, or when the options make no batch at all.
  Loader(const Pictures& pictures, LoaderOptions options, Backend& backend);
  ~Loader() override;
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Begins an epoch, at batch `first` of it when resuming; ends the one that was under way.
  void start(std::int64_t epoch, std::int64_t first = 0) override;
  // The next batch, or false at the end of the epoch. The batch is valid until the next call of next() or start(): its
  // memory is then filled anew (clone() what must stay). Rethrows what went wrong in the thread.
  bool next(Batch& batch) override;
  void rest() override;
  // Batch `index` of any epoch once more, in memory of its own. May be called while an epoch is under way; the last
  // epoch's order is kept, so that the batches of one in turn cost one shuffle.
  Batch make(std::int64_t epoch, std::int64_t index) override;
  void make_ahead(std::int64_t epoch, std::int64_t index) override;  // in a thread of its own, unless prefetch is 0
  // This rank's part from the next start() on. Throws when the pictures make no batch for so many ranks.
  void share(int rank, int world) override;

  bool grows_with_ranks() const override { return options_.batch_per_rank > 0; }
  std::int64_t batches_per_epoch() const override { return cut_.batches; }
  std::int64_t pictures_per_epoch() const override { return cut_.begin(cut_.batches); }  // over all ranks
  std::map<std::string, std::string> description() const override { return tandem::description(pictures_); }
  const Pictures& pictures() const { return pictures_; }
  const LoaderOptions& options() const { return options_; }

 private:
  void halt();
  Batch make_here(std::int64_t epoch, std::int64_t index);
  void work_ahead(std::int64_t first, Trace* trace);
  void order_epoch(std::vector<std::int32_t>& order, std::int64_t epoch) const;
  Batch allocate() const;
  void take_memory();
  void fill(Batch& out, const Batch& memory, const std::int32_t* order, std::int64_t epoch, std::int64_t index,
            int threads);

  Pictures pictures_;
  LoaderOptions options_;
  Backend& backend_;
  Cut cut_;
  std::int64_t most_ = 0;   // pictures of a batch that a share of this rank may have
  Tensor images_, labels_;  // where make_batch reads them: pictures_' own, or copies on the device
  Tensor device_order_;     // i32 [N], on a device only
  std::vector<std::int32_t> order_;
  const std::int32_t* order_pointer_ = nullptr;
  std::int64_t epoch_ = -1;
  std::vector<std::int32_t> made_order_;  // of the epoch that make() was last asked for
  std::int64_t made_epoch_ = -1;
  bool made_one_ = false;             // by make()
  std::vector<Batch> memory_, ring_;  // batch k is made in memory_[k % size]; ring_ has what was made

  // Batches [released_, given_) belong to the caller, [given_, made_) are ready. While a thread runs, the mutex guards
  // these numbers, stop_ and error_.
  std::int64_t made_ = 0, given_ = 0, released_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::thread thread_;
  std::future<Batch> ahead_;  // last: it is waited for first
};

}  // namespace tandem
