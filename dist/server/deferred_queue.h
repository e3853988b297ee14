// DeferredQueue: messages that arrived too early. They are handled later in their order. The messages of a lost rank
// are deleted: the rank may rejoin, and would receive answers to the requests of its previous process.
#pragma once
#include <functional>
#include <utility>
#include <vector>

namespace tandem {

class DeferredQueue {
 public:
  static constexpr int nobody = -1;  // an entry of no rank; forget() keeps it
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
