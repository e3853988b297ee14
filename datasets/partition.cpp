#include "datasets/partition.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/error.h"
#include "core/random.h"
#include "core/spec.h"

namespace tandem {
namespace {

using Kind = Partition::Kind;
constexpr const char* names[] = {"shared", "equal", "dirichlet", "classes", "sizes", "groups"};
constexpr std::size_t least = 10;  // pictures of a worker whose size is drawn
constexpr int most_draws = 1000;

// The random numbers of a partition among `workers`, by draw and class: one address for each worker, and one more.
struct Draws {
  std::uint64_t seed;
  int workers;
  Philox of_worker(int draw, int c, std::size_t worker) const {
    return Philox(seed, Stream::partition, std::uint32_t(draw), std::uint32_t(c * (workers + 1) + int(worker)));
  }
  Philox order(int draw, int c) const { return of_worker(draw, c, std::size_t(workers)); }
};

// Proportions from Dir(shape) over the workers that take part. They are drawn as logarithms, since the values of a
// small shape underflow.
std::vector<double> dirichlet(double shape, const std::vector<bool>& takes, const Draws& draws, int draw, int c) {
  std::vector<double> q(takes.size());
  double largest = -INFINITY;
  for (std::size_t i = 0; i < q.size(); i++) {
    q[i] = takes[i] ? log_gamma_draw(shape, draws.of_worker(draw, c, i)) : -INFINITY;
    largest = std::max(largest, q[i]);
  }
  for (double& v : q) v = std::exp(v - largest);
  return q;
}

// Appends to each part its proportion of the pictures, in their order.
void share_out(const std::vector<std::int32_t>& pictures, const std::vector<double>& proportions,
               std::vector<Part>& parts) {
  double total = 0, sum = 0;
  for (double q : proportions) total += q;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < parts.size(); i++) {
    sum += proportions[i];
    const auto end = std::size_t(double(pictures.size()) * (sum / total) + 1e-9);  // 1e-9: 0.01·100 is a whole number
    parts[i].insert(parts[i].end(), pictures.begin() + std::ptrdiff_t(begin), pictures.begin() + std::ptrdiff_t(end));
    begin = end;
  }
}

// Whether a worker holds a class, for the kinds whose workers share a class equally.
bool holds(const Partition& p, const Draws& draws, int worker, int c, int classes) {
  if (p.kind == Kind::groups) return worker * p.groups / draws.workers == c * p.groups / classes;
  const int own = worker % classes;
  if (c == own) return true;
  const auto others = permutation(classes - 1, draws.of_worker(0, 0, std::size_t(worker)));
  const auto end = others.begin() + std::min<std::int64_t>(p.k - 1, classes - 1);
  return std::find(others.begin(), end, (c - own - 1 + classes) % classes) != end;
}

std::vector<Part> draw_parts(const Partition& p, const std::vector<Part>& of_class, std::size_t pictures,
                             const Draws& draws, int draw) {
  std::vector<Part> parts(std::size_t(draws.workers));
  const std::vector<bool> all(parts.size(), true);
  if (p.kind == Kind::equal || p.kind == Kind::sizes) {
    const auto q = p.kind == Kind::sizes ? dirichlet(p.beta, all, draws, draw, 0) : std::vector<double>(all.size(), 1);
    share_out(permutation(std::int64_t(pictures), draws.order(draw, 0)), q, parts);
    return parts;
  }
  const int classes = int(of_class.size());
  for (int c = 0; c < classes; c++) {
    std::vector<bool> takes(parts.size());
    for (std::size_t i = 0; i < parts.size(); i++)
      takes[i] =
          p.kind == Kind::dirichlet ? parts[i].size() * parts.size() < pictures : holds(p, draws, int(i), c, classes);
    if (std::find(takes.begin(), takes.end(), true) == takes.end()) continue;  // nobody holds this class
    const auto q = p.kind == Kind::dirichlet ? dirichlet(p.alpha, takes, draws, draw, c)
                                             : std::vector<double>(takes.begin(), takes.end());
    Part order = permutation(std::int64_t(of_class[std::size_t(c)].size()), draws.order(draw, c));
    for (std::int32_t& i : order) i = of_class[std::size_t(c)][std::size_t(i)];
    share_out(order, q, parts);
  }
  return parts;
}

}  // namespace

Partition Partition::parse(const std::string& text) {
  Partition p;
  const auto known = std::find(std::begin(names), std::end(names), spec_name(text));
  if (known == std::end(names))
    refuse("--partition ", text,
           ": choose shared, equal, dirichlet:alpha=0.5, classes:k=2, sizes:beta=0.5 or groups:n=2");
  p.kind = Kind(known - std::begin(names));
  std::vector<SpecField> fields;
  if (p.kind == Kind::dirichlet) fields.push_back(bare(number_field("alpha", p.alpha, above_zero, 1e6)));
  if (p.kind == Kind::sizes) fields.push_back(bare(number_field("beta", p.beta, above_zero, 1e6)));
  if (p.kind == Kind::classes) fields.push_back(bare(number_field("k", p.k, 1, 1e6)));
  if (p.kind == Kind::groups) fields.push_back(bare(number_field("n", p.groups, 2, 1e6)));
  read_spec(text, fields);
  return p;
}

std::string Partition::name() const {
  const std::string is = names[int(kind)];
  if (kind == Kind::dirichlet) return is + ":alpha=" + digits(alpha);
  if (kind == Kind::sizes) return is + ":beta=" + digits(beta);
  if (kind == Kind::classes) return is + ":k=" + std::to_string(k);
  if (kind == Kind::groups) return is + ":n=" + std::to_string(groups);
  return is;
}

std::vector<Part> parts_of(const Partition& p, std::span<const std::int32_t> labels, int classes, int workers,
                           std::uint64_t seed) {
  const bool drawn_sizes = p.kind == Kind::dirichlet || p.kind == Kind::sizes;
  const std::size_t n = std::size_t(workers), needed = drawn_sizes ? least : 1;
  if (labels.size() < n * needed)
    refuse("--partition ", p.name(), ": ", labels.size(), " pictures are too few for ", workers,
           " workers with at least ", needed, " each");
  if (p.kind == Kind::groups && (p.groups > workers || p.groups > classes))
    refuse("--partition ", p.name(), ": there are only ", workers, " workers and ", classes, " classes");
  std::vector<Part> of_class(static_cast<std::size_t>(classes));
  for (std::size_t i = 0; i < labels.size(); i++) of_class[std::size_t(labels[i])].push_back(std::int32_t(i));
  for (int draw = 0; draw < most_draws; draw++) {
    const auto parts = draw_parts(p, of_class, labels.size(), {seed, workers}, draw);
    const auto small = std::find_if(parts.begin(), parts.end(), [&](const Part& x) { return x.size() < needed; });
    if (small == parts.end()) return parts;
    if (!drawn_sizes)
      refuse("--partition ", p.name(), ": worker ", small - parts.begin(), " of ", workers,
             " has no picture: use fewer workers");
  }
  refuse("--partition ", p.name(), ": no draw of ", most_draws, " gave each of ", workers, " workers ", least,
         " pictures: use a larger ", p.kind == Kind::dirichlet ? "alpha" : "beta", " or fewer workers");
}

}  // namespace tandem
