#include "datasets/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <tuple>

#include "core/backend.h"
#include "core/random.h"
#include "datasets/cifar.h"
#include "datasets/folder.h"
#include "datasets/mnist.h"
#include "datasets/npy.h"
#include "datasets/synthetic.h"

namespace tandem {

namespace {

struct Place {
  const char *set, *folder, *file;
};

// cifar10 and cifar-10 are one name.
std::string official(const std::string& name) { return name.starts_with("cifar1") ? "cifar-" + name.substr(5) : name; }

constexpr Place places[] = {{"mnist", "mnist", "train-images-idx3-ubyte"},
                            {"fashion-mnist", "fashion-mnist", "train-images-idx3-ubyte"},
                            {"cifar-10", "cifar-10-batches-bin", "data_batch_1.bin"},
                            {"cifar-100", "cifar-100-binary", "train.bin"}};

const Place& place_of(const std::string& name) {
  for (const Place& p : places)
    if (name == p.set) return p;
  refuse("no files belong to a data set called ", name, ": choose mnist, fashion-mnist, cifar-10 or cifar-100");
}

}  // namespace

std::string dataset_names() { return "mnist fashion-mnist cifar-10 cifar-100 cifar-100-coarse"; }

Dataset load_dataset(const std::string& given, const std::filesystem::path& directory, const FolderOptions& folder) {
  const std::string name = official(given), drawn = "synthetic-mnist synthetic-fashion-mnist synthetic-cifar-10";
  const bool known = (" " + dataset_names() + " " + drawn + " ").find(" " + name + " ") != std::string::npos;
  if (directory == "synthetic" && !name.starts_with("synthetic")) {
    if ((" " + drawn + " ").find(" synthetic-" + name + " ") == std::string::npos)
      refuse("--data synthetic: there are no such pictures in place of ", given,
             ", only of mnist, fashion-mnist and cifar-10");
    return load_dataset("synthetic-" + name, {}, folder);
  }
  const std::filesystem::path path(given);
  std::error_code ignored;
  const bool is_folder = !known && std::filesystem::is_directory(path, ignored);
  if ((folder.size || folder.skip_broken) && !is_folder && (known || std::filesystem::exists(path, ignored)))
    refuse(given, ": is no folder of pictures, and only those have a use for ",
           folder.size ? "--size" : "--skip-broken");
  if (!directory.empty() && !known && std::filesystem::exists(path, ignored))
    refuse(given, ": is a path of its own: --data ", directory.string(), " has no use beside it");
  if (name == "mnist") return mnist(find_data(name, directory));
  if (name == "fashion-mnist") return fashion_mnist(find_data(name, directory));
  if (name == "cifar-10") return cifar10(find_data(name, directory));
  if (name == "cifar-100") return cifar100(find_data(name, directory));
  if (name == "cifar-100-coarse") return cifar100(find_data("cifar-100", directory), CifarLabels::coarse);
  if (name == "synthetic-mnist") return synthetic({.name = name});
  if (name == "synthetic-fashion-mnist") return synthetic(SyntheticOptions::fashion_mnist());
  if (name == "synthetic-cifar-10") return synthetic(SyntheticOptions::cifar10());
  if (is_folder) return picture_folder(path, folder);
  if (path.extension() == ".npy") return npy_dataset(path);
  if (path.extension() == ".npz" && std::filesystem::exists(path, ignored)) refuse_npz(path);
  if (std::filesystem::exists(path, ignored))
    refuse(given, ": is a file: name the folder that holds a folder of pictures per class, or an .npy file");
  refuse("there is no data set called ", given, ", and no such folder: choose one of ", dataset_names(), ", ", drawn,
         ", a folder of pictures or an .npy file");
}

std::map<std::string, std::string> description(const Pictures& p) {
  auto list = [](const auto& values, const char* between) {
    std::ostringstream text;
    text.precision(9);  // enough to have the same float again
    for (std::size_t i = 0; i < values.size(); i++) text << (i ? between : "") << values[i];
    return text.str();
  };
  std::vector<std::string> classes = p.class_names;
  for (int c = int(classes.size()); c < p.classes; c++) classes.push_back(std::to_string(c));
  return {{"pictures", p.name},      {"classes", list(classes, "\n")},           {"mean", list(p.mean, ",")},
          {"std", list(p.std, ",")}, {"channels", std::to_string(p.channels())}, {"side", std::to_string(p.height())}};
}

std::string download_command(const std::string& name, const std::filesystem::path& folder) {
  if (folder.filename() == "fashion-mnist-small") return "git checkout " + folder.string();  // it is committed
  const std::filesystem::path root = folder.filename() == place_of(name).folder ? folder.parent_path() : folder;
  return "datasets/get-data.sh " + name + " " + (root.empty() ? "." : root.string());
}

namespace {

// The part of Fashion-MNIST that is committed: beside the program's folder, or in the working directory; else empty.
std::filesystem::path small_set(const std::string& name) {
  if (name != "fashion-mnist") return {};
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  for (const std::filesystem::path& root : {program.parent_path().parent_path(), std::filesystem::path()}) {
    const std::filesystem::path folder = root / "datasets" / "fashion-mnist-small";
    if (std::filesystem::exists(folder / "train-images-idx3-ubyte.gz", ignored)) return folder;
  }
  return {};
}

// By the first of several processes that a launcher started.
void say_once(const std::string& text) {
  for (const char* variable : {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* rank = std::getenv(variable); rank && std::string(rank) != "0") return;
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace

std::filesystem::path find_data(const std::string& name, const std::filesystem::path& directory) {
  const Place& place = place_of(name);

  // A folder that was named is where the data are meant to be: looking elsewhere would train on other pictures unasked.
  std::vector<std::filesystem::path> roots;
  const char* variable = std::getenv("TANDEM_DATA");
  if (!directory.empty()) {
    roots.push_back(directory);
  } else {
    if (variable && *variable) roots.emplace_back(variable);
    roots.emplace_back("data");
  }
  std::string searched, near;
  for (const auto& root : roots) {
    // MNIST and Fashion-MNIST have the same file names: a folder named after another set holds that one.
    bool another = false;
    for (const Place& p : places) another |= root.filename() == p.folder && name != p.set;
    for (const auto& folder : {root / place.folder, root}) {
      if (another && folder == root) continue;
      std::error_code why;  // set where a folder may not be looked into
      if (std::filesystem::exists(folder / place.file, why) ||
          std::filesystem::exists(folder / (std::string(place.file) + ".gz"), why))
        return folder;
      if (near.empty()) near = similar_file(folder / place.file).string();
      if (!searched.empty()) searched += ", ";
      searched += folder.string() + (why ? " (" + why.message() + ")" : "");
    }
  }
  if (!near.empty())
    refuse(name, " (", place.file, ") was not found in ", searched, ", but ", near, ": give it the name ", place.file,
           near.ends_with(".gz") ? ".gz" : "", ", and the others theirs");
  const std::filesystem::path small = small_set(name);
  if (directory.empty() && !small.empty()) {
    say_once(name + " was not found in " + searched + ": these are its first pictures (" + small.string() +
             "); datasets/get-data.sh " + name + " fetches all");
    return small;
  }
  refuse(name, " (", place.file, ") was not found in ", searched,
         !directory.empty() || (variable && *variable) ? "" : " (TANDEM_DATA is not set)",
         ": run datasets/get-data.sh ", name, directory.empty() ? "" : " ", directory.string(),
         ", or name the folder that has it with --data or TANDEM_DATA");
}

Tensor host_tensor(const Shape& shape, DType dtype) {
  struct Home {
    std::unique_ptr<Backend> host = reference_backend(1);
    std::unique_ptr<std::byte[]> bytes;
  };
  auto home = std::make_shared<Home>();
  std::size_t bytes = shape.numel() * size_of(dtype);
  home->bytes = std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(1, bytes));
  Backend& host = *home->host;
  void* data = home->bytes.get();
  return Tensor::wrap(host, data, shape, dtype, std::move(home));
}

Pictures in_memory(std::string name, std::span<const std::uint8_t> images, const Shape& shape,
                   std::span<const std::int32_t> labels, int classes) {
  require(shape.rank() == 4, name, ": pictures need a shape [N, H, W, C], not ", shape);
  require(std::int64_t(images.size()) == shape.numel(), name, ": ", images.size(), " bytes for pictures of the shape ",
          shape);
  require(std::int64_t(labels.size()) == shape[0], name, ": ", labels.size(), " labels for ", shape[0], " pictures");
  Pictures p;
  p.name = std::move(name);
  p.images = host_tensor(shape, DType::u8);
  p.labels = host_tensor({shape[0]}, DType::i32);
  if (!images.empty()) std::memcpy(p.images.raw_write(), images.data(), images.size_bytes());
  if (!labels.empty()) std::memcpy(p.labels.raw_write(), labels.data(), labels.size_bytes());
  p.classes = classes;
  measure(p);
  check(p);
  return p;
}

Dataset Dataset::of(const Pictures& all, std::uint64_t seed) {
  if (all.count() < 2) refuse(all.name, ": ", all.count(), " pictures, expected at least 2: one is for testing");
  Dataset d;
  d.name = all.name;
  std::tie(d.train, d.test) = split(all, std::max<std::int64_t>(1, all.count() / 10), seed);
  d.train.name = all.name + " train";
  d.test.name = all.name + " test";
  measure(d);
  return d;
}

Dataset Dataset::of(std::span<const std::uint8_t> images, const Shape& shape, std::span<const std::int32_t> labels,
                    const std::string& name) {
  require(!labels.empty(), name, ": there are no labels");
  int classes = 1 + *std::max_element(labels.begin(), labels.end());
  return of(in_memory(name, images, shape, labels, classes));
}

void check(const Pictures& p) {
  const std::string& name = p.name.empty() ? "pictures" : p.name;
  require(p.images.defined() && p.images.rank() == 4 && p.images.dtype() == DType::u8, name,
          ": images must be u8 of the shape [N, H, W, C]");
  require(p.labels.defined() && p.labels.dtype() == DType::i32 && p.labels.shape() == Shape{p.count()}, name,
          ": labels must be i32 of the shape [", p.count(), "], one per picture");
  require(!p.images.backend().on_device() && !p.labels.backend().on_device(), name, ": must be in host memory");
  require(p.count() > 0 && p.height() > 0 && p.width() > 0, name, ": there are no pictures in the shape ",
          p.images.shape());
  require(p.channels() >= 1 && p.channels() <= 4, name, ": 1 to 4 channels are supported, not ", p.channels());
  require(p.count() <= INT32_MAX, name, ": more pictures than 31 bits can number");
  require(p.classes > 0, name, ": the number of classes is ", p.classes);
  require(p.class_names.empty() || std::int64_t(p.class_names.size()) == p.classes, name, ": ", p.class_names.size(),
          " names for ", p.classes, " classes");
  require(std::int64_t(p.mean.size()) == p.channels() && p.std.size() == p.mean.size(), name, ": ", p.channels(),
          " channels, but ", p.mean.size(), " means and ", p.std.size(), " standard deviations");
  for (std::size_t c = 0; c < p.mean.size(); c++)
    require(std::isfinite(p.mean[c]) && std::isfinite(p.std[c]) && p.std[c] > 0, name, ": channel ", c, " has mean ",
            p.mean[c], " and standard deviation ", p.std[c]);
  const std::int32_t* labels = p.labels.data<std::int32_t>();
  for (std::int64_t i = 0; i < p.count(); i++)
    require(labels[i] >= 0 && labels[i] < p.classes, name, ": picture ", i, " has the label ", labels[i],
            ", expected 0 to ", p.classes - 1);
}

void measure(Pictures& p) {
  std::int64_t pixels = p.count() * p.height() * p.width(), channels = p.channels();
  std::vector<std::array<std::uint64_t, 256>> counts(channels);  // integers: exact, whatever the order
  const std::uint8_t* x = p.images.data<std::uint8_t>();
  for (std::int64_t i = 0; i < pixels; i++)
    for (std::int64_t c = 0; c < channels; c++) counts[c][*x++]++;
  p.mean.assign(channels, 0);
  p.std.assign(channels, 1);
  if (pixels == 0) return;
  for (std::int64_t c = 0; c < channels; c++) {
    double sum = 0, squares = 0;
    for (int v = 0; v < 256; v++) {
      sum += v / 255.0 * double(counts[c][v]);
      squares += v / 255.0 * (v / 255.0) * double(counts[c][v]);
    }
    double mean = sum / double(pixels), variance = squares / double(pixels) - mean * mean;
    p.mean[c] = float(mean);
    if (variance > 1e-8) p.std[c] = float(std::sqrt(variance));  // a channel of one colour is only shifted
  }
}

void measure(Dataset& data) {
  measure(data.train);
  data.test.mean = data.train.mean;
  data.test.std = data.train.std;
}

// The first steps of a Fisher-Yates shuffle draw `held_back` pictures without repetition.
std::vector<char> draw_held_back(std::int64_t n, std::int64_t held_back, std::uint64_t seed) {
  std::vector<std::int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::vector<char> held(n, 0);
  Philox random(seed, Stream::split);
  for (std::int64_t i = 0; i < held_back; i++) {
    std::int64_t j = i + std::int64_t((std::uint64_t{random.word(std::uint32_t(i))} * std::uint64_t(n - i)) >> 32);
    std::swap(order[i], order[j]);
    held[order[i]] = 1;
  }
  return held;
}

std::pair<Pictures, Pictures> split(const Pictures& p, std::int64_t held_back, std::uint64_t seed) {
  std::int64_t n = p.count();
  if (held_back < 0 || held_back >= n)
    refuse(p.name, ": cannot hold back ", held_back, " of ", n, " pictures: use a smaller --val");
  if (held_back == 0) return {p, {}};
  const std::vector<char> held = draw_held_back(n, held_back, seed);
  auto part = [&](char which, std::int64_t count, const char* suffix) {
    Pictures q = p;
    q.name += suffix;
    Shape shape = p.images.shape();
    shape[0] = count;
    q.images = host_tensor(shape, DType::u8);
    q.labels = host_tensor({count}, DType::i32);
    std::size_t size = p.height() * p.width() * p.channels();
    auto* to = q.images.write<std::uint8_t>();
    auto* label = q.labels.write<std::int32_t>();
    for (std::int64_t i = 0; i < n; i++) {
      if (held[i] != which) continue;
      std::memcpy(to, p.images.data<std::uint8_t>() + i * size, size);
      to += size;
      *label++ = p.labels.data<std::int32_t>()[i];
    }
    return q;
  };
  return {part(0, n - held_back, ""), part(1, held_back, " held back")};
}

}  // namespace tandem
