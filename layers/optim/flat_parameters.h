// The flat parameters. All parameters of a model are segments of one contiguous vector, all gradients of another, all
// running statistics of a third. Optimizers, all-reduce buckets, server shards, averages and checkpoints are arithmetic
// on ranges of these vectors: no packing, no copies.
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

// A segment belongs to all ranks (replicated), or to those that have the same slice of the layers that are cut over
// ranks.
enum class OwnerClass { replicated, slice };

struct ParameterRange {
  std::string name;               // "layer1.0.conv1.weight"; tied weights are one segment with the names joined by '+'
  Shape shape;                    // what this rank has of it
  Shape whole;                    // in the whole model
  Slice slice = {};               // which part of the whole this is
  std::int64_t global_begin = 0;  // in the whole model's vector: the initial draw and the layout's hash use this
  std::int64_t local_begin = 0;   // in this rank's vector; the same for every slice
  std::int64_t length = 0;
  double learning_rate_scale = 1;
  bool decay = true, frozen = false;
  WriteCount* writes = nullptr;
  Leaf* leaf = nullptr;
  OwnerClass owner() const { return slice.count == 1 ? OwnerClass::replicated : OwnerClass::slice; }
};

// Supplies the memory of the vectors: ordinary, shared between a node's ranks, pinned. Returns a zeroed f32 tensor.
using FlatMemory = std::function<Tensor(Backend&, std::int64_t numel)>;

class FlatParameters {
 public:
  static constexpr std::int64_t alignment = 64;  // every segment begins at a multiple; the padding is and stays zero
  static constexpr std::int64_t cut = 1024;      // buckets and shards are cut at multiples of this

  // Names the tree, lays the parameters out in registration order, first the replicated ones and then the slices, draws
  // the initial values and gives every Parameter and ModuleBuffer of the model its memory; values that a model already
  // has are kept (of a whole parameter that is now cut: this rank's slice). A slice begins with what the whole
  // parameter would have there. dtype f64 is for the reference backend.
  FlatParameters(Module& model, Backend& backend, std::uint64_t seed, const FlatMemory& memory = {},
                 DType dtype = DType::f32);

  Backend& backend() const { return values.backend(); }
  const std::vector<ParameterRange>& parameter_ranges() const { return parameter_ranges_; }
  // Throws, listing the names, when there is none
  const ParameterRange& parameter_range(const std::string& name) const;
  std::int64_t numel() const { return values.numel(); }    // with padding
  std::int64_t parameters() const { return parameters_; }  // without, in the whole model
  Range all() const { return {0, numel()}; }
  Range all(OwnerClass owner) const;
  Slice slice() const { return slice_; }  // of all parameters that are cut; count 1: none is

  // What is not frozen, in ranges that begin and end at multiples of `cut`: one, all of it, where nothing is frozen or
  // cut. No range has two owners.
  const std::vector<Range>& trainable() const { return trainable_; }
  std::vector<Range> ranges(OwnerClass owner) const;  // those of an owner: what its ranks exchange

  // Equal on two ranks exactly when names, shapes and places in the whole model are, and (OwnerClass::slice) their
  // slices.
  std::uint64_t layout_hash(OwnerClass owner = OwnerClass::slice) const;

  // Gradients of a loss, times seed, straight into `gradients`. Segments that took no part get zero. Hooks fire as
  // segments become final; with final = false another backward() will add to them, and no hook fires.
  void backward(const Variable& loss, double seed = 1, bool final = true);
  void zero_gradients();  // the next backward overwrites instead of adding
  // Called once per segment that is not frozen, and backward, when its gradient is final and may be sent away.
  void on_gradient(std::function<void(const ParameterRange&)> hook);
  void count_writes(Range range);   // whoever writes to `values` says so: prepared weights are then stale
  bool gradients_complete() const;  // nothing that is trained is untouched since zero_gradients

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
  std::int64_t slices_begin_ = 0;  // replicated segments lie before it, slices behind it
  std::vector<Leaf*> leaves_;      // of what is trained
  std::vector<Variable> handles_;  // keep the leaves alive
  bool final_ = true;
  std::int64_t parameters_ = 0;
};

}  // namespace tandem
