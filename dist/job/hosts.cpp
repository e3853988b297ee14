#include "dist/job/hosts.h"

#include <algorithm>
#include <regex>
#include <sstream>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

void add(std::vector<Host>& hosts, const std::string& text, const std::string& where) {
  static const std::regex form("\\s*([A-Za-z0-9._@][-A-Za-z0-9._@]*)(?:(?::|\\s+slots=)(\\S*))?\\s*");
  std::smatch parts;
  if (!std::regex_match(text, parts, form))
    refuse(where, ": '", text, "' is no name of a host (host, host:4 or host slots=4)");
  const std::string slots = parts[2].matched ? parts[2].str() : "1";
  const int n = parsed<int>(slots).value_or(0);
  if (n < 1 || n > 4096)
    refuse(where, ": ", slots.empty() ? "no number" : slots, " where a number of ranks is expected, from 1 to 4096");
  const Host host{parts[1], n};
  for (const Host& h : hosts)
    if (h.name == host.name) refuse(where, ": ", host.name, " comes twice: say how many ranks by ", host.name, ":N");
  hosts.push_back(host);
}

}  // namespace

std::vector<Host> hosts_in_text(const std::string& text, const std::string& path) {
  std::vector<Host> hosts;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    number++;
    line.erase(std::min(line.find('#'), line.size()));
    if (line.find_first_not_of(" \t\r") != std::string::npos) add(hosts, line, path + ":" + std::to_string(number));
  }
  if (hosts.empty()) refuse(path, ": names no host");
  return hosts;
}

std::vector<Host> hosts_in_list(const std::string& list) {
  std::vector<Host> hosts;
  for (const std::string& host : parts_of(list, ',')) add(hosts, host, "-H " + list);
  return hosts;
}

}  // namespace tandem
