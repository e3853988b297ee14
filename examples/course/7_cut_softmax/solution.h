#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// Two small all-reduces: the largest logit of each row, then the sums and the label's logit.
inline SoftmaxRows cut_softmax(Communicator& ranks, const Numbers& z, const Numbers& labels, std::size_t begin) {
  const std::size_t B = labels.size(), n = z.size() / B;
  SoftmaxRows rows{z, Numbers(B, -INFINITY), Numbers(B), Numbers(B)};
  for (std::size_t i = 0; i < z.size(); i++) rows.largest[i / n] = std::max(rows.largest[i / n], z[i]);
  ranks.all_reduce(buffer(rows.largest), Combine::max).wait();
  Numbers sums(2 * B);  // Σ e^(z − largest), and z of the label
  for (std::size_t i = 0; i < z.size(); i++) {
    sums[2 * (i / n)] += rows.p[i] = std::exp(z[i] - rows.largest[i / n]);
    if (double(begin + i % n) == labels[i / n]) sums[2 * (i / n) + 1] = z[i];
  }
  ranks.all_reduce(buffer(sums)).wait();
  for (std::size_t i = 0; i < z.size(); i++) rows.p[i] /= sums[2 * (i / n)];
  for (std::size_t b = 0; b < B; b++) {
    rows.total[b] = rows.largest[b] + std::log(sums[2 * b]);
    rows.own[b] = sums[2 * b + 1];
  }
  return rows;
}

// dw = dzᵀ·x is only of this rank's classes; dx = Σ dz·w is a sum over the classes of all ranks.
inline CutGradients cut_backward(Communicator& ranks, const Numbers& dz, const Numbers& x, const Numbers& w,
                                 std::size_t F) {
  const std::size_t n = w.size() / F;
  CutGradients d{Numbers(x.size()), Numbers(w.size())};
  for (std::size_t i = 0; i < dz.size(); i++)
    for (std::size_t f = 0; f < F; f++) {
      d.dx[i / n * F + f] += dz[i] * w[i % n * F + f];
      d.dw[i % n * F + f] += dz[i] * x[i / n * F + f];
    }
  ranks.all_reduce(buffer(d.dx)).wait();
  return d;
}

}  // namespace tandem::course
