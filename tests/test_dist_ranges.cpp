// Parameters that are cut over ranks, in the flat vector: initial values, one range for each owner, what is refused.
// How a layer that is cut trains, evaluates and is saved: test_dist_hybrid.cpp.
#include "tests/host_ranks.h"

namespace tandem::test {
namespace {

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

using Ranges = OnReference;
TEST_F(Ranges, SlicesTogetherBeginAsThePlainLayer) {
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

TEST_F(Ranges, EachOwnerHasOneRange) {
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
        EXPECT_FALSE(used[k]) << s.name << " overlaps";
        used[k] = true;
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

TEST_F(Ranges, WhatCannotBeCutIsRefused) {
  AllKinds many({7, 8}), wrong({3, 3});
  EXPECT_REFUSED(FlatParameters(many, *backend, 1), "slice 7 of 8", "as it has rows");
  EXPECT_REFUSED(FlatParameters(wrong, *backend, 1), "slice 3 of 3");
  AllKinds mixed({0, 2});
  mixed.Module::parameter("orthogonal").slice = {1, 2};
  EXPECT_REFUSED(FlatParameters(mixed, *backend, 1), "orthogonal", "slice 1 of 2", "slice 0 of 2");
  // One rank that has a slice only.
  AllKinds half({0, 2});
  FlatParameters flat(half, *backend, 1);
  BoundSgd sgd(flat, {.learning_rate = 0.1});
  EXPECT_REFUSED(sgd.update(nullptr), "cut over ranks", "all-reduce");
  TemporaryFolder folder;
  Strategy one;
  EXPECT_REFUSED(save_checkpoint(folder.file("f"), {flat, sgd}, {}), "cut over ranks", "strategy");
  EXPECT_REFUSED(save_checkpoint(folder.file("f"), {flat, sgd, nullptr, &one}, {}), "slice 1 of 2", "no rank");
}

// Two ranks with the same slice, of two; one that is cut beside one that is not; steps of their own.
TEST_F(Ranges, RanksWhoseSlicesDoNotFitAreRefused) {
  auto fails = [](const std::function<Slice(int rank)>& slice, const std::string& why, const std::string& strategy) {
    const auto body = [&](Strategy& s, Ended&) {
      auto own = reference_backend(1);
      AllKinds model(slice(s.rank()));
      FlatParameters flat(model, *own, std::uint64_t(s.rank()));
      BoundSgd sgd(flat, {.learning_rate = 0.1});
      s.begin(flat, sgd);
      s.end();
    };
    all_say(on_ranks(2, strategy, body), {why});
  };
  auto one_each = [](int r) { return Slice{r, 2}; };
  fails([](int) { return Slice{0, 2}; }, "slice 0 is on 2 of 2 ranks", "all-reduce");
  fails([](int r) { return r ? Slice{1, 2} : Slice{}; }, "do not train the same model", "all-reduce");
  fails(one_each, "local-sgd:8: each rank makes steps of its own", "local-sgd:8");
}

}  // namespace
}  // namespace tandem::test
