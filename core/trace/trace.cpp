#include "core/trace/trace.h"

#include <algorithm>
#include <cstring>

#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"

namespace tandem {

Trace::Lane*& thread_lane() {
  static thread_local Trace::Lane* lane = nullptr;
  return lane;
}

Trace::Trace(std::string process, int rank, std::size_t limit)
    : process_(std::move(process)),
      rank_(rank),
      limit_(limit),
      unix_us_(
          std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
              .count()) {}

Trace::Lane& Trace::lane(const std::string& name) {
  std::lock_guard lock(mutex_);
  for (auto& l : lanes_)
    if (l->name() == name) return *l;
  lanes_.push_back(std::make_unique<Lane>(*this, name, int(lanes_.size())));
  return *lanes_.back();
}

const Trace::Lane* Trace::find(const std::string& name) const {
  for (const auto& l : lanes_)
    if (l->name() == name) return l.get();
  return nullptr;
}

void Trace::Lane::add(const Event& e) {
  mark_ = e.end;
  keep(e);
  if (Follower* f = trace_.follower()) {
    f->passed(e.name);
    follow(e);
  }
}

Trace::Event Trace::Lane::begin(Event e) {
  if (Follower* f = trace_.follower()) {
    f->enter(e.where && !e.where->empty() && std::strcmp(e.kind, "module") == 0 ? e.where->c_str() : e.name);
    e.mark = trace_.last_mark_ = f->mark();
  }
  e.begin = now();
  return e;
}

void Trace::Lane::add_now(Event e) {
  mark_ = e.end = now();
  keep(e);
  Follower* f = trace_.follower();
  if (!f || e.mark < 0) return;
  f->leave();
  follow(e);
}

void Trace::Lane::follow(const Event& e) {
  const std::int64_t begin = e.mark >= 0 ? e.mark : trace_.last_mark_;
  trace_.last_mark_ = trace_.follower_->mark();
  trace_.followed_.push_back({this, e, trace_.last_mark_});
  trace_.followed_.back().event.mark = std::max<std::int64_t>(0, begin);
}

void Trace::follow(Follower* follower) {
  follower_ = follower;
  followed_thread_ = std::this_thread::get_id();
  if (follower) last_mark_ = follower->mark();
}

void Trace::collect() {
  Follower* f = follower();
  if (!f || followed_.empty()) return;  // only a trace that follows devices waits for them
  const std::vector<std::int64_t> times = f->times([this] { return now(); });
  for (Followed& s : followed_) {
    s.event.begin = times[std::size_t(s.event.mark)];
    s.event.end = times[std::size_t(s.end)];
    lane("device: " + s.lane->name()).keep(s.event);
  }
  followed_.clear();
  last_mark_ = f->mark();
}

void Trace::Lane::keep(const Event& e) {
  if (size_ >= trace_.limit_) {
    dropped_++;
    return;
  }
  if (size_ / chunk == chunks_.size()) chunks_.push_back(std::make_unique<Event[]>(chunk));
  chunks_[size_ / chunk][size_ % chunk] = e;
  size_++;
}

void Trace::Lane::until_now(Event e) {
  e.begin = mark_;
  e.end = now();
  add(e);
}

void Trace::Lane::counter(const char* name, double value) {
  const std::int64_t t = now();
  keep({.name = name, .kind = "counter", .begin = t, .end = t, .bytes = value});
}

std::string Trace::json(const std::vector<std::string>& others) const {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"began_unix_us\":" + std::to_string(unix_us_) +
                    "},\"traceEvents\":[\n" + events();
  for (const std::string& other : others) out += ",\n" + other;
  return out + "\n]}\n";
}

std::string Trace::events(std::int64_t shift) const {
  std::string out;
  const std::string pid = std::to_string(rank_);
  auto metadata = [&](const char* what, int tid, const std::string& argument) {
    out += "{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\",\"pid\":" + pid + ",\"tid\":" + std::to_string(tid) +
           ",\"args\":{" + argument + "}}";
  };
  metadata("process_name", 0, "\"name\":" + json_quoted(process_));
  for (const auto& lane : lanes_) {
    out += ",\n";
    metadata("thread_name", lane->index(), "\"name\":" + json_quoted(lane->name()));
    out += ",\n";
    metadata("thread_sort_index", lane->index(), "\"sort_index\":" + std::to_string(lane->index()));
  }
  for (const auto& lane : lanes_) {
    // Spans are added when they end; viewers expect the order in which they began, outer before inner.
    std::vector<const Event*> events(lane->size());
    for (std::size_t i = 0; i < events.size(); i++) events[i] = &(*lane)[i];
    std::stable_sort(events.begin(), events.end(), [](const Event* a, const Event* b) {
      return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
    });
    for (const Event* e : events) {
      bool counts = std::strcmp(e->kind, "counter") == 0, placed = e->where && !e->where->empty();
      std::string label = placed && std::strcmp(e->kind, "module") == 0 ? *e->where : e->name;
      out += ",\n{\"ph\":\"" + std::string(counts ? "C" : "X") + "\",\"name\":" + json_quoted(label) +
             ",\"cat\":" + json_quoted(e->kind) + ",\"pid\":" + pid + ",\"tid\":" + std::to_string(lane->index()) +
             ",\"ts\":" + printed("%.3f", double(e->begin + shift) / 1e3);
      std::string arguments;
      auto argument = [&](const char* name, const std::string& value) {
        arguments += (arguments.empty() ? "\"" : ",\"") + std::string(name) + "\":" + value;
      };
      if (counts) {
        argument("value", json_number(e->bytes));
      } else {
        double ns = double(e->end - e->begin);
        out += ",\"dur\":" + printed("%.3f", ns / 1e3);
        if (placed) argument("module", json_quoted(*e->where));
        if (e->number >= 0) argument("number", std::to_string(e->number));
        if (e->flops > 0 && ns > 0) argument("GFLOP/s", printed("%.1f", e->flops / ns));
        if (e->bytes > 0) argument("bytes", json_number(e->bytes));
      }
      out += ",\"args\":{" + arguments + "}}";
    }
    if (lane->dropped())
      out += ",\n{\"ph\":\"i\",\"s\":\"t\",\"name\":\"" + std::to_string(lane->dropped()) +
             " later events were dropped\",\"pid\":" + pid + ",\"tid\":" + std::to_string(lane->index()) +
             ",\"ts\":" + printed("%.3f", double((*lane)[lane->size() - 1].end + shift) / 1e3) + "}";
  }
  return out;
}

void Trace::write(const std::string& path, const std::vector<std::string>& others) const {
  write_file(path, json(others));
}

}  // namespace tandem
