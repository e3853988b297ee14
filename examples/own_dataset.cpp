// A data set of your own, from memory: pictures of discs, squares and crosses, drawn here, learned by a small network.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tandem.h"

using namespace tandem;

constexpr int side = 28, kinds = 3;

// Draws picture i of a set: kind i mod 3. Its position, size and noise are random numbers that depend on counters, so
// it is the same on every machine.
void draw(std::uint32_t i, std::uint64_t seed, std::uint8_t* pixels) {
  Philox random(seed, Stream::synthetic, 0, i);
  const int r = 4 + int(random.word(0) % 5), cx = r + int(random.word(1) % (side - 2 * r)),
            cy = r + int(random.word(2) % (side - 2 * r));
  for (int y = 0; y < side; y++)
    for (int x = 0; x < side; x++) {
      const int dx = std::abs(x - cx), dy = std::abs(y - cy);
      const bool disc = dx * dx + dy * dy <= r * r, square = dx < r && dy < r, cross = square && (dx < 2 || dy < 2);
      const bool inside[kinds] = {disc, square, cross};
      pixels[y * side + x] = std::uint8_t(random.word(std::uint32_t(4 + y * side + x)) % 100 + 120 * inside[i % kinds]);
    }
}

Pictures shapes(const char* name, int count, std::uint64_t seed) {
  std::vector<std::uint8_t> pixels(std::size_t(count) * side * side);
  std::vector<std::int32_t> labels;
  for (int i = 0; i < count; i++) {
    draw(std::uint32_t(i), seed, pixels.data() + std::size_t(i) * side * side);
    labels.push_back(i % kinds);
  }
  // Copied; mean and standard deviation are measured
  return in_memory(name, pixels, {count, side, side, 1}, labels, kinds);
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o =
        parse_options(argc, argv, "Discs, squares and crosses.", {.model = "lenet5", .epochs = 6, .learning_rate = 0.1},
                      {"--model", "--epochs", "--batch", "--lr", "--seed", "--device", "--metrics"});
    auto backend = make_backend(o);
    Pictures seen = shapes("shapes train", 6000, o.seed), unseen = shapes("shapes test", 1500, o.seed + 1);
    Loader train(seen, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(unseen, {.batch = 500, .shuffle = false}, *backend);
    auto model = make_model(o.model, kinds, 1, side);
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    FitReport report = fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
