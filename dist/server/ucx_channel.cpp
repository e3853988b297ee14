// The channel over UCX active messages. With RDMA, a large message is announced first, and its bytes are then written
// directly to the place that the receiver names. Over TCP it arrives as fragments, which are copied there one by one.
#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <utility>

#include "core/text.h"
#include "dist/collectives/node_memory.h"
#include "dist/collectives/ucx_link.h"
#include "dist/job/frames.h"

namespace tandem {
namespace ucx {
namespace {

struct Envelope {
  std::uint64_t nonce, from, incarnation;
  std::uint64_t message, first, whole;  // the message's number at its sender; the fragment's offset; all bytes
  std::uint64_t block, offset;          // of bytes that stay in the sender's shared memory; block none: they are sent
  MessageHeader header;
};
constexpr std::uint64_t none = UINT64_MAX;
constexpr unsigned channel_id = 2;

class UcxChannel : public Channel, private Link {
 public:
  UcxChannel(std::shared_ptr<Ucx> ucx, std::vector<std::string> addresses, std::uint64_t nonce,
             std::shared_ptr<Control> control, std::vector<int> members)
      : Link(std::move(ucx), std::move(addresses), nonce, std::move(control), std::move(members)),
        me_(index_of(control_->rank())),
        memory_(words(me_, incarnation())),
        slots_(peers_.size()) {
    const auto& slots = control_->membership().slots;
    for (std::size_t r = 0; r < slots_.size() && !slots.empty(); r++) slots_[r] = {slots[std::size_t(members_[r])]};
    accept_only_ranks();
    handler(channel_id, arrived, this);
  }
  ~UcxChannel() override {
    // The memory of messages in progress may be freed after this.
    for (Incoming& a : receiving_) give_up(a.request, a.from);
    for (Sending& s : sending_) abandon(s);
    hang_up_all(std::uncaught_exceptions() == 0);
    for (Incoming& a : fresh_) release(a);
    handler(channel_id, nullptr, nullptr);
  }
  int rank() const override { return me_; }
  int size() const override { return int(members_.size()); }
  std::string where(int rank) const override { return name(rank); }
  std::uint64_t incarnation() const override { return control_->membership().incarnation; }
  std::uint64_t generation() const override { return control_->membership().generation + changes_handled_; }
  std::vector<bool> living() const override {
    std::vector<bool> all;
    for (const Slot& s : slots_) all.push_back(!s.lost);
    return all;
  }
  void on_message(Receiver receiver) override { receiver_ = std::move(receiver); }

  void send(int to, const MessageHeader& header, std::span<const std::byte> bytes,
            std::shared_ptr<const void> keep) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    control_->check();
    const Slot& slot = slots_[std::size_t(to)];
    if (slot.lost) return;
    Envelope envelope{nonce_, std::uint64_t(rank()), incarnation(), ++sent_, 0, bytes.size(), none, 0, header};
    if (auto place = place_of(bytes.data())) {
      if (reaches(to)) {
        envelope.block = place->block;
        envelope.offset = place->offset;
        bytes = {};
      }
      keep = std::move(place->memory);
    }
    if (to != rank()) bytes_sent_ += std::int64_t(bytes.size());
    Sending& sending = sending_.emplace_back(Sending{to, slot.incarnation, std::move(keep)});
    sending.broken = slot.broken != 0;
    for (std::size_t first = 0; !sending.broken && (first < bytes.size() || first == 0);) {
      const auto part = bytes.subspan(first, std::min(ucx_->fragment, bytes.size() - first));
      Sending::Fragment& f = sending.fragments.emplace_back(Sending::Fragment{envelope});
      f.envelope.first = first;
      const ucp_request_param_t p = on_host();
      f.request =
          ucp_am_send_nbx(endpoint(to), channel_id, &f.envelope, sizeof(Envelope), part.data(), part.size(), &p);
      const ucs_status_ptr_t r = f.request;
      if (!UCS_PTR_IS_PTR(r)) sending.fragments.pop_back();
      if (UCS_PTR_IS_ERR(r)) {
        sending.broken = true;
        broke(to, UCS_PTR_STATUS(r));
      }
      if (part.empty()) break;
      first += part.size();
    }
    if (sending.fragments.empty() && !sending.broken) sending_.pop_back();
  }
  bool sent() const override { return sending_.empty(); }

  bool progress() override {
    control_->check();
    // Runs until a message has arrived: once its place is known, arrived() copies its other fragments there.
    const std::size_t known = fresh_.size();
    for (int i = 0; i < 64 && fresh_.size() == known && Link::progress(); i++) {}
    control_->check();
    std::erase_if(sending_, [this](Sending& s) { return advance(s); });
    bool any = receiver_.place && handle_changes();
    for (auto a = receiving_.begin(); a != receiving_.end();) any = finish(a++) || any;
    for (auto a = fresh_.begin(); receiver_.place && a != fresh_.end();) {
      const Slot& sender = slots_[std::size_t(a->from)];
      if (sender.incarnation < a->envelope.incarnation) {  // its rejoin was not received yet
        ++a;
        continue;
      }
      const bool lost = sender.lost || sender.incarnation > a->envelope.incarnation;
      Incoming now = std::move(*a);
      fresh_.erase(a);
      if (lost)
        release(now);
      else
        any = accept(std::move(now)) || any;
      a = fresh_.begin();  // the receiver may have sent messages, and UCX may have received more
    }
    if (broken_ > 0) wait_for_verdicts();
    return any;
  }
  void rest() override { sleep(100); }
  void wake() override { signal(ucx_->wake); }

  bool reaches(int rank) override { return !block_of(rank, 0).empty(); }
  void fail(int culprit, const std::string& text) override {
    control_->fail(culprit < 0 ? culprit : members_[std::size_t(culprit)], text);
  }

 private:
  struct Slot : MemberSlot {  // the state of a rank, as far as it was received
    double broken = 0;        // since when UCX does not reach it; rank 0 decides whether it is lost
    std::string why = {};
    bool accused = false;
  };
  struct Incoming : Arrival {
    Envelope envelope;
    std::vector<std::byte> unplaced = {};  // its bytes, if the receiver has named no place
    std::span<std::byte> room = {};
    std::size_t got = 0;  // bytes of the whole message that have arrived
    void* request = nullptr;
  };
  using Incomings = std::list<Incoming>;
  struct Sending {
    int to;
    std::uint64_t incarnation;  // of the receiver
    std::shared_ptr<const void> keep;
    struct Fragment {
      Envelope envelope;  // UCX reads it until the request has ended
      void* request = nullptr;
    };
    std::deque<Fragment> fragments = {};  // in progress
    bool broken = false;                  // the other fragments will not arrive
  };

  std::shared_ptr<void> new_block(std::size_t bytes) override { return memory_.share(bytes); }
  std::span<std::byte> block_of(int rank, std::uint64_t number) {  // empty: it is not reachable
    const Slot& s = slots_[std::size_t(rank)];
    if (s.record.identity.empty() || s.record.identity != slots_[std::size_t(me_)].record.identity) return {};
    return memory_.of(s.record.process, words(rank, s.incarnation), int(number));
  }

  void abandon(Sending& s) {
    for (Sending::Fragment& f : s.fragments) give_up(f.request, s.to);
    s.fragments.clear();
  }
  bool advance(Sending& s) {  // true: nothing of it is left to send
    const Slot& slot = slots_[std::size_t(s.to)];
    if (slot.lost || slot.incarnation != s.incarnation) {
      abandon(s);
      return true;
    }
    for (; !s.fragments.empty(); s.fragments.pop_front()) {
      const ucs_status_t status = ucp_request_check_status(s.fragments.front().request);
      if (status == UCS_INPROGRESS) return false;
      ucp_request_free(s.fragments.front().request);
      if (status != UCS_OK) {
        broke(s.to, status);
        s.broken = true;
      }
    }
    if (!s.broken) return true;
    if (!gone(s.to)) return false;
    if (!tolerates_losses_)
      throw CommunicationError(s.to, where(rank()) + " sends a message to " + where(s.to) + ", which has left");
    return true;
  }

  std::string words(int rank, std::uint64_t incarnation) const {
    return hex(std::string(reinterpret_cast<const char*>(&nonce_), 8)) + "-" +
           std::to_string(members_[std::size_t(rank)]) + "-" + std::to_string(incarnation);
  }

  int index_of(int rank) const {  // of a rank of the job; −1: it is not a member
    const auto at = std::ranges::find(members_, rank);
    return at == members_.end() ? -1 : int(at - members_.begin());
  }
  bool gone(int rank) const { return control_->gone(members_[std::size_t(rank)]); }

  Incomings::iterator message_of(const Envelope& e) {
    return std::ranges::find_if(receiving_, [&](const Incoming& m) {
      return m.envelope.from == e.from && m.envelope.incarnation == e.incarnation && m.envelope.message == e.message;
    });
  }
  bool accept(Incoming a) {
    if (a.envelope.first > 0) {
      const auto m = message_of(a.envelope);
      if (m == receiving_.end()) {
        release(a);
        return false;
      }
      receive(a, m->room.data() + a.envelope.first);
      m->got += a.bytes;
      return finish(m);
    }
    if (a.envelope.block != none) {
      release(a);
      const std::span<std::byte> block = block_of(a.from, a.envelope.block);
      if (block.empty()) {  // the process has probably just ended
        broke(a.from, UCS_ERR_UNREACHABLE);
        return false;
      }
      require(a.envelope.offset <= block.size() && a.envelope.whole <= block.size() - a.envelope.offset, name(a.from),
              " names memory that it has not");
      receiver_.shared(a.from, a.envelope.header, block.subspan(a.envelope.offset, a.envelope.whole));
      return true;
    }
    const auto place = receiver_.place(a.from, a.envelope.header, a.envelope.whole);
    if (!place) a.unplaced.resize(a.envelope.whole);  // they stay where they are when `a` is moved
    a.room = place.value_or(a.unplaced);
    if (a.room.size() != a.envelope.whole) refuse_room(a);
    a.got = a.bytes;
    ucs_status_ptr_t r = receive(a, a.room.data());
    if (UCS_PTR_IS_ERR(r)) {
      broke(a.from, UCS_PTR_STATUS(r));
      return false;
    }
    a.request = r;
    receiving_.push_back(std::move(a));
    return finish(std::prev(receiving_.end()));
  }
  bool finish(Incomings::iterator m) {  // if it is complete
    const ucs_status_t status = m->request ? ucp_request_check_status(m->request) : UCS_OK;
    if (status == UCS_INPROGRESS || m->got < m->envelope.whole) return false;
    if (m->request) ucp_request_free(m->request);
    Incoming done = std::move(*m);
    receiving_.erase(m);
    if (status != UCS_OK) {
      broke(done.from, status);
      return false;
    }
    receiver_.arrived(done.from, done.envelope.header, done.room);
    return true;
  }

  void accept_only_ranks() {
    std::vector<std::string> all;
    for (const Slot& p : slots_)
      if (!p.record.address.empty()) all.push_back(p.record.address);
    if (!all.empty()) ucx_->accept_only(all);  // in a test without address records they are unknown
  }

  // ---- losses and returns -------------------------------------------------------------------------------------------
  bool handle_changes() {
    bool any = false;
    for (; changes_handled_ < control_->changes(); any = true) {
      const ControlMessage change = control_->change(changes_handled_++);
      const int from = index_of(change.rank);
      if (from < 0) continue;
      const auto r = std::size_t(from);
      Slot& slot = slots_[r];
      broken_ -= slot.broken != 0;
      slot.broken = 0;
      slot.accused = false;
      if (change.type == ControlMessage::Type::lost) {
        slot.lost = true;
        for (auto a = receiving_.begin(); a != receiving_.end();) {
          if (a->from == from) give_up(a->request, a->from);
          a = a->from == from ? receiving_.erase(a) : std::next(a);
        }
        if (peers_[r].endpoint) hang_up(peers_[r], false);
        peers_[r] = {};
        if (!receiver_.lost) {
          control_->fail(change.rank, change.content);
          control_->check();
        }
        receiver_.lost(from, change.content);
      } else {
        slot = {{.incarnation = change.number, .record = AddressRecord::from(change.content)}};
        addresses_[r] = slot.record.ucx;
        accept_only_ranks();
        if (receiver_.returned) receiver_.returned(from, change.number);
      }
    }
    return any;
  }
  // If a lost rank ends the job, Link::lost() waits a moment for the Control to report which rank it is.
  void broke(int rank, ucs_status_t status) {
    if (!control_->goes_on()) Link::lost(rank, "a message", status);
    Slot& slot = slots_[std::size_t(rank)];
    if (slot.lost || slot.broken != 0) return;
    slot.broken = now();
    slot.why = ucs_status_string(status);
    broken_++;
  }
  void wait_for_verdicts() {
    for (std::size_t r = 0; r < slots_.size(); r++) {
      Slot& p = slots_[r];
      if (p.broken == 0 || p.lost || p.accused || gone(int(r))) continue;
      if (now() - p.broken < control_->deadlines().silence + 2) continue;
      p.accused = true;
      const std::string text = where(rank()) + " has lost the connection to " + where(int(r)) + ": " + p.why;
      if (control_->rank() != 0 && control_->gone(0)) throw CommunicationError(int(r), text);
      control_->accuse(members_[r], text);
    }
  }

  [[noreturn]] void refuse_room(Incoming& a) {
    release(a);
    const std::string text = name(a.from) + " sends " + std::to_string(a.envelope.whole) + " bytes where " +
                             name(rank()) + " has room for " + std::to_string(a.room.size());
    fail(a.from, text);
    throw CommunicationError(a.from, text);
  }

  static ucs_status_t arrived(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes,
                              const ucp_am_recv_param_t* param) {
    auto& me = *static_cast<UcxChannel*>(self);
    Envelope e;
    if (head_bytes != sizeof e) return UCS_OK;
    std::memcpy(&e, head, sizeof e);
    // Ignores messages of other jobs, and of a process whose slot another process has taken.
    if (e.nonce != me.nonce_ || e.from >= std::uint64_t(me.size())) return UCS_OK;
    if (e.incarnation < me.slots_[std::size_t(e.from)].incarnation) return UCS_OK;
    if (e.first > e.whole || bytes > e.whole - e.first) return UCS_OK;
    Incoming a{arrival(int(e.from), data, bytes, *param), e};
    if (const auto m = me.message_of(e); e.first > 0 && m != me.receiving_.end()) {
      me.receive(a, m->room.data() + e.first);
      m->got += bytes;
      return UCS_OK;
    }
    const ucs_status_t kept = keep(a, *param);
    me.fresh_.push_back(std::move(a));
    return kept;
  }

  int me_;
  NodeMemory memory_;
  Receiver receiver_;
  std::vector<Slot> slots_;
  std::size_t changes_handled_ = 0;
  int broken_ = 0;
  std::uint64_t sent_ = 0;  // messages sent
  std::list<Sending> sending_;
  Incomings fresh_;      // their place is not known yet
  Incomings receiving_;  // they have a place
};

}  // namespace
}  // namespace ucx

std::unique_ptr<Channel> Ucx::channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                      std::shared_ptr<Control> control, std::vector<int> members) {
  return std::make_unique<ucx::UcxChannel>(shared_from_this(), std::move(addresses), nonce, std::move(control),
                                           std::move(members));
}

}  // namespace tandem
