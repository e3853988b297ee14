// What the tests of the readers share: small files in each format, and the errors that are expected.
#pragma once

#include "datasets/image.h"
#include "tests/fuzz/targets.h"
#include "tests/support.h"

#define NEEDS_ZLIB() \
  if (without_zlib()) GTEST_SKIP() << "built without zlib"
#define NEEDS_STB() \
  if (without_stb()) GTEST_SKIP() << "built without stb"

namespace tandem::test {

namespace fs = std::filesystem;

struct DataFolder : TemporaryFolder {
  fs::path path() const { return fs::path(file("any")).parent_path(); }
  fs::path operator/(const std::string& name) const { return file(name); }
};

inline void save(const fs::path& path, const Bytes& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
}

inline Image decode(const Bytes& bytes, int channels) {
  return decode_image(ByteSource("a picture", "mend it", bytes), channels);
}

// gzip_none.cpp and image_none.cpp refuse every file.
inline bool without_zlib() {
  return bool(refused([] { gunzip(ByteSource("a", "", {})); }, {"without zlib"}));
}
inline bool without_stb() {
  return bool(refused([] { decode(small_png(), 3); }, {"without stb"}));
}

inline Bytes flipped(Bytes b, std::size_t bit) {
  b[bit / 8] ^= std::uint8_t(1u << bit % 8);
  return b;
}

inline Bytes cut(Bytes b, std::size_t size) {
  b.resize(size);
  return b;
}

inline Bytes noise(std::size_t size, unsigned seed) {
  Bytes b(size);
  std::uint32_t state = seed * 2654435761u + 1;
  for (auto& v : b) v = std::uint8_t((state = state * 1664525u + 1013904223u) >> 24);
  return b;
}

// A gzip file that stores its bytes as they are: what zlib must read, written without zlib.
inline Bytes gzip(const Bytes& plain) {
  Bytes out = {0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3};
  std::size_t begin = 0;
  do {
    std::size_t size = std::min<std::size_t>(65535, plain.size() - begin);
    bool last = begin + size == plain.size();
    for (std::size_t v : {std::size_t(last), size & 255, size >> 8, ~size & 255, (~size >> 8) & 255})
      out.push_back(std::uint8_t(v));
    out.insert(out.end(), plain.begin() + begin, plain.begin() + begin + size);
    begin += size;
  } while (begin < plain.size());
  for (std::uint32_t v : {crc32(plain), std::uint32_t(plain.size())})
    for (int shift = 0; shift < 32; shift += 8) out.push_back(std::uint8_t(v >> shift));
  return out;
}

// A PNM of one value.
inline Bytes square_pnm(int side, int value, bool grey = false) {
  const std::string size = std::to_string(side), head = (grey ? "P5 " : "P6 ") + size + " " + size + " 255\n";
  Bytes b(head.begin(), head.end());
  b.resize(b.size() + std::size_t(side * side * (grey ? 1 : 3)), std::uint8_t(value));
  return b;
}

}  // namespace tandem::test
