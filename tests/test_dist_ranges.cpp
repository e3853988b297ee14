// Layers that are cut over ranks: a Linear whose outputs are cut over the ranks of a communicator computes, trains,
// saves and exports what the plain Linear on one machine does.
#include <gtest/gtest.h>

#include <set>

#include "core/files/safetensors.h"
#include "dist/collectives/in_process.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/local_steps.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/parameter_server.h"
#include "layers/export/torch_weights.h"
#include "layers/train/checkpoint.h"
#include "tests/slices.h"
#include "tests/support_channels.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// ---- a layer that is cut --------------------------------------------------------------------------------------------
using Over = std::shared_ptr<Communicator>;

Numbers gathered(Communicator& over, const Cuts& cuts, const Numbers& mine) {
  Numbers all(std::size_t(cuts.back()));
  std::copy(mine.begin(), mine.end(), all.begin() + cuts[std::size_t(over.rank())]);
  over.all_gather(buffer(all), cuts).wait();
  return all;
}
Cuts times(Cuts cuts, std::int64_t n) {
  for (std::int64_t& c : cuts) c *= n;
  return cuts;
}

// The rows of all ranks, x [b, F] → [B, F]. Backward: every rank has a part of the gradient of all rows.
struct GatherRows : Node {
  static constexpr auto name = "gather_rows";
  Over over;
  Cuts rows;
  GatherRows(Over o, Cuts r) : Node(name), over(std::move(o)), rows(std::move(r)) {}
  static Tensor forward(const Tensor& x, Communicator& over, const Cuts& rows) {
    const Numbers all = gathered(over, times(rows, x.size(1)), x.values());
    return Tensor::of(x.backend(), {rows.back(), x.size(1)}, all, x.dtype());
  }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    Numbers sum = dy.values();
    over->all_reduce(buffer(sum)).wait();
    const Tensor all = Tensor::of(dy.backend(), dy.shape(), sum, dy.dtype());
    const auto r = std::size_t(over->rank());
    slots[0].accumulate(all.slice(rows[r], rows[r + 1]).clone());
  }
};

// The outputs of all slices for this rank's rows, z [B, C of this slice] → [b, C].
struct GatherColumns : Node {
  static constexpr auto name = "gather_columns";
  Over over;
  Cuts rows, columns;
  GatherColumns(Over o, Cuts r, Cuts c) : Node(name), over(std::move(o)), rows(std::move(r)), columns(std::move(c)) {}
  static Tensor forward(const Tensor& z, Communicator& over, const Cuts& rows, const Cuts& columns) {
    const Numbers all = gathered(over, times(columns, rows.back()), z.values());
    const std::int64_t first = rows[std::size_t(over.rank())], b = rows[std::size_t(over.rank()) + 1] - first,
                       C = columns.back();
    Numbers y(std::size_t(b * C));
    for (std::size_t s = 0; s + 1 < columns.size(); s++)
      for (std::int64_t i = 0; i < b; i++)
        for (std::int64_t c = columns[s], width = columns[s + 1] - columns[s]; c < columns[s + 1]; c++)
          y[std::size_t(i * C + c)] = all[std::size_t(columns[s] * rows.back() + (first + i) * width + c - columns[s])];
    return Tensor::of(z.backend(), {b, C}, y, z.dtype());
  }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const std::int64_t C = columns.back(), B = rows.back(), first = columns[std::size_t(over->rank())],
                       width = columns[std::size_t(over->rank()) + 1] - first;
    const Numbers all = gathered(*over, times(rows, C), dy.values());
    Numbers dz(std::size_t(B * width));
    for (std::int64_t i = 0; i < B * width; i++)
      dz[std::size_t(i)] = all[std::size_t(i / width * C + first + i % width)];
    slots[0].accumulate(Tensor::of(dy.backend(), {B, width}, dz, dy.dtype()));
  }
};

// y = x·wᵀ + b, where each rank has some rows of w and b. Gradients of w and b are complete without an exchange.
class SlicedLinear : public Module {
 public:
  SlicedLinear(std::int64_t in, std::int64_t out, Over over) : over_(std::move(over)) {
    const Slice mine{over_->rank(), over_->size()};
    for (int s = 0; s <= mine.count; s++) columns_.push_back(Slice{s, mine.count}.begin(out));
    weight_ = &parameter("weight", {out, in}, Initial::fan_in_uniform(in));
    bias_ = &parameter("bias", {out}, Initial::fan_in_uniform(in), false);
    weight_->slice = bias_->slice = mine;
  }
  Variable forward(const Variable& x) override {
    const auto r = std::size_t(over_->rank());
    if (weight_->slice.count == 1) return linear(x, *weight_, *bias_);  // after the run
    if (mode().alone) {
      const Variable z = linear(x, *weight_, *bias_);
      auto zeros = [&](std::int64_t width) {
        return Variable(Tensor::zeros(z.backend(), {z.size(0), width}, z.dtype()));
      };
      const Variable parts[] = {zeros(columns_[r]), z, zeros(columns_.back() - columns_[r + 1])};
      return cat(parts, 1);
    }
    Numbers count(std::size_t(over_->size()));
    count[r] = double(x.size(0));
    over_->all_gather(tandem::buffer(count)).wait();
    Cuts rows{0};
    for (double n : count) rows.push_back(rows.back() + std::int64_t(n));
    const Variable all = record<GatherRows>(GatherRows::forward(x.value(), *over_, rows), {&x}, {}, over_, rows);
    const Variable z = linear(all, *weight_, *bias_);
    return record<GatherColumns>(GatherColumns::forward(z.value(), *over_, rows, columns_), {&z}, {}, over_, rows,
                                 columns_);
  }

 private:
  Over over_;
  Cuts columns_;
  Parameter *weight_, *bias_;
};

// Two layers; the second is cut where there is a communicator. A parameter behind it lies before it in a rank's vector.
struct Net : Module {
  Linear& fc1 = child<Linear>("fc1", 64, 32, true, true);
  Module& fc2;
  Linear& last = child<Linear>("last", 10, 10);
  explicit Net(const Over& over)
      : fc2(over ? static_cast<Module&>(child<SlicedLinear>("fc2", 32, 10, over)) : child<Linear>("fc2", 32, 10)) {}
  Variable forward(const Variable& x) override { return last(fc2(fc1(flatten(x)))); }
};

// Ranks as threads, `machines` times `slices` of them: the model is cut over the slices of a machine.
using Body = std::function<void(Strategy&, const Over& over, int rank)>;
using Make = std::function<std::unique_ptr<Strategy>(std::unique_ptr<Communicator>)>;
std::unique_ptr<Strategy> usual(std::unique_ptr<Communicator> ranks) {
  return all_reduce(std::move(ranks), {.bucket_bytes = 8192});
}
std::vector<std::string> on_machines_of(int slices, int machines, const Make& make, const Body& body) {
  auto ranks = in_process(slices * machines, {.deadline = 30});
  std::vector<std::unique_ptr<Communicator>> layers;
  for (int m = 0; m < machines; m++)
    for (auto& c : in_process(slices, {.deadline = 30})) layers.push_back(std::move(c));
  return ranks_say(slices * machines, [&](int r) {
    const Over over = std::move(layers[std::size_t(r)]);
    auto strategy = make(std::move(ranks[std::size_t(r)]));
    body(*strategy, over, r);
  });
}
std::vector<std::string> on_slices(int slices, const Body& body) { return on_machines_of(slices, 1, usual, body); }

// ---- the space ------------------------------------------------------------------------------------------------------
struct AllKinds : Module {  // of every kind, between replicated ones
  explicit AllKinds(Slice slice, bool frozen = false) {
    const Shape matrix{7, 5}, filters{7, 3, 3, 4};
    parameter("before", {3, 5}, Initial::normal());
    auto sliced = [&](const char* name, const Shape& shape, const Initial& initial) {
      parameter(name, shape, initial).slice = slice;
    };
    sliced("uniform", matrix, Initial::uniform());
    sliced("normal", matrix, Initial::normal());
    parameter("between", {70}, Initial::uniform()).frozen = frozen;
    sliced("trunc_normal", matrix, Initial::trunc_normal());
    sliced("orthogonal", matrix, Initial::orthogonal());
    sliced("kaiming", filters, Initial::kaiming_normal(filters));
    sliced("bias", {7}, Initial::constant(3));
    parameter("after", {2}, Initial::uniform());
    if (frozen) Module::parameter("orthogonal").frozen = true;
  }
  Variable forward(const Variable& x) override { return x; }
};

TEST(Ranges, SlicesTogetherBeginAsThePlainLayer) {
  auto backend = reference_backend(1);
  AllKinds plain({});
  FlatParameters all(plain, *backend, 7);
  for (int n : {2, 3, 7}) {
    std::map<std::string, Numbers> joined;
    for (int i = 0; i < n; i++) {
      AllKinds model({i, n});
      FlatParameters mine(model, *backend, 7);
      EXPECT_EQ(mine.parameters(), all.parameters());
      for (const ParameterRange& s : mine.parameter_ranges()) {
        const Numbers v = s.leaf->value.values();
        Numbers& to = joined[s.name];
        if (s.owner() == OwnerClass::slice || i == 0) to.insert(to.end(), v.begin(), v.end());
        EXPECT_TRUE(s.owner() == OwnerClass::slice || v == to) << s.name << " differs between ranks";
      }
    }
    for (const ParameterRange& s : all.parameter_ranges())
      EXPECT_EQ(joined[s.name], s.leaf->value.values()) << s.name << " in " << n;
  }
  // Values that are there move in: those of the slice, and of a layer that was whole before.
  AllKinds model({1, 3});
  for (auto& [name, p] : model.parameters()) p->variable = Variable(plain.Module::parameter(name).variable.value());
  FlatParameters moved(model, *backend, 8), again(model, *backend, 9);
  EXPECT_EQ(moved.parameter_range("normal").leaf->value.values(),
            all.parameter_range("normal").leaf->value.slice(3, 5).values());
  EXPECT_EQ(again.values.values(), moved.values.values());
}

TEST(Ranges, EachOwnerHasOneRange) {
  auto backend = reference_backend(1);
  AllKinds plain({});
  FlatParameters all(plain, *backend, 7);
  EXPECT_EQ(all.all(OwnerClass::replicated).end, all.numel());
  EXPECT_EQ(all.all(OwnerClass::slice).length(), 0);
  EXPECT_TRUE(all.ranges(OwnerClass::slice).empty());
  std::vector<std::int64_t> places;
  std::set<std::uint64_t> hashes;
  for (int i = 0; i < 3; i++) {
    AllKinds model({i, 3});
    FlatParameters flat(model, *backend, 7);
    EXPECT_EQ(flat.slice(), (Slice{i, 3}));
    const Range same = flat.all(OwnerClass::replicated), cut = flat.all(OwnerClass::slice);
    EXPECT_EQ(same.begin, 0);
    EXPECT_EQ(same.end, cut.begin);
    EXPECT_EQ(cut.begin % FlatParameters::cut, 0);
    EXPECT_EQ(cut.end, flat.numel());
    ASSERT_EQ(flat.trainable().size(), 2u);
    for (OwnerClass owner : {OwnerClass::replicated, OwnerClass::slice}) {
      ASSERT_EQ(flat.ranges(owner).size(), 1u);
      EXPECT_EQ(flat.ranges(owner)[0].begin, flat.all(owner).begin);
      EXPECT_EQ(flat.ranges(owner)[0].end, flat.all(owner).end);
    }
    std::vector<std::int64_t> here;
    std::vector<bool> used(std::size_t(flat.numel()));
    for (const ParameterRange& s : flat.parameter_ranges()) {
      EXPECT_EQ(s.global_begin, all.parameter_range(s.name).global_begin) << s.name;
      EXPECT_EQ(s.local_begin % FlatParameters::alignment, 0);
      EXPECT_GE(s.local_begin, flat.all(s.owner()).begin) << s.name;
      EXPECT_LE(s.local_begin + s.length, flat.all(s.owner()).end) << s.name;
      here.push_back(s.local_begin);
      for (std::int64_t k = s.local_begin; k < s.local_begin + s.length; k++) {
        EXPECT_FALSE(used[std::size_t(k)]) << s.name << " overlaps";
        used[std::size_t(k)] = true;
      }
    }
    const Numbers values = flat.values.values();
    for (std::size_t k = 0; k < values.size(); k++) EXPECT_TRUE(used[k] || values[k] == 0) << "padding";
    if (places.empty()) places = here;
    EXPECT_EQ(here, places) << "all slices have the same layout";
    EXPECT_EQ(flat.layout_hash(OwnerClass::replicated), all.layout_hash()) << "that of the plain model";
    hashes.insert(flat.layout_hash());
  }
  hashes.insert(all.layout_hash());
  EXPECT_EQ(hashes.size(), 4u);
  AllKinds frozen({0, 3}, true);
  FlatParameters partly(frozen, *backend, 7);
  for (const Range& r : partly.trainable())
    EXPECT_TRUE(r.end <= partly.all(OwnerClass::slice).begin || r.begin >= partly.all(OwnerClass::slice).begin);
}

TEST(Ranges, WhatCannotBeCutIsRefused) {
  auto backend = reference_backend(1);
  AllKinds many({7, 8}), wrong({3, 3});
  EXPECT_TRUE(refused([&] { FlatParameters(many, *backend, 1); }, {"slice 7 of 8", "as it has rows"}));
  EXPECT_TRUE(refused([&] { FlatParameters(wrong, *backend, 1); }, {"slice 3 of 3"}));
  AllKinds mixed({0, 2});
  mixed.Module::parameter("orthogonal").slice = {1, 2};
  EXPECT_TRUE(refused([&] { FlatParameters(mixed, *backend, 1); }, {"orthogonal", "slice 1 of 2", "slice 0 of 2"}));
  // One rank that has a slice only.
  AllKinds half({0, 2});
  FlatParameters flat(half, *backend, 1);
  SGD sgd({.learning_rate = 0.1});
  sgd.bind(flat);
  EXPECT_TRUE(refused([&] { sgd.update(nullptr); }, {"cut over ranks", "all-reduce"}));
  TemporaryFolder folder;
  Strategy one;
  EXPECT_TRUE(refused([&] { save_checkpoint(folder.file("f"), {flat, sgd}, {}); }, {"cut over ranks", "strategy"}));
  EXPECT_TRUE(refused(
      [&] {
        save_checkpoint(folder.file("f"), {flat, sgd, nullptr, &one}, {});
      },
      {"slice 1 of 2", "no rank"}));
}

// ---- training -------------------------------------------------------------------------------------------------------
Seen trained(Strategy& strategy, const Over& over, const std::string& optimizer_name, Backend& backend,
             DType dtype = DType::f64, double clip_norm = 0.2) {
  Net model(over);
  return trained_on(strategy, model, cross_entropy_loss(), *optimizer_called(optimizer_name), backend, dtype,
                    clip_norm);
}

TEST(Ranges, SlicesTrainAsThePlainLayerOnOneMachine) {
  for (const char* optimizer : {"sgd", "adamw", "lars"}) {
    Strategy one;
    auto backend = reference_backend(1);
    const Seen plain = trained(one, nullptr, optimizer, *backend);
    EXPECT_GT(plain.norms[0], 0.2) << "clipped";
    for (auto [slices, machines] : {std::pair{1, 1}, {2, 1}, {3, 1}, {2, 2}, {3, 2}}) {
      std::vector<Seen> seen(std::size_t(slices * machines));
      all_well(on_machines_of(slices, machines, usual, [&](Strategy& s, const Over& over, int r) {
        auto mine = reference_backend(1);
        seen[std::size_t(r)] = trained(s, over, optimizer, *mine);
      }));
      for (const Seen& s : seen)
        same(s, plain, 1e-12, 1e-9,
             std::string(optimizer) + " on " + std::to_string(slices) + " × " + std::to_string(machines));
    }
  }
}

// A parameter server with several members on a machine: each has a piece of what is replicated and the machine's
// slices, and its lane reaches the other machines.
std::vector<std::string> on_machines(int slices, int machines, const std::string& rule, const Body& body) {
  std::vector<std::unique_ptr<Communicator>> here, layers;
  std::vector<std::vector<std::unique_ptr<Channel>>> lanes;
  for (int m = 0; m < machines; m++) {
    for (auto& c : in_process(slices, {.deadline = 30})) here.push_back(std::move(c));
    for (auto& c : in_process(slices, {.deadline = 30})) layers.push_back(std::move(c));
  }
  for (int s = 0; s < slices; s++) lanes.push_back(in_process_channels(machines));
  return ranks_say(slices * machines, [&](int r) {
    const int m = r / slices, s = r % slices;
    std::vector<int> ranks;
    for (int k = 0; k < slices; k++) ranks.push_back(m * slices + k);
    const Over over = slices > 1 ? std::move(layers[std::size_t(r)]) : nullptr;
    auto strategy = parameter_server_of_machines(
        std::make_unique<MachineShare>(std::move(here[std::size_t(r)]), ranks, slices * machines),
        std::move(lanes[std::size_t(s)][std::size_t(m)]), {.how = Asynchrony::parse(rule), .deadline = 30});
    body(*strategy, over, r);
  });
}

TEST(Ranges, AServerWithAMemberForEachRankTrainsAsOneMachine) {
  Strategy one;
  auto backend = reference_backend(1);
  Seen plain = trained(one, nullptr, "sgd", *backend, DType::f64, 0);
  plain.state.clear(), plain.norms.clear(), plain.gradients.clear();
  for (auto [slices, machines] : {std::pair{1, 2}, {2, 1}, {3, 1}, {2, 2}, {3, 2}, {2, 3}}) {
    std::vector<Seen> seen(std::size_t(slices * machines));
    all_well(on_machines(slices, machines, "bsp", [&](Strategy& s, const Over& over, int r) {
      auto mine = reference_backend(1);
      seen[std::size_t(r)] = trained(s, over, "sgd", *mine, DType::f64, 0);
    }));
    for (Seen& s : seen) {
      s.state.clear(), s.norms.clear(), s.gradients.clear();  // a server's
      same(s, plain, 1e-12, 1e-9, std::to_string(slices) + " × " + std::to_string(machines));
    }
  }
}

// On devices, with gradients that travel as bf16: what is not exchanged is not touched.
TEST(Ranges, SlicesOnDevicesAreThoseOfTheHost) {
  for (DType wire : {DType::f32, DType::bf16})
    for (int machines : {1, 2}) {
      auto on = [&](bool device) {
        std::vector<Seen> seen(std::size_t(2 * machines));
        testing::internal::CaptureStderr();
        auto make = [&](auto ranks) {
          return all_reduce(std::move(ranks), {.bucket_bytes = 8192, .wire = wire, .deadline = 30});
        };
        all_well(on_machines_of(2, machines, make, [&](Strategy& s, const Over& over, int r) {
          std::unique_ptr<Backend> backend = reference_backend(1);
          if (device) {
            auto twin = std::make_unique<Twin>();
            twin->behind = true;
            backend = std::move(twin);
          }
          seen[std::size_t(r)] = trained(s, over, "sgd", *backend, DType::f32);
        }));
        testing::internal::GetCapturedStderr();
        return seen;
      };
      const std::vector<Seen> host = on(false), twins = on(true);
      for (std::size_t r = 0; r < host.size(); r++) {
        EXPECT_EQ(twins[r].weights, host[r].weights) << name_of(wire) << ", rank " << r;
        EXPECT_EQ(twins[r].losses, host[r].losses);
      }
    }
}

// A gradient that is not finite in one slice ends the step on all ranks.
TEST(Ranges, AllRanksSkipWhatIsNotFiniteInASlice) {
  for (const char* optimizer_name : {"sgd", "lars"})
    all_well(on_slices(3, [&](Strategy& s, const Over& over, int r) {
      auto backend = reference_backend(1);
      Net model(over);
      FlatParameters flat(model, *backend, 1);
      const auto optimizer = optimizer_called(optimizer_name);
      optimizer->if_not_finite = IfNotFinite::skip;
      optimizer->bind(flat);
      s.begin(flat, *optimizer);
      const Tensor x = Tensor::of(*backend, {2, 64}, numbers("x", 128)),
                   y = Tensor::of(*backend, {2}, {1, 2}, DType::i32);
      for (int step = 0; step < 3; step++) {
        const Numbers before = flat.values.values();
        flat.zero_gradients();
        const Variable loss = cross_entropy(model(Variable(x)), y);
        flat.backward(loss, 1.0 / 3);
        if (step == 1 && r == 2) flat.parameter_range("fc2.bias").leaf->grad.fill(std::nan(""));
        require(s.step(*optimizer, loss) == (step == 1 ? StepResult::not_finite : StepResult::made), "step ", step);
        require((flat.values.values() == before) == (step == 1), "weights of step ", step);
      }
      s.end();
    }));
}

TEST(Ranges, WhatRanksMustHaveInCommonIsChecked) {
  auto begins = [](Strategy& s, Module& model, const std::function<void(FlatParameters&)>& then = {}) {
    auto backend = reference_backend(1);
    FlatParameters flat(model, *backend, std::uint64_t(s.rank()));
    SGD sgd({.learning_rate = 0.1});
    sgd.bind(flat);
    s.begin(flat, sgd);
    if (then) then(flat);
    s.end();
  };
  // Rank 0's weights, and the first machine's slices, on all.
  std::vector<Numbers> weights(4);
  all_well(on_machines_of(2, 2, usual, [&](Strategy& s, const Over& over, int r) {
    Net model(over);
    begins(s, model, [&](FlatParameters& flat) { weights[std::size_t(r)] = whole(flat, flat.values, s); });
  }));
  for (const Numbers& w : weights) EXPECT_EQ(w, weights[0]);
  // One slice differs between two machines; between slices nothing is compared.
  for (int machines : {1, 2}) {
    const auto said = on_machines_of(2, machines, usual, [&](Strategy& s, const Over& over, int r) {
      Net model(over);
      begins(s, model, [&](FlatParameters& flat) {
        if (r == 2 * machines - 1) flat.parameter_range("fc2.weight").leaf->value.fill(1);
      });
    });
    for (int r = 0; r < 2 * machines; r++) {
      const std::string& text = said[std::size_t(r)];
      const bool named = text.find("rank 1 and rank 3 no longer have the same parameters") != text.npos;
      EXPECT_TRUE(machines == 1 ? text.empty() : named || r % 2 == 0) << text;
    }
  }
  // Two ranks with the same slice, of two; and one that is cut beside one that is not.
  auto fails = [&](const std::function<Slice(int rank)>& slice, const std::string& why, const Make& make = usual) {
    for (const std::string& text : on_machines_of(2, 1, make, [&](Strategy&s, const Over&, int r) {
           AllKinds model(slice(r));
           begins(s, model);
         }))
      EXPECT_NE(text.find(why), text.npos) << text;
  };
  fails([](int) { return Slice{0, 2}; }, "slice 0 is on 2 of 2 ranks");
  fails([](int r) { return r ? Slice{1, 2} : Slice{}; }, "do not train the same model");
  fails(
      [](int r) {
        return Slice{r, 2};
      },
      "local-sgd:8: each rank makes steps of its own", [](auto ranks) { return rounds(std::move(ranks), {}); });
}

// ---- files ----------------------------------------------------------------------------------------------------------
struct Flat : Module {  // the cut layer reads pictures in rows
  Module& fc;
  explicit Flat(const Over& over)
      : fc(over ? static_cast<Module&>(child<SlicedLinear>("fc", 12, 7, over)) : child<Linear>("fc", 12, 7)) {}
  Variable forward(const Variable& x) override { return fc(flatten(x)); }
};

TEST(Ranges, FilesAreThoseOfThePlainModel) {
  TemporaryFolder folder;
  const std::string plain = folder.file("plain"), torch = folder.file("torch");
  auto backend = reference_backend(1);
  Flat model(nullptr);
  FlatParameters flat(model, *backend, 3);
  SGD sgd({.learning_rate = 0.1, .momentum = 0.9});
  sgd.bind(flat);
  Ema ema(flat, 0.9);
  Tensor velocity = sgd.vectors()[0].second;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    velocity.range(s.local_begin, s.shape).copy_from(Tensor::of(*backend, s.shape, numbers("v" + s.name, s.length)));
    ema.values.range(s.local_begin, s.shape).copy_from(Tensor::of(*backend, s.shape, numbers("a" + s.name, s.length)));
  }
  save_checkpoint(plain, {flat, sgd, &ema}, {.step = 4}, {{"--lr", "0.1"}});
  export_torch(model, *backend, {2, 3, 2}, torch);

  for (int n : {1, 2, 3, 7})
    all_well(on_slices(n, [&](Strategy& s, const Over& over, int r) {
      const std::string own = r == 0 ? folder.file("own") : "", weights = r == 0 ? folder.file("weights") : "";
      auto mine = reference_backend(1);
      Flat cut(over);
      FlatParameters part(cut, *mine, 4);
      SGD steps({.learning_rate = 0.1, .momentum = 0.9});
      steps.bind(part);
      Ema average(part, 0.9);
      require(load_checkpoint(plain, {part, steps, &average}).step == 4, "step");
      save_checkpoint(own, {part, steps, &average, &s}, {.step = 4}, {{"--lr", "0.1"}});
      require(r > 0 || contents(own) == contents(plain), "another checkpoint on ", n, " ranks");
      Flat read(over);
      FlatParameters into(read, *mine, 5);
      import_torch(read, *mine, {2, 3, 2}, torch);
      require(into.values.values() == part.values.values(), "other weights from PyTorch");
      export_torch(read, *mine, {2, 3, 2}, weights, {}, &s);
      require(r > 0 || contents(weights) == contents(torch), "other weights for PyTorch on ", n, " ranks");
      load_weights(plain, into);
      require(into.values.values() == average.values.values(), "the average");
    }));

  // A layer of another size is another model.
  all_well(on_slices(2, [&](Strategy&, const Over& over, int) {
    auto mine = reference_backend(1);
    Net other(over);
    FlatParameters part(other, *mine, 4);
    SGD steps({.learning_rate = 0.1, .momentum = 0.9});
    steps.bind(part);
    EXPECT_TRUE(refused([&] { load_checkpoint(plain, {part, steps}); }, {"another model"}));
  }));
}

// One run: 1 rank with the plain layer, then 3, 2 and 4 with slices, then 1 again.
TEST(Ranges, ARunGoesOnWithAnyNumberOfSlices) {
  TemporaryFolder folder;
  auto run = [&](Strategy& s, const Over& over, RunConfig o) {
    auto backend = reference_backend(1);
    Dataset data = synthetic({.side = 8, .channels = 1, .train = 203, .test = 61, .seed = 3});
    Loader train(data.train, {.batch = 48, .seed = 2, .prefetch = 0}, *backend),
        test(data.test, {.batch = 50, .shuffle = false}, *backend);
    Net model(over);
    SGD sgd({.learning_rate = 0.1, .momentum = 0.9});
    o.ema = 0.8;
    fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o, &s);
    FlatParameters flat(model, *backend, 1);
    return whole(flat, flat.values, s);
  };
  Strategy one;
  RunConfig o = quiet(4);
  o.import_export.export_torch = folder.file("weights");
  const Numbers want = run(one, nullptr, o);
  const std::string exported = contents(o.import_export.export_torch);
  o.import_export.export_torch = folder.file("weights of slices");
  o.checkpoint = folder.file("run");
  o.stop_after = 3;
  run(one, nullptr, o);
  o.resume = std::exchange(o.checkpoint, "");
  for (auto [slices, stop] : {std::pair{3, 8}, {2, 11}, {4, 17}}) {
    o.stop_after = stop;
    all_well(on_slices(slices, [&](Strategy& s, const Over& over, int) { run(s, over, o); }));
    EXPECT_EQ(position_in(folder.file("run/last.safetensors")).step, stop);
  }
  o.stop_after = 0;
  std::vector<Numbers> got(3);
  all_well(on_slices(3, [&](Strategy& s, const Over& over, int r) { got[std::size_t(r)] = run(s, over, o); }));
  for (const Numbers& g : got) EXPECT_TRUE(close("weights", g, want, 1e-4));
  const SafetensorsFile a(folder.file("weights")), b(folder.file("weights of slices"));
  for (const auto& [name, entry] : a.tensors()) EXPECT_TRUE(close(name, b.values(name), a.values(name), 1e-4));

  // A graph is made of the whole model, at the end.
  o.import_export.export_onnx = folder.file("graph");
  all_well(on_slices(2, [&](Strategy& s, const Over& over, int) { run(s, over, o); }));
  EXPECT_GT(contents(o.import_export.export_onnx).size(), 10000u);
}

}  // namespace
}  // namespace tandem::test
