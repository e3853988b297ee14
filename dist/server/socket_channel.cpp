#include "dist/server/socket_channel.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/collectives/node_memory.h"

namespace tandem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What goes before the bytes of a message.
struct Head {
  std::uint64_t bytes;
  Note note;
};
constexpr std::size_t staged_bytes = 16 << 10;  // read ahead: the next heads, and small messages
constexpr std::size_t turn_bytes = 8 << 20;     // of one rank, before the next one has its turn
constexpr std::size_t at_once = 16;             // messages that one call sends
constexpr int buffer_bytes = 1 << 20;           // of a socket, where we may ask; 8 MiB were a third slower

struct Outgoing {
  int to;
  Head head;
  std::span<const std::byte> bytes;
  std::size_t at = 0;  // sent, of both
  bool done = false;
  std::vector<std::byte> own = {};  // the rest of a message that was given up when a part of it had been sent
  std::size_t length() const { return sizeof head + bytes.size(); }
};

// Connections that threads beside the channel's have made, to ranks that have come back.
struct Knocks {
  struct Met {
    int rank;
    std::uint64_t incarnation;
    int connection;
  };
  std::mutex mutex;
  std::vector<Met> met;
  std::vector<std::thread> threads;
  std::vector<Change> lost;  // after which there is nobody to knock at
  std::atomic<bool> end{false};
  int bell = -1;  // an eventfd
  ~Knocks() {
    for (Met& m : met) close(m.connection);
    close(bell);
  }
  void ring() const {
    const std::uint64_t one = 1;
    (void)!write(bell, &one, sizeof one);
  }
};

// After the handshake: who is connected here, in which job.
std::string introduction(const Control& control, int to, std::uint64_t to_incarnation) {
  return bundle({std::to_string(control.job().nonce), std::to_string(control.rank()),
                 std::to_string(control.job().incarnation), std::to_string(to), std::to_string(to_incarnation)});
}

int knock_at(const Control& control, const std::string& token, int rank, const Seat& seat, double seconds) {
  const Card card = Card::from(seat.card);
  const int fd = knock(card.address, card.port, token, control.rank(), control.size(), seconds);
  try {
    send_frame(fd, introduction(control, rank, seat.incarnation), 5);
    require(receive_frame(fd, 5) == "+", "another process listens there");
  } catch (const Error&) {
    close(fd);
    throw;
  }
  return fd;
}

class SocketChannel : public Channel {
 public:
  SocketChannel(std::shared_ptr<Control> control, std::unique_ptr<Gate> gate, std::string token)
      : control_(std::move(control)),
        token_(std::move(token)),
        rank_(control_->rank()),
        memory_(words(rank_, control_->job().incarnation)),
        knocks_(std::make_shared<Knocks>()),
        peers_(std::size_t(control_->size())) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    knocks_->bell = bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    require(epoll_ >= 0 && bell_ >= 0, "no more files can be opened: ", std::strerror(errno));
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u32 = UINT32_MAX;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, bell_, &e);
    for (std::size_t r = 0; r < peers_.size(); r++) {
      const Seat& seat = control_->job().seats[r];
      peers_[r].lost = seat.lost, peers_[r].incarnation = seat.incarnation, peers_[r].card = Card::from(seat.card);
    }
    control_->on_failure([knocks = knocks_] { knocks->ring(); });
    control_->on_change([knocks = knocks_, weak = std::weak_ptr<Control>(control_), token = token_](const Change& c) {
      {
        std::lock_guard lock(knocks->mutex);
        if (c.incarnation && !knocks->end)
          knocks->threads.emplace_back([knocks, weak, token, c] { meet(*knocks, weak, token, c); });
        if (!c.incarnation) knocks->lost.push_back(c);
      }
      knocks->ring();
    });
    try {
      meet_all(*gate);
    } catch (...) {
      stop_knocking();
      for (Peer& p : peers_)
        if (p.fd >= 0) close(p.fd);
      close(epoll_);
      throw;
    }
  }
  ~SocketChannel() override {
    if (std::uncaught_exceptions() == 0 && !failed()) drain();
    stop_knocking();
    for (Peer& p : peers_)
      if (p.fd >= 0) close(p.fd);
    close(epoll_);
  }

  int rank() const override { return rank_; }
  int size() const override { return int(peers_.size()); }
  std::string where(int rank) const override { return control_->name(rank); }
  std::uint64_t incarnation() const override { return control_->job().incarnation; }
  std::uint64_t generation() const override { return control_->job().generation + heard_; }
  std::vector<bool> living() const override {
    std::vector<bool> all;
    for (const Peer& p : peers_) all.push_back(!p.lost);
    return all;
  }
  void on_message(Receiver receiver) override {
    receiver_ = std::move(receiver);
    for (Peer& p : peers_) watch(p, EPOLL_CTL_MOD);
  }

  Work send(int to, const Note& note, std::span<const std::byte> bytes) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    control_->check();
    Peer& p = peers_[std::size_t(to)];
    if (p.lost) return {};
    auto message = std::make_shared<Outgoing>(Outgoing{to, {bytes.size(), note}, bytes});
    p.out.push_back(message);
    if (to != rank_ && !p.writing) flush(p);
    if (message->done) return {};
    return Work(std::make_unique<Sending>(*this, message));
  }

  bool progress() override {
    control_->check();
    bool any = receiver_.place && hear();
    any = deliver_own() || any;
    epoll_event events[64];
    const int n = epoll_wait(epoll_, events, 64, 0);
    for (int i = 0; i < n; i++) {
      if (events[i].data.u32 == UINT32_MAX) {
        std::uint64_t count;
        (void)!read(bell_, &count, sizeof count);
        continue;
      }
      Peer& p = peers_[events[i].data.u32];
      if (events[i].events & EPOLLOUT) flush(p);
      if ((events[i].events & ~unsigned(EPOLLOUT)) && receiver_.place)
        any = receive(p, int(events[i].data.u32)) || any;
    }
    if (broken_ > 0) wait_for_verdicts();
    return any;
  }
  void rest() override {
    if (!peers_[std::size_t(rank_)].out.empty() && receiver_.place) return;
    pollfd p{epoll_, POLLIN, 0};
    poll(&p, 1, 5);
  }
  void wake() override { knocks_->ring(); }

  std::shared_ptr<void> share(std::size_t bytes) override { return memory_.share(bytes); }
  std::span<std::byte> shared_by(int rank, int number) override {
    require(rank >= 0 && rank < size(), "shared_by: there is no rank ", rank, " of ", size());
    const Peer& p = peers_[std::size_t(rank)];
    if (p.card.identity != peers_[std::size_t(rank_)].card.identity) return {};
    return memory_.of(p.card.process, words(rank, p.incarnation), number);
  }
  void fail(int culprit, const std::string& text) override { control_->fail(culprit, text); }

 private:
  struct Peer {
    int fd = -1;
    bool lost = false, writing = false;  // writing: the socket was full, and tells when it is not
    std::uint64_t incarnation = 0;
    Card card = {};
    double broken = 0;  // since when the connection is, and why; rank 0 decides what that means
    std::string why = {};
    bool accused = false;
    std::deque<std::shared_ptr<Outgoing>> out = {};
    // What is coming in.
    Head head = {};
    std::size_t head_got = 0, got = 0;
    bool in_bytes = false;
    std::span<std::byte> room = {};
    std::unique_ptr<std::byte[]> staged = {};
    std::size_t staged_begin = 0, staged_end = 0;
  };

  struct Sending : Work::Operation {
    Sending(SocketChannel& channel, std::shared_ptr<Outgoing> message)
        : channel(channel), message(std::move(message)) {}
    ~Sending() override { channel.give_up(message); }
    bool advance() override {
      if (!message->done) channel.progress();
      if (message->done) return true;
      const Peer& p = channel.peers_[std::size_t(message->to)];
      if (p.fd < 0 && channel.control_->gone(message->to))
        throw CommunicationError(message->to, channel.where(channel.rank_) + " sends a message to " +
                                                  channel.where(message->to) + ", which has left");
      return false;
    }
    void wait() override {
      const double until = now() + channel.control_->deadline();
      while (!advance()) {
        if (now() > until)
          throw CommunicationError(message->to, channel.where(message->to) + " does not take a message of " +
                                                    channel.where(channel.rank_));
        channel.rest();
      }
    }
    SocketChannel& channel;
    std::shared_ptr<Outgoing> message;
  };

  std::string words(int rank, std::uint64_t incarnation) const {
    return hex(std::string(reinterpret_cast<const char*>(&control_->job().nonce), 8)) + "-" + std::to_string(rank) +
           "-" + std::to_string(incarnation);
  }
  bool failed() const {
    try {
      control_->check();
      return false;
    } catch (const CommunicationError&) {
      return true;
    }
  }

  // ---- connections ------------------------------------------------------------------------------------------------------
  // In the beginning, of two ranks the one with the larger number knocks; at one that has come back, all others do.
  void meet_all(Gate& gate) {
    const Control::Job& job = control_->job();
    std::vector<bool> awaited(peers_.size(), false);
    std::vector<std::thread> knocking;
    std::mutex mutex;
    std::vector<std::string> why(peers_.size(), "it has not come");
    std::vector<int> found(peers_.size(), -1);
    std::atomic<int> waiting{0};
    std::atomic<bool> over{false};
    const double until = now() + control_->deadlines().start;
    for (std::size_t r = 0; r < peers_.size(); r++) awaited[r] = int(r) != rank_ && !peers_[r].lost;
    for (std::size_t r = 0; r < peers_.size(); r++)
      if (job.seats[r].left) peers_[r].broken = now(), broken_++;
    if (job.incarnation == 0)
      for (int r = 0; r < rank_; r++) {
        waiting++;
        knocking.emplace_back([&, r] {
          while (!over && now() < until) try {
              const int fd = knock_at(*control_, token_, r, job.seats[std::size_t(r)], 2);
              std::lock_guard lock(mutex);
              found[std::size_t(r)] = fd;
              break;
            } catch (const Error& e) {
              {
                std::lock_guard lock(mutex);
                why[std::size_t(r)] = e.what();
              }
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
          waiting--;
        });
      }
    std::string missing;
    try {
      for (;;) {
        {
          std::lock_guard lock(mutex);
          for (std::size_t r = 0; r < found.size(); r++)
            if (const int fd = std::exchange(found[r], -1); fd >= 0) take(int(r), fd), awaited[r] = false;
        }
        for (std::size_t i = 0; i < control_->changes(); i++) awaited[std::size_t(control_->change(i).rank)] = false;
        for (std::size_t r = 0; r < awaited.size(); r++) awaited[r] = awaited[r] && !control_->gone(int(r));
        if (std::none_of(awaited.begin(), awaited.end(), [](bool a) { return a; })) break;
        control_->check();
        if (now() > until) {
          std::lock_guard lock(mutex);
          for (std::size_t r = 0; r < awaited.size(); r++)
            if (awaited[r]) missing += (missing.empty() ? "" : "; ") + where(int(r)) + ": " + why[r];
          break;
        }
        for (const Gate::Guest& guest : gate.wait(waiting ? 0.005 : 0.02)) {
          if (!introduced(guest) || !awaited[std::size_t(guest.rank)]) {
            close(guest.connection);
            continue;
          }
          take(guest.rank, guest.connection);
          awaited[std::size_t(guest.rank)] = false;
        }
      }
    } catch (...) {
      over = true;
      for (auto& t : knocking) t.join();
      for (int fd : found)
        if (fd >= 0) close(fd);
      throw;
    }
    over = true;
    for (auto& t : knocking) t.join();
    for (int fd : found)
      if (fd >= 0) close(fd);
    if (!missing.empty()) tandem::fail(where(rank_), " is not connected to all others: ", missing);
  }
  bool introduced(const Gate::Guest& guest) const {
    const Control::Job& job = control_->job();
    try {
      if (guest.rank < 0 || guest.rank >= size()) return false;
      const auto said = unbundle(receive_frame(guest.connection, 1));
      if (said.size() != 5 || said[0] != std::to_string(job.nonce) || said[1] != std::to_string(guest.rank) ||
          said[2] != std::to_string(peers_[std::size_t(guest.rank)].incarnation) ||
          said[3] != std::to_string(rank_) || said[4] != std::to_string(job.incarnation))
        return false;
      send_frame(guest.connection, "+", 1);
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  // In a thread: to one that has come back.
  static void meet(Knocks& knocks, const std::weak_ptr<Control>& weak, const std::string& token, const Change& change) {
    std::string why;
    const auto begin = now();
    for (double silence = 1; now() - begin < silence && !knocks.end;) {
      const auto control = weak.lock();
      if (!control) return;
      silence = control->deadlines().silence;
      {
        std::lock_guard lock(knocks.mutex);
        for (const Change& lost : knocks.lost)
          if (lost.rank == change.rank && lost_after(*control, change)) return;
      }
      try {
        const int fd = knock_at(*control, token, change.rank, {.incarnation = change.incarnation, .card = change.text}, 2);
        std::lock_guard lock(knocks.mutex);
        knocks.met.push_back({change.rank, change.incarnation, fd});
        knocks.ring();
        return;
      } catch (const Error& e) {
        why = e.what();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    if (const auto control = weak.lock(); control && !knocks.end)
      control->accuse(change.rank, control->name(control->rank()) + " does not reach " + control->name(change.rank) +
                                       ", which has come back: " + why);
  }
  static bool lost_after(const Control& control, const Change& back) {
    bool seen = false;
    for (std::size_t i = 0; i < control.changes(); i++) {
      const Change c = control.change(i);
      if (c.rank != back.rank) continue;
      if (c.incarnation == back.incarnation) seen = true;
      if (seen && c.incarnation == 0) return true;
    }
    return false;
  }
  void stop_knocking() {
    control_->on_change(nullptr);
    control_->on_failure(nullptr);
    std::vector<std::thread> threads;
    {
      std::lock_guard lock(knocks_->mutex);
      knocks_->end = true;
      threads.swap(knocks_->threads);
    }
    for (auto& t : threads) t.join();
  }

  void take(int rank, int fd) {
    Peer& p = peers_[std::size_t(rank)];
    // Without the privilege the kernel makes the buffers as large as they need to be, up to limits of its own.
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &buffer_bytes, sizeof buffer_bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &buffer_bytes, sizeof buffer_bytes);
    p.fd = fd;
    p.staged = std::make_unique<std::byte[]>(staged_bytes);
    watch(p, EPOLL_CTL_ADD);
    flush(p);
  }
  void watch(Peer& p, int operation) {
    if (p.fd < 0) return;
    epoll_event e{};
    e.events = (receiver_.place ? unsigned(EPOLLIN) : 0u) | (p.writing ? unsigned(EPOLLOUT) : 0u);
    e.data.u32 = std::uint32_t(&p - peers_.data());
    epoll_ctl(epoll_, operation, p.fd, &e);
  }
  void hang_up(Peer& p, const std::string& why) {
    if (p.fd < 0) return;
    close(std::exchange(p.fd, -1));
    p.writing = false;
    p.broken = now(), p.why = why;
    broken_++;
  }

  // ---- losses and returns -----------------------------------------------------------------------------------------------
  bool hear() {
    bool any = false;
    for (; heard_ < control_->changes(); any = true) {
      const Change change = control_->change(heard_++);
      Peer& p = peers_[std::size_t(change.rank)];
      if (p.fd >= 0) close(p.fd);
      broken_ -= p.broken != 0;
      for (auto& message : p.out) message->done = true;
      // Its card stays: memory that it shared may outlive it.
      p = {.lost = change.incarnation == 0, .incarnation = p.incarnation, .card = p.card};
      if (change.incarnation == 0) {
        if (!receiver_.lost) control_->fail(change.rank, change.text), control_->check();
        receiver_.lost(change.rank, change.text);
      } else {
        p.incarnation = change.incarnation;
        p.card = Card::from(change.text);
        meet_again();
        if (receiver_.returned) receiver_.returned(change.rank, change.incarnation);
      }
    }
    if (!any) meet_again();
    return any;
  }
  // Takes the connections that were made to ranks as this one knows them.
  void meet_again() {
    std::lock_guard lock(knocks_->mutex);
    std::erase_if(knocks_->met, [&](const Knocks::Met& m) {
      Peer& p = peers_[std::size_t(m.rank)];
      if (p.lost || p.incarnation != m.incarnation || p.fd >= 0) return false;
      take(m.rank, m.connection);
      return true;
    });
  }
  // A broken connection alone says nothing: rank 0 does, when it has seen the same. Where it has not, it is asked to.
  void wait_for_verdicts() {
    for (std::size_t r = 0; r < peers_.size(); r++) {
      Peer& p = peers_[r];
      if (p.broken == 0 || p.lost || p.accused || control_->gone(int(r))) continue;
      if (now() - p.broken < control_->deadlines().silence + 2) continue;
      p.accused = true;
      const std::string text = where(rank_) + " has lost the connection to " + where(int(r)) + ": " + p.why;
      if (rank_ != 0 && control_->gone(0)) throw CommunicationError(int(r), text);
      control_->accuse(int(r), text);
    }
  }

  // ---- going out --------------------------------------------------------------------------------------------------------
  void flush(Peer& p) {
    while (p.fd >= 0 && !p.out.empty()) {
      iovec parts[2 * at_once];
      std::size_t count = 0;
      for (std::size_t i = 0; i < std::min(p.out.size(), at_once); i++) {
        const Outgoing& m = *p.out[i];
        if (m.at < sizeof m.head)
          parts[count++] = {const_cast<char*>(reinterpret_cast<const char*>(&m.head)) + m.at, sizeof m.head - m.at};
        const std::size_t at = m.at > sizeof m.head ? m.at - sizeof m.head : 0;
        if (at < m.bytes.size())
          parts[count++] = {const_cast<std::byte*>(m.bytes.data()) + at, m.bytes.size() - at};
      }
      msghdr h{};
      h.msg_iov = parts, h.msg_iovlen = count;
      const ssize_t sent = sendmsg(p.fd, &h, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
        if (p.writing) p.writing = false, watch(p, EPOLL_CTL_MOD);
        return;  // reading will say that the connection is lost, when all that came before has been read
      }
      for (std::size_t left = sent > 0 ? std::size_t(sent) : 0; left > 0;) {
        Outgoing& m = *p.out.front();
        const std::size_t part = std::min(left, m.length() - m.at);
        m.at += part, left -= part;
        if (m.at < m.length()) break;
        m.done = true;
        p.out.pop_front();
      }
      if (sent < 0) break;
    }
    const bool full = p.fd >= 0 && !p.out.empty();
    if (p.fd >= 0 && full != p.writing) p.writing = full, watch(p, EPOLL_CTL_MOD);
  }
  // Nobody may read a message's memory any more.
  void give_up(const std::shared_ptr<Outgoing>& message) {
    if (message->done) return;
    Peer& p = peers_[std::size_t(message->to)];
    auto at = std::find(p.out.begin(), p.out.end(), message);
    if (at == p.out.end()) return;
    if (message->at == 0) {
      p.out.erase(at);
      return;
    }
    message->own.assign(message->bytes.begin(), message->bytes.end());
    message->bytes = message->own;
  }
  bool deliver_own() {
    auto& own = peers_[std::size_t(rank_)].out;
    if (!receiver_.place) return false;
    bool any = false;
    for (std::size_t n = own.size(); n > 0 && !own.empty(); n--, any = true) {
      const auto message = own.front();
      own.pop_front();
      const std::span<std::byte> room = receiver_.place(rank_, message->head.note, message->bytes.size());
      if (room.size() != message->bytes.size()) refuse_room(rank_, message->bytes.size(), room.size());
      if (!room.empty()) std::memcpy(room.data(), message->bytes.data(), room.size());
      message->done = true;
      receiver_.arrived(rank_, message->head.note, room);
    }
    return any;
  }

  // ---- coming in --------------------------------------------------------------------------------------------------------
  bool receive(Peer& p, int from) {
    bool any = false;
    for (std::size_t turn = 0; p.fd >= 0 && turn < turn_bytes;) {
      iovec parts[2];
      std::size_t count = 0, most = staged_bytes;
      if (p.in_bytes) {
        parts[count++] = {p.room.data() + p.got, p.room.size() - p.got};
        most += p.room.size() - p.got;
      }
      parts[count++] = {p.staged.get(), staged_bytes};
      msghdr h{};
      h.msg_iov = parts, h.msg_iovlen = count;
      const ssize_t got = recvmsg(p.fd, &h, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (got <= 0) {
        hang_up(p, got == 0 ? "the other side has closed it" : std::strerror(errno));
        break;
      }
      turn += std::size_t(got);
      std::size_t rest = std::size_t(got);
      if (p.in_bytes) {
        const std::size_t part = std::min(rest, p.room.size() - p.got);
        p.got += part, rest -= part;
      }
      p.staged_begin = 0, p.staged_end = rest;
      any = take_apart(p, from) || any;
      if (std::size_t(got) < most) break;  // there is no more, or not yet
    }
    return any;
  }
  // Delivers what is whole.
  bool take_apart(Peer& p, int from) {
    bool any = false;
    for (;;) {
      auto staged = [&] { return p.staged_end - p.staged_begin; };
      if (!p.in_bytes) {
        const std::size_t part = std::min(staged(), sizeof p.head - p.head_got);
        std::memcpy(reinterpret_cast<char*>(&p.head) + p.head_got, p.staged.get() + p.staged_begin, part);
        p.head_got += part, p.staged_begin += part;
        if (p.head_got < sizeof p.head) return any;
        p.head_got = 0;
        p.room = receiver_.place(from, p.head.note, p.head.bytes);
        if (p.room.size() != p.head.bytes) refuse_room(from, p.head.bytes, p.room.size());
        p.in_bytes = true, p.got = 0;
      }
      if (const std::size_t part = std::min(staged(), p.room.size() - p.got); part > 0) {
        std::memcpy(p.room.data() + p.got, p.staged.get() + p.staged_begin, part);
        p.got += part, p.staged_begin += part;
      }
      if (p.got < p.room.size()) return any;
      p.in_bytes = false;
      receiver_.arrived(from, p.head.note, p.room);
      any = true;
    }
  }
  [[noreturn]] void refuse_room(int from, std::size_t bytes, std::size_t room) {
    const std::string text = where(from) + " sends " + std::to_string(bytes) + " bytes where " + where(rank_) +
                             " has room for " + std::to_string(room);
    control_->fail(from, text);
    throw CommunicationError(from, text);
  }

  // ---- the end ----------------------------------------------------------------------------------------------------------
  // What was sent is in the kernel's hands; it throws it away if we close the connection while something unread is there. So
  // we read, until the other side's kernel has all.
  void drain() {
    const double until = now() + control_->deadlines().silence;
    for (Peer& p : peers_)
      if (p.fd >= 0) flush(p), shutdown(p.fd, SHUT_WR);
    std::vector<std::byte> waste(1 << 16);
    for (;;) {
      bool waits = false;
      const std::size_t changes = control_->changes();
      for (; heard_ < changes; heard_++) {
        Peer& p = peers_[std::size_t(control_->change(heard_).rank)];
        if (p.fd >= 0) close(std::exchange(p.fd, -1));
      }
      for (Peer& p : peers_) {
        if (p.fd < 0) continue;
        ssize_t got;
        while ((got = recv(p.fd, waste.data(), waste.size(), MSG_DONTWAIT)) > 0) {}
        int unsent = 0;
        const bool whole = ioctl(p.fd, SIOCOUTQ, &unsent) != 0 || unsent == 0;
        const bool over = got == 0 || (errno != EAGAIN && errno != EINTR);
        waits = waits || (!whole && !over);
      }
      if (!waits || now() > until || failed()) return;
      usleep(500);
    }
  }

  std::shared_ptr<Control> control_;
  std::string token_;
  int rank_;
  NodeMemory memory_;
  std::shared_ptr<Knocks> knocks_;
  std::vector<Peer> peers_;
  int epoll_ = -1, bell_ = -1;  // the bell is the knocks'
  Receiver receiver_;
  std::size_t heard_ = 0;  // changes
  int broken_ = 0;         // connections
};

}  // namespace

std::unique_ptr<Channel> socket_channel(std::shared_ptr<Control> control, std::unique_ptr<Gate> gate,
                                        const std::string& token) {
  return std::make_unique<SocketChannel>(std::move(control), std::move(gate), token);
}

}  // namespace tandem
