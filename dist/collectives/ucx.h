// Messages between hosts over UCX active messages: RDMA if available, TCP otherwise, shared memory inside a host.
// Endpoints use UCX's PEER error mode, so that a lost peer ends every request. The Control names the lost peer.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "dist/collectives/wire.h"
#include "dist/job/control.h"
#include "dist/server/channel.h"

namespace tandem {

class Ucx {
 public:
  virtual ~Ucx() = default;
  // interface_address: of this host. UCX uses that interface (and RDMA devices), unless UCX_NET_DEVICES is set.
  // The transports that UCX may use, unless its variables (UCX_TLS, UCX_ZCOPY_THRESH) are set:
  enum class Use : std::uint8_t {
    all,
    memory,  // shared memory of one host: no port is opened
    // Transports that tolerate the loss of a peer. Not shared memory: a rank that is killed or stopped while it writes
    // a message into another rank's memory blocks all further messages to that rank, from any rank. And no sends from
    // the caller's memory: UCX 1.13 over TCP ends the process by an assertion if such a send to a lost peer is in
    // progress.
    survives
  };
  static std::shared_ptr<Ucx> open(const std::string& interface_address, Use use = Use::all);
  // From now on the TCP port accepts only the ranks' addresses. If that is impossible, the reason is printed once on
  // stderr.
  virtual void accept_only(const std::vector<std::string>& addresses) = 0;
  virtual std::string address() const = 0;  // the address to which other ranks connect
  // addresses: of all ranks. nonce: the job's; messages with another nonce are dropped.
  virtual std::shared_ptr<Wire> connect(std::vector<std::string> addresses, std::uint64_t nonce,
                                        std::shared_ptr<Control> control) = 0;
  // As connect(), for messages that are delivered by their header. A worker has either a wire or a channel. members:
  // the connected ranks of the job, in the order of the addresses; empty: all.
  virtual std::unique_ptr<Channel> channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                           std::shared_ptr<Control> control, std::vector<int> members = {}) = 0;
  static std::string version();
};

}  // namespace tandem
