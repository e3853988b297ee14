// One pass from the set's bytes to a batch: gather, crop, mirror, normalise, convert.
#include <cstring>

#include "core/launch.h"
#include "datasets/loader.h"

namespace tandem {
namespace {

template <class T>
struct MakeBatch : BatchWork {
  T* y;
  std::int32_t *y_labels, *samples;

  // A difference and a product cannot be fused into one rounding, so every machine gives the same bits.
  TANDEM_HD T normalise(std::uint8_t v, std::int64_t c) const { return T((float(v) - mean[c]) * inverse[c]); }

  // One pixel of the batch: the work of a device thread.
  TANDEM_HD void operator()(std::int64_t i) const {
    std::int64_t p = i / (height * width), row = i / width % height, column = i % width;
    std::int32_t sample = order[p];
    Crop crop = draw_crop(augment, seed, epoch, sample);
    std::int64_t from_row = row + crop.dy, from_column = (crop.flip ? width - 1 - column : column) + crop.dx;
    if (augment.reflect) from_row = reflected(from_row, height), from_column = reflected(from_column, width);
    bool inside = from_row >= 0 && from_row < height && from_column >= 0 && from_column < width;
    const std::uint8_t* x = pictures + ((sample * height + from_row) * width + from_column) * channels;
    Square s = augment.cutout ? draw_cutout(augment, seed, epoch, sample, height, width) : Square();
    bool blank = row >= s.top && row < s.bottom && column >= s.left && column < s.right;
    for (std::int64_t c = 0; c < channels; c++) y[i * channels + c] = blank ? T(0.f) : normalise(inside ? x[c] : 0, c);
    if (row == 0 && column == 0) {
      y_labels[p] = labels[sample];
      samples[p] = sample;
    }
  }

  // One picture of the batch: the work of a host thread. The crop is drawn once, rows are copied as bytes, and the
  // bytes, still in the L1 cache, are converted in one loop without branches.
  void picture(std::int64_t p, std::uint8_t* scratch) const {
    std::int32_t sample = order[p];
    std::int64_t numel = height * width * channels;
    const std::uint8_t* x = pictures + sample * numel;
    y_labels[p] = labels[sample];
    samples[p] = sample;
    if (augment.pad_crop || augment.flip) {
      Crop crop = draw_crop(augment, seed, epoch, sample);
      if (crop.dy || crop.dx || crop.flip) {
        cut_out(x, crop, scratch);
        x = scratch;
      }
    }
    convert(x, numel, y + p * numel);
    if (!augment.cutout) return;
    Square s = draw_cutout(augment, seed, epoch, sample, height, width);
    for (std::int64_t row = s.top; row < s.bottom; row++) {
      T* begin = y + p * numel + row * width * channels;
      std::fill(begin + s.left * channels, begin + s.right * channels, T(0.f));
    }
  }

  void cut_out(const std::uint8_t* x, Crop crop, std::uint8_t* out) const {
    // Columns [begin, end) of the output, before mirroring, lie inside the picture; the rest is black, or its
    // reflection.
    const std::int64_t begin = std::max<std::int64_t>(0, -crop.dx), end = std::min(width, width - crop.dx);
    const std::int64_t left = crop.flip ? width - end : begin, inside = end - begin;
    for (std::int64_t row = 0; row < height; row++, out += width * channels) {
      const std::int64_t from_row = augment.reflect ? reflected(row + crop.dy, height) : row + crop.dy;
      if (from_row < 0 || from_row >= height) {
        std::memset(out, 0, width * channels);
        continue;
      }
      const std::uint8_t* line = x + from_row * width * channels;
      border(line, crop, 0, left, out);
      border(line, crop, left + inside, width, out);
      const std::uint8_t* from = line + (begin + crop.dx) * channels;
      std::uint8_t* to = out + left * channels;
      if (!crop.flip)
        std::memcpy(to, from, inside * channels);
      else if (channels == 1)
        mirror<1>(from, inside, to);
      else if (channels == 3)
        mirror<3>(from, inside, to);
      else if (channels == 2)
        mirror<2>(from, inside, to);
      else
        mirror<4>(from, inside, to);
    }
  }

  // Columns [first, last) of a row of the output, which lie outside the picture.
  void border(const std::uint8_t* line, Crop crop, std::int64_t first, std::int64_t last, std::uint8_t* out) const {
    if (!augment.reflect) {
      std::memset(out + first * channels, 0, (last - first) * channels);
      return;
    }
    for (std::int64_t column = first; column < last; column++) {
      const std::int64_t from = reflected((crop.flip ? width - 1 - column : column) + crop.dx, width);
      std::memcpy(out + column * channels, line + from * channels, channels);
    }
  }

  template <int C>
  static void mirror(const std::uint8_t* from, std::int64_t pixels, std::uint8_t* __restrict to) {
    for (std::int64_t x = 0; x < pixels; x++)
      for (int c = 0; c < C; c++) to[x * C + c] = from[(pixels - 1 - x) * C + c];
  }

  // 48 elements are whole pixels for 1, 2, 3 and 4 channels, so mean and standard deviation become vectors that stay in
  // registers.
  void convert(const std::uint8_t* x, std::int64_t numel, T* __restrict to) const {
    constexpr int block = 48;
    float m[block], s[block];
    for (int k = 0; k < block; k++) {
      m[k] = mean[k % channels];
      s[k] = inverse[k % channels];
    }
    std::int64_t i = 0;
    // No omp simd here: it makes a bf16 variable per lane in memory, and g++ 12 then does not vectorise the loop.
    for (; i + block <= numel; i += block)
      for (int k = 0; k < block; k++) to[i + k] = T((float(x[i + k]) - m[k]) * s[k]);
    for (; i < numel; i++) to[i] = normalise(x[i], i % channels);
  }
};

template <class T>
struct MixPairs {
  std::int64_t numel, count;  // of a picture; of the batch
  float share;
  const std::int32_t* labels;
  T* y;
  std::int32_t* other;
  TANDEM_HD void operator()(std::int64_t i) const { mix(i / numel, i % numel); }
  TANDEM_HD void mix(std::int64_t pair, std::int64_t at) const {
    bool alone = 2 * pair + 1 == count;
    if (at == 0) {
      other[2 * pair] = labels[2 * pair + (alone ? 0 : 1)];
      if (!alone) other[2 * pair + 1] = labels[2 * pair];
    }
    if (alone) return;
    T *first = y + 2 * pair * numel + at, *second = first + numel;
    float a = float(*first), b = float(*second);
    *first = T(share * a + (1 - share) * b);
    *second = T(share * b + (1 - share) * a);
  }
};

}  // namespace

void mix_pairs(Backend& backend, Batch& batch) {
  const std::int64_t b = batch.size();
  if (b == 0) return;
  dispatch(batch.images.dtype(), "mix_pairs", [&]<class T> {
    const std::int64_t numel = batch.images.numel() / b;
    MixPairs<T> f{numel,
                  b,
                  float(batch.share),
                  batch.labels.data<std::int32_t>(),
                  batch.images.write<T>(),
                  batch.other_labels.write<std::int32_t>()};
    if (backend.on_device()) return launch(backend, (b + 1) / 2 * numel, f);
    for (std::int64_t pair = 0; pair < (b + 1) / 2; pair++)  // in the loader's thread
      for (std::int64_t at = 0; at < numel; at++) f.mix(pair, at);
  });
}

void make_batch(Backend& backend, const BatchWork& work, Batch& batch, int threads) {
  std::int64_t b = batch.size(), pixels = work.height * work.width;
  dispatch(batch.images.dtype(), "make_batch", [&]<class T> {
    MakeBatch<T> f{work, batch.images.write<T>(), batch.labels.write<std::int32_t>(),
                   batch.samples.write<std::int32_t>()};
    if (threads == 0) return launch(backend, b * pixels, f);
    if (b * pixels * work.channels < parallel_grain) threads = 1;
    parallel_ranges(threads, b, 1, [&](std::int64_t begin, std::int64_t end) {
      // One picture of bytes per thread, kept from batch to batch.
      static thread_local std::vector<std::uint8_t> scratch;
      scratch.resize(pixels * work.channels);
      for (std::int64_t p = begin; p < end; p++) f.picture(p, scratch.data());
    });
  });
}

}  // namespace tandem
