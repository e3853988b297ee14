// CIFAR-10 and CIFAR-100 (Krizhevsky 2009), each 50 000 + 10 000 photographs, 32 × 32, RGB; the binary versions.
#pragma once
#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// Reads data_batch_1.bin … data_batch_5.bin and test_batch.bin in `folder`. The files contain no count, so each must
// have the official 10 000 records: otherwise a file truncated between two records would be accepted. For smaller sets
// pass the number of records.
Dataset cifar10(const std::filesystem::path& folder, std::int64_t pictures_per_file = 10000);

// Reads train.bin and test.bin. A picture has two labels: one of 100 fine classes, and the one of 20 coarse classes
// ("small_mammals") that the fine class belongs to.
enum class CifarLabels { fine, coarse };
Dataset cifar100(const std::filesystem::path& folder, CifarLabels labels = CifarLabels::fine,
                 std::int64_t training = 50000, std::int64_t testing = 10000);

// Before its 3072 pixels a record has labels, each below its bound ({10}, or {20, 100}); the label at index `used` is
// the one that is read.
struct CifarLayout {
  std::vector<int> bounds;
  std::size_t used = 0;
};
// Reads `count` records into u8 [count, 32, 32, 3] and i32 [count]; the file must end after them.
void read_cifar(ByteSource& file, const CifarLayout& layout, std::int64_t count, std::uint8_t* pixels,
                std::int32_t* labels);

}  // namespace tandem
