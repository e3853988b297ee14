// Messages between hosts over UCX active messages: RDMA if available, TCP otherwise, shared memory inside a host.
// Endpoints use UCX's PEER error mode, so that a lost peer ends every request. The Control names the lost peer.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dist/collectives/wire.h"
#include "dist/server/channel.h"

struct ucp_context;
struct ucp_worker;

namespace tandem {

class Control;

class Ucx : public std::enable_shared_from_this<Ucx> {
 public:
  // The transports that UCX may use, unless its variables (UCX_TLS, UCX_ZCOPY_THRESH) are set:
  enum class Use : std::uint8_t {
    all,
    memory,  // shared memory of one host: no port is opened
    // Transports that tolerate the loss of a peer. Shared memory is excluded: a rank that is killed or stopped while it
    // writes a message into another rank's memory blocks all further messages to that rank, from any rank. Sends from
    // the caller's memory are excluded too: UCX 1.13 over TCP ends the process by an assertion if such a send to a lost
    // peer is in progress.
    survives
  };
  // interface_address: of this host. UCX uses that interface (and RDMA devices), unless UCX_NET_DEVICES is set.
  explicit Ucx(const std::string& interface_address, Use use = Use::all);
  ~Ucx();
  Ucx(const Ucx&) = delete;
  // From now on the TCP port accepts only the ranks' addresses. If that is impossible, the reason is printed once on
  // stderr.
  void accept_only(const std::vector<std::string>& addresses);
  std::string address() const;  // the address to which other ranks connect
  // addresses: of all ranks. nonce: the job's; messages with another nonce are dropped.
  std::shared_ptr<Wire> connect(std::vector<std::string> addresses, std::uint64_t nonce,
                                std::shared_ptr<Control> control);
  // As connect(), for messages that are delivered by their header. An Ucx has either a wire or a channel. members: the
  // connected ranks of the job, in the order of the addresses; empty: all.
  std::unique_ptr<Channel> channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                   std::shared_ptr<Control> control, std::vector<int> members = {});
  static std::string version();

  // For the wire and the channel:
  ucp_context* context = nullptr;
  ucp_worker* worker = nullptr;
  int events = -1, wake = -1;       // file descriptors: an event of UCX; a call of wake() by another thread
  std::size_t fragment = SIZE_MAX;  // maximum bytes of a network message that UCX delivers without reassembly
  bool abandoned = false;           // its peers have given this rank up: do not call UCX again

 private:
  std::vector<int> ports_;  // on which UCX listens
  bool warned_ = false;     // a warning that they are open was printed
};

}  // namespace tandem
