#include "datasets/folder.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <thread>

#include "core/files/json.h"
#include "core/machine.h"
#include "datasets/image.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct File {
  fs::path path;
  std::int32_t label;
};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return text;
}

// What begins with a dot is hidden; __MACOSX is what a Mac puts into archives.
bool hidden(const fs::path& path) {
  const std::string name = path.filename().string();
  return name[0] == '.' || name == "__MACOSX" || name == "Thumbs.db" || name == "desktop.ini";
}

// What is in a folder and not hidden, sorted: the order that a directory happens to have changes nothing.
std::vector<fs::path> entries_of(const fs::path& directory) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (auto entry = fs::directory_iterator(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error))
    if (!hidden(entry->path())) paths.push_back(entry->path());
  if (error)
    refuse(directory.string(), ": cannot be read: ", error.message(), ": change its permissions, or move it away");
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Links to folders are folders. A link to nothing that could be one is refused.
bool is_folder(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found && !path.has_extension())
    refuse(path.string(), ": is a link to ", fs::read_symlink(path, error).string(),
           ", which is not there: fetch it, or remove the link");
  if (error && status.type() != fs::file_type::not_found) refuse(path.string(), ": cannot be read: ", error.message());
  return fs::is_directory(status);
}

std::vector<std::string> folders_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const fs::path& path : entries_of(directory))
    if (is_folder(path)) names.push_back(path.filename().string());
  return names;
}

// By its extension; the contents decide how it is read.
bool is_picture(const fs::path& path) {
  static const std::set<std::string> read{".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".ppm", ".pgm", ".pnm"};
  return read.contains(lower(path.extension().string()));
}

class Listing {
 public:
  // Sorted by class and path.
  std::vector<File> files_in(const fs::path& directory, const std::vector<std::string>& classes) {
    std::vector<File> files;
    for (const fs::path& path : entries_of(directory)) {
      if (!is_folder(path)) {
        outside(path);
        continue;
      }
      const std::string name = path.filename().string();
      auto at = std::lower_bound(classes.begin(), classes.end(), name);
      if (at == classes.end() || *at != name)
        refuse(path.string(), ": there is no such class among the training pictures: remove it, or add ",
               "pictures of it to train/");
      std::size_t before = files.size();
      collect(path, std::int32_t(at - classes.begin()), files);
      if (files.size() == before)
        refuse(path.string(), ": holds no pictures (.jpg, .png, .bmp, .ppm or .pgm)",
               left_out_.empty() ? "" : ", but there are files that are not read, " + left_out(),
               "; each folder there is a class: put some in, or remove it");
    }
    return files;
  }
  // Counts a file that is beside the class folders, or beside train/ and test/.
  void outside(const fs::path& file) {
    left_out_[is_picture(file) ? "pictures outside of the class folders" : kind(file)]++;
  }
  std::string left_out() const {  // "3 .webp, 1 .txt"
    std::string text;
    for (const auto& [what, count] : left_out_) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what;
    return text;
  }

 private:
  static std::string kind(const fs::path& path) {
    return path.has_extension() ? lower(path.extension().string()) : "without an extension";
  }
  void collect(const fs::path& directory, std::int32_t label, std::vector<File>& files) {
    std::error_code none;
    above_.push_back(fs::canonical(directory, none));
    if (std::count(above_.begin(), above_.end(), above_.back()) > 1)
      refuse(directory.string(), ": is a link to a folder that it lies in: remove it");
    for (const fs::path& path : entries_of(directory))
      if (is_folder(path))
        collect(path, label, files);
      else if (is_picture(path))
        files.push_back({path, label});
      else
        left_out_[kind(path)]++;
    above_.pop_back();
  }
  std::vector<fs::path> above_;  // the folders that are being read
  std::map<std::string, std::int64_t> left_out_;
};

// ---- training and test pictures -------------------------------------------------------------------------------------
struct Split {
  std::string train, test, unused;  // names of folders; train empty: there are only class folders
};

// The part of a data set that the name of a folder means: 't' training, 's' test, 'v' validation, 0 none. "Training",
// "train_images", "TestData" and "val2017" are such names.
char part_called(const std::string& folder) {
  std::string name;
  for (const char c : lower(folder))
    if (c >= 'a' && c <= 'z') name += c;
  for (const std::string_view filler : {"dataset", "data", "set", "images", "imgs", "img", "pictures", "split"})
    if (const std::size_t at = name.find(filler); at != std::string::npos) name.erase(at, filler.size());
  static const std::map<std::string, char> parts{{"train", 't'},      {"training", 't'}, {"trn", 't'}, {"test", 's'},
                                                 {"testing", 's'},    {"tst", 's'},      {"val", 'v'}, {"valid", 'v'},
                                                 {"validation", 'v'}, {"dev", 'v'}};
  const auto part = parts.find(name);
  return part == parts.end() ? 0 : part->second;
}

// True where two to four folders hold folders of the same names, as the parts of a data set do.
bool alike(const fs::path& directory, const std::vector<std::string>& names) {
  if (names.size() < 2 || names.size() > 4) return false;
  const std::vector<std::string> first = folders_in(directory / names[0]);
  return first.size() >= 2 && std::all_of(names.begin() + 1, names.end(), [&](const std::string& name) {
           return folders_in(directory / name) == first;
         });
}

Split split_of(const fs::path& directory) {
  const std::string where = directory.string();
  std::map<char, std::string> part;
  std::string others;
  const std::vector<std::string> names = folders_in(directory);
  for (const std::string& name : names) {
    const char p = part_called(name);
    if (!p)
      others += (others.empty() ? "" : ", ") + name + "/";
    else if (!part.try_emplace(p, name).second)
      refuse(where, ": has ", part[p], "/ and ", name, "/, which mean the same: join them");
  }
  Split s{part['t'], part['s'].empty() ? part['v'] : part['s'], ""};
  if (!others.empty() && (s.train.empty() || s.test.empty()) && alike(directory, names)) {
    const std::string what = where + ": " + names[0] + "/ and " + names[1] + "/ have folders of the same names";
    if (!s.train.empty() || !s.test.empty()) refuse(what, ": call them train/ and test/, or name one of them");
    std::fprintf(stderr, "%s and are taken for classes; if they are not, call them train/ and test/\n", what.c_str());
  }
  if (s.train.empty() != s.test.empty() && !others.empty()) {  // as valid/ beside invalid/, or train/ beside bus/
    std::fprintf(stderr, "%s: %s%s/ is taken for a class, beside %s\n", where.c_str(), s.train.c_str(), s.test.c_str(),
                 others.c_str());
    return {};
  }
  if (s.train.empty() && !s.test.empty())
    refuse(where, ": has ", s.test, "/ but no train/: name the folder that holds the class folders, ",
           (directory / s.test).string(), ", or add train/");
  if (!s.train.empty() && s.test.empty())
    refuse(where, ": has ", s.train, "/ but neither val/ nor test/: name ", (directory / s.train).string(),
           " instead, or add one of them");
  if (!s.train.empty() && !part['s'].empty() && !part['v'].empty())
    others += (others.empty() ? "" : ", ") + part['v'] + "/";
  if (!s.train.empty()) s.unused = others;
  return s;
}

// Calls body(i) for every i below n, on all cores. The exception of the smallest i is thrown.
template <class Body>
void on_all_cores(std::int64_t n, const Body& body) {
  std::atomic<std::int64_t> next = 0;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(n));
  auto work = [&] {
    for (std::int64_t i; (i = next++) < n;) try {
        body(i);
      } catch (...) {
        errors[std::size_t(i)] = std::current_exception();
        next = n;
      }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned k = 1; k < std::min<std::int64_t>(n, std::max(1u, std::thread::hardware_concurrency())); k++)
      threads.emplace_back(work);
    work();
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

struct Decoder {
  FolderOptions options;
  int side = 0;  // 0 until the first picture says it
  std::int64_t broken = 0;
  std::string first_broken = {};

  Image decode(const fs::path& path) const {
    auto file = open_bytes(path, {"put it back, or leave such pictures out with --skip-broken",
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
  const Split split = split_of(directory);
  const fs::path training_folder = split.train.empty() ? directory : directory / split.train;
  const std::vector<std::string> classes = folders_in(training_folder);
  if (classes.empty())
    refuse(where, ": holds no folders: expected a folder of pictures per class, like ", where, "/cat/1.jpg");
  if (classes.size() == 1) {
    const fs::path only = training_folder / classes.front();
    refuse(where, ": has a single class, ", classes.front(), ", expected at least two",
           folders_in(only).empty() ? "" : ": did you mean " + only.string() + "?");
  }
  Listing listing;
  for (const fs::path& path : split.train.empty() ? std::vector<fs::path>() : entries_of(directory))
    if (!is_folder(path)) listing.outside(path);
  std::vector<File> training = listing.files_in(training_folder, classes), testing;
  if (!split.test.empty()) {
    testing = listing.files_in(directory / split.test, classes);
  } else {
    const std::int64_t n = std::int64_t(training.size());
    const std::vector<char> held = draw_held_back(n, std::min(n, std::max<std::int64_t>(1, n / 10)), 0);
    std::vector<File> rest;
    for (std::int64_t i = 0; i < n; i++) (held[i] ? testing : rest).push_back(training[i]);
    training = rest;
  }
  if (testing.empty())
    refuse((directory / split.test).string(), ": holds no folders: expected one per class, as in train/");
  std::vector<char> tested(classes.size(), 0);
  for (const File& file : testing) tested[std::size_t(file.label)] = 1;
  if (const auto none = std::find(tested.begin(), tested.end(), 0); none != tested.end() && !split.test.empty())
    std::fprintf(stderr, "%s: %s/ has no pictures of %td of the %zu classes, the first is %s\n", where.c_str(),
                 split.test.c_str(), std::count(tested.begin(), tested.end(), 0), classes.size(),
                 classes[std::size_t(none - tested.begin())].c_str());
  if (const std::string kinds = listing.left_out(); !kinds.empty())
    std::fprintf(stderr, "%s: files that are not read: %s\n", where.c_str(), kinds.c_str());
  if (!split.unused.empty())
    std::fprintf(stderr, "%s: %s is not used (--val holds back training pictures)\n", where.c_str(),
                 split.unused.c_str());

  Decoder decoder{options};
  bool grey = true;
  Dataset d;
  const std::string written = plain_text(where);  // a path may hold any bytes, a checkpoint UTF-8
  d.name = directory.filename().empty() ? directory.parent_path().filename().string() : directory.filename().string();
  d.train = decoder.read(written + " train", training, grey);
  std::vector<char> seen(classes.size(), 0);
  for (std::int64_t i = 0; i < d.train.count(); i++) seen[std::size_t(d.train.labels.data<std::int32_t>()[i])] = 1;
  if (const auto none = std::find(seen.begin(), seen.end(), 0); none != seen.end())
    refuse(where, ": the class ", classes[std::size_t(none - seen.begin())], " has no picture to train on",
           !split.test.empty() ? "" : " (a tenth of all is drawn for testing)", ": add some");
  d.test = decoder.read(written + " test", testing, grey);
  if (decoder.broken)
    std::fprintf(stderr, "%s: %lld of %zu pictures left out that cannot be decoded, the first is %s\n", where.c_str(),
                 static_cast<long long>(decoder.broken), training.size() + testing.size(),
                 decoder.first_broken.c_str());
  for (Pictures* p : {&d.train, &d.test}) {
    if (grey) make_grey(*p);
    p->classes = int(classes.size());
    for (const std::string& name : classes) {
      p->class_names.push_back(plain_text(name));
      if (std::count(p->class_names.begin(), p->class_names.end(), p->class_names.back()) > 1)
        refuse(where, ": two classes are written ", p->class_names.back(), ": rename one of them");
    }
  }
  measure(d);
  return d;
}

}  // namespace tandem
