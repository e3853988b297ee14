#include "datasets/table.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "datasets/readers.h"

namespace tandem {
namespace {

Tensor as_f32(const Tensor& t, const Shape& shape) {
  Tensor y = host_tensor(shape, DType::f32);
  const std::vector<double> values = t.values();
  std::copy(values.begin(), values.end(), y.write<float>());
  return y;
}

}  // namespace

std::int64_t Table::outputs() const {
  if (targets.dtype() != DType::i32) return targets.size(1);
  const auto* first = targets.data<std::int32_t>();
  return 1 + *std::max_element(first, first + targets.numel());
}

Table read_table(const std::filesystem::path& features, const std::filesystem::path& targets) {
  const std::string remedy = "save the array there with numpy.save";
  ByteSource of_x = open_bytes(features, remedy), of_y = open_bytes(targets, remedy);
  const Tensor x = read_npy(of_x), y = read_npy(of_y);
  if (x.rank() != 2 || x.numel() == 0) refuse(features.string(), ": ", x.shape(), ", expected features [N, columns]");
  if (y.rank() < 1 || y.rank() > 2 || y.numel() == 0 || y.size(0) != x.size(0))
    refuse(targets.string(), ": ", y.shape(), ", expected targets [", x.size(0), "] or [", x.size(0), ", k]");
  Table table{.name = features.string(), .features = as_f32(x, x.shape())};
  const bool classes = y.rank() == 1 && y.dtype() != DType::f32;
  table.targets = classes ? of_y.classes_in(y) : as_f32(y, {y.size(0), y.rank() == 2 ? y.size(1) : 1});
  for (const auto& [array, path] : {std::pair(x, features), {y, targets}})
    for (double v : array.values())
      if (!std::isfinite(v)) refuse(path.string(), ": holds a number that is not finite");
  return table;
}

std::pair<Table, Table> split(const Table& table, std::int64_t held_back, std::uint64_t seed) {
  require(held_back >= 0 && held_back < table.rows(), table.name, ": cannot hold back ", held_back, " of ",
          table.rows(), " rows");
  auto part = [&](const std::vector<std::int32_t>& rows) {
    Table t = table;
    t.features = gather_rows(table.features, rows);
    t.targets = gather_rows(table.targets, rows);
    return t;
  };
  const auto [rest, held] = hold_back(table.rows(), held_back, seed);
  return {part(rest), part(held)};
}

void standardise(Table& table, const std::vector<Table*>& others) {
  const std::int64_t n = table.rows(), columns = table.features.size(1);
  const float* x = table.features.data<float>();
  std::vector<float> means, stds;
  for (std::int64_t c = 0; c < columns; c++) {
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < n; i++) sum += x[i * columns + c];
    for (std::int64_t i = 0; i < n; i++) squares += std::pow(x[i * columns + c] - sum / double(n), 2);
    means.push_back(float(sum / double(n)));
    stds.push_back(float(std::sqrt(squares / double(n))));
  }
  std::vector<Table*> all = others;
  all.push_back(&table);
  for (Table* t : all) {
    require(t->features.size(1) == columns, t->name, ": ", t->features.size(1), " features, expected ", columns);
    Tensor y = as_f32(t->features, t->features.shape());
    float* v = y.write<float>();
    for (std::int64_t i = 0; i < y.numel(); i++) {
      const auto c = std::size_t(i % columns);
      v[i] = stds[c] > 0 ? (v[i] - means[c]) / stds[c] : 0;
    }
    t->features = y;
    t->mean = means;
    t->std = stds;
  }
}

TableLoader::TableLoader(const Table& table, const TableOptions& options, Backend& backend)
    : table_(table), options_(options), backend_(backend) {
  require(table.features.defined() && table.targets.defined() && table.features.rank() == 2 &&
              table.targets.size(0) == table.rows(),
          table.name, ": expected features [N, columns] and targets of N rows");
  share(0, 1);
}

void TableLoader::share(int rank, int world) {
  rank_ = rank;
  require(options_.batch >= world, table_.name, ": a batch of ", options_.batch, " rows cannot be shared by ", world,
          " ranks");
  cut_ = Cut(table_.rows(), options_.batch, world, false);
  require(cut_.batches > 0, table_.name, ": ", table_.rows(), " rows make no batch for ", world, " ranks");
}

Batch TableLoader::make(std::int64_t epoch, std::int64_t index) {
  if (order_epoch_ != epoch) order_ = epoch_order(table_.rows(), options_.shuffle, options_.seed, epoch);
  order_epoch_ = epoch;
  const auto [first, last] = cut_.share(index, rank_);
  const auto rows = std::span(order_).subspan(std::size_t(first), std::size_t(last - first));
  Batch b;
  b.images = gather_rows(table_.features, rows).to(backend_);
  b.labels = gather_rows(table_.targets, rows).to(backend_);
  b.samples = Tensor::of(backend_, {last - first}, std::vector<double>(rows.begin(), rows.end()), DType::i32);
  b.index = index;
  b.epoch = epoch;
  b.global = cut_.begin(index + 1) - cut_.begin(index);
  return b;
}

std::map<std::string, std::string> TableLoader::description() const {
  auto text = [](float v) { return digits(v, 6); };
  std::map<std::string, std::string> d{{"pictures", table_.name}};
  if (!table_.mean.empty()) {
    d["mean"] = joined(table_.mean, ",", text);
    d["std"] = joined(table_.std, ",", text);
  }
  return d;
}

}  // namespace tandem
