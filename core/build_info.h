// Describes this build: version, compiler and flags, which libraries were found, which features are on, git revision.
// Several lines, equal to the lines that make printed. Defined in build/build_info.cpp, which the Makefile writes.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

const char* build_info();

// "0.1.0, git 1a2b3c": the first and the last line of build_info(), shortened.
inline std::string version() {
  constexpr std::string_view name = "Tandem ", git = "\n  git ";
  const std::string_view info = build_info();
  const std::size_t revision = info.find(git);
  return std::string(info.substr(name.size(), info.find(' ', name.size()) - name.size())) +
         (revision == info.npos ? "" : ", git " + std::string(info.substr(revision + git.size())));
}

}  // namespace tandem
