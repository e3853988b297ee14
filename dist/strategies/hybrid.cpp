#include "dist/strategies/hybrid.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "core/backend.h"
#include "core/text.h"
#include "dist/strategies/sliced_linear.h"
#include "layers/layers.h"

namespace tandem {
namespace {

using Numbers = std::vector<double>;
using Over = std::shared_ptr<Communicator>;

// ---- the shortest correct version: numbers in double on the host ----------------------------------------------------
struct NaiveHybrid {
  Over over;
  Cuts rows;
  std::int64_t B, F, n, first, last;  // rows of all ranks, features, classes of this slice; this rank's rows
  Numbers x, w, p;                    // X [B, F], W_g [n, F]; softmax − target [B, n]
  NaiveHybrid(Over o, Cuts r, const Tensor& features, const Tensor& weight)
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

Variable naive_loss(const SlicedLinear& layer, const Variable& x, const Tensor& labels, double smoothing,
                    Tensor* correct) {
  const auto naive = std::make_shared<NaiveHybrid>(layer.over(), rows_of_all(*layer.over(), x.value()), x.value(),
                                                   layer.weight().value());
  const Numbers none(static_cast<std::size_t>(layer.width()));
  double right = 0;
  const double mean = naive->loss(labels, layer.bias().defined() ? layer.bias().value().values() : none, layer.begin(),
                                  layer.classes(), smoothing, right);
  if (correct) correct->fill(correct->item() + right);
  const Tensor loss = Tensor::of(x.backend(), {}, {mean}, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  return record<NaiveHybridNode>(loss, {&x, &layer.weight(), &layer.bias()}, {}, naive);
}

// The last Linear in the order in which the modules were made.
Linear* last_linear(Module& module) {
  Linear* last = dynamic_cast<Linear*>(&module);
  for (auto& [name, child] : module.children())
    if (Linear* found = last_linear(*child)) last = found;
  return last;
}

}  // namespace

SlicedClassifier::SlicedClassifier(std::unique_ptr<Communicator> on_host, const Options& options)
    : on_host_(std::move(on_host)), options_(options) {}

SlicedClassifier::Options SlicedClassifier::parse(const std::string& name) {
  Options o;
  if (name == "hybrid") return o;
  constexpr std::string_view sample = "hybrid:sample=";
  if (name.starts_with(sample)) o.sample = parsed<double>(name.substr(sample.size())).value_or(0);
  if (!name.starts_with(sample) || !(o.sample > 0 && o.sample <= 1))
    refuse("--strategy ", name,
           ": expected hybrid, or hybrid:sample=SHARE with a share of the classes above 0 and up to 1");
  return o;
}

std::string SlicedClassifier::name() const {
  std::ostringstream text;
  text << (options_.naive ? "naive-hybrid" : "hybrid");
  if (options_.sample < 1) text << ":sample=" << options_.sample;
  return text.str();
}

void SlicedClassifier::begin() const {
  if (!prepared_)
    refuse(
        "hybrid: no layer is cut yet: call strategy->prepare(model, task, {}) before the flat parameters are made, and "
        "train by task.loss");
}

void SlicedClassifier::step() const {
  if (*waits_)
    refuse("hybrid: the loss of this step is not the task's, which knows that ", layer_->path(),
           " is cut over ranks: train by task.loss");
}

void SlicedClassifier::prepare(Module& model, Task& task) {
  prepared_ = true;
  if (on_host_->size() == 1) return;
  const CrossEntropy* const loss = task.loss.target<CrossEntropy>();
  if (!loss)
    refuse(
        "hybrid: the softmax of this task's loss is not known to be one over slices: train with cross_entropy_loss(), "
        "or choose "
        "all-reduce");
  model.name_tree();
  Linear* const last = last_linear(model);
  if (!last || last->has_relu())
    refuse("hybrid: the model has no Linear at its end, which could be cut over ranks: choose all-reduce");
  const std::int64_t outputs = last->outputs();
  const int n = on_host_->size();
  if (outputs < n)
    refuse("hybrid: ", last->path(), " has ", outputs, " outputs, and ", n,
           " ranks of a host would share them: start fewer");
  layer_ = std::make_shared<SlicedLinear>(on_host_, last->path(), outputs, options_.sample);
  last->cut({on_host_->rank(), n},
            [layer = layer_, waits = waits_](const Variable& x, const Variable& w, const Variable& b, bool training) {
              const Variable y = layer->forward(x, w, b, training);
              *waits = layer->handed_on() != nullptr;
              return y;
            });
  task.loss = [layer = layer_, waits = waits_, plain = *loss, naive = options_.naive](
                  const Variable& outputs, const Tensor& labels, Tensor* correct) {
    if (!layer->handed_on()) return plain(outputs, labels, correct);  // alone, or in eval mode: rows of logits
    *waits = false;
    if (outputs.value().raw() != layer->handed_on())
      refuse("hybrid: the model goes on behind ", layer->path(),
             ", its last Linear, which is cut over ranks: choose all-reduce");
    return naive ? naive_loss(*layer, outputs, labels, plain.label_smoothing, correct)
                 : layer->loss(outputs, labels, plain.label_smoothing, correct);
  };
}

}  // namespace tandem
