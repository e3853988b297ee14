// How a budget of memory is kept (autograd/memory_plan.h).
#pragma once
#include <cstdint>

namespace tandem {

enum class SwapMode : std::uint8_t { off, automatic, swap, recompute };  // off: it is only watched; automatic: both
const char* name_of(SwapMode swap);                                      // "auto"

}  // namespace tandem
