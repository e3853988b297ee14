#include "datasets/cifar.h"

#include "datasets/bytes.h"

namespace tandem {
namespace {

constexpr std::int64_t side = 32, plane = side * side, record = 1 + 3 * plane;

// A record is a label, then the red, the green and the blue plane. Planar → [H, W, C].
void interleave(const std::uint8_t* planes, std::uint8_t* __restrict pixels) {
  const std::uint8_t *red = planes, *green = planes + plane, *blue = planes + 2 * plane;
  for (std::int64_t i = 0; i < plane; i++) {
    pixels[3 * i] = red[i];
    pixels[3 * i + 1] = green[i];
    pixels[3 * i + 2] = blue[i];
  }
}

}  // namespace

Dataset cifar10(const std::filesystem::path& folder, std::int64_t pictures_per_file) {
  const std::string source = "run " + download_command("cifar-10", folder);
  auto part = [&](const char* name, const std::vector<std::string>& files) {
    Pictures p;
    p.name = name;
    p.classes = 10;
    p.class_names = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"};
    p.mean = {0.49139968f, 0.48215841f, 0.44653091f};  // of the 50 000 training pictures
    p.deviation = {0.24703223f, 0.24348513f, 0.26158784f};
    std::int64_t n = pictures_per_file * std::int64_t(files.size());
    p.images = host_tensor({n, side, side, 3}, DType::u8);
    p.labels = host_tensor({n}, DType::i32);
    std::uint8_t* pixels = p.images.write<std::uint8_t>();
    std::int32_t* labels = p.labels.write<std::int32_t>();
    constexpr std::int64_t some = 64;  // records at a time: they stay in cache until they are interleaved
    std::vector<std::uint8_t> buffer(some * record);
    for (const std::string& file : files) {
      auto bytes = open_bytes(folder / file, source);
      for (std::int64_t i = 0; i < pictures_per_file; i++) {
        if (i % some == 0)
          bytes->read(buffer.data(), std::min(some, pictures_per_file - i) * record, pictures_per_file * record);
        const std::uint8_t* r = buffer.data() + i % some * record;
        if (r[0] > 9) bytes->reject("label ", int(r[0]), " in record ", i, ", expected 0 to 9");
        *labels++ = r[0];
        interleave(r + 1, pixels);
        pixels += 3 * plane;
      }
      bytes->expect_end();
    }
    return p;
  };
  return {part("cifar-10 train",
               {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"}),
          part("cifar-10 test", {"test_batch.bin"})};
}

}  // namespace tandem
