#include "tests/support.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>

namespace tandem::test {

namespace fs = std::filesystem;

// ---- comparing ------------------------------------------------------------------------------------------------------
testing::AssertionResult close(const std::string& name, const std::vector<double>& got, const std::vector<double>& want,
                               double tolerance, double floor) {
  if (got.size() != want.size())
    return testing::AssertionFailure() << name << ": got " << got.size() << " elements, expected " << want.size();
  Difference d = difference(got, want, floor);
  if (d.error <= tolerance) return testing::AssertionSuccess();
  return testing::AssertionFailure() << name << "[" << d.index << "]: got " << d.got << ", expected " << d.want << " ("
                                     << d.error << " of the largest, " << tolerance << " allowed)";
}

testing::AssertionResult holds(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (text.find(part) == std::string::npos)
      return testing::AssertionFailure() << "it does not say \"" << part << "\": " << text;
  return testing::AssertionSuccess();
}

testing::AssertionResult refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& e) {
    return holds(e.what(), parts);
  }
  return testing::AssertionFailure() << "nothing was thrown";
}

// ---- backends -------------------------------------------------------------------------------------------------------
const std::vector<BackendKind>& backends() {
  static const std::vector<BackendKind> kinds = [] {
    std::vector<BackendKind> all{{"reference", [](int threads) { return reference_backend(threads); }},
                                 {"cpu", [](int threads) { return cpu_backend(threads); }}};
    try {
      cuda_backend(0);
      all.push_back({"cuda", [](int) { return cuda_backend(0); }});
    } catch (const Error&) {  // built without CUDA, or no GPU here
    }
    return all;
  }();
  return kinds;
}

// ---- folders --------------------------------------------------------------------------------------------------------
TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "tandem-test-XXXXXX").string();
  require(mkdtemp(name.data()) != nullptr, "no temporary folder: ", std::strerror(errno));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

// ---- the process ----------------------------------------------------------------------------------------------------
FileLimit::FileLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
  getrlimit(RLIMIT_FSIZE, &before_);
  const rlimit now{bytes, before_.rlim_max};
  setrlimit(RLIMIT_FSIZE, &now);
}

FileLimit::~FileLimit() {
  setrlimit(RLIMIT_FSIZE, &before_);
  std::signal(SIGXFSZ, handler_);
}

bool sanitized() { return dlsym(RTLD_DEFAULT, "__asan_init") || dlsym(RTLD_DEFAULT, "__tsan_init"); }

std::size_t of_this_process(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string word; in >> word;)
    if (std::size_t kib; word == field && in >> kib) return kib * 1024;
  return 0;
}

}  // namespace tandem::test
