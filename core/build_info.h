// What this build is: version, compiler and flags, what was found and switched on, git revision. Several lines, the
// same ones that make printed. Defined in build/build_info.cpp, which the Makefile writes.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

const char* build_info();

// "0.1.0, git 1a2b3c": its first and its last line in short.
inline std::string version() {
  constexpr std::string_view name = "Tandem ", git = "\n  git ";
  const std::string_view info = build_info();
  const std::size_t revision = info.find(git);
  return std::string(info.substr(name.size(), info.find(' ', name.size()) - name.size())) +
         (revision == info.npos ? "" : ", git " + std::string(info.substr(revision + git.size())));
}

}  // namespace tandem
