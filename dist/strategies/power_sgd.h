// PowerSGD with error feedback (Vogels et al., NeurIPS 2019): of each matrix of gradients ranks exchange a product of
// two thin ones. Every rank adds to its gradient what did not travel before, M_w = G_w + E_w. Then, with Q (columns ×
// r) from the last step:
//
//   P = Σ_w M_w Q, its columns made orthonormal;  Q_w = M_wᵀ P;  Q = Σ_w Q_w;  the sum of gradients is P Qᵀ;  E_w = M_w
//   − P Q_wᵀ
//
// so that r·(rows + columns) numbers are summed instead of rows · columns, and nothing is lost. What is no matrix is
// summed as it is.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

class PowerSgd {
 public:
  struct Matrix {
    std::int64_t begin, rows, columns;  // its first element in the range; row by row
  };
  // Of a range of `length` gradients. rank: at least 1; of a matrix at most its rows and its columns. Equal on all
  // ranks.
  PowerSgd(std::int64_t rank, const std::vector<Matrix>& matrices, std::int64_t length);
  static bool is_shorter(std::int64_t rank, std::int64_t rows, std::int64_t columns) {
    return rank * (rows + columns) < rows * columns;
  }

  // The exchange of this rank's gradients; waits for the first of its two sums. All ranks call it.
  Work begin(Communicator& over, const float* gradients);
  // When that is over: the sum over all ranks.
  void end(float* gradients) const;
  // After the step. With a step that was not made (a gradient was not finite) its part of what did not travel is
  // forgotten.
  void finish_step(bool made);

  const std::vector<float>& residual() const { return residual_; }

 private:
  struct Factors {
    // Of a matrix that lies: a standing one is transposed, so that at full rank P Pᵀ is 1
    std::int64_t begin, rows, columns;
    std::int64_t row_step, column_step;  // from one to the next
    std::int64_t rank, p, q;             // where P begins in p_, row by row, and Q in q_
  };
  void draw_missing(const Factors& f);
  void multiply(const Factors& f);
  void orthonormalize(const Factors& f);
  void project(const Factors& f);

  std::vector<Factors> factors_;
  std::vector<std::int64_t> plain_;        // the elements that are in no matrix
  std::vector<float> residual_, pending_;  // E after the last step; M in this one, then E
  std::vector<float> p_;                   // all P, then the plain elements
  std::vector<float> q_, next_;            // all Q: of the last step, and of this one
  std::mt19937 random_{1};                 // the same numbers on all ranks
};

}  // namespace tandem
