#include "dist/job/rendezvous.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "dist/job/hosts.h"

namespace tandem {
namespace {

// ---- the file in which ranks of one host find each other ------------------------------------------------------------
bool only_mine(const std::string& folder) {
  struct stat s {};
  return lstat(folder.c_str(), &s) == 0 && S_ISDIR(s.st_mode) && s.st_uid == getuid() && (s.st_mode & 022) == 0 &&
         access(folder.c_str(), W_OK | X_OK) == 0;
}

// Whether the folder's file system has free space. A full disk has none, and /proc never has.
bool has_room(const std::string& folder) {
  struct statvfs s {};
  return statvfs(folder.c_str(), &s) == 0 && s.f_bavail > 0;
}

// XDG_RUNTIME_DIR may be another user's (su, sudo -E), open to all (WSL) or full: then it is not used.
std::string private_folder(const Variables& variables) {
  const char* given = variables("XDG_RUNTIME_DIR");
  if (given && given[0] == '/' && only_mine(given) && has_room(given)) return given;
  const std::string folder = "/tmp/tandem-" + std::to_string(getuid());
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    refuse(folder, ": cannot be made: ", std::strerror(errno),
           ". Set XDG_RUNTIME_DIR to a folder that only you can write");
  if (!only_mine(folder))
    refuse(folder,
           ": must be a folder that only you can write: it holds the token of a job. Or set XDG_RUNTIME_DIR to such a "
           "folder");
  return folder;
}

// Containers and hosts may share this folder, and may use the same numbers for processes and jobs. So only ranks in the
// same process and network namespaces meet here. TANDEM_JOB does not need this: tandem-run draws it at random, and each
// of its ranks may be in its own container.
std::string rendezvous_file(const std::string& job, const Variables& variables) {
  std::string name = job, boot;
  if (!job.starts_with("TANDEM_JOB=")) {
    std::error_code none;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    name += boot;
    for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"})
      name += " " + std::filesystem::read_symlink(space, none).string();
  }
  return private_folder(variables) + "/tandem-" + hex(hmac("name", name)).substr(0, 24);
}

void write_private(const std::string& path, const std::string& text) {
  const std::string fresh = path + "." + std::to_string(getpid());
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (fd >= 0) close(fd);
  if (!written || rename(fresh.c_str(), path.c_str()) != 0) fail(path, ": cannot be written: ", std::strerror(errno));
}

// Removes the files of ended jobs: rank 0 of a running job keeps its file locked. (New files may not be locked yet.)
void sweep(const std::string& folder) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("tandem-") || name.find_first_not_of("0123456789abcdef", 7) != std::string::npos) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat s {};
    if (fd >= 0 && fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && s.st_mtime < std::time(nullptr) - 60 &&
        flock(fd, LOCK_EX | LOCK_NB) == 0)
      unlink(entry.path().c_str());
    if (fd >= 0) close(fd);
  }
}

[[noreturn]] void refused_with(const std::string& answer) {
  fail("rank 0 says: ", answer.empty() ? "" : answer.substr(1));
}

bool hung_up(int connection) {
  char byte;
  const ssize_t n = recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

bool has_begun(const std::string& job, const Variables& variables) {
  std::ifstream file(rendezvous_file(job, variables));
  std::string port, token, begun;
  return file >> port >> token >> begun && begun == "begun";
}

void forget_rendezvous(const std::string& job, const Variables& variables) {
  unlink(rendezvous_file(job, variables).c_str());
}

Deadlines Deadlines::from(const Variables& variables) {
  Deadlines d;
  auto take = [&](const char* name, double& v) {
    const char* text = variables(name);
    if (!text || !*text) return;
    const auto seconds = parsed<double>(text);
    if (!seconds || !(*seconds > 0 && *seconds <= 1e6)) refuse(name, "=", text, ": expected a number of seconds");
    v = *seconds;
  };
  take("TANDEM_START_TIMEOUT", d.start);
  take("TANDEM_SILENCE", d.silence);
  take("TANDEM_PATIENCE", d.patience);
  take("TANDEM_DEADLINE", d.wait);
  return d;
}

RendezvousListener::~RendezvousListener() {
  if (!file.empty()) unlink(file.c_str());
}

Rendezvous::Way Rendezvous::way(const Variables& variables) {
  const char* given = variables("TANDEM_TOKEN");
  token_ = given ? given : "";
  if (!token_.empty() && token_.size() < 16)
    refuse("TANDEM_TOKEN is shorter than 16 characters: take `openssl rand -hex 32`");
  const bool by_file = place_.one_host() && token_.empty();
  if (!by_file && (token_.empty() || (place_.master.empty() && !place_.one_host())))
    refuse("ranks on several hosts (", place_.family, ", ", place_.size, " ranks", place_.local_size > 0 ? ", " : "",
           place_.local_size > 0 ? std::to_string(place_.local_size) + " here" : "", ") need ",
           place_.master.empty() ? "MASTER_ADDR, the host of rank 0, and " : "",
           "TANDEM_TOKEN, the same secret on all of them: TANDEM_TOKEN=$(openssl rand -hex 32)");
  if (by_file) return {rendezvous_file(place_.job, variables), "127.0.0.1", 0};
  return {"", place_.master.empty() ? "127.0.0.1" : place_.master, place_.port ? place_.port : 29500};
}

Rendezvous::Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables, bool stays_open)
    : place_(place), deadlines_(deadlines) {
  connections_.assign(std::size_t(place.rank == 0 ? place.size : 1), -1);
  if (place.size == 1) return;
  const Way way = this->way(variables);
  if (place.rank != 0) {
    join(way, [](const std::string& verdict) {
      if (verdict != "+") refused_with(verdict);
      return true;
    });
    return;
  }
  std::vector<std::string> hosts;  // the host of each rank, if the launcher names it
  if (const char* list = variables("TANDEM_HOSTS"); list && *list)
    for (const Host& h : hosts_in_list(list)) hosts.insert(hosts.end(), std::size_t(h.slots), h.name);
  const bool by_file = !way.file.empty();
  if (by_file) token_ = hex(random_bytes(32));
  const int socket = bound_socket(by_file, way.port);
  listener_ = std::make_unique<RendezvousListener>();
  if (by_file) {
    sweep(std::filesystem::path(way.file).parent_path());
    write_private(way.file, std::to_string(port_of(socket)) + " " + token_ + "\n");
    listener_->file = way.file;
    listener_->lock.take(way.file, way.file, "meets there");
  }
  listener_->listener = std::make_unique<HandshakeListener>(socket, token_);
  host(hosts);
  if (!stays_open)
    listener_.reset();
  else if (by_file)
    std::ofstream(way.file, std::ios::app) << "begun\n";
}

Rendezvous::Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables, const Return& back,
                       Membership& membership)
    : place_(place), deadlines_(deadlines) {
  if (place.rank == 0) refuse("TANDEM_INCARNATION=", back.incarnation, ": rank 0 keeps the list, and cannot come back");
  connections_.assign(1, -1);
  join(way(variables), [&](const std::string& verdict) {
    if (verdict.starts_with("-")) return false;  // not given up yet
    if (verdict == "+")
      fail("the job has only just begun, and rank ", place.rank, " was never in it: it cannot come back");
    if (!verdict.starts_with("?")) refused_with(verdict);
    // A rank that has reached rank 0 through the loopback interface is on its host, and the others reach both by the
    // same address.
    const std::string mine = interface_address(), address_of_0 = receive_frame(connections_[0], 5);
    send_frame(
        connections_[0],
        bundle({std::to_string(back.incarnation), back.terms, back.record(is_loopback(mine) ? address_of_0 : mine)}),
        5);
    const std::string answer = receive_frame(connections_[0], 5);
    if (!answer.starts_with("+")) refused_with(answer);
    membership = Membership::from(answer.substr(1));
    return true;
  });
}

Rendezvous::~Rendezvous() {
  for (int fd : connections_)
    if (fd >= 0) close(fd);
}

std::vector<int> Rendezvous::take_connections() { return std::exchange(connections_, {}); }
std::unique_ptr<RendezvousListener> Rendezvous::take_listener() { return std::move(listener_); }

// ---- rank 0 ---------------------------------------------------------------------------------------------------------
void Rendezvous::host(const std::vector<std::string>& hosts) {
  HandshakeListener& listener = *listener_->listener;
  std::vector<std::string> addresses(std::size_t(place_.size));
  int missing = place_.size - 1;
  const double until = now() + deadlines_.start;
  auto give_up = [&](const std::string& text) {
    for (int fd : connections_)
      if (fd >= 0) try {
          send_frame(fd, "!" + text, 1);
        } catch (const Error&) {  // the connection is closed, which also informs it
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
      give_up("after " + digits(deadlines_.start) + " s these ranks are missing: " + absent + " (here: " + present +
              "). TANDEM_START_TIMEOUT gives them longer");
    }
    for (std::size_t r = 1; r < addresses.size(); r++)
      if (connections_[r] >= 0 && hung_up(connections_[r]))
        give_up("rank " + std::to_string(r) + ", from " + addresses[r] + ", ended before all ranks had come");
    for (const HandshakeListener::Accepted& accepted : listener.wait(0.2)) {
      const auto rank = std::size_t(accepted.rank);
      std::string refusal;
      if (accepted.ranks != place_.size)
        refusal = "rank " + std::to_string(accepted.rank) + " was started as one of " + std::to_string(accepted.ranks) +
                  " ranks, and rank 0 as one of " + std::to_string(place_.size);
      else if (accepted.rank <= 0 || accepted.rank >= place_.size || connections_[rank] >= 0)
        refusal = "rank " + std::to_string(accepted.rank) + " has come twice, from " +
                  (accepted.rank >= 0 && accepted.rank < place_.size ? addresses[rank] + " and " : "") +
                  accepted.address;
      if (!refusal.empty()) {
        connections_.push_back(accepted.connection);  // it receives the refusal too
        give_up(refusal);
      }
      connections_[rank] = accepted.connection;
      addresses[rank] = accepted.address;
      missing--;
    }
  }
  for (std::size_t r = 1; r < connections_.size(); r++) send_frame(connections_[r], "+", 5);  // all ranks have joined
}

// ---- the other ranks ------------------------------------------------------------------------------------------------
template <class Verdict>
void Rendezvous::join(const Way& way, const Verdict& accepted) {
  const bool by_file = !way.file.empty();
  const double until = now() + deadlines_.start;
  std::string why = "nothing was tried";
  for (double pause = 0.02; now() < until;
       std::this_thread::sleep_for(std::chrono::duration<double>(pause)), pause = std::min(1.0, pause * 1.5)) {
    int port = way.port;
    if (by_file) {
      std::ifstream file(way.file);
      if (!(file >> port >> token_)) {
        why = "rank 0 has not left its port in " + way.file;
        pause = std::min(pause, 0.1);
        continue;
      }
    }
    std::string verdict;
    try {
      connections_[0] = connect_with_token(way.address, port, token_, place_.rank, place_.size, 5);
      verdict = receive_frame(connections_[0], std::max(1.0, until + 5 - now()));
    } catch (const Error& e) {
      if (connections_[0] >= 0) close(std::exchange(connections_[0], -1));
      why = std::string(e.what()) + (by_file ? "" : " (is TANDEM_TOKEN the same on all hosts?)");
      continue;
    }
    if (accepted(verdict)) return;
    close(std::exchange(connections_[0], -1));
    why = verdict.substr(1);
  }
  fail("rank ", place_.rank, " does not find rank 0: ", why);
}

std::string Rendezvous::interface_address() const {
  std::string first = "127.0.0.1";
  for (std::size_t i = connections_.size(); i-- > 0;)
    if (connections_[i] >= 0)
      if (const std::string a = address_of(connections_[i]); !is_loopback(a) || is_loopback(first)) first = a;
  return first;
}

}  // namespace tandem
