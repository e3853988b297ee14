#include "dist/server/shard_server.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tandem {
namespace {

// w becomes the mean of the workers' results: each worker adds its share of the difference that its batch made.
class Averaging : public Rule {
 public:
  explicit Averaging(double share) : share_(share) {}
  std::string name() const override { return "average"; }
  Keeps keeps() const override { return {.sent = true}; }
  void push(const RuleVectors<float>& x, std::int64_t n, const Hyper&) const override { run(x, n); }
  void push(const RuleVectors<double>& x, std::int64_t n, const Hyper&) const override { run(x, n); }
  double correction(const RuleVectors<float>&, std::int64_t, const Hyper&) const override { return 0; }

 private:
  template <class T>
  void run(const RuleVectors<T>& x, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; i++)  // one worker: its result, bit for bit
      x.w[i] = share_ == 1 ? x.g[i] + (x.w[i] - x.sent[i]) : x.w[i] + T(share_) * (x.g[i] - x.sent[i]);
  }
  double share_;
};

// The bytes of a part of a shard, in a vector as long as the shard.
std::span<std::byte> part_of(void* vector, const MessageHeader& n, std::size_t bytes, std::size_t size) {
  return {static_cast<std::byte*>(vector) + n[word::first] * size, bytes};
}

}  // namespace

ShardServer::ShardServer(const ServerLayout& layout, SendQueue& send_queue, std::vector<float> scales)
    : layout_(layout),
      send_queue_(send_queue),
      scales_(std::move(scales)),
      rule_(make_rule(layout.options.how.rule)),
      // With bsp the statistics of a step are already pushed as one mean.
      averaging_(
          std::make_unique<Averaging>(layout.options.how.kind == Asynchrony::Kind::bsp ? 1.0 : 1.0 / layout.workers())),
      host_(reference_backend(1)),
      others_(std::make_shared<int>()),
      shards_(std::size_t(layout.shards())) {
  for (Held& h : shards_) h.clients.resize(std::size_t(layout.workers()));
}
ShardServer::~ShardServer() = default;

// ---- begin ----------------------------------------------------------------------------------------------------------
void ShardServer::begin() {
  for (int s = 0; s < layout_.shards(); s++)
    if (layout_.owner[std::size_t(s)] == send_queue_.rank() && layout_.length(s) == 0) serve(s, tensor(0));
}

void ShardServer::first_part(const MessageHeader& n, std::int64_t numel) {
  if (send_queue_.incarnation() > 0) return;  // for the previous process; other ranks have its shards now
  const int s = int(n[word::shard]);
  First& f = held(s).first;
  f.arrived += numel;
  // It waits for the velocity too: a push that arrived in between would be missing from it.
  if (f.arrived < std::int64_t(n[word::vectors]) * layout_.length(s)) return;
  serve(s, f.values);
  if (f.velocity.defined()) held(s).service->shard().go_on_with(f.velocity);
  f = {};
  open(s);
}

void ShardServer::serve(int s, const Tensor& first) {
  const std::int64_t begin = layout_.begin(s) / 64, end = begin + layout_.length(s) / 64;
  Asynchrony how = layout_.options.how;
  // Statistics are averaged in as they arrive: the mean of a quorum would replace the contributions of the other
  // workers. The statistics of a batch whose gradient is dropped count too.
  if (how.kind != Asynchrony::Kind::bsp && !how.takes_each() && !layout_.of_parameters(s)) how = {};
  held(s).service = std::make_unique<ShardService>(
      rule_of(s), first, std::vector<float>(scales_.begin() + begin, scales_.begin() + end), layout_.workers(),
      ShardService::Options{.how = how,
                            .momentum = layout_.options.momentum,
                            .learning_rate = layout_.options.learning_rate,
                            .record = layout_.options.record});
  const std::vector<bool> living = send_queue_.living();
  // No worker waits for a rank that is absent, or may not have rejoined yet, until that rank sends a request here.
  for (int m = 0; m < layout_.workers(); m++)
    if (!living[std::size_t(m)] || returned_.count(m)) held(s).service->lost(m);
}

void ShardServer::take_over(FailOvers::TakenOver&& a) {
  serve(a.shard, Tensor::wrap(*host_, a.values.data(), {layout_.length(a.shard)}, layout_.dtype, others_));
  ShardService& service = *held(a.shard).service;
  service.go_on(a.state.version, a.state.pushes, a.state.applied);
  std::vector<Tensor> kept = service.shard().kept();
  if (kept.size() == a.kept.size())
    for (std::size_t k = 0; k < kept.size(); k++) std::memcpy(kept[k].raw_write(), a.kept[k].data(), kept[k].bytes());
  open(a.shard);
}

void ShardServer::when_served(int s, int from, std::function<void()> handle) {
  if (held(s).service) return handle();
  held(s).deferred.keep(from, std::move(handle));
}
void ShardServer::open(int s) {
  held(s).deferred.handle();
  answer(s);
}

// ---- pushes and pulls -----------------------------------------------------------------------------------------------
std::optional<std::span<std::byte>> ShardServer::place(int from, const MessageHeader& n, std::size_t bytes) {
  const int s = int(n[word::shard]);
  const auto in = [&](Tensor& t) {
    if (!t.defined()) t = tensor(layout_.length(s));
    return part_of(t.raw_write(), n, bytes, size_of(layout_.dtype));
  };
  if (what_of(n) == What::first_part) return in(n[word::vector] ? held(s).first.velocity : held(s).first.values);
  Client& c = client(s, from);
  if (!begins(c, n)) return {};
  if (layout_.pushed_as(s) == layout_.dtype) return in(c.gradient);
  c.narrow.resize(std::size_t(layout_.length(s)));
  return part_of(c.narrow.data(), n, bytes, sizeof(bf16));
}

// Parts of an abandoned push may be left: its worker continues with a higher number.
bool ShardServer::begins(Client& c, const MessageHeader& n) {
  if (n[word::number] > c.number) c.number = n[word::number], c.arrived = 0, c.push.reset();
  return n[word::number] == c.number;
}

void ShardServer::push_part(int from, const MessageHeader& n, std::int64_t numel) {
  const int s = int(n[word::shard]);
  Client& c = client(s, from);
  if (!begins(c, n)) return;
  if (!c.gradient.defined()) c.gradient = tensor(layout_.length(s));
  if (layout_.pushed_as(s) != layout_.dtype) {
    float* wide = c.gradient.write<float>() + n[word::first];
    const bf16* narrow = c.narrow.data() + n[word::first];
    for (std::int64_t i = 0; i < numel; i++) wide[i] = float(narrow[i]);
  }
  c.arrived += numel;
  request_when_whole(from, s);
}
void ShardServer::push(int from, const MessageHeader& n) {
  Client& c = client(int(n[word::shard]), from);
  if (!begins(c, n)) return;
  c.push = n;
  request_when_whole(from, int(n[word::shard]));
}
void ShardServer::request_when_whole(int from, int s) {
  Client& c = client(s, from);
  if (c.push && c.arrived == layout_.length(s)) request(from, *std::exchange(c.push, {}));
}

Tensor ShardServer::in_memory_of(int rank, SendQueue::Place place, int s) {
  const std::int64_t numel = layout_.length(s);
  return Tensor::wrap(*host_, send_queue_.at(rank, place, layout_.bytes(numel)), {numel}, layout_.dtype, others_);
}

// True if the memory that a request names is reachable. Memory of a process that has just ended is not, unless it was
// reached before. Then no answer is needed, and rank 0 will report that the rank is lost. If it does not, look()
// throws.
bool ShardServer::in_reach(int worker, const MessageHeader& n) {
  const bool answer = n[word::receive_buffer] == word::none || send_queue_.reaches(worker, n[word::receive_buffer]);
  const bool gradient = what_of(n) != What::push_here || send_queue_.reaches(worker, n[word::block]);
  if (!answer || !gradient) out_of_reach_.insert({worker, now()});
  return answer && gradient;
}
void ShardServer::look(double patience) const {
  for (const auto& [worker, since] : out_of_reach_)
    if (now() - since > patience)
      fail(send_queue_.where(worker), " names memory that ", send_queue_.where(send_queue_.rank()), " cannot reach");
}

// The memory for the answer to a worker. The answer to its previous exchange stays unchanged.
Tensor ShardServer::place_answer(int s, int worker, const MessageHeader& n) {
  const std::uint64_t half = n[word::number] & 1, block = n[word::receive_buffer];  // as in worker.h
  if (block != word::none) return in_memory_of(worker, {block, half * layout_.bytes(layout_.length(s))}, s);
  Tensor& t = client(s, worker).answer;
  if (!t.defined()) t = tensor(layout_.length(s));
  return t;
}

void ShardServer::request(int from, const MessageHeader& n) {
  const int s = int(n[word::shard]);
  when_served(s, from, [this, from, n, s] {
    if (!in_reach(from, n)) return;
    Client& c = client(s, from);
    const ExchangeId exchange = n[word::number];
    const auto samples = std::int64_t(n[word::samples]);
    ShardService& service = *held(s).service;
    const Tensor into = place_answer(s, from, n);
    bool fresh;
    if (what_of(n) == What::pull)
      fresh = service.pull(from, exchange, into);
    else if (what_of(n) == What::push_here)
      fresh = service.push(from, exchange, in_memory_of(from, {n[word::block], n[word::offset]}, s), samples, into);
    else
      fresh = service.push(from, exchange, c.gradient.defined() ? c.gradient : tensor(0), samples, into);
    if (fresh) c.receive_buffer = n[word::receive_buffer];  // else a repeated request, which may wait for its answer
    answer(s);
  });
}

void ShardServer::idle(int from, const MessageHeader& n) {
  const int s = int(n[word::shard]);
  when_served(s, from, [this, from, s, exchange = n[word::number], what = what_of(n), is = n[word::blocked] == 1] {
    what == What::idle ? held(s).service->idle(from, exchange) : held(s).service->blocked(from, exchange, is);
    answer(s);
  });
}

void ShardServer::look_at_clock() {
  for (int s = 0; s < layout_.shards(); s++)
    if (held(s).service && held(s).service->due() <= now()) answer(s);
}

void ShardServer::answer(int s) {
  ShardService& service = *held(s).service;
  for (ShardService::Answer& a : service.answers(now())) {
    const bool here = client(s, a.worker).receive_buffer != word::none;
    MessageHeader n = header(What::answer_part, s);
    n[word::number] = a.exchange;
    if (!here)
      send_queue_.send_parts(a.worker, n, {a.weights.raw_write(), layout_.length(s), layout_.dtype},
                             layout_.options.chunk);
    n[word::what] = std::uint64_t(here ? What::answer_here : What::answer_end);
    n[word::pushes] = std::uint64_t(service.counts().pushes);
    n[word::version] = service.shard().version();
    // The verdict is that of the gradient. Statistics that are not finite are refused too, which only the counts show.
    n[word::verdict] = layout_.of_parameters(s) ? std::uint64_t(a.verdict) : 0;
    auto applied = std::make_shared<std::vector<ExchangeId>>(service.applied());
    send_queue_.send(a.worker, n, std::as_bytes(std::span(*applied)), applied);
  }
}

const ShardService* ShardServer::first() const {
  for (const Held& h : shards_)
    if (h.service) return h.service.get();
  return nullptr;
}

void ShardServer::velocity_wanted(int from, int s) {
  when_served(s, from, [this, from, s] {
    const Tensor& velocity = held(s).service->shard().velocity(0);
    auto copy = std::make_shared<Tensor>(velocity.clone());  // the velocity changes during the send
    send_queue_.send_parts(from, header(What::velocity_part, s), {copy->raw_write(), layout_.length(s), layout_.dtype},
                           layout_.options.chunk, copy);
  });
}

// ---- losses ---------------------------------------------------------------------------------------------------------
void ShardServer::lost(int rank) {
  out_of_reach_.erase(rank);
  for (int s = 0; s < layout_.shards(); s++) {
    held(s).deferred.forget(rank);
    if (rank >= layout_.workers()) continue;
    client(s, rank).arrived = 0;
    client(s, rank).push.reset();
    if (!held(s).service) continue;
    held(s).service->lost(rank);
    answer(s);  // other workers may have waited for it
  }
}
void ShardServer::returned(int rank) {
  if (rank >= layout_.workers()) return;
  returned_.insert(rank);
  for (int s = 0; s < layout_.shards(); s++) {
    client(s, rank) = {};
    if (held(s).service) held(s).service->returned(rank);
  }
}

// Sends no snapshot before the previous one is sent: on a slow network there are fewer snapshots, and no queue.
void ShardServer::send_snapshots(int to) {
  if (to == send_queue_.rank() || snapshot_under_way()) return;
  snapshots_++;
  const auto all = std::make_shared<std::vector<Tensor>>();  // copies: the vectors change during the send
  for (int s = 0; s < layout_.shards(); s++) {
    if (!held(s).service) continue;
    const std::vector<Tensor> kept = held(s).service->shard().kept();
    MessageHeader n = header(What::snapshot_part, s);
    n[word::number] = snapshots_;
    n[word::vectors] = kept.size();
    for (std::size_t k = 0; k < kept.size(); k++) {
      n[word::vector] = k;
      Tensor& copy = all->emplace_back(kept[k].clone());
      send_queue_.send_parts(to, n, {copy.raw_write(), layout_.length(s), layout_.dtype}, layout_.options.chunk, all);
    }
  }
  snapshot_under_way_ = all;
}

}  // namespace tandem
