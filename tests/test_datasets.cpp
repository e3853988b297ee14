// The readers: small files of every kind of damage, each with its sentence.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>

#include "core/error.h"
#include "datasets/bytes.h"
#include "datasets/cifar.h"
#include "datasets/idx.h"
#include "datasets/mnist.h"
#include "datasets/synthetic.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

// A folder that goes away with the test.
struct Folder {
  fs::path path;
  Folder() {
    std::string name = (fs::temp_directory_path() / "tandem-datasets-XXXXXX").string();
    if (!mkdtemp(name.data())) ADD_FAILURE() << "mkdtemp " << name;
    path = name;
  }
  ~Folder() { fs::remove_all(path); }
  fs::path operator/(const std::string& name) const { return path / name; }
};

void write(const fs::path& path, const Bytes& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
}

Bytes cut(Bytes b, std::size_t size) {
  b.resize(size);
  return b;
}

// A gzip file that stores its bytes as they are: what zlib must read, written without zlib.
Bytes gzip(const Bytes& plain) {
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
  std::uint32_t crc = ~0u;
  for (std::uint8_t b : plain) {
    crc ^= b;
    for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  for (std::uint32_t v : {~crc, std::uint32_t(plain.size())})
    for (int shift = 0; shift < 32; shift += 8) out.push_back(std::uint8_t(v >> shift));
  return out;
}

// 40 labels i² mod 10 as gzip -9 compresses them: Huffman codes and repetitions.
const Bytes compressed_labels = {0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x63, 0x60, 0xe0, 0x60,
                                 0x64, 0x60, 0x60, 0xd0, 0x60, 0x60, 0x64, 0xe1, 0x64, 0x63, 0x65, 0xe3, 0x64, 0x61,
                                 0xc4, 0xcf, 0x02, 0x00, 0xa7, 0x52, 0xb8, 0xb9, 0x30, 0x00, 0x00, 0x00};

Bytes idx(std::uint32_t magic, const std::vector<std::uint32_t>& sizes, const Bytes& numel) {
  Bytes b;
  auto number = [&](std::uint32_t v) {
    for (int shift = 24; shift >= 0; shift -= 8) b.push_back(std::uint8_t(v >> shift));
  };
  number(magic);
  for (auto e : sizes) number(e);
  b.insert(b.end(), numel.begin(), numel.end());
  return b;
}

Bytes noise(std::size_t size, unsigned seed) {
  Bytes b(size);
  std::uint32_t state = seed * 2654435761u + 1;
  for (auto& v : b) v = std::uint8_t((state = state * 1664525u + 1013904223u) >> 24);
  return b;
}

// What the call throws, or "nothing".
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing";
}

#define EXPECT_ERROR(call, ...)                                                                           \
  do {                                                                                                    \
    std::string text = error_of([&] { call; });                                                           \
    for (const std::string& part : std::vector<std::string>{__VA_ARGS__})                                 \
      EXPECT_NE(text.find(part), std::string::npos) << "the error is: " << text << "\nwithout: " << part; \
  } while (0)

// gzip_none.cpp refuses every compressed file.
#define NEEDS_ZLIB()                                                                                  \
  do {                                                                                                \
    Folder folder;                                                                                    \
    write(folder / "a.gz", compressed_labels);                                                        \
    if (error_of([&] { open_bytes(folder / "a.gz", ""); }).find("without zlib") != std::string::npos) \
      GTEST_SKIP() << "built without zlib";                                                           \
  } while (0)

const std::string source = "fetch it again", mend = "): move it away and " + source;

// ---- IDX ------------------------------------------------------------------------------------------------------------
TEST(Idx, ReadsPlain) {
  Folder dir;
  Bytes pixels = noise(5 * 4 * 3, 1);
  write(dir / "a", idx(0x803, {5, 4, 3}, pixels));
  Tensor t = read_idx(dir / "a", 3, source);
  EXPECT_EQ(t.shape(), (Shape{5, 4, 3}));
  EXPECT_TRUE(std::equal(pixels.begin(), pixels.end(), t.data<std::uint8_t>()));
}

TEST(Idx, ReadsCompressed) {
  NEEDS_ZLIB();
  Folder dir;
  Bytes pixels = noise(2 * 300 * 200, 1);  // more than one block
  write(dir / "a.gz", gzip(idx(0x803, {2, 300, 200}, pixels)));
  Tensor t = read_idx(dir / "a.gz", 3, source);
  EXPECT_TRUE(std::equal(pixels.begin(), pixels.end(), t.data<std::uint8_t>()));
  write(dir / "b.gz", compressed_labels);
  t = read_idx(dir / "b.gz", 1, source);
  ASSERT_EQ(t.numel(), 40);
  for (int i = 0; i < 40; i++) EXPECT_EQ(t.data<std::uint8_t>()[i], i * i % 10);
}

TEST(Idx, EveryTruncationIsNamed) {
  Folder dir;
  Bytes file = idx(0x803, {5, 4, 3}, noise(60, 2));
  ASSERT_EQ(file.size(), 76u);
  for (std::size_t size = 0; size < file.size(); size++) {
    write(dir / "a", cut(file, size));
    EXPECT_ERROR(read_idx(dir / "a", 3, source), (dir / "a").string(), "truncated", mend);
  }
  write(dir / "a", cut(file, 10));
  EXPECT_ERROR(read_idx(dir / "a", 3, source), "truncated after 10 bytes, expected 16");
}

TEST(Idx, EveryTruncationOfCompressedFilesIsNamed) {
  NEEDS_ZLIB();
  Folder dir;
  const Bytes& file = compressed_labels;
  for (std::size_t size = 0; size < file.size(); size++) {
    write(dir / "a.gz", cut(file, size));
    EXPECT_ERROR(read_idx(dir / "a.gz", 1, source), (dir / "a.gz").string(), mend);
  }
  write(dir / "a.gz", cut(file, file.size() - 8));  // all data, no checksum
  EXPECT_ERROR(read_idx(dir / "a.gz", 1, source), "ends before its checksum");
  write(dir / "a.gz", cut(file, file.size() - 16));
  EXPECT_ERROR(read_idx(dir / "a.gz", 1, source), "truncated after", "expected 48");
}

TEST(Idx, EveryFlippedBitOfTheHeaderIsNoticed) {
  Folder dir;
  Bytes file = idx(0x803, {5, 4, 3}, noise(60, 4));
  for (int bit = 0; bit < 16 * 8; bit++) {
    Bytes damaged = file;
    damaged[bit / 8] ^= std::uint8_t(1 << (bit % 8));
    write(dir / "a", damaged);
    EXPECT_ERROR(read_idx(dir / "a", 3, source), (dir / "a").string(), mend);
  }
}

TEST(Idx, EveryFlippedBitOfACompressedFileIsNoticed) {
  NEEDS_ZLIB();
  Folder dir;
  const Bytes& file = compressed_labels;
  int harmless = 0;
  for (std::size_t bit = 0; bit < file.size() * 8; bit++) {
    Bytes damaged = file;
    damaged[bit / 8] ^= std::uint8_t(1 << (bit % 8));
    write(dir / "a.gz", damaged);
    std::string text = error_of([&] {
      Tensor t = read_idx(dir / "a.gz", 1, source);
      for (int i = 0; i < 40; i++) EXPECT_EQ(t.data<std::uint8_t>()[i], i * i % 10) << "bit " << bit;
    });
    if (text == "nothing") harmless++;  // time stamp and such: 7 bytes of gzip's header mean nothing to us
  }
  EXPECT_LE(harmless, 7 * 8);
}

TEST(Idx, SaysWhatItFoundAndExpected) {
  Folder dir;
  write(dir / "labels", idx(0x801, {3}, {1, 2, 3}));
  EXPECT_ERROR(read_idx(dir / "labels", 3, source), "is another file (begins with the number 2049, expected 2051",
               mend);
  write(dir / "longer", idx(0x801, {3}, {1, 2, 3, 4}));
  EXPECT_ERROR(read_idx(dir / "longer", 1, source), "goes on after 11 bytes", mend);
  write(dir / "empty", idx(0x801, {0}, {}));
  EXPECT_ERROR(read_idx(dir / "empty", 1, source), "0 along axis 0");
  // Extents whose product overflows 64 bits must not become a small number.
  write(dir / "huge", idx(0x803, {0x80000000u, 0x80000000u, 4}, {1, 2, 3}));
  EXPECT_ERROR(read_idx(dir / "huge", 3, source), "header is damaged: it announces [2147483648,2147483648,4]");
  write(dir / "cut", idx(0x803, {60000, 28, 28}, {1, 2, 3}));
  EXPECT_ERROR(read_idx(dir / "cut", 3, source), "truncated", "holds at most 19 bytes, expected 47040016");
  EXPECT_ERROR(read_idx(dir / "none", 1, source), (dir / "none").string() + ": there is no such file: " + source);
  fs::create_directory(dir / "folder");
  EXPECT_ERROR(read_idx(dir / "folder", 1, source), "is a directory, expected a file: move it away and " + source);
}

TEST(Idx, SaysWhatIsWrongWithACompressedFile) {
  NEEDS_ZLIB();
  Folder dir;
  write(dir / "longer.gz", gzip(idx(0x801, {3}, {1, 2, 3, 4})));
  EXPECT_ERROR(read_idx(dir / "longer.gz", 1, source), "goes on after 11 bytes");
  Bytes tail = gzip(idx(0x801, {3}, {1, 2, 3}));
  tail.push_back(7);
  write(dir / "tail.gz", tail);
  EXPECT_ERROR(read_idx(dir / "tail.gz", 1, source), "bytes after the end of its compressed data");
  tail.back() = 0x1f;  // a member that is cut off
  write(dir / "tail.gz", tail);
  EXPECT_ERROR(read_idx(dir / "tail.gz", 1, source), "ends before its checksum");
}

// RFC 1952: a file is a series of members; tar and others fill the rest of a block with zeros. The contents decide, not
// the name.
TEST(Idx, ReadsGzipAsItIsWritten) {
  NEEDS_ZLIB();
  Folder dir;
  const Bytes plain = idx(0x801, {3}, {1, 2, 3});
  for (std::size_t cut = 0; cut <= plain.size(); cut++) {
    Bytes members = gzip({plain.begin(), plain.begin() + std::ptrdiff_t(cut)});
    for (const Bytes& more : {gzip({}), gzip({plain.begin() + std::ptrdiff_t(cut), plain.end()}), Bytes(cut * 100)})
      members.insert(members.end(), more.begin(), more.end());
    write(dir / "members.gz", members);
    EXPECT_EQ(read_idx(dir / "members.gz", 1, source).values(), (std::vector<double>{1, 2, 3})) << cut;
  }
  write(dir / "plain.gz", plain);
  write(dir / "compressed", gzip(plain));
  for (const char* name : {"plain.gz", "compressed"})
    EXPECT_EQ(read_idx(dir / name, 1, source).values(), (std::vector<double>{1, 2, 3})) << name;
}

TEST(Idx, NamesTheFileThatHasAlmostTheName) {
  Folder dir;
  for (const char* near : {"t10k-labels.idx1-ubyte", "t10k-labels-idx1-ubyte (1).gz", "T10K-Labels-idx1-ubyte.GZ"}) {
    write(dir / near, {1});
    EXPECT_ERROR(read_idx(dir / "t10k-labels-idx1-ubyte.gz", 1, source), std::string("but ") + (dir / near).string());
    fs::remove(dir / near);
  }
  write(dir / "t10k-labels-idx1-ubyte.md5", {1});
  EXPECT_ERROR(read_idx(dir / "t10k-labels-idx1-ubyte", 1, source), "there is no such file: " + source);
  write(dir / "train-images.idx3-ubyte", {1});
  EXPECT_ERROR(find_data("mnist", dir.path),
               "train-images.idx3-ubyte: give it the name train-images-idx3-ubyte, and the others");
}

TEST(Idx, LabelsAreCheckedAgainstTheirRangeAndNumber) {
  Folder dir;
  write(dir / "x", idx(0x803, {4, 2, 2}, noise(16, 6)));
  write(dir / "y", idx(0x801, {4}, {0, 9, 10, 3}));
  EXPECT_ERROR(idx_pictures("set", dir / "x", dir / "y", 10, source),
               "y: is damaged, or another data set's (label 10 at position 2, expected 0 to 9" + mend);
  write(dir / "y", idx(0x801, {3}, {0, 9, 3}));
  EXPECT_ERROR(idx_pictures("set", dir / "x", dir / "y", 10, source), "x: has 4 pictures, expected 3",
               "move both away and " + source);
  write(dir / "y", idx(0x801, {4}, {0, 9, 3, 7}));
  Pictures p = idx_pictures("set", dir / "x", dir / "y", 10, source);
  EXPECT_EQ(p.images.shape(), (Shape{4, 2, 2, 1}));
  EXPECT_EQ(p.labels.values(), (std::vector<double>{0, 9, 3, 7}));
}

// ---- Fashion-MNIST and CIFAR-10 -------------------------------------------------------------------------------------
void write_fashion(const fs::path& dir, bool compressed, std::uint32_t side = 28) {
  for (auto [prefix, n] : {std::pair{"train", 30u}, {"t10k", 10u}}) {
    Bytes labels(n);
    for (std::uint32_t i = 0; i < n; i++) labels[i] = std::uint8_t(i % 10);
    Bytes x = idx(0x803, {n, side, side}, noise(n * side * side, n)), y = idx(0x801, {n}, labels);
    std::string end = compressed ? ".gz" : "";
    write(dir / (prefix + ("-images-idx3-ubyte" + end)), compressed ? gzip(x) : x);
    write(dir / (prefix + ("-labels-idx1-ubyte" + end)), compressed ? gzip(y) : y);
  }
}

TEST(FashionMnist, ReadsBothForms) {
  NEEDS_ZLIB();
  Folder a, b;
  write_fashion(a.path, true);
  write_fashion(b.path, false);
  Dataset x = fashion_mnist(a.path), y = fashion_mnist(b.path);
  EXPECT_EQ(x.train.images.shape(), (Shape{30, 28, 28, 1}));
  EXPECT_EQ(x.test.count(), 10);
  EXPECT_EQ(x.train.images.values(), y.train.images.values());
  EXPECT_EQ(x.test.labels.values(), y.test.labels.values());
  EXPECT_NO_THROW(check(x.train));
  EXPECT_EQ(x.train.class_names[9], "ankle boot");
}

TEST(FashionMnist, Errors) {
  Folder dir;
  std::string command = "run datasets/get-data.sh fashion-mnist " + dir.path.string();
  write_fashion(dir.path, false, 27);
  EXPECT_ERROR(fashion_mnist(dir.path), "27 × 27 pixels, expected 28 × 28", command);
  write_fashion(dir.path, false);
  fs::remove(dir / "t10k-images-idx3-ubyte");
  EXPECT_ERROR(fashion_mnist(dir.path), "t10k-images-idx3-ubyte.gz: there is no such file: " + command);
  write_fashion(dir / "fashion-mnist", false);
  fs::remove(dir / "fashion-mnist/train-labels-idx1-ubyte");
  EXPECT_ERROR(load_dataset("fashion-mnist", dir.path),
               "train-labels-idx1-ubyte.gz: there is no such file: " + command);
}

constexpr std::size_t record = 3073;

Bytes cifar_file(std::size_t records, unsigned seed) {
  Bytes b = noise(records * record, seed);
  for (std::size_t i = 0; i < records; i++) b[i * record] = std::uint8_t((i + seed) % 10);
  return b;
}

void write_cifar(const fs::path& dir, std::size_t records) {
  for (unsigned k = 1; k <= 5; k++) write(dir / ("data_batch_" + std::to_string(k) + ".bin"), cifar_file(records, k));
  write(dir / "test_batch.bin", cifar_file(records, 6));
}

TEST(Cifar, PlanesBecomePixels) {
  Folder dir;
  write_cifar(dir.path, 70);
  Dataset d = cifar10(dir.path, 70);
  EXPECT_EQ(d.train.images.shape(), (Shape{350, 32, 32, 3}));
  EXPECT_EQ(d.test.images.shape(), (Shape{70, 32, 32, 3}));
  EXPECT_NO_THROW(check(d.train));
  const std::uint8_t* pixels = d.train.images.data<std::uint8_t>();
  for (unsigned k = 1; k <= 5; k++) {
    Bytes file = cifar_file(70, k);
    for (std::size_t i : {0, 1, 63, 64, 69}) {
      std::size_t n = (k - 1) * 70 + i;
      EXPECT_EQ(d.train.labels.data<std::int32_t>()[n], file[i * record]);
      for (int y : {0, 17, 31})
        for (int x : {0, 5, 31})
          for (int c = 0; c < 3; c++)
            EXPECT_EQ(pixels[((n * 32 + y) * 32 + x) * 3 + c], file[i * record + 1 + c * 1024 + y * 32 + x]);
    }
  }
}

TEST(Cifar, DamageIsNamed) {
  Folder dir;
  std::string command = "move it away and run datasets/get-data.sh cifar-10 " + dir.path.string();
  write_cifar(dir.path, 3);
  Bytes good = cifar_file(3, 2);
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, record - 1, record, record + 1, 3 * record - 1}) {
    write(dir / "data_batch_2.bin", cut(good, size));  // `record`: whole records, but too few
    EXPECT_ERROR(cifar10(dir.path, 3), (dir / "data_batch_2.bin").string(),
                 "truncated after " + std::to_string(size) + " bytes", "expected 9219", command);
  }
  write(dir / "data_batch_2.bin", cut(good, 3 * record + 1));
  EXPECT_ERROR(cifar10(dir.path, 3), "goes on after 9219 bytes", command);
  good[2 * record] = 10;
  write(dir / "data_batch_2.bin", good);
  EXPECT_ERROR(cifar10(dir.path, 3), "label 10 in record 2, expected 0 to 9", command);
  fs::remove(dir / "data_batch_2.bin");
  EXPECT_ERROR(cifar10(dir.path, 3), "there is no such file: run datasets/get-data.sh cifar-10 ");
  fs::create_directory(dir / "data_batch_2.bin");
  EXPECT_ERROR(cifar10(dir.path, 3), "is a directory");
  EXPECT_ERROR(cifar10(dir.path), "expected 30730000");  // data_batch_1 has 3 records
}

// ---- where the files are --------------------------------------------------------------------------------------------
// Sets an environment variable, or with null removes it, for as long as the object lives.
struct Environment {
  std::string name, old;
  bool was;
  Environment(const char* n, const char* value) : name(n), was(std::getenv(n)) {
    if (was) old = std::getenv(n);
    value ? setenv(n, value, 1) : unsetenv(n);
  }
  ~Environment() { was ? setenv(name.c_str(), old.c_str(), 1) : unsetenv(name.c_str()); }
};

TEST(FindData, LooksInThreePlacesInOrder) {
  Folder a, b;
  write_fashion(a / "fashion-mnist", true);
  write_fashion(b / "fashion-mnist", false);
  Environment variable("TANDEM_DATA", b.path.c_str());
  EXPECT_EQ(find_data("fashion-mnist"), b / "fashion-mnist");
  EXPECT_EQ(find_data("fashion-mnist", a.path), a / "fashion-mnist");
  EXPECT_EQ(find_data("fashion-mnist", a / "fashion-mnist"), a / "fashion-mnist");  // the folder itself will do
  EXPECT_THROW(find_data("fashion-mnist", a / "nothing"), UsageError);  // a folder that was named is not second-guessed
  EXPECT_EQ(load_dataset("fashion-mnist").train.count(), 30);
}

TEST(FindData, FashionMnistsFirstPicturesStandInForAll) {
  Folder empty;
  Environment variable("TANDEM_DATA", empty.path.c_str());
  EXPECT_THROW(find_data("fashion-mnist", empty.path), UsageError);  // a folder that was named is not second-guessed
  testing::internal::CaptureStderr();
  const Dataset d = load_dataset("fashion-mnist");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("fashion-mnist was not found in " + (empty / "fashion-mnist").string()), said.npos) << said;
  EXPECT_NE(said.find("get-data.sh fashion-mnist fetches all"), said.npos) << said;
  EXPECT_EQ(d.name, "fashion-mnist-small");
  EXPECT_EQ(download_command("fashion-mnist", "there/fashion-mnist-small"), "git checkout there/fashion-mnist-small");
  EXPECT_EQ(std::pair(d.train.count(), d.test.count()), (std::pair<std::int64_t, std::int64_t>(6000, 1000)));
  for (const Pictures* p : {&d.train, &d.test})
    for (int c = 0; c < 10; c++)
      EXPECT_GT(std::count(p->labels.data<std::int32_t>(), p->labels.data<std::int32_t>() + p->count(), c), 80);
}

TEST(FindData, ErrorNamesEveryPlaceAndTheCommand) {
  Folder a, b, empty;
  fs::path here = fs::current_path();
  fs::current_path(empty.path);
  {
    Environment variable("TANDEM_DATA", b.path.c_str());
    EXPECT_ERROR(find_data("cifar-10", a.path), "cifar-10 (data_batch_1.bin) was not found in",
                 (a / "cifar-10-batches-bin").string(), "run datasets/get-data.sh cifar-10 " + a.path.string());
    EXPECT_ERROR(find_data("cifar-10"), (b / "cifar-10-batches-bin").string(), ", data/cifar-10-batches-bin",
                 ", data:");
  }
  Environment variable("TANDEM_DATA", nullptr);
  EXPECT_ERROR(find_data("cifar-10"), "TANDEM_DATA is not set", "run datasets/get-data.sh cifar-10,");
  fs::current_path(here);
  EXPECT_ERROR(find_data("imagenet"), "imagenet", "choose mnist, fashion-mnist, cifar-10 or cifar-100");
  EXPECT_ERROR(load_dataset("imagenet"), "imagenet", "synthetic-fashion-mnist");
  EXPECT_THROW(load_dataset("imagenet"), UsageError);  // what the user gave is at fault
}

// The script's ends that need no network. It is run from the repository's root, like all tests.
TEST(GetData, ExitStatusAndNoHalfFiles) {
  if (!fs::exists("datasets/get-data.sh")) GTEST_SKIP() << "not run from the repository's root";
  if (std::system("command -v curl >/dev/null 2>&1") != 0) GTEST_SKIP() << "file:// addresses need curl";
  Folder dir;
  auto run = [&](const std::string& mirror, const std::string& arguments) {
    std::string line = "TANDEM_MIRROR='" + mirror + "' sh datasets/get-data.sh " + arguments + " >/dev/null 2>&1";
    int status = std::system(line.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  EXPECT_EQ(run("", ""), 2);
  EXPECT_EQ(run("", "imagenet"), 2);
  EXPECT_EQ(run("http://127.0.0.1:1/", "fashion-mnist " + dir.path.string()), 3);
  write(dir / "mirror/t10k-labels-idx1-ubyte.gz", noise(5148, 9));
  EXPECT_EQ(run("file://" + (dir / "mirror").string(), "fashion-mnist " + dir.path.string()), 4);
  EXPECT_TRUE(fs::is_empty(dir / "fashion-mnist"));
}

// ---- pictures in memory ---------------------------------------------------------------------------------------------
TEST(InMemory, MeasuresMeanAndDeviation) {
  Bytes x = {0, 10, 255, 10, 0, 10, 255, 10};  // [2, 1, 2, 2]: channel 0 is 0 and 255, channel 1 is 10
  std::vector<std::int32_t> y = {1, 0};
  Pictures p = in_memory("mine", x, {2, 1, 2, 2}, y, 2);
  EXPECT_FLOAT_EQ(p.mean[0], 0.5f);
  EXPECT_FLOAT_EQ(p.std[0], 0.5f);
  EXPECT_FLOAT_EQ(p.mean[1], 10 / 255.0f);
  EXPECT_FLOAT_EQ(p.std[1], 1.0f);  // one colour: nothing to divide by
  y[1] = 2;
  EXPECT_ERROR(in_memory("mine", x, {2, 1, 2, 2}, y, 2), "mine: picture 1 has the label 2, expected 0 to 1");
  EXPECT_ERROR(in_memory("mine", x, {2, 2, 2, 2}, y, 2), "8 bytes for pictures of the shape [2,2,2,2]");
  EXPECT_ERROR(in_memory("mine", x, {4, 1, 2, 1}, y, 2), "2 labels for 4 pictures");
  EXPECT_ERROR(in_memory("mine", x, {8, 1}, y, 2), "[N, H, W, C]");
  EXPECT_ERROR(in_memory("mine", {}, {0, 1, 1, 1}, {}, 2), "no pictures");
}

TEST(InMemory, OutlivesItsMaker) {
  Tensor part;
  {
    Bytes x = noise(32, 7);
    std::vector<std::int32_t> y(8, 0);
    Pictures p = in_memory("mine", x, {8, 2, 2, 1}, y, 1);
    part = p.images.slice(2, 4);
  }
  EXPECT_EQ(part.values()[0], noise(32, 7)[8]);
}

TEST(HoldBack, PartsAreDisjointCompleteAndRepeatable) {
  const std::int64_t n = 1000;
  Bytes x(n * 4);
  std::vector<std::int32_t> y(n);
  for (std::int64_t i = 0; i < n; i++) {
    x[4 * i] = std::uint8_t(i);
    x[4 * i + 1] = std::uint8_t(i >> 8);
    y[i] = std::int32_t(i % 7);
  }
  Pictures p = in_memory("mine", x, {n, 2, 2, 1}, y, 7);
  auto numbers = [](const Pictures& q) {
    std::vector<int> out;
    for (std::int64_t i = 0; i < q.count(); i++) {
      const std::uint8_t* b = q.images.data<std::uint8_t>() + 4 * i;
      out.push_back(b[0] + 256 * b[1]);
      EXPECT_EQ(q.labels.data<std::int32_t>()[i], out.back() % 7);
    }
    return out;
  };
  auto [rest, held] = split(p, 100, 5);
  auto a = numbers(rest), b = numbers(held);
  EXPECT_EQ(a.size(), 900u);
  EXPECT_EQ(b.size(), 100u);
  EXPECT_TRUE(std::is_sorted(a.begin(), a.end()) && std::is_sorted(b.begin(), b.end()));
  std::set<int> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  EXPECT_EQ(all.size(), std::size_t(n));
  EXPECT_EQ(numbers(split(p, 100, 5).second), b);
  EXPECT_NE(numbers(split(p, 100, 6).second), b);
  double middle = std::accumulate(b.begin(), b.end(), 0.0) / 100;  // 500 ± 29 (one standard deviation)
  EXPECT_NEAR(middle, 500, 120);
  EXPECT_EQ(rest.mean, p.mean);
  EXPECT_ERROR(split(p, -1, 5), "cannot hold back -1 of 1000");
  EXPECT_EQ(numbers(split(p, 0, 5).first).size(), std::size_t(n));
  EXPECT_EQ(split(p, 0, 5).second.count(), 0);
  EXPECT_ERROR(split(p, n, 5), "cannot hold back 1000 of 1000");
}

// ---- synthetic pictures ---------------------------------------------------------------------------------------------
SyntheticOptions small_set() {
  SyntheticOptions o;
  o.train = 2000;
  o.test = 500;
  return o;
}

TEST(Synthetic, IsAFunctionOfItsSeed) {
  SyntheticOptions o = small_set();
  Dataset a = synthetic(o);
  EXPECT_NO_THROW(check(a.train));
  EXPECT_NO_THROW(check(a.test));
  EXPECT_EQ(a.train.images.shape(), (Shape{2000, 28, 28, 1}));
  o.train = 100;  // the first pictures do not depend on how many there are
  Dataset b = synthetic(o);
  EXPECT_EQ(a.train.images.slice(0, 100).values(), b.train.images.values());
  EXPECT_NE(a.train.images.slice(0, 500).values(), a.test.images.values());
  o.seed = 1;
  EXPECT_NE(synthetic(o).train.images.values(), b.train.images.values());
  SyntheticOptions c = SyntheticOptions::cifar10();
  c.train = c.test = 10;
  EXPECT_EQ(synthetic(c).train.images.shape(), (Shape{10, 32, 32, 3}));
  c.noise = 65;
  EXPECT_ERROR(synthetic(c), "noise 65");
}

// Power of a picture in the direction and at the period of a class: what a convolutional network can find out at once.
int recognise(const std::uint8_t* x, double mean) {
  int best = 0;
  double most = -1;
  for (int label = 0; label < 10; label++) {
    double power = 0;
    for (double stretch : {0.93, 1.0, 1.07})
      for (int side : {1, -1}) {
        double period = (label < 5 ? 4.0 : 7.0) * stretch, angle = 22.5 * (label % 5) * 3.14159265358979 / 180;
        double re = 0, im = 0;
        for (int r = 0; r < 28; r++)
          for (int c = 0; c < 28; c++) {
            double phase = 6.283185307 * (side * c * std::sin(angle) + r * std::cos(angle)) / period;
            re += (x[r * 28 + c] - mean) * std::cos(phase);
            im += (x[r * 28 + c] - mean) * std::sin(phase);
          }
        power = std::max(power, re * re + im * im);
      }
    if (power > most) most = power, best = label;
  }
  return best;
}

TEST(Synthetic, ClassesCanBeTold) {
  SyntheticOptions o = small_set();
  o.train = 10;
  o.test = 300;
  Dataset d = synthetic(o);
  const std::uint8_t* x = d.test.images.data<std::uint8_t>();
  int correct = 0;
  for (int i = 0; i < 300; i++) {
    double mean = 0;
    for (int k = 0; k < 784; k++) mean += x[i * 784 + k] / 784.0;
    correct += recognise(x + i * 784, mean) == d.test.labels.data<std::int32_t>()[i];
  }
  EXPECT_GE(correct, 285);
}

// No class has a mean picture of its own: whoever ignores neighbourhoods stays near chance.
TEST(Synthetic, MeanPicturesTellNothing) {
  Dataset d = synthetic(small_set());
  std::vector<std::vector<double>> mean(10, std::vector<double>(784));
  const std::uint8_t* x = d.train.images.data<std::uint8_t>();
  for (int i = 0; i < 2000; i++)
    for (int k = 0; k < 784; k++) mean[i % 10][k] += x[i * 784 + k] / 200.0;
  const std::uint8_t* t = d.test.images.data<std::uint8_t>();
  int correct = 0;
  for (int i = 0; i < 500; i++) {
    int best = 0;
    double least = 1e300;
    for (int c = 0; c < 10; c++) {
      double distance = 0;
      for (int k = 0; k < 784; k++) distance += (t[i * 784 + k] - mean[c][k]) * (t[i * 784 + k] - mean[c][k]);
      if (distance < least) least = distance, best = c;
    }
    correct += best == i % 10;
  }
  EXPECT_LT(correct, 125);  // chance is 50
}

}  // namespace
}  // namespace tandem
