// Counter-based random numbers (Philox 4×32-10, Salmon et al., SC 2011): four random words are a pure function of a key
// and a counter. Every draw is addressed by (seed, stream, epoch, sample, index), so it does not depend on the number
// of ranks or threads, on the order of the work, or on whether the run was resumed.
#pragma once
#include <cstdint>
#include <vector>

#include "core/hd.h"

namespace tandem {

// The purpose of a draw. Streams never share numbers; a layer's dropout uses stream dropout + its own number.
enum class Stream : std::uint32_t {
  initial = 1,
  shuffle = 2,
  augment = 3,
  synthetic = 4,
  split = 5,
  test = 6,
  mixup = 7,
  step_time = 8,
  classes = 9,
  partition = 10,
  participants = 11,
  dropout = 1000,
  own = 1u << 30  // streams of user programs begin at this number
};

struct Words {
  std::uint32_t w[4];
};

class Philox {
 public:
  TANDEM_HD Philox(std::uint64_t seed, std::uint32_t stream, std::uint32_t epoch, std::uint32_t sample)
      : key0_(std::uint32_t(seed)), key1_(std::uint32_t(seed >> 32)), stream_(stream), epoch_(epoch), sample_(sample) {}
  TANDEM_HD Philox(std::uint64_t seed, Stream stream, std::uint32_t epoch = 0, std::uint32_t sample = 0)
      : Philox(seed, std::uint32_t(stream), epoch, sample) {}

  // Words 4·index … 4·index + 3 of this address.
  TANDEM_HD Words block(std::uint32_t index) const {
    std::uint32_t c0 = index, c1 = sample_, c2 = epoch_, c3 = stream_, k0 = key0_, k1 = key1_;
    for (int round = 0; round < 10; round++) {
      std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
      std::uint32_t n0 = std::uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = std::uint32_t(p0 >> 32) ^ c3 ^ k1;
      c1 = std::uint32_t(p1);
      c3 = std::uint32_t(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }
  TANDEM_HD std::uint32_t word(std::uint32_t index) const { return block(index / 4).w[index % 4]; }

 private:
  std::uint32_t key0_, key1_, stream_, epoch_, sample_;
};

// 24 random bits → [0, 1).
TANDEM_HD inline float uniform(std::uint32_t word) { return float(word >> 8) * 0x1p-24f; }

// The numbers 0 … n − 1 in a random order, by Fisher and Yates. Only the first `drawn` places are certain to be random.
std::vector<std::int32_t> permutation(std::int64_t n, const Philox& random, std::int64_t drawn = INT64_MAX);
// A draw from the Gamma distribution of this shape with mean 1; shape 0: always 1.
double gamma_draw(double shape, const Philox& random);
// The logarithm of a draw from the Gamma distribution of this shape, above 0, and scale 1. It is finite for any shape.
double log_gamma_draw(double shape, const Philox& random);

}  // namespace tandem
