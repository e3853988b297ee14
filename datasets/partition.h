// Partitions: which pictures each worker has, if workers do not draw from all of them (NIID-Bench, arXiv 2102.02079). A
// partition is a function of its name, the labels, the number of workers and the seed. So it is the same under every
// launcher and in the simulator.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

struct Partition {
  enum class Kind {
    shared,     // every worker draws from all pictures
    equal,      // a random permutation, cut into equal parts
    dirichlet,  // alpha: of each class, the workers' proportions are drawn from Dir(alpha)
    classes,    // k: worker i has class i mod C and k − 1 others at random; the workers with a class share it equally
    sizes,      // beta: the parts' sizes are drawn from Dir(beta)
    groups      // n groups of workers; each has its own 1/n of the classes, shared equally within the group
  };
  Kind kind = Kind::shared;
  double value = 0;  // alpha, k, beta or n

  // "dirichlet:alpha=0.5". Throws UsageError.
  static Partition parse(const std::string& text);
  static const std::string forms;  // the texts that parse() accepts
  std::string name() const;        // parse() accepts it
};

using Part = std::vector<std::int32_t>;  // indices of pictures, in a random order

// One part for each worker. Parts are disjoint, and none is empty. Every picture is in a part, except those of classes
// that no worker has (classes:k). dirichlet and sizes are drawn again until each part has at least 10 pictures. Throws
// UsageError when the pictures are too few, or when 1,000 draws were not enough.
std::vector<Part> parts_of(const Partition& partition, std::span<const std::int32_t> labels, int classes, int workers,
                           std::uint64_t seed);

}  // namespace tandem
