// Sums along axes and the cross entropy loss, which treat a tensor as rows.
#include <cmath>
#include <limits>

#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

// log softmax of one row: log_p(x_c) = (x_c − largest) − log Σ exp(x − largest). Nothing overflows, and the two terms
// are not added up beforehand: beside a large logit the logarithm would be lost.
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

void ReferenceBackend::sum_rows(const Tensor& dy, Tensor& db, bool add) {
  dispatch(dy.dtype(), "sum_rows", [&]<class T> {
    const std::int64_t channels = db.numel(), rows = channels > 0 ? dy.numel() / channels : 0;
    const T* dyp = dy.data<T>();
    Scratch<double> sums(*this, channels);
    sum_columns(*this, rows, channels, sums.data(),
                [&](std::int64_t r, std::int64_t c) { return static_cast<double>(dyp[r * channels + c]); });
    Parameter<T>* dbp = db.write<Parameter<T>>();
    for (std::int64_t c = 0; c < channels; c++) put(dbp[c], sums.data()[c], add);
  });
}

void ReferenceBackend::reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner,
                              const Tensor& x, Tensor& y, bool add) {
  dispatch(x.dtype(), "reduce", [&]<class T> {
    const T* xp = x.data<T>();
    T* yp = y.write<T>();
    for_parts(parts_for(*this, x.numel()), outer * inner, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; i++) {
        const T* from = xp + i / inner * middle * inner + i % inner;
        double result = op == Reduction::sum ? 0.0 : -std::numeric_limits<double>::infinity();
        for (std::int64_t k = 0; k < middle; k++) {
          const double v = static_cast<double>(from[k * inner]);
          if (op == Reduction::sum)
            result += v;
          else if (v > result || std::isnan(v))
            result = v;  // a NaN stays: no number is greater
        }
        put(yp[i], result, add);
      }
    });
  });
}

// y may be of another type than x: a norm of bf16 gradients is an f32.
void ReferenceBackend::squared_norm(const Tensor& x, Tensor& y, bool add) {
  dispatch(x.dtype(), "squared_norm", [&]<class T> {
    const T* xp = x.data<T>();
    const int parts = parts_for(*this, x.numel());
    Scratch<double> sums(*this, parts);
    std::fill(sums.data(), sums.data() + parts, 0.0);
    for_parts(parts, x.numel(), [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = begin; i < end; i++) sum += static_cast<double>(xp[i]) * static_cast<double>(xp[i]);
      sums.data()[part] = sum;
    });
    double total = 0;
    for (int part = 0; part < parts; part++) total += sums.data()[part];
    dispatch(y.dtype(), "squared_norm", [&]<class Y> { put(*y.write<Y>(), total, add); });
  });
}

// −Σ_c q_c·log p_c with q = (1 − ε)·onehot + ε/classes is −(1 − ε)·log p[label] − ε/classes·Σ_c log p_c.
void ReferenceBackend::cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss,
                                     Tensor& probabilities, Tensor* correct) {
  dispatch(x.dtype(), "cross_entropy", [&]<class T> {
    using P = Parameter<T>;
    const std::int64_t classes = x.size(-1), rows = classes > 0 ? x.numel() / classes : 0;
    const T* xp = x.data<T>();
    const std::int32_t* label = labels.data<std::int32_t>();
    for (std::int64_t r = 0; r < rows; r++)
      require(label[r] >= 0 && label[r] < classes, "cross_entropy: row ", r, " has the label ", label[r],
              ", but there are ", classes, " classes: labels are 0 to ", classes - 1);

    P* p = probabilities.write<P>();
    double total = 0;
    std::int32_t hits = 0;
    for (std::int64_t r = 0; r < rows; r++) {
      const T* row = xp + r * classes;
      const RowSoftmax softmax(row, classes);
      double sum = 0;  // Σ_c log p_c
      for (std::int64_t c = 0; c < classes; c++) {
        const double log_p = softmax.log_p(static_cast<double>(row[c]));
        sum += log_p;
        put(p[r * classes + c], std::exp(log_p), false);
      }
      total -= (1 - smoothing) * softmax.log_p(static_cast<double>(row[label[r]]));
      if (smoothing > 0) total -= smoothing / static_cast<double>(classes) * sum;  // not 0·∞ for a logit of −∞
      hits += is_largest(row, classes, label[r]);
    }
    put(*loss.write<P>(), total / static_cast<double>(rows), false);
    if (correct) *correct->write<std::int32_t>() += hits;
  });
}

// dx[r, c] = dloss·(p[r, c] − q[r, c])/rows
void ReferenceBackend::cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing,
                                              const Tensor& dloss, Tensor& dx, bool add) {
  dispatch(dx.dtype(), "cross_entropy_backward", [&]<class T> {
    using P = Parameter<T>;
    const std::int64_t classes = dx.size(-1), rows = classes > 0 ? dx.numel() / classes : 0;
    const P* p = probabilities.data<P>();
    const std::int32_t* label = labels.data<std::int32_t>();
    const double scale = static_cast<double>(*dloss.data<P>()) / static_cast<double>(rows);
    T* dxp = dx.write<T>();
    for (std::int64_t r = 0; r < rows; r++)
      for (std::int64_t c = 0; c < classes; c++) {
        const double q = (c == label[r] ? 1 - smoothing : 0.0) + smoothing / static_cast<double>(classes);
        put(dxp[r * classes + c], scale * (static_cast<double>(p[r * classes + c]) - q), add);
      }
  });
}

}  // namespace tandem::reference
