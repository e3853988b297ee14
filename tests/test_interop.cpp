// Other programs' files: PyTorch's weights both ways, the ONNX graph, TensorBoard's events.
#include "core/files/safetensors.h"
#include "core/text.h"
#include "layers/export/onnx.h"
#include "layers/export/summary.h"
#include "layers/export/tensorboard.h"
#include "layers/export/torch_weights.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

const std::string dump_path = source("tests/reference/interop.safetensors").string();

// The twin of Thin in tests/reference/interop.py.
struct Thin : Module {
  Conv2d& conv1 = adopt("conv1", Conv2d::before_norm(3, 8, 3));
  BatchNorm2d& bn1 = child<BatchNorm2d>("bn1", 8, true);
  Conv2d& conv2 = adopt("conv2", Conv2d::before_norm(8, 16, 3, 2));
  BatchNorm2d& bn2 = child<BatchNorm2d>("bn2", 16, true);
  Conv2d& conv3 = child<Conv2d>("conv3", 16, 16, 3, Conv2dOptions{.padding = 1, .groups = 4});
  Linear &fc1 = child<Linear>("fc1", 64, 12, true, true), &fc2 = child<Linear>("fc2", 12, 4);
  Variable forward(const Variable& x) override {
    Variable y = bn1(conv1(x));
    Variable z = conv2(y);
    y = bn2(z, pad_shortcut(y, 2, 4));
    y = average_pool2d(conv3(y), {.kernel_size = 2});
    return fc2(fc1(flatten(y)));
  }
};

// The state_dict of the dump, as a file of its own.
struct State {
  std::map<std::string, std::pair<SafetensorsFile::Entry, std::vector<std::byte>>> tensors;
  State() {
    const SafetensorsFile dump(dump_path);
    const std::string prefix = "thin/state/";
    for (auto& [key, entry] : dump.tensors())
      if (key.starts_with(prefix)) tensors[key.substr(prefix.size())] = {entry, dump.bytes(key)};
  }
  std::string write(const std::string& path) const {
    SafetensorsWriter w;
    for (auto& [name, t] : tensors) w.add(name, t.first.dtype, t.first.shape, t.second);
    w.write(path);
    return path;
  }
};

struct Interop : OnCpu {
  const TemporaryFolder folder;
};
using TorchWeights = Interop;
using Onnx = Interop;
using TensorBoard = InFolder;

// onnx_none.cpp and tensorboard_none.cpp refuse everything.
#define NEEDS_PROTOBUF() \
  if (without_protobuf()) GTEST_SKIP() << "built without protobuf"
bool without_protobuf() {
  const TemporaryFolder folder;
  return bool(refused([&] { EventFile file(folder.file("run")); }, {"protobuf"}));
}

}  // namespace

TEST_F(TorchWeights, LogitsAreThoseOfPyTorch) {
  const SafetensorsFile dump(dump_path);
  for (auto& kind : backends()) {
    auto backend = kind.make();
    Thin model;
    import_torch(model, *backend, {8, 8, 3}, State().write(folder.file("state")));
    NoGrad off;
    model.eval();
    Variable x(dump.tensor("thin/input", *backend));
    auto right = [&] {
      return close(kind.name, model(transpose(x, {0, 2, 3, 1})).value().values(), dump.values("thin/logits"), 1e-5);
    };
    EXPECT_TRUE(right());
    FlatParameters built_later(model, *backend, 7);  // keeps what was imported
    EXPECT_TRUE(right());
  }
}

TEST_F(TorchWeights, WhatGoesInComesOutBitForBit) {
  Thin model;
  const State state;
  import_torch(model, *backend, {8, 8, 3}, state.write(folder.file("in")));
  export_torch(model, *backend, {8, 8, 3}, folder.file("out"));
  const SafetensorsFile out(folder.file("out"));
  EXPECT_EQ(out.metadata().at("format"), "pt");
  EXPECT_EQ(out.tensors().size(), state.tensors.size());
  for (auto& [key, t] : state.tensors) {
    ASSERT_TRUE(out.has(key)) << key;
    EXPECT_EQ(out.at(key).dtype, t.first.dtype) << key;
    EXPECT_EQ(out.at(key).shape, t.first.shape) << key;
    EXPECT_TRUE(out.bytes(key) == t.second) << key;
  }
}

// Pooled to 5 × 5 pixels before the first Linear; the names of PyTorch's tutorial.
TEST_F(TorchWeights, LeNet5ComesBackUnderPyTorchsNames) {
  auto first = make_model("lenet5", 10, 1, 28), second = make_model("lenet5", 10, 1, 28);
  FlatParameters from(*first, *backend, 1), to(*second, *backend, 2);
  export_torch(*first, *backend, {28, 28, 1}, folder.file("lenet5"));
  const SafetensorsFile file(folder.file("lenet5"));
  EXPECT_EQ(file.tensors().size(), 10u);
  for (const auto& [name, shape] : {std::pair<std::string, Shape>{"conv1", {6, 1, 5, 5}},
                                    {"conv2", {16, 6, 5, 5}},
                                    {"fc1", {120, 400}},
                                    {"fc2", {84, 120}},
                                    {"fc3", {10, 84}}}) {
    EXPECT_EQ(file.at(name + ".weight").shape, shape) << name;
    EXPECT_EQ(file.at(name + ".bias").shape, Shape{shape[0]}) << name;
  }
  import_torch(*second, *backend, {28, 28, 1}, folder.file("lenet5"));
  EXPECT_EQ(from.values.values(), to.values.values());
}

TEST_F(TorchWeights, EverythingThatDoesNotFitIsListedAndNothingIsChanged) {
  Thin model;
  FlatParameters flat(model, *backend, 1);
  const Numbers before = flat.values.values();
  State state;
  state.tensors["extra.weight"] = state.tensors["fc2.bias"];
  state.tensors.erase("bn2.running_var");
  state.tensors["fc1.weight"].first.shape = {64, 12};
  state.tensors.erase("bn1.num_batches_tracked");  // nobody needs it
  const std::string file = state.write(folder.file("state"));
  EXPECT_REFUSED(
      import_torch(model, *backend, {8, 8, 3}, file), "state",
      "; of another shape: fc1.weight is [64,12], expected [12,64]; only in the model: bn2.running_var [16]; ",
      "only in the file: extra.weight [4];");
  EXPECT_EQ(flat.values.values(), before);
}

// DataParallel, torch.compile and what holds the model put words before every name.
TEST_F(TorchWeights, AWrapperBeforeAllNamesIsPassedOver) {
  auto values_from = [&](const State& state) {
    Thin model;
    FlatParameters flat(model, *backend, 1);
    import_torch(model, *backend, {8, 8, 3}, state.write(folder.file("state")));
    return flat.values.values();
  };
  const State plain;
  State wrapped;
  for (const std::string before :
       {"model.net.", "_orig_mod.", "a.b.c.d.", "fc2.", "module._orig_mod.module.", "module."}) {
    wrapped.tensors.clear();
    for (auto& [name, t] : plain.tensors) wrapped.tensors[before + name] = t;
    EXPECT_EQ(values_from(wrapped), values_from(plain)) << before;
  }
  wrapped.tensors["other"] = wrapped.tensors["module.fc2.bias"];  // then it is part of the names
  EXPECT_REFUSED(values_from(wrapped), "only in the file: module.", "only in the model: ", "other");
}

// A Linear that stands behind a flattened picture, with something element-wise in between.
TEST_F(TorchWeights, OnlyAnEarlierExportIsReplaced) {
  Dataset data = synthetic({.side = 28, .train = 32, .test = 16});
  int runs = 0;
  auto exported = [&](const std::string& torch, const std::string& onnx, const std::string& import = "") {
    Loader train(data.train, {.batch = 16}, *backend);
    auto model = make_model("mlp", 10, 1, 28);
    SGD sgd({.learning_rate = 0.05});
    RunConfig options{.epochs = 1, .progress = false};
    options.import_export = {.import_torch = import, .export_torch = torch, .export_onnx = onnx};
    options.checkpoint = folder.file("run" + std::to_string(runs++));
    options.stop_after = 1;
    fit(*model, cross_entropy_loss(), sgd, *backend, {train}, options);
  };
  const std::string torch = folder.file("w.safetensors"), onnx = folder.file("m.onnx"), mine = folder.file("mine");
  NEEDS_PROTOBUF();
  exported(torch, onnx);
  EXPECT_NO_THROW(exported(torch, onnx)) << "onto earlier exports";
  const std::string checkpoint = folder.file("run0") + "/last.safetensors";
  for (const std::string& precious : {checkpoint, onnx, mine}) {
    std::ofstream(mine) << "a thesis";
    const std::string before = contents(precious);
    EXPECT_REFUSED(exported(precious, ""), "--export-torch " + precious, "something else");
    if (precious != onnx) {
      EXPECT_REFUSED(exported("", precious), "--export-onnx " + precious, "something else");
    }
    EXPECT_TRUE(contents(precious) == before);
  }
  EXPECT_REFUSED(exported("", "", checkpoint), "is a checkpoint", "--resume goes on with it");
}

TEST_F(TorchWeights, TheLinearBehindAFlattenIsFoundThroughActivations) {
  struct Net : Module {
    Linear& fc = child<Linear>("fc", 12, 2, false);
    Variable forward(const Variable& x) override { return fc(relu(flatten(x))); }
  };
  Net net;
  FlatParameters flat(net, *backend, 1);
  export_torch(net, *backend, {2, 3, 2}, folder.file("f"));
  const Numbers ours = flat.parameter_range("fc.weight").leaf->value.values();
  const Numbers theirs = SafetensorsFile(folder.file("f")).values("fc.weight");
  for (int o = 0; o < 2; o++)
    for (int h = 0; h < 2; h++)
      for (int w = 0; w < 3; w++)
        for (int c = 0; c < 2; c++) EXPECT_EQ(theirs[o * 12 + c * 6 + h * 3 + w], ours[o * 12 + h * 6 + w * 2 + c]);
}

TEST_F(Interop, TheRecorderWritesDownWhatRanWhereAndHow) {
  Thin net;
  Tensor input, output;
  const std::vector<Operation> all = operations_of(net, *backend, {8, 8, 3}, &input, &output);
  std::vector<std::string> ops;
  for (const Operation& o : all) ops.push_back(o.op);
  EXPECT_EQ(ops, (std::vector<std::string>{"conv2d", "batch_norm", "conv2d", "slice", "slice", "pad", "batch_norm",
                                           "conv2d", "average_pool2d", "reshape", "linear", "linear"}));
  EXPECT_EQ(all[2].module, "conv2");
  EXPECT_EQ(all[2].attribute("stride", 1), 2);
  EXPECT_EQ(all[3].attribute("axis"), 1);
  EXPECT_EQ(all[4].attribute("step"), 2);
  EXPECT_EQ(all[5].attribute("after"), 4);
  EXPECT_EQ(all[7].attribute("groups"), 4);
  EXPECT_EQ(all[1].inputs.size(), 6u);
  EXPECT_TRUE(all[0].inputs[0].same_memory(input));
  EXPECT_TRUE(all.back().output.same_memory(output));
  EXPECT_TRUE(net.training());  // as it was
  EXPECT_EQ(mode().recorder, nullptr);
  EXPECT_REFUSED(all[0].attribute("colour"), "conv2d in conv1", "colour");
}

TEST_F(Interop, AForwardHookFiresForEveryModuleAndReplaces) {
  Thin net;
  FlatParameters flat(net, *backend, 1);
  std::vector<std::string> seen;
  for (auto& [name, module] : net.children())
    module->on_forward([&](Module& m, const Variable& y) { seen.push_back(m.path() + (y.defined() ? "" : "?")); });
  net(Variable(Tensor::zeros(*backend, {2, 8, 8, 3})));
  EXPECT_EQ(seen, (std::vector<std::string>{"conv1", "bn1", "conv2", "bn2", "conv3", "fc1", "fc2"}));
  EXPECT_TRUE(net.children()[0].second->on_forward({}));  // gives back the one that was there
  seen.clear();
  net(Variable(Tensor::zeros(*backend, {2, 8, 8, 3})));
  EXPECT_EQ(seen.size(), 6u);
}

// ---- ONNX: what onnxruntime makes of it is checked by tests/reference/interop.py ------------------------------------
TEST_F(Onnx, HoldsTheGraphOrNamesWhatHasNoCounterpart) {
  struct Divided : Module {
    Linear& fc = child<Linear>("fc", 4, 2);
    Variable forward(const Variable& x) override { return fc(flatten(x)) / 49; }
  } divided;
  struct Swish : Module {
    Conv2d& conv = child<Conv2d>("conv", 1, 2, 3);
    Variable forward(const Variable& x) override { return hardswish(conv(x)); }
  } swish;
  NEEDS_PROTOBUF();
  Thin net;
  const std::string bytes = onnx_of(net, *backend, {8, 8, 3});
  EXPECT_TRUE(holds(bytes, {"Conv", "BatchNormalization", "AveragePool", "Slice", "Pad", "Gemm", "Relu", "Transpose",
                            "conv2.weight", "bn2.running_var", "input", "output", "tandem"}));
  EXPECT_EQ(bytes, onnx_of(net, *backend, {8, 8, 3}));  // nothing random
  EXPECT_TRUE(holds(onnx_of(divided, *backend, {2, 2, 1}), {"Div"}));
  EXPECT_TRUE(holds(error_of<UsageError>([&] { onnx_of(swish, *backend, {8, 8, 1}); }), {"hardswish"}));
}

// ---- TensorBoard ----------------------------------------------------------------------------------------------------
// The bytes were made by an independent encoder; only the wall time differs, which the record's checksum covers.
TEST_F(TensorBoard, WritesTheRecordFormat) {
  NEEDS_PROTOBUF();
  std::string path;
  {
    EventFile file(folder.file("run/a"));
    path = file.path();
    file.scalars(3, {{"loss", 0.5}});
  }
  EXPECT_TRUE(holds(path, {"/run/a/events.out.tfevents."}));
  const std::string bytes = hex(contents(path));
  ASSERT_EQ(bytes.size(), 2u * (24 + 16 + 26 + 16));
  EXPECT_EQ(bytes.substr(0, 26), "1800000000000000a37f4b2209");  // length, its checksum, field 1 (wall time)
  EXPECT_EQ(bytes.substr(42, 30), "1a0d627261696e2e4576656e743a32");
  EXPECT_EQ(bytes.substr(80, 26), "1a00000000000000129bd82d09");
  EXPECT_EQ(bytes.substr(122, 36 - 2), "10032a0d0a0b0a046c6f7373150000003f");
}

TEST_F(TensorBoard, AFolderThatCannotBeMadeIsRefused) {
  std::ofstream(folder.file("taken")) << "x";
  EXPECT_REFUSED(EventFile f(folder.file("taken/run")), "taken/run");
}
}  // namespace tandem::test
