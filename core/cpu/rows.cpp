// Sums along axes, and the rows of logits: matrices that are row-major and contiguous.
#include "core/cpu/rows.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/launch.h"
#include "core/math.h"

namespace tandem::cpu {
namespace {

struct Sum {
  static constexpr double identity = 0;
  vf operator()(vf a, vf b) const { return a + b; }
  double operator()(double a, double b) const { return a + b; }
};
struct Maximum {
  static constexpr double identity = -std::numeric_limits<double>::infinity();
  vf operator()(vf a, vf b) const { return maximum(a, b); }
  double operator()(double a, double b) const { return a != a || a > b ? a : b; }
};

// total[j] = op(total[j], all rows of x[…, j]) for this thread's share of the folded rows.
template <class Op, class T>
void reduce_rows(const Fold& f, int thread, int threads, const T* x, double* total) {
  const Op op;
  const vf identity = broadcast(float(Op::identity));
  sweep(f, thread, threads, Order::forwards,
        [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
          vf sums[4] = {identity, identity, identity, identity};
          for (std::int64_t r = 0; r < rows; r++, at += f.width)
            for (int i = 0; i < 4; i++) {
              vf v = read_lane<whole>(x + at, i, n);
              if constexpr (!whole) v = keep(v, within(i, n), identity);
              sums[i] = op(sums[i], v);
            }
          combine_panel(op, total + column, sums);
        });
  for (std::int64_t from = f.channels; from < f.width; from += f.channels)
    for (std::int64_t c = 0; c < f.channels; c++) total[c] = op(total[c], total[from + c]);
}

// Columns [column, column + n) of one matrix of `rows` rows, n ≤ panel: for rows too long to be folded.
template <class Op, bool whole, class T>
void reduce_panel(std::int64_t rows, std::int64_t stride, int n, const T* x, double* total) {
  const Op op;
  const vf identity = broadcast(float(Op::identity));
  for (int j = 0; j < Fold::panel; j++) total[j] = Op::identity;
  for (std::int64_t begin = 0; begin < rows; begin += 64) {
    vf sums[4] = {identity, identity, identity, identity};
    for (std::int64_t r = begin; r < std::min(rows, begin + 64); r++)
      for (int i = 0; i < 4; i++) sums[i] = op(sums[i], read_lane<whole>(x + r * stride, i, n));
    combine_panel(op, total, sums);
  }
}

template <class Y>
void put(Y& y, double value, bool add) {
  y = float(add ? value + float(y) : value);
}

template <class Op, class T, class Y>
void reduce_with(int threads, std::int64_t outer, std::int64_t middle, std::int64_t inner, const T* x, Y* y, bool add) {
  if (outer * inner == 0) return;
  const Op op;
  if (outer * middle * inner < parallel_grain) threads = 1;
  if (inner >= 1024) {  // long rows: threads share the columns
    const std::int64_t panels = (inner + Fold::panel - 1) / Fold::panel;
    parallel_ranges(threads, outer * panels, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t item = begin; item < end; item++) {
        const std::int64_t o = item / panels, column = item % panels * Fold::panel;
        const int n = int(std::min<std::int64_t>(Fold::panel, inner - column));
        double total[Fold::panel];
        const T* from = x + o * middle * inner + column;
        if (n == Fold::panel)
          reduce_panel<Op, true>(middle, inner, n, from, total);
        else
          reduce_panel<Op, false>(middle, inner, n, from, total);
        for (int j = 0; j < n; j++) put(y[o * inner + column + j], total[j], add);
      }
    });
    return;
  }
  const Fold f(middle, inner);
  if (outer >= threads) {  // many matrices: each belongs to one thread
    parallel_ranges(threads, outer, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<double> total(f.width);
      for (std::int64_t o = begin; o < end; o++) {
        std::fill(total.begin(), total.end(), Op::identity);
        reduce_rows<Op>(f, 0, 1, x + o * middle * inner, total.data());
        for (std::int64_t c = 0; c < inner; c++) put(y[o * inner + c], total[c], add);
      }
    });
    return;
  }
  for (std::int64_t o = 0; o < outer; o++) {  // few long ones: threads share the rows
    std::vector<double> total(f.width * threads, Op::identity);
    in_parts(threads, [&](int part) {
      reduce_rows<Op>(f, part, threads, x + o * middle * inner, total.data() + f.width * part);
    });
    for (int t = 1; t < threads; t++)
      for (std::int64_t c = 0; c < inner; c++) total[c] = op(total[c], total[f.width * t + c]);
    for (std::int64_t c = 0; c < inner; c++) put(y[o * inner + c], total[c], add);
  }
}

}  // namespace

template <class T>
void CpuKernels<T>::sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<float> db, bool add) {
  reduce_with<Sum>(threads_, 1, rows, channels, dy.data, db.data, add);
}

template <class T>
void CpuKernels<T>::reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
                           bool add) {
  if (op == Reduction::sum)
    reduce_with<Sum>(threads_, outer, middle, inner, x.data, y.data, add);
  else
    reduce_with<Maximum>(threads_, outer, middle, inner, x.data, y.data, add);
}

template <class T>
void CpuKernels<T>::squared_norm(std::int64_t n, In<T> x, Out<float> y, bool add) {
  const Fold f(n, 1);
  const int threads = n < parallel_grain ? 1 : threads_;
  std::vector<double> sums(f.width * threads);
  in_parts(threads, [&](int thread) {
    // The square of any float fits a double. The loop over the small buffer, which widens the floats, is vectorised.
    double total[Fold::panel] = {};
    sweep(f, thread, threads, Order::forwards,
          [&](auto whole, std::int64_t at, std::int64_t, std::int64_t rows, int n) {
            for (std::int64_t r = 0; r < rows; r++, at += f.width) {
              float part[Fold::panel];
              for (int i = 0; i < 4; i++) store(part + i * VL, read_lane<whole>(x + at, i, n));
#pragma omp simd
              for (int j = 0; j < Fold::panel; j++) total[j] += double(part[j]) * double(part[j]);
            }
          });
    std::copy(total, total + Fold::panel, sums.data() + f.width * thread);
  });
  double sum = 0;
  for (double s : sums) sum += s;
  put(*y, sum, add);
}

template <class T>
void CpuKernels<T>::cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels,
                                  double smoothing, Out<float> loss, Out<float> probabilities,
                                  Out<std::int32_t> correct) {
  const int threads = rows * classes * 10 < parallel_grain ? 1 : threads_;  // 10: the cost of an exponential
  struct alignas(64) Part {
    double loss = 0;
    std::int32_t correct = 0;
  };  // one cache line each: several threads write
  std::vector<Part> parts(threads);
  in_parts(threads, [&](int thread) {
    Part part;
    const std::int64_t begin = rows * thread / threads, end = rows * (thread + 1) / threads;
    for (std::int64_t r = begin; r < end; r++) {
      const T* row = x + r * classes;
      float* p = probabilities + r * classes;
      float largest = -std::numeric_limits<float>::infinity();
      for (std::int64_t c = 0; c < classes; c++) {
        const float v = row[c];
        largest = v > largest || v != v ? v : largest;  // a NaN stays
      }
      float sum = 0, distance = 0;  // Σ exp(x − max), Σ (x − max)
#pragma omp simd reduction(+ : sum, distance)
      for (std::int64_t c = 0; c < classes; c++) {
        const float d = float(row[c]) - largest, e = exponential(d);
        p[c] = e;
        sum += e;
        distance += d;
      }
      const float scale = 1 / sum, label = row[labels[r]];
#pragma omp simd
      for (std::int64_t c = 0; c < classes; c++) p[c] *= scale;
      const double log_sum = std::log(sum), own = label - largest - log_sum;
      part.loss -= (1 - smoothing) * own;
      if (smoothing != 0) part.loss -= smoothing * (distance / double(classes) - log_sum);
      part.correct += label == largest && std::find(row, row + labels[r], row[labels[r]]) == row + labels[r];
    }
    parts[std::size_t(thread)] = part;
  });
  double total = 0;
  for (const Part& part : parts) {
    total += part.loss;
    if (correct) *correct += part.correct;
  }
  *loss = float(total / double(rows));
}

// dx = (p − q)·dloss / rows
template <class T>
void CpuKernels<T>::cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<float> probabilities,
                                           In<std::int32_t> labels, double smoothing, In<float> dloss, Out<T> dx,
                                           bool add) {
  const float scale = *dloss / float(rows), everywhere = float(smoothing / double(classes)),
              at_label = float(1 - smoothing);
  parallel_ranges(rows * classes < parallel_grain ? 1 : threads_, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; r++) {
      const float* p = probabilities + r * classes;
      T* to = dx + r * classes;
      const std::int32_t label = labels[r];
      const float own = (p[label] - everywhere - at_label) * scale + (add ? float(to[label]) : 0.f);
#pragma omp simd
      for (std::int64_t c = 0; c < classes; c++) {
        const float gradient = (p[c] - everywhere) * scale;
        to[c] = T(add ? float(to[c]) + gradient : gradient);
      }
      to[label] = T(own);
    }
  });
}

template class CpuKernels<float>;  // the members that this file defines
template class CpuKernels<bf16>;

}  // namespace tandem::cpu
