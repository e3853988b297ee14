// Checks a gradient against finite differences: the change of a scalar when one element changes a little.
#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"
#include "core/random.h"

namespace tandem {
namespace {

// Σ r·f with fixed random weights r in [0.5, 1.5), so that errors in different outputs cannot cancel.
Variable weighted_sum(const Variable& y) {
  std::vector<double> weights(y.value().numel());
  Philox random(7, Stream::test);
  for (std::size_t i = 0; i < weights.size(); i++)
    weights[i] = 0.5 + uniform(random.word(static_cast<std::uint32_t>(i)));
  return sum(mul(y, Variable(Tensor::of(y.backend(), y.shape(), weights, DType::f64))));
}

}  // namespace

GradientReport check_gradient(const std::function<Variable(std::span<const Variable>)>& f,
                              std::span<const Tensor> inputs, const GradientCheck& options) {
  std::unique_ptr<Backend> backend = reference_backend();
  std::vector<std::vector<double>> values;
  std::vector<Variable> leaves;
  for (const Tensor& t : inputs) {
    values.push_back(t.values());
    leaves.emplace_back(Tensor::of(*backend, t.shape(), values.back(), DType::f64), true);
  }
  Variable y = weighted_sum(f(leaves));
  y.backward();

  auto loss_at = [&](std::size_t input, std::size_t element, double value) {
    NoGrad off;
    std::vector<Variable> moved;
    for (std::size_t i = 0; i < inputs.size(); i++) {
      std::vector<double> v = values[i];
      if (i == input) v[element] = value;
      moved.emplace_back(Tensor::of(*backend, inputs[i].shape(), v, DType::f64));
    }
    return weighted_sum(f(moved)).item();
  };

  GradientReport report;
  double middle = y.item();
  std::ostringstream worst;
  for (std::size_t i = 0; i < inputs.size(); i++) {
    Tensor gradient = leaves[i].grad();
    std::vector<double> analytic = gradient.defined() ? gradient.values() : std::vector<double>(values[i].size(), 0.0);
    double largest = 1e-3;
    for (double g : analytic) largest = std::max(largest, std::abs(g));
    for (std::size_t e = 0; e < values[i].size(); e++) {
      double h = options.step * std::max(1.0, std::abs(values[i][e]));
      double up = (loss_at(i, e, values[i][e] + h) - middle) / h, down = (middle - loss_at(i, e, values[i][e] - h)) / h;
      double numeric = (up + down) / 2;
      if (std::abs(up - down) > 1e-2 * std::max(largest, std::abs(numeric))) {  // a kink within the step
        report.skipped++;
        continue;
      }
      report.compared++;
      double error = std::abs(analytic[e] - numeric) / largest;
      if (!(error <= report.worst)) {
        report.worst = error;
        worst.str("");
        worst << "input " << i << " element " << e << ": backward gives " << analytic[e] << ", finite differences "
              << numeric;
      }
    }
  }
  report.passed = report.worst <= options.tolerance && report.compared > 0;
  std::ostringstream text;
  text << (report.passed ? "gradient agrees" : "GRADIENT DIFFERS") << ": worst relative error " << report.worst
       << " over " << report.compared << " elements (" << report.skipped << " at kinks skipped)";
  if (!report.passed && report.compared) text << "; " << worst.str();
  report.text = text.str();
  return report;
}

}  // namespace tandem
