// One libFuzzer program for all formats: TANDEM_FUZZ says which (`make fuzz` runs them one after the other). With
// TANDEM_FUZZ_SEEDS the small valid inputs are written into that folder first.
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/fuzz/targets.h"

namespace {
void (*run)(std::span<const std::uint8_t>) = nullptr;
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char *name = std::getenv("TANDEM_FUZZ"), *folder = std::getenv("TANDEM_FUZZ_SEEDS");
  for (const auto& target : tandem::test::fuzz_targets())
    if (name && target.name == name) {
      run = target.run;
      for (std::size_t i = 0; folder && i < target.seeds.size(); i++)
        std::ofstream(std::string(folder) + "/seed-" + std::to_string(i), std::ios::binary)
            .write(reinterpret_cast<const char*>(target.seeds[i].data()), std::streamsize(target.seeds[i].size()));
    }
  if (run) return 0;
  std::fprintf(stderr, "TANDEM_FUZZ must be one of:");
  for (const auto& target : tandem::test::fuzz_targets()) std::fprintf(stderr, " %s", target.name.c_str());
  std::fprintf(stderr, "\n");
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  run({data, size});
  return 0;
}
