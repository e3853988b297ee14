#include "datasets/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/backend.h"
#include "core/random.h"
#include "core/text.h"
#include "datasets/readers.h"
#include "datasets/synthetic.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// ---- data sets by name ----------------------------------------------------------------------------------------------
struct NamedSet {
  std::string name;
  std::string folder, file;                 // the folder that the official archive makes, and the first file in it
  Dataset (*load)(const fs::path& folder);  // folder: of its files; not used for a generated set
};

const NamedSet named_sets[] = {
    {"mnist", "mnist", "train-images-idx3-ubyte", mnist},
    {"fashion-mnist", "fashion-mnist", "train-images-idx3-ubyte", fashion_mnist},
    {"cifar-10", "cifar-10-batches-bin", "data_batch_1.bin", [](const fs::path& f) { return cifar10(f); }},
    {"cifar-100", "cifar-100-binary", "train.bin", [](const fs::path& f) { return cifar100(f); }},
    {"cifar-100-coarse", "cifar-100-binary", "train.bin",
     [](const fs::path& f) { return cifar100(f, CifarLabels::coarse); }},
    {"synthetic-mnist", "", "", [](const fs::path&) { return synthetic({.name = "synthetic-mnist"}); }},
    {"synthetic-fashion-mnist", "", "", [](const fs::path&) { return synthetic({.name = "synthetic-fashion-mnist"}); }},
    {"synthetic-cifar-10", "", "", [](const fs::path&) {
       return synthetic({.name = "synthetic-cifar-10", .side = 32, .channels = 3, .train = 50000});
     }}};

const NamedSet* find_set(const std::string& name) {
  const auto found = std::ranges::find(named_sets, name, &NamedSet::name);
  return found == std::end(named_sets) ? nullptr : found;
}

const NamedSet& files_of(const std::string& name) {
  const NamedSet* set = find_set(name);
  if (!set || set->file.empty())
    refuse("no files belong to a data set called ", name, ": choose mnist, fashion-mnist, cifar-10 or cifar-100");
  return *set;
}

// The committed part of Fashion-MNIST, next to the program's folder or in the working directory; empty if it is not
// there.
fs::path small_set(const std::string& name) {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  for (const fs::path& root : {program.parent_path().parent_path(), fs::path()}) {
    const fs::path folder = root / "datasets" / "fashion-mnist-small";
    if (name == "fashion-mnist" && fs::exists(folder / "train-images-idx3-ubyte.gz", ignored)) return folder;
  }
  return {};
}

// Prints on the first of the processes that a launcher started.
void print_once(const std::string& text) {
  for (const char* variable : {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* rank = std::getenv(variable); rank && std::string(rank) != "0") return;
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace

std::string dataset_names() {
  std::string names;
  for (const NamedSet& set : named_sets)
    if (!set.name.starts_with("synthetic")) names += (names.empty() ? "" : " ") + set.name;
  return names;
}

Dataset load_dataset(const std::string& given, const fs::path& directory, const FolderOptions& folder) {
  std::string name = given.starts_with("cifar1") ? "cifar-" + given.substr(5) : given;  // cifar10 is cifar-10
  if (directory == "synthetic" && !name.starts_with("synthetic")) name = "synthetic-" + name;
  const NamedSet* set = find_set(name);
  std::error_code ignored;
  const bool exists = !set && fs::exists(given, ignored), is_folder = exists && fs::is_directory(given, ignored);
  if (!set && !exists)
    refuse("there is no data set called ", name, ", and no such folder: choose one of ", dataset_names(),
           ", synthetic-mnist, synthetic-fashion-mnist, synthetic-cifar-10, a folder of pictures or an .npy file");
  if ((folder.size || folder.skip_broken) && !is_folder)
    refuse(given, ": is no folder of pictures, and only those have a use for ",
           folder.size ? "--size" : "--skip-broken");
  // Both kinds of labels are in the same files
  const std::string archive = name.starts_with("cifar-100") ? "cifar-100" : name;
  if (set) return set->load(set->file.empty() ? fs::path() : find_data(archive, directory));
  if (!directory.empty()) refuse(given, ": is a path of its own: --data ", directory.string(), " has no use beside it");
  if (is_folder) return picture_folder(given, folder);
  if (fs::path(given).extension() == ".npy") return npy_dataset(given);
  refuse(given, ": is a file: name the folder that holds a folder of pictures per class, or an .npy file");
}

std::map<std::string, std::string> description(const Pictures& p) {
  auto exact = [](float v) { return digits(v, 9); };  // enough to restore the same float
  std::vector<std::string> classes = p.class_names;
  for (int c = int(classes.size()); c < p.classes; c++) classes.push_back(std::to_string(c));
  return {{"pictures", p.name},
          {"classes", joined(classes, "\n")},
          {"mean", joined(p.mean, ",", exact)},
          {"std", joined(p.std, ",", exact)},
          {"channels", std::to_string(p.channels())},
          {"side", std::to_string(p.height())}};
}

std::string download_command(const std::string& name, const fs::path& folder) {
  if (folder.filename() == "fashion-mnist-small") return "git checkout " + folder.string();  // it is committed
  const fs::path root = folder.filename() == files_of(name).folder ? folder.parent_path() : folder;
  return "datasets/get-data.sh " + name + " " + (root.empty() ? "." : root.string());
}

fs::path find_data(const std::string& name, const fs::path& directory) {
  const NamedSet& files = files_of(name);
  const char* variable = std::getenv("TANDEM_DATA");
  const bool in_environment = variable && *variable;
  // If the user names a folder, only that is searched: data found elsewhere could be other pictures than intended.
  std::vector<fs::path> roots = {directory.empty() ? "data" : directory};
  if (directory.empty() && in_environment && roots[0] != variable) roots.insert(roots.begin(), variable);
  std::string searched;
  for (const fs::path& root : roots) {
    // MNIST and Fashion-MNIST have the same file names: a folder named after another set holds that one.
    const bool another = std::ranges::any_of(named_sets, [&](const NamedSet& set) {
      return !set.file.empty() && root.filename() == set.folder && files.folder != set.folder;
    });
    for (const fs::path& folder : {root / files.folder, root}) {
      if (another && folder == root) continue;
      std::error_code why;  // set if the folder may not be read
      for (const char* suffix : {"", ".gz"})
        if (fs::exists(folder / (files.file + suffix), why)) return folder;
      searched += (searched.empty() ? "" : ", ") + folder.string() + (why ? " (" + why.message() + ")" : "");
    }
  }
  if (const fs::path small = small_set(name); directory.empty() && !small.empty()) {
    print_once(name + " was not found in " + searched + ": these are its first pictures (" + small.string() + "); " +
               (small.parent_path() / "get-data.sh").string() + " " + name + " fetches all");
    return small;
  }
  refuse(name, " (", files.file, ") was not found in ", searched,
         directory.empty() && !in_environment ? " (TANDEM_DATA is not set)" : "", ": run datasets/get-data.sh ", name,
         directory.empty() ? "" : " ", directory.string(),
         ", or name the folder that has it with --data or TANDEM_DATA");
}

// ---- pictures -------------------------------------------------------------------------------------------------------
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

Pictures blank_pictures(std::string name, const Shape& shape, std::vector<std::string> class_names) {
  return {.name = std::move(name),
          .images = host_tensor(shape, DType::u8),
          .labels = host_tensor({shape[0]}, DType::i32),
          .classes = int(class_names.size()),
          .class_names = std::move(class_names)};
}

Pictures in_memory(std::string name, std::span<const std::uint8_t> images, const Shape& shape,
                   std::span<const std::int32_t> labels, int classes) {
  require(shape.rank() == 4, name, ": pictures need a shape [N, H, W, C], not ", shape);
  require(std::int64_t(images.size()) == shape.numel(), name, ": ", images.size(), " bytes for pictures of the shape ",
          shape);
  require(std::int64_t(labels.size()) == shape[0], name, ": ", labels.size(), " labels for ", shape[0], " pictures");
  Pictures p = blank_pictures(std::move(name), shape);
  if (!images.empty()) std::memcpy(p.images.raw_write(), images.data(), images.size_bytes());
  if (!labels.empty()) std::memcpy(p.labels.raw_write(), labels.data(), labels.size_bytes());
  p.classes = classes;
  measure(p);
  check(p);
  return p;
}

Dataset Dataset::of(const Pictures& all, std::uint64_t seed) {
  if (all.count() < 2) refuse(all.name, ": ", counted(all.count(), "picture"), ", needs at least 2: one for tests");
  auto [train, test] = split(all, std::max<std::int64_t>(1, all.count() / 10), seed);
  train.name = all.name + " train";
  test.name = all.name + " test";
  return of_parts(all.name, std::move(train), std::move(test));
}

Dataset Dataset::of_parts(std::string name, Pictures train, Pictures test, const std::vector<float>& mean,
                          const std::vector<float>& std) {
  train.mean = mean;
  train.std = std;
  if (mean.empty()) measure(train);
  test.mean = train.mean;
  test.std = train.std;
  return {std::move(name), std::move(train), std::move(test)};
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
  std::vector<std::array<std::uint64_t, 256>> counts(channels);  // integers are exact in any order
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
    if (variance > 1e-8) p.std[c] = float(std::sqrt(variance));  // a constant channel is only shifted
  }
}

std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>> hold_back(std::int64_t n, std::int64_t held_back,
                                                                          std::uint64_t seed) {
  const std::vector<std::int32_t> order = permutation(n, Philox(seed, Stream::split), held_back);
  std::vector<std::int32_t> rest(order.begin() + held_back, order.end()),
      held(order.begin(), order.begin() + held_back);
  std::sort(rest.begin(), rest.end());
  std::sort(held.begin(), held.end());
  return {rest, held};
}

Tensor gather_rows(const Tensor& t, std::span<const std::int32_t> rows) {
  Shape shape = t.shape();
  shape[0] = std::int64_t(rows.size());
  Tensor y = host_tensor(shape, t.dtype());
  const std::size_t bytes = t.bytes() / std::size_t(t.size(0));
  const auto* from = static_cast<const std::byte*>(t.raw());
  auto* to = static_cast<std::byte*>(y.raw_write());
  for (std::size_t i = 0; i < rows.size(); i++) std::memcpy(to + i * bytes, from + std::size_t(rows[i]) * bytes, bytes);
  return y;
}

std::pair<Pictures, Pictures> split(const Pictures& p, std::int64_t held_back, std::uint64_t seed) {
  if (held_back < 0 || held_back >= p.count())
    refuse(p.name, ": cannot hold back ", held_back, " of ", p.count(), " pictures: use a smaller --val");
  if (held_back == 0) return {p, {}};
  auto part = [&](const std::vector<std::int32_t>& rows, const char* suffix) {
    Pictures q = p;
    q.name += suffix;
    q.images = gather_rows(p.images, rows);
    q.labels = gather_rows(p.labels, rows);
    return q;
  };
  const auto [rest, held] = hold_back(p.count(), held_back, seed);
  return {part(rest, ""), part(held, " held back")};
}

std::optional<int> class_without_pictures(const Pictures& p) {
  const std::int32_t* labels = p.labels.data<std::int32_t>();
  std::vector<bool> seen(std::size_t(p.classes), false);
  for (std::int64_t i = 0; i < p.count(); i++) seen[std::size_t(labels[i])] = true;
  const auto first = std::find(seen.begin(), seen.end(), false);
  if (first == seen.end()) return {};
  return int(first - seen.begin());
}

}  // namespace tandem
