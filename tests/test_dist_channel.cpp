// Channel: a small key-value server on in-process ranks; the same over UCX is in test_dist_processes.cpp.
#include "dist/collectives/in_process.h"

#include "tests/channel_server.h"
#include "tests/ranks.h"
#include "tests/support_channels.h"

namespace tandem::test {
namespace {

using Body = std::function<void(Channel&)>;
std::vector<std::string> on_channels(int n, const ChannelFaults& faults, const Body& body) {
  auto channels = in_process_channels(n, faults);
  return ranks_say(n, [&](int r) {
    auto c = std::move(channels[r]);
    body(*c);
  });
}
std::vector<std::string> on_channels(int n, const Body& body) { return on_channels(n, {}, body); }

TEST(CommunicatorChannel, AServerAddsUpWhatWorkersPush) {
  for (std::size_t count : {1, 1000, 300000})
    all_well(on_channels(4, [&](Channel& c) { serve_or_push(c, count, 20); }));
}

TEST(CommunicatorChannel, AMessageToOneselfArrives) {
  all_well(on_channels(1, [](Channel& c) {
    std::vector<std::byte> memory(5), sent(5, std::byte{7});
    int arrived = 0;
    c.on_message(
        into(memory, [&](int from, const MessageHeader& header, auto) { arrived += from == 0 && header[3] == 9; }));
    deliver(c, 0, {0, 0, 0, 9}, sent);
    while (c.progress()) {}
    require(arrived == 1 && memory == sent, "it has not arrived");
  }));
}

TEST(CommunicatorChannel, NoRoomAndNoReceiverAreNamed) {
  auto said = on_channels(2, [](Channel& c) {
    std::vector<std::byte> bytes(8);
    c.on_message(into(std::span(bytes).first(4)));
    if (c.rank() == 1) deliver(c, 0, {}, bytes);
    for (int i = 0; i < 1000; i++) c.progress(), c.rest();
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 1 sends 8 bytes where rank 0 has room for 4");
  said = on_channels(2, [](Channel& c) {
    std::vector<std::byte> bytes(8);
    if (c.rank() == 1) deliver(c, 0, {}, bytes);
  });
  EXPECT_EQ(said[1], "rank 1 sends a message to rank 0, which has left");
}

// ---- ranks that are lost, and come back -----------------------------------------------------------------------------
TEST(CommunicatorChannel, AllHearOfLossesInOneOrder) {
  for (std::uint64_t seed : {0, 1, 2, 3}) {
    std::vector<std::string> told(5);
    const auto said = on_channels(5, {.deaths = {{2, 7}, {4, 23}}, .delays = seed}, [&](Channel& c) {
      Listener l(c);
      for (std::uint64_t i = 0; i < 40; i++)
        for (int to = 0; to < 5; to++) deliver(c, to, {i});  // also to the dead
      l.until([&] { return l.lost == std::set<int>{2, 4}; });
      l.until([&] { return l.headers[0].size() >= 40 && l.headers[1].size() >= 40 && l.headers[3].size() >= 40; });
      told[c.rank()] = l.told;
      EXPECT_EQ(c.living(), (std::vector<bool>{true, true, false, true, false}));
      for (auto& [from, headers] : l.headers)
        for (std::size_t i = 0; i < headers.size(); i++) EXPECT_EQ(headers[i], i) << "of rank " << from;
      for (int r : {0, 1, 3}) deliver(c, r, {40});
      l.until([&] { return l.headers[0].size() == 41 && l.headers[1].size() == 41 && l.headers[3].size() == 41; });
    });
    for (std::size_t r : {0, 1, 3}) EXPECT_EQ(said[r], "") << "rank " << r;
    EXPECT_EQ(said[2], "rank 2 is killed by the test");
    EXPECT_EQ(said[4], "rank 4 is killed by the test");
    EXPECT_EQ(told[1], told[0]);
    EXPECT_EQ(told[3], told[0]);
  }
}

TEST(CommunicatorChannel, WithoutRankZeroOrSomebodyWhoHearsOfItALossIsEverybodysFailure) {
  auto said = on_channels(3, {.deaths = {{0, 1}}}, [](Channel& c) {
    Listener l(c);
    if (c.rank() == 0) c.send(1, {}), c.send(1, {});
    l.until([] { return false; });
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 0 is killed by the test");
  said = on_channels(3, {.deaths = {{2, 0}}}, [](Channel& c) {
    c.on_message(into({}));
    if (c.rank() == 2) c.send(1, {});
    progress_until(c, [] { return false; });
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 2 is killed by the test");
  said = on_channels(3, [](Channel& c) {
    Listener l(c);
    if (c.rank() == 1) c.fail(2, "rank 2 has done it");
    l.until([] { return false; });
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 2 has done it");
}

TEST(CommunicatorChannel, WhoEndsWithAnErrorIsLostAndWhoEndsWellIsNot) {
  const auto said = on_channels(4, [](Channel& c) {
    Listener l(c);
    if (c.rank() == 2) throw Error("a full disk");
    if (c.rank() == 3) return;
    l.until([&] { return l.lost.count(2) > 0; });
    EXPECT_EQ(l.told, "rank 2 has left with an error; ");
  });
  EXPECT_EQ(said, (std::vector<std::string>{"", "", "a full disk", ""}));
}

TEST(CommunicatorChannel, ALostRankComesBack) {
  for (std::uint64_t seed : {0, 5, 6}) {
    auto channels = in_process_channels(3, {.deaths = {{1, 2}, {1, 4}}, .delays = seed});
    std::vector<std::string> told(3);
    all_well(ranks_say(3, [&](int r) {
      auto c = std::move(channels[r]);
      if (r != 1) {
        Listener l(*c);
        // Messages to rank 1 all the while: none may reach another incarnation than the one that this rank knows.
        l.until([&] {
          const std::string told_so_far = l.told;
          deliver(*c, 1, {std::uint64_t(std::count(told_so_far.begin(), told_so_far.end(), ';'))});
          return holds(told_so_far, {"back as 2"}) && l.headers[1].size() >= 2 && l.headers[1].back() == 999;
        });
        told[r] = l.told;
        // Each of rank 0 and 2 stays until the other is done with it.
        deliver(*c, 2 - r, {0});
        l.until([&] { return !l.headers[2 - r].empty(); });
        return;
      }
      for (std::uint64_t k = 0; k < 3; k++) {
        require(c->incarnation() == k, "incarnation ", c->incarnation(), " instead of ", k);
        require(c->living()[1], "rank 1 is not there for itself");
        try {
          Listener l(*c);
          if (k == 2) {
            deliver(*c, 0, {999});
            deliver(*c, 2, {999});
            // Both have heard of everything before they end.
            for (int i = 0; i < 20; i++)
              if (!c->progress()) c->rest();
          } else {
            for (std::uint64_t i = 0;; i++) deliver(*c, int(i % 2) * 2, {i});
          }
          for (auto& [from, eras] : l.headers)
            for (std::uint64_t e : eras) require(e == 2 * k, "rank ", from, " sent to another incarnation");
          require(l.told.empty(), "who came back was told ", l.told);
        } catch (const Killed&) {
          c = in_process_return(*c, 1);
        }
      }
    }));
    EXPECT_EQ(told[0],
              "rank 1 is killed by the test; rank 1 is back as 1; rank 1 is killed by the test; rank 1 is back as 2; ");
    EXPECT_EQ(told[2], told[0]);
  }
}

// Bytes in shared memory are not sent: the receiver has the sender's memory, also of a process that was lost.
TEST(CommunicatorChannel, MemoryIsShared) {
  for (bool shared : {true, false}) {
    auto channels = in_process_channels(2, {.deaths = {{1, 1}}, .shared_memory = shared});
    all_well(ranks_say(2, [&](int r) {
      auto c = std::move(channels[r]);
      const auto block = c->share(5000);
      int* const mine = static_cast<int*>(block.get());
      if (r == 1) {
        try {
          mine[1] = 7;
          Listener l(*c);
          l.until([&] { return !l.headers[0].empty(); });
          deliver(*c, 0, {1}, std::as_bytes(std::span(mine, 1250)));
          require(c->bytes_sent() == (shared ? 0 : 5000), c->bytes_sent(), " bytes were sent");
          deliver(*c, 0, {2});
        } catch (const Killed&) {
          c = in_process_return(*c, 1);
        }
        const auto fresh = c->share(8);
        Listener l(*c);
        deliver(*c, 0, {3}, std::as_bytes(std::span(static_cast<int*>(fresh.get()), 2)));
        l.until([&] { return !l.headers[0].empty(); });
        require(static_cast<int*>(fresh.get())[1] == (shared ? 9 : 0), "rank 0 has written elsewhere");
        return;
      }
      Listener l(*c);
      deliver(*c, 1, {0});
      l.until([&] { return l.headers[1].size() == 1; });
      const auto old = l.shared;
      require(old.size() == (shared ? 5000 : 0), "a block of ", old.size());
      l.until([&] { return l.headers[1].size() == 2; });
      require(old.empty() || reinterpret_cast<int*>(old.data())[1] == 7, "what rank 1 wrote is gone");
      require(l.shared.size() == (shared ? 8 : 0), "a fresh block of ", l.shared.size());
      if (shared) reinterpret_cast<int*>(l.shared.data())[1] = 9;
      deliver(*c, 1, {4});
    }));
  }
}

// A rank that dies gives up what it was sending; the bytes of that live until the receiver has them.
TEST(CommunicatorChannel, BytesAreKeptUntilTheyAreSent) {
  auto channels = in_process_channels(2);
  std::vector<int> there(3);
  channels[1]->on_message(into(std::as_writable_bytes(std::span(there))));
  bool freed = false;
  {
    const std::shared_ptr<std::vector<int>> bytes(new std::vector<int>{1, 2, 3}, [&](std::vector<int>* v) {
      freed = true;
      v->assign(3, -1);
      delete v;
    });
    channels[0]->send(1, {}, std::as_bytes(std::span(*bytes)), bytes);
  }
  EXPECT_FALSE(channels[0]->sent());
  channels[0].reset();
  EXPECT_FALSE(freed);
  channels[1]->progress();
  EXPECT_TRUE(freed);
  EXPECT_EQ(there, (std::vector<int>{1, 2, 3}));
}

TEST(CommunicatorChannel, DelayedMessagesOfARankKeepTheirOrderAndSomeComeTwice) {
  std::set<std::vector<int>> orders;
  int doubles = 0;
  for (std::uint64_t seed : {0, 7, 8, 9}) {
    std::vector<int> order;
    all_well(on_channels(4, {.delays = seed, .duplicates = seed != 8}, [&](Channel& c) {
      std::map<int, std::uint64_t> next;
      int twice = 0;
      c.on_message(into({}, [&](int from, const MessageHeader& header, auto) {
        require(header[0] <= next[from], "message ", header[0], " of rank ", from, " after ", next[from]);
        twice += header[0] < next[from];
        next[from] = std::max(next[from], header[0] + 1);
        order.push_back(from);
      }));
      progress_until(c, [&] { return c.rank() > 0 || next[1] + next[2] + next[3] == 300; });
      if (c.rank() == 0) doubles += twice;
      for (std::uint64_t i = 0; i < 100 && c.rank() > 0; i++) c.send(0, {i});
      drain(c);
    }));
    orders.insert(order);
  }
  EXPECT_GT(doubles, 10);
  EXPECT_EQ(orders.size(), 4u);
}

}  // namespace
}  // namespace tandem::test
