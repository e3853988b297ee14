#include "dist/job/membership.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/text.h"
#include "dist/job/frames.h"

namespace tandem {
namespace {

std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

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

std::uint64_t number_in(const std::string& text) {
  const auto v = parsed<std::uint64_t>(text);
  require(v.has_value(), "a damaged address record: ", text, " is no number");
  return *v;
}

std::string AddressRecord::text() const {
  return bundle({host, identity, std::to_string(process), address, std::to_string(port), ucx});
}

AddressRecord AddressRecord::from(const std::string& text) {
  const auto words = unbundle(text);
  require(words.size() == 6, "an address record of ", words.size(), " words");
  return {words[0], words[1], int(number_in(words[2])), words[3], int(number_in(words[4])), words[5]};
}

AddressRecord AddressRecord::mine(const std::string& address) {
  return {.host = host_name(), .identity = host_identity(), .process = int(getpid()), .address = address};
}

std::string Membership::text() const {
  std::vector<std::string> words{std::to_string(nonce), std::to_string(incarnation), std::to_string(generation), terms};
  for (const MemberSlot& s : slots)
    words.insert(words.end(), {s.lost   ? "lost"
                               : s.left ? "left"
                                        : "here",
                               std::to_string(s.incarnation), s.record.text()});
  return bundle(words);
}

Membership Membership::from(const std::string& text) {
  const auto words = unbundle(text);
  require(words.size() >= 4 && words.size() % 3 == 1, "a damaged membership");
  Membership m{false, number_in(words[0]), number_in(words[1]), number_in(words[2]), words[3]};
  for (std::size_t i = 4; i < words.size(); i += 3)
    m.slots.push_back(
        {words[i] == "lost", words[i] == "left", number_in(words[i + 1]), AddressRecord::from(words[i + 2])});
  return m;
}

std::string first_difference(const std::string& a, const std::string& b) {
  std::istringstream x(a), y(b);
  for (std::string p, q; std::getline(x, p) && std::getline(y, q);)
    if (p != q) return p + " and " + q;
  return "a different number of settings";
}

}  // namespace tandem
