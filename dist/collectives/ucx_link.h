// The common part of UCX's wire and channel: the worker, the endpoints, and their end. Included by ucx*.cpp only.
#pragma once
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "dist/collectives/ucx.h"
#include "dist/job/control.h"

namespace tandem::ucx {

inline void check(ucs_status_t status, const char* call, const std::string& hint = "") {
  if (status != UCS_OK) fail("UCX: ", call, ": ", ucs_status_string(status), hint);
}

#define UCX_CHECK(call) ::tandem::ucx::check(call, #call)

class Link {
 public:
  // members: ranks of the job, each with its address; empty: all.
  Link(std::shared_ptr<Ucx> ucx, std::vector<std::string> addresses, std::uint64_t nonce,
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

  // A received message whose destination is not known yet.
  struct Arrival {
    int from;
    void* data;  // owned by UCX; valid until the callback returns, or while it is held
    std::size_t bytes;
    bool rendezvous, held = false;
    std::string copy = {};
  };
  static Arrival arrival(int from, void* data, std::size_t bytes, const ucp_am_recv_param_t& param) {
    return {from, data, bytes, (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0};
  }
  // Keeps the message after the callback. The callback must return the result.
  static ucs_status_t keep(Arrival& a, const ucp_am_recv_param_t& param) {
    a.held = a.rendezvous || (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA);
    if (!a.held) a.copy.assign(static_cast<const char*>(a.data), a.bytes);
    return a.held ? UCS_INPROGRESS : UCS_OK;
  }
  // Copies its bytes to `to`. Returns UCX's result: a request in progress, an error, or null if it is done.
  ucs_status_ptr_t receive(Arrival& a, void* to) {
    if (a.rendezvous) {
      const ucp_request_param_t p = on_host();
      a.held = false;  // UCX owns it again
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
    p.cb = call;  // null: removes the handler
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
  // Ends an abandoned request. Its memory must not be accessed after this call; UCX frees the request when it has
  // ended.
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
  // UCX 1.13 over TCP ends the process by an assertion if it is called after the peers have given this rank up.
  bool given_up() {
    if (control_->given_up()) ucx_->abandoned = true;
    return ucx_->abandoned;
  }
  void hang_up_all(bool well) {
    if (given_up()) return;
    try {
      if (well) control_->check();
    } catch (const CommunicationError&) {
      well = false;
    }
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
    // Repeated sleeps without progress: the awaited process may need this core, and under real-time scheduling the
    // kernel would not preempt this process.
    if (++in_vain_ > 10) sched_yield();
    if (ucp_worker_arm(worker_) != UCS_OK) return;  // an event has occurred meanwhile
    pollfd p[] = {{ucx_->events, POLLIN, 0}, {ucx_->wake, POLLIN, 0}};
    if (poll(p, 2, 10) == 0) in_vain_ = 0;
    std::uint64_t count;
    (void)!read(ucx_->wake, &count, sizeof count);
  }

  static void signal(int fd) {
    const std::uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
  }

  // UCX reports that a connection is lost, and the Control the reason. Waits half a second for the reason.
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

  std::shared_ptr<Ucx> ucx_;
  ucp_worker_h worker_;
  std::shared_ptr<Control> control_;
  std::vector<std::string> addresses_;
  std::vector<int> members_;
  std::uint64_t nonce_;
  std::vector<Peer> peers_;
  int in_vain_ = 0;  // consecutive sleeps that an event ended without progress
};

}  // namespace tandem::ucx
