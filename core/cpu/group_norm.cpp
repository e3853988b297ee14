#include <cmath>
#include <vector>

#include "core/cpu/norm.h"
#include "core/cpu/norm_passes.h"
#include "core/launch.h"

namespace tandem::cpu {
namespace {

// body(first channel, behind the last one, group) for every group.
template <class Body>
void each_group(const GroupNormShape& s, const Body& body) {
  for (std::int64_t g = 0; g < s.groups; g++) body(g * s.in_group(), (g + 1) * s.in_group(), g);
}

// Calls body(picture) on the pictures of a part.
template <class Body>
void share_of(const GroupNormShape& s, int part, int parts, const Body& body) {
  for (std::int64_t p = s.pictures * part / parts; p < s.pictures * (part + 1) / parts; p++) body(p);
}

int worth(int threads, const GroupNormShape& s) {
  return s.pictures * s.pixels * s.channels < parallel_grain ? 1 : threads;
}

// ---- passes over one picture ----------------------------------------------------------------------------------------
// sum[c] = Σx, or with squares Σ(x − center)²: the picture is in cache the second time, and no digits are lost.
template <bool squares, class T>
void add_up(const Fold& f, const T* x, const float* center, double* sum) {
  std::fill_n(sum, f.room, 0.0);
  sweep(f, 0, 1, squares ? Order::backwards : Order::forwards,
        [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
          vf total[4] = {};
          for (std::int64_t r = 0; r < rows; r++, at += f.width)
            for (int i = 0; i < 4; i++) {
              vf v = read_lane<whole>(x + at, i, n);
              if constexpr (squares) {
                v -= load(center + column + i * VL);
                if constexpr (!whole) v = keep(v, within(i, n));
                v *= v;
              }
              total[i] += v;
            }
          combine_panel(std::plus<double>(), sum + column, total);
        });
  f.gather(sum);
}

// y = (x − center)·scale + offset
template <class T>
void normalise(const Fold& f, const T* x, const float* center, const float* scale, const float* offset, T* y) {
  sweep(f, 0, 1, Order::forwards, [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
    const Panel m(center + column), a(scale + column), b(offset + column);
    for (std::int64_t r = 0; r < rows; r++, at += f.width)
      for (int i = 0; i < 4; i++)
        write_lane<whole>(y + at, i, n, (read_lane<whole>(x + at, i, n) - m[i]) * a[i] + b[i]);
  });
}

}  // namespace

template <class T>
void group_norm(int threads, const GroupNormShape& s, const T* x, const float* gamma, const float* beta, T* y,
                float* mean, float* inverse_std) {
  const Fold f(s.pixels, s.channels);  // one picture
  const std::int64_t numel = s.pixels * s.channels;
  const double count = static_cast<double>(s.pixels * s.in_group());
  threads = worth(threads, s);
  in_parts(threads, [&](int part) {
    std::vector<double> sums(f.room);
    std::vector<float> values(3 * f.room);
    double* sum = sums.data();
    float *center = values.data(), *scale = center + f.room, *offset = scale + f.room;
    auto total = [&](std::int64_t begin, std::int64_t end) {
      double all = 0;
#pragma omp simd reduction(+ : all)
      for (std::int64_t c = begin; c < end; c++) all += sum[c];
      return all;
    };
    share_of(s, part, threads, [&](std::int64_t p) {
      const T* from = x + p * numel;
      add_up<false>(f, from, center, sum);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const float m = static_cast<float>(total(begin, end) / count);
        mean[p * s.groups + g] = m;
        std::fill(center + begin, center + end, m);
      });
      f.repeat(center);
      add_up<true>(f, from, center, sum);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const float inverse = static_cast<float>(1 / std::sqrt(total(begin, end) / count + s.epsilon));
        inverse_std[p * s.groups + g] = inverse;
#pragma omp simd
        for (std::int64_t c = begin; c < end; c++) {
          scale[c] = gamma[c] * inverse;
          offset[c] = beta[c];
        }
      });
      f.repeat(scale);
      f.repeat(offset);
      normalise(f, from, center, scale, offset, y + p * numel);
    });
  });
}

// With h = gamma·dy, x̂ = (x − mean)·inverse and M elements in a group:
//   dgamma = Σ dy·x̂,  dbeta = Σ dy over pictures and pixels;  dx = inverse·(h − Σh/M − x̂·Σ(h·x̂)/M), sums over the
//   group.
template <class T>
void group_norm_backward(int threads, const GroupNormShape& s, const T* x, const T* dy, const float* gamma,
                         const float* mean, const float* inverse_std, const NormBackward<T>& out) {
  const Fold f(s.pixels, s.channels);  // one picture
  const std::int64_t numel = s.pixels * s.channels;
  const double count = static_cast<double>(s.pixels * s.in_group());
  threads = worth(threads, s);
  std::vector<double> all(2 * s.channels * threads);  // per thread dbeta, dgamma
  in_parts(threads, [&](int part) {
    double *dbeta = all.data() + 2 * s.channels * part, *dgamma = dbeta + s.channels;
    std::vector<double> sums(2 * f.room);
    double *sum = sums.data(), *product = sum + f.room;
    GradientPasses<T> pass{f, x, nullptr, dy, out};
    share_of(s, part, threads, [&](std::int64_t p) {
      pass.x = x + p * numel, pass.dy = dy + p * numel;
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        std::fill(pass.center + begin, pass.center + end, mean[p * s.groups + g]);
      });
      f.repeat(pass.center);
      std::fill(sums.begin(), sums.end(), 0.0);
      pass.add_up(0, 1, sum, product);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const double inverse = inverse_std[p * s.groups + g];
        double total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
        for (std::int64_t c = begin; c < end; c++) {
          dbeta[c] += sum[c];
          dgamma[c] += product[c] * inverse;
          total += static_cast<double>(gamma[c]) * sum[c];
          dot += static_cast<double>(gamma[c]) * product[c];
        }
        std::fill(pass.slope + begin, pass.slope + end, static_cast<float>(-inverse * inverse * inverse * dot / count));
        std::fill(pass.constant + begin, pass.constant + end, static_cast<float>(-inverse * total / count));
        for (std::int64_t c = begin; c < end; c++) pass.scale[c] = gamma[c] * static_cast<float>(inverse);
      });
      if (!out.dx) return;
      for (float* v : {pass.scale, pass.slope, pass.constant}) f.repeat(v);
      pass.out.dx = out.dx + p * numel;
      pass.write(0, 1);
    });
  });
  auto deliver = [&](float* to, bool add, std::int64_t part) {
    for (std::int64_t c = 0; to && c < s.channels; c++) {
      double total = add ? static_cast<double>(to[c]) : 0.0;
      for (int t = 0; t < threads; t++) total += all[(2 * t + part) * s.channels + c];
      to[c] = static_cast<float>(total);
    }
  };
  deliver(out.dbeta, out.add_dbeta, 0);
  deliver(out.dgamma, out.add_dgamma, 1);
}

#define TANDEM_GROUP_NORM(T)                                                                                         \
  template void group_norm<T>(int, const GroupNormShape&, const T*, const float*, const float*, T*, float*, float*); \
  template void group_norm_backward<T>(int, const GroupNormShape&, const T*, const T*, const float*, const float*,   \
                                       const float*, const NormBackward<T>&);
TANDEM_GROUP_NORM(float)
TANDEM_GROUP_NORM(bf16)
#undef TANDEM_GROUP_NORM

}  // namespace tandem::cpu
