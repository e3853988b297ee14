#include "examples/course/check.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

Numbers gradient(std::size_t n, int step) {
  Numbers g;
  for (std::size_t i = 0; i < n; i++) g.push_back(std::sin(1.0 + double(i) + 3.0 * step));
  return g;
}

// The initial weights, and the weights after each of `steps` steps of the library's optimizer, in double.
std::vector<Numbers> by_library(const Momentum& o, int steps) {
  const auto backend = reference_backend();
  Linear model(5, 4, false);
  FlatParameters flat(model, *backend, 1, {}, DType::f64);
  SGD sgd({o.learning_rate, o.momentum, o.nesterov, o.weight_decay});
  sgd.bind(flat);
  const Variable& w = model.parameters()[0].second->variable;
  std::vector<Numbers> all{w.value().values()};
  for (int s = 0; s < steps; s++) {
    const Tensor g = Tensor::of(*backend, {4, 5}, gradient(20, s), DType::f64);
    flat.zero_gradients();
    flat.backward(sum(w * Variable(g)));  // so that the gradient is g
    sgd.step();
    all.push_back(w.value().values());
  }
  return all;
}

// A usual mistake in a step; with() computes the weights that result from it.
struct Slip {
  double decay = 1, share = 1, step = 1;  // factors of the weight decay, of d in the velocity, and of the step
};
Numbers with(const Slip& slip, Numbers w, const Momentum& o, int steps) {
  Numbers v(w.size());
  for (int s = 0; s < steps; s++) {
    const Numbers g = gradient(w.size(), s);
    for (std::size_t i = 0; i < w.size(); i++) {
      const double d = g[i] + slip.decay * o.weight_decay * w[i];
      v[i] = o.momentum * v[i] + slip.share * d;
      w[i] -= slip.step * o.learning_rate * (o.nesterov ? d + o.momentum * v[i] : v[i]);
    }
  }
  return w;
}

// Whether all steps are bit-identical to the library's.
bool steps_are_right() {
  bool to_the_bit = true;
  for (const Momentum& o : {Momentum{0.125, 0, 0, false}, Momentum{0.125, 0.875, 0, false},
                            Momentum{0.125, 0.875, 0.015625, false}, Momentum{0.0625, 0.75, 0.015625, true}}) {
    constexpr int steps = 5;
    const std::vector<Numbers> library = by_library(o, steps);
    Numbers w = library[0], v(w.size());
    for (int s = 0; s < steps; s++) {
      momentum_step(w, v, gradient(w.size(), s), o);
      auto mistake = [&](const Slip& slip, const char* hint) {
        return Mistake{with(slip, library[0], o, s + 1), hint};
      };
      std::vector<Mistake> mistakes{mistake({.step = -1}, "The step goes uphill: subtract it.")};
      if (o.momentum > 0)
        mistakes.push_back(mistake({.share = 1 - o.momentum}, "Here v = mu*v + d, without a factor (1 - mu) on d."));
      if (o.weight_decay > 0) {
        mistakes.push_back(mistake({.decay = 0}, "Weight decay is missing: add wd*w to g before the momentum."));
        mistakes.push_back(mistake({.decay = -1}, "Weight decay has the wrong sign: it makes weights smaller."));
      }
      expect_equal("momentum " + digits(o.momentum) + ", weight decay " + digits(o.weight_decay) +
                       (o.nesterov ? ", Nesterov" : "") + ", step " + std::to_string(s + 1),
                   w, library[std::size_t(s) + 1], 1e-14, mistakes);
      to_the_bit = to_the_bit && w == library[std::size_t(s) + 1];
    }
  }
  return to_the_bit;
}

void clipping_is_right() {
  for (double limit : {1.0, 100.0}) {
    Numbers g{3, -4, 12}, right = g;
    for (double& v : right) v *= std::min(1.0, limit / 13);
    expect_equal("clip returns the norm", {clip(g, limit)}, {13}, 1e-14, {{{169}, "This is the norm's square."}});
    expect_equal("clip to " + digits(limit), g, right, 1e-14,
                 {{{3 * limit / 13, -4 * limit / 13, 12 * limit / 13}, "A gradient below the limit stays as it is."}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 2, "momentum on the flat vector", [] {
    const bool to_the_bit = steps_are_right();
    clipping_is_right();
    return to_the_bit ? "equal to the library's optimizer to the bit" : "equal to the library's optimizer to 1e-14";
  });
}
