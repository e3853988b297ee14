#include "core/trace/trace.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/files/files.h"

namespace tandem {

using Json = nlohmann::ordered_json;

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

void Trace::Lane::follow(Event e) {
  if (e.mark < 0) e.mark = std::max<std::int64_t>(0, trace_.last_mark_);
  e.end = trace_.last_mark_ = trace_.follower_->mark();
  trace_.followed_.emplace_back(this, e);
}

void Trace::follow(Follower* follower) {
  follower_ = follower;
  followed_thread_ = std::this_thread::get_id();
  if (follower) last_mark_ = follower->mark();
}

void Trace::collect() {
  Follower* f = follower();
  if (!f || followed_.empty()) return;  // do not wait for a device without need
  const std::vector<std::int64_t> times = f->times([this] { return now(); });
  for (auto& [on, event] : followed_) {
    event.begin = times[std::size_t(event.mark)];
    event.end = times[std::size_t(event.end)];
    lane("device: " + on->name()).keep(event);
  }
  followed_.clear();
  last_mark_ = f->mark();
}

void Trace::Lane::keep(const Event& e) {
  if (events_.size() < trace_.limit_)
    events_.push_back(e);
  else
    dropped_++;
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
  auto add = [&](const char* kind, const std::string& name, int lane, Json&& fields) {
    Json row = {{"ph", kind}, {"name", name}, {"pid", rank_}, {"tid", lane}};
    row.update(fields);
    out += (out.empty() ? "" : ",\n") + row.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  auto us = [](std::int64_t ns) { return double(ns) / 1e3; };
  add("M", "process_name", 0, {{"args", {{"name", process_}}}});
  for (const auto& lane : lanes_) {
    add("M", "thread_name", lane->index(), {{"args", {{"name", lane->name()}}}});
    add("M", "thread_sort_index", lane->index(), {{"args", {{"sort_index", lane->index()}}}});
  }
  for (const auto& lane : lanes_) {
    // Spans are added when they end; viewers expect the order in which they began, outer before inner.
    std::vector<Event> events(lane->events().begin(), lane->events().end());
    std::ranges::stable_sort(events, {}, [](const Event& e) { return std::pair(e.begin, -e.end); });
    for (const Event& e : events) {
      const bool counts = std::strcmp(e.kind, "counter") == 0, placed = e.where && !e.where->empty();
      Json fields = {{"cat", e.kind}, {"ts", us(e.begin + shift)}}, about = Json::object();
      if (counts) {
        about["value"] = e.bytes;
      } else {
        const double ns = double(e.end - e.begin);
        fields["dur"] = ns / 1e3;
        if (placed) about["module"] = *e.where;
        if (e.number >= 0) about["number"] = e.number;
        if (e.flops > 0 && ns > 0) about["GFLOP/s"] = std::round(10 * e.flops / ns) / 10;
        if (e.bytes > 0) about["bytes"] = e.bytes;
      }
      fields["args"] = about;
      add(counts ? "C" : "X", placed && std::strcmp(e.kind, "module") == 0 ? *e.where : e.name, lane->index(),
          std::move(fields));
    }
    if (lane->dropped())
      add("i", std::to_string(lane->dropped()) + " later events were dropped", lane->index(),
          {{"s", "t"}, {"ts", us(events.back().end + shift)}});
  }
  return out;
}

void Trace::write(const std::string& path, const std::vector<std::string>& others) const {
  write_file(path, json(others));
}

}  // namespace tandem
