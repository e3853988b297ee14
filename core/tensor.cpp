#include "core/tensor.h"

#include <cstring>

#include "core/backend.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

// For every type: files may hold f16, although the backend does not compute in it.
template <class F>
void on_host(DType t, const char* op, const F& f) {
  dispatch_among<float, bf16, f16, double, std::uint8_t, std::int32_t>(t, op, f);
}

}  // namespace

void fail_undefined() {
  fail(
      "an undefined Tensor or Variable was used: it was made without a value, or moved from; where an operation takes "
      "an "
      "optional input, leave it out");
}

Tensor::Tensor(Backend& backend, const Shape& shape, DType dtype)
    : storage_(Storage::create(backend, std::max<std::size_t>(1, shape.numel() * size_of(dtype)))),
      writes_(storage_->whole()),
      numel_(shape.numel()),
      shape_(shape),
      dtype_(dtype) {}

Tensor Tensor::full(Backend& backend, const Shape& shape, double value, DType dtype) {
  Tensor t(backend, shape, dtype);
  t.fill(value);
  return t;
}

Tensor Tensor::of(Backend& backend, const Shape& shape, std::span<const double> values, DType dtype) {
  require(std::int64_t(values.size()) == shape.numel(), "Tensor::of: ", values.size(), " values for the shape ", shape);
  std::vector<std::byte> host(std::max<std::size_t>(1, values.size() * size_of(dtype)));
  auto store = [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); i++) {
      if constexpr (std::is_integral_v<T>)
        require(
            values[i] >= double(std::numeric_limits<T>::lowest()) && values[i] <= double(std::numeric_limits<T>::max()),
            "Tensor::of: ", values[i], " is no ", name_of(dtype));
      T v = static_cast<T>(values[i]);
      std::memcpy(host.data() + i * sizeof(T), &v, sizeof(T));
    }
  };
  on_host(dtype, "Tensor::of", store);
  Tensor t(backend, shape, dtype);
  backend.upload(t.raw_write(), host.data(), t.bytes());
  return t;
}

Tensor Tensor::wrap(Backend& backend, void* data, const Shape& shape, DType dtype, std::shared_ptr<void> owner) {
  Tensor t;
  t.storage_ = Storage::wrap(backend, data, shape.numel() * size_of(dtype), std::move(owner));
  t.writes_ = t.storage_->whole();
  t.numel_ = shape.numel();
  t.shape_ = shape;
  t.dtype_ = dtype;
  return t;
}

Tensor Tensor::slice(std::int64_t begin, std::int64_t end) const {
  require(rank() > 0 && 0 <= begin && begin <= end && end <= size(0), "slice [", begin, ", ", end, ") of the shape ",
          shape_);
  Shape s = shape_;
  s[0] = end - begin;
  std::int64_t row = size(0) ? numel_ / size(0) : 0;
  return range(begin * row, s);
}

Tensor Tensor::range(std::int64_t begin, const Shape& shape) const {
  require(0 <= begin && begin <= numel_ - shape.numel(), "range [", begin, ", +", shape.numel(), ") of ", numel_,
          " elements");
  Tensor t = *this;
  t.offset_ += begin;
  t.shape_ = shape;
  t.numel_ = shape.numel();
  return t;
}

Tensor Tensor::reshape(const Shape& shape) const {
  require(shape.numel() == numel_, "reshape: ", shape_, " has ", numel_, " elements, ", shape, " has ", shape.numel());
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::cast(DType dtype) const {
  if (!storage_) fail_undefined();
  if (dtype == dtype_) return *this;
  Tensor t(backend(), shape_, dtype);
  convert(*this, t);
  return t;
}

Tensor Tensor::clone() const {
  Tensor t = like(*this);
  if (numel_) backend().copy(t.raw_write(), raw(), bytes());
  return t;
}

Tensor Tensor::to(Backend& target) const {
  if (&target == &backend()) return *this;
  Tensor t(target, shape_, dtype_);
  if (!numel_) return t;
  if (!backend().on_device()) {
    target.upload(t.raw_write(), raw(), bytes());
  } else if (!target.on_device()) {
    backend().download(t.raw_write(), raw(), bytes());
  } else {
    std::vector<std::byte> host(bytes());
    backend().download(host.data(), raw(), bytes());
    target.upload(t.raw_write(), host.data(), bytes());
  }
  return t;
}

void Tensor::fill(double value) { tandem::fill(*this, value); }

void Tensor::copy_from(const Tensor& source) {
  if (!defined() || !source.defined()) fail_undefined();
  require(source.shape() == shape_, "copy_from: ", source.shape(), " into ", shape_);
  if (!numel_) return;
  Tensor s = source.to(backend());
  if (s.dtype() == dtype_)
    backend().copy(raw_write(), s.raw(), bytes());
  else
    convert(s, *this);
}

std::vector<double> Tensor::values() const {
  if (!storage_) fail_undefined();
  std::vector<std::byte> host(std::max<std::size_t>(1, bytes()));
  if (numel_) backend().download(host.data(), raw(), bytes());
  std::vector<double> out(numel_);
  auto load = [&]<class T>() {
    for (std::int64_t i = 0; i < numel_; i++) {
      T v;
      std::memcpy(&v, host.data() + i * sizeof(T), sizeof(T));
      out[i] = double(v);
    }
  };
  on_host(dtype_, "values", load);
  return out;
}

double Tensor::item() const {
  require(numel_ == 1, "item() needs one element, the tensor has the shape ", shape_);
  return values()[0];
}

}  // namespace tandem
