// Collectives on memory of devices through the host, on twins that run behind the host's back: in chunks of odd sizes,
// against the sums themselves.
#include "dist/collectives/in_process.h"
#include "dist/collectives/staged.h"
#include "tests/device_collectives.h"

namespace tandem::test {
namespace {

using Body = std::function<void(Communicator&, Twin&)>;

std::vector<std::string> on_ranks(int n, std::size_t chunk_bytes, const InProcessOptions& wire, double deadline,
                                  const Body& body) {
  auto ranks = in_process(n, wire);
  return ranks_say(n, [&](int r) {
    AsynchronousTwin twin;
    auto mine = staged(std::move(ranks[r]), twin, {.chunk_bytes = chunk_bytes, .chunks = 3, .deadline = deadline});
    body(*mine, twin);
  });
}
std::vector<std::string> on_ranks(int n, std::size_t chunk_bytes, const Body& body) {
  return on_ranks(n, chunk_bytes, {.deadline = 20}, 20, body);
}

TEST(Staged, EveryCollectiveInChunksOfAnySize) {
  for (std::size_t chunk_bytes : {16, 40, 424})
    every_collective([=](int n, const Body& body) { return on_ranks(n, chunk_bytes, body); });
}

TEST(Staged, ManyAreUnderWayAtOnceAndBarriersKeepTheirPlace) {
  all_well(on_ranks(3, 100, [](Communicator& c, Twin&) {
    many_at_once(c, 100);  // the twin's memory is the host's, too
    std::vector<float> x(1000, 1);
    Work sum = c.all_reduce(buffer(x)), all = c.barrier();
    all.wait();
    sum.wait();
    require(x[999] == 3, "after the barrier: ", x[999]);
  }));
}

TEST(Staged, DisagreementIsNamed) {
  expect_disagreement_named(on_ranks(2, 400, [](Communicator& c, Twin&) { disagree(c); }));
}

TEST(Staged, ARankThatDiesIsNamedAtEveryMessage) {
  for (std::int64_t at : {0, 1, 5, 11, 30}) {
    Outcome outcome;
    const InProcessOptions wire{.deadline = 20, .fault = {Fault::Kind::killed, at}, .outcome = &outcome};
    const auto said = on_ranks(3, 40, wire, 20, [](Communicator& c, Twin& twin) {
      Tensor x = on(twin, of_rank(c.rank(), 101));
      for (int i = 0; i < 3; i++) c.all_reduce(whole(x)).wait();
    });
    ASSERT_GE(outcome.faulty, 0) << "no message " << at;
    all_say(said, {"rank " + std::to_string(outcome.faulty)});
  }
}

TEST(Staged, ACopyThatNeverEndsIsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  const auto said = on_ranks(2, 40, {.deadline = 20}, 1, [](Communicator& c, Twin& twin) {
    Tensor x = on(twin, of_rank(c.rank(), 101));
    twin.stuck = c.rank() == 1;
    Work sum = c.all_reduce(whole(x));
    try {
      sum.wait();
    } catch (...) {
      twin.stuck = false;  // so that the rank can go
      throw;
    }
  });
  all_say(said, {"rank 1: a copy between device and host has not ended"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace tandem::test
