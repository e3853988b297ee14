// The means by which a memory budget is kept (autograd/memory_plan.h).
#pragma once
#include <cstdint>

namespace tandem {

enum class SwapMode : std::uint8_t { off, automatic, swap, recompute };  // off: the plan only observes; automatic: both
const char* name_of(SwapMode swap);                                      // "auto"

}  // namespace tandem
