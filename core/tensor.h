// Tensor: a storage, an offset, a shape and an element type on one device. Tensors are contiguous and row-major. A
// slice along the first axis and a reshape share memory; all other operations copy. Pictures are [N, H, W, C], filters
// [O, H, W, I].
//
// A Tensor is a handle: copying it does not copy the elements. It is not thread-safe; different threads may use
// different tensors.
#pragma once
#include <span>
#include <vector>

#include "core/dtype.h"
#include "core/memory.h"
#include "core/shape.h"

namespace tandem {

[[noreturn]] void fail_undefined();  // an undefined Tensor, or a Variable without one, was used

class Tensor {
 public:
  Tensor() = default;                                                      // empty: defined() is false
  Tensor(Backend& backend, const Shape& shape, DType dtype = DType::f32);  // uninitialised
  static Tensor full(Backend& backend, const Shape& shape, double value, DType dtype = DType::f32);
  static Tensor zeros(Backend& backend, const Shape& shape, DType dtype = DType::f32) {
    return full(backend, shape, 0, dtype);
  }
  static Tensor like(const Tensor& t) { return Tensor(t.backend(), t.shape(), t.dtype()); }
  static Tensor of(Backend& backend, const Shape& shape, std::span<const double> values, DType dtype = DType::f32);
  static Tensor of(Backend& backend, const Shape& shape, std::initializer_list<double> values,
                   DType dtype = DType::f32) {
    return of(backend, shape, std::span(values.begin(), values.size()), dtype);
  }
  // Memory owned elsewhere (a memory-mapped file, the caller's array), kept alive by `owner`.
  static Tensor wrap(Backend& backend, void* data, const Shape& shape, DType dtype, std::shared_ptr<void> owner);

  bool defined() const { return static_cast<bool>(storage_); }
  const Shape& shape() const { return shape_; }
  std::int64_t size(int axis) const { return shape_[axis]; }
  int rank() const { return shape_.rank(); }
  std::int64_t numel() const { return numel_; }
  std::size_t bytes() const { return std::size_t(numel_) * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Backend& backend() const {
    if (!storage_) fail_undefined();
    return storage_->backend();
  }

  // Pointers for reading and writing on the device. write() increments the write count, so that code which saved the
  // old value can detect the change.
  const void* raw() const { return begin(); }
  void* raw_write() {
    writes().bump();
    return begin();
  }
  template <class T>
  const T* data() const {
    check_type(dtype_of<T>);
    return static_cast<const T*>(raw());
  }
  template <class T>
  T* write() {
    check_type(dtype_of<T>);
    return static_cast<T*>(raw_write());
  }
  WriteCount& writes() const {
    if (!writes_) fail_undefined();
    return *writes_;
  }

  Tensor slice(std::int64_t begin, std::int64_t end) const;  // rows [begin, end) of the first axis; shares memory
  // shape.numel() elements from flat position begin; shares memory
  Tensor range(std::int64_t begin, const Shape& shape) const;
  Tensor reshape(const Shape& shape) const;  // another shape with the same numel(); shares memory
  Tensor cast(DType dtype) const;            // returns itself when the type is the same
  Tensor clone() const;
  Tensor to(Backend& backend) const;  // returns itself when it is already on that backend
  void fill(double value);
  void copy_from(const Tensor& source);  // same shape; converts the type

  // Copies to the host: all elements as double; the only element of a tensor with numel() == 1.
  std::vector<double> values() const;
  double item() const;

  // Makes writes through this handle count on `segment` (a parameter's own count inside a shared storage).
  void count_on(WriteCount* segment) { writes_ = segment; }
  const Ref<Storage>& storage() const { return storage_; }
  // True when no other tensor shares the storage, so that it may be overwritten in place.
  bool unique() const { return storage_.unique(); }
  bool same_memory(const Tensor& o) const { return defined() && o.defined() && raw() == o.raw(); }

 private:
  friend class WeakTensor;
  std::byte* begin() const {
    if (!storage_) fail_undefined();
    return storage_->data() + offset_ * size_of(dtype_);
  }
  void check_type(DType asked) const {
    if (asked != dtype_) fail("a ", name_of(dtype_), " tensor was read as ", name_of(asked));
  }
  Ref<Storage> storage_;
  WriteCount* writes_ = nullptr;
  std::int64_t offset_ = 0, numel_ = 0;  // in elements
  Shape shape_;
  DType dtype_ = DType::f32;
};

// A tensor without a reference to its storage. Keeper::gone() reports to the owner that the storage is destroyed.
class WeakTensor {
 public:
  WeakTensor() = default;
  explicit WeakTensor(const Tensor& t) : place_(t), storage_(t.storage().pointer()) { place_.storage_.reset(); }
  Storage* storage() const { return storage_; }
  Tensor lock() const {
    Tensor t = place_;
    t.storage_ = Ref<Storage>(storage_);
    return t;
  }

 private:
  Tensor place_;  // without its storage
  Storage* storage_ = nullptr;
};

// Nested brackets with aligned numbers, then type and shape. A tensor of more than 1000 elements is shortened to the
// first and last three of each axis.
std::ostream& operator<<(std::ostream& out, const Tensor& t);

}  // namespace tandem
