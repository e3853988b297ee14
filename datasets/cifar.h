// CIFAR-10 (Krizhevsky 2009): 50 000 + 10 000 photographs, 32 × 32, RGB, ten classes; the binary version.
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// From data_batch_1.bin … data_batch_5.bin and test_batch.bin in `folder`. The files carry no count, so each must have
// the official 10 000 records: otherwise one that was cut between two records would pass. Smaller sets say how many
// they have.
Dataset cifar10(const std::filesystem::path& folder, std::int64_t pictures_per_file = 10000);

}  // namespace tandem
