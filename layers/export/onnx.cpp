#include "layers/export/onnx.h"

#include <map>
#include <set>
#include <variant>

#include "core/backend.h"
#include "core/files/files.h"
#include "layers/export/onnx.pb.h"
#include "layers/export/summary.h"

namespace tandem {
namespace {

constexpr int float_type = 1, int64_type = 7;  // TensorProto.DataType
constexpr int attribute_float = 1, attribute_int = 2, attribute_ints = 7;
using Ints = std::vector<std::int64_t>;
using NodeAttributes = std::vector<std::pair<const char*, std::variant<std::int64_t, Ints, float>>>;

// A value of the graph. ONNX has pictures [N, C, H, W] (channels_first), Tandem [N, H, W, C]. A Transpose is inserted
// before an operator that needs the other layout, so there is none between convolutions.
struct Value {
  std::string name;
  bool channels_first = false;
};

class Exporter {
 public:
  std::string bytes(Module& model, Backend& backend, const Shape& picture) {
    Tensor input, output;
    const std::vector<Operation> operations = operations_of(model, backend, picture, &input, &output);
    for (auto& [name, p] : model.parameters()) names_[key(p->variable.value())] = name;
    for (auto& [name, s] : model.buffers()) names_[key(s->tensor)] = name;

    file_.set_ir_version(7);
    file_.set_producer_name("tandem");
    auto* opset = file_.add_opset_import();
    opset->set_domain("");
    opset->set_version(13);
    graph_->set_name("tandem");
    describe(graph_->add_input(), "input", {2, picture[2], picture[0], picture[1]});
    values_[key(input)] = {"input", true};
    for (const Operation& o : operations) {
      at_ = &o;
      values_[key(o.output)] = convert(o);
    }
    if (!values_.contains(key(output)))
      refuse("ONNX: the model's output was not computed by an operation that is recorded");
    make("Identity", {logical(output).name}, {}, "output");
    describe(graph_->add_output(), "output", output.shape());
    std::string all;
    if (file_.ByteSizeLong() > INT32_MAX || !file_.SerializeToString(&all))
      refuse("ONNX: the model is larger than 2 GiB, which is all that one file can hold");
    return all;
  }

 private:
  // The identity of a tensor. Two shapes of the same memory are two values.
  using Key = std::pair<const void*, std::vector<std::int64_t>>;
  static Key key(const Tensor& t) { return {t.raw(), {t.shape().begin(), t.shape().end()}}; }

  [[noreturn]] void no_mapping(const std::string& why = "has no counterpart in the export") const {
    refuse("ONNX: ", at_->where(), " ", why);
  }

  void describe(onnx::ValueInfoProto* value, const std::string& name, const Shape& shape) {
    value->set_name(name);
    auto* type = value->mutable_type()->mutable_tensor_type();
    type->set_elem_type(float_type);
    for (int i = 0; i < shape.rank(); i++) {
      auto* dim = type->mutable_shape()->add_dim();
      if (i == 0 && shape[0] == batch_)
        dim->set_dim_param("N");
      else
        dim->set_dim_value(shape[i]);
    }
  }

  // ---- constants ----------------------------------------------------------------------------------------------------
  std::string constant(const std::string& name, const Shape& shape, int type, const void* data, std::size_t bytes) {
    auto* t = graph_->add_initializer();
    for (std::int64_t e : shape) t->add_dims(e);
    t->set_data_type(type);
    t->set_name(name);
    t->set_raw_data(data, bytes);
    return name;
  }
  std::string ints(const Ints& v) {
    return constant(unique("ints"), {std::int64_t(v.size())}, int64_type, v.data(), v.size() * sizeof v[0]);
  }
  std::string number(double v) {
    const float f = float(v);
    return constant(unique("number"), {}, float_type, &f, sizeof f);
  }
  // A parameter, buffer or other tensor that is not the result of an operation; filters as [O, I, H, W].
  std::string weight(const Tensor& t, bool filter = false) {
    const auto named = names_.find(key(t));
    const std::string name = named == names_.end() ? unique("constant") : named->second;
    if (!written_.insert(name).second) return name;
    Tensor laid = t.cast(DType::f32);
    if (filter) laid = transpose(Variable(laid), {0, 3, 1, 2}).value();
    std::vector<std::byte> host(laid.bytes());
    laid.backend().download(host.data(), laid.raw(), host.size());
    return constant(name, laid.shape(), float_type, host.data(), host.size());
  }

  // ---- nodes --------------------------------------------------------------------------------------------------------
  std::string unique(const std::string& base) { return base + "_" + std::to_string(count_++); }

  // Returns the name of the node's output.
  std::string make(const std::string& op, const std::vector<std::string>& inputs, const NodeAttributes& attributes = {},
                   std::string output = "") {
    if (output.empty()) output = unique(at_->op);
    auto* n = graph_->add_node();
    n->set_op_type(op);
    n->set_name(unique((at_ && !at_->module.empty() ? at_->module + "/" : "") + op));
    for (const std::string& i : inputs) n->add_input(i);
    n->add_output(output);
    for (const auto& [name, value] : attributes) {
      auto* a = n->add_attribute();
      a->set_name(name);
      if (const auto* whole = std::get_if<std::int64_t>(&value)) {
        a->set_type(attribute_int);
        a->set_i(*whole);
      } else if (const auto* real = std::get_if<float>(&value)) {
        a->set_type(attribute_float);
        a->set_f(*real);
      } else {
        a->set_type(attribute_ints);
        for (std::int64_t i : std::get<Ints>(value)) a->add_ints(i);
      }
    }
    return output;
  }

  // ---- values -------------------------------------------------------------------------------------------------------
  Value value(const Tensor& t) {
    const auto found = values_.find(key(t));
    return found == values_.end() ? Value{weight(t), false} : found->second;
  }
  Value transposed(const Tensor& t, bool first, const Ints& order) {
    const Value v = value(t);
    if (t.rank() != 4 || v.channels_first == first) return v;
    Value& there = turned_[v.name];  // inserted once for all readers
    if (there.name.empty()) there = {make("Transpose", {v.name}, {{"perm", order}}), first};
    return there;
  }
  Value picture(const Tensor& t) { return transposed(t, true, {0, 3, 1, 2}); }   // as [N, C, H, W]
  Value logical(const Tensor& t) { return transposed(t, false, {0, 2, 3, 1}); }  // with Tandem's order of axes

  Ints pair(const char* name) const {
    return {std::int64_t(at_->attribute(name, 0)), std::int64_t(at_->attribute(name, 1))};
  }
  std::string relu_if_asked(std::string y) { return at_->attribute("relu") ? make("Relu", {y}) : y; }

  Value convert(const Operation& o) {
    static const std::map<std::string, const char*> binary{{"add", "Add"}, {"sub", "Sub"},     {"mul", "Mul"},
                                                           {"div", "Div"}, {"maximum", "Max"}, {"minimum", "Min"},
                                                           {"pow", "Pow"}};
    if (o.output.dtype() != DType::f32) no_mapping(std::string("computes in ") + name_of(o.output.dtype()));
    const Tensor& x = o.inputs.at(0);
    if (o.op == "conv2d") return convolution(o);
    if (o.op == "linear") return {with_weights("Gemm", o, value(x).name, false, {{"transB", 1}})};
    if (o.op == "batch_norm") return batch_norm(o);
    if (o.op == "max_pool2d" || o.op == "average_pool2d") return pool(o);
    if (o.op == "slice") return slice(o);
    if (o.op == "pad") return pad(o);
    if (o.op == "reshape") return reshape(o);
    if (o.op == "matmul") return {make("MatMul", {value(x).name, value(o.inputs.at(1)).name})};
    if (o.op == "softmax" || o.op == "log_softmax")
      return {make(o.op == "softmax" ? "Softmax" : "LogSoftmax", {logical(x).name}, {{"axis", -1}})};
    if (const auto op = binary.find(o.op); op != binary.end()) {
      const Tensor& b = o.inputs.at(1);
      const bool first = x.shape() == b.shape() && value(x).channels_first && value(b).channels_first;
      const Value p = first ? value(x) : logical(x), q = first ? value(b) : logical(b);
      return {make(op->second, {p.name, q.name}), first};
    }
    const Value v = value(x);
    return {of_one_input(o, v.name), v.channels_first};
  }

  // Element-wise operations of one input, in either layout.
  std::string of_one_input(const Operation& o, const std::string& x) {
    static const std::map<std::string, const char*> plain{
        {"relu", "Relu"}, {"sigmoid", "Sigmoid"}, {"tanh", "Tanh"},        {"exp", "Exp"},
        {"log", "Log"},   {"sqrt", "Sqrt"},       {"abs", "Abs"},          {"reciprocal", "Reciprocal"},
        {"sin", "Sin"},   {"cos", "Cos"},         {"softplus", "Softplus"}};
    if (const auto op = plain.find(o.op); op != plain.end()) return make(op->second, {x});
    if (o.op == "square") return make("Mul", {x, x});
    if (o.op == "silu") return make("Mul", {x, make("Sigmoid", {x})});
    if (o.op == "div_by") return make("Div", {x, number(o.attribute("divisor"))});
    if (o.op == "clamp") return make("Clip", {x, number(o.attribute("low")), number(o.attribute("high"))});
    if (o.op == "scale") {
      const std::string y = make("Mul", {x, number(o.attribute("factor"))});
      return o.attribute("shift") ? make("Add", {y, number(o.attribute("shift"))}) : y;
    }
    if (o.op == "elu") return make("Elu", {x}, {{"alpha", float(o.attribute("alpha"))}});
    if (o.op == "leaky_relu") return make("LeakyRelu", {x}, {{"alpha", float(o.attribute("slope"))}});
    no_mapping();
  }

  // A Conv or Gemm node of x, the weight and the bias (if there is one), and a Relu if the operation includes it.
  std::string with_weights(const char* op, const Operation& o, const std::string& x, bool filter,
                           const NodeAttributes& attributes) {
    std::vector<std::string> inputs{x, weight(o.inputs.at(1), filter)};
    if (o.inputs.size() > 2) inputs.push_back(weight(o.inputs[2]));
    return relu_if_asked(make(op, inputs, attributes));
  }
  NodeAttributes window() const {
    const Ints pad = pair("padding");
    return {
        {"kernel_shape", pair("window")}, {"strides", pair("stride")}, {"pads", Ints{pad[0], pad[1], pad[0], pad[1]}}};
  }

  Value convolution(const Operation& o) {
    NodeAttributes how = window();
    how.emplace_back("dilations", pair("dilation"));
    how.emplace_back("group", std::int64_t(o.attribute("groups")));
    return {with_weights("Conv", o, picture(o.inputs.at(0)).name, true, how), true};
  }

  // Inputs of the operation: x, gamma, beta, residual (may be undefined), mean, variance.
  Value batch_norm(const Operation& o) {
    if (o.inputs.size() < 6) no_mapping("ran in training mode");
    const Tensor& x = o.inputs[0];
    const bool first = x.rank() == 4;
    if (!first && x.rank() != 2) no_mapping("has an input of rank " + std::to_string(x.rank()));
    std::string y =
        make("BatchNormalization",
             {picture(x).name, weight(o.inputs[1]), weight(o.inputs[2]), weight(o.inputs[4]), weight(o.inputs[5])},
             {{"epsilon", float(o.attribute("epsilon"))}});
    if (o.inputs[3].defined()) y = make("Add", {y, picture(o.inputs[3]).name});
    return {relu_if_asked(y), first};
  }

  Value pool(const Operation& o) {
    const Tensor& x = o.inputs.at(0);
    const std::string from = picture(x).name;
    if (o.output.rank() == 2)  // global: [N, C, 1, 1], then [N, C]
      return {make("Flatten", {make("GlobalAveragePool", {from})}, {{"axis", 1}})};
    const bool largest = o.op == "max_pool2d";
    NodeAttributes how = window();
    if (!largest) how.emplace_back("count_include_pad", 0);
    return {relu_if_asked(make(largest ? "MaxPool" : "AveragePool", {from}, how)), true};
  }

  // The axis of the operation, in the layout that x has.
  std::int64_t axis_in(const Value& x, int rank) const {
    const auto axis = std::int64_t(at_->attribute("axis"));
    const Ints there{0, 2, 3, 1};
    return x.channels_first && rank == 4 ? there[std::size_t(axis)] : axis;
  }
  Value slice(const Operation& o) {
    const Value x = value(o.inputs.at(0));
    const Ints begin{std::int64_t(o.attribute("begin"))}, end{std::int64_t(o.attribute("end"))},
        axis{axis_in(x, o.output.rank())}, step{std::int64_t(o.attribute("step"))};
    if (axis[0] == 0) no_mapping("cuts the pictures of a batch");
    return {make("Slice", {x.name, ints(begin), ints(end), ints(axis), ints(step)}), x.channels_first};
  }
  Value pad(const Operation& o) {
    const Value x = value(o.inputs.at(0));
    const int rank = o.output.rank();
    const std::int64_t axis = axis_in(x, rank);
    if (axis == 0) no_mapping("adds to the pictures of a batch");
    Ints pads(std::size_t(2 * rank));
    pads[std::size_t(axis)] = std::int64_t(o.attribute("before"));
    pads[std::size_t(rank + axis)] = std::int64_t(o.attribute("after"));
    return {make("Pad", {x.name, ints(pads), number(o.attribute("value"))}), x.channels_first};
  }

  Value reshape(const Operation& o) {
    const Tensor& x = o.inputs.at(0);
    const Shape &from = x.shape(), &to = o.output.shape();
    if (from.rank() == 0 || to.rank() == 0 || from[0] != batch_ || to[0] != batch_)
      no_mapping("mixes the pictures of a batch");
    const bool one_pixel = from.rank() == 4 && from[1] == 1 && from[2] == 1 && to.rank() == 2;
    Ints shape(to.begin(), to.end());
    shape[0] = 0;  // in ONNX: the size that the input has
    return {make("Reshape", {one_pixel ? value(x).name : logical(x).name, ints(shape)})};
  }

  static constexpr std::int64_t batch_ = 2;
  onnx::ModelProto file_;
  onnx::GraphProto* graph_ = file_.mutable_graph();
  const Operation* at_ = nullptr;
  std::map<Key, std::string> names_;     // of parameters and buffers
  std::map<Key, Value> values_;          // results of operations
  std::map<std::string, Value> turned_;  // by name: the value with its axes in the other order
  std::set<std::string> written_;
  int count_ = 0;
};

}  // namespace

std::string onnx_of(Module& model, Backend& backend, const Shape& picture) {
  NoGrad off;
  return Exporter().bytes(model, backend, picture);
}

void export_onnx(Module& model, Backend& backend, const Shape& picture, const std::string& path) {
  write_file(path, onnx_of(model, backend, picture));
}

}  // namespace tandem
