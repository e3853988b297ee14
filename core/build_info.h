// What this build is: version, compiler and flags, what was found and switched on, git revision. Several lines, the
// same ones that make printed. Defined in build/build_info.cpp, which the Makefile writes.
#pragma once

namespace tandem {

const char* build_info();

}  // namespace tandem
