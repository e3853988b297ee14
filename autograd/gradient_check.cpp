// Checks a gradient against finite differences: the change of a scalar when one element changes a little.
#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"
#include "core/random.h"
#include "core/text.h"

namespace tandem {
namespace {

// Σ r·f with fixed random weights r in [0.5, 1.5), so that errors in different outputs cannot cancel.
Variable weighted_sum(const Variable& y) {
  std::vector<double> weights(y.value().numel());
  Philox random(7, Stream::test);
  for (std::size_t i = 0; i < weights.size(); i++) weights[i] = 0.5 + uniform(random.word(std::uint32_t(i)));
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
  const double middle = y.item();
  std::string worst;
  for (std::size_t i = 0; i < inputs.size(); i++) {
    const Tensor gradient = leaves[i].grad();
    const std::vector<double> analytic =
        gradient.defined() ? gradient.values() : std::vector<double>(values[i].size(), 0.0);
    double largest = 1e-3;
    for (double g : analytic) largest = std::max(largest, std::abs(g));
    for (std::size_t e = 0; e < values[i].size(); e++) {
      const double x = values[i][e], h = options.step * std::max(1.0, std::abs(x)),
                   up = (loss_at(i, e, x + h) - middle) / h, down = (middle - loss_at(i, e, x - h)) / h,
                   numeric = (up + down) / 2, error = std::abs(analytic[e] - numeric) / largest;
      if (std::abs(up - down) > 1e-2 * std::max(largest, std::abs(numeric))) {  // a kink within the step
        report.skipped++;
        continue;
      }
      report.compared++;
      report.passed = report.passed && error <= options.tolerance;
      if (error <= report.worst || std::isnan(report.worst)) continue;  // a NaN is the worst
      report.worst = error;
      worst =
          printed("; input %zu element %zu: backward gives %.6g, finite differences %.6g", i, e, analytic[e], numeric);
    }
  }
  report.passed = report.passed && report.compared > 0;
  report.text =
      printed("%s: worst relative error %.6g over %ld elements (%ld at kinks skipped)",
              report.passed ? "gradient agrees" : "GRADIENT DIFFERS", report.worst, report.compared, report.skipped) +
      (report.passed ? "" : worst);
  return report;
}

}  // namespace tandem
