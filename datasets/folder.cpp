#include "datasets/folder.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <fstream>
#include <mutex>
#include <thread>

#include "core/machine.h"
#include "datasets/image.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct File {
  fs::path path;
  std::int32_t label;
};

std::vector<std::string> folders_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.is_directory() && entry.path().filename().string()[0] != '.')
      names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// Sorted by class and path: the order that a directory happens to have changes nothing.
std::vector<File> files_in(const fs::path& directory, const std::vector<std::string>& classes) {
  std::vector<File> files;
  for (const std::string& name : folders_in(directory)) {
    auto at = std::lower_bound(classes.begin(), classes.end(), name);
    if (at == classes.end() || *at != name)
      refuse((directory / name).string(), ": there is no such class among the training pictures: remove it, or add ",
             "pictures of it to train/");
    std::size_t before = files.size();
    for (const auto& entry : fs::recursive_directory_iterator(directory / name))
      if (entry.is_regular_file() && is_picture(entry.path()))
        files.push_back({entry.path(), std::int32_t(at - classes.begin())});
    if (files.size() == before)
      refuse((directory / name).string(),
             ": holds no pictures (.jpg, .png, .bmp, .ppm or .pgm), and each folder there ",
             "is a class: put some in, or remove it");
    std::sort(files.begin() + std::int64_t(before), files.end(),
              [](const File& a, const File& b) { return a.path < b.path; });
  }
  return files;
}

// Calls body(i) for every i below n, on all cores. The exception of the smallest i is thrown.
template <class Body>
void on_all_cores(std::int64_t n, const Body& body) {
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  std::int64_t failed = n;
  auto work = [&] {
    for (std::int64_t i; (i = next++) < n;) try {
        body(i);
      } catch (...) {
        next = n;
        std::lock_guard lock(mutex);
        if (i < failed) {
          failed = i;
          error = std::current_exception();
        }
      }
  };
  std::vector<std::jthread> threads;
  for (unsigned k = 1; k < std::min<std::int64_t>(n, std::max(1u, std::thread::hardware_concurrency())); k++)
    threads.emplace_back(work);
  work();
  threads.clear();
  if (error) std::rethrow_exception(error);
}

struct Decoder {
  FolderOptions options;
  int side = 0;  // 0 until the first picture says it
  std::int64_t broken = 0;
  std::string first_broken = {};

  Image decode(const fs::path& path) const {
    auto file = open_bytes(path, {"put it back",
                                  "put a whole one there, remove it, or leave such pictures out with "
                                  "--skip-broken"});
    Image image = decode_image(*file, 3);
    if (!options.size && (image.height != image.width || (side && image.height != side)))
      refuse(path.string(), ": has ", image.height, " × ", image.width, " pixels, expected ",
             side ? std::to_string(side) + " × " + std::to_string(side) + " as the first picture" : "a square",
             ": bring all to one size with --size, for example --size ", side ? side : 32);
    return image;
  }

  // The channels of pictures that are all grey are equal: one is kept, by the caller.
  Pictures read(const std::string& name, const std::vector<File>& files, bool& grey) {
    const std::int64_t n = std::int64_t(files.size());
    if (side == 0) side = options.size;
    for (std::int64_t i = 0; side == 0 && i < n; i++) try {
        side = int(decode(files[i].path).height);
      } catch (const UsageError&) {
        if (!options.skip_broken) throw;
      }
    if (side == 0) refuse(name, ": none of the ", n, " pictures can be decoded");
    const std::int64_t size = 3 * std::int64_t(side) * side;
    const std::size_t needed = std::size_t(n) * std::size_t(size), there = available_memory();
    if (needed > there)
      refuse(name, ": ", n, " pictures of ", side, " × ", side, " take ", needed >> 20, " MiB, and ", there >> 20,
             " MiB of memory are free: choose a smaller --size, or fewer pictures");
    Tensor images = host_tensor({n, side, side, 3}, DType::u8);
    std::uint8_t* to = images.write<std::uint8_t>();
    std::vector<char> whole(n, 1);
    std::atomic<bool> colour = false;
    on_all_cores(n, [&](std::int64_t i) {
      try {
        Image image = decode(files[i].path);
        if (!image.grey) colour = true;
        fit_square(image, side, to + i * size);
      } catch (const UsageError&) {
        if (!options.skip_broken) throw;
        whole[i] = 0;
      }
    });
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n; i++) {
      if (!whole[i]) {
        if (broken++ == 0) first_broken = files[i].path.string();
      } else if (kept++ < i) {
        std::copy_n(to + i * size, size, to + (kept - 1) * size);
      }
    }
    if (kept == 0) refuse(name, ": none of the ", n, " pictures can be decoded");
    Pictures p;
    p.name = name;
    p.images = images.slice(0, kept);
    p.labels = host_tensor({kept}, DType::i32);
    std::int32_t* label = p.labels.write<std::int32_t>();
    for (std::int64_t i = 0; i < n; i++)
      if (whole[i]) *label++ = files[i].label;
    grey = grey && !colour;
    return p;
  }
};

void make_grey(Pictures& p) {
  Tensor one = host_tensor({p.count(), p.height(), p.width(), 1}, DType::u8);
  const std::uint8_t* from = p.images.data<std::uint8_t>();
  std::uint8_t* to = one.write<std::uint8_t>();
  for (std::int64_t i = 0; i < one.numel(); i++) to[i] = from[3 * i];
  p.images = one;
}

}  // namespace

Dataset picture_folder(const fs::path& directory, const FolderOptions& options) {
  const std::string where = directory.string();
  auto has = [&](const char* name) { return fs::is_directory(directory / name); };
  const char* second = has("test") ? "test" : has("val") ? "val" : nullptr;
  if (!has("train") && second)
    refuse(where, ": has ", second, "/ but no train/: name the folder that holds the class folders, ",
           (directory / second).string(), ", or add train/");
  if (has("train") && !second)
    refuse(where, ": has train/ but neither val/ nor test/: name ", where, "/train instead, ", "or add one of them");
  const std::vector<std::string> classes = folders_in(has("train") ? directory / "train" : directory);
  if (classes.empty())
    refuse(where, ": holds no folders: expected a folder of pictures per class, like ", where, "/cat/1.jpg");
  if (classes.size() == 1) {
    const fs::path only = (has("train") ? directory / "train" : directory) / classes.front();
    refuse(where, ": has a single class, ", classes.front(), ", expected at least two",
           folders_in(only).empty() ? "" : ": did you mean " + only.string() + "?");
  }
  std::vector<File> training = files_in(has("train") ? directory / "train" : directory, classes), testing;
  if (second)
    testing = files_in(directory / second, classes);
  else {
    const std::int64_t n = std::int64_t(training.size());
    const std::vector<char> held = draw_held_back(n, std::min(n, std::max<std::int64_t>(1, n / 10)), 0);
    std::vector<File> rest;
    for (std::int64_t i = 0; i < n; i++) (held[i] ? testing : rest).push_back(training[i]);
    training = rest;
  }
  if (testing.empty())
    refuse((directory / second).string(), ": holds no folders: expected one per class, as in train/");

  Decoder decoder{options};
  bool grey = true;
  Dataset d;
  d.name = directory.filename().empty() ? directory.parent_path().filename().string() : directory.filename().string();
  d.train = decoder.read(where + " train", training, grey);
  std::vector<char> seen(classes.size(), 0);
  for (std::int64_t i = 0; i < d.train.count(); i++) seen[std::size_t(d.train.labels.data<std::int32_t>()[i])] = 1;
  if (const auto none = std::find(seen.begin(), seen.end(), 0); none != seen.end())
    refuse(where, ": the class ", classes[std::size_t(none - seen.begin())], " has no picture to train on",
           second ? "" : " (a tenth of all is drawn for testing)", ": add some");
  d.test = decoder.read(where + " test", testing, grey);
  if (decoder.broken)
    std::fprintf(stderr, "%s: %lld of %zu pictures left out that cannot be decoded, the first is %s\n", where.c_str(),
                 static_cast<long long>(decoder.broken), training.size() + testing.size(),
                 decoder.first_broken.c_str());
  for (Pictures* p : {&d.train, &d.test}) {
    if (grey) make_grey(*p);
    p->classes = int(classes.size());
    p->class_names = classes;
  }
  measure(d);
  return d;
}

}  // namespace tandem
