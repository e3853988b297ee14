// The softmax over classes that are divided over ranks: the computation of one rank for its slice of the logits, by
// row.
#pragma once
#include <vector>

#include "core/tensor.h"

namespace tandem {

// Five numbers about each row's slice, which the ranks exchange; combined over the whole row, they give its softmax:
//   largest      of the slice's logits
//   sum          of e^(z − largest)
//   label        the logit of the row's class; 0 if it is not in this slice
//   first        1 if that is the largest, and the first among equals
//   logits       sum of the logits
// z [rows, classes of the slice], labels i32 [rows]: positions in the slice, −1 if the class is in another slice. Waits
// for the device.
constexpr int slice_numbers = 5;
std::vector<double> slice_of_rows(const Tensor& z, const Tensor& labels);

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
