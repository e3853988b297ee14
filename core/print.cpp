// Prints tensors like PyTorch: one format for all numbers, chosen by the largest and the smallest printed number.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/tensor.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::int64_t edge = 3;  // elements that are shown at each end of a long axis

struct Printer {
  const Tensor& t;
  const std::vector<double> values = t.values();
  const bool whole = t.numel() <= 1000;
  const char* format = "%.0f";
  int width = 0;

  std::vector<std::int64_t> shown(std::int64_t n) const {  // indices of an axis; −1: some are left out here
    std::vector<std::int64_t> all(std::size_t(whole || n <= 2 * edge ? n : 2 * edge + 1));
    std::iota(all.begin(), all.end(), 0);
    if (std::int64_t(all.size()) < n) {
      std::iota(all.begin() + edge, all.end(), n - edge - 1);
      all[edge] = -1;
    }
    return all;
  }
  template <class F>
  void each_shown(int axis, std::int64_t at, const F& f) const {
    if (axis == t.rank()) return f(values[std::size_t(at)]);
    for (std::int64_t i : shown(t.size(axis)))
      if (i >= 0) each_shown(axis + 1, at * t.size(axis) + i, f);
  }

  void choose_format() {
    double least = INFINITY, most = 0;
    bool integers = true;
    each_shown(0, 0, [&](double v) {
      if (!std::isfinite(v)) return;
      integers = integers && v == std::nearbyint(v);
      most = std::max(most, std::fabs(v));
      if (v != 0) least = std::min(least, std::fabs(v));
    });
    const bool counts = t.dtype() == DType::u8 || t.dtype() == DType::i32;
    if (!counts)
      format = most > 1e8 || (!integers && (most / least > 1000 || least < 1e-4)) ? "%.4e"
               : integers                                                         ? "%.0f."
                                                                                  : "%.4f";
    each_shown(0, 0, [&](double v) { width = std::max(width, int(text_of(v).size())); });
  }
  std::string text_of(double v) const {
    return printed(std::isfinite(v) ? format : "%f", std::isnan(v) ? std::fabs(v) : v);
  }

  void print(std::ostream& out, int axis, std::int64_t at) const {
    if (axis == t.rank()) {
      out << printed("%*s", width, text_of(values[std::size_t(at)]).c_str());
      return;
    }
    const int inner = t.rank() - axis - 1;  // axes
    const std::string between =
        inner == 0 ? ", " : "," + std::string(std::size_t(inner), '\n') + std::string(std::size_t(axis + 1), ' ');
    out << '[';
    for (const char* before = ""; std::int64_t i : shown(t.size(axis))) {
      out << std::exchange(before, between.c_str());
      if (i >= 0)
        print(out, axis + 1, at * t.size(axis) + i);
      else
        out << "...";
    }
    out << ']';
  }
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Tensor& t) {
  if (!t.defined()) return out << "undefined tensor";
  Printer p{t};
  p.choose_format();
  p.print(out, 0, 0);
  return out << "  " << name_of(t.dtype()) << ' ' << t.shape();
}

}  // namespace tandem
