// Errors: one exception type. Its message states the fault, its place, and the remedy.
#pragma once
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tandem {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The user's input is wrong: the command line, or a file. Programs exit with status 2.
struct UsageError : Error {
  using Error::Error;
};

// fail("conv2d: input has ", c, " channels, weight expects ", k) throws Error with the parts joined.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

// The same for wrong input of the user: throws UsageError.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw UsageError(text.str());
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline std::string counted(std::int64_t n, const std::string& noun) {  // "1 step", "2 steps"
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

}  // namespace tandem
