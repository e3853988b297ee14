#include "dist/collectives/hierarchy.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "dist/collectives/node.h"

namespace tandem {
namespace {

class Hierarchy;

// Executes Works one after the other.
class Stages : public Work::Operation {
 public:
  Stages(Hierarchy& all, std::vector<std::function<Work()>> stages) : all_(all), stages_(std::move(stages)) {}
  ~Stages() override;
  bool advance() override;
  void wait() override;

 private:
  friend class Hierarchy;
  bool over() const { return done_ == stages_.size(); }
  bool carry_on(std::size_t before);  // `before`: stages begun by the collective before this one
  Hierarchy& all_;
  std::vector<std::function<Work()>> stages_;
  std::size_t begun_ = 0, done_ = 0;
  Work work_;
};

class Hierarchy : public Communicator {
 public:
  Hierarchy(std::unique_ptr<Communicator> base, std::unique_ptr<Communicator> lane,
            std::unique_ptr<Communicator> scatter, std::unique_ptr<Communicator> gather, int host)
      : Communicator(base->group()),
        host_(host),
        base_(std::move(base)),
        lane_(std::move(lane)),
        scatter_(std::move(scatter)),
        gather_(std::move(gather)) {}
  Work send(int to, Buffer data, int tag) override { return base_->send(to, data, tag); }
  Work recv(int from, Buffer data, int tag) override { return base_->recv(from, data, tag); }
  Work broadcast(Buffer data, int root) override { return base_->broadcast(data, root); }
  Work reduce_scatter(Buffer data, Combine combine, const Cuts& cuts) override {
    return base_->reduce_scatter(data, combine, cuts);
  }
  Work all_gather(Buffer data, const Cuts& cuts) override { return base_->all_gather(data, cuts); }
  Work barrier() override { return base_->barrier(); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = base_->split(color, key);
    return part ? hierarchy(std::move(part), host_) : nullptr;
  }

  Work all_reduce(Buffer data, Combine combine) override {
    const Cuts cuts = even_cuts(data.count, scatter_->size());
    const auto me = std::size_t(scatter_->rank());
    const Buffer mine{data.at(cuts[me]), cuts[me + 1] - cuts[me], data.dtype};
    auto stages = std::make_unique<Stages>(
        *this, std::vector<std::function<Work()>>{[=, this] { return scatter_->reduce_scatter(data, combine, cuts); },
                                                  [=, this] { return lane_->all_reduce(mine, combine); },
                                                  [=, this] { return gather_->all_gather(data, cuts); }});
    queue_.push_back(stages.get());
    return Work(std::move(stages));
  }

  // The host's ranks signal by a futex, and the other hosts by a descriptor. No call waits for both, so the sleeps are
  // short.
  void rest() override { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void wake() override {}
  std::shared_ptr<void> allocate(std::size_t bytes) override { return scatter_->allocate(bytes); }
  Traffic traffic() const override {
    const Traffic base = base_->traffic();
    return {base.bytes, "shared memory, and between hosts " + base.transport};
  }

  void carry_on() {
    std::size_t before = 3;
    for (Stages* s : queue_) {
      s->carry_on(before);
      before = s->begun_;
    }
    while (!queue_.empty() && queue_.front()->over()) queue_.pop_front();
  }
  std::deque<Stages*> queue_;

 private:
  int host_;
  std::unique_ptr<Communicator> base_, lane_, scatter_, gather_;
};

Stages::~Stages() {
  if (auto at = std::find(all_.queue_.begin(), all_.queue_.end(), this); at != all_.queue_.end()) all_.queue_.erase(at);
}
bool Stages::carry_on(std::size_t before) {
  while (!over()) {
    if (begun_ == done_) {
      if (begun_ >= before) return false;
      work_ = stages_[begun_++]();
    }
    if (!work_.done()) return false;
    done_++;
  }
  return true;
}
bool Stages::advance() {
  all_.carry_on();
  return over();
}
void Stages::wait() {
  while (!advance()) all_.rest();
}

}  // namespace

std::unique_ptr<Communicator> hierarchy(std::unique_ptr<Communicator> base, int host) {
  if (base->size() == 1) return base;
  std::vector<std::int32_t> hosts(std::size_t(base->size()));
  hosts[std::size_t(base->rank())] = host;
  base->all_gather(buffer(hosts)).wait();
  std::vector<std::int32_t> kinds = hosts;
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  const auto here = std::count(hosts.begin(), hosts.end(), host);
  const bool even =
      std::all_of(kinds.begin(), kinds.end(), [&](int h) { return std::count(hosts.begin(), hosts.end(), h) == here; });
  if (kinds.size() == 1) return on_node(std::move(base));
  if (!even || here == 1) return base;
  const auto local = std::count(hosts.begin(), hosts.begin() + base->rank(), host);
  auto scatter = on_node(base->split(host, base->rank())), gather = on_node(base->split(host, base->rank()));
  auto lane = base->split(int(local), base->rank());
  return std::make_unique<Hierarchy>(std::move(base), std::move(lane), std::move(scatter), std::move(gather), host);
}

}  // namespace tandem
