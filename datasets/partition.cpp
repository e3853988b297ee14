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
// In the order of Kind. least: of the value; above 0: any number, otherwise whole numbers.
constexpr struct {
  const char *name, *key;
  double fallback, least;
} kinds[] = {{"shared", "", 0, 0},
             {"equal", "", 0, 0},
             {"dirichlet", "alpha", 0.5, above_zero},
             {"classes", "k", 2, 1},
             {"sizes", "beta", 0.5, above_zero},
             {"groups", "n", 2, 2}};
constexpr std::size_t least = 10;  // pictures of a worker whose size is drawn
constexpr int most_draws = 1000;

// One draw of all parts. Its random numbers are addressed by draw, class and worker, the class's order by worker n.
struct Draw {
  const Partition& p;
  std::size_t pictures;
  int classes, workers;
  std::uint64_t seed;
  std::uint32_t draw;
  Philox random(int c, int worker) const {
    return Philox(seed, Stream::partition, draw, std::uint32_t(c * (workers + 1) + worker));
  }

  // Whether a worker that has a part of this size already takes pictures of class c.
  bool takes(int worker, int c, std::size_t has) const {
    if (p.kind == Kind::dirichlet) return has * std::size_t(workers) < pictures;
    if (p.kind == Kind::groups) return int(worker * p.value) / workers == int(c * p.value) / classes;
    if (p.kind != Kind::classes) return true;
    const auto others = permutation(classes - 1, Philox(seed, Stream::partition, 0, std::uint32_t(worker)));
    const auto end = others.begin() + std::min(int(p.value), classes) - 1;
    const int after = (c - worker % classes + classes) % classes;  // the worker's own class
    return after == 0 || std::find(others.begin(), end, after - 1) != end;
  }

  // Appends to each part its proportion of these pictures: an equal one, or one from Dir(value). The latter are drawn
  // as logarithms, since the values of a small shape underflow.
  void share_out(const Part& of_class, int c, std::vector<Part>& parts) const {
    std::vector<double> q;
    const bool drawn = p.kind == Kind::dirichlet || p.kind == Kind::sizes;
    for (int i = 0; i < workers; i++)
      q.push_back(!takes(i, c, parts[std::size_t(i)].size()) ? -INFINITY
                  : drawn                                    ? log_gamma_draw(p.value, random(c, i))
                                                             : 0);
    const double largest = *std::max_element(q.begin(), q.end());
    if (largest == -INFINITY) return;  // no worker holds this class
    for (double& v : q) v = std::exp(v - largest);
    std::partial_sum(q.begin(), q.end(), q.begin());
    const Part order = permutation(std::int64_t(of_class.size()), random(c, workers));
    std::size_t at = 0;
    for (std::size_t i = 0; i < parts.size(); i++)  // 1e-9: 0.01·100 is a whole number
      for (const auto end = std::size_t(double(order.size()) * (q[i] / q.back()) + 1e-9); at < end; at++)
        parts[i].push_back(of_class[std::size_t(order[at])]);
  }
};

}  // namespace

const std::string Partition::forms = "shared, equal, dirichlet:alpha=0.5, classes:k=2, sizes:beta=0.5 or groups:n=2";

Partition Partition::parse(const std::string& text) {
  const auto known =
      std::find_if(std::begin(kinds), std::end(kinds), [&](const auto& k) { return k.name == spec_name(text); });
  if (known == std::end(kinds)) refuse("--partition ", text, ": choose ", forms);
  Partition p{Kind(known - std::begin(kinds)), known->fallback};
  auto whole = std::int64_t(p.value);
  std::vector<SpecField> fields;
  if (known->least >= 1)
    fields.push_back(bare(number_field(known->key, whole, known->least, 1e6)));
  else if (known->least > 0)
    fields.push_back(bare(number_field(known->key, p.value, above_zero, 1e6)));
  read_spec(text, fields);
  if (known->least >= 1) p.value = double(whole);
  return p;
}

std::string Partition::name() const {
  const auto& known = kinds[int(kind)];
  return known.least == 0 ? known.name : std::string(known.name) + ":" + known.key + "=" + digits(value);
}

std::vector<Part> parts_of(const Partition& p, std::span<const std::int32_t> labels, int classes, int workers,
                           std::uint64_t seed) {
  const bool drawn_sizes = p.kind == Kind::dirichlet || p.kind == Kind::sizes;
  const std::size_t n = std::size_t(workers), needed = drawn_sizes ? least : 1;
  if (labels.size() < n * needed)
    refuse("--partition ", p.name(), ": ", labels.size(), " pictures are too few for ", workers,
           " workers with at least ", needed, " each");
  if (p.kind == Kind::groups && (p.value > workers || p.value > classes))
    refuse("--partition ", p.name(), ": there are only ", workers, " workers and ", classes, " classes");
  const bool by_class = p.kind != Kind::equal && p.kind != Kind::sizes;
  std::vector<Part> of_class(by_class ? std::size_t(classes) : 1);
  for (std::size_t i = 0; i < labels.size(); i++)
    of_class[by_class ? std::size_t(labels[i]) : 0].push_back(std::int32_t(i));
  for (int draw = 0; draw < most_draws; draw++) {
    std::vector<Part> parts(n);
    for (std::size_t c = 0; c < of_class.size(); c++)
      Draw{p, labels.size(), classes, workers, seed, std::uint32_t(draw)}.share_out(of_class[c], int(c), parts);
    const auto small = std::find_if(parts.begin(), parts.end(), [&](const Part& x) { return x.size() < needed; });
    if (small == parts.end()) return parts;
    if (!drawn_sizes)
      refuse("--partition ", p.name(), ": worker ", small - parts.begin(), " of ", workers,
             " has no picture: use fewer workers");
  }
  refuse("--partition ", p.name(), ": no draw of ", most_draws, " gave each of ", workers, " workers ", least,
         " pictures: use a larger value, or fewer workers");
}

}  // namespace tandem
