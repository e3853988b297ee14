// Movers and the memory plan on a device: on a twin that runs behind the host's back and records (twin.h). Copies run
// when an event is asked for, and see memory as it was when the events that they waited for were marked: a copy that
// waits for too little brings back other bytes, and steps within a budget are no longer those without.
#include "core/mover.h"
#include "tests/recorded_training.h"
#include "tests/training.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// ---- pinned copies --------------------------------------------------------------------------------------------------
TEST(PinnedMover, BringsBackWhatItCarriedOutInTheOrderOfTheQueue) {
  for (const bool behind : {false, true}) {
    Twin twin;
    twin.behind = behind;
    const auto mover = pinned_mover(twin);
    for (int round = 0; round < 2; round++) {  // the second one uses the first one's rooms
      std::vector<Mover::CopyId> ids;
      std::vector<Tensor> tensors;
      for (const std::int64_t n : {1, 100, 5000, 262145}) {
        tensors.push_back(Tensor::full(twin, {n}, double(n + round)));
        ids.push_back(mover->out(tensors.back().raw(), tensors.back().bytes()));
      }
      for (std::size_t i = 0; i < ids.size(); i++) {
        EXPECT_EQ(mover->wait(ids[i]), "");
        const std::vector<std::byte> carried = bytes_of(tensors[i]);
        tensors[i].fill(-1);  // another tensor's block now
        mover->in(ids[i], tensors[i].raw_write());
        EXPECT_EQ(mover->wait(ids[i]), "");
        EXPECT_EQ(bytes_of(tensors[i]), carried) << i;
        EXPECT_TRUE(mover->done(ids[i]));
        mover->forget(ids[i]);
      }
    }
  }
}

TEST(PinnedMover, ItsRoomIsBoundedAndUsedAgain) {
  Twin twin;
  const auto mover = pinned_mover(twin, 1 << 20);
  const Tensor large = Tensor::full(twin, {1 << 17}, 1), small = Tensor::full(twin, {1 << 16}, 2);
  const Mover::CopyId first = mover->out(large.raw(), large.bytes()), second = mover->out(large.raw(), large.bytes());
  EXPECT_EQ(mover->wait(first) + mover->wait(second), "");
  const Mover::CopyId third = mover->out(small.raw(), small.bytes());
  EXPECT_TRUE(mover->done(third));
  EXPECT_REFUSED(fail(mover->wait(third)), "pinned memory of the host", "256 KiB", "1.00 MiB");
  mover->forget(third);
  mover->forget(first);
  const Mover::CopyId fourth = mover->out(small.raw(), small.bytes());  // in a larger room
  EXPECT_EQ(mover->wait(fourth), "");
}

struct NoPinned : Twin {
  std::shared_ptr<void> pinned(std::size_t) override { fail("cudaHostAlloc: out of memory"); }
};

TEST(PinnedMover, AnAllocationThatFailsIsNamed) {
  NoPinned twin;
  const auto mover = pinned_mover(twin);
  const Tensor t = Tensor::full(twin, {100}, 1);
  EXPECT_REFUSED(fail(mover->wait(mover->out(t.raw(), t.bytes()))), "pinned memory of the host", "out of memory");
}

TEST(UnifiedMover, WithoutCudaItSaysSo) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is a GPU";
  Twin twin;
  EXPECT_REFUSED(unified_mover(twin, 1 << 20), "CUDA");
}

// ---- the plan -------------------------------------------------------------------------------------------------------
struct Trained {
  std::vector<std::vector<std::byte>> losses, tensors;
  std::string log, report;
  std::size_t least = 0, peak = 0, moved = 0;  // moved: in a step that went by its plan
  double seconds = 0, predicted = 0;
};

// Much that is saved beside few parameters.
struct Deep : Module {
  Linear &first = child<Linear>("first", 64, 64), &last = child<Linear>("last", 64, 10);
  Variable forward(const Variable& x) override {
    Variable y = first(x);
    for (int k = 0; k < 6; k++) y = dropout(gelu(square(tanh(scale(y, 0.9, 0.1)))), 0.1);
    return last(y);
  }
};

Trained train(int steps, std::size_t budget = 0, SwapMode swap = SwapMode::automatic, bool smaller = false) {
  Trained out;
  Clocked twin;
  twin.behind = true;
  RecordedTraining training(twin, std::make_unique<Deep>(), 0.05);
  std::optional<MemoryPlan>& plan = training.plan;
  const MemoryPlanOptions options{.budget = budget, .swap = swap, .smallest = 256};
  if (budget) plan.emplace(twin, pinned_mover(twin), options);
  std::map<std::int64_t, Batch> batches;
  for (const std::int64_t n : {64, 48}) {
    batches[n].images = Tensor::of(twin, {n, 64}, numbers("pictures", n * 64));
    batches[n].labels = batches[n].samples = Tensor::of(twin, {n}, numbers("labels", n, 0, 9, 1), DType::i32);
  }
  for (int k = 0; k < steps; k++) {
    training.batch = batches[smaller && k % 8 == 7 ? 48 : 64];
    training.step(plan && !plan->settled());
    out.losses.push_back(bytes_of(training.loss));
    if (!plan) continue;
    const MemoryPlan::Measured& last = plan->measured();
    if (last.planned) out.moved = std::max(out.moved, last.swapped + last.recomputed);
  }
  for (const Tensor& t : {training.flat.values, training.flat.gradients}) out.tensors.push_back(bytes_of(t));
  out.log = twin.log;
  out.peak = training.peak_within;
  if (!plan) return out;
  out.least = smallest_budget(plan->record(), plan->means());
  out.report = plan->report();
  out.seconds = plan->measured().seconds, out.predicted = plan->choice()->forecast.seconds;
  return out;
}

TEST(DeviceMemoryPlan, EveryBudgetGivesTheSameBitsEagerAndRecorded) {
  const int steps = 30;
  const Trained plain = train(steps);
  for (const SwapMode swap : {SwapMode::swap, SwapMode::automatic, SwapMode::recompute}) {
    const Trained all = train(2, std::size_t{1} << 40, swap);
    for (const double share : {0.0, 0.4, 0.8}) {
      const std::size_t budget = all.least + std::size_t(share * double(all.peak - all.least));
      const Trained within = train(steps, budget, swap);
      const std::string what = std::string(name_of(swap)) + " " + std::to_string(budget) + ": " + within.report;
      EXPECT_EQ(within.losses, plain.losses) << what;
      EXPECT_EQ(within.tensors, plain.tensors) << what;
      EXPECT_LE(within.peak, budget) << what;
      EXPECT_GT(within.moved, 0u) << what;
    }
  }
}

// Steps whose plan is not settled run eagerly, and are not counted as those before a recording.
TEST(DeviceMemoryPlan, AStepIsRecordedWhenItsPlanStands) {
  const Trained all = train(2, std::size_t{1} << 40, SwapMode::swap);
  const std::size_t budget = all.least + (all.peak - all.least) / 10 * 7;
  const int steps = 40;
  const Trained plain = train(steps, 0, SwapMode::automatic, true), within = train(steps, budget, SwapMode::swap, true);
  EXPECT_EQ(within.losses, plain.losses) << within.report;
  EXPECT_EQ(within.tensors, plain.tensors) << within.report;
  EXPECT_EQ(within.log.substr(0, 6), "ss[s]r") << within.report;
  EXPECT_GT(std::count(within.log.begin(), within.log.end(), 'r'), steps / 2) << within.log;
  EXPECT_LT(within.log.size(), std::size_t(steps - 3)) << within.log;
  EXPECT_GT(within.moved, 0u);
  EXPECT_NEAR(within.seconds, within.predicted, 0.1 * within.seconds) << within.report;
}

}  // namespace
}  // namespace tandem::test
