// Numbers that tests compare with: PyTorch's dumps, read by name; numbers drawn by name; how far two results are apart.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/error.h"

namespace tandem::test {

using Numbers = std::vector<double>;

// A file of the source tree: "autograd/ops.h".
std::filesystem::path source(const std::string& path);
std::string contents(const std::filesystem::path& file);
std::vector<nlohmann::json> lines_of(
    const std::string& metrics);  // of a file of JSON lines; one that is none: discarded

// ---- PyTorch's dumps ------------------------------------------------------------------------------------------------
// One tensor of a safetensors file, whatever its type there.
struct Dump {
  Shape shape;
  Numbers values;
  Tensor on(Backend& backend, DType dtype) const { return Tensor::of(backend, shape, values, dtype); }
};

using Attributes = nlohmann::json;  // of a case, by name: a["stride"]

// tests/reference/NAME.safetensors, written by generate.py. Tensors are called "case/tensor"; the metadata of a case is
// a JSON object of its attributes. A name that is not there throws Error.
class Dumps {
 public:
  static const Dumps& of(const char* name);  // read once
  bool has(const std::string& tensor) const { return tensors_.count(tensor) != 0; }
  const Dump& at(const std::string& tensor) const;
  const Attributes& attributes(const std::string& dump) const;
  std::vector<std::string> cases() const;

 private:
  explicit Dumps(const std::filesystem::path& file);
  std::string file_;
  std::map<std::string, Dump> tensors_;
  std::map<std::string, Attributes> attributes_;
};

// ---- numbers --------------------------------------------------------------------------------------------------------
// n numbers in [low, high), the same for the same name on every machine; step > 0 rounds them to multiples of it.
Numbers numbers(const std::string& name, std::int64_t n, double low = -1, double high = 1, double step = 0);

template <class T>
std::vector<T> numbers_as(const std::string& name, std::int64_t n, double low = -1, double high = 1) {
  std::vector<T> all;
  for (double v : numbers(name, n, low, high)) all.push_back(T(v));
  return all;
}

// The largest |got − want|, divided by the largest |want| (by `floor` where that is smaller), and where it is. NaN
// counts as infinite; so does a different number of elements.
struct Difference {
  double error = 0;
  std::size_t index = 0;
  double got = 0, want = 0;
};
Difference difference(const Numbers& got, const Numbers& want, double floor = 1e-6);

// The largest |a − b| of two vectors of one length; infinite where that is not a number.
double largest_gap(const Numbers& a, const Numbers& b);

}  // namespace tandem::test
