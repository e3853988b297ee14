#include "dist/job/survivor_agreement.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/job/handshake.h"

namespace tandem {

SurvivorAgreement::SurvivorAgreement(int rank, int socket, std::string token, const Membership& members)
    : rank_(rank),
      size_(int(members.slots.size())),
      socket_(socket),
      token_(std::move(token)),
      members_(members.slots) {}

SurvivorAgreement::~SurvivorAgreement() {
  if (socket_ >= 0) close(socket_);
}

std::vector<int> SurvivorAgreement::answer(const std::vector<bool>& lost, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::atomic<bool>> here(static_cast<std::size_t>(size_));
  here[std::size_t(rank_)] = true;
  std::atomic<bool> over{false};
  HandshakeListener listener(std::exchange(socket_, -1), token_);

  // Between two ranks, the one with the larger number connects. The other may notice the failure later, or may have
  // ended.
  std::vector<std::thread> connecting;
  for (int r = 0; r < rank_; r++)
    connecting.emplace_back([&, r] {
      const AddressRecord& record = members_[std::size_t(r)].record;
      while (!over && Clock::now() < until) try {
          close(connect_with_token(record.address, record.port, token_, rank_, size_, 0.5));
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
    for (const HandshakeListener::Accepted& accepted : listener.wait(0.02)) {
      close(accepted.connection);
      if (accepted.ranks == size_ && accepted.rank >= 0 && accepted.rank < size_)
        here[std::size_t(accepted.rank)] = true;
    }
  over = true;
  for (auto& t : connecting) t.join();

  std::vector<int> found;
  for (int r = 0; r < size_; r++)
    if (here[std::size_t(r)]) found.push_back(r);
  return found;
}

}  // namespace tandem
