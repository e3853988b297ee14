// WorkLeases, and rank 0's part of a parameter server: who is given what, who is told what, and when it is all over. No
// network and no clock: what happens is told, and times are said.
#include <gtest/gtest.h>

#include "dist/job/membership.h"
#include "dist/server/coordinator.h"
#include "dist/server/server_messages.h"
#include "dist/server/work_leases.h"

namespace tandem::test {
namespace {

using WorkLease = std::optional<std::int64_t>;

TEST(WorkLeases, AreDrawnInOrderAndDoneOnce) {
  WorkLeases t(3, 6);
  EXPECT_EQ(t.draw(0), WorkLease(3));
  EXPECT_EQ(t.draw(1), WorkLease(4));
  EXPECT_EQ(t.draw(0), WorkLease(5));
  EXPECT_EQ(t.draw(1), WorkLease());
  EXPECT_FALSE(t.over());  // they are leased
  for (std::int64_t k : {5, 3, 4}) EXPECT_TRUE(t.done(k));
  EXPECT_FALSE(t.done(4));
  EXPECT_TRUE(t.over());
  EXPECT_EQ(t.count_done(), 3);
  EXPECT_TRUE(WorkLeases().over());
}

TEST(WorkLeases, WhosePushWasDroppedAreDrawnAgain) {
  WorkLeases t(0, 2);
  t.draw(0), t.draw(1);
  t.again(0);
  t.again(7);  // nobody has that
  EXPECT_FALSE(t.done(0));
  EXPECT_TRUE(t.done(1));
  EXPECT_FALSE(t.over());
  EXPECT_EQ(t.draw(1), WorkLease(0));
  EXPECT_EQ(t.draw(0), WorkLease());
  t.again(0), t.stop();
  EXPECT_TRUE(t.over()) << "nothing is drawn after that";
  EXPECT_EQ(t.count_done(), 1);
}

TEST(WorkLeases, OfALostWorkerAreDrawnAgain) {
  WorkLeases t(0, 3);
  t.draw(0), t.draw(1), t.draw(0);
  t.lost(0);
  EXPECT_EQ(t.draw(1), WorkLease(0));
  EXPECT_EQ(t.draw(1), WorkLease(2));
  EXPECT_EQ(t.draw(1), WorkLease());
}

TEST(WorkLeases, AfterStopNothingIsDrawn) {
  WorkLeases t(0, 9);
  t.draw(0), t.draw(1);
  t.lost(0);
  t.stop();
  EXPECT_EQ(t.draw(1), WorkLease());
  EXPECT_FALSE(t.over());  // worker 1 is at one
  t.lost(1);
  EXPECT_TRUE(t.over());
  EXPECT_EQ(t.count_done(), 0);
}

TEST(WorkLeases, SeveralOfAnEpochAreDrawnAtOnce) {
  WorkLeases t(3, 20, 4, 8);  // epochs begin at 8 and 16
  EXPECT_EQ(t.draw(0), WorkLease(3));
  EXPECT_EQ(t.held(3)->count, 4);
  EXPECT_EQ(t.draw(1), WorkLease(7));
  EXPECT_EQ(t.held(7)->count, 1);  // the last of its epoch
  EXPECT_EQ(t.draw(1, 0.6), WorkLease(8));
  EXPECT_EQ(t.held(8)->count, 2);
  EXPECT_EQ(t.draw(1, 0.1), WorkLease(10));
  EXPECT_EQ(t.held(10)->count, 1);
  EXPECT_TRUE(t.done(8));
  EXPECT_EQ(t.count_done(), 2);
  t.lost(0);
  EXPECT_EQ(t.draw(1, 0.5), WorkLease(3));  // what was lost may be cut
  EXPECT_EQ(t.held(3)->count, 2);
  EXPECT_EQ(t.draw(2), WorkLease(5));
  EXPECT_EQ(t.held(5)->count, 2);
  EXPECT_FALSE(t.held(8));
  for (std::int64_t k : {3, 5, 7, 10}) EXPECT_TRUE(t.done(k));
  for (std::int64_t k : {11, 15, 16}) EXPECT_EQ(t.draw(0), WorkLease(k));
  EXPECT_EQ(t.held(16)->count, 4);
  EXPECT_EQ(t.draw(0), WorkLease());
  for (std::int64_t k : {11, 15, 16}) EXPECT_TRUE(t.done(k));
  EXPECT_TRUE(t.over());
  EXPECT_EQ(t.count_done(), 17);
}

// What the coordinator has sent since the last look, each as one word: "0<-5" is lease 5 to rank 0, "1<-none",
// "2<-over", "2<-stopped", "2<-end", "1<-heard:3:a|b|" the texts of gathering 3.
struct Told : Channel {
  explicit Told(int ranks) : ranks(ranks), coordinator(*this) {}
  Told(int ranks, WorkLeases leases) : Told(ranks) { coordinator.begin(ranks, false, std::move(leases)); }
  void send(int to, const MessageHeader& header, std::span<const std::byte> bytes,
            std::shared_ptr<const void>) override {
    using namespace message;
    if (!words.empty()) words += ' ';
    words += std::to_string(to) + "<-";
    const Message m = unpacked(header);
    if (const auto* lease = std::get_if<LeaseIs>(&m)) {
      request = lease->request, done = std::uint64_t(lease->leases_done);
      words += lease->count ? std::to_string(lease->lease) : "none";
      if (lease->count > 1) words += "+" + std::to_string(lease->count);
    } else if (const auto* over = std::get_if<Over>(&m)) {
      words += over->stopped ? "stopped" : "over";
    } else if (const auto* heard = std::get_if<Heard>(&m)) {
      words += "heard:" + std::to_string(heard->gathering) + ":";
      for (const std::string& t : unbundle({reinterpret_cast<const char*>(bytes.data()), bytes.size()}))
        words += t + "|";
    } else {
      words += std::holds_alternative<End>(m) ? "end" : "?";
    }
  }
  int rank() const override { return 0; }
  int size() const override { return ranks; }
  std::string where(int rank) const override { return std::to_string(rank); }
  std::vector<bool> living() const override { return {}; }
  std::uint64_t generation() const override { return 0; }
  void on_message(Receiver) override {}
  bool sent() const override { return true; }
  bool progress() override { return false; }
  void rest() override {}
  void wake() override {}
  bool reaches(int) override { return false; }
  void fail(int, const std::string&) override {}
  std::shared_ptr<void> new_block(std::size_t) override { return {}; }

  std::string said() { return std::exchange(words, ""); }
  // Does that, and returns what was said.
  template <class... Given>
  std::string after(void (Coordinator::*act)(Given...), std::type_identity_t<Given>... given) {
    (coordinator.*act)(std::move(given)...);
    return said();
  }
  int ranks;
  std::string words;
  std::uint64_t request = 0, done = 0;
  Coordinator coordinator;
};

TEST(Coordinator, HandsOutWhatThereIs) {
  Told t(3);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 1), "");  // rank 0 has not begun
  t.coordinator.begin(3, false, {0, 2});
  EXPECT_EQ(t.said(), "1<-0");
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 1), "0<-1");
  EXPECT_EQ(t.after(&Coordinator::wants, 2, 7), "2<-none");
  EXPECT_EQ(t.request, 7u);
  EXPECT_EQ(t.after(&Coordinator::wants, 2, 7), "");  // once more: it knows
  EXPECT_TRUE(t.coordinator.done(1, 1));
  EXPECT_FALSE(t.coordinator.done(1, 1));
  EXPECT_EQ(t.after(&Coordinator::lost, 1, 2), "2<-0");
  EXPECT_EQ(t.done, 1u);
  EXPECT_TRUE(t.coordinator.done(0, 3));
  EXPECT_EQ(t.said(), "0<-over 2<-over");
  EXPECT_EQ(t.after(&Coordinator::says_bye, 0), "");
  EXPECT_EQ(t.after(&Coordinator::says_bye, 2), "0<-end 2<-end");
}

// "0<-4+8" are leases 4 to 11. Worker 1 needs four times as long for each.
TEST(Coordinator, ASlowerWorkerIsGivenFewer) {
  Told t(2, WorkLeases(0, 1000, 8));
  std::uint64_t request = 0;
  double now = 0;
  auto work = [&](int worker, std::int64_t lease, double seconds) {
    now += seconds;
    t.coordinator.done(lease, now);
    t.coordinator.wants(worker, ++request);
    return t.said();
  };
  t.coordinator.wants(0, ++request);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, ++request), "0<-0+8 1<-8+8");
  EXPECT_EQ(work(0, 0, 8), "0<-16+8");
  EXPECT_EQ(work(0, 16, 8), "0<-24+8") << "the first time that is known";
  EXPECT_EQ(work(1, 8, 16), "1<-32+8");
  EXPECT_EQ(work(0, 24, 0), "0<-40+8");
  EXPECT_EQ(work(0, 40, 8), "0<-48+8");
  EXPECT_EQ(work(1, 32, 24), "1<-56+2");
  EXPECT_EQ(work(0, 48, 0), "0<-58+8");
  EXPECT_EQ(work(0, 58, 100), "0<-66+8") << "an evaluation is no speed";
  t.coordinator.lost(0, now);
  t.said();
  EXPECT_EQ(work(1, 56, 8), "1<-66+8") << "it is the fastest now";
}

TEST(Coordinator, KnowsHowLongARankWasAway) {
  Told t(2, {0, 10});
  EXPECT_EQ(t.coordinator.back_after(1, 1), 0) << "it was never away";
  t.coordinator.lost(1, 2), t.coordinator.returned(1);
  t.coordinator.lost(1, 5), t.coordinator.returned(1);  // before it had done anything
  EXPECT_EQ(t.coordinator.back_after(1, 9), 7);
  EXPECT_EQ(t.coordinator.back_after(1, 10), 0);
}

// Of 8 seconds a worker with half as many batches waited 4 for the other: it is as fast.
TEST(Coordinator, WaitingForOthersIsNoSlowness) {
  Told t(2, WorkLeases(0, 1000, 8, 20));
  t.coordinator.wants(0, 1);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 1), "0<-0+8 1<-8+8");
  t.coordinator.done(0, 1), t.coordinator.done(8, 1), t.coordinator.wants(1, 2);
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 2), "1<-16+4 0<-20+8");
  t.coordinator.done(20, 9), t.coordinator.done(16, 9, 4);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 3), "1<-28+8");
}

TEST(Coordinator, KnowsWhoWaitsForWhat) {
  Told t(3);
  EXPECT_EQ(t.coordinator.waiting().works, "0, 1, 2");
  t.coordinator.waits_for(2, "a lease", 5), t.coordinator.waits_for(0, "what all say", 6);
  EXPECT_EQ(t.coordinator.waiting().waits, "0 for what all say; 2 for a lease");
  EXPECT_EQ(t.coordinator.waiting().works, "1");
  EXPECT_EQ(t.coordinator.waiting().since, 6);
  t.coordinator.lost(1, 7), t.coordinator.waits_for(2, "", 8);
  EXPECT_EQ(t.coordinator.waiting().waits, "0 for what all say");
  EXPECT_EQ(t.coordinator.waiting().works, "2");
  t.coordinator.begin(3, false, {0, 2});
  t.coordinator.wants(2, 1), t.coordinator.done(0, 9);
  EXPECT_EQ(t.coordinator.waiting().since, 9);
}

TEST(Coordinator, WhoMakesAStepTogetherDrawsTogether) {
  Told t(4);  // the last one only serves
  t.coordinator.begin(3, true, {0, 9});
  t.coordinator.wants(2, 1);
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 1), "");
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 1), "0<-0 1<-1 2<-2");  // in the order of ranks, not of asking
  t.coordinator.wants(1, 2);
  EXPECT_EQ(t.after(&Coordinator::wants, 2, 2), "");
  EXPECT_EQ(t.after(&Coordinator::lost, 0, 1), "1<-0 2<-3");  // nobody waits for it; what it had comes first
  t.coordinator.returned(0);
  t.coordinator.wants(1, 3);
  EXPECT_EQ(t.after(&Coordinator::wants, 2, 3), "");  // it will want one
  EXPECT_EQ(t.after(&Coordinator::leaves, 2), "");
  EXPECT_EQ(t.after(&Coordinator::wants, 0, (1ull << 40) | 1), "0<-2 1<-3");  // the leaver's
}

TEST(Coordinator, StopsWhenWhatIsDrawnIsDone) {
  Told t(2, {0, 9});
  t.coordinator.wants(0, 1);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 1), "0<-0 1<-1");
  t.coordinator.stop();
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 2), "0<-none");
  t.coordinator.done(0, 1);
  EXPECT_EQ(t.said(), "");
  t.coordinator.done(1, 1);
  EXPECT_EQ(t.said(), "0<-stopped 1<-stopped");
}

TEST(Coordinator, AStopFromBeforeTheBeginningIsOne) {
  Told t(2);
  t.coordinator.stop();
  t.coordinator.begin(2, false, {0, 9});
  EXPECT_EQ(t.after(&Coordinator::wants, 1, 1), "0<-stopped 1<-stopped 1<-stopped");
}

TEST(Coordinator, IsOverWhenAllHaveLeft) {
  Told t(3);
  t.coordinator.begin(2, false, {0, 9});
  t.coordinator.wants(0, 1), t.coordinator.wants(1, 1);
  t.said();
  EXPECT_EQ(t.after(&Coordinator::leaves, 0), "");
  EXPECT_EQ(t.after(&Coordinator::lost, 1, 1), "0<-over 2<-over");  // also to who only serves
}

TEST(Coordinator, WhoComesBackAfterTheEndIsToldSo) {
  Told t(2, {0, 0});
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 1), "0<-over 1<-over 0<-over");
  EXPECT_EQ(t.after(&Coordinator::wants, 0, 2), "0<-over");
  t.coordinator.lost(1, 1);
  EXPECT_EQ(t.after(&Coordinator::says_bye, 0), "0<-end");
  t.coordinator.returned(1);
  EXPECT_EQ(t.after(&Coordinator::wants, 1, (1ull << 40) | 1), "1<-over");
  EXPECT_EQ(t.after(&Coordinator::says_bye, 1), "1<-end");
}

TEST(Coordinator, TextsOfAllWhoLive) {
  Told t(3);
  t.coordinator.says(0, 1, "a");
  EXPECT_EQ(t.after(&Coordinator::says, 2, 1, "c"), "");
  EXPECT_EQ(t.after(&Coordinator::says, 1, 1, "b"), "0<-heard:1:a|b|c| 1<-heard:1:a|b|c| 2<-heard:1:a|b|c|");
  t.coordinator.says(1, 2, "x"), t.coordinator.says(0, 2, "y");
  EXPECT_EQ(t.after(&Coordinator::lost, 2, 0), "0<-heard:2:y|x|| 1<-heard:2:y|x||");
  t.coordinator.returned(2);  // from the first on
  EXPECT_EQ(t.after(&Coordinator::says, 2, 1, "C"), "2<-heard:1:a|b|C|");
  EXPECT_EQ(t.after(&Coordinator::says, 2, 2, ""), "2<-heard:2:y|x||");
}

TEST(Coordinator, ALossIsForgottenWhenTheRankIsBack) {
  Told t(2);
  t.coordinator.lost(1, 0);
  EXPECT_EQ(t.after(&Coordinator::says, 0, 1, "a"), "0<-heard:1:a||");
  t.coordinator.returned(1);
  EXPECT_EQ(t.after(&Coordinator::says, 0, 2, "b"), "");  // it lives
  EXPECT_EQ(t.after(&Coordinator::says, 1, 2, "B"), "0<-heard:2:b|B| 1<-heard:2:b|B|");
}

}  // namespace
}  // namespace tandem::test
