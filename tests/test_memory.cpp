// Pools of the caching allocator: the memory of a recorded step is nobody else's.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "core/backend.h"
#include "core/random.h"
#include "tests/support.h"

using namespace tandem;
using tandem::test::refused;

namespace {

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
  std::size_t segment_bytes() const override { return std::size_t{4} << 20; }
};

TEST(MemoryPool, BlocksReturnToThePoolTheyCameFrom) {
  std::size_t held = 0;
  CachingAllocator memory(std::make_unique<Counted4K>(held));
  const int pool = memory.new_pool();
  for (std::size_t bytes : {std::size_t{1000}, std::size_t{2} << 20}) {
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
  EXPECT_GE(memory.pool_bytes(pool), std::size_t{4} << 20);
  memory.trim();
  EXPECT_EQ(memory.statistics().reserved_bytes, memory.pool_bytes(pool)) << "trim() leaves the pool, and nothing else";
  memory.release_pool(pool);
  memory.trim();
  EXPECT_EQ(held, 0u);
}

struct Little : MemorySource {  // and others hold the rest
  void* acquire(std::size_t bytes) override {
    if (held + bytes > std::size_t{8} << 20) return nullptr;
    held += bytes;
    return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  }
  void release(void* block, std::size_t bytes) override {
    held -= bytes;
    std::free(block);
  }
  const char* name() const override { return "the memory of GPU 0"; }
  std::size_t segment_bytes() const override { return std::size_t{4} << 20; }
  std::string state() const override { return "16 MiB: 0 B free, 8 MiB ours, 8 MiB held by others"; }
  std::size_t held = 0;
};

TEST(MemoryEnds, SaysWhatWasAskedWhoHoldsWhatAndWhatToChange) {
  for (auto [use, remedy] : {std::pair(Use::activations, "--batch"), {Use::optimizer, "--optimizer sgd"}, {Use::parameters, "--model"},
                             {Use::data, "data set"}}) {
    CachingAllocator memory(std::make_unique<Little>());
    MemoryUse mine(use);
    void *a = memory.take(std::size_t{3} << 20), *b = memory.take(std::size_t{3} << 20);
    MemoryUse now(Use::scratch);
    EXPECT_TRUE(refused([&] { memory.take(std::size_t{2} << 20); },
                        {"out of the memory of GPU 0 (16 MiB: 0 B free, 8 MiB ours, 8 MiB held by others)", "asked for 2.00 MiB (scratch)",
                         "6.00 MiB in 2 blocks", std::string(name_of(use)) + " 6.00 MiB", "2.00 MiB is free in pieces too small", remedy}));
    memory.give(a), memory.give(b);
  }
}

TEST(MemoryEnds, NamesWhatIsKeptForRecordedSteps) {
  CachingAllocator memory(std::make_unique<Little>());
  const int pool = memory.new_pool();
  memory.use_pool(pool);
  memory.give(memory.take(std::size_t{3} << 20));
  memory.give(memory.take(1024));
  memory.use_pool(0);
  EXPECT_TRUE(refused([&] { memory.take(std::size_t{5} << 20); },
                      {"0 B in 0 blocks", "4.00 MiB is kept for recorded steps, eager work cannot have it"}));
  memory.release_pool(pool);
  memory.give(memory.take(std::size_t{5} << 20));
}

TEST(MemoryPool, WhatIsHeldWhenAPoolIsReleasedIsOrdinaryAfterwards) {
  std::size_t held = 0;
  CachingAllocator memory(std::make_unique<Counted4K>(held));
  const int pool = memory.new_pool();
  memory.use_pool(pool);
  void *small = memory.take(600), *large = memory.take(std::size_t{1} << 20);
  memory.use_pool(0);
  memory.release_pool(pool);
  EXPECT_EQ(memory.pool_bytes(pool), 0u);
  memory.give(small), memory.give(large);
  EXPECT_EQ(memory.take(600), small);
  EXPECT_EQ(memory.take(std::size_t{1} << 20), large);
  memory.give(small), memory.give(large);
  memory.trim();
  EXPECT_EQ(held, 0u);
}

TEST(MemoryPool, OnlyOneIsInUse) {
  std::size_t held = 0;
  CachingAllocator memory(std::make_unique<Counted4K>(held));
  memory.use_pool(memory.new_pool());
  EXPECT_TRUE(refused([&] { memory.use_pool(2); }, {"pool 1 is in use"}));
}

// Blocks of three pools and of none are taken and given at random: none is ever in two hands, and none changes its pool.
TEST(MemoryPool, NoBlockIsEverInTwoHands) {
  std::size_t held = 0;
  {
    CachingAllocator memory(std::make_unique<Counted4K>(held));
    const int pools[] = {0, memory.new_pool(), memory.new_pool(), memory.new_pool()};
    std::map<std::byte*, std::pair<std::size_t, int>> live;
    std::map<std::byte*, int> home;
    Philox random(7, Stream::test);
    for (std::uint32_t i = 0; i < 4000; i++) {
      const Words r = random.block(i);
      if (live.size() < 40 && r.w[0] % 2) {
        const int pool = pools[r.w[1] % 4];
        const std::size_t bytes = r.w[2] % 3 ? 1 + r.w[3] % 5000 : (std::size_t{1} << 20) + r.w[3] % (1 << 20);
        memory.use_pool(pool);
        auto* p = static_cast<std::byte*>(memory.take(bytes));
        memory.use_pool(0);
        auto after = live.lower_bound(p);
        const bool clear = (after == live.end() || p + bytes <= after->first) &&
                           (after == live.begin() || std::prev(after)->first + std::prev(after)->second.first <= p);
        ASSERT_TRUE(clear) << "two blocks overlap";
        const int first = bytes < CachingAllocator::large ? home.emplace(p, pool).first->second : pool;
        ASSERT_EQ(first, pool) << "a block changed pools";
        live[p] = {bytes, pool};
      } else if (!live.empty()) {
        auto it = std::next(live.begin(), r.w[1] % live.size());
        memory.give(it->first);
        live.erase(it);
      }
      if (i % 500 == 499) {
        memory.trim();
        std::erase_if(home, [](const auto& e) { return e.second == 0; });
      }
    }
    for (auto& [p, what] : live) memory.give(p);
  }
  EXPECT_EQ(held, 0u);
}

}  // namespace
