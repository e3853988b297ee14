// The blocking is Goto's (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008), less the
// packing of a: a block of b is copied into panels 16 columns wide, a panel stays in the first-level cache, and a tile
// of c, 6 rows by 16 columns, stays in vector registers while k runs. Plain loops: the compiler makes them vectors.
#include "core/reference/product.h"

#include <algorithm>

namespace tandem::reference {

namespace {

constexpr int tile_rows = 6, tile_columns = 16;

// b[k, n] → panels [n / 16][k][16]; the last panel is filled up with zeros.
void pack(std::int64_t n, std::int64_t k, MatrixView b, float* panel) {
  for (std::int64_t j0 = 0; j0 < n; j0 += tile_columns, panel += k * tile_columns) {
    const std::int64_t columns = std::min<std::int64_t>(tile_columns, n - j0);
    const float* from = b.data + j0 * b.column;
    if (columns == tile_columns && b.column == 1) {
      for (std::int64_t p = 0; p < k; p++)
        for (int j = 0; j < tile_columns; j++) panel[p * tile_columns + j] = from[p * b.row + j];
    } else if (columns == tile_columns) {
      for (std::int64_t p = 0; p < k; p++)
        for (int j = 0; j < tile_columns; j++) panel[p * tile_columns + j] = from[p * b.row + j * b.column];
    } else {
      for (std::int64_t p = 0; p < k; p++)
        for (int j = 0; j < tile_columns; j++)
          panel[p * tile_columns + j] = j < columns ? from[p * b.row + j * b.column] : 0.0f;
    }
  }
}

// c[rows, columns] += a[rows, k]·panel[k, 16], rows ≤ 6 and columns ≤ 16. A short tile repeats its last row of a and
// leaves out what it computed too much.
void multiply_tile(std::int64_t rows, std::int64_t columns, std::int64_t k, MatrixView a, const float* panel, float* c,
                   std::int64_t stride) {
  const float* a_row[tile_rows];
  for (int i = 0; i < tile_rows; i++) a_row[i] = a.data + std::min<std::int64_t>(i, rows - 1) * a.row;

  float sum[tile_rows][tile_columns] = {};
  for (std::int64_t p = 0; p < k; p++, panel += tile_columns)
#pragma GCC unroll 6
    for (int i = 0; i < tile_rows; i++) {
      const float x = a_row[i][p * a.column];
#pragma omp simd
      for (int j = 0; j < tile_columns; j++) sum[i][j] += x * panel[j];
    }

  if (rows == tile_rows && columns == tile_columns) {
    for (int i = 0; i < tile_rows; i++)
      for (int j = 0; j < tile_columns; j++) c[i * stride + j] += sum[i][j];
  } else {
    for (std::int64_t i = 0; i < rows; i++)
      for (std::int64_t j = 0; j < columns; j++) c[i * stride + j] += sum[i][j];
  }
}

}  // namespace

void add_product(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float* c,
                 std::int64_t stride, float* packed) {
  for (std::int64_t j0 = 0; j0 < n; j0 += product_width)
    for (std::int64_t p0 = 0; p0 < k; p0 += product_depth) {
      const std::int64_t width = std::min(product_width, n - j0), depth = std::min(product_depth, k - p0);
      pack(width, depth, {b.data + p0 * b.row + j0 * b.column, b.row, b.column}, packed);
      for (std::int64_t j = 0; j < width; j += tile_columns)
        for (std::int64_t i = 0; i < m; i += tile_rows)
          multiply_tile(std::min<std::int64_t>(tile_rows, m - i), std::min<std::int64_t>(tile_columns, width - j),
                        depth, {a.data + i * a.row + p0 * a.column, a.row, a.column}, packed + j * depth,
                        c + i * stride + j0 + j, stride);
    }
}

}  // namespace tandem::reference
