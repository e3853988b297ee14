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
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

// The content of a frame: this struct and a text. The text is the operation in which a rank waits, the reason why the
// job has failed, or an address record.
struct Said {
  std::int32_t rank;  // of the edge; the culprit; the rank that leaves, is lost or has rejoined
  std::int32_t waits_for = -1;
  std::uint64_t number = 0;      // edge: its steps; returned: the incarnation; text, texts: the gathering
  std::uint64_t generation = 0;  // of the membership after that loss or rejoin
};
namespace type {
enum : std::uint32_t { edge = 1, failure, goodbye, accusation, lost, returned, text, texts };
}
constexpr std::size_t longest_text = 16384, longest_gathered = 1 << 20;

std::string whole(const Said& said, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&said), sizeof said) + text;
}
std::string packed(const Said& said, const std::string& text = {}) { return whole(said, text.substr(0, longest_text)); }

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

Control::Control(Rendezvous& rendezvous, const Deadlines& deadlines) : Control(rendezvous, Membership{}, deadlines) {}

Control::Control(Rendezvous& rendezvous, Membership membership, const Deadlines& deadlines)
    : rank_(rendezvous.place().rank),
      deadlines_(deadlines),
      told_(std::size_t(rendezvous.place().size)),
      gone_(std::size_t(rendezvous.place().size)),
      listener_(rendezvous.take_listener()) {
  for (std::size_t r = 0; r < gone_.size(); r++) names_.push_back("rank " + std::to_string(r));
  apply(std::move(membership));
  require(pipe2(wake_pipe_, O_CLOEXEC | O_NONBLOCK) == 0, "no more files can be opened: ", std::strerror(errno));
  for (int fd : rendezvous.take_connections()) {
    peers_.push_back({.fd = fd, .heard = now()});
    if (fd >= 0) put_first(fd);
  }
  read_ = now();
  thread_ = std::thread([this] { run(); });
}

void Control::begin(Membership membership, std::unique_ptr<SurvivorAgreement> survivor_agreement) {
  std::lock_guard lock(mutex_);
  survivor_agreement_ = std::move(survivor_agreement);
  apply(std::move(membership));
}

// From now on, losses are handled as the membership requires.
void Control::apply(Membership membership) {
  for (std::size_t r = 0; r < membership.slots.size(); r++) {
    const MemberSlot& s = membership.slots[r];
    if (s.left) gone_[r] = true;
    names_[r] = "rank " + std::to_string(r) + " on " + AddressRecord::from(s.record).host;
  }
  slots_ = membership.slots;
  const bool goes_on = membership.goes_on;
  membership_ = std::move(membership);
  goes_on_ = goes_on;
}

Control::~Control() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
    leaves_well_ = !goes_on_ || std::uncaught_exceptions() == 0;
  }
  (void)!write(wake_pipe_[1], "", 1);
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

bool Control::paused() const { return now() - read_.load(std::memory_order_acquire) > deadlines_.silence / 2; }

void Control::wait_until_read() const {
  while (paused() && !failed_.load(std::memory_order_acquire)) usleep(1000);
  if (failed_.load(std::memory_order_acquire)) raise();
}

void Control::report_wait(const void* who, const WaitForEdge& edge) {
  std::lock_guard lock(mutex_);
  if (edge.waits_for >= 0)
    mine_[who] = edge;
  else
    mine_.erase(who);
}

int Control::last_in_line(int waits_for) const {
  std::lock_guard lock(mutex_);
  std::vector<WaitForEdge> all = wait_for_graph();
  all[std::size_t(rank_)] = mine_.empty() ? WaitForEdge{} : mine_.begin()->second;
  all[std::size_t(rank_)].waits_for = waits_for;
  return tandem::culprit(all, rank_);
}

bool Control::works(int rank) const {
  std::lock_guard lock(mutex_);
  return !gone(rank) && told_[std::size_t(rank)].edge.waits_for < 0;
}

std::vector<WaitForEdge> Control::wait_for_graph() const {
  std::vector<WaitForEdge> all;
  for (const Told& t : told_) all.push_back(t.edge);
  for (std::size_t r = 0; r < all.size(); r++) all[r].left = gone_[r];
  return all;
}

void Control::take(int rank, const WaitForEdge& edge, const std::string& in) {
  Told& t = told_[std::size_t(rank)];
  if (t.edge.waits_for != edge.waits_for || t.edge.steps != edge.steps || t.in != in) t.since = now();
  t.edge = edge;
  t.in = in;
}

void Control::warn_of_standstill() {
  auto waits = [&](const Told& t) { return t.edge.waits_for >= 0 && now() - t.since >= deadlines_.patience; };
  const auto first = std::find_if(told_.begin(), told_.end(), waits);
  if (first == told_.end()) {
    warned_ = false;
    return;
  }
  if (std::exchange(warned_, true)) return;
  const int blamed = tandem::culprit(wait_for_graph(), int(first - told_.begin()));
  std::string text = "warning: no progress for " + digits(deadlines_.patience) + " s: " + names_[std::size_t(blamed)] +
                     " keeps the others waiting";
  for (int r = 0, shown = 0; r < size(); r++) {
    const Told& t = told_[std::size_t(r)];
    if (t.edge.waits_for < 0) continue;
    if (shown++ == 8) {
      text += "; …";
      break;
    }
    text += "; " + names_[std::size_t(r)] + " waits for rank " + std::to_string(t.edge.waits_for) + " in " + t.in;
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Control::fail(int culprit, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (failed_ || fails_) return;
    fails_ = true;
    outgoing_.push_back({type::failure, packed({culprit}, text)});
  }
  failed(culprit, text);
  (void)!write(wake_pipe_[1], "", 1);
}

void Control::failed(int culprit, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  text_ = text;
  culprit_ = culprit;
  failed_.store(true, std::memory_order_release);
  wake_all();
}

bool Control::lost(int rank) const {
  if (changes() == 0) return false;
  std::lock_guard lock(mutex_);
  return std::any_of(changes_.begin(), changes_.end(),
                     [&](const Change& c) { return c.rank == rank && c.incarnation == 0; });
}

Change Control::change(std::size_t index) const {
  std::lock_guard lock(mutex_);
  return changes_[index];
}

void Control::accuse(int rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (rank_ == 0)
      accused_.push_back({rank, why});
    else
      outgoing_.push_back({type::accusation, packed({rank}, why)});
  }
  (void)!write(wake_pipe_[1], "", 1);
}

void Control::changed(const Change& change) {
  std::lock_guard lock(mutex_);
  if (change.incarnation) {
    names_[std::size_t(change.rank)] =
        "rank " + std::to_string(change.rank) + " on " + AddressRecord::from(change.text).host;
    gone_[std::size_t(change.rank)].store(false, std::memory_order_release);
    told_[std::size_t(change.rank)] = {};
  }
  changes_.push_back(change);
  change_count_.store(changes_.size(), std::memory_order_release);
  wake_all();
}

void Control::wake_all() {
  for (const auto& [who, wake] : wake_) wake();
  gathered_.notify_all();
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
  if (rank_ != 0) outgoing_.push_back({type::text, whole({.rank = rank_, .number = number}, mine)});
  (void)!write(wake_pipe_[1], "", 1);
  const double until = now() + deadlines_.start;
  for (auto at = texts.begin(); (at = std::find(texts.begin(), texts.end(), std::nullopt)) != texts.end();) {
    if (failed_) throw CommunicationError(culprit_, text_);
    const int awaited = rank_ == 0 ? int(at - texts.begin()) : 0;  // the others wait for rank 0's message
    const auto lost = [&](const Change& c) { return c.rank == awaited && c.incarnation == 0; };
    const bool left = gone(awaited) || std::any_of(changes_.begin(), changes_.end(), lost);
    if (left || now() > until)
      throw CommunicationError(awaited, names_[std::size_t(awaited)] + (left ? " has left" : " does not come") +
                                            " while all ranks tell each other where they are");
    gathered_.wait_for(lock, std::chrono::milliseconds(100));
  }
  std::vector<std::string> all;
  for (auto& text : texts) all.push_back(std::move(*text));
  texts_.erase(number);
  if (rank_ == 0) outgoing_.push_back({type::texts, whole({.rank = 0, .number = number}, bundle(all))});
  (void)!write(wake_pipe_[1], "", 1);
  return all;
}

std::vector<int> Control::survivors() {
  std::unique_lock lock(mutex_);
  if (failed_ || fails_) called_.wait_for(lock, std::chrono::seconds(5), [&] { return !survivors_.empty(); });
  return survivors_;
}

void Control::call_roll() {
  std::vector<bool> lost(names_.size());
  for (std::size_t r = 0; r < lost.size(); r++) lost[r] = int(r) != rank_ && (int(r) == culprit_ || gone(int(r)));
  std::vector<int> found;
  if (survivor_agreement_) found = survivor_agreement_->answer(lost);
  for (int r = 0; r < size() && !survivor_agreement_; r++)
    if (!lost[std::size_t(r)]) found.push_back(r);
  std::lock_guard lock(mutex_);
  survivors_ = std::move(found);
  called_.notify_all();
}

// ---- the thread -----------------------------------------------------------------------------------------------------
void Control::run() {
  // Seconds between two heartbeats
  const double beat = std::min({1.0, deadlines_.patience / 4, deadlines_.silence / 4});
  bool called = false;
  looked_ = now();
  for (double told = 0;;) {
    wait_for_events(told + beat - now());
    const bool end = carry_out_orders();
    if (failed_ && !std::exchange(called, true)) call_roll();
    if (end) return leave();
    const double reads = now();
    for (std::size_t i = 0; i < peers_.size(); i++) hear(i);
    read_.store(reads, std::memory_order_release);
    if (listener_ && goes_on_ && !failed_)
      for (const HandshakeListener::Accepted& accepted : listener_->listener->wait(0)) take_back(accepted);
    if (now() - told >= beat) told = now(), tell_edges();
    flush();
  }
}

void Control::wait_for_events(double seconds) {
  std::vector<pollfd> polled{{wake_pipe_[0], POLLIN, 0}};
  for (const Peer& p : peers_)
    polled.push_back({p.over ? -1 : p.fd, short(p.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
  const bool awaited =
      listener_ && std::any_of(slots_.begin(), slots_.end(), [](const MemberSlot& s) { return s.lost; });
  poll(polled.data(), polled.size(), int(std::clamp(seconds * 1000, 0.0, awaited ? 50.0 : 1000.0)));
  // If this process was stopped, it received nothing meanwhile. That pause must not count as silence of the peers.
  const double pause = now() - std::exchange(looked_, now());
  if (goes_on_ && pause > 2)
    for (Peer& p : peers_) p.heard += pause;
  char bytes[64];
  while (polled[0].revents && read(wake_pipe_[0], bytes, sizeof bytes) > 0) {}
}

// Carries out the requests of the other threads. True: this thread must end.
bool Control::carry_out_orders() {
  std::vector<Frame> outgoing;
  std::vector<std::pair<int, std::string>> accused;
  bool end;
  {
    std::lock_guard lock(mutex_);
    outgoing.swap(outgoing_), accused.swap(accused_);
    end = end_;
  }
  for (const Frame& f : outgoing) tell_all(f.type, f.bytes);
  for (const auto& [rank, why] : accused) report(rank, why);
  return end;
}

void Control::leave() {
  if (leaves_well_)
    tell_all(type::goodbye, packed({rank_}));
  else
    tell_all(rank_ == 0 && !failed_ ? type::failure : type::accusation,
             packed({rank_}, name(rank_) + " has left with an error"));
  // Waits until the kernel has taken all data; if a peer reads nothing, at most 2 seconds.
  const double until = now() + std::min(2.0, deadlines_.silence / 2);
  const auto waits = [&](const Peer& p) { return p.fd >= 0 && !p.over && !p.out.empty() && !is_lost(p); };
  for (flush(); std::any_of(peers_.begin(), peers_.end(), waits) && now() < until; flush()) usleep(2000);
}

void Control::tell_all(std::uint32_t type, const std::string& bytes, const Peer* but) {
  for (Peer& p : peers_)
    if (p.fd >= 0 && &p != but) p.out.put(type, bytes);
}
void Control::flush() {
  for (Peer& p : peers_)
    if (p.fd >= 0) p.out.flush(p.fd);
}

// A peer that has not received the last heartbeats is sent no new ones.
void Control::tell_edges() {
  std::vector<std::string> all;
  {
    std::lock_guard lock(mutex_);
    if (mine_.empty())
      take(rank_, {}, "");
    else
      take(rank_, mine_.begin()->second, describe(mine_.begin()->second.in));
    for (int r = 0; r < size(); r++) {
      const Told& t = told_[std::size_t(r)];
      if (rank_ == 0 || r == rank_) all.push_back(packed({r, t.edge.waits_for, t.edge.steps}, t.in));
    }
    if (rank_ == 0 && !failed_ && !goes_on_) warn_of_standstill();
  }
  for (Peer& p : peers_)
    if (p.fd >= 0 && !p.over && p.out.empty() && !is_lost(p))
      for (const std::string& one : all) p.out.put(type::edge, one);
}

// Failures are sent to all ranks; rank 0 forwards them.
void Control::report(int culprit, const std::string& text) {
  if (gives_up(culprit)) return lose(culprit, text);
  failed(culprit, text);
  tell_all(type::failure, packed({culprit}, text));
}
// At rank 0. The lost rank is informed too: its connection stays open, so it receives the message if it wakes up.
void Control::lose(int rank, const std::string& why) {
  MemberSlot& slot = slots_[std::size_t(rank)];
  if (slot.lost || gone(rank) || failed_) return;
  slot.lost = true;
  tell_all(type::lost, packed({rank, -1, 0, generation() + 1}, why));
  changed({rank, 0, why});
}

void Control::hear(std::size_t i) {
  Peer& p = peers_[i];
  if (p.fd < 0 || p.over) return;
  const int who = rank_ == 0 ? int(i) : 0;
  const auto broken = [&](const char* why) {
    p.over = true;
    report(who, name(who) + why);
  };
  switch (p.in.receive(p.fd)) {
    case FrameReader::Got::nothing: break;
    case FrameReader::Got::bytes:
      if (!is_lost(p)) longest_silence_ = std::max(longest_silence_.load(), now() - p.heard);
      p.heard = now();
      break;
    case FrameReader::Got::end: broken(" has died: its connection is closed");
  }
  if (is_lost(p)) {  // its messages are ignored
    p.in = FrameReader(longest_frame);
    return;
  }
  try {
    while (const auto frame = p.in.next()) handle(i, *frame);
  } catch (const Error&) {
    broken(" sends what is no message");
  }
  if (p.over || now() - p.heard <= deadlines_.silence) return;
  p.over = !gives_up(who);
  report(who, name(who) + " has said nothing for " + digits(deadlines_.silence) + " s: it is stopped, or cut off");
}

void Control::handle(std::size_t i, const Frame& frame) {
  Said said;
  require(frame.bytes.size() >= sizeof said, "no message");
  std::memcpy(&said, frame.bytes.data(), sizeof said);
  const std::string text = frame.bytes.substr(sizeof said);
  require(said.rank >= (frame.type == type::failure || frame.type == type::accusation ? -1 : 0) && said.rank < size(),
          "no rank");
  switch (frame.type) {
    case type::edge: {
      if (said.rank == rank_) return;
      std::lock_guard lock(mutex_);
      return take(said.rank, {.waits_for = said.waits_for, .steps = said.number}, text);
    }
    case type::failure:
      failed(said.rank, text);
      if (rank_ == 0) tell_all(type::failure, frame.bytes);
      return;
    case type::accusation:
      if (rank_ == 0 && goes_on_ && said.rank >= 0) report(said.rank > 0 ? said.rank : int(i), text);
      return;
    case type::lost:
    case type::returned:
      if (rank_ == 0 || said.rank == 0) return;
      if (said.rank == rank_)
        return failed(rank_, name(rank_) + " was given up, and the others have gone on without it: " + text);
      require(said.generation == generation() + 1, "generation ", said.generation, " comes after ", generation());
      return changed({said.rank, frame.type == type::lost ? 0 : said.number, text});
    case type::text:
    case type::texts: {
      std::lock_guard lock(mutex_);
      auto& texts = texts_[said.number];
      texts.resize(names_.size());
      if (frame.type == type::texts) {
        const auto all = unbundle(text);
        require(all.size() == texts.size(), "not one text of each rank");
        texts.assign(all.begin(), all.end());
      } else {
        texts[std::size_t(said.rank)] = text;
      }
      return gathered_.notify_all();
    }
    case type::goodbye: {
      if (said.rank == (rank_ == 0 ? int(i) : 0)) peers_[i].over = true;
      gone_[std::size_t(said.rank)].store(true, std::memory_order_release);
      if (rank_ == 0) tell_all(type::goodbye, frame.bytes, &peers_[i]);
      std::lock_guard lock(mutex_);
      return wake_all();
    }
    default: tandem::fail("no message");
  }
}

void Control::take_back(const HandshakeListener::Accepted& accepted) {
  if (!let_in(accepted)) {
    close(accepted.connection);
    return;
  }
  const auto r = std::size_t(accepted.rank);
  if (peers_[r].fd >= 0) close(peers_[r].fd);
  peers_[r].fd = -1;  // the membership that it receives contains its rejoin
  tell_all(type::returned, packed({accepted.rank, -1, slots_[r].incarnation, generation() + 1}, slots_[r].record));
  put_first(accepted.connection);
  peers_[r] = {.fd = accepted.connection, .heard = now()};
  changed({accepted.rank, slots_[r].incarnation, slots_[r].record});
}

// A process that the listener has accepted has the token. It gets its slot if the slot is free.
bool Control::let_in(const HandshakeListener::Accepted& accepted) {
  const double patience = std::min(0.5, deadlines_.silence / 4);  // seconds that it may delay the heartbeats
  try {
    auto answer = [&](const std::string& text) {
      send_frame(accepted.connection, text, patience);
      return false;
    };
    const std::string who = "rank " + std::to_string(accepted.rank);
    if (accepted.ranks != size() || accepted.rank <= 0 || accepted.rank >= size())
      return answer("!" + who + " of " + std::to_string(accepted.ranks) + " ranks comes to a job of " +
                    std::to_string(size()));
    MemberSlot& slot = slots_[std::size_t(accepted.rank)];
    if (gone(accepted.rank)) return answer("!" + name(accepted.rank) + " has ended well: nobody can come in its place");
    if (!slot.lost)
      return answer("-" + name(accepted.rank) + " has not been given up: nobody can come in its place yet");
    answer("?the job has begun: TANDEM_INCARNATION=1 says that a rank comes back");
    const AddressRecord mine = AddressRecord::from(slots_[0].record);
    answer(mine.address);
    const auto words = unbundle(receive_frame(accepted.connection, patience));
    if (words.size() != 3) return answer("!what " + who + " says is damaged");
    if (words[1] != membership_.terms)
      return answer("!" + who + " does not fit to the job: " + first_difference(membership_.terms, words[1]));
    MemberSlot back{false, false,
                    std::max<std::uint64_t>(slot.incarnation + 1, std::strtoull(words[0].c_str(), nullptr, 10)),
                    words[2]};
    std::swap(slot, back);
    Membership now{true, membership_.nonce, slot.incarnation, generation() + 1, membership_.terms, slots_};
    for (int r = 0; r < size(); r++) now.slots[std::size_t(r)].left = gone(r);
    try {
      answer("+" + now.text());
      return true;
    } catch (const Error&) {
      std::swap(slot, back);
      return false;
    }
  } catch (const Error&) {  // it has disconnected meanwhile
    return false;
  }
}

}  // namespace tandem
