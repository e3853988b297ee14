// The op table as data: one row per operation declared in autograd/ops.h, with inputs that show what it does, and how a
// case is run. It needs no test framework, so that a machine with a GPU and little else can check it too (tests/gpu/).
//
// To add an operation: a row in table(), at its place in ops.h.
#pragma once
#include <functional>
#include <span>

#include "autograd/ops.h"
#include "tests/dumps.h"

namespace tandem::test {

using Inputs = std::span<const Variable>;
using Build = std::function<Variable(Inputs)>;

struct Input {
  Shape shape;
  double low = -1, high = 1;  // values are drawn from [low, high)
  double step = 0;            // and rounded to multiples of it: ties, numbers that any type holds
  bool parameter = false;     // stays f32 beside bf16 pictures
};

struct Case {
  std::string name;
  Build y;
  std::vector<Input> inputs;
  std::function<double(double, double)> oracle = {};  // element-wise operations: the same function, from <cmath>
  std::string dump = {};                              // the inputs are PyTorch's, and so are y and the gradients
  std::vector<std::string> names = {};                // of the inputs, in the dump
  double step = 1e-5;                                 // of finite differences; 0: none
};

struct Row {
  std::string op;
  std::vector<Case> cases;
  double f32 = 1e-5, bf16 = 0x1p-7;  // allowed error, of the largest value of the tensor
};

std::vector<Row> table();
Tensor labels_of(Backend& backend, const Numbers& labels);  // i32

// The values of input i, in double; and those of dy, for a result of `elements`.
Numbers values_of(const std::string& op, const Case& c, std::size_t i);
Numbers dy_of(const std::string& op, const Case& c, std::int64_t numel);

// ---- running a case -------------------------------------------------------------------------------------------------
struct Result {
  Numbers y;
  std::vector<Numbers> gradients;  // empty where none was asked for
};

enum class Form {
  once,
  twice,   // backward() twice over one tape: the leaves' gradients add up
  shared,  // two copies of the operation behind one intermediate node per input: the engine adds
};

// Of an input beside pictures of type `dtype`: parameters stay f32.
DType type_of(const Input& in, DType dtype);

// y, and the gradients of Σ dy·y with respect to all inputs, or to one of them.
Result evaluate(const Case& c, Backend& backend, DType dtype, const std::vector<Numbers>& values, const Numbers& dy,
                Form form = Form::once, int only = -1);

}  // namespace tandem::test
