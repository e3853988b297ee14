// Lists of hosts as launchers have them: "a:4,b:4", and files with a host a line.
#pragma once
#include <string>
#include <vector>

namespace tandem {

struct Host {
  std::string name;
  int slots = 1;  // ranks there
};

// "a:4,b" → {a, 4}, {b, 1}. Throws UsageError.
std::vector<Host> hosts_in_list(const std::string& list);
// A line each: `host`, `host:4` or `host slots=4`; # begins a comment. Throws UsageError with file:line; a host that
// comes twice and a word that is not known are refused.
std::vector<Host> hosts_in_file(const std::string& path);
std::vector<Host> hosts_in_text(const std::string& text, const std::string& path);

}  // namespace tandem
