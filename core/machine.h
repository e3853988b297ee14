// What this machine has for this process.
#pragma once
#include <cstdint>

namespace tandem {

// Bytes that could still be allocated: what the system can give, and what is left of the limit of this process's control group (a
// container's, a batch job's), whichever is less. 0: unknown.
std::uint64_t available_memory();

}  // namespace tandem
