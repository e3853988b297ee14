// Tensors, the tape, and a gradient: y = Σ (x·w)².
#include <cstdio>

#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    parse_command_line(argc, argv, "A gradient on paper and by machine, and a mistake that is refused.", {});
    auto backend = cpu_backend();
    Tensor x = Tensor::of(*backend, {2, 2}, {1, 2, 3, 4});        // [rows, columns], row-major
    Variable w(Tensor::of(*backend, {2}, {10, 100}), true, "w");  // a leaf: backward() computes its gradient

    Variable y = sum(square(Variable(x) * w));  // w is broadcast over the rows
    std::printf("y = %.0f\n", y.item());
    y.backward();
    std::printf("dy/dw = [%.0f, %.0f]\n", w.grad().values()[0], w.grad().values()[1]);  // 2·w·Σ x² per column

    Tensor kept = w.value();
    Variable z = sum(square(w));
    kept.fill(0);  // written to after z was computed
    try {
      z.backward();
    } catch (const Error& e) {
      std::printf("refused: %s\n", e.what());
    }
  });
}
