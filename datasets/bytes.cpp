#include "datasets/bytes.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "datasets/gzip.h"

namespace tandem {
namespace {

class PlainFile : public ByteSource {
 public:
  PlainFile(const std::filesystem::path& path, const Advice& advice)
      : ByteSource(path, advice), file_(std::fopen(path.c_str(), "rb"), &std::fclose) {
    if (!file_) unreadable("opened");
    std::setvbuf(file_.get(), nullptr, _IONBF, 0);  // reads are large: a buffer would only copy them once more
    size_ = std::filesystem::file_size(path);
  }
  std::uint64_t at_most() const override { return size_; }
  void rewind() { std::rewind(file_.get()); }
  std::size_t read_some(void* to, std::size_t bytes) override {
    std::size_t got = std::fread(to, 1, bytes, file_.get());
    if (got < bytes && std::ferror(file_.get())) unreadable("read");
    return got;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::uint64_t size_ = 0;
};

}  // namespace

void ByteSource::read(void* to, std::size_t bytes, std::uint64_t total) {
  std::size_t got = read_some(to, bytes);
  position_ += got;
  if (got < bytes) reject("truncated after ", position_, " bytes, expected ", total);
}

std::vector<std::uint8_t> ByteSource::read_all() {
  std::vector<std::uint8_t> all;
  for (std::size_t step = std::min<std::uint64_t>(at_most(), 1 << 24) + 1;;) {  // one more, to see the end at once
    std::size_t before = all.size();
    all.resize(before + step);
    std::size_t got = read_some(all.data() + before, step);
    all.resize(before + got);
    if (got < step) break;
  }
  position_ += all.size();
  check_end();
  return all;
}

void ByteSource::expect_end() {
  std::uint8_t extra;
  if (read_some(&extra, 1) > 0) reject("goes on after ", position_, " bytes, expected its end there");
  check_end();
}

void ByteSource::unreadable(const char* what) const {
  refuse(path_.string(), ": cannot be ", what, ": ", std::strerror(errno),
         errno == EACCES ? " (change its permissions, or its folder's)" : "");
}

std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const Advice& advice) {
  std::error_code ignored;
  auto status = std::filesystem::status(path, ignored);
  if (status.type() == std::filesystem::file_type::not_found) {
    if (const auto link = std::filesystem::read_symlink(path, ignored); !ignored)
      refuse(path.string(), ": is a link to ", link.string(), ", which is not there: ", advice.source);
    if (const auto near = similar_file(path); !near.empty())
      refuse(path.string(), ": there is no such file, but ", near.string(), ": give it this name");
    refuse(path.string(), ": there is no such file: ", advice.source);
  }
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse(path.string(), ": is ", std::filesystem::is_directory(status) ? "a directory" : "not a regular file",
           ", expected a file: ", advice.mend);
  auto file = std::make_unique<PlainFile>(path, advice);
  std::uint8_t magic[6] = {};
  file->read_some(magic, 6);
  file->rewind();
  const std::string_view start(reinterpret_cast<const char*>(magic), 6);
  for (const auto& [bytes, kind] : {std::pair<std::string_view, const char*>{"BZh", "a bzip2 file: bunzip2"},
                                    {"\3757zXZ", "an xz file: unxz"},
                                    {"PK\3\4", "a zip archive: unzip"},
                                    {"\x28\xb5\x2f\xfd", "a zstd file: unzstd"}})
    if (start.starts_with(bytes) && path.extension() != ".npy")
      refuse(path.string(), ": is ", kind, " unpacks it (gzip is read as it is)");
  if (start.starts_with('<') && path.extension() == ".gz")
    file->mistaken("a page of text, as servers answer instead of a file");
  if (start.starts_with("\x1f\x8b")) return gunzip(std::move(file));
  return file;
}

std::filesystem::path similar_file(const std::filesystem::path& path) {
  auto letters = [](const std::filesystem::path& p) {
    std::string kept;
    for (unsigned char c : p.filename().string())
      if (std::isalnum(c)) kept += char(std::tolower(c));
    return kept;
  };
  std::string wanted = letters(path.extension() == ".gz" ? path.stem() : path);
  std::error_code none;
  for (const auto& entry :
       std::filesystem::directory_iterator(path.has_parent_path() ? path.parent_path() : ".", none)) {
    std::string other = letters(entry.path());
    if (!entry.is_regular_file(none) || !other.starts_with(wanted)) continue;
    other.erase(0, wanted.size());
    if (const std::size_t at = other.find("gz"); at != std::string::npos) other.erase(at, 2);
    if (other.size() <= 2) return entry.path();  // "NAME (1).gz"
  }
  return {};
}

}  // namespace tandem
