// NCCL over in-process ranks, with a libnccl of our own (fake_nccl.h): sums, order, and every way in which it can go
// wrong.
#include "dist/collectives/in_process.h"
#include "dist/collectives/nccl.h"
#include "dist/collectives/on_devices.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/hybrid.h"
#include "tests/device_collectives.h"
#include "tests/fake_nccl.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

using Body = std::function<void(Communicator&, Twin&)>;

// A deadline that is not reached in tests that do not ask for it.
std::vector<std::string> on_ranks(int n, const Body& body,
                                  const NcclOptions& options = {.deadline = 30, .patience = 0.1}) {
  auto ranks = in_process(n, {.deadline = 30});
  return ranks_say(n, [&](int r) {
    std::shared_ptr<Communicator> host = std::move(ranks[r]);
    AsynchronousTwin twin;
    auto mine = over_nccl(std::move(host), twin, options);
    body(*mine, twin);
  });
}

// What goes wrong on that rank, after so many calls.
void fails(int rank, ncclResult_t error, int after = 0) {
  fake_nccl::trouble.rank = rank;
  fake_nccl::trouble.error = error;
  fake_nccl::trouble.after = after;
}

// Calm before; and afterwards every communicator that was started was aborted, once.
struct Nccl : testing::Test {
  Nccl() { fake_nccl::calm(); }
  ~Nccl() override {
    EXPECT_EQ(fake_nccl::trouble.started, fake_nccl::trouble.aborted);
    fake_nccl::calm();
  }
};

TEST_F(Nccl, EveryCollective) {
  every_collective([](int n, const Body& body) { return on_ranks(n, body); });
}

TEST_F(Nccl, ManyAreUnderWayAtOnce) {
  all_well(on_ranks(3, [](Communicator& c, Twin&) { many_at_once(c, 100); }));
}

TEST_F(Nccl, DifferentCallsAreNamed) {
  const auto said = on_ranks(3, [](Communicator& c, Twin&) { disagree(c); });
  expect_disagreement_named(said);
  all_say(said, {"rank 1 calls all_reduce #1 (sum of 9 f32) where rank 0"});
}

TEST_F(Nccl, ARankThatDoesNotCallIsNamed) {
  const auto said = on_ranks(3, [](Communicator& c, Twin& twin) {
    if (c.rank() == 1) fail("rank 1 is gone");
    sums_and_maxima(c, twin, 100);
  });
  for (int r : {0, 2}) EXPECT_TRUE(holds(said[r], {"rank 1, which has left"}));
}

// All have agreed on the call, but one dies before its device has done anything: NCCL does not notice.
TEST_F(Nccl, ARankThatDiesInsideACallIsNamed) {
  const auto said = on_ranks(3, [](Communicator& c, Twin& twin) {
    twin.stuck = c.rank() == 1;
    Tensor x = Tensor::zeros(twin, {100});
    Work sum = c.all_reduce(whole(x));
    const auto begin = std::chrono::steady_clock::now();
    while (!sum.done())
      if (c.rank() == 1 && std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(300))
        fail("rank 1 is gone");
  });
  for (int r : {0, 2}) EXPECT_TRUE(holds(said[r], {"rank 1, which has left"}));
}

TEST_F(Nccl, AnErrorOfTheLibraryIsToldToAllRanks) {
  fails(2, ncclSystemError, 1);
  const auto said = on_ranks(3, [](Communicator& c, Twin& twin) {
    for (int i = 0; i < 10; i++) {
      Tensor x = on(twin, of_rank(c.rank(), 100));
      c.all_reduce(whole(x)).wait();
    }
  });
  all_say(said, {"all_reduce #2 (sum of 100 f32) over NCCL: rank 2: unhandled system error",
                 "the fake's last words (NCCL_DEBUG=INFO tells more)"});
}

TEST_F(Nccl, AFailedOneStaysFailed) {
  fails(0, ncclInternalError);
  const auto said = on_ranks(2, [](Communicator& c, Twin& twin) {
    Tensor x = on(twin, of_rank(c.rank(), 100));
    const std::string first = error_of<CommunicationError>([&] { c.all_reduce(whole(x)).wait(); });
    const std::string again = error_of<CommunicationError>([&] { c.all_reduce(whole(x)).wait(); });
    require(first == again, "first: ", first, ", then: ", again);
    throw Error(again);
  });
  all_say(said, {"rank 0: an error"});
}

TEST_F(Nccl, NoWaitIsWithoutADeadline) {
  fake_nccl::trouble.silent = true;
  const auto begin = std::chrono::steady_clock::now();
  const Body body = [](Communicator& c, Twin& twin) {
    Tensor x = on(twin, of_rank(c.rank(), 100));
    c.all_reduce(whole(x)).wait();
  };
  const auto said = on_ranks(3, body, {.deadline = 1, .patience = 0.1});
  all_say(said, {"all_reduce #1 (sum of 100 f32) over NCCL: rank"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST_F(Nccl, AStartThatFailsOnOneRankFailsOnAll) {
  fails(1, ncclSystemError);
  fake_nccl::trouble.at_start = true;
  all_say(on_ranks(3, [](Communicator&, Twin&) {}),
          {"ncclCommInitRankConfig over NCCL: rank 1: unhandled system error"});
}

TEST_F(Nccl, GivenUpWorksLeaveTheRestInOrder) {
  all_well(on_ranks(2, [](Communicator& c, Twin& twin) {
    Tensor x = on(twin, of_rank(c.rank(), 100)), y = on(twin, of_rank(c.rank(), 100));
    { Work given_up = c.all_reduce(whole(x)); }
    c.all_reduce(whole(y)).wait();
    expect(y.values(), over(2, 100, true), "the second");
    expect(x.values(), over(2, 100, true), "the first, which the device has had all the same");
  }));
}

// ---- which way ------------------------------------------------------------------------------------------------------
struct Chosen {
  std::string transport, said;
};
Chosen choose_on(std::vector<std::string> devices, std::vector<int> versions) {
  auto ranks = in_process(int(devices.size()), {.deadline = 30});
  Chosen chosen;
  chosen.said = stderr_of([&] {
    all_well(ranks_say(int(devices.size()), [&](int r) {
      const auto i = std::size_t(r);
      std::shared_ptr<Communicator> host = std::move(ranks[i]);
      AsynchronousTwin twin;
      twin.uuid = devices[i];
      fake_nccl::version = versions[i];
      auto mine = on_devices(host, twin, 30);
      sums_and_maxima(*mine, twin, 100);
      if (r == 0) chosen.transport = mine->traffic().transport;
    }));
  });
  return chosen;
}

TEST_F(Nccl, JoinsRanksWithAGpuEach) {
  const Chosen c = choose_on({"a", "b", "c"}, {22809, 22809, 22809});
  EXPECT_EQ(c.transport, "NCCL 2.28.9");
  EXPECT_EQ(c.said, "");
}

TEST_F(Nccl, OtherwiseTheHostsMemoryIsUsedAndTheReasonSaid) {
  struct Case {
    std::vector<std::string> devices;
    std::vector<int> versions;
    const char* why;
  };
  for (const Case& k : {Case{{"a", "b", "a"}, {22809, 22809, 22809}, "rank 0 and rank 2 share a GPU"},
                        Case{{"a", ""}, {22809, 22809}, "rank 1 has no GPU"},
                        Case{{"a", "b"}, {22809, 0}, "rank 1: its build has no NCCL"},
                        Case{{"a", "b"}, {22809, 22703}, "rank 0 has NCCL 22809, rank 1 22703"}}) {
    const Chosen c = choose_on(k.devices, k.versions);
    EXPECT_TRUE(holds(c.transport, {"pinned memory"}));
    EXPECT_TRUE(holds(c.said, {k.why}));
    EXPECT_EQ(std::count(c.said.begin(), c.said.end(), '\n'), 1) << "one line";
  }
}

// ---- training -------------------------------------------------------------------------------------------------------
struct Trained {
  std::vector<double> losses, weights, logits, correct;
  std::size_t bytes = 0;  // read on the host by the last step
  double sent = 0;        // without the gradients
};
// Two ranks, with `rows` rows each. cut: the last layer is cut over them.
std::vector<Trained> trained(bool device, bool cut, std::int64_t rows, const PlainSizes& sizes) {
  auto ranks = in_process(2, {.deadline = 30}), layers = in_process(2, {.deadline = 30});
  std::vector<Trained> all(2);
  all_well(ranks_say(2, [&](int r) {
    Twin twin;
    twin.behind = device;
    twin.uuid = r == 0 ? "a" : "b";
    AllReduceOptions options{.bucket_bytes = 4096, .deadline = 30};
    if (cut) options.classifier = std::make_shared<SlicedClassifier>(std::move(layers[r]));
    auto strategy = all_reduce(std::move(ranks[r]), options);
    Plain model(sizes);
    const Task task = prepared(*strategy, model, 0.1);
    FlatParameters flat(model, twin, 1);
    BoundSgd sgd(flat, {.learning_rate = 0.1, .momentum = 0.9});
    strategy->begin(flat, sgd);
    const std::int64_t features = sizes.features;
    Tensor x, correct = Tensor::zeros(twin, {1}, DType::i32);
    const Tensor y = Tensor::full(twin, {rows}, double(sizes.classes - 2), DType::i32);
    Trained& mine = all[r];
    for (int step = 0; step < 5; step++) {
      x = Tensor::of(twin, {rows, features}, numbers("x" + std::to_string(r + 2 * step), rows * features));
      twin.bytes_to_host = 0;
      const Variable loss = task.loss(model(Variable(x)), y, &correct);
      flat.zero_gradients();
      flat.backward(loss, 0.5);
      sgd.sync_hyperparameters();
      strategy->step(sgd, loss);
      mine.bytes = twin.bytes_to_host;
      mine.losses.push_back(loss.item());
    }
    model.eval();
    mine.logits = model(Variable(x)).value().values();
    mine.weights = flat.values.values();
    mine.correct = correct.values();
    for (const auto& [name, value] : strategy->end())
      if (name == "sent_bytes") mine.sent = value - 5 * double(flat.gradients.bytes());
  }));
  return all;
}

TEST_F(Nccl, TrainingOverItGivesTheBitsOfTheHost) {
  for (bool cut : {false, true}) {
    const PlainSizes sizes{.features = 16, .hidden = 100};
    const auto host = trained(false, cut, 4, sizes), device = trained(true, cut, 4, sizes);
    for (std::size_t r = 0; r < 2; r++) {
      EXPECT_EQ(device[r].losses, host[r].losses) << cut;
      EXPECT_EQ(device[r].weights, host[r].weights) << cut;
      EXPECT_EQ(device[r].logits, host[r].logits) << cut;
      EXPECT_EQ(device[r].correct, host[r].correct) << cut;
      EXPECT_TRUE(cut || device[r].sent > 0) << "the gradients, and a little on the host";
    }
    EXPECT_TRUE(cut || device[0].weights == device[1].weights);
  }
  EXPECT_EQ(fake_nccl::trouble.started, 6);
}

// Features, labels, logits and their gradients go from device to device: a step reads the same few bytes on the host,
// however many rows, features and classes there are.
TEST_F(Nccl, ACutLayerStaysOnTheDevices) {
  const auto few = trained(true, true, 4, {.features = 16, .hidden = 32, .classes = 10}),
             many = trained(true, true, 24, {.features = 32, .hidden = 96, .classes = 50});
  for (std::size_t r = 0; r < 2; r++) {
    EXPECT_EQ(few[r].bytes, many[r].bytes);
    EXPECT_LT(few[r].bytes, 100u);
  }
}

}  // namespace
}  // namespace tandem::test
