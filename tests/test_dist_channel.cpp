// Channel: a small key-value server on in-process ranks; the same over UCX is in test_dist_processes.cpp.
#include "dist/channel.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/channel_server.h"
#include "tests/ranks.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

template <class Body>
std::vector<std::string> on_channels(int n, const Body& body, double deadline = 20) {
  auto channels = in_process_channels(n, deadline);
  return ranks_say(n, [&](int r) {
    auto c = std::move(channels[std::size_t(r)]);
    body(*c);
  });
}

TEST(CommunicatorChannel, AServerAddsUpWhatWorkersPush) {
  for (std::size_t count : {std::size_t(1), std::size_t(1000), std::size_t(300000)})
    for (const auto& s : on_channels(4, [&](Channel& c) { serve_or_push(c, count, 20); })) EXPECT_EQ(s, "");
}

TEST(CommunicatorChannel, AMessageToOneselfArrives) {
  for (const auto& s : on_channels(1, [](Channel& c) {
         std::vector<std::byte> memory(5), sent(5, std::byte{7});
         int arrived = 0;
         c.on_message({.place = [&](int, const Note&, std::size_t) { return std::span(memory); },
                       .arrived = [&](int from, const Note& note,
                                      std::span<std::byte>) { arrived += from == 0 && note[3] == 9; }});
         c.send(0, {0, 0, 0, 9}, sent).wait();
         while (c.progress()) {}
         require(arrived == 1 && memory == sent, "it has not arrived");
       }))
    EXPECT_EQ(s, "");
}

TEST(CommunicatorChannel, NoRoomAndNoReceiverAreNamed) {
  auto said = on_channels(2, [](Channel& c) {
    std::vector<std::byte> bytes(8);
    c.on_message({.place = [&](int, const Note&, std::size_t) { return std::span(bytes).first(4); },
                  .arrived = [](int, const Note&, std::span<std::byte>) {}});
    if (c.rank() == 1) c.send(0, {}, bytes).wait();
    for (int i = 0; i < 1000; i++) c.progress(), c.rest();
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 1 sends 8 bytes where rank 0 has room for 4");
  said = on_channels(
      2,
      [](Channel& c) {
        std::vector<std::byte> bytes(8);
        if (c.rank() == 1) c.send(0, {}, bytes).wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
      },
      0.3);
  EXPECT_EQ(said[1], "rank 0 does not take a message of rank 1");
  said = on_channels(2, [](Channel& c) {
    std::vector<std::byte> bytes(8);
    if (c.rank() == 1) c.send(0, {}, bytes).wait();
  });
  EXPECT_EQ(said[1], "rank 1 sends a message to rank 0, which has left");
}

}  // namespace
}  // namespace tandem::test
