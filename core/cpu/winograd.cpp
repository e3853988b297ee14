// Winograd convolution F(4×4, 3×3).
//
// The idea. Four outputs of a 3-tap filter are coefficients of a product of polynomials; a product of degree 5 is fixed
// by its values at 6 points. So data and filter are evaluated at 6 points, multiplied point by point, and interpolated:
// 6 multiplications instead of 4·3 = 12. In two dimensions: 36 instead of 144, a factor of four. With many channels the
// multiplications at one of the 36 points p form a matrix product over channels, M_p = V_p·U_p [tiles × c_in · c_in ×
// c_out], which take most of the time. Per tile of 6×6 inputs d (tiles overlap by 2), filter g, 4×4 outputs y:
//     V = Bᵀ d B        U = G g Gᵀ        M_p = V_p·U_p for the 36 positions p        y = Aᵀ M A
// Data gradient: the same pass over dy, with filters rotated by 180° and in- and output channels exchanged.
// Filter gradient: the transposed maps; W = A dy Aᵀ, dU_p = W_pᵀ·V_p summed over all tiles, dg = Gᵀ dU G.
//
// The points are 0, ±5/8, ±3/2 and ∞. Any six distinct points are correct. With the textbook's 0, ±1, ±2, ∞ the entries
// of B and A differ more in size, and three to five times as much precision is lost. oneDNN uses 5/8, too; 5/8 and its
// square 25/64 are exact in binary. The error is about 1e-6 of the largest output (5e-7 for the plain sum).
//
// Layout. Transforms vectorise over channels, which are adjacent in NHWC. Transformed data are stored as
// [p][channel block][tile][channel in block], so that a matrix product reads its operands as one stream. Planes are
// padded by an odd number of cache lines, to avoid strides of powers of two. A chunk of tiles goes through transform,
// product and inverse transform while it is in cache.
#include "core/cpu/winograd.h"

#include <algorithm>

#include "core/cpu/simd.h"
#include "core/error.h"

namespace tandem::cpu::winograd {
namespace {

constexpr int max_channels = 4096;
// The limit in bytes of the private copies of a filter gradient. Above it threads share one copy, and together
// transform tiles of about this size.
constexpr std::size_t shared_budget = 48u << 20;

template <class T>
alignas(64) const T outside[max_channels] = {};  // the pixels outside a picture

int block_of(int channels) { return channels % 64 == 0 ? 64 : channels % 32 == 0 ? 32 : 16; }
std::size_t plane(std::size_t floats) { return floats + 3 * 16; }  // one p, padded by an odd number of cache lines

// The pictures that a pass reads (h × w) and writes (out_h × out_w), cut into 4×4 tiles of the output.
struct Tiling {
  int n, h, w, out_h, out_w, pad, across, down;
  Tiling(int n, int h, int w, int out_h, int out_w, int pad)
      : n(n), h(h), w(w), out_h(out_h), out_w(out_w), pad(pad), across((out_w + 3) / 4), down((out_h + 3) / 4) {}
  int tiles() const { return n * down * across; }
};
Tiling forward_tiling(const ConvShape& s) {
  return {int(s.n), int(s.h), int(s.w), int(s.out_h()), int(s.out_w()), int(s.pad_h)};
}
Tiling backward_tiling(const ConvShape& s) {
  return {int(s.n), int(s.out_h()), int(s.out_w()), int(s.h), int(s.w), 2 - int(s.pad_h)};
}

// ---- the one-dimensional transforms, applied to columns and then to rows --------------------------------------------
constexpr float a = 0.625f, b = 1.5f, aa = a * a, bb = b * b;
constexpr float g0 = 1 / (aa * bb), ga = 1 / (2 * aa * (aa - bb)), gb = 1 / (2 * bb * (bb - aa));

inline void input_transform(const vf* d, vf* v) {  // Bᵀ: 6 → 6
  vf p = d[4] - bb * d[2], q = a * (d[3] - bb * d[1]), r = d[4] - aa * d[2], t = b * (d[3] - aa * d[1]);
  v[0] = aa * bb * d[0] - (aa + bb) * d[2] + d[4];
  v[1] = p + q;
  v[2] = p - q;
  v[3] = r + t;
  v[4] = r - t;
  v[5] = aa * bb * d[1] - (aa + bb) * d[3] + d[5];
}
inline void output_transform(const vf* m, vf* y) {  // Aᵀ: 6 → 4
  vf s = m[1] + m[2], d = m[1] - m[2], S = m[3] + m[4], D = m[3] - m[4];
  y[0] = m[0] + s + S;
  y[1] = a * d + b * D;
  y[2] = aa * s + bb * S;
  y[3] = a * aa * d + b * bb * D + m[5];
}
inline void output_gradient_transform(const vf* dy, vf* w) {  // A: 4 → 6
  vf e = dy[0] + aa * dy[2], f = a * dy[1] + a * aa * dy[3], g = dy[0] + bb * dy[2], h = b * dy[1] + b * bb * dy[3];
  w[0] = dy[0];
  w[1] = e + f;
  w[2] = e - f;
  w[3] = g + h;
  w[4] = g - h;
  w[5] = dy[3];
}
inline void filter_transform(const vf* g, vf* u) {  // G: 3 → 6
  vf s = g[0] * ga + g[2] * (aa * ga), t = g[1] * (a * ga), S = g[0] * gb + g[2] * (bb * gb), D = g[1] * (b * gb);
  u[0] = g[0] * g0;
  u[1] = s + t;
  u[2] = s - t;
  u[3] = S + D;
  u[4] = S - D;
  u[5] = g[2];
}
inline void filter_gradient_transform(const vf* u, vf* dg) {  // Gᵀ: 6 → 3
  vf s = ga * (u[1] + u[2]), d = ga * (u[1] - u[2]), S = gb * (u[3] + u[4]), D = gb * (u[3] - u[4]);
  dg[0] = g0 * u[0] + s + S;
  dg[1] = a * d + b * D;
  dg[2] = aa * s + bb * S + u[5];
}

// ---- the two-dimensional transforms of whole tiles ------------------------------------------------------------------
// Transforms tiles [first, first + count) of the pictures x to V[p][block][slot][channel], in slots from `slot` of a
// chunk of `chunk` slots. size 6: Bᵀ d B of the 6×6 patch with its halo, from the pictures that are read. size 4:
// A dy Aᵀ of the 4×4 patch.
template <int size, class T>
void scatter(const T* x, const Tiling& s, int channels, int first, int count, float* V, int chunk, int slot) {
  const int block = block_of(channels), halo = size == 6 ? s.pad : 0;
  const int h = size == 6 ? s.h : s.out_h, w = size == 6 ? s.w : s.out_w;
  const std::size_t stride = plane(std::size_t(chunk) * channels);
  for (int t = 0; t < count; t++) {
    const int tile = first + t, left = tile % s.across * 4 - halo, top = tile / s.across % s.down * 4 - halo;
    const std::int64_t picture = tile / (s.across * s.down);
    const T* from[size * size];  // pixels outside the picture point to zeros
    for (int i = 0; i < size; i++)
      for (int j = 0; j < size; j++)
        from[i * size + j] = unsigned(top + i) < unsigned(h) && unsigned(left + j) < unsigned(w)
                                 ? x + ((picture * h + top + i) * w + left + j) * channels
                                 : outside<T>;
    for (int c = 0; c < channels; c += VL) {
      vf columns[6][size];
#pragma GCC unroll 6
      for (int j = 0; j < size; j++) {
        vf d[size], v[6];
#pragma GCC unroll 6
        for (int i = 0; i < size; i++) d[i] = load(from[i * size + j] + c);
        if constexpr (size == 6)
          input_transform(d, v);
        else
          output_gradient_transform(d, v);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) columns[i][j] = v[i];
      }
      float* to = V + std::size_t(c / block) * chunk * block + std::size_t(slot + t) * block + c % block;
#pragma GCC unroll 6
      for (int i = 0; i < 6; i++) {
        vf v[6];
        if constexpr (size == 6)
          input_transform(columns[i], v);
        else
          output_gradient_transform(columns[i], v);
#pragma GCC unroll 6
        for (int j = 0; j < 6; j++) store(to + std::size_t(i * 6 + j) * stride, v[j]);
      }
    }
  }
}

// y = Aᵀ M A for one block of output channels from c0: reads M[p][slot][block] and writes to the pictures y. measuring:
// also computes the sums of y in `measured` (a part of Moments).
template <bool measuring, class T>
void gather(const float* M, std::size_t stride, int block, T* y, const Tiling& s, int channels, int c0, int first,
            int count, const Epilogue& epilogue, bool add, float* measured) {
  for (int t = 0; t < count; t++) {
    const int tile = first + t, left = tile % s.across * 4, top = tile / s.across % s.down * 4;
    const std::int64_t picture = tile / (s.across * s.down);
    const int rows = std::min(4, s.out_h - top), columns = std::min(4, s.out_w - left);
    T* const corner = y + ((picture * s.out_h + top) * s.out_w + left) * channels + c0;
    for (int c = 0; c < block; c += VL) {
      const float* from = M + std::size_t(t) * block + c;
      vf half[4][6];
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) {
        vf m[6], v[4];
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) m[i] = load(from + std::size_t(i * 6 + j) * stride);
        output_transform(m, v);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) half[i][j] = v[i];
      }
      const vf bias = epilogue.bias ? load(epilogue.bias + c0 + c) : vf{};
      const vf floor = epilogue.relu ? vf{} : vf{} - __builtin_inff();
      vf shift, total{}, square{};
      float* const sums = measuring ? measured + c0 + c : nullptr;
      if constexpr (measuring)
        if (t > 0) shift = load(sums);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        vf v[4];
        output_transform(half[i], v);
        if constexpr (measuring)
          if (t == 0 && i == 0) shift = v[0];
        T* to = corner + std::int64_t(i) * s.out_w * channels + c;
        if (i < rows)
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++)
            if (j < columns) {
              T* at = to + j * channels;
              vf r = v[j] + bias;
              r = r < floor ? floor : r;  // keeps a NaN
              store(at, add ? r + load(at) : r);
              if constexpr (measuring) {
                const vf d = r - shift;
                total += d;
                square += d * d;
              }
            }
      }
      if constexpr (measuring) {
        if (t == 0) store(sums, shift);
        store(sums + channels, t ? total + load(sums + channels) : total);
        store(sums + 2 * channels, t ? square + load(sums + 2 * channels) : square);
      }
    }
  }
}

template <class T>
void gather(const float* M, std::size_t stride, int block, T* y, const Tiling& s, int channels, int c0, int first,
            int count, const Epilogue& epilogue, bool add, int part) {
  if (!epilogue.moments)
    return gather<false>(M, stride, block, y, s, channels, c0, first, count, epilogue, add, nullptr);
  gather<true>(M, stride, block, y, s, channels, c0, first, count, epilogue, add, epilogue.moments->part(part));
  std::int64_t& rows = epilogue.moments->rows[std::size_t(part)];
  if (c0 > 0) return;
  for (int tile = first; tile < first + count; tile++)
    rows += std::min(4, s.out_h - tile / s.across % s.down * 4) * std::min(4, s.out_w - tile % s.across * 4);
}

// Transforms filters to U[p][row][column], where a row of U has `block` floats: `rows` rows from r0 and VL columns from
// c0. Forward: rows are input channels, columns output channels. Rotated: the reverse, with the taps in reverse order.
void filters(const float* w, int c_in, bool rotated, float* U, std::size_t stride, int block, int rows, int r0,
             int c0) {
  vf g[9][VL];  // [tap][row], a vector of columns
  for (int r = 0; r < rows; r += VL) {
    for (int tap = 0; tap < 9; tap++)
      if (rotated) {
        for (int k = 0; k < VL; k++) g[8 - tap][k] = load(w + (std::int64_t(r0 + r + k) * 9 + tap) * c_in + c0);
      } else {
        for (int k = 0; k < VL; k++) g[tap][k] = load(w + (std::int64_t(c0 + k) * 9 + tap) * c_in + r0 + r);
        transpose(g[tap]);
      }
    for (int k = 0; k < VL; k++) {
      vf half[6][3];
#pragma GCC unroll 3
      for (int j = 0; j < 3; j++) {
        vf column[3] = {g[j][k], g[3 + j][k], g[6 + j][k]}, v[6];
        filter_transform(column, v);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) half[i][j] = v[i];
      }
      float* to = U + std::size_t(r + k) * block;
#pragma GCC unroll 6
      for (int i = 0; i < 6; i++) {
        vf v[6];
        filter_transform(half[i], v);
#pragma GCC unroll 6
        for (int j = 0; j < 6; j++) store(to + std::size_t(i * 6 + j) * stride, v[j]);
      }
    }
  }
}

// dg = Gᵀ (Σ copies of dU) G for one row (an output channel) of a block of input channels: dw[tap][c_in] from c0.
void filter_gradient(const float* U, std::size_t stride, std::size_t copy, int copies, int block, float* dw, int c_in,
                     int c0, bool add) {
  for (int c = 0; c < block; c += VL) {
    vf half[3][6];
#pragma GCC unroll 6
    for (int j = 0; j < 6; j++) {
      vf u[6], v[3];
#pragma GCC unroll 6
      for (int i = 0; i < 6; i++) {
        const float* from = U + c + std::size_t(i * 6 + j) * stride;
        u[i] = load(from);
        for (int k = 1; k < copies; k++) u[i] += load(from + copy * k);
      }
      filter_gradient_transform(u, v);
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) half[i][j] = v[i];
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
      vf v[3];
      filter_gradient_transform(half[i], v);
#pragma GCC unroll 3
      for (int j = 0; j < 3; j++) {
        float* to = dw + (i * 3 + j) * std::int64_t(c_in) + c0 + c;
        store(to, add ? v[j] + load(to) : v[j]);
      }
    }
  }
}

// ---- the matrix products --------------------------------------------------------------------------------------------
// C[m × block] (+)= A·B with a register tile of MR rows × NR vectors; one element of A at a time is broadcast against a
// row of B. All strides are constants (depth: the row length of A's block): with run-time strides the addresses of the
// rows do not fit the registers. transposed: A is read by columns (filter gradient: rows are channels, the depth runs
// over tiles).
template <int MR, int NR, int depth, int block, bool transposed>
void tile_product(int K, const float* A, const float* B, float* C, bool add) {
  constexpr int row = transposed ? 1 : depth, step = transposed ? depth : 1;
  vf c[MR][NR];
#pragma GCC unroll 24
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) c[r][n] = add ? load(C + r * block + n * VL) : vf{};
#pragma GCC unroll 1
  for (int k = 0; k < K; k++, A += step, B += block) {
    vf v[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) v[n] = load(B + n * VL);
#pragma GCC unroll 24
    for (int r = 0; r < MR; r++) {
      vf x = broadcast(A[r * row]);
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) c[r][n] += x * v[n];
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) store(C + r * block + n * VL, c[r][n]);
}

template <int MR, int NR, int depth, int block, bool transposed>
void row_tiles(int m, int K, const float* A, const float* B, float* C, bool add) {
  for (; m >= MR; m -= MR, A += MR * (transposed ? 1 : depth), C += MR * block)
    for (int n = 0; n < block; n += NR * VL) tile_product<MR, NR, depth, block, transposed>(K, A, B + n, C + n, add);
  if constexpr (MR > 1) {
    constexpr int smaller = MR > 16 ? 16 : MR > 8 ? 8 : MR > 4 ? 4 : MR - 1;
    if (m) row_tiles<smaller, NR, depth, block, transposed>(m, K, A, B, C, add);
  }
}

template <bool transposed>
auto product(int block, int depth) {
  constexpr int accumulators = registers == 32 ? 24 : 12;
  auto choose = [&]<int N>() {
    constexpr int NR = registers == 32 ? N / VL : 2, MR = accumulators / NR;
    return depth == 64   ? row_tiles<MR, NR, 64, N, transposed>
           : depth == 32 ? row_tiles<MR, NR, 32, N, transposed>
                         : row_tiles<MR, NR, 16, N, transposed>;
  };
  return block == 64   ? choose.template operator()<64>()
         : block == 32 ? choose.template operator()<32>()
                       : choose.template operator()<16>();
}

// ---- forward and data gradient --------------------------------------------------------------------------------------
// True if the transformed filters are larger than the transformed data (512 channels at 4²); then they are not stored.
bool few_tiles(const Tiling& s, int c_in, int c_out) {
  return std::int64_t(c_in) * c_out > std::int64_t(s.tiles()) * (c_in + c_out);
}

// For few tiles: all tiles are transformed once. Then each thread takes blocks of output channels, and transforms the
// 64×64 filters that it needs in its own cache.
template <class T>
void convolve_few(const T* x, const float* w, T* y, const Tiling& s, int c_in, int c_out, bool rotated,
                  const Epilogue& epilogue, bool add, CachingAllocator& allocator, int threads) {
  const int tiles = s.tiles(), N = block_of(c_out), K = block_of(c_in), filter_c_in = rotated ? c_out : c_in;
  const std::size_t v_plane = plane(std::size_t(tiles) * c_in), m_plane = plane(std::size_t(tiles) * N);
  const std::size_t u_plane = plane(std::size_t(K) * N);
  Scratch memory(allocator, 4 * 36 * (v_plane + threads * (m_plane + u_plane)));
  float* V = memory.carve<float>(36 * v_plane);
  float* private_part = memory.carve<float>(36 * threads * (m_plane + u_plane));
  dealt_out(threads, (tiles + 3) / 4, [&](int item, int) {
    scatter<6>(x, s, c_in, item * 4, std::min(4, tiles - item * 4), V, tiles, item * 4);
  });
  const auto multiply = product<false>(N, K);
  if (epilogue.moments) epilogue.moments->begin(1, c_out);
  dealt_out(threads, c_out / N, [&](int item, int lane) {
    float *U = private_part + 36 * lane * (m_plane + u_plane), *M = U + 36 * u_plane;
    const int c0 = item * N;
    for (int k = 0; k < c_in; k += K) {
      for (int c = 0; c < N; c += VL) filters(w, filter_c_in, rotated, U + c, u_plane, N, K, k, c0 + c);
      for (int p = 0; p < 36; p++)
        multiply(tiles, K, V + p * v_plane + std::size_t(k) * tiles, U + p * u_plane, M + p * m_plane, k > 0);
    }
    gather(M, m_plane, N, y, s, c_out, c0, 0, tiles, epilogue, add, 0);
  });
}

template <class T>
void convolve(const T* x, const float* w, const float* U, T* y, const Tiling& s, int c_in, int c_out, bool rotated,
              const Epilogue& epilogue, bool add, CachingAllocator& allocator, int threads) {
  if (!U) return convolve_few(x, w, y, s, c_in, c_out, rotated, epilogue, add, allocator, threads);
  const int tiles = s.tiles(), N = block_of(c_out), K = block_of(c_in);
  // A chunk is short enough for V and M to stay in the L2 cache, and long enough to reuse each fetched filter often.
  const int wanted = c_in + N <= 32 || c_in >= 256 ? 72 : c_in >= 128 ? 48 : 36;
  const int chunk = std::min(wanted, (tiles + threads - 1) / threads);
  const std::size_t u_plane = plane(std::size_t(c_in) * c_out);
  const std::size_t v_plane = plane(std::size_t(chunk) * c_in), m_plane = plane(std::size_t(chunk) * N);
  Scratch memory(allocator, 4 * 36 * threads * (v_plane + m_plane));
  float* private_part = memory.carve<float>(36 * threads * (v_plane + m_plane));
  const auto multiply = product<false>(N, K);
  const int items = (tiles + chunk - 1) / chunk;
  if (epilogue.moments) epilogue.moments->begin(items, c_out);
  dealt_out(threads, items, [&](int turn, int lane) {
    // The filter gradient has just read dy from front to back. The data gradient begins at the end of dy, which is
    // still in cache.
    const int item = rotated ? items - 1 - turn : turn;
    float *V = private_part + 36 * lane * (v_plane + m_plane), *M = V + 36 * v_plane;
    const int first = item * chunk, count = std::min(chunk, tiles - first);
    scatter<6>(x, s, c_in, first, count, V, chunk, 0);
    for (int c0 = 0; c0 < c_out; c0 += N) {  // one block of output channels at a time: M stays small
      for (int p = 0; p < 36; p++)
        for (int k = 0; k < c_in; k += K)
          multiply(count, K, V + p * v_plane + std::size_t(k) * chunk,
                   U + p * u_plane + std::size_t(c0) * c_in + std::size_t(k) * N, M + p * m_plane, k > 0);
      gather(M, m_plane, N, y, s, c_out, c0, first, count, epilogue, add, item);
    }
  });
}

}  // namespace

// ---- the contract ---------------------------------------------------------------------------------------------------
bool applicable(const ConvShape& s) {
  return s.kh == 3 && s.kw == 3 && s.stride_h == 1 && s.stride_w == 1 && s.dilation_h == 1 && s.dilation_w == 1 &&
         s.groups == 1 && s.pad_h == s.pad_w && s.pad_h >= 0 && s.pad_h <= 2 && s.c_in % 16 == 0 && s.c_out % 16 == 0 &&
         s.c_in <= max_channels && s.c_out <= max_channels && s.out_h() > 0 && s.out_w() > 0;
}

double filled(const ConvShape& s) {
  const Tiling t = forward_tiling(s);
  return double(t.out_h * t.out_w) / (16.0 * t.across * t.down);
}

bool wants_prepared(const ConvShape& s, bool rotated) {
  return rotated ? !few_tiles(backward_tiling(s), int(s.c_out), int(s.c_in))
                 : !few_tiles(forward_tiling(s), int(s.c_in), int(s.c_out));
}

std::size_t prepared_bytes(const ConvShape& s) { return 4 * 36 * plane(std::size_t(s.c_in * s.c_out)); }

void prepare(const ConvShape& s, const float* w, bool rotated, float* prepared, int threads) {
  const int rows = int(rotated ? s.c_out : s.c_in), columns = int(rotated ? s.c_in : s.c_out), N = block_of(columns);
  const std::size_t stride = plane(std::size_t(rows) * columns);
  if (rows * columns <= 64 * 64) threads = 1;  // faster than waking the other threads
  dealt_out(threads, columns / 16 * (rows / 16), [&](int item, int) {
    const int r = item % (rows / 16) * 16;
    for (int c = item / (rows / 16) * 16, end = c + 16; c < end; c += VL)
      filters(w, int(s.c_in), rotated, prepared + std::size_t(c / N) * rows * N + std::size_t(r) * N + c % N, stride, N,
              16, r, c);
  });
}

namespace {

// The division of the filter gradient: blocks of dU, tiles at a time, and the distances of their 36 planes.
struct FilterPlan {
  int c_in, c_out, tiles, N = block_of(c_in), R = block_of(c_out), blocks = c_in / N * (c_out / R);
  std::size_t u_plane = plane(std::size_t(R) * N), u_block = 36 * u_plane, u_size = u_block * blocks;
  bool all_share;  // all threads share one dU
  int copies, chunk;
  std::size_t v_plane, w_plane;
  void (*multiply)(int, int, const float*, const float*, float*, bool) = winograd::product<true>(N, R);

  FilterPlan(const ConvShape& s, int all_tiles, int threads)
      : c_in(int(s.c_in)), c_out(int(s.c_out)), tiles(all_tiles) {
    all_share = std::int64_t(c_in) * c_out > 256 * 256 || (threads > 2 && 4 * u_size * threads > shared_budget);
    copies = all_share ? 1 : std::min(threads, tiles);
    chunk = all_share            ? std::clamp(int(shared_budget / (4 * 36 * std::size_t(c_in + c_out))), 64, 512)
            : c_in + c_out <= 32 ? 72
                                 : 48;
    chunk = std::min(chunk, (tiles + copies - 1) / copies);
    v_plane = plane(std::size_t(chunk) * c_in);
    w_plane = plane(std::size_t(chunk) * c_out);
  }
  // Plane p of a block of dU (+)= Wᵀ·V over `count` tiles.
  void product(int block, int p, int count, const float* V, const float* W, float* to, bool more) const {
    multiply(R, count, W + p * w_plane + std::size_t(block / (c_in / N)) * R * chunk,
             V + p * v_plane + std::size_t(block % (c_in / N)) * N * chunk, to + p * u_plane, more);
  }
};

// dU_p[c_out × c_in] = W_pᵀ·V_p. Normally each thread sums its share of the tiles into its own copy. The copies are
// added, always in the same order, while they are transformed back. If the copies would be too large (512 channels,
// many threads), all threads share one: they transform a chunk of tiles together, then split the blocks of dU.
template <class T>
void backward_filter(const ConvShape& s, const T* x, const T* dy, float* dw, bool add, CachingAllocator& allocator,
                     int threads) {
  const Tiling tiling = forward_tiling(s);
  const FilterPlan f(s, tiling.tiles(), threads);
  // With all tiles in one chunk a block of dU is complete at once: a thread transforms it back while it is in its
  // cache, and needs memory for one block only.
  const bool at_once = f.all_share && f.chunk == f.tiles;
  const std::size_t u_room = at_once ? f.u_block * std::min(threads, f.blocks) : f.u_size * f.copies;
  Scratch memory(allocator, 4 * (u_room + 36 * f.copies * (f.v_plane + f.w_plane)) + 64);
  float* dU = memory.carve<float>(u_room);
  float* private_part = memory.carve<float>(36 * (f.v_plane + f.w_plane) * f.copies);
  auto transform_back = [&](int block, int row, const float* from) {
    const int o = block / (f.c_in / f.N) * f.R + row;
    filter_gradient(from + std::size_t(row) * f.N, f.u_plane, f.u_size, f.copies, f.N,
                    dw + std::int64_t(o) * 9 * f.c_in, f.c_in, block % (f.c_in / f.N) * f.N, add);
  };

  if (f.all_share) {
    float *V = private_part, *W = V + 36 * f.v_plane;
    for (int first = 0; first < f.tiles; first += f.chunk) {
      const int count = std::min(f.chunk, f.tiles - first);
      dealt_out(threads, (count + 3) / 4, [&](int item, int) {
        const int t = item * 4, some = std::min(4, count - t);
        scatter<6>(x, tiling, f.c_in, first + t, some, V, f.chunk, t);
        scatter<4>(dy, tiling, f.c_out, first + t, some, W, f.chunk, t);
      });
      if (at_once) {
        dealt_out(threads, f.blocks, [&](int block, int lane) {
          float* mine = dU + f.u_block * lane;
          for (int p = 0; p < 36; p++) f.product(block, p, count, V, W, mine, false);
          for (int row = 0; row < f.R; row++) transform_back(block, row, mine);
        });
        return;
      }
      dealt_out(threads, 36 * f.blocks, [&](int item, int) {
        f.product(item / 36, item % 36, count, V, W, dU + f.u_block * (item / 36), first > 0);
      });
    }
  } else {
    in_parts(f.copies, [&](int lane) {
      float *V = private_part + 36 * (f.v_plane + f.w_plane) * lane, *W = V + 36 * f.v_plane;
      const Share mine(f.tiles, f.copies, lane);
      for (int first = mine.begin; first < mine.end; first += f.chunk) {
        const int count = std::min(f.chunk, mine.end - first);
        scatter<6>(x, tiling, f.c_in, first, count, V, f.chunk, 0);
        scatter<4>(dy, tiling, f.c_out, first, count, W, f.chunk, 0);
        for (int block = 0; block < f.blocks; block++)
          for (int p = 0; p < 36; p++)
            f.product(block, p, count, V, W, dU + f.u_size * lane + f.u_block * block, first > mine.begin);
      }
    });
  }
  dealt_out(f.c_in * f.c_out <= 32 * 32 ? 1 : threads, f.blocks * f.R,
            [&](int item, int) { transform_back(item / f.R, item % f.R, dU + f.u_block * (item / f.R)); });
}

}  // namespace

template <class T>
void run(const ConvCall<T>& c, const float* prepared, CachingAllocator& allocator, int threads) {
  const ConvShape& s = c.s;
  if (c.pass == Pass::backward_filter)
    backward_filter(s, c.x, c.y, c.w, c.add, allocator, threads);
  else if (c.pass == Pass::backward_data)
    convolve(c.y, c.w, prepared, c.x, backward_tiling(s), int(s.c_out), int(s.c_in), true, {}, c.add, allocator,
             threads);
  else
    convolve(c.x, c.w, prepared, c.y, forward_tiling(s), int(s.c_in), int(s.c_out), false, c.epilogue, false, allocator,
             threads);
}

template void run(const ConvCall<float>&, const float*, CachingAllocator&, int);
template void run(const ConvCall<bf16>&, const float*, CachingAllocator&, int);

}  // namespace tandem::cpu::winograd
