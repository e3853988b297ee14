// Workers whose data differ: partitions, a worker's part of a loader, accuracy per class, the merges of rounds over own
// epochs against naive versions, and simulated runs with them.
#include <valarray>

#include "core/elementwise.h"
#include "dist/lab/simulator.h"
#include "dist/strategies/federated.h"
#include "dist/strategies/local_steps.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

using Labels = std::vector<std::int32_t>;

Labels cycling(int pictures, int classes) {
  Labels labels;
  for (int i = 0; i < pictures; i++) labels.push_back((i * 7) % classes);
  return labels;
}
std::vector<Part> parts(const std::string& text, const Labels& labels, int workers, std::uint64_t seed = 1) {
  return parts_of(Partition::parse(text), labels, 10, workers, seed);
}
std::vector<int> counts_of(const Part& part, const Labels& labels) {
  std::vector<int> counts(10);
  for (std::int32_t i : part) counts[std::size_t(labels[std::size_t(i)])]++;
  return counts;
}

// ---- partitions -----------------------------------------------------------------------------------------------------
TEST(Partition, EveryPictureIsInOnePartAndNoPartIsEmpty) {
  const Labels labels = cycling(6000, 10);
  for (const char* text :
       {"equal", "dirichlet:0.5", "dirichlet:alpha=0.1", "classes:k=2", "classes:1", "sizes:0.5", "groups:2"})
    for (int workers : {2, 4, 10, 20}) {
      if (std::string(text).starts_with("classes") && workers < 10) continue;  // then classes are left out
      std::set<std::int32_t> all;
      std::size_t total = 0;
      for (const Part& part : parts(text, labels, workers)) {
        EXPECT_GE(part.size(), std::string(text).starts_with("d") || text[0] == 's' ? 10u : 1u) << text;
        all.insert(part.begin(), part.end());
        total += part.size();
      }
      EXPECT_EQ(total, labels.size()) << text << " over " << workers;
      EXPECT_EQ(all.size(), labels.size()) << text << " over " << workers;
    }
}

TEST(Partition, KindsAreWhatTheySay) {
  const Labels labels = cycling(6000, 10);
  for (const Part& part : parts("equal", labels, 8)) EXPECT_EQ(part.size(), 750u);
  const auto by_class = parts("classes:k=2", labels, 10);
  for (std::size_t w = 0; w < by_class.size(); w++) {
    const auto counts = counts_of(by_class[w], labels);
    EXPECT_EQ(std::count_if(counts.begin(), counts.end(), [](int n) { return n > 0; }), 2) << w;
    EXPECT_GT(counts[w], 0) << "worker i holds class i";
  }
  const auto alone = parts("groups:n=2", labels, 4);
  for (std::size_t w = 0; w < alone.size(); w++) {
    const auto counts = counts_of(alone[w], labels);
    for (std::size_t c = 0; c < 10; c++) EXPECT_EQ(counts[c] > 0, (w < 2) == (c < 5)) << w << " " << c;
    EXPECT_EQ(alone[w].size(), 1500u);
  }
  // Of a small alpha a class is with few workers; of a large one all are alike.
  const auto skewed = parts("dirichlet:0.05", labels, 10), even = parts("dirichlet:1e5", labels, 10);
  double most = 0;
  for (const Part& part : skewed)
    for (int n : counts_of(part, labels)) most += n > 300;
  EXPECT_GE(most, 5);
  for (const Part& part : even)
    for (int n : counts_of(part, labels)) EXPECT_NEAR(n, 60, 5);
}

TEST(Partition, ItIsAFunctionOfTheSeedAndTheNumberOfWorkers) {
  const Labels labels = cycling(1000, 10);
  EXPECT_EQ(parts("dirichlet:0.5", labels, 4), parts("dirichlet:alpha=0.5", labels, 4));
  EXPECT_NE(parts("dirichlet:0.5", labels, 4), parts("dirichlet:0.5", labels, 4, 2));
  EXPECT_EQ(Partition::parse("classes:3").name(), "classes:k=3");
  for (const char* text : {"shared", "equal", "dirichlet:alpha=0.3", "classes:k=2", "sizes:beta=0.5", "groups:n=5"})
    EXPECT_EQ(Partition::parse(text).name(), text);
}

TEST(Partition, WhatCannotBeIsRefusedByName) {
  const Labels labels = cycling(100, 10), many = cycling(1000, 10);
  const auto made = [&](const std::string& text, int workers) { parts(text, workers == 30 ? many : labels, workers); };
  EXPECT_NO_THROW(made("equal", 100));
  EXPECT_REFUSED(made("equal", 101), "100 pictures are too few for 101 workers");
  EXPECT_REFUSED(made("dirichlet:0.5", 11), "at least 10 each");
  EXPECT_REFUSED(made("dirichlet:0.001", 30), "no draw of 1000 gave each of 30 workers 10 pictures");
  EXPECT_NO_THROW(made("classes:k=1", 99));
  EXPECT_REFUSED(parts("classes:k=1", Labels(100, 3), 10), "worker 0 of 10 has no picture");
  EXPECT_REFUSED(made("groups:n=3", 2), "only 2 workers");
  EXPECT_REFUSED(made("halves", 2), "--partition halves: choose");
  EXPECT_REFUSED(made("dirichlet:alpha=0", 2), "above 0");
}

// ---- a worker's part ------------------------------------------------------------------------------------------------
struct SimulatedParts : OnCpu {
  Dataset data = synthetic({.side = 8, .train = 640, .test = 200, .seed = 3});
  SimulatorReport report;
  std::map<int, double> slower;  // worker → factor
  Numbers run(const std::string& strategy, const std::string& partition, int epochs, std::int64_t batch = 16,
              double momentum = 0.9, int workers = 4, std::uint64_t seed = 1) {
    Loader train(data.train, {.batch = batch, .seed = 5, .prefetch = 0, .partition = Partition::parse(partition)},
                 *backend);
    Loader test(data.test, {.batch = 100, .shuffle = false, .prefetch = 0}, *backend);
    Plain net;
    SimulatorOptions options{.strategy = strategy, .epochs = epochs, .seed = seed, .progress = false};
    options.cluster.workers = workers;
    options.cluster.slower = slower;
    report = simulate(net, cross_entropy_loss(), {.learning_rate = 0.05, .momentum = momentum, .weight_decay = 5e-4},
                      *backend, {train, nullptr, &test}, options);
    return parameter_values(net);
  }
};

TEST_F(SimulatedParts, AWorkersLoaderHasItsPicturesOnceAnEpoch) {
  Loader train(data.train, {.batch = 50, .drop_last = true, .partition = Partition::parse("dirichlet:0.5")}, *backend);
  EXPECT_EQ(Loader(data.train, {}, *backend).part(0, 4, 1), nullptr);
  const Parts table = train.parts(4);
  std::set<std::int32_t> all;
  for (int w = 0; w < 4; w++) {
    const auto own = train.part(w, 4, 1);
    const std::int64_t size = table.of(w);
    EXPECT_EQ(own->pictures_per_epoch(), size);
    EXPECT_EQ(own->batches_per_epoch(), (size + 49) / 50);
    for (std::int64_t epoch : {0, 1}) {
      Numbers counts(10);
      own->start(epoch);
      std::int64_t k = 0;
      for (Batch b; own->next(b); k++) {
        EXPECT_EQ(b.images.values(), own->make(epoch, k).images.values());
        for (double i : b.samples.values()) all.insert(std::int32_t(i));
        for (double c : b.labels.values()) counts[std::size_t(c)]++;
      }
      EXPECT_EQ(counts, table.pictures[std::size_t(w)]);
    }
  }
  EXPECT_EQ(all.size(), 640u);
}

TEST_F(SimulatedParts, AccuracyPerClassIsCounted) {
  Loader test(data.test, {.batch = 64, .shuffle = false}, *backend);
  Sequential net;
  net.add<Flatten>();
  net.add<Linear>(64, 10);
  FlatParameters flat(net, *backend, 1);
  const Evaluation e = evaluate(net, test);
  ASSERT_EQ(e.class_accuracy.size(), 10u);
  Numbers samples(10);
  for (double c : data.test.labels.values()) samples[std::size_t(c)]++;
  double correct = 0;
  for (std::size_t c = 0; c < 10; c++) correct += e.class_accuracy[c] * samples[c];
  EXPECT_NEAR(correct / 200, e.accuracy, 1e-12);
}

// ---- merges ---------------------------------------------------------------------------------------------------------
// Workers with so many pictures each, in batches of 10.
struct Sizes : BatchSource {
  std::vector<Numbers> pictures;
  std::int64_t batches = 0;
  explicit Sizes(std::vector<Numbers> all) : pictures(std::move(all)) {}
  void share(int, int) override {}
  std::int64_t batches_per_epoch() const override { return batches; }
  std::int64_t pictures_per_epoch() const override { return 0; }
  void start(std::int64_t, std::int64_t) override {}
  bool next(Batch&) override { return false; }
  Batch make(std::int64_t, std::int64_t) override { return {}; }
  Parts parts(int) const override { return {.pictures = pictures, .batch = 10}; }
  std::unique_ptr<BatchSource> part(int worker, int, int) const override {
    auto own = std::make_unique<Sizes>(pictures);
    own->batches = parts(0).batches(worker);
    return own;
  }
};

struct Merges : OnReference {
  Linear model{2, 2, false};
  FlatParameters flat{model, *backend, 1, {}, DType::f64};
  using Values = std::valarray<double>;
  Tensor of(const Values& first) {
    Numbers v(std::size_t(flat.numel()));
    for (std::size_t i = 0; i < first.size(); i++) v[i] = first[i];
    return Tensor::of(*backend, {flat.numel()}, v, DType::f64);
  }
  static void near(const Tensor& t, const auto& expected) {
    const Numbers is = t.values();
    for (std::size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(is[i], expected[i], 1e-12) << i;
  }
  struct Member {
    std::unique_ptr<OwnPart> own;
    std::unique_ptr<RoundMethod> method;
  };
  // Workers at the begin of a round from `theta`. The tensors of the method's state are those in `state`.
  std::vector<Member> begun(const std::string& name, SGD& sgd, const std::vector<Numbers>& sizes) {
    const auto how = *Federated::parse(name);
    std::vector<Member> all;
    for (int w = 0; w < int(sizes.size()); w++) {
      auto own = OwnPart::of(Sizes(sizes), {.worker = w, .workers = int(sizes.size()), .epochs = how.epochs});
      own->start(0, 0);
      all.push_back({std::move(own), how.method()});
      all.back().method->join(all.back().own.get(), sgd);
      all.back().method->allocate(flat);
      all.back().method->equal(of(theta));
    }
    return all;
  }
  // The weights after a round from `theta` in which two workers end at these places.
  Tensor merged(const std::string& name, const std::vector<Numbers>& sizes, const Values& first, const Values& second) {
    SGD sgd({.momentum = 0.9});
    const auto workers = begun(name, sgd, sizes);
    Exchanged e{.x = of(first), .sum = of({})};
    Tensor sum = of({});
    for (std::size_t w : {0, 1}) {
      e.x = of(w ? second : first);
      workers[w].method->end({});
      workers[w].method->send(e);
      add_into(sum, e.sum);
    }
    e.sum = sum;
    workers[0].method->merge(e);
    return e.x;
  }
  const Values theta{0.5, -1, 2, 0.25}, x1{0.1, 0.3, 1.7, 0.2}, x2{-0.4, 0.2, 2.5, 0.9}, c{0.01, 0.02, -0.03, 0.04};
};

TEST_F(Merges, FedAvgAndFedNovaAgainstTheirFormulas) {
  const double p1 = 0.7, p2 = 0.3, rho = 0.9;
  near(merged("fedavg:epochs=1", {{70}, {30}}, x1, x2), p1 * x1 + p2 * x2);
  // a is the sum of the momentum's weights over s steps: of step j, (1 − ρ^(s−j))/(1 − ρ).
  const auto a = [&](int s) {
    double sum = 0, velocity = 0;
    for (int j = 0; j < s; j++) sum += velocity = rho * velocity + 1;
    return sum;
  };
  EXPECT_NEAR(normalised_steps(7, rho), a(7), 1e-12);
  EXPECT_NEAR(normalised_steps(7, 0), 7, 1e-12);
  double nesterov = 0, velocity = 0;
  for (int j = 0; j < 7; j++) {
    velocity = rho * velocity + 1;
    nesterov += 1 + rho * velocity;
  }
  EXPECT_NEAR(normalised_steps(7, rho, true), nesterov, 1e-12);
  near(merged("fednova:epochs=1", {{70}, {30}}, x1, x2),  // steps: 7 and 3
       theta - (p1 * a(7) + p2 * a(3)) * (p1 * (theta - x1) / a(7) + p2 * (theta - x2) / a(3)));
}

TEST_F(Merges, EqualPartsMakeFedNovaFedAvgAndOneStepMakesItSgd) {
  const std::vector<Numbers> equal{{50}, {50}};
  near(merged("fednova:epochs=3", equal, x1, x2), merged("fedavg:epochs=3", equal, x1, x2).values());
  const double eta = 0.05;  // x1 and x2 are the workers' gradients
  near(merged("fedavg:epochs=1", {{10}, {10}}, theta - eta * x1, theta - eta * x2), theta - eta * (x1 + x2) / 2.0);
}

TEST_F(Merges, FedProxAndScaffoldAgainstTheirFormulas) {
  SGD sgd({});
  const auto prox = begun("fedprox:mu=0.1", sgd, {{50}, {50}}), scaffold = begun("scaffold", sgd, {{50}, {50}});
  RoundMethod& method = *scaffold[0].method;
  StrategyState state;
  method.saved(state);
  Tensor control = state.vectors.at("control");
  control.copy_from(of(c));
  method.begin_epoch(0, {.resumed = true});  // c_i = c
  control.copy_from(of(x2));
  Tensor g = of(x2), w = of(x1);
  prox[0].method->before_update(of(x1), g);
  for (int step = 0; step < 8; step++) method.after_update(w, 0.05);
  Exchanged e{.x = of(x1), .sum = of({})};
  EXPECT_TRUE(method.end({}).again);
  method.send(e);
  method.merge(e);
  EXPECT_FALSE(method.end({}).again);
  e.x = of(x1);
  method.send(e);
  const Tensor change = e.sum.clone();
  method.merge(e);  // the other worker's change is zero
  const Values next = c - x2 + (theta - x1) / (8 * 0.05), changed = x2 + (next - c) / 2.0;
  near(g, x2 + 0.1 * (x1 - theta));
  near(w, x1 - 8 * 0.05 * (x2 - c));
  Tensor own = of(c);
  add_into(own, change);
  near(own, next);
  near(control, changed);
  w.copy_from(of(x1));
  method.after_update(w, 0.05);  // by the new c_i and c
  near(w, x1 - 0.05 * (changed - next));
}

TEST_F(Merges, ServerOptimizersAgainstTheirFormulas) {
  for (const char* name : {"momentum", "adam", "yogi", "adagrad"}) {
    const auto how = *Federated::parse("fedavg:rate=0.3,server=" + std::string(name));
    Tensor at = of(theta), first = of({}), second = of({});
    second.fill(1e-6);
    Values w = theta, m(4), v(1e-6, 4);
    for (int round = 0; round < 3; round++) {
      const Values d = round == 1 ? x1 : x2;
      server_step(how, at, first, second, of(d));
      for (std::size_t i = 0; i < 4; i++) {
        const double s = d[i] * d[i];
        if (how.server == Federated::Server::momentum) {
          w[i] -= 0.3 * (m[i] = 0.9 * m[i] + d[i]);
          continue;
        }
        m[i] = how.server == Federated::Server::adagrad ? d[i] : 0.9 * m[i] + 0.1 * d[i];
        if (how.server == Federated::Server::adam) v[i] = 0.99 * v[i] + 0.01 * s;
        if (how.server == Federated::Server::yogi) v[i] -= 0.01 * s * (v[i] > s ? 1 : -1);
        if (how.server == Federated::Server::adagrad) v[i] += s;
        w[i] -= 0.3 * m[i] / (std::sqrt(v[i]) + 1e-3);
      }
    }
    near(at, w);
  }
}

TEST(Federated, NamesAreReadAndRefused) {
  const auto prox = *Federated::parse("fedprox:epochs=3,mu=0.1"),
             nova = *Federated::parse("fednova:server=adam,rate=0.2");
  EXPECT_EQ(prox.kind, Federated::Kind::fedprox);
  EXPECT_EQ(std::pair(prox.epochs, prox.mu), std::pair(std::int64_t{3}, 0.1));
  EXPECT_EQ(std::pair(nova.epochs, nova.server), std::pair(std::int64_t{10}, Federated::Server::adam));
  EXPECT_EQ(nova.rate, 0.2);
  EXPECT_EQ(Federated::parse("scaffold:epochs=1,sample=0.1")->sample, 0.1);
  EXPECT_FALSE(Federated::parse("local-sgd:8"));
  for (const char* text :
       {"fedavg:mu=1", "fedavg:rate=0.1", "scaffold:sample=0", "fednova:server=lamb", "fedavg:epochs=0"})
    EXPECT_THROW(Federated::parse(text), UsageError) << text;
}

// ---- simulated runs -------------------------------------------------------------------------------------------------
TEST_F(SimulatedParts, FedAvgOfOneStepARoundIsSynchronousSgd) {
  const Numbers rounds = run("fedavg:epochs=1", "equal", 6, 160, 0), steps = run("all-reduce", "equal", 6, 160, 0);
  EXPECT_LT(largest_gap(rounds, steps), 2e-6);  // in f32; the merge in double: above
  EXPECT_GT(largest_gap(rounds, run("all-reduce", "equal", 5, 160, 0)), 1e-4);
}

TEST_F(SimulatedParts, SpecialCasesOfTheMethodsAreFedAvg) {
  const Numbers fedavg = run("fedavg:epochs=2", "dirichlet:0.5", 4);
  EXPECT_EQ(run("fedprox:epochs=2,mu=0", "dirichlet:0.5", 4), fedavg);
  EXPECT_GT(largest_gap(run("fedprox:epochs=2,mu=1", "dirichlet:0.5", 4), fedavg), 1e-4);
  EXPECT_EQ(run("scaffold:epochs=2", "dirichlet:0.5", 2), run("fedavg:epochs=2", "dirichlet:0.5", 2))
      << "all control variates are zero in the first round";
  EXPECT_GT(largest_gap(run("scaffold:epochs=2", "dirichlet:0.5", 4), fedavg), 1e-4);
  EXPECT_LT(largest_gap(run("fednova:epochs=2", "equal", 4), run("fedavg:epochs=2", "equal", 4)), 2e-6);
  EXPECT_GT(largest_gap(run("fednova:epochs=2", "dirichlet:0.5", 4), fedavg), 1e-4);
}

TEST_F(SimulatedParts, RoundsLearnAndReport) {
  EXPECT_THROW(run("fedavg:epochs=1", "shared", 1), UsageError);  // rounds need pictures of their own
  run("fedavg:epochs=2", "equal", 20, 16, 0.9, 4);
  ASSERT_EQ(report.epochs.size(), 10u);  // a line for each round
  EXPECT_EQ(report.epochs.back().epoch, 20);
  EXPECT_GT(*report.epochs.back().test_accuracy, 0.6);
  EXPECT_EQ(report.class_accuracy.size(), 10u);
  for (const EpochReport& e : report.epochs) EXPECT_TRUE(std::isfinite(e.train_loss));
  const Numbers sampled = run("fedavg:epochs=1,sample=0.25", "equal", 4, 16, 0.9, 8);
  EXPECT_EQ(sampled, run("fedavg:epochs=1,sample=0.25", "equal", 4, 16, 0.9, 8));
  EXPECT_GT(largest_gap(sampled, run("fedavg:epochs=1,sample=0.25", "equal", 4, 16, 0.9, 8, 2)), 1e-4);
}

// The second half of the workers is slow, and alone has classes 5 to 9.
TEST_F(SimulatedParts, AsynchronousStepsFavourTheClassesOfFastWorkers) {
  const auto of_slow_workers = [&](const std::string& strategy, bool slow) {
    slower = slow ? std::map<int, double>{{2, 8}, {3, 8}} : std::map<int, double>{};
    run(strategy, "groups:n=2", 12, 16, 0);
    EXPECT_FALSE(report.diverged);
    const auto at = report.class_accuracy.begin();
    return std::accumulate(at + 5, at + 10, 0.0) / 5 - std::accumulate(at, at + 5, 0.0) / 5;
  };
  EXPECT_LT(of_slow_workers("asgd", true), of_slow_workers("asgd", false) - 0.2);
  EXPECT_GT(of_slow_workers("rescaled", true), of_slow_workers("asgd", true) + 0.1);
}

// ---- ranks ----------------------------------------------------------------------------------------------------------
// Trained by fit(), each rank on its own part.
std::vector<Ended> on_parts(int ranks, const std::string& name, const std::string& partition, int epochs,
                            std::int64_t batch = 16, double momentum = 0.9) {
  const Dataset data = synthetic({.side = 8, .train = 640, .test = 200, .seed = 3});
  const MakeStrategy make = [&](auto c) {
    if (const auto how = Federated::parse(name)) return rounds({std::move(c)}, *how, {.deadline = 30});
    if (const auto how = RoundSteps::parse(name)) return rounds({std::move(c)}, *how, {.deadline = 30});
    return all_reduce(std::move(c), {.deadline = 30});
  };
  return on_ranks(ranks, make, [&](Strategy& strategy, Ended& ended) {
    const auto backend = cpu_backend(1);
    Loader train(data.train, {.batch = batch, .drop_last = true, .seed = 5, .partition = Partition::parse(partition)},
                 *backend);
    Loader test(data.test, {.batch = 100, .shuffle = false}, *backend);
    Plain net;
    SGD sgd({.learning_rate = 0.05, .momentum = momentum, .weight_decay = 5e-4});
    const FitReport report =
        fit(net, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, quiet(epochs), &strategy);
    ended.weights = parameter_values(net);
    if (!report.epochs.empty()) ended.loss = *report.epochs.back().test_loss;
    for (const EpochReport& e : report.epochs) ended.epochs.push_back({double(e.first), double(e.epoch)});
  });
}

TEST_F(SimulatedParts, TwoRanksAreTheSimulatorToTheBit) {
  for (const char* name : {"fedavg:epochs=2", "fedprox:epochs=2,mu=0.1", "scaffold:epochs=2", "fednova:epochs=2",
                           "fedavg:epochs=2,server=adam", "fedavg:epochs=1,sample=0.5"}) {
    const auto ranks = on_parts(2, name, "dirichlet:0.5", 4);
    same_bits(ranks);
    EXPECT_EQ(ranks[0].weights, run(name, "dirichlet:0.5", 4, 16, 0.9, 2)) << name;
  }
}

TEST(OwnParts, FedAvgOfOneStepARoundIsAllReduce) {
  const auto rounds = on_parts(4, "fedavg:epochs=1", "equal", 6, 160, 0);
  const auto steps = on_parts(4, "all-reduce", "equal", 6, 640, 0);
  same_bits(rounds);
  same_bits(steps);
  EXPECT_LT(furthest(rounds[0].weights, steps[0].weights), 2e-6);
  EXPECT_GT(furthest(rounds[0].weights, on_parts(4, "all-reduce", "equal", 5, 640, 0)[0].weights), 1e-4);
}

TEST(OwnParts, StepsTogetherAreWeightedWithThePictures) {
  const auto parts = on_parts(2, "all-reduce", "sizes:0.5", 5, 640, 0);
  const auto whole = on_parts(2, "all-reduce", "shared", 5, 640, 0);
  same_bits(parts);
  EXPECT_GT(furthest(parts[0].weights, whole[0].weights), 0);
  for (const char* name : {"local-sgd:2", "cocod-sgd:2", "easgd:2", "outer:H=2"})
    same_bits(on_parts(2, name, "sizes:0.5", 2));
}

}  // namespace
}  // namespace tandem::test
