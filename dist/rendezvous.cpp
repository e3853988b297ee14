#include "dist/rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/hosts.h"

namespace tandem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string word(std::uint32_t v) { return {reinterpret_cast<const char*>(&v), sizeof v}; }
std::uint32_t word_at(const std::string& s, std::size_t at) {
  std::uint32_t v;
  std::memcpy(&v, s.data() + at, sizeof v);
  return v;
}

// ---- the file in which ranks of one host find each other -----------------------------------------------------------------
std::string private_folder(const Variables& variables) {
  const char* given = variables("XDG_RUNTIME_DIR");
  std::string folder = given && access(given, W_OK) == 0 ? given : "/tmp/tandem-" + std::to_string(getuid());
  mkdir(folder.c_str(), 0700);
  struct stat s {};
  if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != getuid() || (s.st_mode & 022))
    refuse(folder, ": must be a folder that only you can write: it holds the token of a job. Or set XDG_RUNTIME_DIR");
  return folder;
}

std::string meeting_file(const Place& place, const Variables& variables) {
  return private_folder(variables) + "/tandem-" + hex(hmac("name", place.job)).substr(0, 24);
}

void write_private(const std::string& path, const std::string& text) {
  const std::string fresh = path + "." + std::to_string(getpid());
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (fd >= 0) close(fd);
  if (!written || rename(fresh.c_str(), path.c_str()) != 0) fail(path, ": cannot be written: ", std::strerror(errno));
}

}  // namespace

void forget_meeting(const std::string& job, const Variables& variables) {
  Place place;
  place.job = job;
  unlink(meeting_file(place, variables).c_str());
}

Deadlines Deadlines::from(const Variables& variables) {
  Deadlines d;
  auto take = [&](const char* name, double& v) {
    const char* text = variables(name);
    if (!text || !*text) return;
    char* end = nullptr;
    v = std::strtod(text, &end);
    if (*end || !(v > 0) || v > 1e6) refuse(name, "=", text, ": expected a number of seconds");
  };
  take("TANDEM_START_TIMEOUT", d.start);
  take("TANDEM_SILENCE", d.silence);
  take("TANDEM_PATIENCE", d.patience);
  take("TANDEM_DEADLINE", d.wait);
  return d;
}

Rendezvous::Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables)
    : place_(place), deadlines_(deadlines) {
  connections_.assign(std::size_t(place.rank == 0 ? place.size : 1), -1);
  if (place.size == 1) return;
  const char* given = variables("TANDEM_TOKEN");
  token_ = given ? given : "";
  if (!token_.empty() && token_.size() < 16)
    refuse("TANDEM_TOKEN is shorter than 16 characters: take `openssl rand -hex 32`");
  const bool by_file = place.one_host() && token_.empty();
  if (!by_file && (token_.empty() || (place.master.empty() && !place.one_host())))
    refuse("ranks on several hosts (", place.family, ", ", place.size, " ranks", place.local_size > 0 ? ", " : "",
           place.local_size > 0 ? std::to_string(place.local_size) + " here" : "", ") need ",
           place.master.empty() ? "MASTER_ADDR, the host of rank 0, and " : "",
           "TANDEM_TOKEN, the same secret on all of them: TANDEM_TOKEN=$(openssl rand -hex 32)");
  const int port = place.port ? place.port : 29500;
  std::vector<std::string> hosts;  // where each rank should be, if the launcher says
  if (const char* list = variables("TANDEM_HOSTS"); list && *list)
    for (const Host& h : hosts_in_list(list)) hosts.insert(hosts.end(), std::size_t(h.slots), h.name);
  if (by_file) {
    const std::string file = meeting_file(place, variables);
    if (place.rank == 0) {
      token_ = hex(random_bytes(32));
      const int socket = bound_socket(true, 0);
      write_private(file, std::to_string(port_of(socket)) + " " + token_ + "\n");
      struct Removed {
        std::string file;
        ~Removed() { unlink(file.c_str()); }
      } removed{file};
      host(socket, hosts);
    } else {
      join(file, 0);
    }
  } else if (place.rank == 0) {
    host(bound_socket(false, port), hosts);
  } else {
    join(place.master.empty() ? "127.0.0.1" : place.master, port);
  }
}

Rendezvous::~Rendezvous() {
  for (int fd : connections_)
    if (fd >= 0) close(fd);
}

std::vector<int> Rendezvous::take_connections() { return std::exchange(connections_, {}); }

// ---- rank 0 --------------------------------------------------------------------------------------------------------------
void Rendezvous::host(int socket, const std::vector<std::string>& hosts) {
  Gate gate(socket, token_);
  std::vector<std::string> addresses(std::size_t(place_.size));
  int missing = place_.size - 1;
  const double until = now() + deadlines_.start;
  auto give_up = [&](const std::string& text) {
    for (int fd : connections_)
      if (fd >= 0) try {
          send_frame(fd, "!" + text, 1);
        } catch (const Error&) {  // it hears of it by the closed connection
        }
    fail(text);
  };
  while (missing > 0) {
    if (now() > until) {
      std::string absent, present;
      for (int r = 0; r < place_.size; r++)
        if (r > 0 && connections_[std::size_t(r)] < 0)
          absent += (absent.empty() ? "" : ", ") + std::to_string(r) +
                    (hosts.size() == std::size_t(place_.size) ? " on " + hosts[std::size_t(r)] : "");
        else
          present +=
              (present.empty() ? "" : ", ") + std::to_string(r) + (r ? " from " + addresses[std::size_t(r)] : "");
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", deadlines_.start);
      give_up(std::string("after ") + seconds + " s these ranks are missing: " + absent + " (here: " + present +
              "). TANDEM_START_TIMEOUT gives them longer");
    }
    for (const Gate::Guest& guest : gate.wait(0.2)) {
      const auto rank = std::size_t(guest.rank);
      std::string refusal;
      if (guest.ranks != place_.size)
        refusal = "rank " + std::to_string(guest.rank) + " was started as one of " + std::to_string(guest.ranks) +
                  " ranks, and rank 0 as one of " + std::to_string(place_.size);
      else if (guest.rank <= 0 || guest.rank >= place_.size || connections_[rank] >= 0)
        refusal = "rank " + std::to_string(guest.rank) + " has come twice, from " +
                  (guest.rank >= 0 && guest.rank < place_.size ? addresses[rank] + " and " : "") + guest.address;
      if (!refusal.empty()) {
        connections_.push_back(guest.connection);  // it hears of it too
        give_up(refusal);
      }
      connections_[rank] = guest.connection;
      addresses[rank] = guest.address;
      missing--;
    }
  }
  for (std::size_t r = 1; r < connections_.size(); r++) send_frame(connections_[r], "+", 5);  // all are here
}

// ---- the others ------------------------------------------------------------------------------------------------------------
void Rendezvous::join(const std::string& where, int port) {
  const bool by_file = token_.empty();
  const double until = now() + deadlines_.start;
  std::string why = "nothing was tried";
  for (double pause = 0.02; now() < until;
       std::this_thread::sleep_for(std::chrono::duration<double>(pause)), pause = std::min(1.0, pause * 1.5)) {
    std::string address = where;
    if (by_file) {
      std::ifstream file(where);
      address = "127.0.0.1";
      if (!(file >> port >> token_)) {
        why = "rank 0 has not left its port in " + where;
        pause = std::min(pause, 0.1);
        continue;
      }
    }
    std::string verdict;
    try {
      connections_[0] = knock(address, port, token_, place_.rank, place_.size, 5);
      verdict = receive_frame(connections_[0], std::max(1.0, until + 5 - now()));
    } catch (const Error& e) {
      if (connections_[0] >= 0) close(std::exchange(connections_[0], -1));
      why = std::string(e.what()) + (by_file ? "" : " (is TANDEM_TOKEN the same on all hosts?)");
      continue;
    }
    if (verdict == "+") return;
    fail("rank 0 says: ", verdict.empty() ? "" : verdict.substr(1));
  }
  fail("rank ", place_.rank, " does not find rank 0: ", why);
}

std::vector<std::string> Rendezvous::exchange(const std::string& mine) {
  std::vector<std::string> all(std::size_t(place_.size));
  all[std::size_t(place_.rank)] = mine;
  auto with = [&](int rank, auto&& action) {
    try {
      action();
    } catch (const Error& e) {
      fail("rendezvous with rank ", rank, ": ", e.what());
    }
  };
  if (place_.rank == 0) {
    for (int r = 1; r < place_.size; r++)
      with(r, [&] { all[std::size_t(r)] = receive_frame(connections_[std::size_t(r)], deadlines_.start); });
    std::string packed;
    for (const std::string& s : all) packed += word(std::uint32_t(s.size())) + s;
    for (int r = 1; r < place_.size; r++)
      with(r, [&] { send_frame(connections_[std::size_t(r)], packed, deadlines_.start); });
  } else {
    std::string packed;
    with(0, [&] {
      send_frame(connections_[0], mine, deadlines_.start);
      packed = receive_frame(connections_[0], deadlines_.start);
    });
    std::size_t at = 0;
    for (std::string& s : all) {
      require(at + 4 <= packed.size() && at + 4 + word_at(packed, at) <= packed.size(), "rendezvous: a damaged answer");
      s = packed.substr(at + 4, word_at(packed, at));
      at += 4 + s.size();
    }
  }
  return all;
}

std::string Rendezvous::interface_address() const {
  for (int fd : connections_)
    if (fd >= 0) return address_of(fd);
  return "127.0.0.1";
}

}  // namespace tandem
