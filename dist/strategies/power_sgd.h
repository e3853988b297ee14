// PowerSGD with error feedback (Vogels et al., NeurIPS 2019). For each matrix of gradients, the ranks exchange a
// product of two thin matrices. Every rank adds the part of earlier gradients that was not sent: M_w = G_w + E_w. With
// Q (columns × r) from the last step:
//
//   P = Σ_w M_w Q, its columns made orthonormal;  Q_w = M_wᵀ P;  Q = Σ_w Q_w;  the sum of gradients is P Qᵀ;
//   E_w = M_w − P Q_wᵀ
//
// So r·(rows + columns) numbers are summed instead of rows · columns, and nothing is lost. Gradients outside matrices
// are summed unchanged.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "dist/strategies/top_k.h"

namespace tandem {

class PowerSgd : public Compression {
 public:
  struct Matrix {
    std::int64_t begin, rows, columns;  // index of the first element in the range; row-major
  };
  // For a range of `length` gradients. rank: at least 1; limited to a matrix's rows and columns. Equal on all ranks.
  PowerSgd(std::int64_t rank, const std::vector<Matrix>& matrices, std::int64_t length) : Compression(length) {
    require(rank >= 1, "PowerSGD: the rank must be at least 1, not ", rank);
    std::vector<bool> in_matrix(static_cast<std::size_t>(length));
    std::int64_t p = 0, q = 0;
    for (const Matrix& m : matrices) {
      require(m.begin >= 0 && m.begin + m.rows * m.columns <= length, "PowerSGD: a matrix reaches past the range");
      const bool lies = m.rows <= m.columns;
      Factors f{
          m.begin, m.rows, m.columns, lies ? m.columns : 1, lies ? 1 : m.columns, std::min({rank, m.rows, m.columns}),
          p,       q};
      if (!lies) std::swap(f.rows, f.columns);
      factors_.push_back(f);
      p += f.rows * f.rank;
      q += f.columns * f.rank;
      std::fill_n(in_matrix.begin() + m.begin, m.rows * m.columns, true);
    }
    for (std::int64_t i = 0; i < length; i++)
      if (!in_matrix[std::size_t(i)]) plain_.push_back(i);
    p_.resize(std::size_t(p) + plain_.size());
    q_.resize(std::size_t(q));
    next_.resize(std::size_t(q));
  }

  // waits for the first of its two sums
  Work begin(Communicator& over, const float* gradients) override {
    add_residual(gradients);
    std::fill(p_.begin(), p_.end(), 0.0f);
    for (const Factors& f : factors_) {
      draw_missing(f);
      for_each_element(f, p_.data(), q_.data(), pending_.data(), [rank = f.rank](float* p, const float* q, float m) {
        for (std::int64_t k = 0; k < rank; k++) p[k] += m * q[k];  // P = M Q
      });
    }
    float* plain = p_.data() + (p_.size() - plain_.size());
    for (std::size_t i = 0; i < plain_.size(); i++) plain[i] = std::exchange(pending_[std::size_t(plain_[i])], 0.0f);
    Work sum = over.all_reduce(buffer(p_));
    if (factors_.empty()) return sum;
    sum.wait();
    for (const Factors& f : factors_) {
      orthonormalize(f);
      project(f);
    }
    return over.all_reduce(buffer(next_));
  }

  void end(float* gradients) override {
    for (const Factors& f : factors_)
      for_each_element(f, p_.data(), next_.data(), gradients,
                       [rank = f.rank](const float* p, const float* q, float& g) { g = product(p, q, rank); });
    const float* plain = p_.data() + (p_.size() - plain_.size());
    for (std::size_t i = 0; i < plain_.size(); i++) gradients[plain_[i]] = plain[i];
  }

  void finish_step(bool made) override {
    Compression::finish_step(made);
    if (made) q_.swap(next_);
  }

 private:
  struct Factors {
    // The dimensions of a matrix with rows ≤ columns; another one is transposed, so that P Pᵀ is 1 at full rank
    std::int64_t begin, rows, columns;
    std::int64_t row_step, column_step;  // distance between two rows, and between two columns
    std::int64_t rank, p, q;             // p, q: index of P in p_ and of Q in q_, both row-major
  };
  // Columns of Q are zero at first, and if the gradients had a smaller rank. They would stay zero, so they get new
  // random numbers.
  void draw_missing(const Factors& f) {
    float* q = q_.data() + f.q;
    for (std::int64_t k = 0; k < f.rank; k++) {
      bool zero = true;
      for (std::int64_t j = 0; j < f.columns; j++) zero = zero && q[j * f.rank + k] == 0;
      for (std::int64_t j = 0; zero && j < f.columns; j++)
        q[j * f.rank + k] = float(random_() >> 8) / float(1 << 23) - 1;
    }
  }

  // Gram-Schmidt, twice for each column, so that rounding leaves no component of the columns before it. A column that
  // is a linear combination of those before it becomes zero. NaN stays NaN, and is detected in the gradients.
  void orthonormalize(const Factors& f) {
    float* p = p_.data() + f.p;
    auto dot = [&](std::int64_t a, std::int64_t b) {
      double sum = 0;
      for (std::int64_t i = 0; i < f.rows; i++) sum += double(p[i * f.rank + a]) * double(p[i * f.rank + b]);
      return sum;
    };
    for (std::int64_t k = 0; k < f.rank; k++) {
      const double before = dot(k, k);
      for (std::int64_t b = 0; b < 2 * k; b++) {
        const double share = dot(b % k, k);
        for (std::int64_t i = 0; i < f.rows; i++) p[i * f.rank + k] -= float(share * p[i * f.rank + b % k]);
      }
      const double after = dot(k, k), scale = after <= 1e-10 * before ? 0 : 1 / std::sqrt(after);
      for (std::int64_t i = 0; i < f.rows; i++) p[i * f.rank + k] = float(p[i * f.rank + k] * scale);
    }
  }

  // Q_w = M_wᵀ P, and the part that is not sent: E_w = M_w − P Q_wᵀ.
  void project(const Factors& f) {
    std::fill_n(next_.data() + f.q, f.columns * f.rank, 0.0f);
    for_each_element(f, p_.data(), next_.data(), pending_.data(), [rank = f.rank](const float* p, float* q, float m) {
      for (std::int64_t k = 0; k < rank; k++) q[k] += m * p[k];
    });
    for_each_element(f, p_.data(), next_.data(), pending_.data(),
                     [rank = f.rank](const float* p, const float* q, float& m) { m -= product(p, q, rank); });
  }

  // Calls visit(row i of P, row j of Q, element) for all elements (i, j) of a matrix in `range`.
  template <class P, class Q, class T, class Visit>
  static void for_each_element(const Factors& f, P* p, Q* q, T* range, const Visit& visit) {
    for (std::int64_t i = 0; i < f.rows; i++)
      for (std::int64_t j = 0; j < f.columns; j++)
        visit(p + f.p + i * f.rank, q + f.q + j * f.rank, range[f.begin + i * f.row_step + j * f.column_step]);
  }
  static float product(const float* p, const float* q, std::int64_t rank) {
    float sum = 0;
    for (std::int64_t k = 0; k < rank; k++) sum += p[k] * q[k];
    return sum;
  }

  std::vector<Factors> factors_;
  std::vector<std::int64_t> plain_;  // the elements that are in no matrix
  std::vector<float> p_;             // all P, then the plain elements
  std::vector<float> q_, next_;      // all Q of the last step, and of this one
  std::mt19937 random_{1};           // the same numbers on all ranks
};

}  // namespace tandem
