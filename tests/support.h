// What several tests share: comparisons that say what differs, the backends of this build, folders that go away by
// themselves, a full disk. The numbers are in dumps.h.
#pragma once
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

#include "tests/dumps.h"

namespace tandem::test {

// ---- comparing ------------------------------------------------------------------------------------------------------
// Success, or: "conv1.weight[17]: got 0.25, expected 0.5 (0.5 of the largest, 1e-06 allowed)".
testing::AssertionResult close(const std::string& name, const Numbers& got, const Numbers& want, double tolerance,
                               double floor = 1e-6);

// Success when the text holds all parts.
testing::AssertionResult holds(const std::string& text, const std::vector<std::string>& parts);

// Success when action throws Error with a message that holds all parts.
testing::AssertionResult refused(const std::function<void()>& action, const std::vector<std::string>& parts);
// The call throws Error with a message that holds all parts.
#define EXPECT_REFUSED(call, ...) EXPECT_TRUE(refused([&] { call; }, {__VA_ARGS__}))

// The text of the E that `action` throws. Empty: none.
template <class E = Error>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

// The text that `action` prints to stderr.
std::string stderr_of(const std::function<void()>& action);

// The bytes of a tensor, in host memory.
std::vector<std::byte> bytes_of(const Tensor& t);

// ---- backends -------------------------------------------------------------------------------------------------------
// Every kind of backend that this build has; make() gives a fresh one, with two threads, so that parallel code runs in
// parallel.
struct BackendKind {
  std::string name;
  std::function<std::unique_ptr<Backend>(int threads)> make_with;
  std::unique_ptr<Backend> make() const { return make_with(2); }
};
const std::vector<BackendKind>& backends();

// Every backend in each of these types that it supports.
struct Column {
  std::unique_ptr<Backend> backend;
  DType dtype;
  std::string name() const { return backend->name() + " " + name_of(dtype); }
};
std::vector<Column> columns(std::initializer_list<DType> dtypes);
// Calls f on each.
void on_backends(std::initializer_list<DType> dtypes, const std::function<void(Backend&, DType)>& f);

// ---- fixtures: using Suite = OnReference; -----------------------------------------------------------------------------
// A test with a reference backend of its own, in two threads.
struct OnReference : testing::Test {
  const std::unique_ptr<Backend> backend = reference_backend(2);
};
// And of the cpu backend, in one.
struct OnCpu : testing::Test {
  const std::unique_ptr<Backend> backend = cpu_backend(1);
};

// ---- folders --------------------------------------------------------------------------------------------------------
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// A test with a folder of its own.
struct InFolder : testing::Test {
  TemporaryFolder folder;
};

// ---- the process ----------------------------------------------------------------------------------------------------
// While it lives, a file of this process cannot grow beyond `bytes`: what a full disk looks like.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes);
  ~FileLimit();
  FileLimit(const FileLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

// Whether this build is one of AddressSanitizer or ThreadSanitizer, which are slow and keep freed memory for a while.
bool sanitized();

}  // namespace tandem::test
