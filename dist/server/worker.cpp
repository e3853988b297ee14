#include "dist/server/worker.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "dist/collectives/algorithms.h"
#include "dist/job/frames.h"

namespace tandem {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

}  // namespace

Worker::Worker(const ServerLayout& layout, Channel& channel)
    : layout_(layout),
      channel_(channel),
      shards_(std::uint64_t(layout.shards())),
      buffers_(channel.share(std::max<std::size_t>(64, layout.bytes(layout.buffers)))),
      narrow_(std::make_shared<std::vector<bf16>>(layout.wire() == layout.dtype ? 0 : layout.parameters)),
      sent_(shards_),
      answers_(shards_),
      received_(shards_),
      copies_(shards_),
      velocity_missing_(shards_) {}

Buffer Worker::model_part(std::uint64_t s, Buffer parameters, Buffer buffers) const {
  if (!layout_.of_parameters(int(s))) return buffers;
  return layout_.part(parameters.data, int(s));
}

// ---- the training thread --------------------------------------------------------------------------------------------
void Worker::keep_first(Buffer parameters, Buffer buffers, Buffer velocity) {
  for (std::uint64_t s = 0; s < shards_; s++) {
    const std::size_t weights = layout_.bytes(layout_.length(int(s))), bytes = layout_.copy_bytes(int(s));
    const bool both = velocity.count && layout_.of_parameters(int(s));
    const auto all = std::make_shared<std::vector<std::byte>>(bytes + (both ? weights : 0));
    const Buffer part = model_part(s, parameters, buffers);
    copy(all->data(), part.data, part.bytes());
    if (both) copy(all->data() + bytes, layout_.part(velocity.data, int(s)).data, weights);
    copies_[s] = {.bytes = *all, .keep = all};
  }
}
void Worker::keep_buffers(Buffer buffers) { copy(buffers_.get(), buffers.data, buffers.bytes()); }
void Worker::copy_answers(Buffer parameters, Buffer buffers) const {
  for (std::uint64_t s = 0; s < shards_; s++) {
    const Buffer part = model_part(s, parameters, buffers);
    copy(part.data, copies_[s].bytes.data(), part.bytes());
  }
}

// ---- sending --------------------------------------------------------------------------------------------------------
void Worker::send_first() {
  for (std::uint64_t s = 0; s < shards_; s++) {
    Copy& c = copies_[s];
    channel_.send(owner(s), packed(message::Copy{{s}}), c.bytes, c.keep);
    c.bytes = c.bytes.first(layout_.copy_bytes(int(s)));
  }
}

// Exchange numbers increase also across rejoins: for an owner, the first one of an incarnation is newer than all
// before.
ExchangeId Worker::numbered(std::uint64_t count) const { return (channel_.incarnation() << 40) | count; }

void Worker::push_part(const void* gradient, Range part) {
  if (!std::exchange(begun_, true)) {
    exchange_ = {.gradient = gradient, .id = numbered(++exchanges_)};
    sent_.assign(shards_, {});
  }
  for (std::uint64_t s = 0; s < shards_ && layout_.of_parameters(int(s)); s++) {
    const std::int64_t from = layout_.begin(int(s)), begin = std::max(part.begin, from),
                       end = std::min(part.end, from + layout_.length(int(s)));
    // An owner that reaches the gradient reads it in place, when all of it is final.
    if (begin < end && (layout_.wire() != layout_.dtype || !channel_.reaches(owner(s))))
      send_part({{s, exchange_.id}}, {begin - from, end - from});
  }
}

void Worker::start(Exchange exchange) {
  const bool continues = begun_ && exchange.gradient;
  // The number of the parts that were sent is abandoned. The next one is skipped too, so that the halves still
  // alternate.
  if (begun_ && !continues) exchanges_++;
  if (!continues) {
    sent_.assign(shards_, {});
    exchanges_++;
  }
  exchange_ = exchange;
  exchange_.id = numbered(exchanges_);
  answers_.assign(shards_, {});
  missing_ = shards_;
  begun_ = idle_ = false;
  for (std::uint64_t s = 0; s < shards_; s++) push(s);
  if (exchange_.gradient && --leases_ == 0 && no_more_) be_idle();
}

bool Worker::sends_parts() const {
  return layout_.wire() != layout_.dtype ||
         std::ranges::any_of(layout_.owner, [&](int owner) { return !channel_.reaches(owner); });
}

// The channel keeps gradients in shared memory, also if an error ends the step and the caller frees them.
void Worker::send_part(message::Push m, Range part) {
  const int s = int(m.shard);
  Buffer all{buffers_.get(), layout_.length(s), layout_.dtype};
  std::shared_ptr<const void> keep;
  if (layout_.of_parameters(s)) all = layout_.part(const_cast<void*>(exchange_.gradient), s);
  if (layout_.pushed_as(s) != layout_.dtype) {
    bf16* sent = narrow_->data() + layout_.begin(s);
    narrow(sent + part.begin, static_cast<const float*>(all.data) + part.begin, part.length());
    all = {sent, all.count, DType::bf16};
    keep = narrow_;
  }
  m.first = std::uint64_t(part.begin);
  const Buffer some{all.at(part.begin), part.length(), all.dtype};
  channel_.send(owner(m.shard), packed(m), {static_cast<const std::byte*>(some.data), some.bytes()}, std::move(keep));
  sent_[m.shard].push_back(part);
}

std::vector<Range> Worker::not_sent(std::uint64_t s) const {
  std::vector<Range> sent = sent_[s], gaps;
  std::ranges::sort(sent, {}, &Range::begin);
  std::int64_t at = 0;
  for (const Range& r : sent) {
    if (r.begin > at) gaps.push_back({at, r.begin});
    at = r.end;
  }
  if (at < layout_.length(int(s)) || gaps.empty()) gaps.push_back({at, layout_.length(int(s))});
  return gaps;
}

void Worker::push(std::uint64_t s) {
  if (!exchange_.gradient) return send(channel_, owner(s), message::Pull{{s, exchange_.id}});
  const std::vector<Range> parts = not_sent(s);
  for (std::size_t i = 0; i < parts.size(); i++)
    send_part({{s, exchange_.id}, 0, i + 1 == parts.size(), exchange_.samples}, parts[i]);
}

void Worker::owner_changed(std::uint64_t s) {
  const Copy& copy = copies_[s];
  send(channel_, owner(s), message::Offer{{s}, !copy.bytes.empty(), copy.version});
  sent_[s].clear();                                    // they went to the old owner
  answers_[s].reported_idle = false;                   // the new owner has not received it
  if (missing_ > 0 && !answers_[s].complete) push(s);  // the copy's table shows whether it is applied already
  if (idle_ && missing_ == 0) send_idle(s, Pause::idle);
  if (velocity_missing_[s]) ask_velocity_of(s);
}

void Worker::ask_for_lease() { send(channel_, 0, message::Want{numbered(++requests_)}); }
bool Worker::awaits(const message::LeaseIs& lease) {
  if (lease.request != numbered(requests_) || service_ == requests_) return false;
  no_more_ = lease.count == 0;
  if (!no_more_) {
    service_ = requests_;
    leases_++;
  }
  if (no_more_ && leases_ == 0) be_idle();
  return true;
}

void Worker::be_idle() {
  idle_ = true;
  for (std::uint64_t s = 0; s < shards_ && missing_ == 0; s++) send_idle(s, Pause::idle);
}
void Worker::send_idle(std::uint64_t s, Pause pause) {
  send(channel_, owner(s), message::Idle{{s, exchange_.id}, pause});
}

// Reports no wait of up to the grace time, or 0.1 s: such waits are usual.
void Worker::report_waiting(double now) {
  const double patience = std::max(0.1, layout_.options.how.grace);
  for (std::uint64_t s = 0; s < shards_ && missing_ > 0; s++)
    if (Answer& a = answers_[s]; a.complete && now > a.at + patience && !std::exchange(a.reported_idle, true))
      send_idle(s, Pause::waits);
}

void Worker::ask_velocity(void* into) {
  velocity_into_ = into;
  for (std::uint64_t s = 0; s < shards_; s++)
    if (layout_.of_parameters(int(s)) && layout_.length(int(s)) > 0) ask_velocity_of(s);
}
void Worker::ask_velocity_of(std::uint64_t s) {
  velocity_missing_[s] = true;
  send(channel_, owner(s), message::VelocityWanted{{s}});
}

// ---- receiving ------------------------------------------------------------------------------------------------------
bool Worker::velocity_arrived(const message::Velocity& m, std::span<const std::byte> bytes) {
  if (!velocity_missing_[m.shard]) return false;
  const Buffer part = layout_.part(velocity_into_, int(m.shard));
  require(bytes.size() == part.bytes(), channel_.where(owner(m.shard)), " sends ", bytes.size(),
          " bytes as the velocity of shard ", m.shard);
  copy(part.data, bytes.data(), bytes.size());
  velocity_missing_[m.shard] = false;
  return std::ranges::none_of(velocity_missing_, std::identity());
}

std::optional<std::span<std::byte>> Worker::place(const message::Answer& m, std::size_t bytes) {
  if (m.exchange != exchange_.id || answers_[m.shard].complete) return {};
  const std::size_t copy = layout_.copy_bytes(int(m.shard));
  received_[m.shard].resize(2 * copy);
  return std::span(received_[m.shard]).subspan((m.exchange & 1) * copy, std::min(bytes, copy));
}

bool Worker::answered(const message::Answer& m, std::span<std::byte> bytes) {
  Answer& a = answers_[m.shard];
  if (m.exchange != exchange_.id || a.complete) return false;
  require(bytes.size() == layout_.copy_bytes(int(m.shard)), channel_.where(owner(m.shard)), " sends ", bytes.size(),
          " bytes as the weights of shard ", m.shard);
  a.complete = true;
  a.at = now();
  // Each shard decides by itself whether it drops a push. If all shards had to take it, each could drop the pushes that
  // the others take, for ever. So the first shard decides. The verdict is that of the gradient: statistics that are not
  // finite are refused too, which only the owner's counts show.
  if (layout_.of_parameters(int(m.shard)) && (m.verdict != Verdict::dropped || int(m.shard) == layout_.first_shard()))
    exchange_.verdict = std::max(exchange_.verdict, m.verdict);
  copies_[m.shard] = {.bytes = bytes, .version = m.version, .pushes = m.pushes};
  if (--missing_ > 0) return false;
  for (std::uint64_t s = 0; s < shards_; s++)
    if (answers_[s].reported_idle) send_idle(s, Pause::answered);
  if (idle_) be_idle();  // be_idle() was called meanwhile
  return true;
}

void Worker::copy_wanted(int from, std::uint64_t s) {
  const Copy& c = copies_[s];
  require(!c.bytes.empty(), channel_.where(from), " asks ", channel_.where(channel_.rank()),
          " for a copy that it has not");
  channel_.send(from, packed(message::Copy{{s}, c.version, c.pushes}), c.bytes, c.keep);
}

std::string Worker::missing() const {
  std::string all;
  for (std::uint64_t s = 0; s < shards_ && missing_ > 0; s++)
    if (!answers_[s].complete) all += (all.empty() ? ": no answer from " : ", ") + channel_.where(owner(s));
  return all;
}

}  // namespace tandem
