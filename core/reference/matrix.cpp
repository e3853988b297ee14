// Matrix products: gemm and the fully connected layer.
//
//   y[m, n] = x[m, k]·w[n, k]ᵀ + bias[n]      dx[m, k] = dy[m, n]·w[n, k]      dw[n, k] = dy[m, n]ᵀ·x[m, k]
#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

// A matrix; element (i, j) lies at data[i·row + j·column].
template <class E>
struct Matrix {
  const E* data;
  std::int64_t row, column;
  double operator()(std::int64_t i, std::int64_t j) const { return static_cast<double>(data[i * row + j * column]); }
};

// Calls finish(i·n + j, Σ_p a[i, p]·b[p, j]) for every element of a product [m, k]·[k, n].
template <class A, class B, class Finish>
void multiply(int threads, std::int64_t m, std::int64_t n, std::int64_t k, Matrix<A> a, Matrix<B> b,
              const Finish& finish) {
  for_each(threads, m, m * n * k, [&](std::int64_t i) {
    for (std::int64_t j = 0; j < n; j++) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; p++) sum += a(i, p) * b(p, j);
      finish(i * n + j, sum);
    }
  });
}

}  // namespace

template <class T>
void ReferenceKernels<T>::gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n,
                               std::int64_t k, In<T> a, In<T> b, Out<T> c, bool add) {
  for (std::int64_t s = 0; s < batch; s++) {
    const T *as = a + s * m * k, *bs = b + s * k * n;
    T* cs = c + s * m * n;
    const Matrix<T> left = transpose_a ? Matrix<T>{as, 1, m} : Matrix<T>{as, k, 1};
    const Matrix<T> right = transpose_b ? Matrix<T>{bs, 1, k} : Matrix<T>{bs, n, 1};
    multiply(threads_, m, n, k, left, right, [&](std::int64_t i, double v) { put(cs[i], v, add); });
  }
}

template <class T>
void ReferenceKernels<T>::linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<P> w, In<P> bias,
                                 bool with_relu, Out<T> y) {
  multiply(threads_, m, n, k, Matrix<T>{x, k, 1}, Matrix<P>{w, 1, k}, [&](std::int64_t i, double v) {
    if (bias) v += static_cast<double>(bias[i % n]);
    put(y[i], with_relu ? relu(v) : v, false);
  });
}

template <class T>
void ReferenceKernels<T>::linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<P> w,
                                               Out<T> dx, bool add) {
  multiply(threads_, m, k, n, Matrix<T>{dy, n, 1}, Matrix<P>{w, k, 1},
           [&](std::int64_t i, double v) { put(dx[i], v, add); });
}

template <class T>
void ReferenceKernels<T>::linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy,
                                                 Out<P> dw, bool add) {
  multiply(threads_, n, k, m, Matrix<T>{dy, 1, n}, Matrix<T>{x, k, 1},
           [&](std::int64_t i, double v) { put(dw[i], v, add); });
}

template class ReferenceKernels<float>;  // the members that this file defines
template class ReferenceKernels<bf16>;
template class ReferenceKernels<double>;

}  // namespace tandem::reference
