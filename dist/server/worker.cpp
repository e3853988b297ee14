#include "dist/server/worker.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tandem {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

// A shard's part of the model's vectors. The end of the statistics' shard is unused.
Buffer model_part(const ServerLayout& layout, int s, Buffer parameters, Buffer buffers) {
  if (!layout.of_parameters(s)) return buffers;
  return {parameters.at(layout.begin(s)), layout.length(s), layout.dtype};
}

}  // namespace

Worker::Worker(const ServerLayout& layout, SendQueue& send_queue)
    : layout_(layout),
      send_queue_(send_queue),
      buffers_out_(send_queue.share(std::max<std::size_t>(64, layout.bytes(layout.buffers)))),
      narrow_(std::size_t(layout.wire() == layout.dtype ? 0 : layout.parameters)),
      sent_(std::size_t(layout.shards())),
      answers_(std::size_t(layout.shards())),
      copies_(std::size_t(layout.shards())),
      velocity_missing_(std::size_t(layout.shards())) {
  for (int s = 0; s < layout.shards(); s++) receive_buffers_.push_back(receive_buffer(s));
}

Worker::ReceiveBuffer Worker::receive_buffer(int s) {
  auto memory = send_queue_.share(std::max<std::size_t>(64, 2 * layout_.bytes(layout_.length(s))));
  const std::uint64_t block = send_queue_.place_of(memory.get())->block;
  return {std::move(memory), block};
}

// ---- the training thread --------------------------------------------------------------------------------------------
void Worker::keep_first(Buffer parameters, Buffer buffers) {
  for (int s = 0; s < layout_.shards(); s++) {
    const Buffer part = model_part(layout_, s, parameters, buffers);
    copy(half(0, s).data, part.data, part.bytes());
    copies_[std::size_t(s)] =
        Copy{.half = 0, .state = {.applied = std::vector<ExchangeId>(std::size_t(layout_.workers()))}};
  }
}
void Worker::keep_buffers(Buffer buffers) { copy(buffers_out_.get(), buffers.data, buffers.bytes()); }
void Worker::copy_answer(int h, Buffer parameters, Buffer buffers) const {
  std::lock_guard lock(mutex_);
  for (int s = 0; s < layout_.shards(); s++) {
    const Buffer part = model_part(layout_, s, parameters, buffers);
    copy(part.data, half(h, s).data, part.bytes());
  }
}

// ---- sending --------------------------------------------------------------------------------------------------------
// The data sent from the first half stays unchanged: the answer to the second exchange is written there, and no owner
// answers the first exchange before these messages have arrived.
void Worker::send_first(std::vector<std::byte> velocity) {
  const auto v = std::make_shared<std::vector<std::byte>>(std::move(velocity));
  for (int s = 0; s < layout_.shards(); s++) {
    const int to = layout_.owner[std::size_t(s)];
    const bool both = !v->empty() && layout_.of_parameters(s);
    MessageHeader n = header(What::first_part, s);
    n[word::vector] = 0;
    n[word::vectors] = both ? 2 : 1;
    send_queue_.send_parts(to, n, half(0, s), layout_.options.chunk, receive_buffers_[std::size_t(s)].memory);
    n[word::vector] = 1;
    if (both) send_queue_.send_parts(to, n, layout_.part(v->data(), s), layout_.options.chunk, v);
  }
}

// Exchange numbers increase also across rejoins: for an owner, the first one of an incarnation is newer than all
// before.
ExchangeId Worker::numbered(std::uint64_t count) const { return (send_queue_.incarnation() << 40) | count; }

void Worker::send_early(const void* gradient, Range part) {
  if (!std::exchange(deferred_, true)) {
    exchange_ = {.gradient = gradient, .id = numbered(++exchanges_)};
    sent_.assign(sent_.size(), {});
  }
  for (int s = 0; s < layout_.shards() && layout_.of_parameters(s); s++) {
    const std::int64_t begin = std::max(part.begin, layout_.begin(s)),
                       end = std::min(part.end, layout_.begin(s) + layout_.length(s));
    if (begin < end && !in_reach(s, pushed(s))) send_part(s, {begin - layout_.begin(s), end - layout_.begin(s)});
  }
}

void Worker::start(Exchange exchange) {
  const bool begun = deferred_ && exchange.gradient;
  // The number of the parts sent early is abandoned. The next one is skipped too, so that the halves still alternate.
  if (deferred_ && !begun) exchanges_++;
  if (!begun) sent_.assign(sent_.size(), {}), exchanges_++;
  exchange_ = exchange;
  exchange_.id = numbered(exchanges_);
  answers_.assign(answers_.size(), {});
  missing_ = int(answers_.size());
  deferred_ = idle_ = false;
  for (int s = 0; s < layout_.shards(); s++) send(s);
  if (exchange_.gradient && --leases_ == 0 && no_more_) be_idle();
}

Buffer Worker::pushed(int s) const {
  if (!layout_.of_parameters(s)) return {buffers_out_.get(), layout_.length(s), layout_.dtype};
  if (layout_.wire() == layout_.dtype) return layout_.part(const_cast<void*>(exchange_.gradient), s);
  return {const_cast<bf16*>(narrow_.data()) + layout_.begin(s), layout_.length(s), layout_.wire()};
}
// Gradients sent as bf16 are not in shared memory: the owner widens them when their parts arrive.
bool Worker::in_reach(int s, const Buffer& b) const {
  return send_queue_.place_of(b.data) && send_queue_.reaches(layout_.owner[std::size_t(s)]);
}
bool Worker::sends_parts() const {
  for (int s = 0; s < layout_.shards(); s++)
    if (layout_.wire() != layout_.dtype || !send_queue_.reaches(layout_.owner[std::size_t(s)])) return true;
  return false;
}

void Worker::send_part(int s, Range part) {
  const Buffer all = pushed(s);
  if (all.dtype != layout_.dtype) {
    const float* wide = static_cast<const float*>(exchange_.gradient) + layout_.begin(s);
    auto* narrow = static_cast<bf16*>(all.data);
    for (std::int64_t i = part.begin; i < part.end; i++) narrow[i] = bf16(wide[i]);
  }
  MessageHeader n = header(What::push_part, s);
  n[word::number] = exchange_.id;
  n[word::first] = std::uint64_t(part.begin);
  // Keeps the gradient's memory, also if an error ends the step and the caller frees it.
  send_queue_.send_parts(layout_.owner[std::size_t(s)], n, {all.at(part.begin), part.length(), all.dtype},
                         layout_.options.chunk, send_queue_.memory_of(all.data));
  sent_[std::size_t(s)].push_back(part);
}

std::vector<Range> Worker::not_sent(int s) const {
  std::vector<Range> sent = sent_[std::size_t(s)], gaps;
  std::sort(sent.begin(), sent.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::int64_t at = 0;
  for (const Range& r : sent) {
    if (r.begin > at) gaps.push_back({at, r.begin});
    at = r.end;
  }
  if (at < layout_.length(s)) gaps.push_back({at, layout_.length(s)});
  return gaps;
}

void Worker::send(int s) {
  const int to = layout_.owner[std::size_t(s)];
  MessageHeader n = header(exchange_.gradient ? What::push : What::pull, s);
  n[word::number] = exchange_.id;
  n[word::samples] = std::uint64_t(exchange_.samples);
  n[word::receive_buffer] = send_queue_.reaches(to) ? receive_buffers_[std::size_t(s)].block : word::none;
  if (exchange_.gradient) {
    if (const Buffer b = pushed(s); in_reach(s, b)) {
      const SendQueue::Place place = *send_queue_.place_of(b.data);
      n[word::what] = std::uint64_t(What::push_here);
      n[word::block] = place.block;
      n[word::offset] = place.offset;
    } else {
      for (const Range& part : not_sent(s)) send_part(s, part);
    }
  }
  send_queue_.send(to, n);
}

void Worker::owner_changed(int s) {
  const auto& mine = copies_[std::size_t(s)];
  {
    ReceiveBuffer fresh = receive_buffer(s);
    std::lock_guard lock(mutex_);
    ReceiveBuffer& old = receive_buffers_[std::size_t(s)];
    const Buffer copied = mine ? half(mine->half, s) : Buffer{};
    left_to_the_lost_.push_back(std::exchange(old, std::move(fresh)));
    if (mine) copy(half(mine->half, s).data, copied.data, copied.bytes());
  }
  MessageHeader n = header(What::offer, s);
  if (mine) n[word::pushes] = std::uint64_t(mine->state.pushes), n[word::version] = mine->state.version + 1;
  auto applied = std::make_shared<std::vector<ExchangeId>>(mine ? mine->state.applied : std::vector<ExchangeId>());
  applied->resize(std::size_t(layout_.workers()));
  send_queue_.send(layout_.owner[std::size_t(s)], n, std::as_bytes(std::span(*applied)), applied);
  sent_[std::size_t(s)].clear();                  // they went to the old owner
  answers_[std::size_t(s)].told_blocked = false;  // the new owner has not received it
  if (Answer& a = answers_[std::size_t(s)]; missing_ > 0 && !a.complete) {
    a = {};
    send(s);  // the copy's table shows whether it is applied already
  }
  if (idle_ && missing_ == 0) tell_idle(s);
  if (velocity_missing_[std::size_t(s)] > 0) ask_velocity_of(s);  // all of it: the old owner sent the parts so far
}

void Worker::ask_for_lease() {
  MessageHeader n = header(What::want);
  n[word::request] = numbered(++requests_);
  send_queue_.send(0, n);
}
bool Worker::awaits(const MessageHeader& n) {
  if (n[word::request] != numbered(requests_) || service_ == requests_) return false;
  no_more_ = n[word::number] == word::none;
  if (!no_more_) service_ = requests_, leases_++;
  if (no_more_ && leases_ == 0) be_idle();
  return true;
}

void Worker::be_idle() {
  idle_ = true;
  if (missing_ > 0) return;
  for (int s = 0; s < layout_.shards(); s++) tell_idle(s);
}
void Worker::tell_idle(int s) {
  MessageHeader n = header(What::idle, s);
  n[word::number] = exchange_.id;
  send_queue_.send(layout_.owner[std::size_t(s)], n);
}

// A wait of up to the grace time is usual, and so are answers that are a few milliseconds apart.
void Worker::tell_blocked(double now) {
  const double patience = std::max(0.1, layout_.options.how.grace);
  for (int s = 0; s < layout_.shards() && missing_ > 0; s++)
    if (const Answer& a = answers_[std::size_t(s)]; a.complete && !a.told_blocked && now > a.at + patience)
      tell_blocked(s, true);
}
void Worker::tell_blocked(int s, bool is) {
  MessageHeader n = header(What::blocked, s);
  n[word::number] = exchange_.id;
  n[word::blocked] = is;
  send_queue_.send(layout_.owner[std::size_t(s)], n);
  answers_[std::size_t(s)].told_blocked = is;
}

void Worker::ask_velocity(void* into) {
  velocity_into_ = static_cast<std::byte*>(into);
  for (int s = 0; s < layout_.shards(); s++)
    if (layout_.of_parameters(s) && layout_.length(s) > 0) ask_velocity_of(s);
}
void Worker::ask_velocity_of(int s) {
  velocity_missing_[std::size_t(s)] = layout_.length(s);
  send_queue_.send(layout_.owner[std::size_t(s)], header(What::velocity_wanted, s));
}

// ---- receiving ------------------------------------------------------------------------------------------------------
std::optional<std::span<std::byte>> Worker::place(const MessageHeader& n, std::size_t bytes) {
  const int s = int(n[word::shard]);
  const auto in = [&](Buffer part) { return std::span(part.at(std::int64_t(n[word::first])), bytes); };
  if (what_of(n) == What::velocity_part && velocity_missing_[std::size_t(s)] > 0)
    return in(layout_.part(velocity_into_, s));
  if (what_of(n) == What::answer_part && waits_for(n)) return in(half(exchange_.half(), s));
  return {};
}

bool Worker::answer_part(const MessageHeader& n, std::int64_t numel) {
  if (!waits_for(n)) return false;
  answers_[n[word::shard]].landed += numel;
  return look(int(n[word::shard]));
}

bool Worker::answer_ended(const MessageHeader& n, std::vector<ExchangeId> applied) {
  if (!waits_for(n)) return false;
  const int s = int(n[word::shard]);
  Answer& a = answers_[std::size_t(s)];
  a.ended = true;
  a.state = {n[word::version], std::int64_t(n[word::pushes]), std::move(applied)};
  if (what_of(n) == What::answer_here) a.landed = layout_.length(s);
  a.verdict = verdict_of(n);
  return look(s);
}

bool Worker::look(int s) {
  Answer& a = answers_[std::size_t(s)];
  if (!a.ended || a.landed < layout_.length(s)) return false;
  a.complete = true;
  a.at = now();
  // Each shard decides by itself whether it drops a push. If all shards had to take it, each could drop the pushes that
  // the others take, for ever. So the first shard decides.
  if (a.verdict != Verdict::dropped || s == layout_.first_shard())
    exchange_.verdict = std::max(exchange_.verdict, a.verdict);
  copies_[std::size_t(s)] = Copy{.half = exchange_.half(), .state = std::move(a.state)};
  if (--missing_ > 0) return false;
  for (int t = 0; t < layout_.shards(); t++)
    if (answers_[std::size_t(t)].told_blocked) tell_blocked(t, false);
  if (idle_) be_idle();  // be_idle() was called meanwhile
  return true;
}

void Worker::copy_wanted(int from, int s) {
  const auto& mine = copies_[std::size_t(s)];
  require(mine.has_value(), send_queue_.where(from), " asks ", send_queue_.where(send_queue_.rank()),
          " for a copy that it has not");
  send_queue_.send_parts(from, header(What::copy_part, s), half(mine->half, s), layout_.options.chunk);
}

bool Worker::velocity_part(int s, std::int64_t numel) {
  velocity_missing_[std::size_t(s)] -= numel;
  return std::all_of(velocity_missing_.begin(), velocity_missing_.end(),
                     [](std::int64_t missing) { return missing == 0; });
}

std::string Worker::missing() const {
  std::string all;
  for (std::size_t s = 0; s < answers_.size() && missing_ > 0; s++)
    if (!answers_[s].complete) all += (all.empty() ? ": no answer from " : ", ") + send_queue_.where(layout_.owner[s]);
  return all;
}

}  // namespace tandem
