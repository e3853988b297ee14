// The softmax over classes that are cut over ranks: what one rank computes for its slice of the logits, row by row.
#pragma once
#include <vector>

#include "core/tensor.h"

namespace tandem {

// What the ranks must know of each other's slices of a row. Of the whole row, they give its softmax.
struct SliceOfRow {
  double largest = 0;  // of the slice's logits
  double sum = 0;      // of e^(z − largest)
  double label = 0;    // the logit of the row's class; 0 where it is not in this slice
  double first = 0;    // 1 where that is the largest, and of equal ones the first
  double logits = 0;   // their sum
  static constexpr int numbers = 5;
};

// z [rows, classes of the slice], labels i32 [rows]: positions in the slice, −1 where the class is another slice's.
// Waits for the device.
std::vector<SliceOfRow> slice_of_rows(const Tensor& z, const Tensor& labels);

// The gradient of the mean loss with respect to a slice of the logits:
//   dz = weight·(e^(z − log_sum) − q)      q = at_label·[c = y] + everywhere
// log_sum, weight: of each row, in f32 (f64 beside f64). add: to what dz holds.
struct SliceGradient {
  double at_label = 1, everywhere = 0;
  bool add = false;
};
void slice_gradient(const Tensor& z, const Tensor& labels, const Tensor& log_sum, const Tensor& weight,
                    const SliceGradient& how, Tensor& dz);

}  // namespace tandem
