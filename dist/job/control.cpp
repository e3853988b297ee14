#include "dist/job/control.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::size_t longest_gathered = 1 << 20;

std::string name_on(int rank, const AddressRecord& record) {
  return "rank " + std::to_string(rank) + " on " + record.host;
}

// Heartbeats do not wait behind gradients: they have their own connections. Their packets have priority in this host's
// queues (priority 6 of the queueing discipline) and in routers that use DSCP (CS6). The retransmission timeout of a
// lost packet does not double, because little data is in flight.
void put_first(int fd) {
  const int tos = 0xc0, priority = 6, on = 1;
  setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
  setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &tos, sizeof tos);
  setsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority);  // after IP_TOS, which sets it too
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
}

}  // namespace

Control::Control(Rendezvous& rendezvous, const Membership& membership, const Deadlines& deadlines, Survivors survivors)
    : rank_(rendezvous.place().rank),
      membership_(membership),
      deadlines_(deadlines),
      slots_(membership.slots),
      listener_(rendezvous.take_listener()),
      find_survivors_(std::move(survivors)),
      read_at_(now()),
      gone_(slots_.size()),
      waits_(slots_.size()) {
  for (std::size_t r = 0; r < slots_.size(); r++) {
    gone_[r] = slots_[r].left;
    names_.push_back(name_on(int(r), slots_[r].record));
  }
  require(pipe2(wake_pipe_, O_CLOEXEC | O_NONBLOCK) == 0, "no more files can be opened: ", std::strerror(errno));
  for (int fd : rendezvous.take_connections()) {
    peers_.push_back({.fd = fd, .received_at = now()});
    if (fd >= 0) put_first(fd);
  }
  thread_ = std::thread([this] { run(); });
}

Control::~Control() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
    leaves_well_ = !goes_on() || std::uncaught_exceptions() == 0;
  }
  wake_thread();
  thread_.join();
  for (const Peer& p : peers_)
    if (p.fd >= 0) close(p.fd);
  close(wake_pipe_[0]);
  close(wake_pipe_[1]);
}

void Control::raise() const {
  std::lock_guard lock(mutex_);
  throw CommunicationError(culprit_, text_);
}

bool Control::paused() const { return now() - read_at_.load(std::memory_order_acquire) > deadlines_.silence / 2; }

void Control::wait_until_read() const {
  while (paused() && !failed_.load(std::memory_order_acquire)) usleep(1000);
  if (failed_.load(std::memory_order_acquire)) raise();
}

void Control::report_wait(const void* who, const WaitForEdge& edge) {
  std::lock_guard lock(mutex_);
  if (edge.waits_for >= 0)
    own_waits_[who] = edge;
  else
    own_waits_.erase(who);
}

int Control::last_in_line(int waits_for) const {
  std::lock_guard lock(mutex_);
  std::vector<WaitForEdge> all = wait_for_graph();
  all[std::size_t(rank_)] = own_waits_.empty() ? WaitForEdge{} : own_waits_.begin()->second;
  all[std::size_t(rank_)].waits_for = waits_for;
  return tandem::culprit(all, rank_);
}

bool Control::works(int rank) const {
  std::lock_guard lock(mutex_);
  return !gone(rank) && waits_[std::size_t(rank)].edge.waits_for < 0;
}

std::vector<WaitForEdge> Control::wait_for_graph() const {
  std::vector<WaitForEdge> all;
  for (const Wait& w : waits_) all.push_back(w.edge);
  for (std::size_t r = 0; r < all.size(); r++) all[r].left = gone_[r];
  return all;
}

void Control::set_wait(int rank, const Wait& wait) {
  Wait& w = waits_[std::size_t(rank)];
  const bool same = w.edge.waits_for == wait.edge.waits_for && w.edge.steps == wait.edge.steps && w.in == wait.in;
  w = {wait.edge, wait.in, same ? w.since : now()};
}

void Control::warn_of_standstill() {
  auto waits_long = [&](const Wait& w) { return w.edge.waits_for >= 0 && now() - w.since >= deadlines_.patience; };
  const auto first = std::ranges::find_if(waits_, waits_long);
  if (first == waits_.end()) {
    warned_ = false;
    return;
  }
  if (std::exchange(warned_, true)) return;
  const int cause = tandem::culprit(wait_for_graph(), int(first - waits_.begin()));
  std::string text = "warning: no progress for " + digits(deadlines_.patience) + " s: " + names_[std::size_t(cause)] +
                     " keeps the others waiting";
  for (std::size_t r = 0, shown = 0; r < waits_.size() && shown <= 8; r++) {
    const Wait& w = waits_[r];
    if (w.edge.waits_for < 0) continue;
    text +=
        shown++ == 8 ? "; …" : "; " + names_[r] + " waits for rank " + std::to_string(w.edge.waits_for) + " in " + w.in;
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Control::wake_thread() { (void)!write(wake_pipe_[1], "", 1); }

void Control::fail(int culprit, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    orders_.push_back({.type = Type::failure, .rank = culprit, .content = text});
    set_failed(culprit, text);
  }
  wake_thread();
}

void Control::accuse(int rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({.type = Type::accusation, .rank = rank, .content = why});
  }
  wake_thread();
}

void Control::failed(int culprit, const std::string& text) {
  std::lock_guard lock(mutex_);
  set_failed(culprit, text);
}

void Control::set_failed(int culprit, const std::string& text) {
  if (failed_) return;
  text_ = text;
  culprit_ = culprit;
  failed_.store(true, std::memory_order_release);
  wake_all();
}

bool Control::lost(int rank) const {
  if (changes() == 0) return false;
  std::lock_guard lock(mutex_);
  return was_lost(rank);
}
bool Control::was_lost(int rank) const {
  return std::ranges::any_of(changes_, [&](const Message& c) { return c.rank == rank && c.type == Type::lost; });
}

ControlMessage Control::change(std::size_t index) const {
  std::lock_guard lock(mutex_);
  return changes_[index];
}

void Control::changed(const Message& change) {
  std::lock_guard lock(mutex_);
  if (change.type == Type::returned) {
    names_[std::size_t(change.rank)] = name_on(change.rank, AddressRecord::from(change.content));
    gone_[std::size_t(change.rank)].store(false, std::memory_order_release);
    waits_[std::size_t(change.rank)] = {};
  }
  changes_.push_back(change);
  change_count_.store(changes_.size(), std::memory_order_release);
  wake_all();
}

void Control::wake_all() {
  for (const auto& [who, wake] : wake_) wake();
  event_.notify_all();
}

void Control::on_event(const void* who, std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  if (wake)
    wake_[who] = std::move(wake);
  else
    wake_.erase(who);
}

std::vector<std::string> Control::gather(const std::string& mine) {
  require(mine.size() <= longest_gathered, "gather: ", mine.size(), " bytes are too many");
  std::unique_lock lock(mutex_);
  const std::uint64_t number = ++gatherings_;
  auto& texts = texts_[number];
  texts.resize(names_.size());
  texts[std::size_t(rank_)] = mine;
  if (rank_ != 0) orders_.push_back({.type = Type::text, .rank = rank_, .number = number, .content = mine});
  wake_thread();
  const double until = now() + deadlines_.start;
  for (auto at = texts.begin(); (at = std::find(texts.begin(), texts.end(), std::nullopt)) != texts.end();) {
    if (failed_) throw CommunicationError(culprit_, text_);
    const int awaited = rank_ == 0 ? int(at - texts.begin()) : 0;  // the others wait for rank 0's message
    const bool left = gone(awaited) || was_lost(awaited);
    if (left || now() > until)
      throw CommunicationError(awaited, names_[std::size_t(awaited)] + (left ? " has left" : " does not come") +
                                            " while all ranks exchange their addresses");
    event_.wait_for(lock, std::chrono::milliseconds(100));
  }
  std::vector<std::string> all;
  for (auto& text : texts) all.push_back(std::move(*text));
  texts_.erase(number);
  if (rank_ == 0) orders_.push_back({.type = Type::texts, .number = number, .content = bundle(all)});
  wake_thread();
  return all;
}

std::vector<int> Control::survivors() {
  std::unique_lock lock(mutex_);
  if (failed_) event_.wait_for(lock, std::chrono::seconds(5), [&] { return !survivors_.empty(); });
  return survivors_;
}

// ---- the thread -----------------------------------------------------------------------------------------------------
void Control::run() {
  // Seconds between two heartbeats
  const double beat = std::min({1.0, deadlines_.patience / 4, deadlines_.silence / 4});
  bool agreed = false;
  looked_at_ = now();
  for (double sent_at = 0;;) {
    wait_for_events(sent_at + beat - now());
    const bool end = carry_out_orders();
    if (failed_ && !std::exchange(agreed, true)) agree_on_survivors();
    if (end) return leave();
    const double reads = now();
    for (std::size_t i = 0; i < peers_.size(); i++) receive(i);
    read_at_.store(reads, std::memory_order_release);
    if (listener_ && goes_on() && !failed_)
      for (const HandshakeListener::Accepted& accepted : listener_->listener.wait(0)) readmit(accepted);
    if (now() - sent_at >= beat) {
      sent_at = now();
      send_edges();
    }
    flush();
  }
}

void Control::wait_for_events(double seconds) {
  std::vector<pollfd> polled{{wake_pipe_[0], POLLIN, 0}};
  for (const Peer& p : peers_)
    polled.push_back({p.over ? -1 : p.fd, short(p.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
  const bool awaited = listener_ && std::ranges::any_of(slots_, [](const MemberSlot& s) { return s.lost; });
  poll(polled.data(), polled.size(), int(std::clamp(seconds * 1000, 0.0, awaited ? 50.0 : 1000.0)));
  // If this process was stopped, it received nothing meanwhile. That pause must not count as silence of the peers.
  const double pause = now() - std::exchange(looked_at_, now());
  if (goes_on() && pause > 2)
    for (Peer& p : peers_) p.received_at += pause;
  char bytes[64];
  while (polled[0].revents && read(wake_pipe_[0], bytes, sizeof bytes) > 0) {}
}

// Sends the messages that other threads have queued. True: this thread must end.
bool Control::carry_out_orders() {
  std::vector<Message> orders;
  bool end;
  {
    std::lock_guard lock(mutex_);
    orders.swap(orders_);
    end = end_;
  }
  for (const Message& m : orders)
    if (rank_ == 0 && m.type == Type::accusation)
      report(m.rank, m.content);
    else
      send_all(m);
  return end;
}

void Control::agree_on_survivors() {
  std::vector<bool> lost(gone_.size());
  for (std::size_t r = 0; r < lost.size(); r++) lost[r] = int(r) != rank_ && (int(r) == culprit_ || gone(int(r)));
  std::vector<int> found;
  if (find_survivors_) found = find_survivors_(lost);
  for (int r = 0; r < size() && !find_survivors_; r++)
    if (!lost[std::size_t(r)]) found.push_back(r);
  std::lock_guard lock(mutex_);
  survivors_ = std::move(found);
  event_.notify_all();
}

void Control::leave() {
  if (leaves_well_)
    send_all({.type = Type::goodbye, .rank = rank_});
  else
    send_all({.type = rank_ == 0 && !failed_ ? Type::failure : Type::accusation,
              .rank = rank_,
              .content = name(rank_) + " has left with an error"});
  // Waits until the kernel has taken all data; if a peer reads nothing, at most 2 seconds.
  const double until = now() + std::min(2.0, deadlines_.silence / 2);
  const auto all_taken = [&] {
    for (std::size_t i = 0; i < peers_.size(); i++)
      if (const Peer& p = peers_[i]; p.fd >= 0 && !p.over && !p.out.empty() && !is_lost(i)) return false;
    return true;
  };
  for (flush(); !all_taken() && now() < until; flush()) usleep(2000);
}

void Control::send_all(const Message& message, const Peer* except) {
  for (Peer& p : peers_)
    if (p.fd >= 0 && &p != except) p.out.put(message.text());
}
void Control::flush() {
  for (Peer& p : peers_)
    if (p.fd >= 0) p.out.flush(p.fd);
}

// A peer that has not received the last heartbeats is sent no new ones.
void Control::send_edges() {
  std::vector<std::string> all;
  {
    std::lock_guard lock(mutex_);
    Wait mine;
    if (!own_waits_.empty()) mine = {own_waits_.begin()->second, describe(own_waits_.begin()->second.in)};
    set_wait(rank_, mine);
    for (int r = 0; r < size(); r++) {
      const Wait& w = waits_[std::size_t(r)];
      const Message m{
          .type = Type::edge, .rank = r, .waits_for = w.edge.waits_for, .number = w.edge.steps, .content = w.in};
      if (rank_ == 0 || r == rank_) all.push_back(m.text());
    }
    if (rank_ == 0 && !failed_ && !goes_on()) warn_of_standstill();
  }
  for (std::size_t i = 0; i < peers_.size(); i++)
    if (Peer& p = peers_[i]; p.fd >= 0 && !p.over && p.out.empty() && !is_lost(i))
      for (const std::string& m : all) p.out.put(m);
}

// Failures are sent to all ranks; rank 0 forwards them. A rank that rank 0 gives up receives that too: its connection
// stays open, so it receives the message if it wakes up.
void Control::report(int culprit, const std::string& text) {
  if (!gives_up(culprit)) {
    failed(culprit, text);
    return send_all({.type = Type::failure, .rank = culprit, .content = text});
  }
  MemberSlot& slot = slots_[std::size_t(culprit)];
  if (slot.lost || gone(culprit) || failed_) return;
  slot.lost = true;
  const Message change{.type = Type::lost, .rank = culprit, .generation = generation() + 1, .content = text};
  send_all(change);
  changed(change);
}

void Control::receive(std::size_t peer) {
  Peer& p = peers_[peer];
  if (p.fd < 0 || p.over) return;
  const int rank = rank_ == 0 ? int(peer) : 0;
  const auto broken = [&](const char* why) {
    p.over = true;
    report(rank, name(rank) + why);
  };
  switch (p.in.receive(p.fd)) {
    case FrameReader::Got::nothing: break;
    case FrameReader::Got::bytes:
      if (!is_lost(peer)) longest_silence_ = std::max(longest_silence_.load(), now() - p.received_at);
      p.received_at = now();
      break;
    case FrameReader::Got::end: broken(" has died: its connection is closed");
  }
  if (is_lost(peer)) {  // its messages are ignored
    p.in = FrameReader(longest_frame);
    return;
  }
  try {
    while (const auto frame = p.in.next()) handle(peer, Message::from(*frame));
  } catch (const Error&) {
    broken(" sends what is no message");
  }
  if (p.over || now() - p.received_at <= deadlines_.silence) return;
  p.over = !gives_up(rank);
  report(rank, name(rank) + " has said nothing for " + digits(deadlines_.silence) + " s: it is stopped, or cut off");
}

void Control::handle(std::size_t peer, const Message& m) {
  const bool may_be_unknown = m.type == Type::failure || m.type == Type::accusation;
  require(m.rank >= (may_be_unknown ? -1 : 0) && m.rank < size(), "no rank");
  switch (m.type) {
    case Type::edge: {
      if (m.rank == rank_) return;
      std::lock_guard lock(mutex_);
      return set_wait(m.rank, {{.waits_for = m.waits_for, .steps = m.number}, m.content});
    }
    case Type::failure:
      failed(m.rank, m.content);
      if (rank_ == 0) send_all(m);
      return;
    case Type::accusation:
      if (rank_ == 0 && goes_on() && m.rank >= 0) report(m.rank > 0 ? m.rank : int(peer), m.content);
      return;
    case Type::lost:
    case Type::returned:
      if (rank_ == 0 || m.rank == 0) return;
      if (m.rank == rank_)
        return failed(rank_, name(rank_) + " was given up, and the others have gone on without it: " + m.content);
      require(m.generation == generation() + 1, "generation ", m.generation, " comes after ", generation());
      return changed(m);
    case Type::text:
    case Type::texts: {
      std::lock_guard lock(mutex_);
      auto& texts = texts_[m.number];
      texts.resize(names_.size());
      if (m.type == Type::texts) {
        const auto all = unbundle(m.content);
        require(all.size() == texts.size(), "not one text of each rank");
        texts.assign(all.begin(), all.end());
      } else {
        texts[std::size_t(m.rank)] = m.content;
      }
      return event_.notify_all();
    }
    case Type::goodbye: {
      if (m.rank == (rank_ == 0 ? int(peer) : 0)) peers_[peer].over = true;
      gone_[std::size_t(m.rank)].store(true, std::memory_order_release);
      if (rank_ == 0) send_all(m, &peers_[peer]);
      std::lock_guard lock(mutex_);
      return wake_all();
    }
    default: tandem::fail("no message");
  }
}

void Control::readmit(const HandshakeListener::Accepted& accepted) {
  if (!admit(accepted)) {
    close(accepted.connection);
    return;
  }
  const auto r = std::size_t(accepted.rank);
  const Message change{.type = Type::returned,
                       .rank = accepted.rank,
                       .number = slots_[r].incarnation,
                       .generation = generation() + 1,
                       .content = slots_[r].record.text()};
  if (peers_[r].fd >= 0) close(peers_[r].fd);
  peers_[r].fd = -1;  // send_all() skips it: its membership contains the rejoin
  send_all(change);
  put_first(accepted.connection);
  peers_[r] = {.fd = accepted.connection, .received_at = now()};
  changed(change);
}

// A process that the listener has accepted has the token. It gets its slot if the slot is free.
bool Control::admit(const HandshakeListener::Accepted& accepted) {
  const double patience = std::min(0.5, deadlines_.silence / 4);  // seconds that it may delay the heartbeats
  const std::string who = "rank " + std::to_string(accepted.rank);
  try {
    const auto refuse_with = [&](const std::string& text) {
      send_frame(accepted.connection, text, patience);
      return false;
    };
    if (accepted.ranks != size() || accepted.rank <= 0 || accepted.rank >= size())
      return refuse_with("!" + who + " of " + std::to_string(accepted.ranks) + " ranks comes to a job of " +
                         std::to_string(size()));
    MemberSlot& slot = slots_[std::size_t(accepted.rank)];
    if (gone(accepted.rank))
      return refuse_with("!" + name(accepted.rank) + " has ended well: nobody can come in its place");
    if (!slot.lost)
      return refuse_with("-" + name(accepted.rank) + " has not been given up: nobody can come in its place yet");
    std::vector<std::string> addresses;
    for (const MemberSlot& s : slots_) addresses.push_back(s.record.address);
    send_frame(accepted.connection, "?" + bundle(addresses), patience);
    const JoinRequest request = JoinRequest::from(receive_frame(accepted.connection, patience));
    if (request.incarnation == 0)
      return refuse_with("!the job has begun: TANDEM_INCARNATION=1 says that a rank comes back");
    if (request.terms != membership_.terms)
      return refuse_with("!" + who + " does not fit to the job: " + first_difference(membership_.terms, request.terms));
    const MemberSlot back{.incarnation = std::max(slot.incarnation + 1, request.incarnation), .record = request.record};
    Membership members{true, membership_.nonce, back.incarnation, generation() + 1, membership_.terms, slots_};
    members.slots[std::size_t(accepted.rank)] = back;
    for (int r = 0; r < size(); r++) members.slots[std::size_t(r)].left = gone(r);
    send_frame(accepted.connection, "+" + members.text(), patience);
    slot = back;
    return true;
  } catch (const Error&) {  // it has disconnected meanwhile, or its request is damaged
    return false;
  }
}

}  // namespace tandem
