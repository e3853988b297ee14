#include "dist/control.h"

#include <fcntl.h>
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

namespace tandem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What travels: a head and a text: what a rank waits in, why the job has failed, a card.
struct Note {
  enum Kind : std::uint32_t { standing, failure, goodbye, accusation, lost, returned } kind;
  std::int32_t rank;  // whose standing; who is to blame; who leaves, is lost or has come back
  std::int32_t waits_for;
  std::uint32_t length;  // of the text
  std::uint64_t steps;  // of who has come back: its incarnation
};
constexpr std::size_t longest_text = 16384;

std::string packed(Note note, const std::string& text = {}) {
  note.length = std::uint32_t(std::min(text.size(), longest_text));
  return std::string(reinterpret_cast<const char*>(&note), sizeof note) + text.substr(0, note.length);
}

// Never waits: a rank that reads nothing for so long that its buffer is full will be found silent.
void tell(int fd, const std::string& bytes) {
  if (fd >= 0) (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

Control::Control(Rendezvous& rendezvous, std::vector<std::string> names, const Deadlines& deadlines,
                 std::unique_ptr<RollCall> roll_call)
    : rank_(rendezvous.place().rank),
      names_(std::move(names)),
      deadlines_(deadlines),
      connections_(rendezvous.take_connections()),
      told_(names_.size()),
      gone_(names_.size()),
      roll_call_(std::move(roll_call)) {
  begin();
}

Control::Control(Rendezvous& rendezvous, Job job, const Deadlines& deadlines)
    : rank_(rendezvous.place().rank),
      deadlines_(deadlines),
      connections_(rendezvous.take_connections()),
      told_(job.seats.size()),
      gone_(job.seats.size()),
      goes_on_(true),
      job_(std::move(job)),
      door_(rendezvous.take_door()) {
  for (const Seat& s : job_.seats) {
    gone_[names_.size()] = s.left;
    names_.push_back("rank " + std::to_string(names_.size()) + " on " + Card::from(s.card).host);
  }
  begin();
}

void Control::begin() {
  require(pipe2(wake_pipe_, O_CLOEXEC | O_NONBLOCK) == 0, "no more files can be opened: ", std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

Control::~Control() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
    leaves_well_ = !goes_on_ || std::uncaught_exceptions() == 0;
  }
  (void)!write(wake_pipe_[1], "", 1);
  thread_.join();
  for (int fd : connections_)
    if (fd >= 0) close(fd);
  close(wake_pipe_[0]);
  close(wake_pipe_[1]);
}

void Control::raise() const {
  std::lock_guard lock(mutex_);
  throw CommunicationError(culprit_, text_);
}

void Control::stand(const Standing& standing) {
  std::lock_guard lock(mutex_);
  mine_ = standing;
}

int Control::last_in_line(int waits_for) const {
  std::lock_guard lock(mutex_);
  std::vector<Standing> all = standings();
  all[std::size_t(rank_)] = mine_;
  all[std::size_t(rank_)].waits_for = waits_for;
  return tandem::culprit(all, rank_);
}

std::vector<Standing> Control::standings() const {
  std::vector<Standing> all;
  for (const Told& t : told_) all.push_back(t.standing);
  for (std::size_t r = 0; r < all.size(); r++) all[r].left = gone_[r];
  return all;
}

void Control::take(int rank, const Standing& standing, const std::string& in) {
  Told& t = told_[std::size_t(rank)];
  if (t.standing.waits_for != standing.waits_for || t.standing.steps != standing.steps || t.in != in) t.since = now();
  t.standing = standing;
  t.in = in;
}

void Control::warn_of_standstill() {
  auto waits = [&](const Told& t) { return t.standing.waits_for >= 0 && now() - t.since >= deadlines_.patience; };
  const auto first = std::find_if(told_.begin(), told_.end(), waits);
  if (first == told_.end()) {
    warned_ = false;
    return;
  }
  if (std::exchange(warned_, true)) return;
  const int blamed = tandem::culprit(standings(), int(first - told_.begin()));
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", deadlines_.patience);
  std::string text =
      std::string("warning: no progress for ") + seconds + " s: " + names_[std::size_t(blamed)] + " keeps the others waiting";
  for (int r = 0, shown = 0; r < size(); r++) {
    const Told& t = told_[std::size_t(r)];
    if (t.standing.waits_for < 0) continue;
    if (shown++ == 8) {
      text += "; …";
      break;
    }
    text += "; " + names_[std::size_t(r)] + " waits for rank " + std::to_string(t.standing.waits_for) + " in " + t.in;
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Control::fail(int culprit, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (failed_ || fails_) return;
    fails_ = true;
    outgoing_ += packed({Note::failure, culprit, -1, 0, 0}, text);
  }
  failed(culprit, text);
  (void)!write(wake_pipe_[1], "", 1);
}

void Control::failed(int culprit, const std::string& text) {
  std::function<void()> wake;
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    text_ = text;
    culprit_ = culprit;
    failed_.store(true, std::memory_order_release);
    wake = wake_;
  }
  if (wake) wake();
}

Change Control::change(std::size_t index) const {
  std::lock_guard lock(mutex_);
  return changes_[index];
}

void Control::on_change(std::function<void(const Change&)> heard) {
  std::vector<Change> before;
  {
    std::lock_guard lock(mutex_);
    heard_ = heard;
    before = changes_;
  }
  if (heard)
    for (const Change& c : before) heard(c);
}

void Control::accuse(int rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (rank_ == 0)
      accused_.push_back({rank, why});
    else
      outgoing_ += packed({Note::accusation, rank, -1, 0, 0}, why);
  }
  (void)!write(wake_pipe_[1], "", 1);
}

void Control::changed(const Change& change) {
  std::function<void()> wake;
  std::function<void(const Change&)> heard;
  {
    std::lock_guard lock(mutex_);
    if (change.incarnation) {
      names_[std::size_t(change.rank)] =
          "rank " + std::to_string(change.rank) + " on " + Card::from(change.text).host;
      gone_[std::size_t(change.rank)].store(false, std::memory_order_release);
      told_[std::size_t(change.rank)] = {};
    }
    changes_.push_back(change);
    change_count_.store(changes_.size(), std::memory_order_release);
    wake = wake_, heard = heard_;
  }
  if (heard) heard(change);
  if (wake) wake();
}

void Control::on_failure(std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

std::vector<int> Control::survivors() {
  std::unique_lock lock(mutex_);
  if (failed_ || fails_)
    called_.wait_for(lock, std::chrono::seconds(5), [&] { return !survivors_.empty(); });
  return survivors_;
}

void Control::call_roll() {
  std::vector<bool> lost(names_.size());
  for (std::size_t r = 0; r < lost.size(); r++) lost[r] = int(r) != rank_ && (int(r) == culprit_ || gone(int(r)));
  std::vector<int> found;
  if (roll_call_) found = roll_call_->answer(lost);
  for (int r = 0; r < size() && !roll_call_; r++)
    if (!lost[std::size_t(r)]) found.push_back(r);
  std::lock_guard lock(mutex_);
  survivors_ = std::move(found);
  called_.notify_all();
}

void Control::run() {
  const std::size_t n = connections_.size();
  std::vector<std::string> heard(n);
  std::vector<double> last(n, now());
  std::vector<bool> left(n, false);  // nothing is expected from there any more
  std::vector<Seat> seats = job_.seats;
  double told = 0, looked = now();
  const double beat = std::min(1.0, deadlines_.patience / 4);  // seconds between two heartbeats
  bool called = false;
  auto peer = [&](std::size_t i) { return rank_ == 0 ? int(i) : 0; };
  auto tell_all = [&](const std::string& note) {
    for (int fd : connections_) tell(fd, note);
  };
  auto gives_up = [&](int rank) { return goes_on_ && rank_ == 0 && rank != 0; };
  // At rank 0. The lost one is told too: its connection stays, for when it wakes up.
  auto lose = [&](int rank, const std::string& why) {
    Seat& seat = seats[std::size_t(rank)];
    if (seat.lost || gone(rank) || failed_) return;
    seat.lost = true;
    tell_all(packed({Note::lost, rank, -1, 0, 0}, why));
    changed({rank, 0, why});
  };
  // Failures are for all; rank 0 passes them on.
  auto report = [&](int culprit, const std::string& text) {
    if (gives_up(culprit)) return lose(culprit, text);
    failed(culprit, text);
    tell_all(packed({Note::failure, culprit, -1, 0, 0}, text));
  };
  for (;;) {
    std::vector<pollfd> polled{{wake_pipe_[0], POLLIN, 0}};
    for (std::size_t i = 0; i < n; i++) polled.push_back({left[i] ? -1 : connections_[i], POLLIN, 0});
    const bool awaited = door_ && std::any_of(seats.begin(), seats.end(), [](const Seat& s) { return s.lost; });
    poll(polled.data(), polled.size(), int(std::clamp((told + beat - now()) * 1000, 0.0, awaited ? 50.0 : 1000.0)));
    // Who was stopped itself has heard nobody meanwhile, and must not blame them.
    const double pause = now() - std::exchange(looked, now());
    if (goes_on_ && pause > 2)
      for (double& l : last) l += pause;
    if (polled[0].revents) {
      char bytes[64];
      while (read(wake_pipe_[0], bytes, sizeof bytes) > 0) {}
    }
    bool end;
    std::string outgoing;
    std::vector<std::pair<int, std::string>> accused;
    {
      std::lock_guard lock(mutex_);
      end = end_;
      outgoing.swap(outgoing_);
      accused.swap(accused_);
    }
    if (!outgoing.empty()) tell_all(outgoing);
    for (const auto& [rank, why] : accused) report(rank, why);
    if (failed_ && !std::exchange(called, true)) call_roll();
    if (end) {
      const std::string why = name(rank_) + " has left with an error";
      if (leaves_well_)
        tell_all(packed({Note::goodbye, rank_, -1, 0, 0}));
      else if (rank_ == 0 && !failed_)
        tell_all(packed({Note::failure, 0, -1, 0, 0}, why));
      else
        tell_all(packed({Note::accusation, rank_, -1, 0, 0}, why));
      return;
    }

    for (std::size_t i = 0; i < n; i++) {
      if (connections_[i] < 0 || left[i]) continue;
      const bool lost = rank_ == 0 && seats.size() > i && seats[i].lost;
      if (polled[i + 1].revents) {
        char bytes[4096];
        const ssize_t got = ::recv(connections_[i], bytes, sizeof bytes, MSG_DONTWAIT);
        if (got > 0) {
          if (!lost) heard[i].append(bytes, std::size_t(got));
          last[i] = now();
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
          left[i] = true;
          report(peer(i), name(peer(i)) + " has died: its connection is closed");
        }
      }
      if (lost) continue;
      while (heard[i].size() >= sizeof(Note)) {
        Note note;
        std::memcpy(&note, heard[i].data(), sizeof note);
        const bool sound =
            note.kind <= Note::returned && note.length <= longest_text && note.rank < size() && note.rank >= -1;
        if (!sound) {
          left[i] = true;
          report(peer(i), name(peer(i)) + " sends what is no message");
          break;
        }
        if (heard[i].size() < sizeof note + note.length) break;
        const std::string text = heard[i].substr(sizeof note, note.length);
        heard[i].erase(0, sizeof note + note.length);
        if (note.kind == Note::standing && note.rank != rank_ && note.rank >= 0) {
          std::lock_guard lock(mutex_);
          take(note.rank, {.waits_for = note.waits_for, .steps = note.steps}, text);
        } else if (note.kind == Note::failure) {
          if (rank_ == 0) {
            failed(note.rank, text);
            tell_all(packed({Note::failure, note.rank, -1, 0, 0}, text));
          } else {
            failed(note.rank, text);
          }
        } else if (note.kind == Note::accusation && rank_ == 0 && goes_on_ && note.rank >= 0) {
          report(note.rank > 0 ? note.rank : int(i), text);
        } else if (note.kind == Note::lost && rank_ != 0 && note.rank == rank_) {
          failed(rank_, name(rank_) + " was given up, and the others have gone on without it: " + text);
        } else if ((note.kind == Note::lost || note.kind == Note::returned) && rank_ != 0 && note.rank > 0) {
          changed({note.rank, note.kind == Note::lost ? 0 : note.steps, text});
        } else if (note.kind == Note::goodbye && note.rank >= 0) {
          if (peer(i) == note.rank) left[i] = true;
          gone_[std::size_t(note.rank)].store(true, std::memory_order_release);
          if (rank_ == 0)
            for (std::size_t j = 0; j < n; j++)
              if (j != i) tell(connections_[j], packed({Note::goodbye, note.rank, -1, 0, 0}));
          std::lock_guard lock(mutex_);
          if (wake_) wake_();
        }
      }
      if (!left[i] && now() - last[i] > deadlines_.silence) {
        if (!gives_up(peer(i))) left[i] = true;
        char text[64];
        std::snprintf(text, sizeof text, " has said nothing for %g s: it is stopped, or cut off", deadlines_.silence);
        report(peer(i), name(peer(i)) + text);
      }
    }
    if (door_ && goes_on_ && !failed_)
      for (const Gate::Guest& guest : door_->gate->wait(0)) {
        if (!let_in(guest, seats)) {
          close(guest.connection);
          continue;
        }
        const auto r = std::size_t(guest.rank);
        if (connections_[r] >= 0) close(connections_[r]);
        connections_[r] = -1;  // it hears of its own return by the welcome
        tell_all(packed({Note::returned, guest.rank, -1, 0, seats[r].incarnation}, seats[r].card));
        connections_[r] = guest.connection;
        heard[r].clear();
        last[r] = now();
        left[r] = false;
        changed({guest.rank, seats[r].incarnation, seats[r].card});
      }
    if (now() - told >= beat) {
      told = now();
      std::string notes;
      {
        std::lock_guard lock(mutex_);
        take(rank_, mine_, mine_.waits_for >= 0 ? describe(mine_.in) : "");
        for (int r = 0; r < size(); r++) {
          const Told& t = told_[std::size_t(r)];
          if (rank_ == 0 || r == rank_)
            notes += packed({Note::standing, r, t.standing.waits_for, 0, t.standing.steps}, t.in);
        }
        if (rank_ == 0 && !failed_ && !goes_on_) warn_of_standstill();
      }
      for (std::size_t i = 0; i < n; i++)
        if (!left[i] && !(rank_ == 0 && goes_on_ && seats[i].lost)) tell(connections_[i], notes);
    }
  }
}

// Whoever comes through the door knows the token. It gets its seat when that is empty.
bool Control::let_in(const Gate::Guest& guest, std::vector<Seat>& seats) {
  const double patience = std::min(0.5, deadlines_.silence / 4);  // seconds that the heartbeats may wait for it
  try {
    auto answer = [&](const std::string& text) {
      send_frame(guest.connection, text, patience);
      return false;
    };
    const std::string who = "rank " + std::to_string(guest.rank);
    if (guest.ranks != size() || guest.rank <= 0 || guest.rank >= size())
      return answer("!" + who + " of " + std::to_string(guest.ranks) + " ranks comes to a job of " +
                    std::to_string(size()));
    Seat& seat = seats[std::size_t(guest.rank)];
    if (gone(guest.rank)) return answer("!" + name(guest.rank) + " has ended well: nobody can come in its place");
    if (!seat.lost) return answer("-" + name(guest.rank) + " has not been given up: nobody can come in its place yet");
    answer("?the job has begun: TANDEM_INCARNATION=1 says that a rank comes back");
    const auto words = unbundle(receive_frame(guest.connection, patience));
    if (words.size() != 3) return answer("!what " + who + " says is damaged");
    if (words[1] != job_.terms)
      return answer("!" + who + " does not fit to the job: " + first_difference(job_.terms, words[1]));
    Card card = Card::from(words[2]);
    const Card mine = Card::from(seats[0].card);
    if (is_loopback(card.address) && card.identity == mine.identity) card.address = mine.address;
    Seat back{false, false, std::max<std::uint64_t>(seat.incarnation + 1, std::strtoull(words[0].c_str(), nullptr, 10)),
              card.text()};
    std::swap(seat, back);
    Welcome welcome{job_.nonce, seat.incarnation, job_.terms, seats};
    for (int r = 0; r < size(); r++) welcome.seats[std::size_t(r)].left = gone(r);
    try {
      answer("+" + welcome.text());
      return true;
    } catch (const Error&) {
      std::swap(seat, back);
      return false;
    }
  } catch (const Error&) {  // it has gone meanwhile
    return false;
  }
}

}  // namespace tandem
