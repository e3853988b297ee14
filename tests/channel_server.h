// What all channels are tried with. serve_or_push: rank 0 holds numbers; every other rank pushes additions and gets the
// sum back, as a parameter server's workers do.
#pragma once
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "dist/server/channel.h"

namespace tandem::test {

// Works until that is so.
template <class Done>
void progress_until(Channel& c, const Done& done) {
  while (!done())
    if (!c.progress()) c.rest();
}
// Waits until what was sent has left; sends a message and waits.
inline void drain(Channel& c) {
  progress_until(c, [&] { return c.sent(); });
}
inline void deliver(Channel& c, int to, const MessageHeader& header, std::span<const std::byte> bytes = {}) {
  c.send(to, header, bytes);
  drain(c);
}

// Every message's bytes go there; those that do not fit are refused.
inline Receiver into(
    std::span<std::byte> room, const decltype(Receiver::arrived)& arrived = [](auto&&...) {}) {
  return {.place = [=](int, const MessageHeader&, std::size_t n) { return room.first(std::min(n, room.size())); },
          .arrived = arrived};
}

inline void serve_or_push(Channel& c, std::size_t count, int pushes) {
  enum : std::uint64_t { push = 1, answer = 2, end = 3 };
  auto bytes_of = [](std::vector<float>& x) { return std::as_writable_bytes(std::span(x)); };
  const int workers = c.size() - 1;
  if (c.rank() == 0) {
    std::vector<float> sum(count);
    std::map<int, std::vector<float>> staged, answers;
    int ended = 0, applied = 0;
    const auto place = [&](int from, const MessageHeader& header, std::size_t) -> std::span<std::byte> {
      if (header[0] == end) return {};
      staged[from].resize(count);
      return bytes_of(staged[from]);
    };
    const auto arrived = [&](int from, const MessageHeader& header, std::span<std::byte>) {
      if (header[0] == end) return void(ended++);
      for (std::size_t i = 0; i < count; i++) sum[i] += staged[from][i];
      applied++;
      answers[from] = sum;
      c.send(from, {answer, header[1]}, std::as_bytes(std::span(answers[from])));
    };
    c.on_message({.place = place, .arrived = arrived});
    progress_until(c, [&] { return ended == workers && c.sent(); });
    require(applied == workers * pushes, applied, " pushes were applied");
    for (float v : sum) require(v == float(workers * (workers + 1) / 2 * pushes), "the sum is ", v);
    return;
  }
  std::vector<float> mine(count, float(c.rank())), now(count);
  std::uint64_t answered = 0;
  c.on_message(into(bytes_of(now), [&](int, const MessageHeader& header, auto) { answered = header[1]; }));
  for (std::uint64_t step = 1; step <= std::uint64_t(pushes); step++) {
    deliver(c, 0, {push, step}, std::as_bytes(std::span(mine)));
    progress_until(c, [&] { return answered == step; });
    require(now[count - 1] >= float(step) * float(c.rank()), "the answer to push ", step, " is ", now[count - 1]);
  }
  deliver(c, 0, {end});
}

// A rank that only listens: what it was told, in order.
struct Listener {
  explicit Listener(Channel& c) : channel(c) {
    Receiver receiver;
    receiver.place = [](int, const MessageHeader&, std::size_t) { return std::nullopt; };
    receiver.arrived = [this](int from, const MessageHeader& header, std::span<std::byte>) {
      require(!lost.count(from), "a message of rank ", from, " after its loss");
      headers[from].push_back(header[0]);
    };
    receiver.shared = [this](int from, const MessageHeader& header, std::span<std::byte> bytes) {
      headers[from].push_back(header[0]);
      shared = bytes;
    };
    receiver.lost = [this](int rank, const std::string& why) {
      require(!channel.living()[rank], "rank ", rank, " is lost and lives");
      told += why + "; ";
      lost.insert(rank);
    };
    receiver.returned = [this](int rank, std::uint64_t incarnation) {
      require(channel.living()[rank], "rank ", rank, " is back and does not live");
      told += "rank " + std::to_string(rank) + " is back as " + std::to_string(incarnation) + "; ";
      lost.erase(rank);
    };
    c.on_message(receiver);
  }
  template <class Done>
  void until(const Done& done, double seconds = 10) {
    const auto begin = std::chrono::steady_clock::now();
    while (!done()) {
      if (!channel.progress()) channel.rest();
      require(std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(seconds),
              "waited in vain: ", told);
    }
  }
  Channel& channel;
  std::set<int> lost;
  std::map<int, std::vector<std::uint64_t>> headers;
  std::span<std::byte> shared = {};  // of the last message whose bytes are in the sender's memory
  std::string told;
};

}  // namespace tandem::test
