// CIFAR-100, MNIST, .npy, picture files and folders of them, sets made of arrays: what is read, and what is refused
// how.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "datasets/cifar.h"
#include "datasets/folder.h"
#include "datasets/idx.h"
#include "datasets/image.h"
#include "datasets/loader.h"
#include "datasets/mnist.h"
#include "datasets/npy.h"
#include "tests/fuzz/memory_source.h"
#include "tests/fuzz/targets.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

namespace fs = std::filesystem;

void save(const fs::path& path, const Bytes& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
}

Bytes load(const fs::path& path) {
  const std::string text = contents(path);
  return {text.begin(), text.end()};
}

Image decode(const Bytes& bytes, int channels) {
  MemorySource source(bytes, "a picture", Advice("put it there", "mend it"));
  return decode_image(source, channels);
}

// image_none.cpp refuses every picture.
#define NEEDS_STB()                                                                                            \
  do {                                                                                                         \
    try {                                                                                                      \
      decode(small_png(), 3);                                                                                  \
    } catch (const UsageError& e) {                                                                            \
      if (std::string(e.what()).find("without stb") != std::string::npos) GTEST_SKIP() << "built without stb"; \
    }                                                                                                          \
  } while (0)

// ---- CIFAR-100 and MNIST --------------------------------------------------------------------------------------------
Bytes cifar100_file(int records) {
  Bytes b;
  for (int i = 0; i < records; i++) {
    b.push_back(std::uint8_t(i % 20));
    b.push_back(std::uint8_t(99 - i));
    for (int k = 0; k < 3072; k++) b.push_back(std::uint8_t(k / 1024 * 80 + (k + i) % 32));
  }
  return b;
}

TEST(Cifar100, HasFineAndCoarseLabels) {
  TemporaryFolder dir;
  save(dir.file("train.bin"), cifar100_file(5));
  save(dir.file("test.bin"), cifar100_file(3));
  const fs::path folder = fs::path(dir.file("train.bin")).parent_path();
  const Dataset fine = cifar100(folder, CifarLabels::fine, 5, 3), coarse = cifar100(folder, CifarLabels::coarse, 5, 3);
  EXPECT_EQ(fine.train.images.shape(), (Shape{5, 32, 32, 3}));
  EXPECT_EQ(fine.test.count(), 3);
  EXPECT_EQ(fine.train.labels.values(), (std::vector<double>{99, 98, 97, 96, 95}));
  EXPECT_EQ(coarse.train.labels.values(), (std::vector<double>{0, 1, 2, 3, 4}));
  EXPECT_EQ(fine.train.class_names.size(), 100u);
  EXPECT_EQ(fine.train.class_names[99], "worm");
  EXPECT_EQ(coarse.classes(), 20);
  EXPECT_EQ(coarse.train.class_names[19], "vehicles_2");
  EXPECT_EQ(fine.train.images.data<std::uint8_t>()[32 * 3 * 2 + 3 * 4 + 1], 80 + 4);  // row 2, column 4, green
  EXPECT_NO_THROW(check(fine.train));
  EXPECT_NO_THROW(check(fine.test));
  EXPECT_EQ(fine.train.mean, fine.test.mean);

  Bytes bad = cifar100_file(5);
  bad[3074] = 20;
  save(dir.file("train.bin"), bad);
  EXPECT_TRUE(refused([&] { cifar100(folder, CifarLabels::fine, 5, 3); },
                      {"train.bin", "label 20 in record 1, expected 0 to 19", "get-data.sh cifar-100"}));
  bad.resize(4 * 3074);
  save(dir.file("train.bin"), bad);
  EXPECT_TRUE(refused([&] { cifar100(folder, CifarLabels::fine, 5, 3); }, {"truncated after 12296", "expected 15370"}));
}

TEST(Mnist, IsTheOtherSetOfTheSameFiles) {
  TemporaryFolder dir;
  for (const char* part : {"train", "t10k"}) {
    Bytes images = {0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28}, labels = {0, 0, 8, 1, 0, 0, 0, 2, 7, 2};
    images.resize(images.size() + 2 * 784, 9);
    images.back() = 255;
    save(dir.file(std::string("mnist/") + part + "-images-idx3-ubyte"), images);
    save(dir.file(std::string("mnist/") + part + "-labels-idx1-ubyte"), labels);
  }
  const fs::path root = fs::path(dir.file("mnist")).parent_path();
  const Dataset d = load_dataset("mnist", root);
  EXPECT_EQ(d.train.labels.values(), (std::vector<double>{7, 2}));
  EXPECT_EQ(d.train.class_names[7], "7");
  EXPECT_NEAR(d.train.mean[0], (9.0 * 1567 + 255) / 1568 / 255, 1e-6);
  EXPECT_NO_THROW(check(d.test));
  EXPECT_TRUE(refused([&] { load_dataset("fashion-mnist", root / "mnist"); }, {"fashion-mnist", "was not found"}));
}

TEST(LoadDataset, KnowsBothSpellingsAndPaths) {
  EXPECT_EQ(load_dataset("synthetic-mnist").name, "synthetic-mnist");
  EXPECT_TRUE(refused([] { load_dataset("cifar100", "/nowhere"); },
                      {"cifar-100 (train.bin) was not found", "get-data.sh cifar-100"}));
  EXPECT_TRUE(refused([] { load_dataset("pictures/of/cats"); },
                      {"no data set called pictures/of/cats", "cifar-100-coarse", "folder"}));
}

// ---- arrays ---------------------------------------------------------------------------------------------------------
TEST(DatasetOf, HoldsBackATenth) {
  Bytes images(50 * 4 * 4 * 2);
  std::vector<std::int32_t> labels(50);
  for (std::size_t i = 0; i < images.size(); i++) images[i] = std::uint8_t(i / 32);
  for (int i = 0; i < 50; i++) labels[std::size_t(i)] = i % 3;
  const Dataset d = Dataset::of(images, {50, 4, 4, 2}, labels, "mine");
  EXPECT_EQ(d.train.count(), 45);
  EXPECT_EQ(d.test.count(), 5);
  EXPECT_EQ(d.classes(), 3);
  EXPECT_EQ(d.channels(), 2);
  EXPECT_EQ(d.side(), 4);
  for (std::int64_t i = 0; i < 5; i++)  // picture and label stay together
    EXPECT_EQ(d.test.images.data<std::uint8_t>()[i * 32] % 3, d.test.labels.data<std::int32_t>()[i]);
  const auto about = description(d.train);
  EXPECT_EQ(about.at("pictures"), "mine train");
  EXPECT_EQ(about.at("classes"), "0\n1\n2");
  EXPECT_EQ(about.at("side"), "4");
  EXPECT_EQ(std::stof(about.at("mean")), d.train.mean[0]);
  EXPECT_TRUE(refused([&] { Dataset::of(Bytes(32), {1, 4, 4, 2}, std::vector<std::int32_t>{0}); }, {"at least 2"}));
}

TEST(Npy, ReadsPicturesAndLabels) {
  TemporaryFolder dir;
  Bytes pixels(20 * 9), labels;
  for (std::size_t i = 0; i < pixels.size(); i++) pixels[i] = std::uint8_t(i);
  for (int i = 0; i < 20; i++) labels.insert(labels.end(), {std::uint8_t(i % 4), 0, 0, 0, 0, 0, 0, 0});
  save(dir.file("a.npy"), npy("|u1", "(20, 3, 3)", pixels));
  save(dir.file("a_labels.npy"), npy("<i8", "(20,)", labels));
  const Dataset one = load_dataset(dir.file("a.npy"));
  EXPECT_EQ(one.train.images.shape(), (Shape{18, 3, 3, 1}));
  EXPECT_EQ(one.test.count(), 2);
  EXPECT_EQ(one.classes(), 4);

  Bytes floats;  // 0, 0.5, 1, 0 …
  for (int i = 0; i < 2 * 2 * 2 * 3; i++) {
    const float v = float(i % 3) / 2;
    const auto* raw = reinterpret_cast<const std::uint8_t*>(&v);
    floats.insert(floats.end(), raw, raw + 4);
  }
  for (int version : {1, 2, 3})
    for (const char* part : {"train", "test"}) {
      save(dir.file(std::string("x_") + part + ".npy"), npy("<f4", "(2, 2, 2, 3)", floats, version));
      save(dir.file(std::string("y_") + part + ".npy"), npy("|u1", "(2,)", {1, 0}));
    }
  const Dataset two = load_dataset(dir.file("x_train.npy"));
  EXPECT_EQ(two.test.count(), 2);
  EXPECT_EQ(two.train.labels.values(), (std::vector<double>{1, 0}));
  EXPECT_EQ(two.train.images.slice(0, 1).values(),
            (std::vector<double>{0, 128, 255, 0, 128, 255, 0, 128, 255, 0, 128, 255}));
}

TEST(Npy, RefusesWhatItCannotRead) {
  TemporaryFolder dir;
  const std::string x = dir.file("a.npy");
  save(dir.file("a_labels.npy"), npy("<i8", "(2,)", Bytes(16)));
  auto expect = [&](const Bytes& file, std::initializer_list<std::string> parts) {
    save(x, file);
    EXPECT_TRUE(refused([&] { load_dataset(x); }, parts));
  };
  // The line of NumPy that an error gives, with the array where the braces are.
  auto said = [](const std::string& path, std::string line) {
    line.replace(line.find("{}"), 2, "numpy.load('" + path + "')");
    return "numpy.save('" + path + "', " + line + ")";
  };
  const Bytes good = npy("|u1", "(2, 3, 3)", Bytes(18));
  for (std::size_t size = 0; size < good.size(); size++) {
    Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
    expect(cut, {x, "write it again with numpy.save"});
  }
  Bytes longer = good;
  longer.push_back(0);
  expect(longer, {"goes on after"});
  expect(npy("|u1", "(2, 3, 3)", Bytes(18), 1, "True"), {"Fortran order", "ascontiguousarray"});
  expect(npy(">f4", "(2, 3, 3)", Bytes(72)), {"'>f4'"});
  expect(npy("<f8", "(2, 3, 3)", Bytes(144)), {"'<f8'", "astype"});
  expect(npy("|u1", "(46116860184273879040, 3, 3)", Bytes(18)), {"a smaller size"});
  expect(npy("|u1", "(400000000000000, 30000, 30000)", Bytes(18)), {"too many elements"});
  expect(npy("|u1", "(2, 3000000, 3000000)", Bytes(18)), {"truncated, or its header"});
  expect(npy("|u1", "(2, 3, 4)", Bytes(24)), {"[2,3,4]", "side"});
  expect(npy("|u1", "(3, 3, 3)", Bytes(27)), {"3 pictures, expected 2", "a_labels.npy"});
  expect(npy("<f4", "(2, 1, 1)", {0, 0, 0, 0, 0, 0, 0, 0x40}), {"element 1 is 2, expected 0 to 1"});
  for (const auto& [type, shape, line] : {std::tuple{"<f8", "(2, 3, 3)", "{}.astype('<f4')"},
                                          {"<i2", "(2, 3, 3)", "{}.astype('u1')"},
                                          {"|i1", "(2, 3, 3)", "{}.astype('u1')"},
                                          {"|u1", "(2, 3, 8, 8)", "{}.transpose(0, 2, 3, 1)"},
                                          {"|u1", "(2, 256)", "{}.reshape(-1, 16, 16)"},
                                          {"<f4", "(2, 3072)", "{}.reshape(-1, 32, 32, 3)"}})
    expect(npy(type, shape, Bytes(10)), {said(x, line)});
  expect(npy("<f4", "(2, 1, 1)", {0, 0, 0, 0, 0, 0, 0, 0x40}), {said(x, "{}.astype('u1')")});
  for (const auto& [type, shape, line] : {std::tuple{"<f8", "(2,)", "{}.astype('<i8')"},
                                          {">i8", "(2,)", "{}.astype('<i8')"},
                                          {"<i8", "(2, 1)", "{}.reshape(-1)"},
                                          {"<f4", "(2, 1)", "{}.reshape(-1).astype('<i8')"},
                                          {"<f8", "(2, 10)", "{}.argmax(1)"},
                                          {"<U5", "(2,)", "numpy.unique({}, return_inverse=True)[1]"}}) {
    save(dir.file("a_labels.npy"), npy(type, shape, Bytes(10)));
    expect(good, {said(dir.file("a_labels.npy"), line)});
  }
  save(dir.file("a_labels.npy"), npy("<i8", "(2,)", {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  expect(good, {"element 0 is 4294967296"});
  auto labelled = [&](Bytes labels, std::initializer_list<std::string> parts) {
    save(dir.file("a_labels.npy"), npy("|u1", "(2,)", labels));
    expect(good, parts);
  };
  labelled({0, 0}, {"a_labels.npy: all labels are 0"});
  labelled({1, 2}, {"no picture has the label 0, the largest is 2", "numpy.unique"});
  labelled({0, 2}, {"no picture has the label 1"});
  expect({'P', 'K', 3, 4, 0, 0, 0, 0, 0, 0, 0, 0}, {"first bytes", "NUMPY"});
  fs::remove(dir.file("a_labels.npy"));
  expect(good, {"a_labels.npy: there is no such file", "save the labels of"});
}

// ---- picture files --------------------------------------------------------------------------------------------------
TEST(Image, DecodesEveryFormat) {
  NEEDS_STB();
  const Image png = decode(small_png(), 3);
  ASSERT_EQ(png.pixels.size(), 4u * 5 * 3);
  for (int y = 0; y < 4; y++)
    for (int x = 0; x < 5; x++)
      EXPECT_EQ((std::vector<int>{png.pixels[std::size_t(15 * y + 3 * x)], png.pixels[std::size_t(15 * y + 3 * x + 1)],
                                  png.pixels[std::size_t(15 * y + 3 * x + 2)]}),
                (std::vector<int>{50 * x, 60 * y, 20 * (x + y)}));
  EXPECT_EQ(decode(small_bmp(), 3).pixels, (Bytes{3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10}));
  EXPECT_EQ(decode(small_pnm(true), 1).pixels, (Bytes{0, 10, 20, 30, 40, 50}));
  EXPECT_FALSE(decode(small_pnm(false), 3).grey);
  const Image jpeg = decode(small_jpeg(), 3);
  EXPECT_TRUE(jpeg.grey);
  EXPECT_EQ((std::vector<std::int64_t>{jpeg.height, jpeg.width}), (std::vector<std::int64_t>{7, 9}));
}

TEST(Image, RefusesEveryTruncation) {
  NEEDS_STB();
  for (const Bytes& good : {small_jpeg(), small_png(), small_bmp(), small_pnm(true), small_pnm(false)})
    for (std::size_t size = 0; size < good.size(); size++) {
      const Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
      EXPECT_TRUE(refused([&] { decode(cut, 3); }, {"a picture: is", "mend it"})) << size << " of " << good.size();
    }
}

TEST(Image, EveryFlippedBitOfAPngIsNoticed) {
  NEEDS_STB();
  for (std::size_t i = 0; i < small_png().size() * 8; i++) {
    Bytes bad = small_png();
    bad[i / 8] ^= std::uint8_t(1u << i % 8);
    EXPECT_TRUE(refused([&] { decode(bad, 3); }, {"mend it"})) << "bit " << i;
  }
}

TEST(Image, SizesThatCannotBeAreRefusedBeforeMemoryIsTaken) {
  NEEDS_STB();
  Bytes jpeg = small_jpeg();
  jpeg[94] = 0x3f;  // height 0x3f07
  jpeg[96] = 0x3f;
  EXPECT_TRUE(refused([&] { decode(jpeg, 3); }, {"pixels, more than 171 bytes can hold"}));
  Bytes png = small_png();  // 100000 × 100000, with the checksum of that
  const Bytes header = {0x00, 0x01, 0x86, 0xa0, 0x00, 0x01, 0x86, 0xa0, 8, 2, 0, 0, 0, 0x27, 0x30, 0x9c, 0x9f};
  std::copy(header.begin(), header.end(), png.begin() + 16);
  EXPECT_TRUE(refused([&] { decode(png, 3); }, {"is another file (more than 16384 pixels"}));
  Bytes dim = small_pnm(true);  // stb would not scale its values
  const std::string_view text(reinterpret_cast<const char*>(dim.data()), dim.size());
  dim[text.find("255")] = '0';
  EXPECT_TRUE(refused([&] { decode(dim, 1); }, {"largest value is 55, expected 255"}));
  Bytes pnm = {'P', '5', ' ', '1', '6', '0', '0', '0', ' ', '1', '6', '0', '0', '0', ' ', '2', '5', '5', '\n'};
  EXPECT_TRUE(refused([&] { decode(pnm, 3); }, {"can hold"}));
  Bytes deep = {'P', '5', ' ', '1', ' ', '1', ' ', '6', '5', '5', '3', '5', '\n', 0, 0};
  EXPECT_TRUE(refused([&] { decode(deep, 3); }, {"16 bits"}));  // stb_image would read beyond its memory
}

TEST(Image, KindsOfJpegThatAreNotReadAreNotCalledDamaged) {
  NEEDS_STB();
  Bytes jpeg = small_jpeg();
  const Bytes frame = {0xff, 0xc0};
  const auto at = std::search(jpeg.begin(), jpeg.end(), frame.begin(), frame.end());
  ASSERT_NE(at, jpeg.end());
  at[4] = 12;
  EXPECT_TRUE(refused([&] { decode(jpeg, 3); }, {"is another file (a JPEG of 12 bits a channel"}));
  at[1] = 0xc9;
  EXPECT_TRUE(refused([&] { decode(jpeg, 3); }, {"is another file (an arithmetic-coded JPEG"}));
  at[1] = 0xc3;
  EXPECT_TRUE(refused([&] { decode(jpeg, 3); }, {"is another file (a lossless or hierarchical JPEG"}));
}

// With Adobe's marker and without it, the inks are those that Pillow sees.
TEST(Image, FourChannelsAreCmyk) {
  NEEDS_STB();
  const Bytes marked = cmyk_jpeg();
  Bytes bare = marked;
  bare.erase(bare.begin() + 2, bare.begin() + 18);
  for (const Bytes& file : {marked, bare}) {
    const Image image = decode(file, 3);
    for (int k = 0; k < 3; k++)
      EXPECT_NEAR(image.pixels[std::size_t(k)], (std::vector{47, 165, 208})[std::size_t(k)], 2) << k;
  }
}

TEST(Image, BytesAfterTheEndAreAllowed) {
  NEEDS_STB();
  for (const Bytes& good : {small_jpeg(), small_png(), small_bmp(), small_pnm(true)}) {
    Bytes longer = good;
    longer.insert(longer.end(), {0, 1, 0xff, 3});
    EXPECT_EQ(decode(longer, 3).pixels, decode(good, 3).pixels);
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
}

Bytes square_pnm(int side, int value, bool grey = false) {
  const std::string head =
      std::string(grey ? "P5 " : "P6 ") + std::to_string(side) + " " + std::to_string(side) + " 255\n";
  Bytes b(head.begin(), head.end());
  b.resize(b.size() + std::size_t(side * side * (grey ? 1 : 3)), std::uint8_t(value));
  return b;
}

TEST(PictureFolder, ClassesAreFolders) {
  NEEDS_STB();
  TemporaryFolder dir;
  for (int i = 0; i < 10; i++) {
    save(dir.file("all/cat/" + std::to_string(i) + ".ppm"), square_pnm(6, 10 + i));
    save(dir.file("all/dog/deep/" + std::to_string(i) + ".PPM"), square_pnm(6, 110 + i));
  }
  save(dir.file("all/cat/notes.txt"), {1, 2, 3});
  const Dataset d = load_dataset(dir.file("all"));
  EXPECT_EQ(d.name, "all");
  EXPECT_EQ(d.train.class_names, (std::vector<std::string>{"cat", "dog"}));
  EXPECT_EQ(d.train.images.shape(), (Shape{18, 6, 6, 3}));
  EXPECT_EQ(d.test.count(), 2);
  for (const Pictures* p : {&d.train, &d.test})
    for (std::int64_t i = 0; i < p->count(); i++)
      EXPECT_EQ(p->images.data<std::uint8_t>()[i * 108] >= 100, p->labels.data<std::int32_t>()[i]);
  EXPECT_EQ(load_dataset(dir.file("all")).train.images.values(), d.train.images.values());
  EXPECT_EQ(load_dataset(dir.file("all"), {}, {.size = 9}).side(), 9);
}

TEST(PictureFolder, TrainAndTestAreFolders) {
  NEEDS_STB();
  TemporaryFolder dir;
  const std::string all = dir.file("all");
  save(dir.file("all/train/0/a.pgm"), square_pnm(5, 1, true));
  save(dir.file("all/train/1/a.pgm"), square_pnm(5, 2, true));
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {"has train/ but neither val/ nor test/"}));
  save(dir.file("all/val/1/b.pgm"), square_pnm(5, 3, true));
  const Dataset d = load_dataset(all);
  EXPECT_EQ(d.channels(), 1);  // all are grey
  EXPECT_EQ(d.test.labels.values(), std::vector<double>{1});
  save(dir.file("all/val/2/b.pgm"), square_pnm(5, 3, true));
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {"all/val/2: there is no such class"}));
  fs::remove_all(dir.file("all/train"));
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {"has val/ but no train/", "all/val"}));
}

TEST(PictureFolder, BrokenPicturesAreRefusedOrCounted) {
  NEEDS_STB();
  TemporaryFolder dir;
  for (int i = 0; i < 20; i++)
    save(dir.file(std::string(i < 10 ? "all/cat/" : "all/dog/") + std::to_string(i) + ".ppm"), square_pnm(6, i));
  const std::string broken = dir.file("all/cat/3.ppm");
  Bytes cut = square_pnm(6, 3);
  cut.resize(40);
  save(broken, cut);
  const std::string all = dir.file("all");
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {broken, "is damaged (truncated after 40 bytes)", "--skip-broken"}));
  testing::internal::CaptureStderr();
  const Dataset d = load_dataset(all, {}, {.skip_broken = true});
  EXPECT_NE(testing::internal::GetCapturedStderr().find(
                "1 of 20 pictures left out that cannot be decoded, the first is " + broken),
            std::string::npos);
  EXPECT_EQ(d.train.count() + d.test.count(), 19);
  save(broken, square_pnm(7, 3));
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {"pixels, expected", "--size"}));
  EXPECT_EQ(load_dataset(all, {}, {.size = 4}).train.count(), 18);
  fs::create_directories(dir.file("empty"));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("empty")); }, {"holds no folders"}));
  fs::create_directories(dir.file("empty/cat"));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("empty")); }, {"single class, cat"}));
}

// As PyTorch's ImageFolder: at any depth, and no class without a picture; one class alone is the wrong folder.
TEST(PictureFolder, ClassesMustBeTwoAndHoldPictures) {
  NEEDS_STB();
  TemporaryFolder dir;
  for (const char* name : {"cat", "dog"}) save(dir.file(std::string("up/all/") + name + "/1.ppm"), square_pnm(6, 1));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("up")); }, {"single class, all", "did you mean", "up/all?"}));
  fs::create_directories(dir.file("up/all/eel/deep"));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("up/all")); }, {"up/all/eel: holds no pictures", "remove it"}));
  fs::remove_all(dir.file("up/all/eel"));  // two pictures are left, one of them to test with
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("up/all")); }, {"the class", "no picture to train on", "a tenth"}));
  for (int i = 0; i < 9; i++)
    for (const char* name : {"cat", "dog", "eel/deep/er"})
      save(dir.file(std::string("up/all/") + name + "/" + std::to_string(i) + ".ppm"), square_pnm(6, 1));
  EXPECT_EQ(load_dataset(dir.file("up/all")).classes(), 3);
  for (const char* name : {"train/0", "train/5", "val/5"})
    save(dir.file(std::string("gap/") + name + "/1.ppm"), square_pnm(6, 1));
  const Dataset gap = load_dataset(dir.file("gap"));
  EXPECT_EQ(gap.classes(), 2);
  EXPECT_EQ(gap.test.labels.values(), std::vector<double>{1});
  fs::create_directories(dir.file("gap/val/0"));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("gap")); }, {"gap/val/0: holds no pictures"}));
}

// What is beside the pictures, and how they are linked.
TEST(PictureFolder, NothingIsLeftOutOrMistakenInSilence) {
  NEEDS_STB();
  TemporaryFolder dir;
  const fs::path all = dir.file("all");
  for (int i = 0; i < 10; i++)
    for (const char* name : {"cat", "dog"}) save(all / name / (std::to_string(i) + ".ppm"), square_pnm(6, i));
  auto loaded = [&](const FolderOptions& options = {}) {
    testing::internal::CaptureStderr();
    const Dataset d = load_dataset(all, {}, options);
    return std::to_string(d.train.count() + d.test.count()) + " " + testing::internal::GetCapturedStderr();
  };
  for (const char* hidden : {"cat/.ipynb_checkpoints/1.ppm", "cat/deep/.thumbs/1.ppm", ".git/1.ppm", "cat/._1.ppm",
                             "__MACOSX/cat/1.ppm", "cat/__MACOSX/1.ppm"})
    save(all / hidden, square_pnm(6, 1));
  EXPECT_EQ(loaded(), "20 ");
  fs::rename(all / "cat", all / "%81");
  fs::rename(all / "dog", all / "\x81");
  EXPECT_TRUE(refused([&] { load_dataset(all); }, {"two classes are written %81"}));
  fs::rename(all / "%81", all / "cat");
  fs::rename(all / "\x81", all / "dog");
  for (const char* part : {"train/cat", "train/dog", "test/cat"})
    save(dir.file("parts") / fs::path(part) / "1.ppm", square_pnm(6, 1));
  save(dir.file("parts/beside.ppm"), square_pnm(6, 1));
  testing::internal::CaptureStderr();
  load_dataset(dir.file("parts"));
  const std::string parts = testing::internal::GetCapturedStderr();
  EXPECT_NE(parts.find("test/ has no pictures of 1 of the 2 classes, the first is dog"), parts.npos) << parts;
  EXPECT_NE(parts.find("1 pictures outside of the class folders"), parts.npos) << parts;
  save(all / "cat/1.webp", {1});
  save(all / "dog/2.WebP", {1});
  save(all / "notes", {1});
  save(all / "beside.ppm", square_pnm(6, 1));
  EXPECT_EQ(
      loaded(),
      "20 " + all.string() +
          ": files that are not read: 2 .webp, 1 pictures outside of the class folders, 1 without an extension\n");
  for (const char* file : {"cat/1.webp", "dog/2.WebP", "notes", "beside.ppm"}) fs::remove(all / file);
  for (const char* name : {"jfif", "jpe", "JPEG", "pnm"})
    save(all / "cat" / (std::string("b.") + name), square_pnm(6, 1));
  EXPECT_EQ(loaded(), "24 ");

  save(dir.file("store/1.ppm"), square_pnm(6, 1));
  fs::create_directory_symlink(dir.file("store"), all / "cat/linked");
  fs::create_symlink(dir.file("store/1.ppm"), all / "dog/linked.ppm");
  EXPECT_EQ(loaded(), "26 ");
  fs::create_directory_symlink(all, dir.file("store/up"));
  EXPECT_TRUE(refused([&] { loaded(); }, {"is a link to a folder that it lies in"}));
  testing::internal::GetCapturedStderr();
  fs::remove(dir.file("store/up"));
  fs::create_symlink("/nowhere/annex", all / "dog/gone.ppm");
  EXPECT_TRUE(refused([&] { loaded(); }, {"dog/gone.ppm: is a link to /nowhere/annex", "--skip-broken"}));
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(loaded({.skip_broken = true}).substr(0, 3), "26 ");
  fs::remove(all / "dog/gone.ppm");
  fs::create_symlink("/nowhere/eel", all / "eel");
  EXPECT_TRUE(refused([&] { loaded(); }, {"all/eel: is a link to /nowhere/eel"}));
  testing::internal::GetCapturedStderr();
  fs::remove(all / "eel");
  for (const auto& [name, written] : {std::pair{"M\x81nchen", "M%81nchen"},
                                      {"two\nlines", "two%0Alines"},
                                      {"a\x7f", "a%7F"},
                                      {"\xc3\xa9\"',\\", "\xc3\xa9\"',\\"}}) {
    fs::rename(all / "dog", all / name);
    const auto names = load_dataset(all).train.class_names;
    EXPECT_EQ(std::count(names.begin(), names.end(), written), 1) << written;
    fs::rename(all / name, all / "dog");
  }
}

TEST(PictureFolder, ASplitHasManySpellings) {
  NEEDS_STB();
  TemporaryFolder dir;
  int next = 0;
  // The classes of the pictures in these folders, which hold two classes each; and what is said.
  auto loaded = [&](const std::vector<std::string>& folders) {
    const std::string all = dir.file("all" + std::to_string(next++));
    for (const std::string& folder : folders)
      for (const char* name : {"/x/1.ppm", "/y/1.ppm", "/y/2.ppm"})
        save(fs::path(all) / (folder + name), square_pnm(6, 1));
    testing::internal::CaptureStderr();
    std::string classes;
    try {
      for (const std::string& name : load_dataset(all).train.class_names) classes += name + " ";
    } catch (const UsageError& e) {
      classes = e.what();
    }
    return classes + testing::internal::GetCapturedStderr();
  };
  for (const char* training : {"train", "Training", "TRAIN", "training_set", "training_data", "train_images", "trn"})
    for (const char* test : {"test", "Testing", "val", "Valid", "validation", "test set", "TESTSET", "dev", "tst2"})
      EXPECT_EQ(loaded({training, test}), "x y ");
  EXPECT_NE(loaded({"Train", "test", "val"}).find("x y"), std::string::npos);
  EXPECT_NE(loaded({"Train", "test", "val"}).find(": val/ is not used (--val"), std::string::npos);
  EXPECT_NE(loaded({"train", "test", "extra"}).find(": extra/ is not used"), std::string::npos);
  EXPECT_NE(loaded({"train", "training", "test"}).find("train/ and training/, which mean the same"), std::string::npos);
  EXPECT_NE(loaded({"train", "val", "Validation"}).find("which mean the same"), std::string::npos);
  EXPECT_NE(loaded({"Test", "Val"}).find("has Test/ but no train/"), std::string::npos);
  EXPECT_NE(loaded({"valid", "invalid"}).find("invalid/ and valid/ have folders of the same names: call"),
            std::string::npos);
  EXPECT_NE(loaded({"left", "right"}).find("left right "), std::string::npos);
  EXPECT_NE(loaded({"left", "right"}).find("same names and are taken for classes"), std::string::npos);
  EXPECT_NE(loaded({"bus", "train", "tram", "x/y"}).find("train/ is taken for a class, beside bus/, tram/"),
            std::string::npos);
}

TEST(LoadDataset, OptionsWithoutUseAreNamed) {
  TemporaryFolder dir;
  EXPECT_TRUE(refused([] { load_dataset("synthetic-mnist", {}, {.size = 64}); }, {"synthetic-mnist", "--size"}));
  EXPECT_TRUE(refused([] { load_dataset("mnist", "synthetic", {.skip_broken = true}); }, {"--skip-broken"}));
  save(dir.file("a.npy"), npy("|u1", "(2, 3, 3)", Bytes(18)));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("a.npy"), {}, {.size = 64}); }, {"a.npy", "--size"}));
  EXPECT_TRUE(refused([&] { load_dataset(dir.file("a.npy"), "/data"); }, {"a.npy", "--data /data"}));
  EXPECT_TRUE(refused([] { load_dataset("cifar-100", "synthetic"); }, {"in place of cifar-100", "only of mnist"}));
}

// ---- real files, where they are ($TANDEM_DATA) ----------------------------------------------------------------------
// Reads a damaged copy of a file: it must be refused with its path and what mends it, or give just what the good one
// gives (a bit of a header may mean nothing). Returns whether it was refused.
template <class Read>
bool refuses(const fs::path& copy, const Bytes& bytes, const std::vector<double>& good, const Read& read) {
  save(copy, bytes);
  try {
    EXPECT_EQ(read(copy), good);
    return false;
  } catch (const UsageError& e) {
    const std::string said = e.what();
    EXPECT_TRUE(said.starts_with(copy.string() + ":") && said.find("move it away and run") != said.npos) << said;
    return true;
  }
}

template <class Read>
void expect_damage_to_be_seen(const fs::path& file, const fs::path& copy, const Read& read, std::size_t from,
                              std::size_t to, int flips) {
  const Bytes whole = load(file);
  const std::vector<double> good = read(file);
  for (std::size_t part = 0; part < 8; part++)
    EXPECT_TRUE(refuses(copy, {whole.begin(), whole.begin() + std::ptrdiff_t(whole.size() * part / 8)}, good, read));
  EXPECT_TRUE(refuses(copy, {whole.begin(), whole.end() - 1}, good, read));
  Bytes longer = whole;
  longer.push_back(1);
  EXPECT_TRUE(refuses(copy, longer, good, read));
  int seen = 0;
  Philox random(1, Stream::test);
  for (int k = 0; k < flips; k++) {
    Bytes bad = whole;
    const std::size_t bit = 8 * from + random.word(std::uint32_t(k)) % (8 * (std::min(to, whole.size()) - from));
    bad[bit / 8] ^= std::uint8_t(1u << bit % 8);
    seen += refuses(copy, bad, good, read);
  }
  EXPECT_GE(seen, flips * 9 / 10) << file;
}

TEST(RealFiles, DamagedIdxAndCifarFilesAreRefused) {
  const char* root = std::getenv("TANDEM_DATA");
  TemporaryFolder dir;
  const fs::path there = root ? root : "", fashion = there / "fashion-mnist", cifar = there / "cifar-10-batches-bin";
  if (!root || !fs::exists(fashion) || !fs::exists(cifar)) GTEST_SKIP() << "no data in $TANDEM_DATA";
  const std::string source = "run datasets/get-data.sh";
  auto idx = [&](int rank) { return [&, rank](const fs::path& p) { return read_idx(p, rank, source).values(); }; };
  try {  // compressed: the checksum sees every bit, wherever it lies
    expect_damage_to_be_seen(fashion / "t10k-labels-idx1-ubyte.gz", dir.file("labels.gz"), idx(1), 0, SIZE_MAX, 400);
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("zlib"), std::string::npos) << e.what();
    GTEST_SKIP() << "built without zlib";
  }
  auto plain = open_bytes(fashion / "t10k-labels-idx1-ubyte.gz", source)->read_all();
  save(dir.file("labels"), plain);
  // The header, which has no spare bit
  expect_damage_to_be_seen(dir.file("labels"), dir.file("copy"), idx(1), 0, 8, 64);

  // Pixels have no checksum; a label has bounds.
  auto records = [&](const fs::path& p) {
    std::vector<std::uint8_t> pixels(1000 * 3072);
    std::vector<std::int32_t> labels(1000);
    read_cifar(*open_bytes(p, source), CifarLayout::cifar10(), 1000, pixels.data(), labels.data());
    return std::vector<double>(labels.begin(), labels.end());
  };
  Bytes batch = load(cifar / "test_batch.bin");
  batch.resize(1000 * 3073);
  save(dir.file("batch"), batch);
  expect_damage_to_be_seen(dir.file("batch"), dir.file("copy"), records, 0, SIZE_MAX, 0);
  for (std::size_t record = 0; record < 1000; record += 37) {
    Bytes bad = batch;
    bad[record * 3073] ^= 0x40;
    EXPECT_TRUE(refuses(dir.file("copy"), bad, {}, records)) << record;
  }
}

TEST(RealFiles, DamageIsRefusedWithPathAndMend) {
  NEEDS_STB();
  const char* root = std::getenv("TANDEM_DATA");
  if (!root || !fs::exists(fs::path(root) / "cifar10-jpeg")) GTEST_SKIP() << "no $TANDEM_DATA/cifar10-jpeg";
  const fs::path one = fs::path(root) / "cifar10-jpeg/test/bird/0338.jpg";
  const Bytes good = load(one);
  ASSERT_EQ(decode(good, 3).width, 32);
  for (std::size_t size = 0; size < good.size(); size += 1 + good.size() / 200)
    EXPECT_TRUE(refused(
        [&] {
          decode({good.begin(), good.begin() + std::ptrdiff_t(size)}, 3);
        },
        {"a picture: is", "mend it"}))
        << size;
  // A JPEG has no checksum: a flipped bit must be refused or give a picture of the same size.
  for (std::size_t bit = 0; bit < 8 * good.size(); bit += 7) {
    Bytes bad = good;
    bad[bit / 8] ^= std::uint8_t(1u << bit % 8);
    try {
      const Image image = decode(bad, 3);
      EXPECT_EQ(image.pixels.size(), std::size_t(3 * image.height * image.width));
    } catch (const UsageError&) {}
  }
}

TEST(Augment, UsualGrowsWithThePicture) {
  EXPECT_EQ(Augment::usual(28).pad_crop, 4);
  EXPECT_EQ(Augment::usual(32).pad_crop, 4);
  EXPECT_EQ(Augment::usual(64).pad_crop, 8);
  EXPECT_EQ(Augment::usual(224).pad_crop, 28);
  EXPECT_EQ(Augment::usual(3).pad_crop, 2);
}

}  // namespace
}  // namespace tandem::test
