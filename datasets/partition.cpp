#include "datasets/partition.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "core/error.h"
#include "core/random.h"
#include "core/spec.h"

namespace tandem {
namespace {

using Kind = Partition::Kind;
// In the order of Kind. least: the least value (0: there is no value); if it is 1 or more, values are whole numbers.
constexpr struct {
  const char *name, *key;
  double fallback, least;
} kinds[] = {{"shared", "", 0, 0},
             {"equal", "", 0, 0},
             {"dirichlet", "alpha", 0.5, above_zero},
             {"classes", "k", 2, 1},
             {"sizes", "beta", 0.5, above_zero},
             {"groups", "n", 2, 2}};
constexpr int most_draws = 1000;

// Whether this worker takes pictures of class c.
bool takes(const Partition& p, int worker, int workers, int c, int classes, std::uint64_t seed) {
  if (p.kind == Kind::groups) return int(worker * p.value) / workers == int(c * p.value) / classes;
  if (p.kind != Kind::classes) return true;
  const int after = (c - worker % classes + classes) % classes;  // the worker's own class
  const int others = std::min(int(p.value), classes) - 1;
  const auto order = permutation(classes - 1, Philox(seed, Stream::partition, 0, std::uint32_t(worker)));
  return after == 0 || std::find(order.begin(), order.begin() + others, after - 1) < order.begin() + others;
}

// Appends to each part its proportion exp(q) / Σ exp(q) of these pictures, in a random order.
void share_out(const Part& pictures, std::vector<double> q, const Philox& random, std::vector<Part>& parts) {
  const double largest = *std::max_element(q.begin(), q.end());
  if (largest == -INFINITY) return;  // no worker holds this class
  for (double& v : q) v = std::exp(v - largest);
  std::partial_sum(q.begin(), q.end(), q.begin());
  const Part order = permutation(std::int64_t(pictures.size()), random);
  std::size_t at = 0;
  for (std::size_t i = 0; i < parts.size(); i++)  // 1e-9: so 0.01·100 is 1 in spite of rounding
    for (const auto end = std::size_t(double(order.size()) * (q[i] / q.back()) + 1e-9); at < end; at++)
      parts[i].push_back(pictures[std::size_t(order[at])]);
}

}  // namespace

const std::string Partition::forms = "shared, equal, dirichlet:alpha=0.5, classes:k=2, sizes:beta=0.5 or groups:n=2";

Partition Partition::parse(const std::string& text) {
  const auto known = std::ranges::find_if(kinds, [&](const auto& k) { return k.name == spec_name(text); });
  if (known == std::end(kinds)) refuse("--partition ", text, ": choose ", forms);
  Partition p{Kind(known - std::begin(kinds)), known->fallback};
  std::vector<SpecField> fields;
  if (known->least > 0) fields.push_back(bare(number_field(known->key, p.value, known->least, 1e6)));
  read_spec(text, fields);
  if (known->least >= 1 && p.value != std::floor(p.value)) refuse("--partition ", text, ": expected a whole number");
  return p;
}

std::string Partition::name() const {
  const auto& known = kinds[int(kind)];
  return known.least == 0 ? known.name : std::string(known.name) + ":" + known.key + "=" + digits(value);
}

std::vector<Part> parts_of(const Partition& p, std::span<const std::int32_t> labels, int classes, int workers,
                           std::uint64_t seed) {
  const bool drawn = p.kind == Kind::dirichlet || p.kind == Kind::sizes;
  const std::size_t least = drawn ? 10 : 1;
  if (labels.size() < std::size_t(workers) * least)
    refuse("--partition ", p.name(), ": ", labels.size(), " pictures are too few for ", workers,
           " workers with at least ", least, " each");
  if (p.kind == Kind::groups && (p.value > workers || p.value > classes))
    refuse("--partition ", p.name(), ": only ", workers, " workers and ", classes, " classes");
  const bool by_class = p.kind != Kind::equal && p.kind != Kind::sizes;
  std::vector<Part> of_class(by_class ? std::size_t(classes) : 1);
  for (std::size_t i = 0; i < labels.size(); i++)
    of_class[by_class ? std::size_t(labels[i]) : 0].push_back(std::int32_t(i));
  for (int draw = 0; draw < most_draws; draw++) {
    std::vector<Part> parts{std::size_t(workers)};
    for (int c = 0; c < int(of_class.size()); c++) {
      // The random numbers of class c: of worker i or, for i = workers, of the order of its pictures
      const auto random = [&](int i) {
        return Philox(seed, Stream::partition, std::uint32_t(draw), std::uint32_t(c * (workers + 1) + i));
      };
      std::vector<double> q;  // logarithms, since draws of a small shape underflow
      for (int i = 0; i < workers; i++) {
        const bool full =
            p.kind == Kind::dirichlet && parts[std::size_t(i)].size() * std::size_t(workers) >= labels.size();
        const bool none = full || !takes(p, i, workers, c, classes, seed);
        q.push_back(none ? -INFINITY : drawn ? log_gamma_draw(p.value, random(i)) : 0);
      }
      share_out(of_class[std::size_t(c)], q, random(workers), parts);
    }
    const auto small = std::find_if(parts.begin(), parts.end(), [&](const Part& x) { return x.size() < least; });
    if (small == parts.end()) return parts;
    if (!drawn)
      refuse("--partition ", p.name(), ": worker ", small - parts.begin(), " of ", workers,
             " has no picture: use fewer workers");
  }
  refuse("--partition ", p.name(), ": no draw of ", most_draws, " gave each of ", workers, " workers ", least,
         " pictures: use a larger value, or fewer workers");
}

}  // namespace tandem
