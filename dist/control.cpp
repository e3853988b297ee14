#include "dist/control.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tandem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What travels: a head and a text: what a rank waits in, or why the job has failed.
struct Note {
  enum Kind : std::uint32_t { standing, failure, goodbye } kind;
  std::int32_t rank;  // whose standing; who is to blame; who leaves
  std::int32_t waits_for;
  std::uint32_t length;  // of the text
  std::uint64_t steps;
};
constexpr std::size_t longest_text = 4096;

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
  require(pipe2(wake_pipe_, O_CLOEXEC | O_NONBLOCK) == 0, "no more files can be opened: ", std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

Control::~Control() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
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

int Control::blame(int waits_for) const {
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
      std::string("warning: no progress for ") + seconds + " s: " + name(blamed) + " keeps the others waiting";
  for (int r = 0, shown = 0; r < size(); r++) {
    const Told& t = told_[std::size_t(r)];
    if (t.standing.waits_for < 0) continue;
    if (shown++ == 8) {
      text += "; …";
      break;
    }
    text += "; " + name(r) + " waits for rank " + std::to_string(t.standing.waits_for) + " in " + t.in;
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Control::fail(int culprit, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (failed_ || !outgoing_.empty()) return;
    outgoing_ = packed({Note::failure, culprit, -1, 0, 0}, text);
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

void Control::on_failure(std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

std::vector<int> Control::survivors() {
  std::unique_lock lock(mutex_);
  if (failed_ || !outgoing_.empty())
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
  std::vector<bool> left(n, false);
  double told = 0;
  const double beat = std::min(1.0, deadlines_.patience / 4);  // seconds between two heartbeats
  bool called = false;
  auto peer = [&](std::size_t i) { return rank_ == 0 ? int(i) : 0; };
  // Failures are for all; rank 0 passes them on.
  auto report = [&](int culprit, const std::string& text) {
    failed(culprit, text);
    const std::string note = packed({Note::failure, culprit, -1, 0, 0}, text);
    for (int fd : connections_) tell(fd, note);
  };
  for (;;) {
    std::vector<pollfd> polled{{wake_pipe_[0], POLLIN, 0}};
    for (std::size_t i = 0; i < n; i++) polled.push_back({left[i] ? -1 : connections_[i], POLLIN, 0});
    poll(polled.data(), polled.size(), int(std::clamp((told + beat - now()) * 1000, 0.0, 1000.0)));
    if (polled[0].revents) {
      char bytes[64];
      while (read(wake_pipe_[0], bytes, sizeof bytes) > 0) {}
    }
    bool end;
    std::string outgoing;
    {
      std::lock_guard lock(mutex_);
      end = end_;
      outgoing.swap(outgoing_);
    }
    if (!outgoing.empty())
      for (int fd : connections_) tell(fd, outgoing);
    if (failed_ && !std::exchange(called, true)) call_roll();
    if (end) {
      const std::string note = packed({Note::goodbye, rank_, -1, 0, 0});
      for (int fd : connections_) tell(fd, note);
      return;
    }

    for (std::size_t i = 0; i < n; i++) {
      if (connections_[i] < 0 || left[i]) continue;
      if (polled[i + 1].revents) {
        char bytes[4096];
        const ssize_t got = ::recv(connections_[i], bytes, sizeof bytes, MSG_DONTWAIT);
        if (got > 0) {
          heard[i].append(bytes, std::size_t(got));
          last[i] = now();
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
          left[i] = true;
          report(peer(i), name(peer(i)) + " has died: its connection is closed");
        }
      }
      while (heard[i].size() >= sizeof(Note)) {
        Note note;
        std::memcpy(&note, heard[i].data(), sizeof note);
        const bool sound =
            note.kind <= Note::goodbye && note.length <= longest_text && note.rank < size() && note.rank >= -1;
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
          if (rank_ == 0)
            report(note.rank, text);
          else
            failed(note.rank, text);
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
        left[i] = true;
        char text[64];
        std::snprintf(text, sizeof text, " has said nothing for %g s: it is stopped, or cut off", deadlines_.silence);
        report(peer(i), name(peer(i)) + text);
      }
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
        if (rank_ == 0 && !failed_) warn_of_standstill();
      }
      for (std::size_t i = 0; i < n; i++)
        if (!left[i]) tell(connections_[i], notes);
    }
  }
}

}  // namespace tandem
