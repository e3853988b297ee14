#include "tests/fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "core/files/safetensors.h"
#include "datasets/image.h"
#include "datasets/readers.h"
#include "layers/train/options.h"

namespace tandem::test {
namespace {

using Input = std::span<const std::uint8_t>;

std::unique_ptr<ByteSource> source(Input input) {
  return std::make_unique<ByteSource>("input", "get it again", Bytes(input.begin(), input.end()));
}

template <class Body>
void take_or_refuse(const Body& body) {
  try {
    body();
  } catch (const UsageError&) {}
}

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

// Without this no changed PNG would come further than its checksums.
Bytes with_checksums(Bytes b) {
  auto word = [&](std::size_t at) {
    return std::uint32_t{b[at]} << 24 | std::uint32_t{b[at + 1]} << 16 | std::uint32_t{b[at + 2]} << 8 | b[at + 3];
  };
  for (std::size_t at = 8; at + 12 <= b.size();) {
    const std::size_t length = word(at), end = at + 8 + length;
    if (end + 4 > b.size()) break;
    const std::uint32_t crc = crc32(std::span(b).subspan(at + 4, end - at - 4));
    for (int k = 0; k < 4; k++) b[end + std::size_t(k)] = std::uint8_t(crc >> (24 - 8 * k));
    at = end + 4;
  }
  return b;
}

// ---- targets --------------------------------------------------------------------------------------------------------
void fuzz_idx(Input input) {
  for (int rank : {1, 3}) take_or_refuse([&] { read_idx(*source(input), rank); });
}

void fuzz_cifar(Input input) {
  for (const CifarLayout& layout : {CifarLayout{{10}}, CifarLayout{{20, 100}, 1}})
    take_or_refuse([&] {
      const std::int64_t n = std::int64_t(std::clamp<std::size_t>(input.size() / 3073, 1, 8));
      Bytes pixels(std::size_t(n) * 3072);
      std::vector<std::int32_t> labels(n);
      read_cifar(*source(input), layout, n, pixels.data(), labels.data());
    });
}

void fuzz_npy(Input input) {
  static const Bytes labels = npy("<i8", "(2,)", {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}),
                     images = npy("|u1", "(2, 3, 3)", Bytes(18, 7));
  auto read = [](Input pictures, Input classes) {
    check(Dataset::of(npy_pictures("input", *source(pictures), *source(classes))).train);
  };
  take_or_refuse([&] { read(input, labels); });
  take_or_refuse([&] { read(images, input); });
}

void fuzz_gzip(Input input) {
  take_or_refuse([&] {
    ByteSource plain = gunzip(*source(input));
    read_idx(plain, 1);
  });
}

void fuzz_image(Input input) {
  take_or_refuse([&] { decode_image(*source(input), 1); });
  take_or_refuse([&] {
    Image image = decode_image(*source(with_checksums({input.begin(), input.end()})), 3);
    std::uint8_t square[8 * 8 * 3];
    fit_square(image, 8, square);
  });
}

void fuzz_safetensors(Input input) {
  const int file = memfd_create("input", 0);
  if (file < 0 || write(file, input.data(), input.size()) != ssize_t(input.size())) std::abort();
  take_or_refuse([&] {
    SafetensorsFile f("/proc/self/fd/" + std::to_string(file));
    for (const auto& [name, entry] : f.tensors()) take_or_refuse([&, name = name] { f.values(name); });
  });
  close(file);
}

void fuzz_options(Input input) {  // words, one a line
  std::istringstream lines(std::string(input.begin(), input.end()));
  std::vector<std::string> words = {"program"};
  for (std::string word; std::getline(lines, word); words.push_back(word)) {
    word = word.c_str();  // a command line has no zeros
    // Help ends the program, and large models are slow to build: no news from either.
    if (word.starts_with("--help") || (word.size() > 1 && word[0] == '-' && word[1] != '-')) return;
    if (word.find("resnet1") != std::string::npos || word.find("wrn") != std::string::npos) return;
  }
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  take_or_refuse([&] { parse_options(int(words.size()), argv.data(), "", {.data_set = "mnist"}); });
}

void fuzz_schedule(Input input) {
  try {
    const Schedule s = Schedule::parse({input.begin(), input.end()});
    for (double step : {0., 1., 5., 99.}) s.factor(step, 100, 10);
  } catch (const Error&) {  // parse_options makes a UsageError of it
  }
}

}  // namespace

std::uint32_t crc32(std::span<const std::uint8_t> bytes) {
  std::uint32_t crc = ~0u;
  for (std::uint8_t b : bytes) {
    crc ^= b;
    for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// ---- seeds ----------------------------------------------------------------------------------------------------------
Bytes idx(std::uint32_t magic, std::vector<std::uint32_t> sizes, const Bytes& elements) {
  sizes.insert(sizes.begin(), magic);
  Bytes b;
  for (std::uint32_t v : sizes)
    for (int shift = 24; shift >= 0; shift -= 8) b.push_back(std::uint8_t(v >> shift));
  append(b, elements);
  return b;
}

Bytes npy(const std::string& type, const std::string& shape, const Bytes& numel, int version, const char* fortran) {
  std::string text =
      "{'descr': '" + type + "', 'fortran_order': " + std::string(fortran) + ", 'shape': " + shape + ", }";
  const std::size_t before = version == 1 ? 10 : 12;
  while ((before + text.size() + 1) % 64) text += ' ';
  text += '\n';
  Bytes b = bytes_of("\x93NUMPY");
  b.insert(b.end(), {std::uint8_t(version), 0, std::uint8_t(text.size()), std::uint8_t(text.size() >> 8)});
  if (version > 1) b.insert(b.end(), {0, 0});
  append(b, bytes_of(text));
  append(b, numel);
  return b;
}

Bytes from_hex(std::string_view digits) {
  Bytes bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<Bytes::value_type>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16)));
  return bytes;
}

Bytes small_jpeg() {  // grey, 7 × 9
  return from_hex(
      "ffd8ffe000104a46494600010100000100010000ffdb0043001b12141714111b1716171e1c1b2028422b28252528513a3d3042605565"
      "645f555d5b6a7899816a7190735b5d85b586909ea3abadab6780bcc9baa6c799a8aba4ffc0000b080007000901011100ffc400150001"
      "0100000000000000000000000000000206ffc400191000020301000000000000000000000000000104051422ffda0008010100003f00"
      "14d1d7250e747fffd9");
}

Bytes cmyk_jpeg() {  // 8 × 8 of the inks 200, 60, 10, 40, as Pillow 9.4 writes it
  return from_hex(
      "ffd8ffee000e41646f626500640000000000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c1e17202e2931302e"
      "292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffc000140800080008044311004d11005911004b11"
      "00ffc4001500010100000000000000000000000000000607ffc40014100100000000000000000000000000000000ffda000e0443004d"
      "0059004b00003f002452a41b3fffd9");
}

Bytes small_png() {  // pixel (y, x) of 4 × 5 is (50·x, 60·y, 20·(x + y))
  return from_hex(
      "89504e470d0a1a0a0000000d4948445200000005000000040802000000c95162170000001a49444154789c6364606030621081231606"
      "1b1106060422c407006e20030669dc6f860000000049454e44ae426082");
}

Bytes small_bmp() {  // 2 × 2, 24 bits, from the bottom up, rows padded to 8 bytes
  Bytes b = bytes_of("BM");
  for (std::uint32_t v : {70u, 0u, 54u, 40u, 2u, 2u, 0x00180001u, 0u, 16u, 2835u, 2835u, 0u, 0u})
    for (int shift = 0; shift < 32; shift += 8) b.push_back(std::uint8_t(v >> shift));
  append(b, {7, 8, 9, 10, 11, 12, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0});
  return b;
}

Bytes small_pnm(bool grey) {
  Bytes b = bytes_of(grey ? "P5\n2 3\n255\n" : "P6\n# a remark\n2 3\n255\n");
  for (int i = 0; i < (grey ? 6 : 18); i++) b.push_back(std::uint8_t(10 * i));
  return b;
}

const std::vector<FuzzTarget>& fuzz_targets() {
  static const std::vector<FuzzTarget> targets = [] {
    Bytes cifar, cifar100;
    for (int i = 0; i < 2; i++) {
      cifar.push_back(std::uint8_t(i));
      cifar.resize(cifar.size() + 3072, std::uint8_t(i * 50));
      append(cifar100, {std::uint8_t(i), 99});
      cifar100.resize(cifar100.size() + 3072, std::uint8_t(i * 50));
    }
    // 40 labels i² mod 10 as gzip -9 compresses them: Huffman codes and repetitions.
    const Bytes gzip = from_hex("1f8b08000000000002036360e060646060d0606064e1646365e36461c4cf0200a752b8b930000000");
    auto safetensors = [](std::string header, const Bytes& numel) {
      while (header.size() % 8) header += ' ';
      Bytes b(8);
      for (int i = 0; i < 8; i++) b[std::size_t(i)] = std::uint8_t(std::uint64_t(header.size()) >> 8 * i);
      append(b, bytes_of(header));
      append(b, numel);
      return b;
    };
    return std::vector<FuzzTarget>{
        {"idx", fuzz_idx, {idx(0x803, {2, 3, 4}, Bytes(24, 200)), idx(0x801, {5}, {0, 1, 2, 3, 9})}},
        {"cifar", fuzz_cifar, {cifar, cifar100}},
        {"npy",
         fuzz_npy,
         {npy("|u1", "(2, 3, 3)", Bytes(18, 5)), npy("<f4", "(2, 2, 2, 1)", Bytes(32, 0), 2),
          npy("<i8", "(2,)", Bytes(16, 0)), npy("<i4", "(2,)", {1, 0, 0, 0, 0, 0, 0, 0}, 3)}},
        {"gzip", fuzz_gzip, {gzip}},
        {"image", fuzz_image, {small_jpeg(), cmyk_jpeg(), small_png(), small_bmp(), small_pnm(true), small_pnm(false)}},
        {"safetensors",
         fuzz_safetensors,
         {safetensors(R"({"__metadata__":{"step":"7"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})",
                      Bytes(16, 1)),
          safetensors(R"({"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"b\u00e9":{"dtype":"BF16","shape":[3],)"
                      R"("data_offsets":[8,14]},"e":{"dtype":"U8","shape":[0,4],"data_offsets":[14,14]}})",
                      Bytes(14, 2))}},
        {"options",
         fuzz_options,
         {bytes_of("--model\nmlp\n--epochs=3\n--lr\n0.1\n--augment"),
          bytes_of("--schedule\nwarmup:5+cosine\n--seed=18446744073709551615\n--dtype\nbf16\n--threads\n2"),
          bytes_of("--data\nsynthetic\n--data-set=cifar10\n--size\n64\n--val=100\n--clip\n1e3\n--deterministic")}},
        {"schedule",
         fuzz_schedule,
         {bytes_of("constant"), bytes_of("one-cycle"), bytes_of("step:30:0.1"), bytes_of("warmup:5+step:100,150:0.1"),
          bytes_of("warmup:5+cosine")}},
    };
  }();
  return targets;
}

}  // namespace tandem::test
