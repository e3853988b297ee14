// How long each algorithm takes for each pass of the convolutions of LeNet-5, SmallCNN, ResNet-20 and ResNet-18 at
// batch 128.
//   bench_convolution [threads = 2] [f32|bf16|both] [lenet|small|resnet20|resnet18|all]
// Each row alternates the algorithms (A B C A B C …) and prints the smallest and the median of seven; weights are
// prepared in every call, as in training. The totals take for each pass the algorithm with the best median, times the
// layers of its kind.
#include <cstdio>
#include <cstring>
#include <map>

#include "core/cpu/convolution.h"
#include "tests/bench/timing.h"

using namespace tandem;
using namespace tandem::cpu;

namespace {

// With one thread the time that it was running, which other programs disturb little; else the wall's.
double now(int threads) { return 1e3 * (threads == 1 ? cpu_seconds() : seconds_since({})); }

struct Layer {
  const char* model;
  int times;   // layers of this kind
  bool first;  // no data gradient
  ConvShape shape;
};

ConvShape square(int size, int in, int out, int k, int pad, int stride = 1) {
  return {128, size, size, in, out, k, k, stride, stride, pad, pad};
}

std::vector<Layer> layers() {
  std::vector<Layer> all = {{"lenet", 1, true, square(28, 1, 6, 5, 2)},
                            {"lenet", 1, false, square(14, 6, 16, 5, 0)},
                            {"small", 1, true, square(28, 1, 32, 3, 1)},
                            {"small", 1, false, square(14, 32, 64, 3, 1)}};
  auto residual = [&](const char* model, int width, int blocks, int stages) {
    all.push_back({model, 1, true, square(32, 3, width, 3, 1)});
    for (int i = 0, size = 32, c = width; i < stages; i++, size /= 2, c *= 2) {
      all.push_back({model, 2 * blocks - (i > 0), false, square(size, c, c, 3, 1)});
      if (i + 1 == stages) break;
      all.push_back({model, 1, false, square(size, c, 2 * c, 3, 1, 2)});
      all.push_back({model, 1, false, square(size, c, 2 * c, 1, 0, 2)});
    }
  };
  residual("resnet20", 16, 3, 3);
  residual("resnet18", 64, 2, 4);
  return all;
}

template <class T>
void run(int threads, const char* only) {
  std::map<std::string, double> totals;
  std::printf("%s, %d threads: milliseconds, smallest / median\n", tandem::name_of(dtype_of<T>), threads);
  for (const Layer& l : layers()) {
    if (std::strcmp(only, "all") != 0 && std::strcmp(only, l.model) != 0) continue;
    const ConvShape& s = l.shape;
    std::vector<T> x(s.x_numel(), T(0.5f)), y(s.y_numel(), T(0.25f)), dx(s.x_numel());
    std::vector<float> w(s.w_numel(), 0.1f), dw(s.w_numel());
    CachingAllocator heap(heap_memory());
    for (Pass pass : {Pass::forward, Pass::backward_data, Pass::backward_filter}) {
      if (l.first && pass == Pass::backward_data) continue;
      Convolution any(heap, threads);
      std::vector<std::unique_ptr<Convolution>> each;
      const std::vector<Algorithm> found = any.applicable<T>(s, pass);
      for (Algorithm a : found) {
        each.push_back(std::make_unique<Convolution>(heap, threads));
        each.back()->only(a);
      }
      auto call = [&](Convolution& c) {
        c.run<T>({pass, s, (pass == Pass::backward_data ? dx : x).data(),
                  (pass == Pass::backward_filter ? dw : w).data(), y.data()});
      };
      std::vector<std::vector<double>> times(each.size());
      for (int round = 0; round < 8; round++)
        for (std::size_t i = 0; i < each.size(); i++) {
          call(*each[i]);  // once to warm caches and threads
          const double start = now(threads);
          call(*each[i]);
          if (round > 0) times[i].push_back(now(threads) - start);
        }
      std::printf("%-9s x%d %3d->%-3d @%-2d %dx%d/%d  %-15s", l.model, l.times, int(s.c_in), int(s.c_out), int(s.h),
                  int(s.kh), int(s.kw), int(s.stride_h), cpu::name_of(pass));
      double best = 1e30, best_median = 1e30;
      for (std::size_t i = 0; i < each.size(); i++) {
        const double least = *std::min_element(times[i].begin(), times[i].end()), middle = median(times[i]);
        std::printf("  %s %.2f / %.2f", cpu::name_of(found[i]), least, middle);
        best = std::min(best, least), best_median = std::min(best_median, middle);
      }
      std::printf("  (%.0f GFLOP/s; %s)\n", s.flops() / best / 1e6, any.library().kernel<T>(s, pass).name.c_str());
      std::fflush(stdout);
      totals[std::string(l.model) + " smallest"] += l.times * best;
      totals[std::string(l.model) + " median"] += l.times * best_median;
    }
  }
  for (auto& [name, t] : totals) std::printf("total %-20s %8.2f ms\n", name.c_str(), t);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const char* type = argc > 2 ? argv[2] : "both";
  const char* model = argc > 3 ? argv[3] : "all";
  std::printf("%s\n", OneDnn::version().c_str());
  if (std::strcmp(type, "bf16") != 0) run<float>(threads, model);
  if (std::strcmp(type, "f32") != 0 && OneDnn::has_bf16()) run<bf16>(threads, model);
}
