#include "dist/job/roll_call.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/job/handshake.h"

namespace tandem {

RollCall::RollCall(int rank, int socket, std::string token, std::vector<Card> cards)
    : rank_(rank), size_(int(cards.size())), socket_(socket), token_(std::move(token)), cards_(std::move(cards)) {}

RollCall::~RollCall() {
  if (socket_ >= 0) close(socket_);
}

std::vector<int> RollCall::answer(const std::vector<bool>& lost, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::atomic<bool>> here(static_cast<std::size_t>(size_));
  here[std::size_t(rank_)] = true;
  std::atomic<bool> over{false};
  Gate gate(std::exchange(socket_, -1), token_);

  // Of two ranks the one with the larger number knocks. The other may notice the failure later, or be gone.
  std::vector<std::thread> knocking;
  for (int r = 0; r < rank_; r++)
    knocking.emplace_back([&, r] {
      const Card& card = cards_[std::size_t(r)];
      while (!over && Clock::now() < until) try {
          close(knock(card.address, card.port, token_, rank_, size_, 0.5));
          here[std::size_t(r)] = true;
          return;
        } catch (const Error&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    });
  auto complete = [&] {
    for (std::size_t r = 0; r < here.size(); r++)
      if (!here[r] && !lost[r]) return false;
    return true;
  };
  while (!complete() && Clock::now() < until)
    for (const Gate::Guest& guest : gate.wait(0.02)) {
      close(guest.connection);
      if (guest.ranks == size_ && guest.rank >= 0 && guest.rank < size_) here[std::size_t(guest.rank)] = true;
    }
  over = true;
  for (auto& t : knocking) t.join();

  std::vector<int> found;
  for (int r = 0; r < size_; r++)
    if (here[std::size_t(r)]) found.push_back(r);
  return found;
}

}  // namespace tandem
