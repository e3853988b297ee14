// How many pictures a second one thread makes ready: the loader must never be what a training waits for. Counted in the
// thread's own CPU time, so that other work on the machine does not matter much.
//   bench_loader [DATA SET [SIZE]]      (default cifar-10, or synthetic-cifar-10 where that is not found)
#include <cstdio>

#include "datasets/loader.h"
#include "layers/train/options.h"
#include "tests/bench/timing.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    double begin = cpu_seconds();
    Dataset data;
    try {
      data = load_dataset(argc > 1 ? argv[1] : "cifar-10", {}, {.size = argc > 2 ? std::atoi(argv[2]) : 0});
    } catch (const UsageError&) {
      if (argc > 1) throw;
      data = load_dataset("synthetic-cifar-10");
    }
    std::printf("%s: %lld pictures %d × %d × %d read in %.2f s of CPU time\n", data.name.c_str(),
                static_cast<long long>(data.train.count() + data.test.count()), data.side(), data.side(),
                data.channels(), cpu_seconds() - begin);
    auto backend = reference_backend(1);
    for (DType dtype : {DType::f32, DType::bf16})
      for (bool augment : {false, true}) {
        Loader loader(data.train,
                      {.dtype = dtype, .augment = augment ? Augment::usual(data.side()) : Augment{}, .prefetch = 0},
                      *backend);
        std::vector<double> rates;
        for (int epoch = 0; epoch < 7; epoch++) {
          loader.start(epoch);
          const double from = cpu_seconds();
          for (Batch batch; loader.next(batch);) {}
          rates.push_back(double(loader.pictures_per_epoch()) / (cpu_seconds() - from));
        }
        std::printf("%s, %s: %.0f pictures/s on one thread\n", name_of(dtype), augment ? "crop and flip" : "as it is",
                    median(rates));
      }
  });
}
