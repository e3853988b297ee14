// The blocked matrix product of the reference backend: c += a·b in float, one thread, no library.
#pragma once
#include <cstdint>

namespace tandem::reference {

// A matrix of floats in memory; element (i, j) lies at data[i·row + j·column]. Swapping the strides transposes.
struct MatrixView {
  const float* data;
  std::int64_t row, column;
};

inline constexpr std::int64_t product_depth = 256, product_width = 256;  // the block of b that is packed at a time
inline constexpr std::int64_t product_scratch = product_depth * product_width;  // floats that the caller lends

// c[m, n] += a[m, k]·b[k, n]; the rows of c are `stride` floats apart; `packed` is product_scratch floats of scratch.
void add_product(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float* c,
                 std::int64_t stride, float* packed);

}  // namespace tandem::reference
