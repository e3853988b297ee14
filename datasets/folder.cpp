#include "datasets/readers.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <exception>
#include <set>

#include "core/files/json.h"
#include "core/launch.h"
#include "core/machine.h"
#include "datasets/image.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// ---- the files ------------------------------------------------------------------------------------------------------
std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return text;
}

// Names that begin with a dot are hidden; __MACOSX is added to archives by macOS.
bool hidden(const fs::path& path) {
  const std::string name = path.filename().string();
  return name[0] == '.' || name == "__MACOSX" || name == "Thumbs.db" || name == "desktop.ini";
}

// The entries of a folder that are not hidden, sorted, so that the result does not depend on the directory's order.
std::set<fs::path> entries_of(const fs::path& directory) try {
  std::set<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (!hidden(entry.path())) paths.insert(entry.path());
  return paths;
} catch (const fs::filesystem_error& e) {
  refuse(directory.string(), ": cannot be read: ", e.code().message(), ": change its permissions, or move it away");
}

// Links to folders are folders. A broken link that could be one is refused.
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

struct PictureFile {
  fs::path path;
  std::int32_t label;
};

using Paths = std::vector<fs::path>;

// Adds the pictures at any depth below a folder. `above`: the folders that are being read.
void list_pictures(const fs::path& directory, std::int32_t label, std::vector<PictureFile>& files, Paths& left_out,
                   Paths above = {}) {
  static const std::set<std::string> extensions{".jpg", ".jpeg", ".jpe", ".jfif", ".png",
                                                ".bmp", ".ppm",  ".pgm", ".pnm"};
  above.push_back(fs::canonical(directory));
  if (std::count(above.begin(), above.end(), above.back()) > 1)
    refuse(directory.string(), ": is a link to a folder that it lies in: remove it");
  for (const fs::path& path : entries_of(directory))
    if (is_folder(path))
      list_pictures(path, label, files, left_out, above);
    else if (extensions.contains(lower(path.extension().string())))
      files.push_back({path, label});
    else
      left_out.push_back(path);
}

// The pictures in the class folders of `directory`, sorted by class and path. Adds to `left_out` the files that are not
// pictures, or not in the folder of a class.
std::vector<PictureFile> list_classes(const fs::path& directory, const std::vector<std::string>& classes,
                                      Paths& left_out) {
  std::vector<PictureFile> files;
  for (const fs::path& path : entries_of(directory)) {
    if (!is_folder(path)) {
      left_out.push_back(path);
      continue;
    }
    const auto at = std::lower_bound(classes.begin(), classes.end(), path.filename().string());
    if (at == classes.end() || *at != path.filename())
      refuse(path.string(), ": there is no such class among the training pictures: remove it, or add ",
             "pictures of it to train/");
    const std::size_t before = files.size();
    list_pictures(path, std::int32_t(at - classes.begin()), files, left_out);
    if (files.size() == before)
      refuse(path.string(), ": holds no pictures (.jpg, .png, .bmp, .ppm or .pgm); each folder there is a class: put ",
             "some in, or remove it");
  }
  return files;
}

// The names of the folders with the training and the test pictures; both empty: there are only class folders.
struct Split {
  std::string train, test;
};

// A folder whose name begins with train, test or val, in upper or lower case, is that part of the data set (Training,
// test_images, val2017); so are trn, tst and dev. A training and a test part are used also beside other folders; one of
// them alone is then taken for a class.
Split split_of(const fs::path& directory) {
  Split s;
  std::string validation, others;
  for (const std::string& name : folders_in(directory)) {
    const std::string small = lower(name);
    std::string* part = small.starts_with("train") || small == "trn"  ? &s.train
                        : small.starts_with("test") || small == "tst" ? &s.test
                        : small.starts_with("val") || small == "dev"  ? &validation
                                                                      : nullptr;
    if (part && !part->empty())
      refuse(directory.string(), ": has ", *part, "/ and ", name, "/, which mean the same: join them");
    if (part)
      *part = name;
    else
      others += (others.empty() ? "" : ", ") + name + "/";
  }
  if (s.test.empty()) s.test = std::exchange(validation, "");
  const std::string where = directory.string(), found = s.train + s.test;
  if (s.train.empty() == s.test.empty()) {
    if (!validation.empty()) others += (others.empty() ? "" : ", ") + validation + "/";
    if (!found.empty() && !others.empty())
      std::fprintf(stderr, "%s: %s is not used (--val holds back training pictures)\n", where.c_str(), others.c_str());
    return s;
  }
  if (others.empty())
    refuse(where, ": has ", found, "/ but no ", s.train.empty() ? "train/" : "test/ or val/",
           ": name the folder that holds the class folders, ", (directory / found).string(), ", or add the other");
  std::fprintf(stderr, "%s: %s/ is taken for a class, beside %s\n", where.c_str(), found.c_str(), others.c_str());
  return {};
}

// ---- the pictures ---------------------------------------------------------------------------------------------------
Image decode(const fs::path& path, const FolderOptions& options, int side) {
  Image image =
      decode_image(open_bytes(path, "put a whole one there, or leave such pictures out with --skip-broken"), 3);
  if (!options.size && (image.height != image.width || (side && image.height != side)))
    refuse(path.string(), ": has ", image.height, " × ", image.width, " pixels, expected ",
           side ? std::to_string(side) + " × " + std::to_string(side) + " as the first picture" : "a square",
           ": bring all to one size with --size, for example --size ", side ? side : 32);
  return image;
}

// The side of all pictures: that of the option, or of the first picture that can be decoded.
int side_of(const std::vector<PictureFile>& files, const FolderOptions& options) {
  if (options.size) return options.size;
  for (const PictureFile& file : files) try {
      return int(decode(file.path, options, 0).height);
    } catch (const UsageError&) {
      if (!options.skip_broken) throw;
    }
  refuse("none of ", files.size(), " pictures can be decoded, the first is ", files.front().path.string());
}

// Decodes the files on all cores, as RGB. With --skip-broken, pictures that cannot be decoded are left out.
Pictures decode_all(const std::string& name, const std::vector<PictureFile>& files, const FolderOptions& options,
                    const std::vector<std::string>& classes, int side, bool& grey) {
  const std::int64_t n = std::int64_t(files.size()), size = 3 * std::int64_t(side) * side;
  const std::size_t needed = std::size_t(n * size), there = available_memory();
  if (needed > there)
    refuse(name, ": ", n, " pictures of ", side, " × ", side, " take ", needed >> 20, " MiB, and ", there >> 20,
           " MiB of memory are free: choose a smaller --size, or fewer pictures");
  Pictures p = blank_pictures(name, {n, side, side, 3}, classes);
  std::uint8_t* pixels = p.images.write<std::uint8_t>();
  std::vector<std::exception_ptr> errors(files.size());
  std::atomic<bool> coloured = false;
  parallel_ranges(default_threads(), n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++) try {
        const Image image = decode(files[std::size_t(i)].path, options, side);
        if (!image.grey) coloured = true;
        fit_square(image, side, pixels + i * size);
      } catch (...) {
        errors[std::size_t(i)] = std::current_exception();
      }
  });
  std::vector<std::int32_t> whole, broken;
  for (std::int32_t i = 0; i < n; i++) {
    p.labels.write<std::int32_t>()[i] = files[std::size_t(i)].label;
    try {
      if (errors[std::size_t(i)]) std::rethrow_exception(errors[std::size_t(i)]);
      whole.push_back(i);
    } catch (const UsageError&) {
      if (!options.skip_broken) throw;
      broken.push_back(i);
    }
  }
  grey = grey && !coloured;
  if (broken.empty()) return p;
  if (whole.empty()) refuse(name, ": none of the ", n, " pictures can be decoded");
  std::fprintf(stderr, "%s: %zu of %zu pictures left out that cannot be decoded, the first is %s\n", name.c_str(),
               broken.size(), files.size(), files[std::size_t(broken[0])].path.c_str());
  p.images = gather_rows(p.images, whole);
  p.labels = gather_rows(p.labels, whole);
  return p;
}

// The channels of grey pictures are equal: one is kept.
Tensor first_channel(const Tensor& rgb) {
  Tensor grey = host_tensor({rgb.size(0), rgb.size(1), rgb.size(2), 1}, DType::u8);
  const std::uint8_t* from = rgb.data<std::uint8_t>();
  std::uint8_t* to = grey.write<std::uint8_t>();
  for (std::int64_t i = 0; i < grey.numel(); i++) to[i] = from[3 * i];
  return grey;
}

std::vector<std::string> classes_in(const fs::path& directory) {
  const std::vector<std::string> classes = folders_in(directory);
  if (classes.empty())
    refuse(directory.string(), ": holds no folders: expected a folder of pictures per class, like ", directory.string(),
           "/cat/1.jpg");
  if (classes.size() > 1) return classes;
  const fs::path only = directory / classes.front();
  refuse(directory.string(), ": has a single class, ", classes.front(), ", expected at least two",
         folders_in(only).empty() ? "" : ": did you mean " + only.string() + "?");
}

}  // namespace

Dataset picture_folder(const fs::path& directory, const FolderOptions& options) {
  const std::string where = directory.string();
  const Split split = split_of(directory);
  const fs::path training_folder = split.train.empty() ? directory : directory / split.train;
  const std::vector<std::string> classes = classes_in(training_folder);
  Paths left_out;
  std::vector<PictureFile> training = list_classes(training_folder, classes, left_out), testing;
  if (!split.test.empty()) {
    testing = list_classes(directory / split.test, classes, left_out);
  } else {
    const std::int64_t n = std::int64_t(training.size());
    const auto [rest, held] = hold_back(n, std::max<std::int64_t>(1, n / 10), 0);
    const std::vector<PictureFile> all = std::exchange(training, {});
    for (std::int32_t i : rest) training.push_back(all[std::size_t(i)]);
    for (std::int32_t i : held) testing.push_back(all[std::size_t(i)]);
  }
  if (testing.empty())
    refuse((directory / split.test).string(), ": holds no folders: expected one per class, as in train/");
  if (!split.train.empty())
    for (const fs::path& path : entries_of(directory))
      if (!is_folder(path)) left_out.push_back(path);
  if (!left_out.empty())
    std::fprintf(stderr, "%s: %zu files are not read, the first is %s\n", where.c_str(), left_out.size(),
                 left_out.front().c_str());

  const std::string written = plain_text(where);  // a path may have any bytes, a checkpoint only UTF-8
  const int side = side_of(training, options);
  std::vector<std::string> names;
  for (const std::string& name : classes) {
    if (std::count(names.begin(), names.end(), plain_text(name)))
      refuse(where, ": two classes are written ", plain_text(name), ": rename one of them");
    names.push_back(plain_text(name));
  }
  bool grey = true;
  Pictures train = decode_all(written + " train", training, options, names, side, grey);
  Pictures test = decode_all(written + " test", testing, options, names, side, grey);
  if (grey)
    for (Pictures* p : {&train, &test}) p->images = first_channel(p->images);
  if (const auto none = class_without_pictures(train))
    refuse(where, ": the class ", classes[std::size_t(*none)], " has no picture to train on",
           split.test.empty() ? " (a tenth of all is drawn for testing)" : "", ": add some");
  if (const auto none = class_without_pictures(test); none && !split.test.empty())
    std::fprintf(stderr, "%s: %s/ has no pictures of some classes, the first is %s\n", where.c_str(),
                 split.test.c_str(), classes[std::size_t(*none)].c_str());
  const fs::path folder = directory.filename().empty() ? directory.parent_path() : directory;  // of "pictures/"
  return Dataset::of_parts(folder.filename().string(), std::move(train), std::move(test));
}

}  // namespace tandem
