#include "datasets/synthetic.h"

#include <array>
#include <cmath>
#include <numbers>

#include "core/random.h"

namespace tandem {
namespace {

// One period of a sine, −128 … 128. The phase is an unsigned 32-bit number that wraps around once per period.
std::array<std::int16_t, 256> sine_table() {
  std::array<std::int16_t, 256> table{};
  for (int i = 0; i < 256; i++) table[i] = std::int16_t(std::lround(128 * std::sin(2 * std::numbers::pi * i / 256)));
  return table;
}

std::uint32_t phase_step(double periods) { return static_cast<std::uint32_t>(std::llround(periods * 0x1p32)); }

struct Painter {
  const SyntheticOptions& o;
  std::array<std::int16_t, 256> sine = sine_table();
  std::vector<std::uint32_t> noise = std::vector<std::uint32_t>((o.side * o.side * o.channels + 15) / 16 * 4);
  std::vector<std::int16_t> middles = std::vector<std::int16_t>(o.side * o.channels);  // the elements of one row
  std::vector<std::int16_t> contrasts = middles, waves = middles;

  // Picture `sample` of the set `part` (0 train, 1 test): label = sample % 10, so that classes are balanced.
  void paint(std::uint32_t part, std::uint32_t sample, std::uint8_t* pixels) {
    Philox random(o.seed, Stream::synthetic, part, sample);
    Words a = random.block(0), b = random.block(1), c = random.block(2);
    int label = int(sample % 10);
    // Slope 0, 22.5 … 90 degrees ± 5, to either side; a stripe and a gap are 4 or 7 pixels ± 10 %.
    double degrees = 22.5 * (label % 5) + 10 * uniform(a.w[0]) - 5, sign = a.w[1] >> 31 ? 1 : -1;
    double period = (label < 5 ? 4.0 : 7.0) * (0.9 + 0.2 * uniform(a.w[2])), angle = degrees * std::numbers::pi / 180;
    std::uint32_t step_x = phase_step(sign * std::sin(angle) / period), step_y = phase_step(std::cos(angle) / period);
    std::uint32_t row_phase = a.w[3];
    std::int16_t middle[4], contrast[4];
    for (int k = 0; k < 4; k++) {
      middle[k] = std::int16_t(96 + (b.w[k] >> 26));                                        // 96 … 159
      contrast[k] = std::int16_t((24 + int(c.w[k] >> 27)) * ((c.w[k] >> 8) & 1 ? 1 : -1));  // ±(24 … 55): two colours
    }
    std::int64_t row = o.side * o.channels;
    for (std::int64_t j = 0; j < row; j++) {
      middles[j] = middle[j % o.channels];
      contrasts[j] = contrast[j % o.channels];
    }
    draw_noise(random);
    const std::uint8_t* bytes = reinterpret_cast<const std::uint8_t*>(noise.data());
    const std::int16_t loudness = std::int16_t(o.noise);
    for (std::int64_t y = 0; y < o.side; y++, row_phase += step_y, pixels += row, bytes += row) {
      std::uint32_t phase = row_phase;
      for (std::int64_t x = 0, j = 0; x < o.side; x++, phase += step_x)
        for (std::int64_t k = 0; k < o.channels; k++) waves[j++] = sine[phase >> 24];
      const std::int16_t *m = middles.data(), *h = contrasts.data(), *w = waves.data();
#pragma omp simd
      for (std::int64_t j = 0; j < row; j++) {  // 16-bit arithmetic processes twice as many elements at a time as int
        std::int16_t wave = std::int16_t(h[j] * w[j]), speck = std::int16_t((bytes[j] - 128) * loudness);
        std::int16_t v = std::int16_t(m[j] + (wave >> 7) + (speck >> 7));
        pixels[j] = std::uint8_t(v < 0 ? 0 : v > 255 ? 255 : v);
      }
    }
  }

  // One byte for each element, four from each word. Stores word 0 of all blocks, then word 1, …: the loop vectorises.
  void draw_noise(Philox random) {
    std::int64_t blocks = std::int64_t(noise.size()) / 4;
    std::uint32_t *n0 = noise.data(), *n1 = n0 + blocks, *n2 = n1 + blocks, *n3 = n2 + blocks;
#pragma omp simd
    for (std::int64_t i = 0; i < blocks; i++) {
      Words w = random.block(std::uint32_t(3 + i));
      n0[i] = w.w[0];
      n1[i] = w.w[1];
      n2[i] = w.w[2];
      n3[i] = w.w[3];
    }
  }
};

}  // namespace

Dataset synthetic(const SyntheticOptions& o) {
  bool shape = o.side > 0 && o.channels >= 1 && o.channels <= 4;
  require(shape && o.train > 0 && o.test > 0 && o.noise >= 0 && o.noise <= 64, o.name, ": cannot make ", o.train, " + ",
          o.test, " pictures [", o.side, ",", o.side, ",", o.channels, "] with noise ", o.noise);
  Painter painter{o};
  auto part = [&](const char* suffix, std::uint32_t which, std::int64_t count) {
    Pictures p = blank_pictures(o.name + suffix, {count, o.side, o.side, o.channels},
                                {"fine 0", "fine 22", "fine 45", "fine 67", "fine 90", "coarse 0", "coarse 22",
                                 "coarse 45", "coarse 67", "coarse 90"});
    std::uint8_t* pixels = p.images.write<std::uint8_t>();
    std::int32_t* labels = p.labels.write<std::int32_t>();
    for (std::int64_t i = 0; i < count; i++) {
      painter.paint(which, std::uint32_t(i), pixels + i * o.side * o.side * o.channels);
      labels[i] = std::int32_t(i % 10);
    }
    return p;
  };
  return Dataset::of_parts(o.name, part(" train", 0, o.train), part(" test", 1, o.test));
}

}  // namespace tandem
