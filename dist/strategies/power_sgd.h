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
#include <cstdint>
#include <random>
#include <vector>

#include "dist/strategies/top_k.h"

namespace tandem {

class PowerSgd : public Compression {
 public:
  struct Matrix {
    std::int64_t begin, rows, columns;  // index of the first element in the range; row-major
  };
  // For a range of `length` gradients. rank: at least 1; limited to a matrix's rows and columns. Equal on all ranks.
  PowerSgd(std::int64_t rank, const std::vector<Matrix>& matrices, std::int64_t length);

  Work begin(Communicator& over, const float* gradients) override;  // waits for the first of its two sums
  void end(float* gradients) override;
  void finish_step(bool made) override;

 private:
  struct Factors {
    // The dimensions of a matrix with rows ≤ columns; another one is transposed, so that P Pᵀ is 1 at full rank
    std::int64_t begin, rows, columns;
    std::int64_t row_step, column_step;  // distance between two rows, and between two columns
    std::int64_t rank, p, q;             // p, q: index of P in p_ and of Q in q_, both row-major
  };
  void draw_missing(const Factors& f);
  void orthonormalize(const Factors& f);
  void project(const Factors& f);

  std::vector<Factors> factors_;
  std::vector<std::int64_t> plain_;  // the elements that are in no matrix
  std::vector<float> p_;             // all P, then the plain elements
  std::vector<float> q_, next_;      // all Q of the last step, and of this one
  std::mt19937 random_{1};           // the same numbers on all ranks
};

}  // namespace tandem
