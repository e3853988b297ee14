// Pools of the caching allocator: the memory of a recorded step is nobody else's.
#include "core/reference/backend.h"
#include "layers/train/run.h"
#include "tests/bench/timing.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

struct Counted4K : MemorySource {  // small segments, so that a few blocks fill one
  std::size_t& held;
  explicit Counted4K(std::size_t& h) : held(h) {}
  void* acquire(std::size_t bytes) override {
    held += bytes;
    return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  }
  void release(void* block, std::size_t bytes) override {
    held -= bytes;
    std::free(block);
  }
  const char* name() const override { return "test memory"; }
  std::size_t segment_bytes() const override { return 4 * mib; }
};

struct MemoryPool : testing::Test {
  std::size_t held = 0;
  CachingAllocator memory{std::make_unique<Counted4K>(held)};
};

TEST_F(MemoryPool, FreePiecesGiveTheirPagesBackBeforeAHostRunsOut) {
  struct Scarce : Counted4K {
    std::size_t& discarded;
    Scarce(std::size_t& held, std::size_t& d) : Counted4K(held), discarded(d) {}
    std::size_t left() const override { return mib; }
    void discard(void*, std::size_t bytes) override { discarded += bytes; }
  };
  std::size_t discarded = 0;
  CachingAllocator scarce(std::make_unique<Scarce>(held, discarded));
  scarce.give(scarce.take(6 * mib));
  void* part = scarce.take(4 * mib);  // of those six
  EXPECT_EQ(discarded, 0u);
  void* whole = scarce.take(6 * mib);
  EXPECT_EQ(discarded, 2 * mib);
  scarce.give(part), scarce.give(whole);
}

TEST_F(MemoryPool, BlocksReturnToThePoolTheyCameFrom) {
  const int pool = memory.new_pool();
  for (std::size_t bytes : {std::size_t{1000}, 2 * mib}) {
    memory.use_pool(pool);
    void* pooled = memory.take(bytes);
    memory.use_pool(0);
    void* ordinary = memory.take(bytes);
    EXPECT_NE(pooled, ordinary);
    memory.give(pooled);
    void* next = memory.take(bytes);
    EXPECT_NE(next, pooled) << "the pool's block of " << bytes << " bytes went to somebody else";
    memory.use_pool(pool);
    EXPECT_EQ(memory.take(bytes), pooled);
    memory.use_pool(0);
    memory.give(pooled), memory.give(next), memory.give(ordinary);
  }
  memory.trim();
  EXPECT_GE(memory.statistics().reserved_bytes, 4 * mib) << "trim() leaves the pool";
  memory.release_pool(pool);
  memory.trim();
  EXPECT_EQ(held, 0u);
}

struct Little : Counted4K {  // and others hold the rest
  using Counted4K::Counted4K;
  void* acquire(std::size_t bytes) override { return held + bytes > 8 * mib ? nullptr : Counted4K::acquire(bytes); }
  const char* name() const override { return "the memory of GPU 0"; }
  std::string state() const override { return "16 MiB: 0 B free, 8 MiB ours, 8 MiB held by others"; }
};

TEST(MemoryEnds, SaysWhatWasAskedWhoHoldsWhatAndWhatToChange) {
  for (auto [use, remedy] : {std::pair(Use::activations, "--batch"),
                             {Use::optimizer, "--optimizer sgd"},
                             {Use::parameters, "--model"},
                             {Use::data, "data set"}}) {
    std::size_t held = 0;
    CachingAllocator memory(std::make_unique<Little>(held));
    MemoryUse mine(use);
    void *a = memory.take(3 * mib), *b = memory.take(3 * mib);
    MemoryUse now(Use::scratch);
    EXPECT_REFUSED(memory.take(2 * mib),
                   "out of the memory of GPU 0 (16 MiB: 0 B free, 8 MiB ours, 8 MiB held by others)",
                   "asked for 2.00 MiB (scratch)", "6.00 MiB in 2 blocks", std::string(name_of(use)) + " 6.00 MiB",
                   "2.00 MiB is free in pieces too small", remedy);
    memory.give(a), memory.give(b);
  }
}

TEST(MemoryEnds, NamesWhatIsKeptForRecordedSteps) {
  std::size_t held = 0;
  CachingAllocator memory(std::make_unique<Little>(held));
  const int pool = memory.new_pool();
  memory.use_pool(pool);
  memory.give(memory.take(3 * mib));
  memory.give(memory.take(1024));
  memory.use_pool(0);
  EXPECT_REFUSED(memory.take(5 * mib), "0 B in 0 blocks",
                 "4.06 MiB is kept for recorded steps, eager work cannot have it");
  memory.release_pool(pool);
  memory.give(memory.take(5 * mib));
}

TEST_F(MemoryPool, WhatIsHeldWhenAPoolIsReleasedIsOrdinaryAfterwards) {
  const int pool = memory.new_pool();
  memory.use_pool(pool);
  void *small = memory.take(600), *large = memory.take(mib);
  memory.use_pool(0);
  memory.release_pool(pool);
  memory.give(small), memory.give(large);
  EXPECT_EQ(memory.take(600), small);
  EXPECT_EQ(memory.take(mib), large);
  memory.give(small), memory.give(large);
  memory.trim();
  EXPECT_EQ(held, 0u);
}

TEST_F(MemoryPool, OnlyOneIsInUse) {
  memory.use_pool(memory.new_pool());
  EXPECT_REFUSED(memory.use_pool(2), "pool 1 is in use");
}

// Blocks of three pools and of none are taken and given at random: none is ever in two hands, and none changes its
// pool.
TEST_F(MemoryPool, NoBlockIsEverInTwoHands) {
  auto own = std::make_unique<CachingAllocator>(std::make_unique<Counted4K>(held));
  const int pools[] = {0, own->new_pool(), own->new_pool(), own->new_pool()};
  std::map<std::byte*, std::pair<std::size_t, int>> live;
  std::map<std::byte*, int> home;
  Philox random(7, Stream::test);
  for (std::uint32_t i = 0; i < 4000; i++) {
    const Words r = random.block(i);
    if (live.size() < 40 && r.w[0] % 2) {
      const int pool = pools[r.w[1] % 4];
      const std::size_t bytes = r.w[2] % 3 ? 1 + r.w[3] % 5000 : mib + r.w[3] % (1 << 20);
      own->use_pool(pool);
      auto* p = static_cast<std::byte*>(own->take(bytes));
      own->use_pool(0);
      auto after = live.lower_bound(p);
      const bool clear = (after == live.end() || p + bytes <= after->first) &&
                         (after == live.begin() || std::prev(after)->first + std::prev(after)->second.first <= p);
      ASSERT_TRUE(clear) << "two blocks overlap";
      const int first = bytes < CachingAllocator::large ? home.emplace(p, pool).first->second : pool;
      ASSERT_EQ(first, pool) << "a block changed pools";
      live[p] = {bytes, pool};
    } else if (!live.empty()) {
      auto it = std::next(live.begin(), r.w[1] % live.size());
      own->give(it->first);
      live.erase(it);
    }
    if (i % 500 == 499) {
      own->trim();
      std::erase_if(home, [](const auto& e) { return e.second == 0; });
    }
  }
  for (auto& [p, what] : live) own->give(p);
  own.reset();
  EXPECT_EQ(held, 0u);
}

TEST(SmallTensors, ShareBlocks) {
  auto resident = [] { return of_this_process("VmRSS:"); };
  if (heap_memory()->segment_bytes() == 0) GTEST_SKIP() << "under AddressSanitizer every block is its own";
  for (const auto& kind : backends()) {
    auto b = kind.make();
    if (b->on_device()) continue;
    const std::size_t before = resident();
    std::vector<Tensor> tensors;
    tensors.reserve(100000);
    for (int i = 0; i < 100000; i++) tensors.push_back(Tensor::full(*b, {1}, i));
    EXPECT_LE(double(resident() - std::min(before, resident())), double(20 << 20))
        << kind.name << ", with their handles";
    for (int i = 0; i < 100000; i += 997) ASSERT_EQ(tensors[i].item(), float(i)) << "two share a place";
    tensors.clear();
    b->memory().trim();
    EXPECT_EQ(b->memory().statistics().reserved_bytes, 0u) << "all of it goes back";
  }
}

TEST(SmallTensors, AreAlignedAndApart) {
  auto b = reference_backend();
  std::map<const std::byte*, std::size_t> seen;
  std::vector<Tensor> all;
  for (std::int64_t n : {1, 8, 9, 16, 17, 100, 128, 129, 700, 2048, 2049, 5000})
    for (int i = 0; i < 50; i++) {
      all.emplace_back(*b, Shape{n});
      const auto* at = static_cast<const std::byte*>(all.back().raw());
      const std::size_t bytes = all.back().bytes();
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % (bytes > 32 ? 64 : 32), 0u);
      auto next = seen.lower_bound(at);
      EXPECT_TRUE(next == seen.end() || at + bytes <= next->first);
      EXPECT_TRUE(next == seen.begin() || std::prev(next)->first + std::prev(next)->second <= at);
      seen[at] = bytes;
    }
}

TEST(Tensors, OutliveTheirBackend) {
  for (const auto& kind : backends()) {
    Tensor scalar, large, part, named;
    {
      auto b = kind.make();
      scalar = Tensor::of(*b, {1}, {7});
      large = Tensor::full(*b, {1 << 20}, 3);
      part = large.slice(5, 9);
      named = Tensor::full(*b, {64}, 1);
      named.storage()->add_segment("weight");
      if (b->on_device()) continue;
    }
    EXPECT_EQ(*scalar.data<float>(), 7.f);
    large = Tensor();
    EXPECT_EQ(part.data<float>()[3], 3.f);
    EXPECT_REFUSED(part.values(), "outlived its backend") << kind.name;
    EXPECT_REFUSED(Tensor::like(scalar), "outlived its backend") << kind.name;
    EXPECT_REFUSED(scalar.fill(0), "outlived its backend") << kind.name;
  }
}

// ---- what a step needs ----------------------------------------------------------------------------------------------
struct Limited : MemorySource {
  std::unique_ptr<MemorySource> heap = heap_memory();
  std::size_t room;
  explicit Limited(std::size_t bytes) : room(bytes) {}
  void* acquire(std::size_t bytes) override { return heap->acquire(bytes); }
  void release(void* block, std::size_t bytes) override { heap->release(block, bytes); }
  const char* name() const override { return "test memory"; }
  std::size_t segment_bytes() const override { return 0; }
  std::size_t left() const override { return room; }
};

TEST(StepMemory, ABatchThatCannotFitIsRefusedBeforeTheFirstStep) {
  reference::ReferenceBackend b(2, std::make_unique<Limited>(8 * mib));
  auto train = [&](std::int64_t batch) {
    auto model = make_model("lenet5", 10, 1, 28);
    const Dataset pictures = synthetic({.train = batch, .test = 10});
    Loader data(pictures.train, {.batch = batch, .prefetch = 0}, b);
    SGD sgd({.learning_rate = 0.01});
    fit(*model, cross_entropy_loss(), sgd, b, {.train = data}, {.progress = false});
  };
  const std::string said = error_of<UsageError>([&] { train(1000); });
  const std::size_t at = said.find("a --batch of ");
  ASSERT_NE(at, said.npos) << said;
  EXPECT_TRUE(holds(said, {"a step on 1000 pictures needs", "of test memory are left beside", "parameters"}));
  const std::int64_t fits = std::atoll(said.c_str() + at + 13);
  EXPECT_GT(fits, 20);
  b.memory().reset_peak();
  const std::size_t before = b.memory().statistics().live_bytes;
  train(fits);
  const double used = double(b.memory().statistics().peak_bytes - before);
  EXPECT_LT(used, double(9 << 20)) << "what was said to fit";
  EXPECT_GT(used, double(4 << 20)) << "more would have";
}

// Address space that nobody wrote to is still among what the system has left: it must not count a second time.
TEST(StepMemory, UntouchedMemoryIsLeftOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "blocks are not cut from segments";
#endif
  struct Known : Limited {  // the heap, of which it is known how much is left
    using Limited::Limited;
    std::size_t segment_bytes() const override { return heap->segment_bytes(); }
    std::size_t touched(const void* block, std::size_t bytes) const override { return heap->touched(block, bytes); }
  };
  constexpr std::size_t room = std::size_t{1} << 30, size = 64 * mib;
  Ref<CachingAllocator> memory(new CachingAllocator(std::make_unique<Known>(room)));
  void *a = memory->take(size), *b = memory->take(size);
  EXPECT_GE(memory->statistics().reserved_bytes, 2 * size);
  EXPECT_NEAR(double(memory->left()), double(room), double(8 << 20)) << "nothing was written";
  std::memset(b, 1, size);
  memory->give(b);
  EXPECT_NEAR(double(memory->left()), double(room + size), double(8 << 20))
      << "what was written and is free may be used again";
  memory->give(a);
}

TEST(StepMemory, IsWhatAStepTakes) {
  for (const auto& kind : backends())
    for (const char* name : {"smallcnn", "resnet20"}) {
      auto b = kind.make();
      if (b->on_device() || (kind.name == "reference" && std::string(name) == "resnet20")) continue;
      auto model = make_model(name, 10, 3, 32);
      FlatParameters flat(*model, *b, 1);
      model->train();
      const std::int64_t pictures = kind.name == "reference" ? 8 : 64;
      const Tensor images = Tensor::full(*b, {pictures, 32, 32, 3}, 0.5),
                   labels = Tensor::zeros(*b, {pictures}, DType::i32);
      const StepMemory m = step_memory(*model, images);
      const std::size_t before = b->memory().statistics().live_bytes;
      b->memory().reset_peak();
      flat.zero_gradients();
      flat.backward(cross_entropy((*model)(Variable(images)), labels));
      const auto s = b->memory().statistics();
      const double took = double(s.peak_bytes - before) - double(s.at_peak[std::size_t(Use::scratch)]);
      const double said = double(m.per_picture) * double(pictures) - 4 * double(images.bytes());
      EXPECT_LT(took, said) << kind.name << ' ' << name;
      EXPECT_GT(took, 0.5 * said) << kind.name << ' ' << name;
      EXPECT_GT(m.left, 64 * mib);
    }
}

}  // namespace
}  // namespace tandem::test
