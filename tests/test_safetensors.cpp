// The safetensors format: what we write is byte for byte what the format says, what others write is read, and what is
// damaged is refused by name. Files replaced in one step.
#include <sys/fsuid.h>
#include <sys/stat.h>

#include "core/files/atomic_file.h"
#include "core/files/files.h"
#include "core/files/safetensors.h"
#include "core/random.h"
#include "layers/train/metrics.h"
#include "tests/support.h"

namespace tandem::test {
namespace {
namespace fs = std::filesystem;

void put(const std::string& file, const std::string& bytes) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << bytes;
}

// A file with this header and as many bytes of elements.
std::string made(const std::string& header, std::size_t data_bytes) {
  std::uint64_t n = header.size();
  std::string all(reinterpret_cast<const char*>(&n), sizeof n);
  return all + header + std::string(data_bytes, '\1');
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (auto& e : fs::directory_iterator(folder)) names.push_back(e.path().filename().string());
  return names;
}

struct Safetensors : InFolder {
  const std::unique_ptr<Backend> backend = reference_backend();  // outlives the writers, which hold its tensors
};
using Files = InFolder;

}  // namespace

TEST_F(Files, OldOrNewNeverHalf) {
  const std::string file = folder.file("f");
  put(file, "old");
  {
    AtomicFile f(file);
    f.write("half", 4);
    EXPECT_EQ(contents(file), "old");
  }
  EXPECT_EQ(contents(file), "old");  // not committed: as if nothing had happened
  EXPECT_EQ(names_in(folder.file("")).size(), 1u);
  AtomicFile f(file);
  f.write("new ", 4);
  f.write("file", 4);
  f.commit();
  EXPECT_EQ(contents(file), "new file");
  EXPECT_EQ(names_in(folder.file("")).size(), 1u);
  EXPECT_REFUSED(f.write("x", 1), "finished");
}

TEST_F(Files, ALinkStaysALink) {
  put(folder.file("real"), "old");
  fs::create_symlink("real", folder.file("link"));
  AtomicFile f(folder.file("link"));
  f.write("new", 3);
  f.commit();
  EXPECT_TRUE(fs::is_symlink(folder.file("link")));
  EXPECT_EQ(contents(folder.file("real")), "new");
}

// Root may write everywhere: to files this thread is somebody else while this lives.
struct AsNobody {
  int before = setfsuid(65534);
  ~AsNobody() { setfsuid(uid_t(before)); }
};

TEST_F(Files, AFolderThatForbidsWritingIsNamed) {
  const std::string locked = folder.file("locked");
  fs::create_directory(locked);
  fs::permissions(folder.file(""), fs::perms(0755));
  fs::permissions(locked, fs::perms(0555));
  put(locked + "/old", "");
  AsNobody nobody;
  const std::string why = "Permission denied in the folder " + locked + ": name another place";
  EXPECT_REFUSED(AtomicFile f(locked + "/f"), locked + "/f", why);
  EXPECT_REFUSED(AtomicFile f(locked + "/deep/f"), "there is no folder " + locked + "/deep");
  EXPECT_REFUSED(MetricsFile f(locked + "/m.jsonl"), "--metrics " + locked + "/m.jsonl", why);
  EXPECT_REFUSED(MetricsFile f(locked + "/old"), "Permission denied: name another file");
  for (const char* below : {"", "/run", "/deep/run/"})
    EXPECT_REFUSED(make_folder("--checkpoint x", locked + below), "--checkpoint x: cannot be written", why);
  EXPECT_REFUSED(make_folder("--checkpoint x", locked + "/old/run"),
                 "--checkpoint x: cannot be written: Not a directory");
}

TEST_F(Files, WhatIsNoFileIsRefused) {
  EXPECT_REFUSED(AtomicFile f(folder.file("no/such/f")), "no/such/f", "make the folder first");
  EXPECT_REFUSED(AtomicFile f(folder.file("")), "is a folder");
  EXPECT_REFUSED(AtomicFile f("/dev/null"), "/dev/null", "not a regular file");
}

TEST_F(Files, AFullDiskLeavesTheOldFile) {
  const std::string file = folder.file("weights");
  put(file, "old");
  const std::string much(1 << 16, 'x');
  {
    FileLimit full(1 << 15);
    EXPECT_REFUSED(AtomicFile(file).write(much.data(), much.size()), "weights", "could not be written",
                   "the file that was there is unchanged");
    EXPECT_REFUSED(AtomicFile(file + "2").write(much.data(), much.size()), "nothing was written");
  }
  EXPECT_EQ(contents(file), "old");
  EXPECT_EQ(names_in(folder.file("")).size(), 1u);
}

TEST_F(Safetensors, WritesTheFormatToTheByte) {
  SafetensorsWriter writer;
  writer.add("w", Tensor::of(*backend, {2, 2}, {1, 2, 3, 4}));
  writer.metadata("step", "7");
  writer.write(folder.file("w.safetensors"));
  std::string want("\x58\0\0\0\0\0\0\0", 8);
  want += R"({"__metadata__":{"step":"7"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}   )";
  want += std::string("\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x40\x40\x00\x00\x80\x40", 16);
  EXPECT_EQ(contents(folder.file("w.safetensors")), want);
}

// The eight bytes before a header of 640 bytes begin as those of a pickle do.
TEST_F(Safetensors, HeadersOfEveryLengthAreRead) {
  for (std::size_t more = 400; more < 1600; more += 8) {
    SafetensorsWriter writer;
    writer.add("w", Tensor::of(*backend, {2}, {1, 2}));
    writer.metadata("text", std::string(more, 'x'));
    writer.write(folder.file("w.safetensors"));
    EXPECT_TRUE(SafetensorsFile(folder.file("w.safetensors")).has("w")) << more;
  }
}

TEST_F(Safetensors, EveryTypeComesBackAsItWas) {
  auto backend = cpu_backend(1), reference = reference_backend();
  const std::string file = folder.file("t.safetensors");
  SafetensorsWriter writer;
  for (DType t : {DType::f32, DType::bf16, DType::u8, DType::i32})
    writer.add(name_of(t), Tensor::of(*backend, {3, 1}, {0, 1, 100}, t));
  writer.add("f64", Tensor::of(*reference, {2}, {1.0 / 3, -1e300}, DType::f64));
  const std::int64_t big[] = {-3, std::int64_t{1} << 40};
  const std::uint16_t halves[] = {0x3c00, 0xc100, 0x0001, 0x7c00};  // 1, −2.5, 2⁻²⁴, ∞
  const std::int8_t small[] = {-128, 127, 5};
  const std::int16_t middle[] = {-300};
  writer.add("i64", "I64", {2}, std::as_bytes(std::span(big)));
  writer.add("f16", "F16", {4}, std::as_bytes(std::span(halves)));
  writer.add("i8", "I8", {3}, std::as_bytes(std::span(small)));
  writer.add("i16", "I16", {1}, std::as_bytes(std::span(middle)));
  writer.add("bool", "BOOL", {3}, std::as_bytes(std::span("\0\1\1", 3)));
  writer.add("scalar", Tensor::of(*backend, {}, {5}));
  writer.add("nothing", Tensor(*backend, {0, 4}));
  writer.add("ünï \"quoted\"\n", Tensor::of(*backend, {1}, {9}));
  EXPECT_REFUSED(writer.add("i8", Tensor::of(*backend, {1}, {9})), "i8", "twice");
  EXPECT_REFUSED(writer.add("x", "F16", {3}, std::as_bytes(std::span(halves))), "8 bytes", "[3]");
  writer.metadata("a", "b");
  writer.metadata("json", R"({"lr": 0.1})");
  writer.write(file);

  const SafetensorsFile f(file);
  EXPECT_EQ(f.tensors().size(), 13u);
  EXPECT_EQ(f.metadata().at("json"), R"({"lr": 0.1})");
  for (const char* t : {"f32", "bf16", "u8", "i32"}) EXPECT_EQ(f.values(t), (Numbers{0, 1, 100})) << t;
  EXPECT_EQ(f.values("f64"), (Numbers{1.0 / 3, -1e300}));
  EXPECT_EQ(f.values("i64"), (Numbers{-3, double(std::int64_t{1} << 40)}));
  EXPECT_EQ(f.values("f16"), (Numbers{1, -2.5, std::ldexp(1, -24), INFINITY}));
  EXPECT_EQ(f.values("i8"), (Numbers{-128, 127, 5}));
  EXPECT_EQ(f.values("i16"), (Numbers{-300}));
  EXPECT_EQ(f.values("bool"), (Numbers{0, 1, 1}));
  EXPECT_EQ(f.at("scalar").shape, Shape());
  EXPECT_EQ(f.values("scalar"), (Numbers{5}));
  EXPECT_EQ(f.at("nothing").shape, (Shape{0, 4}));
  EXPECT_EQ(f.values("ünï \"quoted\"\n"), (Numbers{9}));
  EXPECT_EQ(f.tensor("f64", *backend).values(), (Numbers{float(1.0 / 3), -INFINITY}));  // converted
  EXPECT_EQ(f.tensor("bf16", *backend, DType::bf16).dtype(), DType::bf16);
  EXPECT_EQ(f.tensor("bool", *backend, DType::u8).values(), (Numbers{0, 1, 1}));
  EXPECT_REFUSED(f.tensor("i8", *backend, DType::u8), "t.safetensors", "i8", "I8", "expected U8");
  EXPECT_REFUSED(f.at("weight"), "t.safetensors", "holds no tensor weight");
  Tensor wrong(*backend, {1, 3});
  EXPECT_REFUSED(f.read("f32", wrong), "f32 has the shape [3,1], expected [1,3]");
}

// NaNs with a payload, −0 and denormals: a checkpoint is its bytes.
TEST_F(Safetensors, BitsAreKept) {
  Tensor t(*backend, {4}), back(*backend, {4});
  const std::uint32_t bits[] = {0x7fc12345, 0x80000000, 1, 0xff800000};
  std::memcpy(t.raw_write(), bits, sizeof bits);
  SafetensorsWriter writer;
  writer.add("t", t);
  writer.write(folder.file("t"));
  const std::uint64_t count = back.writes().now();
  SafetensorsFile(folder.file("t")).read("t", back);
  EXPECT_EQ(std::memcmp(back.raw(), bits, sizeof bits), 0);
  EXPECT_NE(back.writes().now(), count);  // prepared weights are stale now
}

TEST_F(Safetensors, WhatIsDamagedIsRefusedByName) {
  const std::string file = folder.file("bad.safetensors");
  auto says = [&](const std::string& bytes, std::vector<std::string> parts) {
    put(file, bytes);
    parts.push_back("bad.safetensors");
    return refused([&] { SafetensorsFile f(file); }, parts);
  };
  auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const std::string good = entry("F32", "[2]", "[0,8]");
  put(file, made("{\"a\":" + good + "}", 8));
  EXPECT_NO_THROW(SafetensorsFile{file});

  EXPECT_TRUE(says("", {": is empty, not a safetensors file"}));
  EXPECT_TRUE(says("1234567", {"has only 7 bytes"}));
  EXPECT_TRUE(says(std::string(8, '\xff'), {"give a header of 18446744073709551615 bytes", "has 8"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + "}", 8).substr(0, 20), {"give a header", "cut off"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + "}", 7), {"describes 8 bytes of elements and the file holds 7", "cut off"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + "}", 9), {"describes 8 bytes of elements and the file holds 9"}));
  EXPECT_TRUE(says(made("", 0), {"does not begin with {"}));
  EXPECT_TRUE(says(made(" {}", 0), {"does not begin with {"}));
  EXPECT_TRUE(says(made("{\"a\":", 0), {"not JSON"}));
  EXPECT_TRUE(says(made("{} x", 0), {"not JSON"}));
  EXPECT_TRUE(says(made("{\"\xff\":1}", 0), {"not JSON"}));
  EXPECT_TRUE(says(made(std::string("{\0}", 3), 0), {"not JSON"}));
  EXPECT_TRUE(says(made("{\"a\":" + std::string(1000, '['), 0), {"nested deeper"}));
  EXPECT_TRUE(says(made("{\"a\":{\"b\":{\"c\":{\"d\":1}}}}", 0), {"a: has no dtype"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + ",\"a\":" + good + "}", 8), {"\"a\" comes twice"}));
  EXPECT_TRUE(says(made(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
                   {"\"dtype\" comes twice"}));
  EXPECT_TRUE(says(made("{\"a\":1}", 0), {"a: is not described by an object"}));
  EXPECT_TRUE(says(made("{\"a\":{}}", 0), {"a: has no dtype"}));
  EXPECT_TRUE(says(made(R"({"a":{"dtype":1,"shape":[],"data_offsets":[0,4]}})", 4), {"dtype is not a string"}));
  EXPECT_TRUE(says(made(R"({"a":{"dtype":"F32","shape":3,"data_offsets":[0,4]}})", 4), {"shape is not a list"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F31", "[2]", "[0,8]") + "}", 8), {"a has the type F31"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[-2]", "[0,8]") + "}", 8),
                   {"a: its shape holds something that is not a whole number"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[2.5]", "[0,8]") + "}", 8), {"not a whole number"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[3]", "[0,8]") + "}", 8), {"hold 8 bytes, not the 12 of F32 [3]"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[2]", "[8,0]") + "}", 8), {"a: its data_offsets"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[2]", "[0]") + "}", 8), {"are not two whole numbers"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[2]", "[0,-8]") + "}", 8), {"a: its data_offsets"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[4294967296,4294967296]", "[0,0]") + "}", 0), {"larger than any"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[18446744073709551615,0]", "[0,0]") + "}", 0), {"larger than any"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[1,1,1,1,1,1,2]", "[0,8]") + "}", 8), {"a has 7 axes"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + ",\"b\":" + entry("F32", "[2]", "[12,20]") + "}", 20), {"there is a hole"}));
  EXPECT_TRUE(says(made("{\"a\":" + good + ",\"b\":" + entry("F32", "[2]", "[4,12]") + "}", 12), {"it overlaps"}));
  EXPECT_TRUE(says(made("{\"a\":" + entry("F32", "[2]", "[4,12]") + "}", 12), {"there is a hole"}));
  EXPECT_TRUE(says(made(R"({"__metadata__":[]})", 0), {"__metadata__ is not a dictionary"}));
  EXPECT_TRUE(says(made(R"({"__metadata__":{"k":1}})", 0), {"holds k, which is not a string"}));
  EXPECT_REFUSED(SafetensorsFile f(folder.file("none")), "none", "cannot be opened");
  EXPECT_REFUSED(SafetensorsFile f(folder.file("")), "is a folder");
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_REFUSED(SafetensorsFile f(folder.file("pipe")), "not a regular file");
}

TEST_F(Safetensors, APickleIsMetWithTheCommandThatConvertsIt) {
  put(folder.file("net.pt"), "PK\x03\x04 and so on");
  EXPECT_REFUSED(SafetensorsFile f(folder.file("net.pt")), "net.pt", "pickle", "torch.load", "'net.safetensors'");
  put(folder.file("old.pth"), "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9");
  EXPECT_REFUSED(SafetensorsFile f(folder.file("old.pth")), "pickle");
}

// The command runs here with a stand-in for PyTorch, whose load() gives what checkpoint.txt says.
TEST_F(Safetensors, TheConversionTakesTheDictionaryWithTheMostTensors) {
  if (std::system("command -v python3 >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs python3";
  put(folder.file("torch.py"), R"(
class nn:
    class Module: pass
class Tensor:
    def __init__(self, n): self.shape = [n]
    def detach(self): return self
    float = contiguous = numpy = detach
    def is_floating_point(self): return True
    def numel(self): return self.shape[0]
    def tobytes(self): return bytes(4 * self.shape[0])
class Model(nn.Module):
    def state_dict(self): return {"a": Tensor(2), "b": Tensor(3)}
def is_tensor(v): return isinstance(v, Tensor)
def load(path, map_location): return eval(open("checkpoint.txt").read())
)");
  put(folder.file("net.pt"), "PK\x03\x04 and so on");
  auto converted = [&](const std::string& checkpoint) -> std::vector<std::string> {
    put(folder.file("checkpoint.txt"), checkpoint);
    fs::remove(folder.file("net.safetensors"));
    const std::string what = error_of<UsageError>([&] { SafetensorsFile f(folder.file("net.pt")); });
    put(folder.file("convert"), what.substr(what.find("  python3 -c")));
    const std::string run = "cd " + folder.file("") + " && PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=. sh convert 2>said";
    if (std::system(run.c_str()) != 0) return {"refused"};
    const SafetensorsFile f(folder.file("net.safetensors"));
    std::vector<std::string> names;
    for (const auto& [name, entry] : f.tensors()) names.push_back(name);
    return names;
  };
  const std::vector<std::string> weights{"a", "b"};
  const std::string model = R"({"a": Tensor(2), "b": Tensor(3)})", many = "{str(i): i for i in range(30)}";
  EXPECT_EQ(converted(model), weights);
  EXPECT_EQ(converted(R"({"args": )" + many + R"(, "model": )" + model + "}"), weights);
  EXPECT_EQ(converted(R"({"epoch": 3, "scale": Tensor(1), "state": {"last": {"model": )" + model + "}}}"), weights);
  EXPECT_EQ(converted("Model()"), weights);
  EXPECT_EQ(converted(R"({"args": )" + many + R"(, "model": Model()})"), weights);
  for (const std::string& none : {many, std::string("3"), "{'args': " + many + "}"}) {
    EXPECT_EQ(converted(none), std::vector<std::string>{"refused"}) << none;
    std::ifstream said(folder.file("said"));
    EXPECT_TRUE(holds(std::string(std::istreambuf_iterator<char>(said), {}), {"holds no tensors by name"}));
  }
}

// A file that shrinks while it is read is an error, not a signal.
TEST_F(Safetensors, AFileThatBecomesShorter) {
  SafetensorsWriter writer;
  writer.add("w", Tensor::zeros(*backend, {1000}));
  writer.write(folder.file("w"));
  SafetensorsFile f(folder.file("w"));
  ASSERT_EQ(truncate(folder.file("w").c_str(), 2000), 0);
  EXPECT_REFUSED(f.values("w"), "w cannot be read", "became shorter");
}

// Every third bit flipped, every length cut: refused, or a file that is good in itself. Never a crash.
TEST_F(Safetensors, FlippedBitsAndCutsNeverCrash) {
  SafetensorsWriter writer;
  writer.add("layer1.weight", Tensor::of(*backend, {2, 1}, {1, 2}));
  writer.add("bias", Tensor::of(*backend, {2}, {1, 2}, DType::bf16));
  writer.metadata("epoch", "3");
  const std::string file = folder.file("f");
  writer.write(file);
  const std::string good = contents(file);
  int refusals = 0, read = 0;
  auto attempt = [&](const std::string& bytes) {
    put(file, bytes);
    try {
      SafetensorsFile f(file);
      for (auto& [name, e] : f.tensors()) f.bytes(name);
      read++;
    } catch (const UsageError&) {
      refusals++;
    }
  };
  for (std::size_t bit = 0; bit < 8 * good.size(); bit += 3) {
    std::string bytes = good;
    bytes[bit / 8] = char(bytes[bit / 8] ^ (1 << bit % 8));
    attempt(bytes);
  }
  EXPECT_GT(refusals, 100);
  EXPECT_GT(read, 12 * 8 / 3 - 1);  // flips within elements and names
  read = 0;
  for (std::size_t length = 0; length < good.size(); length++) attempt(good.substr(0, length));
  EXPECT_EQ(read, 0);
}
}  // namespace tandem::test
