#include "core/files/archive.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t whole_part = 1 << 20;  // the checksum is of parts
using Mark = std::array<char, 16>;
constexpr Mark mark{'t', 'a', 'n', 'd', 'e', 'm', ' ', 'a', 'r', 'c', 'h', 'i', 'v', 'e', '\n', '\n'};

}  // namespace

Archive::Archive(const std::string& path, Backend& backend, Mode mode) : path_(path), backend_(backend) {
  if (mode == Mode::write)
    out_.emplace(path), part_.resize(whole_part);
  else
    open();
  Mark first = mark;
  (*this)(first);
}

void Archive::open() {
  in_.open(path_, std::ios::binary | std::ios::ate);
  const auto size = in_ ? std::uint64_t(in_.tellg()) : 0;
  Mark first{};
  in_.seekg(0).read(first.data(), first.size());
  if (!in_ || first != mark) refuse(path_, ": cannot be read, or is no state of a run");
  std::uint64_t wanted = 0;
  const std::uint64_t fields = size - std::min<std::uint64_t>(size, sizeof wanted);
  in_.seekg(0);
  for (left_ = fields; left_ > 0;) next_part(), checksum_.add(part_.data(), part_.size());
  in_.read(reinterpret_cast<char*>(&wanted), sizeof wanted);
  if (!in_ || wanted != checksum_.value()) refuse(path_, ": is cut off or damaged. Remove it to begin the run anew");
  in_.seekg(0);
  left_ = fields;
  part_.clear();
}

void Archive::next_part() {
  if (out_) {
    checksum_.add(part_.data(), at_);
    out_->write(part_.data(), at_);
  } else {
    part_.resize(std::min<std::uint64_t>(left_, whole_part));
    in_.read(part_.data(), std::streamsize(part_.size()));
    left_ -= part_.size();
  }
  at_ = 0;
}

void Archive::bytes(void* at, std::size_t count) {
  for (char* next = static_cast<char*>(at); count > 0;) {
    if (at_ == part_.size()) next_part();
    const std::size_t n = std::min(count, part_.size() - at_);
    require(n > 0, path_, ": has fewer fields than are read");
    char* here = part_.data() + at_;
    std::memcpy(out_ ? here : next, out_ ? next : here, n);
    next += n;
    at_ += n;
    count -= n;
  }
}

// The number of a tensor with the same memory, or that of the next one: then its type, shape and elements follow. 0:
// undefined.
void Archive::tensor(Tensor& t) {
  const auto known = t.defined() ? places_.find(t.raw()) : places_.end();
  std::size_t number = !t.defined() ? 0 : known == places_.end() ? tensors_.size() + 1 : known->second;
  const bool taken = known != places_.end();
  (*this)(number);
  if (number == 0) return void(t = {});
  if (number <= tensors_.size()) {
    if (reads()) t = tensors_[number - 1];
    return;
  }
  std::vector<std::int64_t> sizes;
  DType dtype = t.defined() ? t.dtype() : DType::f32;
  for (int axis = 0; t.defined() && axis < t.rank(); axis++) sizes.push_back(t.size(axis));
  (*this)(dtype, sizes);
  const Shape shape{std::span<const std::int64_t>(sizes)};
  if (reads() && (taken || !t.defined() || t.shape() != shape || t.dtype() != dtype))
    t = Tensor(backend_, shape, dtype);
  tensors_.push_back(t);
  if (t.numel() > 0) places_[t.raw()] = number;
  bytes(reads() ? t.raw_write() : const_cast<void*>(t.raw()), t.bytes());
}

void Archive::finish() {
  if (!out_) return require(at_ == part_.size() && left_ == 0, path_, ": has more fields than were read");
  if (at_ > 0) next_part();
  const std::uint64_t sum = checksum_.value();
  out_->write(&sum, sizeof sum);
  out_->commit();
}

}  // namespace tandem
