// Batch normalisation over the pictures of all ranks (SyncBN): mean and variance are those of the whole batch, and so
// are the sums in the gradient of x. n ranks then compute what one machine computes with all their pictures, also when
// their shares differ.
//
// One exchange in forward, of every rank's (rows, means, variances), and one in backward, of Σg and Σg·x̂. All add them
// up in the order of ranks, so that the results are the same on all ranks, bit for bit.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "layers/module.h"

namespace tandem {

struct AcrossRanks {
  // Every rank's `mine`, in the order of ranks. All ranks call it in the same order. Empty: each rank is by itself.
  std::function<std::vector<double>(const std::vector<double>& mine)> gather;
};

// What batch_norm() computes in training, with statistics over all ranks.
Variable sync_batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                         Tensor& running_variance, const BatchNormOptions& options, const Variable& residual,
                         std::shared_ptr<const AcrossRanks> ranks);

// Every BatchNorm2d of the model from now on, while ranks->gather is there.
void sync_batch_norm(Module& model, const std::shared_ptr<const AcrossRanks>& ranks);

}  // namespace tandem
