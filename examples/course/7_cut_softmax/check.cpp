#include "examples/course/check.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

constexpr std::size_t B = 5, F = 4, C = 11;

Numbers waves(std::size_t n, double phase) {
  Numbers v;
  for (std::size_t i = 0; i < n; i++) v.push_back(2 * std::sin(phase + 1.7 * double(i)));
  return v;
}

// The library's result on one device.
struct Whole {
  double loss;
  Numbers dx, dw;
};
Whole on_one_device(const Numbers& x, const Numbers& w, const Numbers& labels) {
  const auto backend = reference_backend();
  Variable X(Tensor::of(*backend, {B, F}, x, DType::f64), true);
  Variable W(Tensor::of(*backend, {C, F}, w, DType::f64), true);
  const Variable loss = cross_entropy(linear(X, W), Tensor::of(*backend, {B}, labels, DType::i32));
  loss.backward();
  return {loss.value().item(), X.grad().values(), W.grad().values()};
}

void slices_are_one_device(Communicator& ranks) {
  const Cuts cuts = even_cuts(C, ranks.size());
  const auto begin = std::size_t(cuts[std::size_t(ranks.rank())]),
             end = std::size_t(cuts[std::size_t(ranks.rank()) + 1]);
  const std::size_t n = end - begin;
  const std::string where = named(ranks);
  const Numbers x = waves(B * F, 1), all = waves(C * F, 2), labels{3, 0, 10, 7, 3};
  const Numbers w(all.begin() + std::ptrdiff_t(begin * F), all.begin() + std::ptrdiff_t(end * F));
  const Whole whole = on_one_device(x, all, labels);

  Numbers z(B * n);
  for (std::size_t i = 0; i < z.size(); i++)
    for (std::size_t f = 0; f < F; f++) z[i] += x[i / n * F + f] * w[i % n * F + f];
  const SoftmaxRows rows = cut_softmax(ranks, z, labels, begin);
  expect(rows.p.size() == z.size() && rows.total.size() == B && rows.own.size() == B && rows.largest.size() == B,
         where + ": p has " + std::to_string(rows.p.size()) + " numbers", "p is [B, n]; the others have B numbers.");
  double loss = 0, local = 0;
  Numbers dz = rows.p;
  for (std::size_t b = 0; b < B; b++) {
    double sum = 0;
    for (std::size_t c = 0; c < n; c++) sum += std::exp(z[b * n + c]);
    loss += (rows.total[b] - rows.own[b]) / B;
    local += (std::log(sum) - rows.own[b]) / B;
  }
  expect_equal(
      where + ", loss", {loss}, {whole.loss}, 1e-10,
      {{{local}, "The sum of e^z is over this rank's classes only: all-reduce it."}},
      "The largest logit is that of all ranks; only one rank has a label's logit: class begin + c is column c.");
  for (std::size_t i = 0; i < dz.size(); i++) dz[i] = (dz[i] - (double(begin + i % n) == labels[i / n] ? 1 : 0)) / B;
  const CutGradients d = cut_backward(ranks, dz, x, w, F);
  Numbers part(B * F);
  for (std::size_t i = 0; i < dz.size(); i++)
    for (std::size_t f = 0; f < F; f++) part[i / n * F + f] += dz[i] * w[i % n * F + f];
  const Numbers dw(whole.dw.begin() + std::ptrdiff_t(begin * F), whole.dw.begin() + std::ptrdiff_t(end * F));
  Numbers transposed;
  for (std::size_t f = 0; f < F; f++)
    for (std::size_t c = 0; c < n; c++) transposed.push_back(dw[c * F + f]);
  expect_equal(where + ", dw", d.dw, dw, 1e-10, {{transposed, "dw is transposed: it is [n, F], like w."}});
  expect_equal(where + ", dx", d.dx, whole.dx, 1e-10,
               {{part, "This is the share of this rank's classes: sum dx over all ranks."}});

  const SoftmaxRows large = cut_softmax(ranks, Numbers(B * n, 800), labels, begin);
  expect_equal(where + ", logits of 800", large.total, Numbers(B, 800 + std::log(double(C))), 1e-10, {},
               "e^800 is infinite: take the row's largest logit off first. It is a maximum over all ranks.");
}

// Compares the bytes sent with the minimum: the maxima, the sums with the labels' logits, and dx.
void few_bytes_move(Communicator& ranks, std::string& remark) {
  constexpr std::size_t rows = 64, classes = 1000, features = 8;
  const auto n = std::size_t(even_cuts(classes, ranks.size())[1]);
  Numbers x(rows * features, 0.1), w(n * features, 0.1), z(rows * n, 0.1), labels(rows);
  auto bytes = [&](const auto& body) {
    const std::uint64_t before = ranks.traffic().bytes;
    body();
    return double(ranks.traffic().bytes - before);
  };
  const double yours = bytes([&] {
    const SoftmaxRows s = cut_softmax(ranks, z, labels, n * std::size_t(ranks.rank()));
    cut_backward(ranks, s.p, x, w, features);
  });
  const double least = bytes([&] {
    for (std::size_t count : {rows, 2 * rows, rows * features}) {
      Numbers v(count);
      ranks.all_reduce(buffer(v)).wait();
    }
  });
  expect(yours <= 1.01 * least, digits(yours) + " bytes were sent, where " + digits(least) + " are enough",
         "Only numbers per row cross ranks, never logits: a maximum, two sums, and dx.");
  if (ranks.rank() == 0)
    remark = digits(yours) + " bytes sent for " + std::to_string(classes) + " classes; the logits are " +
             digits(double(8 * rows * classes));
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 7, "a softmax cut over ranks", [] {
    on_ranks({1, 2, 3, 4}, slices_are_one_device);
    std::string remark;
    on_ranks({2}, [&](Communicator& ranks) { few_bytes_move(ranks, remark); });
    return remark;
  });
}
