#include "datasets/mnist.h"

#include "datasets/idx.h"

namespace tandem {
namespace {

Dataset family(const std::string& name, const std::filesystem::path& folder, const std::vector<std::string>& classes) {
  const std::string source = "run " + download_command(name, folder);
  auto part = [&](const char* suffix, const std::string& prefix) {
    auto file = [&](const char* kind) {
      std::filesystem::path plain = folder / (prefix + kind);
      return std::filesystem::exists(plain) ? plain : folder / (prefix + kind + ".gz");
    };
    auto images = file("-images-idx3-ubyte");
    Pictures p = idx_pictures(name + suffix, images, file("-labels-idx1-ubyte"), 10, source);
    if (p.height() != 28 || p.width() != 28)
      refuse(images.string(), ": has pictures of ", p.height(), " × ", p.width(),
             " pixels, expected 28 × 28: move it away and ", source);
    p.class_names = classes;
    return p;
  };
  return {name, part(" train", "train"), part(" test", "t10k")};
}

}  // namespace

Dataset mnist(const std::filesystem::path& folder) {
  Dataset d = family("mnist", folder, {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"});
  measure(d);
  return d;
}

Dataset fashion_mnist(const std::filesystem::path& folder) {
  Dataset d = family(
      "fashion-mnist", folder,
      {"T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"});
  if (folder.filename() == "fashion-mnist-small") {
    d.name = "fashion-mnist-small";
    d.train.name = d.name + " train";
    d.test.name = d.name + " test";
  }
  // Of the 60 000 training pictures. Constants: measuring them would take a tenth of the time of reading them.
  for (Pictures* p : {&d.train, &d.test}) {
    p->mean = {0.2860406f};
    p->std = {0.3530242f};
  }
  return d;
}

}  // namespace tandem
