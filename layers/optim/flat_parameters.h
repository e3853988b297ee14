// The flat parameters. All parameters of a model are segments of one contiguous vector, all gradients of a second one,
// all running statistics of a third one. Optimizers, all-reduce buckets, server shards, averages and checkpoints work
// on ranges of these vectors, without packing and without copies.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "layers/module.h"

namespace tandem {

// A range [begin, end) of a flat vector, in elements.
struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t length() const { return end - begin; }
};

// A segment belongs to all ranks (replicated), or to the ranks that have the same slice of the layers that are divided
// among ranks.
enum class OwnerClass { replicated, slice };

struct ParameterRange {
  std::string name;               // "layer1.0.conv1.weight"
  Shape shape;                    // of this rank's part
  Shape whole;                    // of the parameter in the whole model
  Slice slice = {};               // the part of the parameter that this rank has
  std::int64_t global_begin = 0;  // in the whole model's vector: the initial draw and the layout's hash use this
  std::int64_t local_begin = 0;   // in this rank's vector; the same for every slice
  std::int64_t length = 0;
  double learning_rate_scale = 1;
  bool decay = true, frozen = false;
  WriteCount* writes = nullptr;
  Leaf* leaf = nullptr;
  OwnerClass owner() const { return slice.count == 1 ? OwnerClass::replicated : OwnerClass::slice; }
};

// Supplies the memory of the vectors: ordinary, shared by the ranks of a node, or pinned. Returns a zeroed f32 tensor.
using FlatMemory = std::function<Tensor(Backend&, std::int64_t numel)>;

class FlatParameters {
 public:
  static constexpr std::int64_t alignment = 64;  // every segment begins at a multiple; the padding is always zero
  static constexpr std::int64_t cut = 1024;      // buckets and shards are cut at multiples of this

  // Names the tree and lays out the parameters in registration order, the replicated ones before the slices. Draws the
  // initial values and gives every Parameter and ModuleBuffer of the model its memory. Values that a model already has
  // are kept (if a whole parameter is now divided: this rank's slice). A slice has the initial values that the whole
  // parameter would have there. dtype f64 is for the reference backend.
  FlatParameters(Module& model, Backend& backend, std::uint64_t seed, const FlatMemory& memory = {},
                 DType dtype = DType::f32);

  Backend& backend() const { return values.backend(); }
  const std::vector<ParameterRange>& parameter_ranges() const { return parameter_ranges_; }
  // Throws Error that lists the names when there is none
  const ParameterRange& parameter_range(const std::string& name) const;
  std::int64_t numel() const { return values.numel(); }    // with padding
  std::int64_t parameters() const { return parameters_; }  // without padding, in the whole model
  Range all() const { return {0, numel()}; }
  Range all(OwnerClass owner) const;
  Slice slice() const { return slice_; }  // of all divided parameters; count 1: no parameter is divided

  // The segments that are not frozen, as ranges that begin and end at multiples of `cut`: one range of the whole vector
  // if no parameter is frozen or divided. No range has two owners.
  const std::vector<Range>& trainable() const { return trainable_; }
  std::vector<Range> ranges(OwnerClass owner) const;  // the ranges of an owner, which its ranks exchange

  // Equal on two ranks exactly when names, shapes and positions in the whole model are equal and, for
  // OwnerClass::slice, their slices too.
  std::uint64_t layout_hash(OwnerClass owner = OwnerClass::slice) const;

  // Writes the gradients of a loss, times seed, directly into `gradients`. Segments that backward() does not reach get
  // zero. Hooks are called as segments become final. With final = false another backward() will add to the gradients,
  // and no hook is called.
  void backward(const Variable& loss, double seed = 1, bool final = true);
  void zero_gradients();  // the next backward overwrites instead of adding
  // hook is called once per segment that is not frozen and per backward(), when the gradient is final and may be sent.
  void on_gradient(std::function<void(const ParameterRange&)> hook);
  void count_writes(Range range);   // call after writing to `values`: prepared weights are then stale
  bool gradients_complete() const;  // all trained segments have a gradient since zero_gradients

  Tensor values, gradients, buffers;  // flat, `numel()` long; statistics have their own layout

  struct BufferRange {
    std::string name;
    std::int64_t begin, length;
  };
  const std::vector<BufferRange>& buffer_ranges() const { return buffer_ranges_; }

 private:
  using Parameters = std::vector<std::pair<std::string, Parameter*>>;
  std::int64_t lay_out(const Parameters& parameters);  // returns the vector's length
  Tensor initial_values(const Parameters& parameters, std::uint64_t seed, DType dtype);
  void bind(const Parameters& parameters);
  void bind_statistics(Module& model, DType dtype);

  std::vector<ParameterRange> parameter_ranges_;
  std::vector<BufferRange> buffer_ranges_;
  std::vector<Range> trainable_;
  Slice slice_;
  std::int64_t slices_begin_ = 0;  // replicated segments are before this position, slices after it
  std::vector<Leaf*> leaves_;      // of the trained parameters
  std::vector<Variable> handles_;  // keep the leaves alive
  bool final_ = true;
  std::int64_t parameters_ = 0;
};

}  // namespace tandem
