#include "datasets/readers.h"

#include "core/text.h"

namespace tandem {
namespace {

constexpr std::int64_t side = 32, plane = side * side;

const char* const ten = "airplane automobile bird cat deer dog frog horse ship truck";
const char* const hundred =
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm";
const char* const twenty =
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices "
    "household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes "
    "large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees "
    "vehicles_1 vehicles_2";

// A picture is a red, a green and a blue plane. Planar → [H, W, C].
void interleave(const std::uint8_t* planes, std::uint8_t* __restrict pixels) {
  const std::uint8_t *red = planes, *green = planes + plane, *blue = planes + 2 * plane;
  for (std::int64_t i = 0; i < plane; i++) {
    pixels[3 * i] = red[i];
    pixels[3 * i + 1] = green[i];
    pixels[3 * i + 2] = blue[i];
  }
}

Pictures part(const std::string& name, const std::filesystem::path& folder, const std::vector<std::string>& files,
              std::int64_t count, const CifarLayout& layout, const char* classes, const std::string& remedy) {
  Pictures p = blank_pictures(name, {count * std::int64_t(files.size()), side, side, 3}, parts_of(classes, ' '));
  std::uint8_t* pixels = p.images.write<std::uint8_t>();
  std::int32_t* labels = p.labels.write<std::int32_t>();
  for (const std::string& file : files) {
    ByteSource source = open_bytes(folder / file, remedy);
    read_cifar(source, layout, count, pixels, labels);
    pixels += count * 3 * plane;
    labels += count;
  }
  return p;
}

}  // namespace

void read_cifar(ByteSource& file, const CifarLayout& layout, std::int64_t count, std::uint8_t* pixels,
                std::int32_t* labels) {
  const std::int64_t before = std::int64_t(layout.bounds.size()), record = before + 3 * plane;
  const std::uint8_t* r = file.read(std::size_t(count * record));
  for (std::int64_t i = 0; i < count; i++, r += record) {
    for (std::int64_t k = 0; k < before; k++)
      if (r[k] >= layout.bounds[k])
        file.reject("label ", int(r[k]), " in record ", i, ", expected 0 to ", layout.bounds[k] - 1);
    labels[i] = r[layout.used];
    interleave(r + before, pixels + i * 3 * plane);
  }
  file.expect_end();
}

Dataset cifar10(const std::filesystem::path& folder, std::int64_t pictures_per_file) {
  const std::string remedy = "run " + download_command("cifar-10", folder);
  const std::vector<std::string> training = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                             "data_batch_4.bin", "data_batch_5.bin"};
  return Dataset::of_parts("cifar-10", part("cifar-10 train", folder, training, pictures_per_file, {{10}}, ten, remedy),
                           part("cifar-10 test", folder, {"test_batch.bin"}, pictures_per_file, {{10}}, ten, remedy),
                           {0.49139968f, 0.48215841f, 0.44653091f},  // of the 50 000 training pictures
                           {0.24703223f, 0.24348513f, 0.26158784f});
}

Dataset cifar100(const std::filesystem::path& folder, CifarLabels labels, std::int64_t training, std::int64_t testing) {
  const std::string remedy = "run " + download_command("cifar-100", folder);
  const bool fine = labels == CifarLabels::fine;
  const std::string name = fine ? "cifar-100" : "cifar-100-coarse";
  const CifarLayout layout{{20, 100}, fine ? 1u : 0u};
  const char* classes = fine ? hundred : twenty;
  return Dataset::of_parts(name, part(name + " train", folder, {"train.bin"}, training, layout, classes, remedy),
                           part(name + " test", folder, {"test.bin"}, testing, layout, classes, remedy));
}

}  // namespace tandem
