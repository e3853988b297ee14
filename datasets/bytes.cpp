#include "datasets/bytes.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/files/files.h"
#include "datasets/dataset.h"

namespace tandem {

const std::uint8_t* ByteSource::read(std::size_t bytes) {
  if (bytes > bytes_.size() - position_)
    reject("truncated after ", bytes_.size(), " bytes, expected ", position_ + bytes);
  return bytes_.data() + std::exchange(position_, position_ + bytes);
}

void ByteSource::expect_array(const Shape& shape, std::size_t width) const {
  // A floating-point number, because a damaged header may announce more bytes than 64 bits can count
  double total = double(width);
  for (std::int64_t size : shape) total *= double(size);
  total += double(position_);
  if (total > double(bytes_.size()))
    reject("truncated, or its header ", shape, " is damaged: it holds ", bytes_.size(), " bytes, expected ",
           std::uint64_t(std::min(total, 1e18)));
}

Tensor ByteSource::read_array(const Shape& shape, DType dtype) {
  expect_array(shape, size_of(dtype));
  Tensor t = host_tensor(shape, dtype);
  std::memcpy(t.raw_write(), read(t.bytes()), t.bytes());
  expect_end();
  return t;
}

void ByteSource::expect_end() const {
  if (position_ < bytes_.size()) reject("goes on after ", position_, " bytes, expected its end there");
}

Tensor ByteSource::classes_in(const Tensor& numbers, int classes) const {
  const std::vector<double> values = numbers.values();
  const auto wrong = std::ranges::find_if(values, [&](double v) { return v < 0 || v >= classes; });
  if (wrong != values.end())
    mistaken("label ", *wrong, " at position ", wrong - values.begin(), ", expected 0 to ", classes - 1);
  Tensor labels = host_tensor({numbers.size(0)}, DType::i32);
  std::ranges::copy(values, labels.write<std::int32_t>());
  return labels;
}

ByteSource open_bytes(const std::filesystem::path& path, const std::string& remedy, Promise promise) {
  std::error_code ignored;
  auto status = std::filesystem::status(path, ignored);
  if (status.type() == std::filesystem::file_type::not_found) {
    const auto link = std::filesystem::read_symlink(path, ignored);
    refuse(path.string(),
           link.empty() ? ": there is no such file: " : ": is a link to " + link.string() + ", which is not there: ",
           remedy);
  }
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse(path.string(), ": is ", std::filesystem::is_directory(status) ? "a directory" : "not a regular file",
           ", expected a file: move it away and ", remedy);
  const OpenFile file = open_file(path, "rb");
  if (!file) refuse(path.string(), ": cannot be opened: ", std::strerror(errno));
  std::vector<std::uint8_t> bytes(std::filesystem::file_size(path));
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file.get()));
  if (std::ferror(file.get())) refuse(path.string(), ": cannot be read: ", std::strerror(errno));
  const bool compressed = bytes.size() > 1 && bytes[0] == 0x1f && bytes[1] == 0x8b;
  ByteSource source(path, remedy, std::move(bytes));
  return compressed ? gunzip(source, promise) : source;
}

}  // namespace tandem
