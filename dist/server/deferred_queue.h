// DeferredQueue: what came before its time, handled in its order when that has come. What a lost rank had sent is
// forgotten: it may come back, and would be answered where its predecessor wanted it.
#pragma once
#include <functional>
#include <utility>
#include <vector>

namespace tandem {

class DeferredQueue {
 public:
  static constexpr int nobody = -1;  // what is not a rank's, and not forgotten
  void keep(int from, std::function<void()> handle) { kept_.push_back({from, std::move(handle)}); }
  void forget(int from) {
    std::erase_if(kept_, [&](const Kept& k) { return k.from == from; });
  }
  void handle() {
    for (Kept& k : std::exchange(kept_, {})) k.handle();
  }

 private:
  struct Kept {
    int from;
    std::function<void()> handle;
  };
  std::vector<Kept> kept_;
};

}  // namespace tandem
