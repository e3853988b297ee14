// The loader: shuffles, divides the epoch into batches, shares them among ranks, augments, normalises, and prefetches.
//
// Random numbers are functions of counters. The shuffle depends on (seed, epoch), the crop and the flip of a picture on
// (seed, epoch, picture). Neither depends on ranks, threads, prefetching or resumption. Any batch can be made again,
// bit for bit. Mixup (Zhang et al. 2018) mixes pictures 2i and 2i + 1 of a batch, which are independent after the
// shuffle, with a proportion drawn from (seed, epoch, batch). All ranks draw the same proportion. Ranks with shares of
// even size mix the same pairs as one rank would; the last picture of an odd share is not mixed.
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
#include "datasets/partition.h"

namespace tandem {

struct Augment {
  int pad_crop = 0;   // pad with this many black pixels on each side, then crop to the old size at random
  bool flip = false;  // mirror left and right, with probability one half
  int cutout = 0;     // side of a square around a random pixel that is set to the mean (DeVries and Taylor 2017)
  // With pad_crop: pad with the picture's reflection, without its edge pixel, instead of black
  bool reflect = false;
  // With flip: a picture is mirrored in every other epoch instead; one random bit per picture selects the even or the
  // odd
  bool alternate = false;

  // The usual settings for pictures of this side: pad_crop of 4 pixels up to 32 × 32, an eighth of the side above;
  // flip.
  static Augment usual(int side) { return {.pad_crop = std::min(std::max(4, side / 8), side - 1), .flip = true}; }
};

struct LoaderOptions {
  std::int64_t batch = 128;         // pictures in a batch, of which each rank has its share
  std::int64_t batch_per_rank = 0;  // above 0: pictures for each rank, instead of batch
  DType dtype = DType::f32;         // or bf16, or f16 where the backend supports it
  bool shuffle = true;
  Augment augment = {};
  double mixup = 0;        // α of Beta(α, α), at most 4; 0: pictures are not mixed
  bool drop_last = false;  // leave out the pictures that do not fill a last batch
  std::uint64_t seed = 0;
  int rank = 0, world = 1;
  int prefetch = 2;          // batches that a thread makes in advance; 0: next() makes them, on the backend's threads
  Partition partition = {};  // among workers, each of which has a part() of the pictures
  Part only = {};            // draws from these pictures; empty: from all
  std::function<void(Batch&)> transform = {};  // changes each finished batch, in the thread that made it
};

// How an epoch of n pictures is divided into batches. Each batch has `batch` pictures, the last one the rest.
// Each rank takes a contiguous share of a batch; shares differ by at most one picture. No share is empty: a last batch
// with fewer pictures than ranks takes some from the batch before it, or is left out when that one is too small.
struct Cut {
  Cut(std::int64_t pictures, std::int64_t batch, int world, bool drop_last);
  std::int64_t batches = 0;                  // 0: fewer pictures than ranks, or with drop_last, than a batch
  std::int64_t begin(std::int64_t k) const;  // position in the shuffled epoch where batch k begins; k ≤ batches
  std::pair<std::int64_t, std::int64_t> share(std::int64_t k, int rank) const;  // positions [first, second)

 private:
  std::int64_t pictures_, batch_;
  int world_;
};

// The order of n pictures in an epoch: the same for every rank.
std::vector<std::int32_t> epoch_order(std::int64_t n, bool shuffle, std::uint64_t seed, std::int64_t epoch);

// The crop of a padded picture: output (y, x) is input (y + dy, x' + dx), where x' is x or, if the picture is mirrored,
// w − 1 − x.
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

// The index in [0, n) that index i refers to in a picture extended by its reflection; −n < i < 2n − 1.
TANDEM_HD inline std::int64_t reflected(std::int64_t i, std::int64_t n) {
  return i < 0 ? -i : i < n ? i : 2 * (n - 1) - i;
}

// The square that cutout blanks: rows [top, bottom) and columns [left, right), limited to the picture.
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

// The proportion for mixup in batch `batch` of an epoch: the larger of λ and 1 − λ, λ from Beta(alpha, alpha). Since
// both pictures of a pair are mixed, λ and 1 − λ give the same two results.
double draw_share(double alpha, std::uint64_t seed, std::uint32_t epoch, std::uint32_t batch);

// The data for making one batch (loader.kernel.cpp). Pointers are to the backend's memory.
struct BatchWork {
  const std::uint8_t* pictures = nullptr;
  const std::int32_t *labels = nullptr, *order = nullptr;  // of the whole set; indices of the batch's pictures
  std::int64_t height = 0, width = 0, channels = 0;
  Augment augment;
  std::uint64_t seed = 0;
  std::uint32_t epoch = 0;
  float mean[4] = {}, inverse[4] = {};  // y = (byte − mean) · inverse
};
// For pictures whose bytes and labels are in the backend's memory. The caller sets order and epoch.
BatchWork batch_work(const Pictures& pictures, const Tensor& images, const Tensor& labels,
                     const LoaderOptions& options);
// Makes the batch with host threads, a picture at a time, or, if threads = 0, with launch(), a pixel at a time, as on a
// device. Both give the same bits.
void make_batch(Backend& backend, const BatchWork& work, Batch& batch, int threads);
// Mixes pairs of pictures in place, with weights batch.share and 1 − batch.share, and sets batch.other_labels.
void mix_pairs(Backend& backend, Batch& batch);

// For use by one thread. On a backend with on_device() the pictures are copied to the device once, and next() queues
// one kernel that makes the batch there. next() then does not wait, so `prefetch` is ignored.
class Loader final : public BatchSource {
 public:
  // Throws when the pictures are not consistent, or when the options give no batch.
  // whole: a loader of the same pictures, which are on the device already.
  Loader(const Pictures& pictures, LoaderOptions options, Backend& backend, const Loader* whole = nullptr);

  // Begins an epoch, at its batch `first` when resuming. Ends the current epoch.
  void start(std::int64_t epoch, std::int64_t first = 0) override;
  // The next batch, or false at the end of the epoch. The batch is valid until the next call of next() or start(),
  // which overwrites its memory (clone() tensors that must stay). Rethrows an exception of the prefetch thread.
  bool next(Batch& batch) override;
  void rest() override;
  // Makes batch `index` of any epoch again, in separate memory. May be called during an epoch. The order of the last
  // epoch is kept, so that making successive batches of one epoch costs one shuffle.
  Batch make(std::int64_t epoch, std::int64_t index) override;
  void make_ahead(std::int64_t epoch, std::int64_t index) override;  // in a separate thread, unless prefetch is 0
  // Sets this rank's part from the next start() on. Throws when the pictures give no batch for this number of ranks.
  void share(int rank, int world) override;

  bool grows_with_ranks() const override { return options_.batch_per_rank > 0; }
  std::int64_t batches_per_epoch() const override { return cut_.batches; }
  std::int64_t pictures_per_epoch() const override { return cut_.begin(cut_.batches); }  // over all ranks
  Parts parts(int workers) const override;
  std::unique_ptr<BatchSource> part(int worker, int workers, int shares) const override;
  std::map<std::string, std::string> description() const override { return tandem::description(pictures_); }
  const Pictures& pictures() const { return pictures_; }
  const LoaderOptions& options() const { return options_; }

 private:
  void halt();
  std::int64_t count() const { return options_.only.empty() ? pictures_.count() : std::int64_t(options_.only.size()); }
  std::vector<Part> all_parts(int workers) const;
  std::vector<std::int32_t> order_of(std::int64_t epoch) const;
  Batch make_here(std::int64_t epoch, std::int64_t index);
  void work_ahead(std::stop_token stop, std::int64_t first, Trace* trace);
  Batch allocate() const;
  void take_memory();
  Batch fill(const Batch& memory, const std::int32_t* order, std::int64_t epoch, std::int64_t index, int threads);

  Pictures pictures_;
  LoaderOptions options_;
  Backend& backend_;
  Cut cut_;
  std::int64_t most_ = 0;   // largest number of pictures in this rank's share of a batch
  Tensor images_, labels_;  // read by make_batch(): those of pictures_, or copies on the device
  BatchWork work_;
  Tensor device_order_;  // i32 [N], on a device only
  std::vector<std::int32_t> order_;
  const std::int32_t* order_pointer_ = nullptr;
  std::int64_t epoch_ = -1;
  std::vector<std::int32_t> made_order_;  // of the epoch of the last make()
  std::int64_t made_epoch_ = -1;
  bool made_one_ = false;             // make() was called
  std::vector<Batch> memory_, ring_;  // batch k is made in memory_[k % size]; ring_ has the finished batches

  // Batch given_ − 1 belongs to the caller, [given_, made_) are ready. While a thread runs, the mutex guards these
  // numbers and error_.
  std::int64_t made_ = 0, given_ = 0;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable_any moved_;
  // The last members: the destructor waits for them first
  std::jthread thread_;
  std::future<Batch> ahead_;
};

}  // namespace tandem
