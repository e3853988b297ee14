// The loader: the epoch is covered once by all ranks together, and every batch is a function of its counters.
#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

// Pictures whose every byte is a different function of (picture, position), so that a wrong gather cannot pass.
Pictures patterned(std::int64_t n, std::int64_t h = 6, std::int64_t w = 5, std::int64_t c = 3) {
  std::vector<std::uint8_t> x(n * h * w * c);
  std::vector<std::int32_t> y(n);
  std::uint32_t state = 12345;
  for (auto& v : x) v = std::uint8_t((state = state * 1664525u + 1013904223u) >> 24 | 1);  // never black: padding shows
  for (std::int64_t i = 0; i < n; i++) y[i] = std::int32_t(i % 10);
  return in_memory("patterned", x, {n, h, w, c}, y, 10);
}

LoaderOptions options(std::int64_t batch, int prefetch = 2, const Augment& augment = {}) {
  return {.batch = batch, .augment = augment, .seed = 7, .prefetch = prefetch};
}

std::vector<int> samples(const Batch& b) {
  const std::int32_t* s = b.samples.data<std::int32_t>();
  return {s, s + b.size()};
}

bool same(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

bool same(const Batch& a, const Batch& b) {
  return same(a.images, b.images) && same(a.labels, b.labels) && same(a.samples, b.samples) && a.index == b.index &&
         a.epoch == b.epoch && a.global == b.global;
}

Batch copy(const Batch& b) {
  Batch c = b;
  for (Tensor* t : {&c.images, &c.labels, &c.samples}) *t = t->clone();
  return c;
}

// Calls body(batch) for every batch of an epoch.
template <class Body>
void for_each_batch(Loader& loader, std::int64_t epoch, const Body& body) {
  loader.start(epoch);
  for (Batch b; loader.next(b);) body(b);
}

std::vector<int> whole_epoch(Loader& loader, std::int64_t epoch) {
  std::vector<int> out;
  for_each_batch(loader, epoch, [&](const Batch& b) {
    for (int s : samples(b)) out.push_back(s);
  });
  return out;
}

// The first batch of an epoch that is then under way.
Batch begun(Loader& loader, std::int64_t epoch = 0) {
  Batch b;
  loader.start(epoch);
  loader.next(b);
  return b;
}

LoaderOptions of_rank(LoaderOptions o, int rank, int world) {
  o.rank = rank;
  o.world = world;
  return o;
}

struct LoaderTest : testing::Test {
  std::unique_ptr<Backend> host = reference_backend(1);
};

// ---- cutting the epoch ----------------------------------------------------------------------------------------------
TEST(Cut, EveryEpochIsCoveredOnceAndNoShareIsEmpty) {
  for (int world : {1, 2, 3, 7})
    for (std::int64_t batch : {1, 2, 5, 7, 9, 12, 13, 16, 35, 48})
      for (std::int64_t n = 1; n < 150 && batch >= world; n++)
        for (bool drop : {false, true}) {
          Cut cut(n, batch, world, drop);
          SCOPED_TRACE(testing::Message()
                       << n << " pictures, " << batch << " over " << world << (drop ? ", drop" : ""));
          std::int64_t at = 0;
          ASSERT_TRUE(n >= world || cut.batches == 0) << cut.batches;
          for (std::int64_t k = 0; k < cut.batches; k++) {
            ASSERT_EQ(cut.begin(k), at);
            std::int64_t least = batch, most = 0;
            for (int r = 0; r < world; r++) {
              auto [begin, end] = cut.share(k, r);
              ASSERT_EQ(begin, at);  // shares follow one another, without gaps
              least = std::min(least, end - begin);
              most = std::max(most, end - begin);
              at = end;
            }
            ASSERT_GE(least, 1);
            ASSERT_LE(most, (batch + world - 1) / world);
            ASSERT_LE(most - least, 1);
          }
          ASSERT_EQ(cut.begin(cut.batches), at);
          ASSERT_EQ(at, n < world ? 0 : drop || batch < 2 * world - 1 ? n / batch * batch : n);
        }
}

TEST_F(LoaderTest, RanksShareAnEpochExactlyOnce) {
  Pictures p = patterned(103);
  for (int world : {1, 2, 3, 7}) {
    std::vector<int> all;
    std::set<std::int64_t> batches;
    std::vector<std::vector<int>> global;
    std::map<std::int64_t, std::int64_t> said;
    for (int rank = 0; rank < world; rank++) {
      Loader loader(p, of_rank(options(16), rank, world), *host);
      batches.insert(loader.batches_per_epoch());
      std::int64_t k = 0;
      for_each_batch(loader, 3, [&](const Batch& b) {
        EXPECT_EQ(b.index, k);
        if (std::int64_t(global.size()) <= k) global.emplace_back();
        EXPECT_EQ(said.emplace(k, b.global).first->second, b.global);
        for (int s : samples(b)) global[k].push_back(s);
        k++;
      });
      EXPECT_EQ(k, loader.batches_per_epoch());
    }
    EXPECT_EQ(batches.size(), 1u);  // all ranks make the same number of steps
    for (std::size_t k = 0; k < global.size(); k++) {
      EXPECT_EQ(said.at(std::int64_t(k)), std::int64_t(global[k].size())) << "the pictures of all ranks";
      EXPECT_EQ(global[k].size(), std::min<std::size_t>(16, 103 - 16 * k));
      all.insert(all.end(), global[k].begin(), global[k].end());
    }
    // Rank after rank, batch after batch: exactly the one shuffle.
    std::vector<std::int32_t> order = epoch_order(103, true, 7, 3);
    EXPECT_EQ(all, std::vector<int>(order.begin(), order.end())) << world << " ranks";
    std::sort(all.begin(), all.end());
    for (int i = 0; i < 103; i++) ASSERT_EQ(all[i], i);
  }
}

// A loader made for one rank becomes one of many, and the other way round.
TEST_F(LoaderTest, ShareGivesWhatALoaderOfThatRankHas) {
  Pictures p = patterned(103);
  Loader loader(p, options(8), *host);
  Batch b = begun(loader, 3);  // in the middle of an epoch
  for (auto [rank, world] : {std::pair{1, 3}, {2, 3}, {6, 7}, {0, 1}}) {
    loader.share(rank, world);
    EXPECT_THROW(loader.next(b), Error);  // until start()
    Loader fresh(p, of_rank(options(8), rank, world), *host);
    EXPECT_EQ(loader.batches_per_epoch(), fresh.batches_per_epoch());
    EXPECT_EQ(whole_epoch(loader, 3), whole_epoch(fresh, 3));
  }
  EXPECT_THROW(loader.share(0, 104), UsageError);
  EXPECT_THROW(loader.share(2, 2), Error);
}

TEST_F(LoaderTest, ABatchIsDividedAmongRanksUnlessItIsARanksOwn) {
  Loader loader(patterned(60), options(12), *host);
  auto expect = [&](int rank, int world, std::int64_t share, std::int64_t batches) {
    loader.share(rank, world);
    const Batch b = loader.make(0, 0);
    EXPECT_EQ(b.size(), share) << rank << " of " << world;
    EXPECT_EQ(b.over_ranks(), 12);
    EXPECT_EQ(loader.batches_per_epoch(), batches);
  };
  expect(0, 1, 12, 5);
  expect(1, 3, 4, 5);
  expect(0, 5, 2, 5);  // 2, 2, 3, 2, 3
  expect(4, 5, 3, 5);
  expect(11, 12, 1, 5);
  EXPECT_REFUSED(loader.share(0, 13), "--batch 12 over 13 ranks", "a larger --batch, or fewer ranks");

  Loader own(patterned(60), {.batch = 12, .batch_per_rank = 4, .seed = 7}, *host);
  EXPECT_EQ(own.make(0, 0).size(), 4);
  EXPECT_EQ(own.batches_per_epoch(), 15);
  own.share(2, 5);
  EXPECT_EQ(own.make(0, 0).size(), 4);
  EXPECT_EQ(own.make(0, 0).over_ranks(), 20);
  EXPECT_EQ(own.batches_per_epoch(), 3);
}

// ---- the shuffle ----------------------------------------------------------------------------------------------------
TEST(LoaderAhead, ABatchThatIsMadeAheadIsTheSameAndMadeElsewhere) {
  auto backend = cpu_backend(2);
  const Pictures p = patterned(40);
  std::atomic<int> elsewhere = 0;
  LoaderOptions o = options(8);
  o.transform = [&, here = std::this_thread::get_id()](Batch&) { elsewhere += std::this_thread::get_id() != here; };
  Loader ahead(p, o, *backend), plain(p, options(8, 0), *backend);
  for (const auto& [epoch, index] : {std::pair(0, 3), {0, 4}, {1, 0}, {7, 2}}) {
    ahead.make_ahead(epoch, index);
    EXPECT_TRUE(same(ahead.make(epoch, index), plain.make(epoch, index)));
  }
  EXPECT_EQ(elsewhere, 4);
  ahead.make_ahead(2, 1);
  EXPECT_TRUE(same(ahead.make(2, 3), plain.make(2, 3))) << "another one is asked for than was foreseen";
  ahead.make_ahead(2, 1);
  ahead.share(1, 2), plain.share(1, 2);
  EXPECT_TRUE(same(ahead.make(2, 1), plain.make(2, 1))) << "the share has changed meanwhile";
  ahead.make_ahead(0, 99);
  EXPECT_THROW(ahead.make(0, 99), Error);
}

TEST(Shuffle, IsAPermutationOfSeedAndEpoch) {
  for (std::int64_t n : {1, 2, 5, 1000}) {
    auto a = epoch_order(n, true, 1, 2);
    EXPECT_EQ(a, epoch_order(n, true, 1, 2));
    std::sort(a.begin(), a.end());
    for (std::int64_t i = 0; i < n; i++) EXPECT_EQ(a[i], i);
  }
  auto a = epoch_order(1000, true, 1, 2);
  EXPECT_NE(a, epoch_order(1000, true, 1, 3));
  EXPECT_NE(a, epoch_order(1000, true, 2, 2));
  EXPECT_NE(a, epoch_order(1000, true, (std::uint64_t{1} << 32) + 1, 2));  // the seed's upper half counts
}

TEST(Shuffle, EveryPictureComesAnywhere) {
  const int n = 10, epochs = 4000;
  std::vector<std::vector<int>> count(n, std::vector<int>(n));
  for (int e = 0; e < epochs; e++) {
    auto order = epoch_order(n, true, 9, e);
    for (int i = 0; i < n; i++) count[i][order[i]]++;
  }
  double square = 0;  // chi-square with 81 degrees of freedom: 81 ± 12.7
  for (auto& row : count)
    for (int c : row) square += (c - 400.0) * (c - 400.0) / 400;
  EXPECT_NEAR(square, 81, 5 * 12.7);
}

TEST_F(LoaderTest, MayKeepTheOrderAndDropTheLastBatch) {
  Loader in_order(patterned(30), {.batch = 8, .shuffle = false}, *host);
  std::vector<int> order(30);
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t epoch : {0, 5}) EXPECT_EQ(whole_epoch(in_order, epoch), order);
  Loader whole(patterned(30), {.batch = 8, .drop_last = true}, *host);
  EXPECT_EQ(whole.batches_per_epoch(), 3);
  EXPECT_EQ(whole.pictures_per_epoch(), 24);
  EXPECT_EQ(whole_epoch(whole, 0).size(), 24u);
}

// ---- what is in a batch ---------------------------------------------------------------------------------------------
// The textbook: pixel by pixel, in double until the last step.
float expected_pixel(const Pictures& p, const LoaderOptions& o, std::int64_t epoch, int sample, int y, int x, int c) {
  Crop crop = draw_crop(o.augment, o.seed, std::uint32_t(epoch), sample);
  int sy = y + crop.dy, sx = (crop.flip ? int(p.width()) - 1 - x : x) + crop.dx;
  int v = 0;
  if (o.augment.reflect) {
    while (sy < 0 || sy >= p.height()) sy = sy < 0 ? -sy : 2 * int(p.height()) - 2 - sy;
    while (sx < 0 || sx >= p.width()) sx = sx < 0 ? -sx : 2 * int(p.width()) - 2 - sx;
  }
  if (sy >= 0 && sy < p.height() && sx >= 0 && sx < p.width())
    v = p.images.data<std::uint8_t>()[((sample * p.height() + sy) * p.width() + sx) * p.channels() + c];
  return float((v / 255.0 - p.mean[c]) / p.std[c]);
}

TEST_F(LoaderTest, PixelsAreCutMirroredAndNormalised) {
  for (std::int64_t channels : {1, 2, 3, 4})
    for (Augment augment :
         {Augment{}, Augment{2, false}, Augment{0, true}, Augment{4, true},
          Augment{.pad_crop = 6, .flip = true, .reflect = true}, Augment{.pad_crop = 3, .reflect = true}}) {
      Pictures p = patterned(40, 7, 9, channels);
      const LoaderOptions o = options(16, 2, augment);
      Loader loader(p, o, *host);
      for_each_batch(loader, 2, [&](const Batch& b) {
        const float* y = b.images.data<float>();
        auto who = samples(b);
        for (std::size_t i = 0; i < who.size(); i++) {
          ASSERT_EQ(b.labels.data<std::int32_t>()[i], who[i] % 10);
          for (int r = 0; r < 7; r++)
            for (int s = 0; s < 9; s++)
              for (int c = 0; c < channels; c++)
                ASSERT_NEAR(*y++, expected_pixel(p, o, 2, who[i], r, s, c), 2e-6)
                    << "picture " << who[i] << " row " << r << " column " << s << " channel " << c;
        }
      });
    }
}

// A device makes a batch a pixel at a time, a host thread a picture at a time: the same bits.
TEST_F(LoaderTest, BothWaysGiveTheSameBits) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (std::int64_t channels : {1, 3}) {
      Pictures p = patterned(50, 28, 28, channels);
      const Augment augment{.pad_crop = 3, .flip = true, .cutout = 9, .reflect = channels == 3};
      const LoaderOptions o{.batch = 32, .dtype = dtype, .augment = augment, .seed = 7};
      Loader loader(p, o, *host);
      Batch a = loader.make(4, 0), b = copy(a);
      for (Tensor* t : {&b.images, &b.labels, &b.samples}) t->fill(0);
      BatchWork work = batch_work(p, p.images, p.labels, o);
      auto order = epoch_order(50, true, o.seed, 4);
      work.order = order.data();
      work.epoch = 4;
      make_batch(*host, work, b, 0);
      EXPECT_TRUE(same(a, b));
      b.images.fill(0);
      make_batch(*host, work, b, 3);
      EXPECT_TRUE(same(a, b)) << "three threads";
    }
}

TEST_F(LoaderTest, Bf16IsTheRoundedF32) {
  Pictures p = patterned(64, 8, 8);
  LoaderOptions o = options(32, 2, {2, true});
  Loader wide(p, o, *host);
  o.dtype = DType::bf16;
  Loader narrow(p, o, *host);
  Batch a, b;
  wide.start(1);
  narrow.start(1);
  while (wide.next(a) && narrow.next(b)) {
    ASSERT_EQ(b.images.dtype(), DType::bf16);
    for (std::int64_t i = 0; i < a.images.numel(); i++)
      ASSERT_EQ(b.images.data<bf16>()[i].bits, bf16(a.images.data<float>()[i]).bits);
  }
}

TEST_F(LoaderTest, AugmentationIsEvenlySpread) {
  Augment a{4, true};
  const int n = 20000;
  int flips = 0, rows[9] = {}, columns[9] = {}, both[9][9] = {};
  for (int i = 0; i < n; i++) {
    Crop crop = draw_crop(a, 11, 3, i);
    ASSERT_TRUE(crop.dy >= -4 && crop.dy <= 4 && crop.dx >= -4 && crop.dx <= 4);
    flips += crop.flip;
    rows[crop.dy + 4]++;
    columns[crop.dx + 4]++;
    both[crop.dy + 4][crop.dx + 4]++;
  }
  EXPECT_NEAR(flips, n / 2, 5 * 71);  // five standard deviations everywhere
  for (int k = 0; k < 9; k++) {
    EXPECT_NEAR(rows[k], n / 9.0, 5 * 44.5);
    EXPECT_NEAR(columns[k], n / 9.0, 5 * 44.5);
    for (int j = 0; j < 9; j++) EXPECT_NEAR(both[k][j], n / 81.0, 5 * 15.7);
  }
  int moved = 0;  // the next epoch crops anew
  for (int i = 0; i < n; i++) moved += draw_crop(a, 11, 3, i).dy != draw_crop(a, 11, 4, i).dy;
  EXPECT_NEAR(moved, n * 8 / 9.0, 5 * 44.5);
}

TEST(LoaderAugment, AlternatingFlipsMirrorEveryPictureInEveryOtherEpoch) {
  const Augment a{.flip = true, .alternate = true};
  int first = 0;
  for (std::int32_t sample = 0; sample < 1000; sample++) {
    const bool flipped = draw_crop(a, 7, 0, sample).flip;
    first += flipped;
    for (std::uint32_t epoch = 1; epoch < 6; epoch++)
      ASSERT_EQ(draw_crop(a, 7, epoch, sample).flip, flipped != (epoch % 2 == 1));
  }
  EXPECT_NEAR(first, 500, 5 * 16);
}

TEST(Augment, UsualGrowsWithThePicture) {
  for (auto [side, padding] : {std::pair(28, 4), {32, 4}, {64, 8}, {224, 28}, {3, 2}})
    EXPECT_EQ(Augment::usual(side).pad_crop, padding) << side;
}

TEST_F(LoaderTest, CutoutBlanksASquare) {
  for (std::int64_t channels : {1, 3})
    for (int side : {1, 4, 8}) {
      Pictures p = patterned(40, 9, 8, channels);
      LoaderOptions o = options(40, 2, {2, true});
      Batch whole = Loader(p, o, *host).make(3, 0);
      o.augment.cutout = side;
      Batch cut = Loader(p, o, *host).make(3, 0);
      auto who = samples(cut);
      ASSERT_EQ(who, samples(whole));
      int clipped = 0;
      for (std::size_t i = 0; i < who.size(); i++) {
        Square s = draw_cutout(o.augment, o.seed, 3, who[i], 9, 8);
        ASSERT_TRUE(s.top >= 0 && s.top < s.bottom && s.bottom <= 9 && s.left >= 0 && s.left < s.right && s.right <= 8);
        clipped += s.bottom - s.top < side || s.right - s.left < side;
        for (std::int64_t r = 0; r < 9; r++)
          for (std::int64_t c = 0; c < 8; c++)
            for (std::int64_t k = 0; k < channels; k++) {
              std::int64_t at = ((std::int64_t(i) * 9 + r) * 8 + c) * channels + k;
              bool inside = r >= s.top && r < s.bottom && c >= s.left && c < s.right;
              ASSERT_EQ(cut.images.data<float>()[at], inside ? 0 : whole.images.data<float>()[at]);
            }
      }
      if (side != 4) {
        EXPECT_EQ(clipped > 30, side == 8)
            << clipped << " of 40";  // 4 in 36 positions keep all rows, 1 in 8 all columns
      }
    }
}

TEST_F(LoaderTest, MixupMixesNeighbours) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    Pictures p = patterned(39);
    LoaderOptions o{.batch = 13, .dtype = dtype, .seed = 7};
    Batch plain = Loader(p, o, *host).make(2, 1);
    o.mixup = 0.4;
    Loader loader(p, o, *host);
    Batch mixed = loader.make(2, 1);
    EXPECT_TRUE(same(plain.labels, mixed.labels) && same(plain.samples, mixed.samples));
    EXPECT_FALSE(plain.other_labels.defined());
    EXPECT_EQ(mixed.share, draw_share(0.4, o.seed, 2, 1));
    auto x = plain.images.values(), y = mixed.images.values(), label = plain.labels.values(),
         other = mixed.other_labels.values();
    const std::size_t n = x.size() / 13;
    for (std::size_t i = 0; i < 13; i++) {
      const std::size_t partner = i == 12 ? i : i ^ 1;  // the last of an odd batch stays alone
      EXPECT_EQ(other[i], label[partner]);
      for (std::size_t k = 0; k < n; k++)
        ASSERT_NEAR(y[i * n + k], mixed.share * x[i * n + k] + (1 - mixed.share) * x[partner * n + k],
                    dtype == DType::f32 ? 1e-6 : 0.02);
    }
    Batch b;
    loader.start(2, 1);
    ASSERT_TRUE(loader.next(b));
    EXPECT_TRUE(same(b, mixed) && same(b.other_labels, mixed.other_labels));
  }
}

// λ of Beta(α, α) has mean 1/2 and variance 1/(4(2α + 1)); the larger of λ and 1 − λ is as far from 1/2.
TEST(Mixup, SharesAreBetaDistributed) {
  for (double alpha : {0.01, 0.2, 1.0, 4.0}) {
    double sum = 0;
    const int n = 5000;
    for (int i = 0; i < n; i++) {
      const double share = draw_share(alpha, 3, 1, std::uint32_t(i));
      ASSERT_GE(share, 0.5);
      ASSERT_LE(share, 1);
      sum += (share - 0.5) * (share - 0.5);
    }
    const double variance = 1 / (4 * (2 * alpha + 1));
    EXPECT_NEAR(sum / n, variance, 0.06 * variance) << alpha;
  }
  EXPECT_NE(draw_share(1, 3, 1, 0), draw_share(1, 3, 2, 0));
  EXPECT_NE(draw_share(1, 3, 1, 0), draw_share(1, 4, 1, 0));
}

// The epoch's augmented samples are the same whoever makes them, labels and mixtures included.
TEST_F(LoaderTest, RandomStreamsDoNotDependOnRanks) {
  Pictures p = patterned(64);
  std::multiset<Numbers> seen[3];
  for (int w = 0; w < 3; w++)
    for (int rank = 0; rank < 1 << w; rank++) {
      // Four pictures for each of four ranks: even, so that the pairs of mixup stay together
      LoaderOptions o = of_rank(options(16), rank, 1 << w);
      o.augment = {2, true, 3};
      o.mixup = 1;
      Loader loader(p, o, *host);
      for_each_batch(loader, 6, [&](const Batch& b) {
        auto x = b.images.values(), label = b.labels.values(), other = b.other_labels.values();
        for (std::int64_t i = 0; i < b.size(); i++) {
          Numbers one(x.begin() + i * 90, x.begin() + (i + 1) * 90);
          one.insert(one.end(), {b.share, label[i], other[i]});
          seen[w].insert(one);
        }
      });
    }
  EXPECT_EQ(seen[0].size(), 64u);
  EXPECT_TRUE(seen[0] == seen[1] && seen[0] == seen[2]);
}

// ---- counters instead of state --------------------------------------------------------------------------------------
TEST_F(LoaderTest, MakeGivesTheBatchesOfNext) {
  Pictures p = patterned(50);
  for (int prefetch : {0, 1, 3}) {
    const LoaderOptions o = options(8, prefetch, {2, true});
    Loader loader(p, o, *host), other(p, o, *host);
    Batch b;
    loader.start(5);
    for (std::int64_t k = 0; loader.next(b); k++) {
      Batch kept = copy(b);
      EXPECT_TRUE(same(b, loader.make(5, k)));  // while the epoch is under way
      EXPECT_TRUE(same(b, other.make(5, k)));   // by one that never started
      Batch next = loader.make(6, k);
      EXPECT_FALSE(same(b, next));
      EXPECT_TRUE(same(next, other.make(6, k)));  // which keeps the order of one epoch at a time
      EXPECT_TRUE(same(b, kept));                 // make() has left the loader's own batch alone
    }
  }
}

TEST_F(LoaderTest, PrefetchingAndThreadsChangeNothing) {
  Pictures p = patterned(64, 32, 32);
  auto two = reference_backend(2);
  LoaderOptions o = options(20, 0, {4, true});
  Loader line(p, o, *host), threads(p, o, *two);
  o.prefetch = 2;
  Loader ahead(p, o, *host);
  Batch a, b, c;
  for (Loader* l : {&line, &threads, &ahead}) l->start(1);
  while (line.next(a)) {
    ASSERT_TRUE(threads.next(b) && ahead.next(c));
    EXPECT_TRUE(same(a, b) && same(a, c));
  }
  EXPECT_FALSE(threads.next(b) || ahead.next(c));
}

TEST_F(LoaderTest, ResumesInTheMiddleOfAnEpoch) {
  Loader a(patterned(50), options(8), *host), b(patterned(50), options(8), *host);
  Batch x, y;
  a.start(2);
  for (int k = 0; k < 3; k++) ASSERT_TRUE(a.next(x));
  b.start(2, 3);
  while (a.next(x)) {
    ASSERT_TRUE(b.next(y));
    EXPECT_TRUE(same(x, y));
  }
  EXPECT_FALSE(b.next(y));
  b.start(2, b.batches_per_epoch());
  EXPECT_FALSE(b.next(y));
}

TEST_F(LoaderTest, StopsAndRestartsAnywhere) {
  for (int prefetch : {0, 1, 2, 5}) {
    Loader loader(patterned(90), options(8, prefetch), *host), fresh(patterned(90), options(8, 0), *host);
    Batch b;
    for (std::int64_t taken = 0; taken <= loader.batches_per_epoch(); taken++) {
      loader.start(taken);
      for (std::int64_t k = 0; k < taken; k++) ASSERT_TRUE(loader.next(b));
      EXPECT_EQ(whole_epoch(loader, taken), whole_epoch(fresh, taken));
      EXPECT_FALSE(loader.next(b));  // and stays at the end
      EXPECT_FALSE(loader.next(b));
    }
  }
}

TEST_F(LoaderTest, MayBeDestroyedMidEpoch) {
  Pictures p = patterned(90);
  for (int round = 0; round < 50; round++) {
    Loader loader(p, options(8, 1 + round % 4), *host);
    loader.start(round);
    Batch b;
    for (int k = 0; k < round % 6; k++) loader.next(b);
  }
  Batch kept;
  {
    Loader loader(p, options(8), *host);
    kept = begun(loader);
  }
  EXPECT_EQ(samples(kept).size(), 8u);  // a batch keeps its memory alive
}

TEST_F(LoaderTest, BatchStaysUntilTheNextOne) {
  Loader loader(patterned(200), options(8, 1), *host), fresh(patterned(200), options(8, 0), *host);
  const Batch b = begun(loader);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the thread has long filled what it may
  EXPECT_TRUE(same(b, fresh.make(0, 0)));
}

TEST_F(LoaderTest, AllocatesNothingOnceItRuns) {
  for (int prefetch : {0, 2}) {
    Loader loader(patterned(200), options(8, prefetch, {2, true}), *host);
    Batch b = begun(loader);
    loader.next(b);
    std::uint64_t requests = host->memory().statistics().requests;
    while (loader.next(b)) {}
    EXPECT_EQ(whole_epoch(loader, 1).size(), 200u);
    EXPECT_EQ(host->memory().statistics().requests, requests);
  }
}

// For a memory budget: all that a loader holds at most is known from its first batch on, and a loader that rests holds
// nothing.
TEST_F(LoaderTest, HoldsWhatItSaysFromTheFirstBatchAndNothingAtRest) {
  const auto held = [&] { return host->memory().statistics().data(); };
  Loader loader(patterned(200), options(8, 2), *host);
  Batch b = loader.make(0, 0);
  const std::size_t one = held();
  EXPECT_EQ(host->memory().statistics().peak_of_data, 2 * one) << "another one may be made ahead";
  for (std::int64_t k = 1; k < 20; k++) {
    loader.make_ahead(0, k + (k % 5 == 0));
    b = loader.make(0, k);
  }
  EXPECT_EQ(host->memory().statistics().peak_of_data, 2 * one);
  b = {};
  b = begun(loader);
  EXPECT_EQ(held(), 3 * one);
  b = {};
  loader.rest();
  EXPECT_EQ(held(), 0u);
  EXPECT_FALSE(loader.next(b));
  EXPECT_EQ(whole_epoch(loader, 1).size(), 200u);
}

// ---- what goes wrong ------------------------------------------------------------------------------------------------
TEST_F(LoaderTest, ErrorsOfTheThreadArriveInNext) {
  for (int prefetch : {0, 3}) {
    LoaderOptions o = options(8, prefetch);
    std::atomic<bool> broken{true};
    o.transform = [&](Batch& b) { require(!broken || b.index != 2, "the transform met batch ", b.index); };
    Loader loader(patterned(50), o, *host);
    Batch b;
    loader.start(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the thread has long met its error
    EXPECT_TRUE(loader.next(b));
    EXPECT_TRUE(loader.next(b));  // what was made before the error comes first
    EXPECT_EQ(b.index, 1);
    for (int again = 0; again < 2; again++) EXPECT_REFUSED(loader.next(b), "the transform met batch 2");
    broken = false;
    EXPECT_EQ(whole_epoch(loader, 1).size(), 50u);
  }
}

TEST_F(LoaderTest, TransformChangesTheBatch) {
  Loader loader(patterned(50), {.batch = 8, .transform = [](Batch& b) { b.labels.fill(3); }}, *host);
  for_each_batch(loader, 0, [](const Batch& b) { EXPECT_EQ(b.labels.values(), Numbers(b.size(), 3)); });
}

TEST_F(LoaderTest, WrongUseIsNamed) {
  Pictures p = patterned(30);
  auto expect = [&](void (*change)(LoaderOptions&), const std::string& part) {
    LoaderOptions o = options(8);
    change(o);
    EXPECT_REFUSED(Loader(p, o, *host), "loader of patterned", part);
  };
  expect([](LoaderOptions& o) { o.batch = 0; }, "a batch of 0");
  expect([](LoaderOptions& o) { o.rank = 2, o.world = 2; }, "rank 2 of 2");
  expect([](LoaderOptions& o) { o.prefetch = -1; }, "prefetch is -1");
  expect([](LoaderOptions& o) { o.dtype = DType::u8; }, "batches of u8");
  expect([](LoaderOptions& o) { o.augment.pad_crop = 5; }, "padding by 5 pixels, expected less than the picture's 5");
  expect([](LoaderOptions& o) { o.augment.cutout = 6; }, "a cutout of 6 pixels, expected at most the picture's 5");
  expect([](LoaderOptions& o) { o.batch = 40, o.world = 31; }, "30 pictures do not fill a batch of 31 over all ranks");
  expect([](LoaderOptions& o) { o.batch = 31, o.drop_last = true; }, "30 pictures do not fill a batch of 31");
  p.labels.write<std::int32_t>()[4] = 10;
  EXPECT_REFUSED(Loader(p, options(8), *host), "patterned: picture 4 has the label 10, expected 0 to 9");
  p = patterned(30);

  Loader loader(p, options(8), *host);
  Batch b;
  EXPECT_THROW(loader.next(b), Error);  // before start()
  EXPECT_THROW(loader.start(-1), Error);
  EXPECT_THROW(loader.start(0, 5), Error);
  EXPECT_THROW(loader.make(0, 4), Error);
  EXPECT_THROW(loader.make(0, -1), Error);
}

}  // namespace
}  // namespace tandem::test
