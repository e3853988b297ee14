#include "tests/support.h"

#include <unistd.h>

#include <cmath>
#include <cstring>

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

testing::AssertionResult refused(const std::function<void()>& action, std::initializer_list<std::string> parts) {
  try {
    action();
  } catch (const Error& e) {
    for (const std::string& part : parts)
      if (std::string(e.what()).find(part) == std::string::npos)
        return testing::AssertionFailure() << "the message does not say \"" << part << "\": " << e.what();
    return testing::AssertionSuccess();
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

}  // namespace tandem::test
