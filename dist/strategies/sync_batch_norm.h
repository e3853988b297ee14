// Batch normalisation over the pictures of all ranks (SyncBN): mean and variance, and the sums in the gradient of x,
// are over the whole batch. So n ranks compute the same as one machine with all their pictures, also if their shares
// differ.
//
// There is one exchange in forward, of every rank's (rows, means, variances), and one in backward, of Σg and Σg·x̂. All
// ranks add these in the order of ranks, so the results are the same on all ranks, bit for bit.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "layers/module.h"

namespace tandem {

// Returns every rank's `mine`, in the order of ranks. All ranks call it in the same order. Empty: each rank is alone.
using GatherNumbers = std::function<std::vector<double>(const std::vector<double>& mine)>;

// The computation of batch_norm() in training, with statistics over all ranks.
Variable sync_batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                         Tensor& running_variance, const BatchNormOptions& options, const Variable& residual,
                         std::shared_ptr<const GatherNumbers> ranks);

// Used for every BatchNorm2d of the model from now on, while *ranks is set.
void sync_batch_norm(Module& model, const std::shared_ptr<const GatherNumbers>& ranks);

}  // namespace tandem
