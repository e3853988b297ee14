// A softmax cross-entropy whose classes are cut over the ranks of a host (dist/strategies/hybrid.h), in blocking calls
// and in double on the host.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "dist/strategies/sliced_linear.h"

namespace tandem {

struct NaiveHybrid {
  using Numbers = std::vector<double>;
  std::shared_ptr<Communicator> over;
  Cuts rows;
  std::int64_t B, F, n, first, last;  // rows of all ranks, features, classes of this slice; this rank's rows
  Numbers x, w, p;                    // X [B, F], W_g [n, F]; softmax − target [B, n]
  NaiveHybrid(std::shared_ptr<Communicator> o, Cuts r, const Tensor& features, const Tensor& weight)
      : over(std::move(o)),
        rows(std::move(r)),
        B(rows.back()),
        F(features.size(1)),
        n(weight.size(0)),
        first(rows[std::size_t(over->rank())]),
        last(rows[std::size_t(over->rank()) + 1]),
        x(gathered(features, F)),
        w(weight.values()) {}
  Numbers gathered(const Tensor& mine, std::int64_t columns) {
    Numbers all(std::size_t(B * columns)), here = mine.values();
    Cuts cuts = rows;
    for (std::int64_t& c : cuts) c *= columns;
    std::copy(here.begin(), here.end(), all.begin() + first * columns);
    over->all_gather(buffer(all), cuts).wait();
    return all;
  }
  // The mean over this rank's rows. begin, classes: where this slice begins, of so many.
  double loss(const Tensor& labels, const Numbers& bias, std::int64_t begin, std::int64_t classes, double smoothing,
              double& right) {
    const Numbers y = gathered(labels, 1);
    Numbers m(std::size_t(B), -INFINITY), sums(std::size_t(3 * B));  // of each row: largest z; Σ e^(z − m), z_y, Σ z
    p.resize(std::size_t(B * n));
    auto each = [&](auto f) {
      for (std::size_t i = 0, N = std::size_t(n); i < p.size(); i++)
        f(p[i], i / N, i % N, begin + std::int64_t(i % N) == y[i / N]);
    };
    each([&](double& z, auto r, auto c, bool) {
      z = std::inner_product(&x[r * std::size_t(F)], &x[r * std::size_t(F)] + F, &w[c * std::size_t(F)], bias[c]);
      m[r] = std::max(m[r], z);
    });
    over->all_reduce(buffer(m), Combine::max).wait();
    each([&](double z, auto r, auto, bool own) {
      sums[3 * r] += std::exp(z - m[r]);
      sums[3 * r + 1] += own ? z : 0;
      sums[3 * r + 2] += z;
    });
    over->all_reduce(buffer(sums)).wait();
    each([&](double& z, auto r, auto, bool own) {
      z = std::exp(z - m[r]) / sums[3 * r] - (own ? 1 - smoothing : 0) - smoothing / double(classes);
    });
    double total = 0;
    for (std::size_t r = std::size_t(first); r < std::size_t(last); r++) {
      total += std::log(sums[3 * r]) + m[r] - (1 - smoothing) * sums[3 * r + 1] -
               smoothing / double(classes) * sums[3 * r + 2];
      right += sums[3 * r + 1] == m[r];
    }
    return total / double(last - first);
  }
  void backward(const Tensor& dy, std::span<GradientSlot> slots) const {
    const Numbers each = of_all(*over, {dy.item() / double(last - first)});  // the weight of a row, of each rank
    Numbers dx(x.size()), dw(w.size()), db(static_cast<std::size_t>(n));
    for (std::int64_t r = 0, k = 0; r < B; r++)
      for (std::int64_t c = 0; c < n; c++) {
        while (r >= rows[std::size_t(k) + 1]) k++;
        const double dz = p[std::size_t(r * n + c)] * each[std::size_t(k)];
        for (std::int64_t f = 0; f < F; f++) {
          dx[std::size_t(r * F + f)] += dz * w[std::size_t(c * F + f)];
          dw[std::size_t(c * F + f)] += dz * x[std::size_t(r * F + f)];
        }
        db[std::size_t(c)] += dz;
      }
    over->all_reduce(buffer(dx)).wait();
    auto give = [&](std::size_t slot, const Shape& s, std::span<const double> v) {
      slots[slot].accumulate(Tensor::of(dy.backend(), s, v, dy.dtype()));
    };
    if (slots[0].wanted())
      give(0, {last - first, F}, std::span(dx).subspan(std::size_t(first * F), std::size_t((last - first) * F)));
    if (slots[1].wanted()) give(1, {n, F}, dw);
    if (slots[2].wanted()) give(2, {n}, db);
  }
};
struct NaiveHybridNode : Node {
  static constexpr auto name = "naive_hybrid";
  std::shared_ptr<const NaiveHybrid> hybrid;
  explicit NaiveHybridNode(std::shared_ptr<const NaiveHybrid> h) : Node(name), hybrid(std::move(h)) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override { hybrid->backward(dy, slots); }
};

inline Variable naive_sliced_loss(const SlicedLinear& layer, const Variable& x, const Tensor& labels, double smoothing,
                                  Tensor* correct) {
  const auto naive = std::make_shared<NaiveHybrid>(layer.over(), rows_of_all(*layer.over(), x.value()), x.value(),
                                                   layer.weight().value());
  const std::vector<double> none(static_cast<std::size_t>(layer.width()));
  double right = 0;
  const double mean = naive->loss(labels, layer.bias().defined() ? layer.bias().value().values() : none, layer.begin(),
                                  layer.classes(), smoothing, right);
  if (correct) correct->fill(correct->item() + right);
  const Tensor loss = Tensor::of(x.backend(), {}, {mean}, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  return record<NaiveHybridNode>(loss, {&x, &layer.weight(), &layer.bias()}, {}, naive);
}

}  // namespace tandem
