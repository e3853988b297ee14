// The two passes over memory of a normalisation's gradient, for batch norm (all rows) and group norm (one picture at a time):
// the first makes Σ d and Σ d·(x − center), the second writes dx (+)= d·scale + (x − center)·slope + constant. d is dy, but 0
// where a ReLU behind let nothing through; that is seen in y, or in x·scale + offset.
#pragma once
#include <functional>
#include <vector>

#include "core/cpu/norm.h"
#include "core/cpu/rows.h"

namespace tandem::cpu {

// Calls f(std::true_type) or f(std::false_type): a choice made once, outside the loops.
template <class F>
void choose(bool yes, const F& f) {
  yes ? f(std::true_type{}) : f(std::false_type{});
}

template <class T>
struct GradientPasses {
  const Fold f;
  const T *x, *y, *dy;
  NormBackward<T> out;
  bool mask_from_x = false, mask_from_y = false;  // a ReLU's; x: what forward normalised is computed again
  // The first pass leaves the masked gradient in dresidual, so that the second needs neither y nor dy.
  const bool keep_masked = out.dresidual && !out.add_dresidual;
  std::vector<float> values = std::vector<float>(5 * f.room);
  float *const center = values.data(), *const scale = center + f.room, *const offset = scale + f.room,
               *const slope = offset + f.room, *const constant = slope + f.room;

  // A part's Σ d and Σ d·(x − mean).
  void add_up(int part, int parts, double* sum, double* product) const {
    auto pass = [&](auto from_x, auto from_y, auto keeping) {
      sweep(f, part, parts, Order::forwards,
            [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
              const Panel m(center + column), a(scale + column), b(offset + column);
              vf total[4] = {}, dot[4] = {};
              for (std::int64_t r = 0; r < rows; r++, at += f.width)
                for (int i = 0; i < 4; i++) {
                  vf v = read_lane<whole>(x + at, i, n), d = read_lane<whole>(dy + at, i, n);
                  if constexpr (from_x) d = v * a[i] + b[i] <= 0.f ? vf{} : d;
                  if constexpr (from_y) d = read_lane<whole>(y + at, i, n) <= 0.f ? vf{} : d;
                  if constexpr (keeping) write_lane<whole>(out.dresidual + at, i, n, d);
                  total[i] += d;
                  dot[i] += d * (v - m[i]);
                }
              combine_panel(std::plus<double>(), sum + column, total);
              combine_panel(std::plus<double>(), product + column, dot);
            });
    };
    // In place and without a mask there is nothing to write.
    const bool writes = keep_masked && (mask_from_x || mask_from_y || out.dresidual != dy);
    choose(mask_from_x, [&](auto from_x) {
      choose(mask_from_y, [&](auto from_y) { choose(writes, [&](auto keeping) { pass(from_x, from_y, keeping); }); });
    });
    f.gather(sum);
    f.gather(product);
  }

  void write(int part, int parts) const {
    const T* gradient = keep_masked ? out.dresidual : dy;
    auto pass = [&](auto from_x, auto from_y, auto adding) {
      sweep(f, part, parts, Order::backwards,
            [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
              const Panel m(center + column), a(scale + column), b(offset + column), k(slope + column), e(constant + column);
              for (std::int64_t r = 0; r < rows; r++, at += f.width)
                for (int i = 0; i < 4; i++) {
                  vf v = read_lane<whole>(x + at, i, n), d = read_lane<whole>(gradient + at, i, n);
                  if constexpr (from_x) d = v * a[i] + b[i] <= 0.f ? vf{} : d;
                  if constexpr (from_y) d = read_lane<whole>(y + at, i, n) <= 0.f ? vf{} : d;
                  if (out.dresidual && !keep_masked)
                    write_lane<whole>(out.dresidual + at, i, n, read_lane<whole>(out.dresidual + at, i, n) + d);
                  if (!out.dx) continue;
                  vf result = d * a[i] + ((v - m[i]) * k[i] + e[i]);
                  if constexpr (adding) result += read_lane<whole>(out.dx + at, i, n);
                  write_lane<whole>(out.dx + at, i, n, result);
                }
            });
    };
    choose(mask_from_x && !keep_masked, [&](auto from_x) {
      choose(mask_from_y && !keep_masked, [&](auto from_y) {
        choose(out.dx && out.add_dx, [&](auto adding) { pass(from_x, from_y, adding); });
      });
    });
  }
};

}  // namespace tandem::cpu
