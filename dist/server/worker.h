// Worker: the worker's side of the parameter server, with its exchange in progress. It sends a gradient to the owners
// of all shards, and their answers arrive here. When all have arrived, the exchange is over and the training thread
// takes the weights. Parts may be sent while the rest of the gradient is computed. Owners keep them until start()
// requests them to apply the whole.
//
// The last answer of each shard stays as it is until the next one has arrived: it is the newest copy of the shard that
// this worker received. If an owner is lost, its successor continues from such a copy. An owner of this host writes its
// answers into memory of its own that this rank reads (shard_server.h). So an owner that was given up, but is only
// stopped and wakes up, changes nothing that is still read. Answers of other hosts are received alternately in two
// halves of a buffer.
//
// A rank that only serves also has a Worker, which starts no exchange and has no copies to offer.
//
// Threads: the training thread calls the first group of functions, while no exchange is in progress; the member's
// thread calls the rest.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/collectives/algorithms.h"
#include "dist/job/frames.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "layers/train/strategy.h"

namespace tandem {

class Worker {
 public:
  struct Exchange {
    const void* gradient = nullptr;  // null: requests only the weights
    std::int64_t samples = 0, lease = -1;
    MetricSums sums = {};
    ExchangeId id = 0;                 // set by start()
    Verdict verdict = Verdict::taken;  // the worst of all owners; `dropped` counts only from the first shard
  };
  Worker(const ServerLayout& layout, Channel& channel)
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

  // Rank 0's initial values, treated like an answer. velocity: as long as the parameters; empty: zero.
  void keep_first(Buffer parameters, Buffer buffers, Buffer velocity) {
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
  // To be pushed with the next gradient.
  void keep_buffers(Buffer buffers) { copy(buffers_.get(), buffers.data, buffers.bytes()); }
  void copy_answers(Buffer parameters, Buffer buffers) const {
    for (std::uint64_t s = 0; s < shards_; s++) {
      const Buffer part = model_part(s, parameters, buffers);
      copy(part.data, copies_[s].bytes.data(), part.bytes());
    }
  }

  // Rank 0 sends the initial values to all owners.
  void send_first() {
    for (std::uint64_t s = 0; s < shards_; s++) {
      Copy& c = copies_[s];
      channel_.send(owner(s), packed(message::Copy{{s}}), c.bytes, c.keep);
      c.bytes = c.bytes.first(layout_.copy_bytes(int(s)));
    }
  }
  // This range of the next exchange's gradient, in elements of all parameters, is final and is sent. start() decides
  // whether it is applied. If no gradient is started after it, owners discard it.
  void push_part(const void* gradient, Range part) {
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
  // push_part() sends: an owner does not reach this rank's memory
  bool sends_parts() const {
    return layout_.wire() != layout_.dtype ||
           std::ranges::any_of(layout_.owner, [&](int owner) { return !channel_.reaches(owner); });
  }
  void start(Exchange exchange) {
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
  void ask_for_lease() { send(channel_, 0, message::Want{numbered(++requests_)}); }
  // True if this message answers the last request, and no earlier answer to that request had a lease. If it has no
  // lease and this worker holds none, the worker is idle after the current exchange.
  bool awaits(const message::LeaseIs& lease) {
    if (lease.request != numbered(requests_) || service_ == requests_) return false;
    no_more_ = lease.count == 0;
    if (!no_more_) {
      service_ = requests_;
      leases_++;
    }
    if (no_more_ && leases_ == 0) be_idle();
    return true;
  }
  // No push follows the current exchange until the next start().
  void be_idle() {
    idle_ = true;
    for (std::uint64_t s = 0; s < shards_ && missing_ == 0; s++) send_idle(s, Pause::idle);
  }
  // Under a quorum, called periodically: reports to shards that have answered that this worker waits for others.
  // Otherwise two shards could each wait for the push of a worker that waits for the other shard.
  // A wait of up to the grace time is usual, and so are answers that are a few milliseconds apart.
  void report_waiting(double now) {
    const double patience = std::max(0.1, layout_.options.how.grace);
    for (std::uint64_t s = 0; s < shards_ && missing_ > 0; s++)
      if (Answer& a = answers_[s]; a.complete && now > a.at + patience && !std::exchange(a.reported_idle, true))
        send_idle(s, Pause::waits);
  }
  // Its owner was lost; layout.owner has the new one.
  void owner_changed(std::uint64_t s) {
    const Copy& copy = copies_[s];
    send(channel_, owner(s), message::Offer{{s}, !copy.bytes.empty(), copy.version});
    sent_[s].clear();                                    // they went to the old owner
    answers_[s].reported_idle = false;                   // the new owner has not received it
    if (missing_ > 0 && !answers_[s].complete) push(s);  // the copy's table shows whether it is applied already
    if (idle_ && missing_ == 0) send_idle(s, Pause::idle);
    if (velocity_missing_[s]) ask_velocity_of(s);
  }
  // into: as long as the parameters
  void ask_velocity(void* into) {
    velocity_into_ = into;
    for (std::uint64_t s = 0; s < shards_; s++)
      if (layout_.of_parameters(int(s)) && layout_.length(int(s)) > 0) ask_velocity_of(s);
  }

  // Memory for the bytes of a message; nothing if it is not expected any more.
  std::optional<std::span<std::byte>> place(const message::Answer& m, std::size_t bytes) {
    if (m.exchange != exchange_.id || answers_[m.shard].complete) return {};
    const std::size_t copy = layout_.copy_bytes(int(m.shard));
    received_[m.shard].resize(2 * copy);
    return std::span(received_[m.shard]).subspan((m.exchange & 1) * copy, std::min(bytes, copy));
  }
  std::optional<std::span<std::byte>> place(const message::Velocity& m, std::size_t bytes) {
    if (!velocity_missing_[m.shard]) return {};
    const Buffer part = layout_.part(velocity_into_, int(m.shard));
    return std::span(static_cast<std::byte*>(part.data), part.bytes()).first(std::min(bytes, part.bytes()));
  }
  // Messages. True: the exchange is over; all of the velocity has arrived.
  bool answered(const message::Answer& m, std::span<std::byte> bytes) {
    Answer& a = answers_[m.shard];
    if (m.exchange != exchange_.id || a.complete) return false;
    require(bytes.size() == layout_.copy_bytes(int(m.shard)), channel_.where(owner(m.shard)), " sends ", bytes.size(),
            " bytes as the weights of shard ", m.shard);
    a.complete = true;
    a.at = now();
    // Each shard decides by itself whether it drops a push. If all shards had to take it, each could drop the pushes
    // that the others take, for ever. So the first shard decides. The verdict is that of the gradient: statistics that
    // are not finite are refused too, which only the owner's counts show.
    if (layout_.of_parameters(int(m.shard)) && (m.verdict != Verdict::dropped || int(m.shard) == layout_.first_shard()))
      exchange_.verdict = std::max(exchange_.verdict, m.verdict);
    copies_[m.shard] = {.bytes = bytes, .version = m.version, .pushes = m.pushes};
    if (--missing_ > 0) return false;
    for (std::uint64_t s = 0; s < shards_; s++)
      if (answers_[s].reported_idle) send_idle(s, Pause::answered);
    if (idle_) be_idle();  // be_idle() was called meanwhile
    return true;
  }
  bool velocity_arrived(const message::Velocity& m) {
    if (!velocity_missing_[m.shard]) return false;
    velocity_missing_[m.shard] = false;
    return std::ranges::none_of(velocity_missing_, std::identity());
  }
  void copy_wanted(int from, std::uint64_t s) {
    const Copy& c = copies_[s];
    require(!c.bytes.empty(), channel_.where(from), " asks ", channel_.where(channel_.rank()),
            " for a copy that it has not");
    channel_.send(from, packed(message::Copy{{s}, c.version, c.pushes}), c.bytes, c.keep);
  }

  const Exchange& exchange() const { return exchange_; }
  // The owners whose answers are missing, by name.
  std::string missing() const {
    std::string all;
    for (std::uint64_t s = 0; s < shards_ && missing_ > 0; s++)
      if (!answers_[s].complete) all += (all.empty() ? ": no answer from " : ", ") + channel_.where(owner(s));
    return all;
  }

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
  }
  struct Answer {  // the state of one answer, for a shard
    bool complete = false;
    double at = 0;               // when it was complete
    bool reported_idle = false;  // to its owner, because this worker waits for others
  };
  struct Copy {
    std::span<std::byte> bytes = {};  // none: this rank has no copy
    std::uint64_t version = 0;
    std::int64_t pushes = 0;
    std::shared_ptr<const void> keep = {};  // owns the bytes, of rank 0's initial values
  };
  // Exchange numbers increase also across rejoins: for an owner, the first one of an incarnation is newer than all
  // before.
  ExchangeId numbered(std::uint64_t count) const { return (channel_.incarnation() << 40) | count; }
  void push(std::uint64_t s) {
    if (!exchange_.gradient) return send(channel_, owner(s), message::Pull{{s, exchange_.id}});
    const std::vector<Range> parts = not_sent(s);
    for (std::size_t i = 0; i < parts.size(); i++)
      send_part({{s, exchange_.id}, 0, i + 1 == parts.size(), exchange_.samples}, parts[i]);
  }
  void send_idle(std::uint64_t s, Pause pause) { send(channel_, owner(s), message::Idle{{s, exchange_.id}, pause}); }
  void ask_velocity_of(std::uint64_t s) {
    velocity_missing_[s] = true;
    send(channel_, owner(s), message::VelocityWanted{{s}});
  }
  // elements of the shard's part of the gradient
  // The channel keeps gradients in shared memory, also if an error ends the step and the caller frees them.
  void send_part(message::Push m, Range part) {
    const int s = int(m.shard);
    Buffer all{buffers_.get(), layout_.length(s), layout_.dtype};
    std::shared_ptr<const void> keep;
    if (layout_.of_parameters(s)) all = layout_.part(const_cast<void*>(exchange_.gradient), s);
    if (layout_.pushed_as(s) != layout_.dtype) {
      bf16* rounded = narrow_->data() + layout_.begin(s);
      narrow(rounded + part.begin, static_cast<const float*>(all.data) + part.begin, part.length());
      all = {rounded, all.count, DType::bf16};
      keep = narrow_;
    }
    m.first = std::uint64_t(part.begin);
    const Buffer some{all.at(part.begin), part.length(), all.dtype};
    channel_.send(owner(m.shard), packed(m), {static_cast<const std::byte*>(some.data), some.bytes()}, std::move(keep));
    sent_[m.shard].push_back(part);
  }
  std::vector<Range> not_sent(std::uint64_t s) const {
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
  int owner(std::uint64_t s) const { return layout_.owner[s]; }
  // A shard's part of the model's vectors. The end of the statistics' shard is unused.
  Buffer model_part(std::uint64_t s, Buffer parameters, Buffer buffers) const {
    if (!layout_.of_parameters(int(s))) return buffers;
    return layout_.part(parameters.data, int(s));
  }

  const ServerLayout& layout_;
  Channel& channel_;
  const std::uint64_t shards_;
  std::shared_ptr<void> buffers_;              // to be pushed
  std::shared_ptr<std::vector<bf16>> narrow_;  // the gradient as it is sent, if it is sent as bf16

  Exchange exchange_;
  bool begun_ = false;                    // parts of the next gradient were sent, and start() was not called
  std::vector<std::vector<Range>> sent_;  // by shard: the sent ranges of the gradient
  std::uint64_t exchanges_ = 0;
  std::vector<Answer> answers_;                   // by shard
  std::uint64_t missing_ = 0;                     // answers that are not complete
  std::vector<std::vector<std::byte>> received_;  // by shard: two halves, each for a copy
  std::vector<Copy> copies_;                      // by shard
  bool idle_ = false;
  std::uint64_t requests_ = 0, service_ = 0;  // lease requests: the last, and the last that was answered with a lease
  int leases_ = 0;                            // that are leased and not pushed yet
  bool no_more_ = false;                      // no lease is available now
  void* velocity_into_ = nullptr;
  std::vector<bool> velocity_missing_;  // by shard
};

}  // namespace tandem
