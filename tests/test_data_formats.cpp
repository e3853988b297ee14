// The readers of one file: IDX, gzip, CIFAR, .npy and pictures, from intact and from damaged bytes.
#include "core/random.h"
#include "datasets/readers.h"
#include "tests/data_files.h"

namespace tandem::test {
namespace {

const std::string remedy = "fetch it again", mend = "): move it away and " + remedy;

std::unique_ptr<ByteSource> memory(const Bytes& bytes) { return std::make_unique<ByteSource>("a file", remedy, bytes); }

Tensor idx_of(const Bytes& bytes, int rank) { return read_idx(*memory(bytes), rank); }
Tensor gzip_idx_of(const Bytes& bytes, int rank) {
  ByteSource plain = gunzip(*memory(bytes));
  return read_idx(plain, rank);
}
Tensor idx_in(const fs::path& path, int rank) {
  ByteSource file = open_bytes(path, remedy);
  return read_idx(file, rank);
}

// The labels of the records of a CIFAR-10 file.
Numbers cifar_of(ByteSource& file, std::int64_t records) {
  Bytes pixels(std::size_t(records) * 3072);
  std::vector<std::int32_t> labels(std::size_t(records), 0);
  read_cifar(file, {{10}}, records, pixels.data(), labels.data());
  return {labels.begin(), labels.end()};
}

Bytes cifar_file(std::size_t records) {
  Bytes b = noise(records * 3073, 1);
  for (std::size_t i = 0; i < records; i++) b[i * 3073] = std::uint8_t(i % 10);
  return b;
}

// 40 labels i² mod 10 as gzip -9 compresses them: Huffman codes and repetitions.
const Bytes compressed_labels = fuzz_targets()[3].seeds[0];

// ---- damage, in every format ----------------------------------------------------------------------------------------
struct Format {
  std::string name;
  Bytes good;
  std::function<Numbers(const Bytes&)> read;
  std::size_t checked_bits = 0;   // a change of any of the first bits is noticed
  std::size_t harmless_bits = 0;  // but for so many, which mean nothing
};

std::vector<Format> formats() {
  auto pixels = [](const Bytes& b) {
    const Image image = decode_image(*memory(b), 3);
    return Numbers(image.pixels.begin(), image.pixels.end());
  };
  auto array = [](const Bytes& b) { return read_npy(*memory(b)).values(); };
  std::vector<Format> all = {
      {"IDX", idx(0x803, {5, 4, 3}, noise(60, 2)), [](const Bytes& b) { return idx_of(b, 3).values(); }, 16 * 8},
      {"CIFAR", cifar_file(3), [](const Bytes& b) { return cifar_of(*memory(b), 3); }},
      {".npy", npy("|u1", "(2, 3, 3)", Bytes(18)), array},
      {".npy, version 2", npy("<i8", "(2,)", Bytes(16), 2), array}};
  // gzip's time stamp, name of the system and the like: 7 bytes.
  if (!without_zlib())
    all.push_back({"gzip", compressed_labels, [](const Bytes& b) { return gzip_idx_of(b, 1).values(); },
                   8 * compressed_labels.size(), 7 * 8});
  if (without_stb()) return all;
  all.insert(all.end(), {{"JPEG", small_jpeg(), pixels},
                         {"PNG", small_png(), pixels, 8 * small_png().size()},
                         {"BMP", small_bmp(), pixels},
                         {"PNM, grey", small_pnm(true), pixels},
                         {"PNM", small_pnm(false), pixels}});
  return all;
}

// Damaged bytes must be refused, or give just what the good ones give (a bit of a header may mean nothing). Returns
// whether they were refused.
bool refuses(const Format& f, const Bytes& bytes) {
  try {
    EXPECT_EQ(f.read(bytes), f.read(f.good));
    return false;
  } catch (const UsageError& e) {
    const std::string message = e.what();
    EXPECT_TRUE(message.starts_with("a file:") && message.find(mend) != message.npos) << message;
    return true;
  }
}

TEST(Formats, EveryTruncationIsRefused) {
  for (const Format& f : formats()) {
    EXPECT_NO_THROW(f.read(f.good)) << f.name;
    for (std::size_t size = 0; size<f.good.size(); size += f.good.size()> 5000 ? 500 : 1)
      EXPECT_REFUSED(f.read(cut(f.good, size)), "a file: is", mend) << f.name << " at " << size;
    EXPECT_REFUSED(f.read(cut(f.good, f.good.size() - 1)), "a file: is", mend) << f.name;
  }
}

TEST(Formats, EveryFlippedBitThatIsCheckedIsNoticed) {
  for (const Format& f : formats()) {
    SCOPED_TRACE(f.name);
    std::size_t harmless = 0;
    for (std::size_t bit = 0; bit < f.checked_bits; bit++) harmless += !refuses(f, flipped(f.good, bit));
    EXPECT_LE(harmless, f.harmless_bits) << f.name;
  }
}

// ---- IDX and gzip ---------------------------------------------------------------------------------------------------
TEST(Idx, ReadsPlainAndCompressed) {
  DataFolder dir;
  const Bytes pixels = noise(2 * 300 * 200, 1), file = idx(0x803, {2, 300, 200}, pixels);  // more than one block
  save(dir / "plain.gz", file);  // the contents decide, not the name
  save(dir / "compressed", gzip(file));
  for (const char* name : {"plain.gz", "compressed"}) {
    if (std::string(name) == "compressed" && without_zlib()) continue;
    const Tensor t = idx_in(dir / name, 3);
    EXPECT_EQ(t.shape(), (Shape{2, 300, 200}));
    EXPECT_TRUE(std::equal(pixels.begin(), pixels.end(), t.data<std::uint8_t>())) << name;
  }
  NEEDS_ZLIB();
  const Tensor t = gzip_idx_of(compressed_labels, 1);
  ASSERT_EQ(t.numel(), 40);
  for (int i = 0; i < 40; i++) EXPECT_EQ(t.data<std::uint8_t>()[i], i * i % 10);
}

TEST(Idx, SaysWhatItFoundAndExpected) {
  EXPECT_REFUSED(idx_of(cut(idx(0x803, {5, 4, 3}, noise(60, 2)), 10), 3), "truncated after 10 bytes, expected 16");
  EXPECT_REFUSED(idx_of(idx(0x801, {30}, Bytes(30)), 3), "is another file (begins with the number 2049, expected 2051",
                 mend);
  EXPECT_REFUSED(idx_of(idx(0x801, {3}, {1, 2, 3, 4}), 1), "goes on after 11 bytes", mend);
  EXPECT_REFUSED(idx_of(idx(0x801, {0}, {}), 1), "0 along axis 0");
  // Sizes whose product overflows 64 bits must not become a small number.
  EXPECT_REFUSED(idx_of(idx(0x803, {0x80000000u, 0x80000000u, 4}, {1, 2, 3}), 3),
                 "header [2147483648,2147483648,4] is damaged");
  EXPECT_REFUSED(idx_of(idx(0x803, {60000, 28, 28}, {1, 2, 3}), 3), "truncated", "holds 19 bytes, expected 47040016");
  DataFolder dir;
  EXPECT_REFUSED(idx_in(dir / "none", 1), (dir / "none").string() + ": there is no such file: " + remedy);
  fs::create_directory(dir / "folder");
  EXPECT_REFUSED(idx_in(dir / "folder", 1), "is a directory, expected a file: move it away and " + remedy);
}

TEST(Gzip, SaysWhatIsWrong) {
  NEEDS_ZLIB();
  const Bytes& labels = compressed_labels;
  EXPECT_REFUSED(gzip_idx_of(cut(labels, labels.size() - 8), 1), "ends before its checksum");
  EXPECT_REFUSED(gzip_idx_of(cut(labels, labels.size() - 16), 1), "ends before its checksum", mend);
  EXPECT_REFUSED(gzip_idx_of(gzip(idx(0x801, {3}, {1, 2, 3, 4})), 1), "goes on after 11 bytes");
  EXPECT_REFUSED(gunzip(*memory(gzip(Bytes(100))), [](std::span<const std::uint8_t>) { return 11.0; }),
                 "goes on after 11 bytes");
  Bytes tail = gzip(idx(0x801, {3}, {1, 2, 3}));
  tail.push_back(7);
  EXPECT_REFUSED(gzip_idx_of(tail, 1), "bytes after the end of its compressed data");
  tail.back() = 0x1f;  // a member that is cut off
  EXPECT_REFUSED(gzip_idx_of(tail, 1), "ends before its checksum");
}

// RFC 1952: a file is a series of members; tar and others fill the rest of a block with zeros.
TEST(Gzip, ReadsSeveralMembersAndZeros) {
  NEEDS_ZLIB();
  const Bytes plain = idx(0x801, {3}, {1, 2, 3});
  for (std::size_t at = 0; at <= plain.size(); at++) {
    Bytes members = gzip(cut(plain, at));
    for (const Bytes& more : {gzip({}), gzip({plain.begin() + std::ptrdiff_t(at), plain.end()}), Bytes(at * 100)})
      members.insert(members.end(), more.begin(), more.end());
    EXPECT_EQ(gzip_idx_of(members, 1).values(), (Numbers{1, 2, 3})) << at;
  }
}

TEST(Idx, LabelsAreCheckedAgainstTheirRangeAndNumber) {
  DataFolder dir;
  save(dir / "x", idx(0x803, {4, 2, 2}, noise(16, 6)));
  auto read = [&](const Bytes& labels) {
    save(dir / "y", idx(0x801, {std::uint32_t(labels.size())}, labels));
    return idx_pictures("set", dir / "x", dir / "y", 10, remedy);
  };
  EXPECT_REFUSED(read({0, 9, 10, 3}), "y: is another file (label 10 at position 2, expected 0 to 9" + mend);
  EXPECT_REFUSED(read({0, 9, 3}), "x: is another file (4 pictures, expected 3 as there are labels in", mend);
  const Pictures p = read({0, 9, 3, 7});
  EXPECT_EQ(p.images.shape(), (Shape{4, 2, 2, 1}));
  EXPECT_EQ(p.labels.values(), (Numbers{0, 9, 3, 7}));
}

// ---- .npy -----------------------------------------------------------------------------------------------------------
TEST(Npy, ReadsEveryVersionAndWidth) {
  for (int version : {1, 2, 3})
    for (const char* type : {"|u1", "|i1", "<u2", "<i2", "=i4", "<u4", "<i8", "<u8"}) {
      const std::size_t width = std::size_t(type[2] - '0');
      Bytes elements(2 * width);
      elements[0] = 3;
      elements[width] = 100;
      const Tensor t = read_npy(*memory(npy(type, "(2,)", elements, version)));
      EXPECT_EQ(t.values(), (Numbers{3, 100})) << type;
      EXPECT_EQ(t.dtype(), std::string(type) == "|u1" ? DType::u8 : DType::i32);
    }
  EXPECT_EQ(read_npy(*memory(npy("<i2", "(1,)", {0xff, 0xff}))).item(), -1);
  EXPECT_EQ(read_npy(*memory(npy("<f4", "(2, 1, 0, 7)", {}))).shape(), (Shape{2, 1, 0, 7}));
}

TEST(Npy, RefusesWhatItCannotRead) {
  auto array = [](const char* type, const char* shape, const Bytes& elements, const char* fortran = "False") {
    return read_npy(*memory(npy(type, shape, elements, 1, fortran)));
  };
  EXPECT_REFUSED(array("|u1", "(2, 3, 3)", Bytes(19)), "goes on after");
  EXPECT_REFUSED(array("|u1", "(2, 3, 3)", Bytes(18), "True"), "Fortran order", "ascontiguousarray");
  EXPECT_REFUSED(array(">f4", "(2, 3, 3)", Bytes(72)), "'>f4'", "little-endian");
  EXPECT_REFUSED(array("<U5", "(2,)", Bytes(40)), "'U5'");
  EXPECT_REFUSED(array("<f8", "(2, 3, 3)", Bytes(144)), "'f8'", "astype");
  EXPECT_REFUSED(array("|u1", "(46116860184273879040, 3, 3)", Bytes(18)), "smaller sizes");
  EXPECT_REFUSED(array("|u1", "(1, 1, 1, 1, 1, 1, 1)", Bytes(1)), "at most six axes");
  EXPECT_REFUSED(array("|u1", "(400000000000000, 30000, 30000)", Bytes(18)), "truncated, or its header");
  EXPECT_REFUSED(array("<i8", "(2, 3000000, 3000000)", Bytes(18)), "truncated, or its header");
  EXPECT_REFUSED(array("<i8", "(1,)", {0, 0, 0, 0, 1, 0, 0, 0}), "element 0 is 4294967296");
  EXPECT_REFUSED(read_npy(*memory({'P', 'K', 3, 4, 0, 0, 0, 0, 0, 0, 0, 0})), "first bytes", "NUMPY", ".npz");
}

TEST(Npy, RefusesWhatAreNotPicturesAndLabels) {
  auto read = [](const Bytes& images, const Bytes& labels = npy("|u1", "(2,)", {0, 1})) {
    return npy_pictures("input", *memory(images), *memory(labels));
  };
  const Bytes good = npy("|u1", "(2, 3, 3)", Bytes(18));
  EXPECT_EQ(read(good).count(), 2);
  EXPECT_REFUSED(read(npy("|u1", "(2, 3, 4)", Bytes(24))), "[2,3,4]", "side");
  EXPECT_REFUSED(read(npy("|u1", "(2, 3, 8, 8)", Bytes(384))), "[2,3,8,8]", "channels");
  EXPECT_REFUSED(read(npy("|u1", "(2, 256)", Bytes(512))), "[2,256]");
  EXPECT_REFUSED(read(npy("<i2", "(2, 3, 3)", Bytes(36))), "of type i32, expected u8, or f32 from 0 to 1");
  EXPECT_REFUSED(read(npy("|u1", "(3, 3, 3)", Bytes(27))), "3 pictures, expected 2");
  EXPECT_REFUSED(read(npy("<f4", "(2, 1, 1)", {0, 0, 0, 0, 0, 0, 0, 0x40})), "element 1 is 2, expected 0 to 1", "u1");
  for (const Bytes& labels :
       {npy("<f4", "(2,)", Bytes(8)), npy("<i8", "(2, 1)", Bytes(16)), npy("<i8", "(2, 10)", Bytes(160))})
    EXPECT_REFUSED(read(good, labels), "expected whole numbers [N]");
  EXPECT_REFUSED(read(good, npy("|i1", "(2,)", {0, 255})), "label -1 at position 1, expected 0 to");
}

// ---- picture files --------------------------------------------------------------------------------------------------
TEST(Image, DecodesEveryFormat) {
  NEEDS_STB();
  const Image png = decode(small_png(), 3);
  ASSERT_EQ(png.pixels.size(), 4u * 5 * 3);
  for (int y = 0; y < 4; y++)
    for (int x = 0; x < 5; x++) {
      const std::uint8_t* pixel = &png.pixels[15 * y + 3 * x];
      EXPECT_EQ((std::vector<int>{pixel[0], pixel[1], pixel[2]}), (std::vector<int>{50 * x, 60 * y, 20 * (x + y)}));
    }
  EXPECT_EQ(decode(small_bmp(), 3).pixels, (Bytes{3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10}));
  EXPECT_EQ(decode(small_pnm(true), 1).pixels, (Bytes{0, 10, 20, 30, 40, 50}));
  EXPECT_FALSE(decode(small_pnm(false), 3).grey);
  const Image jpeg = decode(small_jpeg(), 3);
  EXPECT_TRUE(jpeg.grey);
  EXPECT_EQ((std::vector<std::int64_t>{jpeg.height, jpeg.width}), (std::vector<std::int64_t>{7, 9}));
  for (const Bytes& good : {small_jpeg(), small_png(), small_bmp(), small_pnm(true)}) {
    Bytes longer = good;  // bytes after the end are allowed
    longer.insert(longer.end(), {0, 1, 0xff, 3});
    EXPECT_EQ(decode(longer, 3).pixels, decode(good, 3).pixels);
  }
}

Bytes text(const std::string& t) { return {t.begin(), t.end()}; }

TEST(Image, SizesThatCannotBeAreRefusedBeforeMemoryIsTaken) {
  NEEDS_STB();
  Bytes jpeg = small_jpeg();
  jpeg[94] = jpeg[96] = 0x3f;  // height 0x3f07
  EXPECT_REFUSED(decode(jpeg, 3), "pixels, more than 171 bytes can hold");
  Bytes png = small_png();  // 100000 × 100000, with the checksum of that
  const Bytes header = {0x00, 0x01, 0x86, 0xa0, 0x00, 0x01, 0x86, 0xa0, 8, 2, 0, 0, 0, 0x27, 0x30, 0x9c, 0x9f};
  std::copy(header.begin(), header.end(), png.begin() + 16);
  EXPECT_REFUSED(decode(png, 3), "is damaged (or of a kind that is not read: too large");
  EXPECT_REFUSED(decode(text("P5 16000 16000 255\n"), 3), "can hold");
  Bytes bmp = small_bmp();  // cut, and the header says 0 bytes, as that of some programs does
  bmp.resize(bmp.size() - 4);
  std::fill_n(bmp.begin() + 2, 4, std::uint8_t(0));
  EXPECT_REFUSED(decode(bmp, 3), "truncated after");
  bmp[30] = 1;
  EXPECT_REFUSED(decode(bmp, 3), "of a kind that is not read: BMP RLE");
  EXPECT_REFUSED(decode(text("P5 1 1 55\n-"), 1), "largest value is 55, expected 255");  // stb would not scale it
  // There stb_image would read beyond its memory
  EXPECT_REFUSED(decode(text("P5 1 1 65535\n--"), 3), "largest value is 65535");
}

TEST(Image, KindsOfJpegThatAreNotReadAreRefused) {
  NEEDS_STB();
  Bytes jpeg = small_jpeg();
  const Bytes frame = {0xff, 0xc0};
  const auto at = std::search(jpeg.begin(), jpeg.end(), frame.begin(), frame.end());
  ASSERT_NE(at, jpeg.end());
  at[4] = 12;  // bits a channel
  EXPECT_REFUSED(decode(jpeg, 3), "is damaged (or of a kind that is not read: only 8-bit");
  at[4] = 8;
  for (std::uint8_t arithmetic_or_lossless : {0xc9, 0xc3}) {
    at[1] = arithmetic_or_lossless;
    EXPECT_REFUSED(decode(jpeg, 3), "is damaged (or of a kind that is not read: ");
  }
}

// With Adobe's marker and without it, the inks are those that Pillow sees.
TEST(Image, FourChannelsAreCmyk) {
  NEEDS_STB();
  const Bytes marked = cmyk_jpeg();
  Bytes bare = marked;
  bare.erase(bare.begin() + 2, bare.begin() + 18);
  for (const Bytes& file : {marked, bare}) {
    const Image image = decode(file, 3);
    for (int k = 0; k < 3; k++) EXPECT_NEAR(image.pixels[k], (std::vector{47, 165, 208})[k], 2) << k;
  }
}

TEST(Image, SquaresAreCentredAndAveraged) {
  NEEDS_STB();
  Image wide{2, 4, 1, {0, 10, 20, 30, 40, 50, 60, 70}};
  std::uint8_t out[4];
  fit_square(wide, 2, out);
  EXPECT_EQ((Bytes{out[0], out[1], out[2], out[3]}), (Bytes{10, 20, 50, 60}));
  fit_square(wide, 1, out);
  EXPECT_NEAR(out[0], 35, 1);
  Image flat{30, 20, 3, Bytes(1800, 77)};
  Bytes big(40 * 40 * 3);
  fit_square(flat, 40, big.data());
  EXPECT_EQ(big, Bytes(big.size(), 77));
  for (auto [from, side] : {std::pair{45, 32}, {300, 224}}) {  // an assertion of stb's failed at such sizes
    Bytes small(std::size_t(side * side));
    fit_square({from, from, 1, Bytes(std::size_t(from * from), 200)}, side, small.data());
    EXPECT_EQ(small, Bytes(small.size(), 200)) << from;
  }
}

// ---- real files, where they are ($TANDEM_DATA) ----------------------------------------------------------------------
Bytes load(const fs::path& path) { return text(contents(path)); }

TEST(RealFiles, DamagedIdxAndCifarFilesAreRefused) {
  NEEDS_ZLIB();
  const char* root = std::getenv("TANDEM_DATA");
  const fs::path there = root ? root : "", fashion = there / "fashion-mnist", cifar = there / "cifar-10-batches-bin";
  if (!root || !fs::exists(fashion) || !fs::exists(cifar)) GTEST_SKIP() << "no data in $TANDEM_DATA";
  const fs::path compressed = fashion / "t10k-labels-idx1-ubyte.gz";
  const Format gz{"gzip", load(compressed), [](const Bytes& b) { return gzip_idx_of(b, 1).values(); }};
  const Format plain{"IDX", open_bytes(compressed, "").all(), [](const Bytes& b) { return idx_of(b, 1).values(); }};
  const Format records{"CIFAR", cut(load(cifar / "test_batch.bin"), 1000 * 3073),
                       [](const Bytes& b) { return cifar_of(*memory(b), 1000); }};
  for (const Format* f : {&gz, &plain, &records}) {
    for (std::size_t part = 0; part < 8; part++)
      EXPECT_TRUE(refuses(*f, cut(f->good, f->good.size() * part / 8))) << f->name;
    EXPECT_TRUE(refuses(*f, cut(f->good, f->good.size() - 1))) << f->name;
    Bytes longer = f->good;
    longer.push_back(1);
    EXPECT_TRUE(refuses(*f, longer)) << f->name;
  }
  auto refused_flips = [](const Format& f, std::size_t bytes, int flips) {
    int seen = 0;
    const Philox random(1, Stream::test);
    for (int k = 0; k < flips; k++) {
      const std::size_t bit = random.word(std::uint32_t(k)) % (8 * bytes);
      seen += refuses(f, flipped(f.good, bit));
    }
    return seen;
  };
  EXPECT_GE(refused_flips(gz, gz.good.size(), 400), 360);    // the checksum sees every bit, wherever it lies
  EXPECT_GE(refused_flips(plain, 8, 64), 57);                // the header, which has no spare bit
  for (std::size_t record = 0; record < 1000; record += 37)  // pixels have no checksum; a label has bounds
    EXPECT_TRUE(refuses(records, flipped(records.good, record * 3073 * 8 + 6))) << record;
}

TEST(RealFiles, DamagedJpegsAreRefusedOrPictures) {
  NEEDS_STB();
  const char* root = std::getenv("TANDEM_DATA");
  if (!root || !fs::exists(fs::path(root) / "cifar10-jpeg")) GTEST_SKIP() << "no $TANDEM_DATA/cifar10-jpeg";
  const Bytes good = load(fs::path(root) / "cifar10-jpeg/test/bird/0338.jpg");
  ASSERT_EQ(decode(good, 3).width, 32);
  for (std::size_t size = 0; size < good.size(); size += 1 + good.size() / 200)
    EXPECT_REFUSED(decode(cut(good, size), 3), "a picture: is", "mend it");
  // A JPEG has no checksum: a flipped bit must be refused or give a picture of the same size.
  for (std::size_t bit = 0; bit < 8 * good.size(); bit += 7) {
    try {
      const Image image = decode(flipped(good, bit), 3);
      EXPECT_EQ(image.pixels.size(), std::size_t(3 * image.height * image.width));
    } catch (const UsageError&) {}
  }
}

}  // namespace
}  // namespace tandem::test
