// Lists of hosts in the formats of launchers: "a:4,b:4", and files with one host per line.
#pragma once
#include <string>
#include <vector>

namespace tandem {

struct Host {
  std::string name;
  int slots = 1;  // ranks on the host
};

// "a:4,b" → {a, 4}, {b, 1}. Throws UsageError.
std::vector<Host> hosts_in_list(const std::string& list);
// One host per line: `host`, `host:4` or `host slots=4`; # begins a comment. Throws UsageError with file:line; repeated
// hosts and unknown words are refused.
std::vector<Host> hosts_in_text(const std::string& text, const std::string& path);

}  // namespace tandem
