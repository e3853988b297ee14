// The softmax over classes that are divided over ranks: the computation of one rank for its slice of the logits, by
// row.
#pragma once
#include <vector>

#include "core/tensor.h"

namespace tandem {

// The numbers about a row's slice that the ranks exchange. Combined over the whole row, they give its softmax.
struct SliceOfRow {
  double largest = 0;  // of the slice's logits
  double sum = 0;      // of e^(z − largest)
  double label = 0;    // the logit of the row's class; 0 if it is not in this slice
  double first = 0;    // 1 if that is the largest, and the first among equals
  double logits = 0;   // sum of the logits
  static constexpr int numbers = 5;
};

// z [rows, classes of the slice], labels i32 [rows]: positions in the slice, −1 if the class is in another slice. Waits
// for the device.
std::vector<SliceOfRow> slice_of_rows(const Tensor& z, const Tensor& labels);

// The gradient of the mean loss with respect to a slice of the logits:
//   dz = weight·(e^(z − log_sum) − q)      q = at_label·[c = y] + everywhere
// log_sum, weight: one per row, in f32 (f64 if z is f64). add: adds to dz.
struct SliceGradient {
  double at_label = 1, everywhere = 0;
  bool add = false;
};
void slice_gradient(const Tensor& z, const Tensor& labels, const Tensor& log_sum, const Tensor& weight,
                    const SliceGradient& how, Tensor& dz);

}  // namespace tandem
