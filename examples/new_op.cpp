// Adds an operation of your own: softsign(x) = x / (1 + |x|), and checks its gradient against finite differences.
//
// An operation is a function that computes y, and a node that knows how dy becomes dx. What backward needs is saved as a
// tensor; the sink says where the gradient goes, and whether it adds to one that is there already.
#include <cstdio>

#include "autograd/ops.h"
#include "core/launch.h"
#include "layers/train/options.h"

using namespace tandem;

template <class T>
struct Softsign {
  const T* x;
  T* y;
  void operator()(std::int64_t i) const { y[i] = x[i] / (1 + (x[i] < 0 ? -x[i] : x[i])); }
};

template <class T>
struct SoftsignBackward {  // dy / (1 + |x|)²
  const T *x, *dy;
  T* dx;
  bool add;
  void operator()(std::int64_t i) const {
    T d = 1 + (x[i] < 0 ? -x[i] : x[i]);
    dx[i] = (add ? dx[i] : T(0)) + dy[i] / (d * d);
  }
};

struct SoftsignNode : Node {
  static constexpr auto name = "softsign";
  SoftsignNode() : Node(name) {}
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor& x = kept(0);
    auto [dx, add] = sinks[0].place(x.backend(), x.shape(), x.dtype());
    dispatch_wide(x.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch(x.backend(), x.elements(), SoftsignBackward<T>{x.data<T>(), dy.data<T>(), dx->template write<T>(), add});
    });
  }
};

Variable softsign(const Variable& x) {
  Tensor y = Tensor::like(x.value());
  dispatch_wide(x.dtype(), "softsign", [&]<class T> {
    launch(x.backend(), y.elements(), Softsign<T>{x.value().data<T>(), y.write<T>()});
  });
  return record<SoftsignNode>(y, {&x}, {x.value()});
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    parse_command_line(argc, argv, "Adds an operation, softsign, and checks its gradient.", {});
    auto backend = reference_backend();
    Tensor x = Tensor::of(*backend, {2, 3}, {-2, -0.5, 0.1, 0.7, 1.5, 4});
    GradientReport report = check_gradient([](std::span<const Variable> in) { return softsign(in[0]); }, {{x}});
    std::printf("softsign: %s\n", report.text.c_str());
    require(report.passed, "softsign's gradient is wrong");
  });
}
