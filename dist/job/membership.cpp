#include "dist/job/membership.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/machine.h"

namespace tandem {
namespace {

// Processes share memory when they run on the same boot of the same machine, under the same name and in the same
// namespaces of IPC and of processes (node memory is found by a process number): the host name alone does not suffice,
// because many containers have the same name, and one machine may have several names.
std::string host_identity() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  struct stat s {};
  for (const char* space : {"/proc/self/ns/ipc", "/proc/self/ns/pid"})
    if (stat(space, &s) == 0) id.append(":").append(std::to_string(s.st_ino));
  return id.append(":").append(host_name());
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AddressRecord, host, identity, process, address, port, ucx)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemberSlot, lost, left, incarnation, record)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Membership, goes_on, nonce, incarnation, generation, terms, slots)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JoinRequest, incarnation, terms, record)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ControlMessage, type, rank, waits_for, number, generation, content)

static std::string packed(const nlohmann::json& value) {
  const std::vector<std::uint8_t> bytes = nlohmann::json::to_msgpack(value);
  return {bytes.begin(), bytes.end()};
}
template <class T>
static T unpacked(const std::string& text) {
  try {
    return nlohmann::json::from_msgpack(text).get<T>();
  } catch (const nlohmann::json::exception& e) {
    fail("a damaged message (", e.what(), "): are all ranks of the same version?");
  }
}

std::string AddressRecord::text() const { return packed(*this); }
std::string Membership::text() const { return packed(*this); }
std::string JoinRequest::text() const { return packed(*this); }
std::string ControlMessage::text() const { return packed(*this); }
std::string bundle(const std::vector<std::string>& texts) { return packed(texts); }
AddressRecord AddressRecord::from(const std::string& text) { return unpacked<AddressRecord>(text); }
Membership Membership::from(const std::string& text) { return unpacked<Membership>(text); }
JoinRequest JoinRequest::from(const std::string& text) { return unpacked<JoinRequest>(text); }
ControlMessage ControlMessage::from(const std::string& text) { return unpacked<ControlMessage>(text); }
std::vector<std::string> unbundle(const std::string& bundled) { return unpacked<std::vector<std::string>>(bundled); }

AddressRecord AddressRecord::mine(const std::string& address) {
  return {.host = host_name(), .identity = host_identity(), .process = int(getpid()), .address = address};
}

std::string first_difference(const std::string& a, const std::string& b) {
  std::istringstream x(a), y(b);
  for (std::string p, q; std::getline(x, p) && std::getline(y, q);)
    if (p != q) return p + " and " + q;
  return "a different number of settings";
}

}  // namespace tandem
