#include "dist/collectives/ucx_link.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <sstream>
#include <utility>

#include "dist/job/handshake.h"
#include "dist/job/port_guard.h"
#include "layers/train/strategy.h"

namespace tandem {
namespace {

std::string interface_of(const std::string& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string name;
  for (ifaddrs* a = all; a; a = a->ifa_next) {
    if (!a->ifa_addr || (a->ifa_addr->sa_family != AF_INET && a->ifa_addr->sa_family != AF_INET6)) continue;
    char text[NI_MAXHOST];
    const socklen_t length = a->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(a->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 && address == text)
      name = a->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

// UCX uses 4.3 MB of /dev/shm for each rank of a host. A Docker container has 64 MB.
constexpr std::uint64_t of_dev_shm = 8 << 20;
bool dev_shm_is_small() {
  std::error_code none;
  const auto has = std::filesystem::space("/dev/shm", none).capacity;
  return none || has < std::uint64_t(std::max(2, local_size_from_environment())) * of_dev_shm;
}
std::string size_of_dev_shm() {
  std::error_code none;
  const auto s = std::filesystem::space("/dev/shm", none);
  if (none) return "/dev/shm is not there";
  return "/dev/shm has " + std::to_string(s.capacity >> 20) + " MiB, " + std::to_string(s.available >> 20) +
         " free, and each rank takes 5 MiB of it: make room there, or start the container with --shm-size=1g";
}

// Makes the context and the worker.
ucs_status_t create(Ucx& u, const std::string& interface_address, Ucx::Use use, bool in_dev_shm) {
  using Use = Ucx::Use;
  std::string devices = interface_of(interface_address), rdma;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none))
    rdma.append(",").append(entry.path().filename().string()).append(":1");
  ucp_config_t* config = nullptr;
  UCX_CHECK(ucp_config_read(nullptr, nullptr, &config));
  const auto take = [&](const char* name, const std::string& value) {
    if (!std::getenv((std::string("UCX_") + name).c_str())) UCX_CHECK(ucp_config_modify(config, name, value.c_str()));
  };
  // System V shared memory is not in /dev/shm.
  if (use == Use::memory) take("TLS", in_dev_shm ? "self,sm" : "self,sysv,cma");
  if (use == Use::all && !in_dev_shm) take("TLS", "^posix");
  if (use == Use::survives) {
    take("TLS", "^sm");
    take("ZCOPY_THRESH", "inf");
  }
  if (!devices.empty()) take("NET_DEVICES", devices + rdma);
  // Over TCP UCX's rendezvous has no advantage, and waits for the bytes in flight: 71 MB/s instead of 120 at 1 Gbit/s.
  // UCX reassembles longer messages in its own memory. `fragment` and a header are one of UCX's fragments (64 KiB).
  if (rdma.empty() && !std::getenv("UCX_RNDV_THRESH")) u.fragment = 60 << 10;
  if (rdma.empty()) take("RNDV_THRESH", "inf");
  ucp_params_t p{};
  p.field_mask = UCP_PARAM_FIELD_FEATURES;
  p.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (u.context) ucp_cleanup(std::exchange(u.context, nullptr));
  const ucs_status_t status = ucp_init(&p, config, &u.context);
  ucp_config_release(config);
  ucx::check(status, "ucp_init", " (ucx_info -d lists the transports; UCX_LOG_LEVEL=info says more)");
  ucp_worker_params_t w{};
  w.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  w.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  return ucp_worker_create(u.context, &w, &u.worker);
}

}  // namespace

Ucx::Ucx(const std::string& interface_address, Use use) {
  // UCX reads the options of its transports from the environment only. Settings of the user are kept.
  setenv("UCX_POSIX_ERROR_HANDLING", "y", 0);
  setenv("UCX_SYSV_ERROR_HANDLING", "y", 0);
  if (use == Use::survives)
    setenv("UCX_TCP_TX_SEG_SIZE", "64k", 0);  // UCX's buffers for sending; 8 KiB take 1.6 times as long
  const std::vector<int> before = listening_sockets();
  const bool chosen = std::getenv("UCX_TLS"), small = dev_shm_is_small();
  ucs_status_t status = create(*this, interface_address, use, !small);
  // /dev/shm may also be full or not writable.
  if (status != UCS_OK && use != Use::survives && !small && !chosen)
    status = create(*this, interface_address, use, false);
  const std::string hint =
      use == Use::survives ? "" : " (" + size_of_dev_shm() + (chosen ? ", or leave UCX_TLS out)" : ")");
  ucx::check(status, "ucp_worker_create", hint);
  for (int s : listening_sockets())
    if (std::ranges::find(before, s) == before.end()) ports_.push_back(s);
  UCX_CHECK(ucp_worker_get_efd(worker, &events));
  wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

Ucx::~Ucx() {
  if (worker && !abandoned) ucp_worker_destroy(worker);
  if (context && !abandoned) ucp_cleanup(context);
  if (wake >= 0) close(wake);
}

void Ucx::accept_only(const std::vector<std::string>& addresses) {
  for (int s : ports_)
    if (const std::string why = tandem::accept_only(s, addresses); !why.empty() && !std::exchange(warned_, true))
      std::fprintf(stderr,
                   "warning: UCX's port %d accepts every address, not the ranks' alone (%s): whoever reaches it can "
                   "end the job. "
                   "Close it by a firewall\n",
                   port_of(s), why.c_str());
}

std::string Ucx::address() const {
  ucp_address_t* a = nullptr;
  std::size_t length = 0;
  UCX_CHECK(ucp_worker_get_address(worker, &a, &length));
  std::string s(reinterpret_cast<const char*>(a), length);
  ucp_worker_release_address(worker, a);
  return s;
}

namespace ucx {
namespace {

// Sent before the elements.
struct Envelope {
  std::uint64_t nonce;
  std::int32_t from;
  std::int32_t unused = 0;
  Header header;
};
constexpr unsigned message_id = 1;

class UcxWire : public Wire, private Link {
 public:
  UcxWire(std::shared_ptr<Ucx> ucx, std::vector<std::string> addresses, std::uint64_t nonce,
          std::shared_ptr<Control> control)
      : Link(std::move(ucx), std::move(addresses), nonce, std::move(control)) {
    handler(message_id, arrived, this);
  }
  ~UcxWire() override {
    control_->report_wait(this, {});
    hang_up_all(error_.empty());
    for (Unexpected& u : unexpected_) release(u);
    handler(message_id, nullptr, nullptr);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string where(int rank) const override { return control_->name(rank); }

  std::unique_ptr<Request> send(int to, const Header& header, const void* data, std::size_t bytes) override {
    auto pending = std::make_unique<PendingMessage>(*this, to, header, const_cast<void*>(data), bytes);
    pending->envelope = {.nonce = nonce_, .from = rank(), .header = header};
    const ucp_request_param_t p = on_host();
    bytes_ += bytes;
    pending->take(
        ucp_am_send_nbx(endpoint(to), message_id, &pending->envelope, sizeof pending->envelope, data, bytes, &p));
    return pending;
  }
  std::unique_ptr<Request> recv(int from, const Header& header, void* data, std::size_t bytes) override {
    auto pending = std::make_unique<PendingMessage>(*this, from, header, data, bytes);
    auto match =
        std::ranges::find_if(unexpected_, [&](Unexpected& u) { return u.from == from && u.header.matches(header); });
    if (match == unexpected_.end()) {
      receives_.push_back(pending.get());
    } else {
      Unexpected u = std::move(*match);
      unexpected_.erase(match);
      deliver(*pending, u);
      release(u);
    }
    return pending;
  }

  void progress() override {
    control_->check();
    for (int i = 0; i < 64 && Link::progress(); i++) {}
    const auto gone = std::ranges::find_if(receives_, [&](const PendingMessage* p) { return left(p->peer); });
    control_->check();  // after left(): a rank that fails reports it before it leaves
    if (!error_.empty()) throw CommunicationError(culprit_, error_);
    if (gone != receives_.end())
      throw CommunicationError((*gone)->peer,
                               describe((*gone)->header) + ": " + where(rank()) + " waits for " + where((*gone)->peer) +
                                   (control_->lost((*gone)->peer) ? ", which is lost" : ", which has left"));
  }
  void rest(int looks) override { sleep(looks); }
  void wake() override { signal(ucx_->wake); }
  std::uint64_t bytes_sent() const override { return bytes_; }
  std::string transport() const override {
    std::string names;
    for (const Peer& p : peers_) {
      if (!p.endpoint) continue;
      char* text = nullptr;
      std::size_t length = 0;
      std::FILE* memory = open_memstream(&text, &length);
      if (!memory) continue;
      ucp_ep_print_info(p.endpoint, memory);  // one line per lane: "lane[0]:  2:tcp/eth0.0 md[1] …"
      std::fclose(memory);
      std::istringstream words(text);
      std::free(text);
      for (std::string w; words >> w;)
        if (w.starts_with("lane[") && words >> w) {
          const std::string one = w.substr(w.find(':') + 1);
          if (names.find(one) == std::string::npos) names += (names.empty() ? " " : ", ") + one;
        }
    }
    return "UCX" + names;
  }

  void announce(const Header& header, int) override {
    for (const Unexpected& u : unexpected_)
      if (differ(header, u.header)) throw disagreement(u.from, u.header, header);
    announced_[{header.context, header.number}] = header;
    if (announced_.size() > 4096) announced_.erase(announced_.begin());
  }
  void report_wait(const WaitForEdge& edge) override { control_->report_wait(this, edge); }
  bool left(int rank) const override { return control_->gone(rank) || control_->lost(rank); }
  bool works(int rank) const override { return control_->works(rank); }
  // If a rank is lost, only the ranks that need it fail; the job need not end.
  void fail(int culprit, const std::string& text) override {
    if (!control_->lost(culprit)) control_->fail(culprit, text);
  }
  std::vector<int> survivors() override { return control_->survivors(); }

 private:
  int last_in_line(int waits_for) override { return control_->last_in_line(waits_for); }

  struct Unexpected : Arrival {  // a message without a matching receive yet
    Header header;
  };
  struct PendingMessage : Request {
    PendingMessage(UcxWire& wire, int peer, const Header& header, void* data, std::size_t bytes)
        : wire(wire), peer(peer), header(header), data(data), bytes(bytes) {}
    ~PendingMessage() override {
      wire.receives_.remove(this);
      if (request) wire.give_up(request, peer);
    }
    bool done() override {
      if (!error.empty()) throw CommunicationError(peer, error);
      if (finished) return true;
      if (!request) return false;
      const ucs_status_t status = ucp_request_check_status(request);
      if (status == UCS_INPROGRESS) return false;
      ucp_request_free(std::exchange(request, nullptr));
      finished = true;
      if (status != UCS_OK) wire.lost(peer, describe(header), status);
      return true;
    }
    void take(ucs_status_ptr_t p) {
      if (UCS_PTR_IS_ERR(p)) wire.lost(peer, describe(header), UCS_PTR_STATUS(p));
      if (UCS_PTR_IS_PTR(p))
        request = p;
      else
        finished = true;
    }
    UcxWire& wire;
    int peer;
    Header header;
    void* data;
    std::size_t bytes;
    Envelope envelope;
    void* request = nullptr;
    bool finished = false;
    std::string error;
  };

  static bool differ(const Header& a, const Header& b) {
    return a.kind != Kind::send && b.kind != Kind::send && a.context == b.context && a.number == b.number &&
           (a.kind != b.kind || !a.agrees(b));
  }
  CommunicationError disagreement(int from, const Header& theirs, const Header& mine) const {
    return {from, mismatch(where(from), theirs, where(rank()), mine)};
  }

  // Delivers a message to the receive that waits for it. UCX may call this.
  void deliver(PendingMessage& pending, Unexpected& u) {
    if (!u.header.agrees(pending.header) || u.bytes != pending.bytes) {
      pending.error = disagreement(u.from, u.header, pending.header).what();
    } else {
      ucs_status_ptr_t r = receive(u, pending.data);
      if (UCS_PTR_IS_ERR(r))
        pending.error =
            describe(pending.header) + ": " + where(pending.peer) + ": " + ucs_status_string(UCS_PTR_STATUS(r));
      else if (UCS_PTR_IS_PTR(r))
        pending.request = r;
      else
        pending.finished = true;
    }
  }

  static ucs_status_t arrived(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes,
                              const ucp_am_recv_param_t* param) {
    auto& me = *static_cast<UcxWire*>(self);
    Envelope e;
    if (head_bytes != sizeof e) return UCS_OK;
    std::memcpy(&e, head, sizeof e);
    if (e.nonce != me.nonce_ || e.from < 0 || e.from >= me.size()) return UCS_OK;  // not of this job
    Unexpected u{arrival(e.from, data, bytes, *param), e.header};
    auto match = std::ranges::find_if(
        me.receives_, [&](PendingMessage* p) { return p->peer == u.from && p->header.matches(u.header); });
    if (match != me.receives_.end()) {
      PendingMessage* pending = *match;
      me.receives_.erase(match);
      me.deliver(*pending, u);
      return u.rendezvous && pending->error.empty() ? UCS_INPROGRESS : UCS_OK;
    }
    if (auto known = me.announced_.find({e.header.context, e.header.number});
        known != me.announced_.end() && differ(known->second, e.header) && me.error_.empty()) {
      me.error_ = me.disagreement(u.from, e.header, known->second).what();
      me.culprit_ = u.from;
    }
    const ucs_status_t kept = keep(u, *param);
    me.unexpected_.push_back(std::move(u));
    return kept;
  }

  std::list<PendingMessage*> receives_;
  std::list<Unexpected> unexpected_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, Header> announced_;
  std::string error_;
  int culprit_ = -1;
  std::uint64_t bytes_ = 0;
};

}  // namespace
}  // namespace ucx

std::shared_ptr<Wire> Ucx::connect(std::vector<std::string> addresses, std::uint64_t nonce,
                                   std::shared_ptr<Control> control) {
  return std::make_shared<ucx::UcxWire>(shared_from_this(), std::move(addresses), nonce, std::move(control));
}

std::string Ucx::version() { return ucp_get_version_string(); }

}  // namespace tandem
