#include "datasets/synthetic.h"

#include <algorithm>
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
  std::vector<std::uint32_t> noise;

  // Picture `sample` of the set `part` (0 train, 1 test): label = sample % 10, so that classes are balanced.
  void paint(std::uint32_t part, std::uint32_t sample, std::uint8_t* pixels) {
    Philox random(o.seed, Stream::synthetic, part, sample);
    Words a = random.block(0), b = random.block(1), c = random.block(2);
    int label = int(sample % 10);
    // Slope 0, 22.5 … 90 degrees, give or take 5, to either side; a stripe and a gap are 4 or 7 pixels, give or take a tenth.
    double degrees = 22.5 * (label % 5) + 10 * uniform(a.w[0]) - 5, sign = a.w[1] >> 31 ? 1 : -1;
    double period = (label < 5 ? 4.0 : 7.0) * (0.9 + 0.2 * uniform(a.w[2])), angle = degrees * std::numbers::pi / 180;
    std::uint32_t step_x = phase_step(sign * std::sin(angle) / period), step_y = phase_step(std::cos(angle) / period);
    std::uint32_t row_phase = a.w[3];
    int middle[4], contrast[4];
    for (int k = 0; k < 4; k++) {
      middle[k] = 96 + int(b.w[k] >> 26);                                      // 96 … 159
      contrast[k] = (24 + int(c.w[k] >> 27)) * ((c.w[k] >> 8) & 1 ? 1 : -1);   // ±(24 … 55): two colours at random
    }
    std::int64_t blocks = (o.side * o.side * o.channels + 15) / 16;
    noise.resize(blocks * 4);
    for (std::int64_t i = 0; i < blocks; i++) {
      Words w = random.block(std::uint32_t(3 + i));
      for (int k = 0; k < 4; k++) noise[4 * i + k] = w.w[k];
    }
    std::int64_t n = 0;
    for (std::int64_t y = 0; y < o.side; y++, row_phase += step_y) {
      std::uint32_t phase = row_phase;
      for (std::int64_t x = 0; x < o.side; x++, phase += step_x) {
        int wave = sine[phase >> 24];
        for (std::int64_t k = 0; k < o.channels; k++, n++) {
          int bits = int(noise[n / 4] >> (8 * (n % 4)) & 255) - 128;  // four draws from each word
          int v = middle[k] + (contrast[k] * wave >> 7) + (bits * o.noise >> 7);
          pixels[n] = std::uint8_t(std::clamp(v, 0, 255));
        }
      }
    }
  }
};

}  // namespace

Dataset synthetic(const SyntheticOptions& o) {
  require(o.side > 0 && o.channels >= 1 && o.channels <= 4 && o.train > 0 && o.test > 0 && o.noise >= 0 && o.noise <= 64, o.name,
          ": cannot make ", o.train, " + ", o.test, " pictures [", o.side, ",", o.side, ",", o.channels, "] with noise ", o.noise);
  Painter painter{o, sine_table(), {}};
  auto part = [&](const char* suffix, std::uint32_t which, std::int64_t count) {
    Pictures p;
    p.name = o.name + suffix;
    p.classes = 10;
    for (const char* width : {"fine", "coarse"})
      for (const char* slope : {"0", "22", "45", "67", "90"}) p.class_names.push_back(std::string(width) + " " + slope);
    p.images = host_tensor({count, o.side, o.side, o.channels}, DType::u8);
    p.labels = host_tensor({count}, DType::i32);
    std::uint8_t* pixels = p.images.write<std::uint8_t>();
    std::int32_t* labels = p.labels.write<std::int32_t>();
    for (std::int64_t i = 0; i < count; i++) {
      painter.paint(which, std::uint32_t(i), pixels + i * o.side * o.side * o.channels);
      labels[i] = std::int32_t(i % 10);
    }
    return p;
  };
  Dataset d{part(" train", 0, o.train), part(" test", 1, o.test)};
  measure(d.train);
  d.test.mean = d.train.mean;
  d.test.deviation = d.train.deviation;
  return d;
}

}  // namespace tandem
