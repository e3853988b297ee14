#include <cmath>
#include <functional>
#include <vector>

#include "core/cpu/norm.h"
#include "core/cpu/rows.h"
#include "core/launch.h"

namespace tandem::cpu {
namespace {

// One picture as folded rows. Per-channel values are repeated over `room` elements: a folded row, or what there is of one.
struct Picture {
  Fold fold;
  std::int64_t room, elements;
  explicit Picture(const GroupNormShape& s)
      : fold(s.pixels, s.channels),
        room(fold.rows ? fold.width : (fold.tail + Fold::panel - 1) / Fold::panel * Fold::panel),
        elements(s.pixels * s.channels) {}
  void spread(float* values) const {
    for (std::int64_t j = fold.channels; j < room; j++) values[j] = values[j - fold.channels];
  }
  void gather(double* sums) const {
    for (std::int64_t from = fold.channels; from < room; from += fold.channels)
      for (std::int64_t c = 0; c < std::min(fold.channels, room - from); c++) sums[c] += sums[from + c];
  }
};

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
void add_up(const Picture& picture, const T* x, const float* center, double* sum) {
  const Fold& f = picture.fold;
  std::fill_n(sum, picture.room, 0.0);
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
  picture.gather(sum);
}

// y = (x − center)·scale + offset
template <class T>
void normalise(const Picture& picture, const T* x, const float* center, const float* scale, const float* offset, T* y) {
  const Fold& f = picture.fold;
  sweep(f, 0, 1, Order::forwards, [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
    const Panel m(center + column), a(scale + column), b(offset + column);
    for (std::int64_t r = 0; r < rows; r++, at += f.width)
      for (int i = 0; i < 4; i++) write_lane<whole>(y + at, i, n, (read_lane<whole>(x + at, i, n) - m[i]) * a[i] + b[i]);
  });
}

// sum[c] = Σ dy, product[c] = Σ dy·(x − center)
template <class T>
void add_up_gradient(const Picture& picture, const T* x, const T* dy, const float* center, double* sum, double* product) {
  const Fold& f = picture.fold;
  std::fill_n(sum, picture.room, 0.0);
  std::fill_n(product, picture.room, 0.0);
  sweep(f, 0, 1, Order::forwards, [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
    const Panel m(center + column);
    vf total[4] = {}, dot[4] = {};
    for (std::int64_t r = 0; r < rows; r++, at += f.width)
      for (int i = 0; i < 4; i++) {
        vf d = read_lane<whole>(dy + at, i, n), t = d * (read_lane<whole>(x + at, i, n) - m[i]);
        if constexpr (!whole) t = keep(t, within(i, n));
        total[i] += d;
        dot[i] += t;
      }
    combine_panel(std::plus<double>(), sum + column, total);
    combine_panel(std::plus<double>(), product + column, dot);
  });
  picture.gather(sum);
  picture.gather(product);
}

// dx (+)= dy·scale + (x − center)·slope + constant
template <bool adding, class T>
void write_gradient(const Picture& picture, const T* x, const T* dy, const float* center, const float* scale,
                    const float* slope, const float* constant, T* dx) {
  const Fold& f = picture.fold;
  sweep(f, 0, 1, Order::backwards, [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
    const Panel m(center + column), a(scale + column), k(slope + column), e(constant + column);
    for (std::int64_t r = 0; r < rows; r++, at += f.width)
      for (int i = 0; i < 4; i++) {
        vf v = read_lane<whole>(x + at, i, n), d = read_lane<whole>(dy + at, i, n);
        vf result = d * a[i] + ((v - m[i]) * k[i] + e[i]);
        if constexpr (adding) result += read_lane<whole>(dx + at, i, n);
        write_lane<whole>(dx + at, i, n, result);
      }
  });
}

}  // namespace

template <class T>
void group_norm(int threads, const GroupNormShape& s, const T* x, const float* gamma, const float* beta, T* y,
                float* mean, float* inverse_deviation) {
  const Picture picture(s);
  const double count = static_cast<double>(s.pixels * s.in_group());
  threads = worth(threads, s);
  in_parts(threads, [&](int part) {
    std::vector<double> sums(picture.room);
    std::vector<float> values(3 * picture.room);
    double* sum = sums.data();
    float *center = values.data(), *scale = center + picture.room, *offset = scale + picture.room;
    auto total = [&](std::int64_t begin, std::int64_t end) {
      double all = 0;
#pragma omp simd reduction(+ : all)
      for (std::int64_t c = begin; c < end; c++) all += sum[c];
      return all;
    };
    share_of(s, part, threads, [&](std::int64_t p) {
      const T* from = x + p * picture.elements;
      add_up<false>(picture, from, center, sum);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const float m = static_cast<float>(total(begin, end) / count);
        mean[p * s.groups + g] = m;
        std::fill(center + begin, center + end, m);
      });
      picture.spread(center);
      add_up<true>(picture, from, center, sum);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const float inverse = static_cast<float>(1 / std::sqrt(total(begin, end) / count + s.epsilon));
        inverse_deviation[p * s.groups + g] = inverse;
#pragma omp simd
        for (std::int64_t c = begin; c < end; c++) {
          scale[c] = gamma[c] * inverse;
          offset[c] = beta[c];
        }
      });
      picture.spread(scale);
      picture.spread(offset);
      normalise(picture, from, center, scale, offset, y + p * picture.elements);
    });
  });
}

// With h = gamma·dy, x̂ = (x − mean)·inverse and M elements in a group:
//   dgamma = Σ dy·x̂,  dbeta = Σ dy over pictures and pixels;  dx = inverse·(h − Σh/M − x̂·Σ(h·x̂)/M), sums over the group.
template <class T>
void group_norm_backward(int threads, const GroupNormShape& s, const T* x, const T* dy, const float* gamma,
                         const float* mean, const float* inverse_deviation, const NormBackward<T>& out) {
  const Picture picture(s);
  const double count = static_cast<double>(s.pixels * s.in_group());
  threads = worth(threads, s);
  std::vector<double> all(2 * s.channels * threads);  // per thread dbeta, dgamma
  in_parts(threads, [&](int part) {
    double *dbeta = all.data() + 2 * s.channels * part, *dgamma = dbeta + s.channels;
    std::vector<double> sums(2 * picture.room);
    std::vector<float> values(4 * picture.room);
    double *sum = sums.data(), *product = sum + picture.room;
    float *center = values.data(), *scale = center + picture.room, *slope = scale + picture.room,
          *constant = slope + picture.room;
    share_of(s, part, threads, [&](std::int64_t p) {
      const T *from = x + p * picture.elements, *gradient = dy + p * picture.elements;
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        std::fill(center + begin, center + end, mean[p * s.groups + g]);
      });
      picture.spread(center);
      add_up_gradient(picture, from, gradient, center, sum, product);
      each_group(s, [&](std::int64_t begin, std::int64_t end, std::int64_t g) {
        const double inverse = inverse_deviation[p * s.groups + g];
        double total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
        for (std::int64_t c = begin; c < end; c++) {
          dbeta[c] += sum[c];
          dgamma[c] += product[c] * inverse;
          total += static_cast<double>(gamma[c]) * sum[c];
          dot += static_cast<double>(gamma[c]) * product[c];
        }
        std::fill(slope + begin, slope + end, static_cast<float>(-inverse * inverse * inverse * dot / count));
        std::fill(constant + begin, constant + end, static_cast<float>(-inverse * total / count));
        for (std::int64_t c = begin; c < end; c++) scale[c] = gamma[c] * static_cast<float>(inverse);
      });
      if (!out.dx) return;
      for (float* v : {scale, slope, constant}) picture.spread(v);
      (out.add_dx ? write_gradient<true, T> : write_gradient<false, T>)(picture, from, gradient, center, scale, slope, constant,
                                                                        out.dx + p * picture.elements);
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
