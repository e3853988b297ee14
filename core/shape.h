// Shapes of tensors and of the sliding-window operations. They are plain values without tensor memory.
#pragma once
#include <array>
#include <compare>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

#include "core/error.h"

namespace tandem {

// Up to six sizes, row-major: the last axis varies fastest. Rank 0 is a scalar with one element.
class Shape {
 public:
  static constexpr int max_rank = 6;
  static constexpr std::int64_t most = std::int64_t{1} << 60;  // elements; the number of their bytes does not overflow
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  explicit Shape(std::span<const std::int64_t> sizes) {
    require(sizes.size() <= max_rank, "a tensor has at most 6 axes, asked for ", sizes.size());
    for (std::int64_t e : sizes) append(e);
  }
  int rank() const { return rank_; }
  std::int64_t operator[](int axis) const { return sizes_[index(axis)]; }  // throws Error if there is no such axis
  std::int64_t& operator[](int axis) { return sizes_[index(axis)]; }
  std::int64_t numel() const {  // throws Error for more than `most`
    std::int64_t n = 1;
    bool fits = true;
    for (int i = 0; i < rank_; i++) fits = !__builtin_mul_overflow(n, sizes_[i], &n) && n >= 0 && n <= most && fits;
    if (!fits) fail("the shape ", *this, " has more elements than any memory holds");
    return n;
  }
  // The axis that `axis` denotes: −1 is the last. Throws Error, which names op, if there is no such axis.
  int axis(const char* op, int axis) const {
    const int i = axis < 0 ? axis + rank_ : axis;
    require(0 <= i && i < rank_, op, ": no axis ", axis, " in the shape ", *this);
    return i;
  }
  Shape without(int axis) const {
    Shape s;
    for (int i = 0; i < rank_; i++)
      if (i != axis) s.append(sizes_[i]);
    return s;
  }
  // The shape is viewed as [outer, size(axis), inner].
  std::int64_t outer(int axis) const { return Shape(std::span(begin(), std::size_t(axis))).numel(); }
  std::int64_t inner(int axis) const { return Shape(std::span(begin() + axis + 1, end())).numel(); }
  void append(std::int64_t size) {
    require(size >= 0, "a shape cannot have the size ", size);
    require(rank_ < max_rank, "a tensor has at most 6 axes");
    sizes_[rank_++] = size;
  }
  const std::int64_t* begin() const { return sizes_.data(); }
  const std::int64_t* end() const { return sizes_.data() + rank_; }
  bool operator==(const Shape& o) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Shape& s) {
    out << '[';
    for (int i = 0; i < s.rank_; i++) out << (i ? "," : "") << s.sizes_[i];
    return out << ']';
  }

 private:
  int index(int axis) const {
    const int i = axis < 0 ? axis + rank_ : axis;
    if (i < 0 || i >= rank_) fail("there is no axis ", axis, " in the shape ", *this);
    return i;
  }
  std::array<std::int64_t, max_rank> sizes_{};  // 0 beyond the rank
  int rank_ = 0;
};

// One 2-D convolution: pictures x[n, h, w, c_in], filters w[c_out, kh, kw, c_in / groups], result y[n, out_h, out_w,
// c_out].
struct ConvShape {
  std::int64_t n = 0, h = 0, w = 0, c_in = 0, c_out = 0, kh = 1, kw = 1;
  std::int64_t stride_h = 1, stride_w = 1, pad_h = 0, pad_w = 0, dilation_h = 1, dilation_w = 1, groups = 1;
  constexpr std::int64_t out_h() const { return (h + 2 * pad_h - dilation_h * (kh - 1) - 1) / stride_h + 1; }
  constexpr std::int64_t out_w() const { return (w + 2 * pad_w - dilation_w * (kw - 1) - 1) / stride_w + 1; }
  std::int64_t x_numel() const { return n * h * w * c_in; }
  std::int64_t y_numel() const { return n * out_h() * out_w() * c_out; }
  std::int64_t w_numel() const { return c_out * kh * kw * (c_in / groups); }
  double flops() const { return 2.0 * double(y_numel()) * double(kh * kw * (c_in / groups)); }
  auto operator<=>(const ConvShape&) const = default;
};

// One pooling: x[n, h, w, c] → y[n, out_h, out_w, c]. Average pooling divides by the number of elements inside the
// picture.
struct PoolShape {
  std::int64_t n = 0, h = 0, w = 0, c = 0, kh = 2, kw = 2, stride_h = 2, stride_w = 2, pad_h = 0, pad_w = 0;
  constexpr std::int64_t out_h() const { return (h + 2 * pad_h - kh) / stride_h + 1; }
  constexpr std::int64_t out_w() const { return (w + 2 * pad_w - kw) / stride_w + 1; }
  bool operator==(const PoolShape&) const = default;
};

}  // namespace tandem
