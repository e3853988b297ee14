#include "tests/support.h"

#include <dlfcn.h>

namespace tandem::test {

namespace fs = std::filesystem;

// ---- comparing ------------------------------------------------------------------------------------------------------
testing::AssertionResult close(const std::string& name, const Numbers& got, const Numbers& want, double tolerance,
                               double floor) {
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
  const std::string said = error_of(action);
  return said.empty() ? testing::AssertionFailure() << "nothing was thrown" : holds(said, parts);
}

std::string stderr_of(const std::function<void()>& action) {
  testing::internal::CaptureStderr();
  try {
    action();
  } catch (...) {
    testing::internal::GetCapturedStderr();
    throw;
  }
  return testing::internal::GetCapturedStderr();
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  std::vector<std::byte> b(t.bytes());
  if (!b.empty()) t.backend().download(b.data(), t.raw(), b.size());
  return b;
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

std::vector<Column> columns(std::initializer_list<DType> dtypes) {
  std::vector<Column> all;
  for (const BackendKind& kind : backends())
    for (DType dtype : dtypes)
      if (Column c{kind.make(), dtype}; c.backend->supports(dtype)) all.push_back(std::move(c));
  return all;
}

void on_backends(std::initializer_list<DType> dtypes, const std::function<void(Backend&, DType)>& f) {
  for (const Column& column : columns(dtypes)) {
    SCOPED_TRACE(column.name());
    f(*column.backend, column.dtype);
  }
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

}  // namespace tandem::test
