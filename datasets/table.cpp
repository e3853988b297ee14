#include "datasets/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

#include "core/text.h"
#include "datasets/loader.h"
#include "datasets/npy.h"

namespace tandem {
namespace {

Tensor as_f32(const Tensor& t, const Shape& shape) {
  Tensor y = host_tensor(shape, DType::f32);
  const std::vector<double> values = t.values();
  std::copy(values.begin(), values.end(), y.write<float>());
  return y;
}

// Rows of t in this order.
Tensor gather_rows(const Tensor& t, const std::vector<std::int32_t>& order) {
  Shape shape = t.shape();
  shape[0] = std::int64_t(order.size());
  Tensor y = host_tensor(shape, t.dtype());
  const std::size_t bytes = t.bytes() / std::size_t(t.size(0));
  const auto* from = static_cast<const std::byte*>(t.raw());
  auto* to = static_cast<std::byte*>(y.raw_write());
  for (std::size_t i = 0; i < order.size(); i++)
    std::memcpy(to + i * bytes, from + std::size_t(order[i]) * bytes, bytes);
  return y;
}

Tensor to_classes(const Tensor& targets, const std::string& where) {
  Tensor y = host_tensor({targets.size(0)}, DType::i32);
  const std::vector<double> values = targets.values();
  for (std::size_t i = 0; i < values.size(); i++) {
    if (!(values[i] >= 0 && values[i] < 1 << 20) || values[i] != std::floor(values[i]))
      refuse(where, ": the target of row ", i + 1, " is ", values[i], ": classes are the whole numbers from 0");
    y.write<std::int32_t>()[i] = std::int32_t(values[i]);
  }
  return y;
}

}  // namespace

std::int64_t Table::outputs() const {
  if (targets.dtype() != DType::i32) return targets.size(1);
  const auto* first = targets.data<std::int32_t>();
  return 1 + *std::max_element(first, first + targets.numel());
}

Table read_table(const std::filesystem::path& features, const std::filesystem::path& targets) {
  const Advice advice("save the array there with numpy.save", "write it again with numpy.save");
  const Tensor x = read_npy(*open_bytes(features, advice)), y = read_npy(*open_bytes(targets, advice));
  if (x.rank() != 2 || x.numel() == 0) refuse(features.string(), ": ", x.shape(), ", expected features [N, columns]");
  if (y.rank() < 1 || y.rank() > 2 || y.numel() == 0 || y.size(0) != x.size(0))
    refuse(targets.string(), ": ", y.shape(), ", expected targets [", x.size(0), "] or [", x.size(0), ", k]");
  Table table{.name = features.string(), .features = as_f32(x, x.shape())};
  const bool classes = y.rank() == 1 && y.dtype() != DType::f32;
  table.targets = classes ? to_classes(y, targets.string()) : as_f32(y, {y.size(0), y.rank() == 2 ? y.size(1) : 1});
  for (const Tensor* t : {&table.features, &table.targets})
    for (double v : t->values())
      if (!std::isfinite(v))
        refuse((t == &table.targets ? targets : features).string(), ": holds a number that is not finite");
  return table;
}

std::pair<Table, Table> split(const Table& table, std::int64_t held_back, std::uint64_t seed) {
  require(held_back >= 0 && held_back < table.rows(), table.name, ": cannot hold back ", held_back, " of ",
          table.rows(), " rows");
  const std::vector<char> held = draw_held_back(table.rows(), held_back, seed);
  auto part = [&](char which) {
    std::vector<std::int32_t> rows;
    for (std::int32_t i = 0; i < table.rows(); i++)
      if (held[std::size_t(i)] == which) rows.push_back(i);
    Table t = table;
    t.features = gather_rows(table.features, rows);
    t.targets = gather_rows(table.targets, rows);
    return t;
  };
  return {part(0), part(1)};
}

void standardise(Table& table, const std::vector<Table*>& others) {
  const std::int64_t n = table.rows(), columns = table.features.size(1);
  const float* x = table.features.data<float>();
  std::vector<float> means, stds;
  for (std::int64_t c = 0; c < columns; c++) {
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < n; i++) sum += x[i * columns + c];
    for (std::int64_t i = 0; i < n; i++) squares += std::pow(x[i * columns + c] - sum / double(n), 2);
    means.push_back(float(sum / double(n))), stds.push_back(float(std::sqrt(squares / double(n))));
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
  world_ = world;
  order_epoch_ = -1;
  const std::int64_t batch = options_.batch_per_rank > 0 ? options_.batch_per_rank * world : options_.batch;
  require(batch >= world, table_.name, ": a batch of ", batch, " rows cannot be shared by ", world, " ranks");
  batches_ = Cut(table_.rows(), batch, world, false).batches;
  require(batches_ > 0, table_.name, ": ", table_.rows(), " rows make no batch for ", world, " ranks");
}

Batch TableLoader::make(std::int64_t epoch, std::int64_t index) {
  if (order_epoch_ != epoch) {
    order_ =
        options_.shuffle ? shuffled(table_.rows(), options_.seed, epoch) : std::vector<std::int32_t>(table_.rows());
    if (!options_.shuffle) std::iota(order_.begin(), order_.end(), 0);
    order_epoch_ = epoch;
  }
  const std::int64_t batch = options_.batch_per_rank > 0 ? options_.batch_per_rank * world_ : options_.batch;
  const Cut cut(table_.rows(), batch, world_, false);
  const auto [first, last] = cut.share(index, rank_);
  const std::vector<std::int32_t> rows(order_.begin() + first, order_.begin() + last);
  auto on_backend = [&](const Tensor& t) {
    Tensor y = Tensor::zeros(backend_, t.shape(), t.dtype());
    backend_.upload(y.raw_write(), t.raw(), t.bytes());
    return y;
  };
  Tensor samples = host_tensor({std::int64_t(rows.size())}, DType::i32);
  std::copy(rows.begin(), rows.end(), samples.write<std::int32_t>());
  Batch b;
  b.images = on_backend(gather_rows(table_.features, rows));
  b.labels = on_backend(gather_rows(table_.targets, rows));
  b.samples = on_backend(samples);
  b.index = index;
  b.epoch = epoch;
  b.global = cut.begin(index + 1) - cut.begin(index);
  return b;
}

bool TableLoader::next(Batch& batch) {
  if (next_ >= batches_) return false;
  batch = make(epoch_, next_++);
  return true;
}

std::map<std::string, std::string> TableLoader::description() const {
  auto text = [](const std::vector<float>& values) {
    std::ostringstream s;
    for (std::size_t i = 0; i < values.size(); i++) s << (i ? "," : "") << values[i];
    return s.str();
  };
  std::map<std::string, std::string> d{{"pictures", table_.name}};
  if (!table_.mean.empty()) d["mean"] = text(table_.mean), d["std"] = text(table_.std);
  return d;
}

}  // namespace tandem
