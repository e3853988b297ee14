#include "dist/job/survivor_agreement.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/error.h"

namespace tandem {

std::vector<int> surviving_ranks(int rank, HandshakeListener& listener, const std::string& token,
                                 const std::vector<MemberSlot>& members, const std::vector<bool>& lost,
                                 double seconds) {
  const double until = now() + seconds;
  const int size = int(members.size());
  std::vector<std::atomic<bool>> here(members.size());
  here[std::size_t(rank)] = true;
  std::atomic<bool> over{false};
  listener.open();

  // Between two ranks, the one with the larger number connects. The other may notice the failure later, or may have
  // ended.
  std::vector<std::thread> connecting;
  for (int r = 0; r < rank; r++)
    connecting.emplace_back([&, r] {
      const AddressRecord& record = members[std::size_t(r)].record;
      while (!over && now() < until) try {
          close(connect_with_token(record.address, record.port, token, rank, size, 0.5));
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
  while (!complete() && now() < until)
    for (const HandshakeListener::Accepted& accepted : listener.wait(0.02)) {
      close(accepted.connection);
      if (accepted.ranks == size && accepted.rank >= 0 && accepted.rank < size) here[std::size_t(accepted.rank)] = true;
    }
  over = true;
  for (auto& t : connecting) t.join();

  std::vector<int> found;
  for (int r = 0; r < size; r++)
    if (here[std::size_t(r)]) found.push_back(r);
  return found;
}

}  // namespace tandem
