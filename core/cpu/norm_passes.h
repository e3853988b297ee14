// Batch norm's gradient in two passes over memory: the first computes Σ d and Σ d·(x − center), the second writes
// dx (+)= d·scale + (x − center)·slope + constant. d is dy, or 0 where the output of the ReLU after it is 0. This mask
// is computed from y, or from x·scale + offset.
#pragma once
#include <functional>
#include <vector>

#include "core/backend.h"
#include "core/cpu/rows.h"

namespace tandem::cpu {

// Calls f(std::true_type) or f(std::false_type): the choice is made once, outside the loops.
template <class F>
void choose(bool yes, const F& f) {
  yes ? f(std::true_type{}) : f(std::false_type{});
}

// The source of the ReLU's mask. from_x: the normalised value is computed again.
enum Mask { no_mask, from_x, from_y };
template <class F>
void by_mask(Mask mask, const F& f) {
  mask == from_y   ? f(std::integral_constant<Mask, from_y>{})
  : mask == from_x ? f(std::integral_constant<Mask, from_x>{})
                   : f(std::integral_constant<Mask, no_mask>{});
}

template <class T>
struct GradientPasses {
  const Fold f;
  const T *x, *y, *dy;
  NormOutputs<T, float> out;
  Mask mask = no_mask;
  // True: the first pass stores the masked gradient in dresidual, so that the second needs neither y nor dy.
  const bool keep_masked = out.dresidual && !out.add_dresidual;
  std::vector<float> values = std::vector<float>(5 * f.room);
  float *const center = values.data(), *const scale = center + f.room, *const offset = scale + f.room,
               *const slope = offset + f.room, *const constant = slope + f.room;

  // Computes a part's Σ d and Σ d·(x − center).
  void add_up(int part, int parts, double* sum, double* product) const {
    auto pass = [&](auto mask, auto keeping) {
      sweep(f, part, parts, Order::forwards,
            [=, x = x, y = y, dy = dy, to = out.dresidual, center = center, scale = scale, offset = offset,
             width = f.width](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
              const Panel m(center + column), a(scale + column), b(offset + column);
              vf total[4] = {}, dot[4] = {};
              for (std::int64_t r = 0; r < rows; r++, at += width)
                for (int i = 0; i < 4; i++) {
                  vf v = read_lane<whole>(x + at, i, n), d = read_lane<whole>(dy + at, i, n);
                  if constexpr (mask == from_x) d = v * a[i] + b[i] <= 0.f ? vf{} : d;
                  if constexpr (mask == from_y) d = read_lane<whole>(y + at, i, n) <= 0.f ? vf{} : d;
                  if constexpr (keeping) write_lane<whole>(to + at, i, n, d);
                  total[i] += d;
                  dot[i] += d * (v - m[i]);
                }
              combine_panel(std::plus<double>(), sum + column, total);
              combine_panel(std::plus<double>(), product + column, dot);
            });
    };
    // In place and without a mask there is nothing to write.
    const bool writes = keep_masked && (mask != no_mask || out.dresidual != dy);
    by_mask(mask, [&](auto mask) { choose(writes, [&](auto keeping) { pass(mask, keeping); }); });
    f.gather(sum);
    f.gather(product);
  }

  void write(int part, int parts) const {
    const T* gradient = keep_masked ? out.dresidual : dy;
    T *dx = out.dx, *residual = keep_masked ? nullptr : out.dresidual;  // d is added to this one
    auto pass = [&](auto mask, auto adding, auto only_dx) {
      sweep(f, part, parts, Order::backwards,
            [=, x = x, y = y, center = center, scale = scale, offset = offset, slope = slope, constant = constant,
             width = f.width](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
              const Panel m(center + column), a(scale + column), b(offset + column), k(slope + column),
                  e(constant + column);
              for (std::int64_t r = 0; r < rows; r++, at += width)
                for (int i = 0; i < 4; i++) {
                  vf v = read_lane<whole>(x + at, i, n), d = read_lane<whole>(gradient + at, i, n);
                  if constexpr (mask == from_x) d = v * a[i] + b[i] <= 0.f ? vf{} : d;
                  if constexpr (mask == from_y) d = read_lane<whole>(y + at, i, n) <= 0.f ? vf{} : d;
                  if constexpr (!only_dx) {
                    if (residual) write_lane<whole>(residual + at, i, n, read_lane<whole>(residual + at, i, n) + d);
                    if (!dx) continue;
                  }
                  vf result = d * a[i] + ((v - m[i]) * k[i] + e[i]);
                  if constexpr (adding) result += read_lane<whole>(dx + at, i, n);
                  write_lane<whole>(dx + at, i, n, result);
                }
            });
    };
    by_mask(keep_masked ? no_mask : mask, [&](auto mask) {
      choose(dx && out.add_dx,
             [&](auto adding) { choose(dx && !residual, [&](auto only_dx) { pass(mask, adding, only_dx); }); });
    });
  }
};

}  // namespace tandem::cpu
