// What several tests share: PyTorch's dumps read by name, comparisons that say what differs, the backends of this
// build, folders that go away by themselves.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/backend.h"

namespace tandem::test {

// A file of the source tree: "autograd/ops.h".
std::filesystem::path source(const std::string& path);

// ---- PyTorch's dumps ------------------------------------------------------------------------------------------------
// One tensor of a safetensors file, whatever its type there.
struct Dump {
  Shape shape;
  std::vector<double> values;
  Tensor on(Backend& backend, DType dtype) const { return Tensor::of(backend, shape, values, dtype); }
};

// tests/reference/NAME.safetensors, written by generate.py. Tensors are called "case/tensor"; the metadata of a case is
// a JSON object of its attributes. A name that is not there throws Error.
class Dumps {
 public:
  static const Dumps& of(const std::string& name);  // read once
  bool has(const std::string& tensor) const { return tensors_.count(tensor) != 0; }
  const Dump& at(const std::string& tensor) const;
  const nlohmann::json& attributes(const std::string& dump) const;
  std::vector<std::string> cases() const;

 private:
  explicit Dumps(const std::filesystem::path& file);
  std::string file_;
  std::map<std::string, Dump> tensors_;
  std::shared_ptr<nlohmann::json> attributes_;
};

// ---- comparing ------------------------------------------------------------------------------------------------------
// The largest |got − want|, divided by the largest |want| (by `floor` where that is smaller), and where it is. NaN counts
// as infinite; so does a different number of elements.
struct Difference {
  double error = 0;
  std::size_t index = 0;
  double got = 0, want = 0;
};
Difference difference(const std::vector<double>& got, const std::vector<double>& want, double floor = 1e-6);

// Success, or: "conv1.weight[17]: got 0.25, expected 0.5 (0.5 of the largest, 1e-06 allowed)".
testing::AssertionResult close(const std::string& name, const std::vector<double>& got, const std::vector<double>& want,
                               double tolerance, double floor = 1e-6);

// Success when action throws Error with a message that holds all parts.
testing::AssertionResult refused(const std::function<void()>& action, std::initializer_list<std::string> parts);

// ---- backends -------------------------------------------------------------------------------------------------------
// Every kind of backend that this build has; make() gives a fresh one, with two threads, so that parallel code runs in
// parallel.
struct BackendKind {
  std::string name;
  std::function<std::unique_ptr<Backend>(int threads)> make_with;
  std::unique_ptr<Backend> make() const { return make_with(2); }
};
const std::vector<BackendKind>& backends();

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
std::string contents(const std::filesystem::path& file);

// n numbers in [low, high), the same for the same name on every machine; step > 0 rounds them to multiples of it.
std::vector<double> numbers(const std::string& name, std::int64_t n, double low = -1, double high = 1, double step = 0);

}  // namespace tandem::test
