#include "dist/collectives/hierarchy.h"

#include <algorithm>

#include "dist/collectives/node.h"
#include "dist/collectives/operations.h"

namespace tandem {
namespace {

class Hierarchy : public QueuedCommunicator {
 public:
  Hierarchy(std::unique_ptr<Communicator> base, std::unique_ptr<Communicator> lane,
            std::unique_ptr<Communicator> scatter, std::unique_ptr<Communicator> gather, int host)
      : QueuedCommunicator(base->group()),
        host_(host),
        base_(std::move(base)),
        lane_(std::move(lane)),
        scatter_(std::move(scatter)),
        gather_(std::move(gather)) {}

  Work begin(const Call& call) override {
    if (call.kind != Kind::all_reduce) return base_->begin(call);
    return add(std::make_shared<AllReduce>(*this, call, header_of(call, 0)));
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = base_->split(color, key);
    return part ? hierarchy(std::move(part), host_) : nullptr;
  }

  void wake() override {}
  std::shared_ptr<void> allocate(std::size_t bytes) override { return scatter_->allocate(bytes); }
  Traffic traffic() const override {
    const Traffic base = base_->traffic();
    return {base.bytes, "shared memory, and between hosts " + base.transport};
  }

 private:
  struct AllReduce : Operation {
    using Operation::Operation;
    int begun = 0;  // stages
    Work stage;
  };
  static constexpr int stages = 3;

  Work begin_stage(int number, const Call& call) {
    const Cuts cuts = even_cuts(call.data.count, scatter_->size());
    if (number == 0) return scatter_->reduce_scatter(call.data, call.combine, cuts);
    if (number == 2) return gather_->all_gather(call.data, cuts);
    const auto me = std::size_t(scatter_->rank());
    return lane_->all_reduce({call.data.at(cuts[me]), cuts[me + 1] - cuts[me], call.data.dtype}, call.combine);
  }
  // An operation begins a stage only after the operation before it has begun the same stage.
  bool carry_on() override {
    bool moved = false;
    int before = stages;
    for (const auto& each : operations_) {
      auto& o = static_cast<AllReduce&>(*each);
      while (!o.over && o.stage.done()) {
        if (o.begun == stages)
          o.over = true;
        else if (o.begun < before)
          o.stage = begin_stage(o.begun++, o.call);
        else
          break;
        moved = true;
      }
      before = o.begun;
    }
    while (!operations_.empty() && operations_.front()->over) operations_.pop_front();
    return moved;
  }
  void check(Operation&) override {}  // the stages' communicators check

  int host_;
  std::unique_ptr<Communicator> base_, lane_, scatter_, gather_;
};

}  // namespace

std::unique_ptr<Communicator> hierarchy(std::unique_ptr<Communicator> base, int host) {
  if (base->size() == 1) return base;
  std::vector<std::int32_t> hosts(std::size_t(base->size()));
  hosts[std::size_t(base->rank())] = host;
  base->all_gather(buffer(hosts)).wait();
  const auto here = std::ranges::count(hosts, host);
  if (here == base->size()) return on_node(std::move(base));
  if (here == 1 || !std::ranges::all_of(hosts, [&](int h) { return std::ranges::count(hosts, h) == here; }))
    return base;
  const auto local = std::count(hosts.begin(), hosts.begin() + base->rank(), host);
  auto scatter = on_node(base->split(host, base->rank())), gather = on_node(base->split(host, base->rank()));
  auto lane = base->split(int(local), base->rank());
  return std::make_unique<Hierarchy>(std::move(base), std::move(lane), std::move(scatter), std::move(gather), host);
}

}  // namespace tandem
