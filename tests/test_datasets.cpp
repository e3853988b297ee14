// The data sets: the official files and where they are found, arrays, folders of pictures, and synthetic pictures.
#include "datasets/loader.h"
#include "datasets/readers.h"
#include "datasets/synthetic.h"
#include "tests/data_files.h"

namespace tandem::test {
namespace {

// ---- Fashion-MNIST, MNIST and CIFAR ---------------------------------------------------------------------------------
void write_fashion(const fs::path& dir, bool compressed, std::uint32_t side = 28) {
  for (auto [prefix, n] : {std::pair{"train", 30u}, {"t10k", 10u}}) {
    Bytes labels(n);
    for (std::uint32_t i = 0; i < n; i++) labels[i] = std::uint8_t(i % 10);
    Bytes x = idx(0x803, {n, side, side}, noise(n * side * side, n)), y = idx(0x801, {n}, labels);
    std::string end = compressed ? ".gz" : "";
    save(dir / (prefix + ("-images-idx3-ubyte" + end)), compressed ? gzip(x) : x);
    save(dir / (prefix + ("-labels-idx1-ubyte" + end)), compressed ? gzip(y) : y);
  }
}

TEST(FashionMnist, ReadsBothForms) {
  NEEDS_ZLIB();
  DataFolder a, b;
  write_fashion(a.path(), true);
  write_fashion(b.path(), false);
  Dataset x = fashion_mnist(a.path()), y = fashion_mnist(b.path());
  EXPECT_EQ(x.train.images.shape(), (Shape{30, 28, 28, 1}));
  EXPECT_EQ(x.test.count(), 10);
  EXPECT_EQ(x.train.images.values(), y.train.images.values());
  EXPECT_EQ(x.test.labels.values(), y.test.labels.values());
  EXPECT_NO_THROW(check(x.train));
  EXPECT_EQ(x.train.class_names[9], "ankle boot");
}

TEST(FashionMnist, Errors) {
  DataFolder dir;
  std::string command = "run datasets/get-data.sh fashion-mnist " + dir.path().string();
  write_fashion(dir.path(), false, 27);
  EXPECT_REFUSED(fashion_mnist(dir.path()), "27 × 27 pixels, expected 28 × 28", command);
  write_fashion(dir.path(), false);
  fs::remove(dir / "t10k-images-idx3-ubyte");
  EXPECT_REFUSED(fashion_mnist(dir.path()), "t10k-images-idx3-ubyte.gz: there is no such file: " + command);
  write_fashion(dir / "fashion-mnist", false);
  fs::remove(dir / "fashion-mnist/train-labels-idx1-ubyte");
  EXPECT_REFUSED(load_dataset("fashion-mnist", dir.path()),
                 "train-labels-idx1-ubyte.gz: there is no such file: " + command);
}

constexpr std::size_t record = 3073;

Bytes cifar_file(std::size_t records, unsigned seed) {
  Bytes b = noise(records * record, seed);
  for (std::size_t i = 0; i < records; i++) b[i * record] = std::uint8_t((i + seed) % 10);
  return b;
}

void write_cifar(const fs::path& dir, std::size_t records) {
  for (unsigned k = 1; k <= 5; k++) save(dir / ("data_batch_" + std::to_string(k) + ".bin"), cifar_file(records, k));
  save(dir / "test_batch.bin", cifar_file(records, 6));
}

TEST(Cifar, PlanesBecomePixels) {
  DataFolder dir;
  write_cifar(dir.path(), 70);
  Dataset d = cifar10(dir.path(), 70);
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
  DataFolder dir;
  std::string command = "move it away and run datasets/get-data.sh cifar-10 " + dir.path().string();
  write_cifar(dir.path(), 3);
  Bytes good = cifar_file(3, 2);
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, record - 1, record, record + 1, 3 * record - 1}) {
    save(dir / "data_batch_2.bin", cut(good, size));  // `record`: whole records, but too few
    EXPECT_REFUSED(cifar10(dir.path(), 3), (dir / "data_batch_2.bin").string(),
                   "truncated after " + std::to_string(size) + " bytes", "expected 9219", command);
  }
  save(dir / "data_batch_2.bin", cut(good, 3 * record + 1));
  EXPECT_REFUSED(cifar10(dir.path(), 3), "goes on after 9219 bytes", command);
  good[2 * record] = 10;
  save(dir / "data_batch_2.bin", good);
  EXPECT_REFUSED(cifar10(dir.path(), 3), "label 10 in record 2, expected 0 to 9", command);
  fs::remove(dir / "data_batch_2.bin");
  EXPECT_REFUSED(cifar10(dir.path(), 3), "there is no such file: run datasets/get-data.sh cifar-10 ");
  fs::create_directory(dir / "data_batch_2.bin");
  EXPECT_REFUSED(cifar10(dir.path(), 3), "is a directory");
  EXPECT_REFUSED(cifar10(dir.path()), "expected 30730000");  // data_batch_1 has 3 records
}

Bytes cifar100_file(int records) {
  Bytes b;
  for (int i = 0; i < records; i++) {
    b.insert(b.end(), {std::uint8_t(i % 20), std::uint8_t(99 - i)});
    for (int k = 0; k < 3072; k++) b.push_back(std::uint8_t(k / 1024 * 80 + (k + i) % 32));
  }
  return b;
}

TEST(Cifar100, HasFineAndCoarseLabels) {
  DataFolder dir;
  save(dir.file("train.bin"), cifar100_file(5));
  save(dir.file("test.bin"), cifar100_file(3));
  const fs::path folder = dir.path();
  const Dataset fine = cifar100(folder, CifarLabels::fine, 5, 3), coarse = cifar100(folder, CifarLabels::coarse, 5, 3);
  EXPECT_EQ(fine.train.images.shape(), (Shape{5, 32, 32, 3}));
  EXPECT_EQ(fine.test.count(), 3);
  EXPECT_EQ(fine.train.labels.values(), (Numbers{99, 98, 97, 96, 95}));
  EXPECT_EQ(coarse.train.labels.values(), (Numbers{0, 1, 2, 3, 4}));
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
  EXPECT_REFUSED(cifar100(folder, CifarLabels::fine, 5, 3), "train.bin", "label 20 in record 1, expected 0 to 19",
                 "get-data.sh cifar-100");
  bad.resize(4 * 3074);
  save(dir.file("train.bin"), bad);
  EXPECT_REFUSED(cifar100(folder, CifarLabels::fine, 5, 3), "truncated after 12296", "expected 15370");
}

TEST(Mnist, IsTheOtherSetOfTheSameFiles) {
  DataFolder dir;
  for (const char* part : {"train", "t10k"}) {
    Bytes pixels(2 * 784, 9);
    pixels.back() = 255;
    save(dir.file(std::string("mnist/") + part + "-images-idx3-ubyte"), idx(0x803, {2, 28, 28}, pixels));
    save(dir.file(std::string("mnist/") + part + "-labels-idx1-ubyte"), idx(0x801, {2}, {7, 2}));
  }
  const Dataset d = load_dataset("mnist", dir.path());
  EXPECT_EQ(d.train.labels.values(), (Numbers{7, 2}));
  EXPECT_EQ(d.train.class_names[7], "7");
  EXPECT_NEAR(d.train.mean[0], (9.0 * 1567 + 255) / 1568 / 255, 1e-6);
  EXPECT_NO_THROW(check(d.test));
  EXPECT_REFUSED(load_dataset("fashion-mnist", dir / "mnist"), "fashion-mnist", "was not found");
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
  DataFolder a, b;
  write_fashion(a / "fashion-mnist", true);
  write_fashion(b / "fashion-mnist", false);
  Environment variable("TANDEM_DATA", b.path().c_str());
  EXPECT_EQ(find_data("fashion-mnist"), b / "fashion-mnist");
  EXPECT_EQ(find_data("fashion-mnist", a.path()), a / "fashion-mnist");
  EXPECT_EQ(find_data("fashion-mnist", a / "fashion-mnist"), a / "fashion-mnist");  // the folder itself will do
  EXPECT_THROW(find_data("fashion-mnist", a / "nothing"), UsageError);  // a folder that was named is not second-guessed
  EXPECT_EQ(load_dataset("fashion-mnist").train.count(), 30);
}

TEST(FindData, FashionMnistsFirstPicturesStandInForAll) {
  DataFolder empty;
  Environment variable("TANDEM_DATA", empty.path().c_str());
  EXPECT_THROW(find_data("fashion-mnist", empty.path()), UsageError);  // a folder that was named is not second-guessed
  Dataset d;
  const std::string said = stderr_of([&] { d = load_dataset("fashion-mnist"); });
  EXPECT_TRUE(holds(said, {"fashion-mnist was not found in " + (empty / "fashion-mnist").string(),
                           "get-data.sh fashion-mnist fetches all"}));
  EXPECT_EQ(d.name, "fashion-mnist-small");
  EXPECT_EQ(download_command("fashion-mnist", "there/fashion-mnist-small"), "git checkout there/fashion-mnist-small");
  EXPECT_EQ(std::pair(d.train.count(), d.test.count()), (std::pair<std::int64_t, std::int64_t>(6000, 1000)));
  for (const Pictures* p : {&d.train, &d.test})
    for (int c = 0; c < 10; c++)
      EXPECT_GT(std::count(p->labels.data<std::int32_t>(), p->labels.data<std::int32_t>() + p->count(), c), 80);
}

TEST(FindData, ErrorNamesEveryPlaceAndTheCommand) {
  DataFolder a, b, empty;
  fs::path here = fs::current_path();
  fs::current_path(empty.path());
  {
    Environment variable("TANDEM_DATA", b.path().c_str());
    EXPECT_REFUSED(find_data("cifar-10", a.path()), "cifar-10 (data_batch_1.bin) was not found in",
                   (a / "cifar-10-batches-bin").string(), "run datasets/get-data.sh cifar-10 " + a.path().string());
    EXPECT_REFUSED(find_data("cifar-10"), (b / "cifar-10-batches-bin").string(), ", data/cifar-10-batches-bin",
                   ", data:");
  }
  Environment variable("TANDEM_DATA", nullptr);
  EXPECT_REFUSED(find_data("cifar-10"), "TANDEM_DATA is not set", "run datasets/get-data.sh cifar-10,");
  fs::current_path(here);
  EXPECT_REFUSED(find_data("imagenet"), "imagenet", "choose mnist, fashion-mnist, cifar-10 or cifar-100");
  // What the user gave is at fault
  EXPECT_TRUE(holds(error_of<UsageError>([] { load_dataset("imagenet"); }), {"imagenet", "synthetic-fashion-mnist"}));
}

// The script's ends that need no network. It is run from the repository's root, like all tests.
TEST(GetData, ExitStatusAndNoHalfFiles) {
  if (!fs::exists("datasets/get-data.sh")) GTEST_SKIP() << "not run from the repository's root";
  if (std::system("command -v curl >/dev/null 2>&1") != 0) GTEST_SKIP() << "file:// addresses need curl";
  DataFolder dir;
  auto run = [&](const std::string& mirror, const std::string& arguments) {
    std::string line = "TANDEM_MIRROR='" + mirror + "' sh datasets/get-data.sh " + arguments + " >/dev/null 2>&1";
    int status = std::system(line.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  EXPECT_EQ(run("", ""), 2);
  EXPECT_EQ(run("", "imagenet"), 2);
  EXPECT_EQ(run("http://127.0.0.1:1/", "fashion-mnist " + dir.path().string()), 3);
  save(dir / "mirror/t10k-labels-idx1-ubyte.gz", noise(5148, 9));
  EXPECT_EQ(run("file://" + (dir / "mirror").string(), "fashion-mnist " + dir.path().string()), 4);
  EXPECT_TRUE(fs::is_empty(dir / "fashion-mnist"));
}

TEST(LoadDataset, KnowsItsNamesAndNamesOptionsWithoutUse) {
  EXPECT_EQ(load_dataset("synthetic-mnist").name, "synthetic-mnist");
  EXPECT_REFUSED(load_dataset("cifar100", "/nowhere"), "cifar-100 (train.bin) was not found", "get-data.sh cifar-100");
  EXPECT_REFUSED(load_dataset("pictures/of/cats"), "no data set called pictures/of/cats", "cifar-100-coarse", "folder");
  DataFolder dir;
  EXPECT_REFUSED(load_dataset("synthetic-mnist", {}, {.size = 64}), "synthetic-mnist", "--size");
  EXPECT_REFUSED(load_dataset("mnist", "synthetic", {.skip_broken = true}), "--skip-broken");
  save(dir.file("a.npy"), npy("|u1", "(2, 3, 3)", Bytes(18)));
  EXPECT_REFUSED(load_dataset(dir.file("a.npy"), {}, {.size = 64}), "a.npy", "--size");
  EXPECT_REFUSED(load_dataset(dir.file("a.npy"), "/data"), "a.npy", "--data /data");
  EXPECT_REFUSED(load_dataset("cifar-100", "synthetic"), "no data set called synthetic-cifar-100", "synthetic-mnist");
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
  EXPECT_REFUSED(in_memory("mine", x, {2, 1, 2, 2}, y, 2), "mine: picture 1 has the label 2, expected 0 to 1");
  EXPECT_REFUSED(in_memory("mine", x, {2, 2, 2, 2}, y, 2), "8 bytes for pictures of the shape [2,2,2,2]");
  EXPECT_REFUSED(in_memory("mine", x, {4, 1, 2, 1}, y, 2), "2 labels for 4 pictures");
  EXPECT_REFUSED(in_memory("mine", x, {8, 1}, y, 2), "[N, H, W, C]");
  EXPECT_REFUSED(in_memory("mine", {}, {0, 1, 1, 1}, {}, 2), "no pictures");
}

TEST(InMemory, OutlivesItsMaker) {
  const Tensor part = in_memory("mine", noise(32, 7), {8, 2, 2, 1}, std::vector<std::int32_t>(8), 1).images.slice(2, 4);
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
  EXPECT_REFUSED(split(p, -1, 5), "cannot hold back -1 of 1000");
  EXPECT_EQ(numbers(split(p, 0, 5).first).size(), std::size_t(n));
  EXPECT_EQ(split(p, 0, 5).second.count(), 0);
  EXPECT_REFUSED(split(p, n, 5), "cannot hold back 1000 of 1000");
}

TEST(DatasetOf, HoldsBackATenth) {
  Bytes images;
  std::vector<std::int32_t> labels;
  for (int i = 0; i < 50; i++) {
    images.insert(images.end(), 32, std::uint8_t(i));
    labels.push_back(i % 3);
  }
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
  EXPECT_REFUSED(Dataset::of(Bytes(32), {1, 4, 4, 2}, std::vector<std::int32_t>{0}), "at least 2");
}

TEST(NpyDataset, ReadsPicturesAndLabels) {
  DataFolder dir;
  Bytes pixels(20 * 9), labels;
  std::iota(pixels.begin(), pixels.end(), std::uint8_t{0});
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
  EXPECT_EQ(two.train.labels.values(), (Numbers{1, 0}));
  EXPECT_EQ(two.train.images.slice(0, 1).values(), (Numbers{0, 128, 255, 0, 128, 255, 0, 128, 255, 0, 128, 255}));
}

TEST(NpyDataset, LabelsHaveNoGaps) {
  DataFolder dir;
  const std::string x = dir.file("a.npy");
  save(x, npy("|u1", "(2, 3, 3)", Bytes(18)));
  EXPECT_REFUSED(load_dataset(x), "a_labels.npy: there is no such file", "save the labels of");
  auto with_labels = [&](const Bytes& labels) {
    save(dir / "a_labels.npy", npy("|u1", "(2,)", labels));
    return load_dataset(x);
  };
  EXPECT_REFUSED(with_labels({0, 0}), "a_labels.npy: all labels are 0");
  EXPECT_REFUSED(with_labels({1, 2}), "no picture has the label 0, the largest is 2", "numpy.unique");
  EXPECT_REFUSED(with_labels({0, 2}), "no picture has the label 1");
}

// ---- folders of pictures ----------------------------------------------------------------------------------------------
struct PictureFolder : testing::Test {
  void SetUp() override { NEEDS_STB(); }
  DataFolder dir;
  // Pictures 0.ppm, 1.ppm, … of 6 × 6 pixels in each of these folders; picture i is of the value first + i.
  void put(const std::string& under, const std::vector<std::string>& folders, int count = 1, int first = 1) {
    for (const std::string& folder : folders)
      for (int i = 0; i < count; i++)
        save(dir / under / folder / (std::to_string(i) + ".ppm"), square_pnm(6, first + i));
  }
};

TEST_F(PictureFolder, ClassesAreFolders) {
  put("all", {"cat"}, 10, 10);
  for (int i = 0; i < 10; i++) save(dir.file("all/dog/deep/" + std::to_string(i) + ".PPM"), square_pnm(6, 110 + i));
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

TEST_F(PictureFolder, TrainAndTestAreFolders) {
  const std::string all = dir.file("all");
  save(dir.file("all/train/0/a.pgm"), square_pnm(5, 1, true));
  save(dir.file("all/train/1/a.pgm"), square_pnm(5, 2, true));
  EXPECT_REFUSED(load_dataset(all), "has train/ but no test/ or val/");
  save(dir.file("all/val/1/b.pgm"), square_pnm(5, 3, true));
  const Dataset d = load_dataset(all);
  EXPECT_EQ(d.channels(), 1);  // all are grey
  EXPECT_EQ(d.test.labels.values(), Numbers{1});
  save(dir.file("all/val/2/b.pgm"), square_pnm(5, 3, true));
  EXPECT_REFUSED(load_dataset(all), "all/val/2: there is no such class");
  fs::remove_all(dir.file("all/train"));
  EXPECT_REFUSED(load_dataset(all), "has val/ but no train/", "all/val");
}

TEST_F(PictureFolder, BrokenPicturesAreRefusedOrCounted) {
  put("all", {"cat", "dog"}, 10);
  const std::string broken = dir.file("all/cat/3.ppm");
  save(broken, cut(square_pnm(6, 3), 40));
  const std::string all = dir.file("all");
  EXPECT_REFUSED(load_dataset(all), broken, "is damaged (truncated after 40 bytes)", "--skip-broken");
  Dataset d;
  const std::string printed = stderr_of([&] { d = load_dataset(all, {}, {.skip_broken = true}); });
  EXPECT_TRUE(holds(printed, {" pictures left out that cannot be decoded, the first is " + broken}));
  EXPECT_EQ(d.train.count() + d.test.count(), 19);
  save(broken, square_pnm(7, 3));
  EXPECT_REFUSED(load_dataset(all), "pixels, expected", "--size");
  EXPECT_EQ(load_dataset(all, {}, {.size = 4}).train.count(), 18);
  fs::create_directories(dir.file("empty"));
  EXPECT_REFUSED(load_dataset(dir.file("empty")), "holds no folders");
  fs::create_directories(dir.file("empty/cat"));
  EXPECT_REFUSED(load_dataset(dir.file("empty")), "single class, cat");
}

// As PyTorch's ImageFolder: at any depth, and no class without a picture; one class alone is the wrong folder.
TEST_F(PictureFolder, ClassesMustBeTwoAndHoldPictures) {
  put("up/all", {"cat", "dog"});
  EXPECT_REFUSED(load_dataset(dir.file("up")), "single class, all", "did you mean", "up/all?");
  fs::create_directories(dir.file("up/all/eel/deep"));
  EXPECT_REFUSED(load_dataset(dir.file("up/all")), "up/all/eel: holds no pictures", "remove it");
  fs::remove_all(dir.file("up/all/eel"));  // two pictures are left, one of them to test with
  EXPECT_REFUSED(load_dataset(dir.file("up/all")), "the class", "no picture to train on", "a tenth");
  put("up/all", {"cat", "dog", "eel/deep/er"}, 9);
  EXPECT_EQ(load_dataset(dir.file("up/all")).classes(), 3);
  put("gap", {"train/0", "train/5", "val/5"});
  const Dataset gap = load_dataset(dir.file("gap"));
  EXPECT_EQ(gap.classes(), 2);
  EXPECT_EQ(gap.test.labels.values(), Numbers{1});
  fs::create_directories(dir.file("gap/val/0"));
  EXPECT_REFUSED(load_dataset(dir.file("gap")), "gap/val/0: holds no pictures");
}

// What is beside the pictures, and how they are linked.
TEST_F(PictureFolder, NothingIsLeftOutOrMistakenInSilence) {
  const fs::path all = dir.file("all");
  put("all", {"cat", "dog"}, 10);
  auto loaded = [&](const FolderOptions& options = {}) {
    Dataset d;
    const std::string printed = stderr_of([&] { d = load_dataset(all, {}, options); });
    return std::to_string(d.train.count() + d.test.count()) + " " + printed;
  };
  for (const char* hidden : {"cat/.ipynb_checkpoints/1.ppm", "cat/deep/.thumbs/1.ppm", ".git/1.ppm", "cat/._1.ppm",
                             "__MACOSX/cat/1.ppm", "cat/__MACOSX/1.ppm"})
    save(all / hidden, square_pnm(6, 1));
  EXPECT_EQ(loaded(), "20 ");
  fs::rename(all / "cat", all / "%81");
  fs::rename(all / "dog", all / "\x81");
  EXPECT_REFUSED(load_dataset(all), "two classes are written %81");
  fs::rename(all / "%81", all / "cat");
  fs::rename(all / "\x81", all / "dog");
  put("parts", {"train/cat", "train/dog", "test/cat"});
  save(dir.file("parts/beside.ppm"), square_pnm(6, 1));
  const std::string parts = stderr_of([&] { load_dataset(dir.file("parts")); });
  EXPECT_TRUE(holds(parts, {"test/ has no pictures of some classes, the first is dog",
                            ": 1 files are not read, the first is " + dir.file("parts/beside.ppm")}));
  save(all / "cat/1.webp", {1});
  save(all / "dog/2.WebP", {1});
  save(all / "notes", {1});
  save(all / "beside.ppm", square_pnm(6, 1));
  EXPECT_EQ(loaded(), "20 " + all.string() + ": 4 files are not read, the first is " + all.string() + "/beside.ppm\n");
  for (const char* file : {"cat/1.webp", "dog/2.WebP", "notes", "beside.ppm"}) fs::remove(all / file);
  for (const char* name : {"jfif", "jpe", "JPEG", "pnm"})
    save(all / "cat" / (std::string("b.") + name), square_pnm(6, 1));
  EXPECT_EQ(loaded(), "24 ");

  save(dir.file("store/1.ppm"), square_pnm(6, 1));
  fs::create_directory_symlink(dir.file("store"), all / "cat/linked");
  fs::create_symlink(dir.file("store/1.ppm"), all / "dog/linked.ppm");
  EXPECT_EQ(loaded(), "26 ");
  fs::create_directory_symlink(all, dir.file("store/up"));
  EXPECT_REFUSED(loaded(), "is a link to a folder that it lies in");
  fs::remove(dir.file("store/up"));
  fs::create_symlink("/nowhere/annex", all / "dog/gone.ppm");
  EXPECT_REFUSED(loaded(), "dog/gone.ppm: is a link to /nowhere/annex", "--skip-broken");
  EXPECT_EQ(loaded({.skip_broken = true}).substr(0, 3), "26 ");
  fs::remove(all / "dog/gone.ppm");
  fs::create_symlink("/nowhere/eel", all / "eel");
  EXPECT_REFUSED(loaded(), "all/eel: is a link to /nowhere/eel");
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

TEST_F(PictureFolder, ASplitHasManySpellings) {
  int next = 0;
  // Loads a folder of these folders, which hold two classes each; its output has the classes and the messages.
  auto expect = [&](const std::vector<std::string>& folders, const std::string& part) {
    const std::string name = "all" + std::to_string(next++), all = dir.file(name);
    for (const std::string& folder : folders) {
      put(name, {folder + "/x"});
      put(name, {folder + "/y"}, 2);
    }
    std::string classes, refusal;
    const auto load = [&] {
      for (const std::string& name : load_dataset(all).train.class_names) classes += name + " ";
    };
    const std::string printed = stderr_of([&] { refusal = error_of<UsageError>(load); });
    EXPECT_TRUE(holds(classes + refusal + printed, {part}));
  };
  for (const char* training : {"train", "Training", "TRAIN", "training_set", "training_data", "train_images"})
    for (const char* test : {"test", "Testing", "val", "Valid", "validation", "test set", "TESTSET", "val2017"})
      expect({training, test}, "x y ");
  expect({"Train", "test", "val"}, "x y ");
  expect({"Train", "test", "val"}, ": val/ is not used (--val");
  expect({"train", "test", "extra"}, ": extra/ is not used");
  expect({"train", "training", "test"}, "train/ and training/, which mean the same");
  expect({"train", "val", "Validation"}, "which mean the same");
  expect({"Test", "Val"}, "has Test/ but no train/");
  expect({"valid", "invalid"}, "valid/ is taken for a class, beside invalid/");
  expect({"left", "right"}, "left right ");
  expect({"bus", "train", "tram", "x/y"}, "train/ is taken for a class, beside bus/, tram/");
}

// ---- synthetic pictures ---------------------------------------------------------------------------------------------
SyntheticOptions small_set() { return {.train = 2000, .test = 500}; }

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
  SyntheticOptions c{.side = 32, .channels = 3};
  c.train = c.test = 10;
  EXPECT_EQ(synthetic(c).train.images.shape(), (Shape{10, 32, 32, 3}));
  c.noise = 65;
  EXPECT_REFUSED(synthetic(c), "noise 65");
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
  Dataset d = synthetic({.train = 10, .test = 300});
  const std::uint8_t* x = d.test.images.data<std::uint8_t>();
  int correct = 0;
  for (int i = 0; i < 300; i++) {
    const std::uint8_t* picture = x + i * 784;
    const double mean = std::accumulate(picture, picture + 784, 0.0) / 784;
    correct += recognise(picture, mean) == d.test.labels.data<std::int32_t>()[i];
  }
  EXPECT_GE(correct, 285);
}

// No class has a mean picture of its own: whoever ignores neighbourhoods stays near chance.
TEST(Synthetic, MeanPicturesTellNothing) {
  Dataset d = synthetic(small_set());
  std::vector<Numbers> mean(10, Numbers(784));
  const std::uint8_t* x = d.train.images.data<std::uint8_t>();
  for (int i = 0; i < 2000; i++)
    for (int k = 0; k < 784; k++) mean[i % 10][k] += x[i * 784 + k] / 200.0;
  const std::uint8_t* t = d.test.images.data<std::uint8_t>();
  int correct = 0;
  for (int i = 0; i < 500; i++) {
    Numbers distances(10);
    for (int c = 0; c < 10; c++)
      for (int k = 0; k < 784; k++) distances[c] += (t[i * 784 + k] - mean[c][k]) * (t[i * 784 + k] - mean[c][k]);
    correct += std::min_element(distances.begin(), distances.end()) - distances.begin() == i % 10;
  }
  EXPECT_LT(correct, 125);  // chance is 50
}

}  // namespace
}  // namespace tandem::test
