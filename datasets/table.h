// Tables: rows of numbers with features and targets, from NumPy's .npy files or memory, and their batches.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "datasets/loader.h"

namespace tandem {

struct Table {
  std::string name;                  // begins every error message about the table
  Tensor features{};                 // f32 [N, columns] in host memory
  Tensor targets{};                  // f32 [N, k], or classes i32 [N]; in host memory
  std::vector<float> mean{}, std{};  // of each feature, set by standardise()

  std::int64_t rows() const { return features.size(0); }
  std::int64_t outputs() const;  // number of outputs of a model for this table: k, or the number of classes
};

// Reads two arrays: features [N, columns], and targets [N] or [N, k]; integer targets [N] are classes. The types are
// u8, f32 or integers.
Table read_table(const std::filesystem::path& features, const std::filesystem::path& targets);

// {the rest, `held_back` rows}, copied, each in its old order. The choice depends on the seed and the number of rows.
std::pair<Table, Table> split(const Table& table, std::int64_t held_back, std::uint64_t seed = 0);
// Transforms every feature of `table` to mean 0 and standard deviation 1; the other tables get the same transformation.
// Pass the training rows as `table`. A constant feature becomes 0.
void standardise(Table& table, const std::vector<Table*>& others = {});

struct TableOptions {
  std::int64_t batch = 128;  // rows in a batch, of which each rank has its share
  bool shuffle = true;
  std::uint64_t seed = 0;
};

// Batches of a table, with the same order and shares as Loader (loader.h). Batch::images is [b, columns], Batch::labels
// are the targets.
class TableLoader final : public BatchSource {
 public:
  TableLoader(const Table& table, const TableOptions& options, Backend& backend);
  void share(int rank, int world) override;
  std::int64_t batches_per_epoch() const override { return cut_.batches; }
  std::int64_t pictures_per_epoch() const override { return cut_.begin(cut_.batches); }
  Batch make(std::int64_t epoch, std::int64_t index) override;
  std::map<std::string, std::string> description() const override;

 private:
  Table table_;
  TableOptions options_;
  Backend& backend_;
  int rank_ = 0;
  Cut cut_{1, 1, 1, false};
  std::vector<std::int32_t> order_;  // of the epoch order_epoch_
  std::int64_t order_epoch_ = -1;
};

}  // namespace tandem
