// Sums along axes and the cross entropy loss, which treat a tensor as rows.
#include <cmath>
#include <limits>
#include <numeric>

#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

// log softmax of one row: log_p(x_c) = (x_c − largest) − log Σ exp(x − largest). Nothing overflows, and the two terms
// are not added first: the logarithm would be lost next to a large logit.
struct RowSoftmax {
  double largest = -std::numeric_limits<double>::infinity(), log_sum = 0;
  template <class T>
  RowSoftmax(const T* x, std::int64_t n) {
    double sum = 0;
    for (std::int64_t c = 0; c < n; c++) largest = std::max(largest, static_cast<double>(x[c]));
    for (std::int64_t c = 0; c < n; c++) sum += std::exp(static_cast<double>(x[c]) - largest);
    log_sum = std::log(sum);
  }
  double log_p(double x) const { return (x - largest) - log_sum; }
};

// True when x[label] is the first of the largest elements; never in a row with a NaN.
template <class T>
bool is_largest(const T* x, std::int64_t n, std::int64_t label) {
  const double v = static_cast<double>(x[label]);
  for (std::int64_t c = 0; c < n; c++) {
    const double other = static_cast<double>(x[c]);
    if (c < label ? !(other < v) : !(other <= v)) return false;
  }
  return true;
}

}  // namespace

template <class T>
void ReferenceKernels<T>::sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<P> db, bool add) {
  const std::vector<double> sums = sum_columns(threads_, rows, channels, [&](std::int64_t r, std::int64_t c) {
    return static_cast<double>(dy[r * channels + c]);
  });
  for (std::int64_t c = 0; c < channels; c++) put(db[c], sums[c], add);
}

template <class T>
void ReferenceKernels<T>::reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x,
                                 Out<T> y, bool add) {
  for_each(threads_, outer * inner, outer * middle * inner, [&](std::int64_t i) {
    const T* from = x + i / inner * middle * inner + i % inner;
    double result = op == Reduction::sum ? 0.0 : -std::numeric_limits<double>::infinity();
    for (std::int64_t k = 0; k < middle; k++) {
      const double v = static_cast<double>(from[k * inner]);
      if (op == Reduction::sum)
        result += v;
      else if (v > result || std::isnan(v))
        result = v;  // a NaN is kept: no number is greater
    }
    put(y[i], result, add);
  });
}

// Each thread sums a part; the cut depends on n and on the number of threads only.
template <class T>
void ReferenceKernels<T>::squared_norm(std::int64_t n, In<T> x, Out<P> y, bool add) {
  const int parts = n >= parallel_grain ? threads_ : 1;
  std::vector<double> sums(static_cast<std::size_t>(parts));
  in_parts(parts, [&](int part) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = n * part / parts; i < n * (part + 1) / parts; i++)
      sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    sums[static_cast<std::size_t>(part)] = sum;
  });
  put(*y, std::accumulate(sums.begin(), sums.end(), 0.0), add);
}

// −Σ_c q_c·log p_c with q = (1 − ε)·onehot + ε/classes is −(1 − ε)·log p[label] − ε/classes·Σ_c log p_c.
template <class T>
void ReferenceKernels<T>::cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels,
                                        double smoothing, Out<P> loss, Out<P> probabilities,
                                        Out<std::int32_t> correct) {
  double total = 0;
  std::int32_t hits = 0;
  for (std::int64_t r = 0; r < rows; r++) {
    const T* row = x + r * classes;
    const RowSoftmax softmax(row, classes);
    double sum = 0;  // Σ_c log p_c
    for (std::int64_t c = 0; c < classes; c++) {
      const double log_p = softmax.log_p(static_cast<double>(row[c]));
      sum += log_p;
      put(probabilities[r * classes + c], std::exp(log_p), false);
    }
    total -= (1 - smoothing) * softmax.log_p(static_cast<double>(row[labels[r]]));
    if (smoothing > 0) total -= smoothing / static_cast<double>(classes) * sum;  // not 0·∞ for a logit of −∞
    hits += is_largest(row, classes, labels[r]);
  }
  put(*loss, total / static_cast<double>(rows), false);
  if (correct) *correct += hits;
}

// dx[r, c] = dloss·(p[r, c] − q[r, c])/rows
template <class T>
void ReferenceKernels<T>::cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<P> probabilities,
                                                 In<std::int32_t> labels, double smoothing, In<P> dloss, Out<T> dx,
                                                 bool add) {
  const double scale = static_cast<double>(*dloss) / static_cast<double>(rows);
  for (std::int64_t i = 0; i < rows * classes; i++) {
    const double q =
        (i % classes == labels[i / classes] ? 1 - smoothing : 0.0) + smoothing / static_cast<double>(classes);
    put(dx[i], scale * (static_cast<double>(probabilities[i]) - q), add);
  }
}

template class ReferenceKernels<float>;  // the members that this file defines
template class ReferenceKernels<bf16>;
template class ReferenceKernels<double>;

}  // namespace tandem::reference
