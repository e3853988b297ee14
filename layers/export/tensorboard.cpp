#include "layers/export/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/machine.h"
#include "layers/export/event.pb.h"

namespace tandem {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// CRC-32C (Castagnoli's polynomial), rotated and shifted as the record format requires.
std::uint32_t masked_crc(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= std::uint8_t(byte);
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return std::rotr(~crc, 15) + 0xa282ead8u;
}

template <class T>
std::string bytes_of(T number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

}  // namespace

EventFile::EventFile(const std::string& folder) {
  static std::atomic<int> number{0};  // distinguishes files that a process opens in the same second
  make_folder("--tensorboard " + folder, folder);
  path_ = folder + "/events.out.tfevents." + std::to_string(std::int64_t(now())) + "." + host_name() + "." +
          std::to_string(getpid()) + "." + std::to_string(number++);
  file_ = open_file(path_, "wbe");
  if (!file_) refuse(folder, ": no TensorBoard file can be made there: ", std::strerror(errno));
  tensorboard::Event first;
  first.set_wall_time(now());
  first.set_file_version("brain.Event:2");
  write(first.SerializeAsString());
}

void EventFile::write(const std::string& event) {
  const std::string length = bytes_of(std::uint64_t(event.size()));
  const std::string record = length + bytes_of(masked_crc(length)) + event + bytes_of(masked_crc(event));
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size() || std::fflush(file_.get()) != 0)
    fail(path_, ": the event could not be written: ", std::strerror(errno));
}

void EventFile::scalars(std::int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  tensorboard::Event event;
  event.set_wall_time(now());
  event.set_step(step);
  for (const auto& [tag, v] : values) {
    auto* value = event.mutable_summary()->add_value();
    value->set_tag(tag);
    value->set_simple_value(float(v));
  }
  write(event.SerializeAsString());
}

void EventFile::histogram(std::int64_t step, const std::string& tag, const Tensor& tensor) {
  std::vector<double> v = tensor.values();
  std::erase_if(v, [](double x) { return !std::isfinite(x); });
  if (v.empty()) return;
  const auto [low, high] = std::minmax_element(v.begin(), v.end());
  tensorboard::Event event;
  event.set_wall_time(now());
  event.set_step(step);
  auto* value = event.mutable_summary()->add_value();
  value->set_tag(tag);
  auto* h = value->mutable_histo();
  h->set_min(*low);
  h->set_max(*high);
  h->set_num(double(v.size()));
  h->set_sum(std::accumulate(v.begin(), v.end(), 0.0));
  h->set_sum_squares(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
  // 64 buckets of equal width from the smallest to the largest value, the last with its right end; 1 if all are equal.
  const double width = (*high - *low) / 64;
  std::vector<std::int64_t> counts(width > 0 ? 64 : 1);
  for (double x : v) counts[width > 0 ? std::min(counts.size() - 1, std::size_t((x - *low) / width)) : 0]++;
  for (std::size_t i = 0; i + 1 < counts.size(); i++) h->add_bucket_limit(*low + width * double(i + 1));
  h->add_bucket_limit(width > 0 ? *high : std::nextafter(*high, std::numeric_limits<double>::max()));
  for (std::int64_t n : counts) h->add_bucket(double(n));
  write(event.SerializeAsString());
}

}  // namespace tandem
