// Adds an operation of your own, softsign(x) = x / (1 + |x|): a functor with the function and its gradient, and a line
// that makes an operation of it, for every floating type and every device (autograd/elementwise.h). check_gradient
// compares its gradient with finite differences.
#include <cmath>
#include <cstdio>
#include <iostream>

#include "autograd/elementwise.h"
#include "tandem.h"

using namespace tandem;

struct Softsign {
  static constexpr auto name = "softsign";
  TANDEM_HD auto f(auto x) const { return x / (1 + std::fabs(x)); }
  TANDEM_HD auto df(auto g, auto x) const { return g / ((1 + std::fabs(x)) * (1 + std::fabs(x))); }
};
Variable softsign(const Variable& x) { return elementwise(Softsign{}, x); }

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    parse_command_line(argc, argv, "Adds an operation, softsign, and checks its gradient.", {});
    auto backend = reference_backend();
    Tensor x = Tensor::of(*backend, {2, 3}, {-2, -0.5, 0.1, 0.7, 1.5, 4});
    GradientReport report = check_gradient([](std::span<const Variable> in) { return softsign(in[0]); }, {{x}});
    std::printf("softsign: %s\n", report.text.c_str());
    require(report.passed, "softsign's gradient is wrong");
    std::cout << softsign(x) << "\n" << softsign(x.cast(DType::bf16)) << "\n";
  });
}
