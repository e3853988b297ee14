// Matrix products: gemm and the fully connected layer.
//
//   y[m, n] = x[m, k]·w[n, k]ᵀ + bias[n]      dx[m, k] = dy[m, n]·w[n, k]      dw[n, k] = dy[m, n]ᵀ·x[m, k]
#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

// A matrix of E; element (i, j) lies at data[i·row + j·column].
template <class E>
struct Matrix {
  const E* data;
  std::int64_t row, column;
  double operator()(std::int64_t i, std::int64_t j) const { return static_cast<double>(data[i * row + j * column]); }
};

// What happens to an element of the product on its way into c: c = relu?(v + bias[j]), or c += v.
struct Finish {
  const void* bias = nullptr;  // Parameter<C>[n]
  bool relu = false, add = false;
  template <class C>
  void operator()(C& c, double v, std::int64_t j) const {
    if (bias) v += static_cast<double>(static_cast<const Parameter<C>*>(bias)[j]);
    put(c, relu ? reference::relu(v) : v, add);
  }
};

// c[m, n] = finish(Σ_k a[m, k]·b[k, n])
template <class A, class B, class C>
void multiply(Backend& backend, std::int64_t m, std::int64_t n, std::int64_t k, Matrix<A> a, Matrix<B> b, C* c,
              const Finish& finish) {
  for_parts(parts_for(backend, m * n * k), m, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++)
      for (std::int64_t j = 0; j < n; j++) {
        double sum = 0;
        for (std::int64_t p = 0; p < k; p++) sum += a(i, p) * b(p, j);
        finish(c[i * n + j], sum, j);
      }
  });
}

}  // namespace

void ReferenceBackend::gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) {
  dispatch(a.dtype(), "gemm", [&]<class T> {
    const std::int64_t batch = c.rank() == 3 ? c.size(0) : 1, m = c.size(-2), n = c.size(-1);
    const std::int64_t k = a.size(transpose_a ? -2 : -1);
    const T *ap = a.data<T>(), *bp = b.data<T>();
    T* cp = c.write<T>();
    for (std::int64_t i = 0; i < batch; i++) {
      const T *ai = ap + i * m * k, *bi = bp + i * k * n;
      const Matrix<T> am = transpose_a ? Matrix<T>{ai, 1, m} : Matrix<T>{ai, k, 1};
      const Matrix<T> bm = transpose_b ? Matrix<T>{bi, 1, k} : Matrix<T>{bi, n, 1};
      multiply(*this, m, n, k, am, bm, cp + i * m * n, Finish{.add = add});
    }
  });
}

void ReferenceBackend::linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) {
  dispatch(x.dtype(), "linear", [&]<class T> {
    using P = Parameter<T>;
    const std::int64_t m = y.size(0), n = w.size(0), k = w.size(1);
    const Finish finish{.bias = bias ? bias->data<P>() : nullptr, .relu = relu};
    multiply(*this, m, n, k, Matrix<T>{x.data<T>(), k, 1}, Matrix<P>{w.data<P>(), 1, k}, y.write<T>(), finish);
  });
}

void ReferenceBackend::linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add) {
  dispatch(dy.dtype(), "linear_backward_data", [&]<class T> {
    using P = Parameter<T>;
    const std::int64_t m = dy.size(0), n = w.size(0), k = w.size(1);
    multiply(*this, m, k, n, Matrix<T>{dy.data<T>(), n, 1}, Matrix<P>{w.data<P>(), k, 1}, dx.write<T>(),
             Finish{.add = add});
  });
}

void ReferenceBackend::linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add) {
  dispatch(x.dtype(), "linear_backward_weight", [&]<class T> {
    const std::int64_t m = dy.size(0), n = dw.size(0), k = dw.size(1);
    multiply(*this, n, k, m, Matrix<T>{dy.data<T>(), 1, n}, Matrix<T>{x.data<T>(), k, 1}, dw.write<Parameter<T>>(),
             Finish{.add = add});
  });
}

}  // namespace tandem::reference
