// The channel over UCX active messages. Large messages come as an announcement first: their bytes go straight to the place that
// the receiver names.
#include <cstring>
#include <deque>
#include <list>

#include "dist/ucx_link.h"

namespace tandem {
namespace ucx {
namespace {

struct Envelope {
  std::uint64_t nonce;
  std::uint64_t from;
  Note note;
};
constexpr unsigned channel_id = 2;

class UcxChannel : public Channel, private Link {
 public:
  UcxChannel(std::shared_ptr<Worker> ucx, std::vector<std::string> addresses, std::uint64_t nonce,
             std::shared_ptr<Control> control)
      : Link(std::move(ucx), std::move(addresses), nonce, std::move(control)) {
    handler(channel_id, arrived, this);
  }
  ~UcxChannel() override {
    for (Arrival& a : receiving_) give_up(a.request, a.from);
    hang_up_all(true);
    for (Arrival& a : fresh_)
      if (a.held) ucp_am_data_release(worker_, a.data);
    handler(channel_id, nullptr, nullptr);
  }
  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string where(int rank) const override { return control_->name(rank); }
  std::vector<bool> living() const override { return std::vector<bool>(std::size_t(size()), true); }
  std::shared_ptr<void> share(std::size_t bytes) override {
    return {new std::byte[bytes](), [](void* p) { delete[] static_cast<std::byte*>(p); }};
  }
  std::span<std::byte> shared_by(int, int) override { return {}; }
  void fail(int culprit, const std::string& text) override { control_->fail(culprit, text); }
  void on_message(Receiver receiver) override { receiver_ = std::move(receiver); }

  Work send(int to, const Note& note, std::span<const std::byte> bytes) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    control_->check();
    auto sending = std::make_unique<Sending>(*this, to, Envelope{nonce_, std::uint64_t(rank()), note});
    const ucp_request_param_t p = on_host();
    ucs_status_ptr_t r =
        ucp_am_send_nbx(endpoint(to), channel_id, &sending->envelope, sizeof(Envelope), bytes.data(), bytes.size(), &p);
    if (UCS_PTR_IS_ERR(r)) lost(to, "a message", UCS_PTR_STATUS(r));
    if (!UCS_PTR_IS_PTR(r)) return {};
    sending->request = r;
    return Work(std::move(sending));
  }

  bool progress() override {
    for (int i = 0; i < 64 && Link::progress(); i++) {}
    control_->check();
    bool any = false;
    while (receiver_.place && !fresh_.empty()) {
      Arrival a = std::move(fresh_.front());
      fresh_.pop_front();
      a.room = receiver_.place(a.from, a.note, a.bytes);
      if (a.room.size() != a.bytes) refuse_room(a);
      if (a.rendezvous) {
        const ucp_request_param_t p = on_host();
        ucs_status_ptr_t r = ucp_am_recv_data_nbx(worker_, a.data, a.room.data(), a.bytes, &p);
        if (UCS_PTR_IS_ERR(r)) lost(a.from, "a message", UCS_PTR_STATUS(r));
        a.request = UCS_PTR_IS_PTR(r) ? r : nullptr;
        if (a.request) {
          receiving_.push_back(std::move(a));
          continue;
        }
      } else {
        if (a.bytes > 0) std::memcpy(a.room.data(), a.held ? a.data : a.copy.data(), a.bytes);
        if (a.held) ucp_am_data_release(worker_, a.data);
      }
      receiver_.arrived(a.from, a.note, a.room);
      any = true;
    }
    for (auto a = receiving_.begin(); a != receiving_.end();) {
      const ucs_status_t status = ucp_request_check_status(a->request);
      if (status == UCS_INPROGRESS) {
        ++a;
        continue;
      }
      ucp_request_free(a->request);
      const Arrival done = std::move(*a);
      a = receiving_.erase(a);
      if (status != UCS_OK) lost(done.from, "a message", status);
      receiver_.arrived(done.from, done.note, done.room);
      any = true;
    }
    return any;
  }
  void rest() override { sleep(100); }
  void wake() override { signal(ucx_->wake); }

 private:
  struct Arrival {
    int from;
    Note note;
    void* data;  // UCX's, when held
    std::size_t bytes;
    bool rendezvous, held;
    std::string copy;
    std::span<std::byte> room;
    void* request = nullptr;
  };
  struct Sending : Work::Operation {
    Sending(UcxChannel& channel, int to, const Envelope& envelope) : channel(channel), to(to), envelope(envelope) {}
    ~Sending() override {
      if (request) channel.give_up(request, to);
    }
    bool advance() override {
      if (!request) return true;
      channel.progress();
      const ucs_status_t status = ucp_request_check_status(request);
      if (status == UCS_INPROGRESS) return false;
      ucp_request_free(std::exchange(request, nullptr));
      if (status != UCS_OK) channel.lost(to, "a message", status);
      return true;
    }
    void wait() override {
      while (!advance()) channel.rest();  // the Control ends a wait for a rank that is gone
    }
    UcxChannel& channel;
    int to;
    Envelope envelope;  // UCX reads it until the request has ended
    void* request = nullptr;
  };

  [[noreturn]] void refuse_room(Arrival& a) {
    if (a.held) ucp_am_data_release(worker_, a.data);
    const std::string text = control_->name(a.from) + " sends " + std::to_string(a.bytes) + " bytes where " +
                             control_->name(rank()) + " has room for " + std::to_string(a.room.size());
    control_->fail(a.from, text);
    throw CommunicationError(a.from, text);
  }

  static ucs_status_t arrived(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes,
                              const ucp_am_recv_param_t* param) {
    auto& me = *static_cast<UcxChannel*>(self);
    Envelope e;
    if (head_bytes != sizeof e) return UCS_OK;
    std::memcpy(&e, head, sizeof e);
    if (e.nonce != me.nonce_ || e.from >= std::uint64_t(me.size())) return UCS_OK;  // not of this job
    Arrival a{.from = int(e.from),
              .note = e.note,
              .data = data,
              .bytes = bytes,
              .rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0,
              .held = false,
              .copy = {},
              .room = {}};
    a.held = a.rendezvous || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA);
    if (!a.held) a.copy.assign(static_cast<const char*>(data), bytes);
    const bool held = a.held;
    me.fresh_.push_back(std::move(a));
    return held ? UCS_INPROGRESS : UCS_OK;
  }

  Receiver receiver_;
  std::deque<Arrival> fresh_;  // nobody has said yet where they go
  std::list<Arrival> receiving_;
};

}  // namespace

std::unique_ptr<Channel> Worker::channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                         std::shared_ptr<Control> control) {
  return std::make_unique<UcxChannel>(shared_from_this(), std::move(addresses), nonce, std::move(control));
}

}  // namespace ucx
}  // namespace tandem
