// What the wire and the channel of UCX have in common: the worker, the endpoints, and how they end. Included by
// ucx*.cpp only.
#pragma once
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "dist/collectives/ucx.h"

namespace tandem::ucx {

inline void check(ucs_status_t status, const char* call, const std::string& hint = "") {
  if (status != UCS_OK) fail("UCX: ", call, ": ", ucs_status_string(status), hint);
}

#define UCX_CHECK(call) ::tandem::ucx::check(call, #call)

class Worker : public Ucx, public std::enable_shared_from_this<Worker> {
 public:
  Worker(const std::string& interface_address, Use use);
  ~Worker() override;
  std::string address() const override;
  void hear_only(const std::vector<std::string>& addresses) override;
  std::shared_ptr<Wire> connect(std::vector<std::string> addresses, std::uint64_t nonce,
                                std::shared_ptr<Control> control) override;
  std::unique_ptr<Channel> channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                   std::shared_ptr<Control> control, std::vector<int> members) override;

  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  int events = -1, wake = -1;       // descriptors: something has come; another thread calls
  std::size_t fragment = SIZE_MAX;  // bytes that a message over the network may have, to be handed on as they come
  bool abandoned = false;           // its peers have given this rank up: UCX must not be called again

 private:
  ucs_status_t create(const std::string& interface_address, Use use, bool in_dev_shm);  // context and worker
  std::vector<int> ports_;                                                              // of UCX, where it listens
  bool said_ = false;                                                                   // that they are open
};

class Link {
 public:
  // members: ranks of the job, each with its address; empty: all.
  Link(std::shared_ptr<Worker> ucx, std::vector<std::string> addresses, std::uint64_t nonce,
       std::shared_ptr<Control> control, std::vector<int> members = {})
      : ucx_(std::move(ucx)),
        worker_(ucx_->worker),
        control_(std::move(control)),
        addresses_(std::move(addresses)),
        members_(std::move(members)),
        nonce_(nonce),
        peers_(addresses_.size()) {
    for (int r = 0; members_.size() < addresses_.size(); r++) members_.push_back(r);
    control_->on_event(this, [wake = ucx_->wake] { signal(wake); });
  }
  ~Link() { control_->on_event(this, nullptr); }

  struct Peer {
    ucp_ep_h endpoint = nullptr;
    ucs_status_t error = UCS_OK;
  };

  // A message whose place is not known yet.
  struct Arrival {
    int from;
    void* data;  // UCX's: until the callback returns, or as long as it is held
    std::size_t bytes;
    bool rendezvous, held = false;
    std::string copy = {};
  };
  static Arrival arrival(int from, void* data, std::size_t bytes, const ucp_am_recv_param_t& param) {
    return {from, data, bytes, (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0};
  }
  // Keeps it after the callback, which returns this.
  static ucs_status_t keep(Arrival& a, const ucp_am_recv_param_t& param) {
    a.held = a.rendezvous || (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA);
    if (!a.held) a.copy.assign(static_cast<const char*>(a.data), a.bytes);
    return a.held ? UCS_INPROGRESS : UCS_OK;
  }
  // Its bytes, to where they belong. What UCX says: a request that is under way, an error, or null: they are there.
  ucs_status_ptr_t receive(Arrival& a, void* to) {
    if (a.rendezvous) {
      const ucp_request_param_t p = on_host();
      a.held = false;  // UCX's again
      return ucp_am_recv_data_nbx(worker_, a.data, to, a.bytes, &p);
    }
    if (a.bytes > 0) std::memcpy(to, a.copy.empty() ? a.data : a.copy.data(), a.bytes);
    release(a);
    return nullptr;
  }
  void release(Arrival& a) {
    if (a.held && !given_up()) ucp_am_data_release(worker_, a.data);
    a.held = false;
  }

  void handler(unsigned id, ucp_am_recv_callback_t call, void* self) {
    if (ucx_->abandoned) return;
    ucp_am_handler_param_t p{};
    p.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                   UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    p.id = id;
    p.cb = call;  // null: none from now on
    p.arg = self;
    p.flags = UCP_AM_FLAG_WHOLE_MSG;
    UCX_CHECK(ucp_worker_set_am_recv_handler(worker_, &p));
  }
  static ucp_request_param_t on_host() {
    ucp_request_param_t p{};
    p.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    p.memory_type = UCS_MEMORY_TYPE_HOST;
    return p;
  }
  // Ends a request that is given up: its memory must not be touched once this is over, and UCX lets go of it when the
  // request has ended.
  void give_up(void* request, int peer) {
    if (!request || given_up()) return;
    ucp_request_cancel(worker_, request);
    Peer& p = peers_[std::size_t(peer)];
    for (int i = 0; i < 1000 && ucp_request_check_status(request) == UCS_INPROGRESS; i++) {
      if (i == 10 && p.endpoint) hang_up(p, false);
      for (int k = 0; k < 100; k++) ucp_worker_progress(worker_);
      usleep(100);
    }
    ucp_request_free(request);
  }
  // UCX 1.13 over TCP ends the process by an assertion when it is called after the peers have given this rank up.
  bool given_up() {
    if (control_->given_up()) ucx_->abandoned = true;
    return ucx_->abandoned;
  }
  void hang_up_all(bool well) {
    if (given_up()) return;
    well = well && !control_failed();
    for (Peer& p : peers_)
      if (p.endpoint) hang_up(p, well);
  }
  bool progress() {
    const bool some = ucp_worker_progress(worker_) != 0;
    if (some) in_vain_ = 0;
    return some;
  }
  void sleep(int looks) {
    for (int i = 0; i < looks; i++)
      if (progress()) return;
    // Called again and again for nothing: what is to come may need this core, and in real time nobody would take it
    // from us.
    if (++in_vain_ > 10) sched_yield();
    if (ucp_worker_arm(worker_) != UCS_OK) return;  // something has come meanwhile
    pollfd p[] = {{ucx_->events, POLLIN, 0}, {ucx_->wake, POLLIN, 0}};
    if (poll(p, 2, 10) == 0) in_vain_ = 0;
    std::uint64_t count;
    (void)!read(ucx_->wake, &count, sizeof count);
  }

  static void signal(int fd) {
    const std::uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
  }
  bool control_failed() const {
    try {
      control_->check();
      return false;
    } catch (const CommunicationError&) {
      return true;
    }
  }

  // UCX knows that a connection is lost, the Control why: it gets a moment to say so.
  [[noreturn]] void lost(int peer, const std::string& operation, ucs_status_t status) {
    for (int i = 0; i < 100; i++) {
      control_->check();
      usleep(5000);
    }
    throw CommunicationError(peer, operation + ": " + control_->name(control_->rank()) +
                                       " has lost the connection to " + name(peer) + ": " + ucs_status_string(status));
  }

  std::string name(int peer) const { return control_->name(members_[std::size_t(peer)]); }
  ucp_ep_h endpoint(int to) {
    Peer& p = peers_[std::size_t(to)];
    if (p.endpoint) return p.endpoint;
    ucp_ep_params_t e{};
    e.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    e.address = reinterpret_cast<const ucp_address_t*>(addresses_[std::size_t(to)].data());
    e.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    e.err_handler.cb = [](void* peer, ucp_ep_h, ucs_status_t status) { static_cast<Peer*>(peer)->error = status; };
    e.err_handler.arg = &p;
    const ucs_status_t status = ucp_ep_create(worker_, &e, &p.endpoint);
    if (status != UCS_OK)
      fail("UCX finds no way from ", control_->name(control_->rank()), " to ", name(to), ": ",
           ucs_status_string(status), " (UCX_TLS and UCX_NET_DEVICES must fit on both)");
    return p.endpoint;
  }
  void hang_up(Peer& p, bool flush) {
    ucp_request_param_t c{};
    c.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    c.flags = flush && p.error == UCS_OK ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t r = ucp_ep_close_nbx(std::exchange(p.endpoint, nullptr), &c);
    if (!UCS_PTR_IS_PTR(r)) return;
    for (int i = 0; i < 2000 && ucp_request_check_status(r) == UCS_INPROGRESS; i++) {
      for (int k = 0; k < 100; k++) ucp_worker_progress(worker_);
      if (i > 10) usleep(1000);
    }
    ucp_request_free(r);
  }

  std::shared_ptr<Worker> ucx_;
  ucp_worker_h worker_;
  std::shared_ptr<Control> control_;
  std::vector<std::string> addresses_;
  std::vector<int> members_;
  std::uint64_t nonce_;
  std::vector<Peer> peers_;
  int in_vain_ = 0;  // sleeps, one after the other, that something ended and nothing came of
};

}  // namespace tandem::ucx
