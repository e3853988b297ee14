// The softmax over classes that are divided over ranks. slice_of_rows() computes the part of one rank, for its slice of
// the logits; join_slices() combines the parts of all ranks. The work is done on the tensors' device, and the calls do
// not wait for it.
#pragma once
#include "core/tensor.h"

namespace tandem {

// A label's position in a slice, −1 if its class is not in it. labels i32 [rows]: classes. The slice has the classes
// first to first + width − 1, or those of them whose entry in places i32 [width] is their position and not −1.
Tensor slice_positions(const Tensor& labels, std::int64_t first, std::int64_t width, const Tensor& places = {});

// Five numbers about each row's slice, which the ranks exchange; combined over the whole row, they give its softmax:
//   largest      of the slice's logits
//   sum          of e^(z − largest)
//   label        the logit of the row's class; 0 if it is not in this slice
//   first        1 if that is the largest, and the first among equals
//   logits       sum of the logits
// z [rows, classes of the slice], positions: of slice_positions(). Returns [rows, 5] in f32 (f64 if z is f64).
constexpr int slice_numbers = 5;
Tensor slice_of_rows(const Tensor& z, const Tensor& positions);

// What the softmax of a row is compared with: q = at_label·[c = y] + everywhere.
struct SliceTargets {
  double at_label = 1, everywhere = 0;
};

// all: [slices, rows, 5], the slice_of_rows() of every slice, in order; labels i32 [rows]: 0 to classes − 1. Returns
// vectors [rows].
struct JoinedRows {
  Tensor log_sum;  // the logarithm of Σ e^z
  Tensor loss;     // −Σ q·log p; NaN if the label is no class
  Tensor right;    // 1 if the largest logit is the label's, else 0
};
JoinedRows join_slices(const Tensor& all, const Tensor& labels, const SliceTargets& targets, std::int64_t classes);

// The gradient of the mean loss with respect to a slice of the logits: dz = weight·(e^(z − log_sum) − q). log_sum,
// weight: one per row, in f32 (f64 if z is f64). add: adds to dz.
void slice_gradient(const Tensor& z, const Tensor& positions, const Tensor& log_sum, const Tensor& weight,
                    const SliceTargets& targets, bool add, Tensor& dz);

}  // namespace tandem
