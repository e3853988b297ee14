#include "dist/job/hosts.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "core/files/files.h"
#include "core/text.h"

namespace tandem {
namespace {

int slots_in(const std::string& text, const std::string& where) {
  const auto n = parsed<int>(text);
  if (!n || *n < 1 || *n > 4096)
    refuse(where, ": ", text.empty() ? "no number" : text, " where a number of ranks is expected, from 1 to 4096");
  return *n;
}

Host host_in(const std::string& word, const std::string& where) {
  const std::size_t colon = word.find(':');
  Host h{word.substr(0, colon), 1};
  if (colon != std::string::npos) h.slots = slots_in(word.substr(colon + 1), where);
  const bool plain =
      !h.name.empty() && h.name[0] != '-' && std::all_of(h.name.begin(), h.name.end(), [](unsigned char c) {
        return std::isalnum(c) || c == '.' || c == '-' || c == '_' || c == '@';
      });
  if (!plain) refuse(where, ": '", h.name, "' is no name of a host");
  return h;
}

void add(std::vector<Host>& hosts, const Host& host, const std::string& where) {
  for (const Host& h : hosts)
    if (h.name == host.name) refuse(where, ": ", host.name, " comes twice: say how many ranks by ", host.name, ":N");
  hosts.push_back(host);
}

}  // namespace

std::vector<Host> hosts_in_list(const std::string& list) {
  std::vector<Host> hosts;
  std::istringstream words(list);
  for (std::string w; std::getline(words, w, ',');) add(hosts, host_in(w, "-H " + list), "-H " + list);
  if (hosts.empty()) refuse("-H: no host is named");
  return hosts;
}

std::vector<Host> hosts_in_text(const std::string& text, const std::string& path) {
  std::vector<Host> hosts;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string where = path + ":" + std::to_string(++number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name, word;
    if (!(words >> name)) continue;
    Host h = host_in(name, where);
    while (words >> word) {
      if (!word.starts_with("slots=")) refuse(where, ": the word ", word, " is not known (host slots=4, or host:4)");
      h.slots = slots_in(word.substr(6), where);
    }
    add(hosts, h, where);
  }
  if (hosts.empty()) refuse(path, ": names no host");
  return hosts;
}

std::vector<Host> hosts_in_file(const std::string& path) { return hosts_in_text(read_file(path), path); }

}  // namespace tandem
