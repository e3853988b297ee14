// Collectives on memory of devices through the host, on twins that run behind the host's back: in chunks of odd sizes, against
// the sums themselves.
#include <gtest/gtest.h>

#include <chrono>

#include "dist/in_process.h"
#include "dist/staged.h"
#include "tests/ranks.h"
#include "tests/support.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

using Body = std::function<void(Communicator&, Twin&)>;

std::vector<std::string> on_ranks(int n, std::size_t chunk_bytes, const Body& body,
                                  const InProcessOptions& wire = {.deadline = 20}, double deadline = 20) {
  auto ranks = in_process(n, wire);
  return ranks_say(n, [&](int r) {
    Twin twin;
    twin.behind = true;
    auto mine = staged(std::move(ranks[std::size_t(r)]), twin,
                       {.chunk_bytes = chunk_bytes, .chunks = 3, .deadline = deadline});
    body(*mine, twin);
  });
}

// Whole numbers: every order of adding gives the same.
std::vector<double> of_rank(int r, std::int64_t count) {
  return numbers("rank " + std::to_string(r), count, -100, 100, 1);
}
std::vector<double> over(int n, std::int64_t count, bool sum) {
  std::vector<double> all = of_rank(0, count);
  for (int r = 1; r < n; r++)
    for (std::size_t i = 0; const double v : of_rank(r, count)) {
      all[i] = sum ? all[i] + v : std::max(all[i], v);
      i++;
    }
  return all;
}
Buffer whole(Tensor& t) { return {t.raw_write(), t.elements(), t.dtype()}; }

// The device has it: what is queued behind the host's back is done.
Tensor on(Twin& twin, const std::vector<double>& v, DType dtype = DType::f32) {
  Tensor t = Tensor::of(twin, {std::int64_t(v.size())}, v, dtype);
  twin.synchronize();
  return t;
}
// As queues beside its own see it.
std::vector<double> beside(Twin& twin, const Tensor& t) {
  std::vector<float> v(std::size_t(t.elements()));
  twin.read(v.data(), t.raw(), t.bytes());
  return {v.begin(), v.end()};
}

void expect(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  require(got == want, what, " gave other numbers");
}

TEST(Staged, SumsAndMaximaOfAnySize) {
  for (int n : {2, 3, 4})
    for (std::int64_t count : {1, 3, 7, 1000, 4099})
      all_well(on_ranks(n, 424, [&](Communicator& c, Twin& twin) {
        Tensor sum = on(twin, of_rank(c.rank(), count)), most = on(twin, of_rank(c.rank(), count));
        Work a = c.all_reduce(whole(sum)), b = c.all_reduce(whole(most), Combine::max);
        b.wait();
        a.wait();
        expect(sum.values(), over(n, count, true), "the sum");
        expect(beside(twin, sum), over(n, count, true), "the sum");
        expect(most.values(), over(n, count, false), "the maximum");
      }));
}

TEST(Staged, PiecesAndCopiesOfThem) {
  for (int n : {2, 3, 4})
    all_well(on_ranks(n, 40, [&](Communicator& c, Twin& twin) {
      const std::int64_t count = 101;
      for (const Cuts& cuts : {Cuts{}, n == 2 ? Cuts{0, 0, 101} : n == 3 ? Cuts{0, 3, 90, 101} : Cuts{0, 50, 50, 51, 101}}) {
        const Cuts at = cuts.empty() ? even_cuts(count, n) : cuts;
        Tensor x = on(twin, of_rank(c.rank(), count));
        c.reduce_scatter(whole(x), Combine::sum, cuts).wait();
        const auto mine = x.values(), want = over(n, count, true);
        for (std::int64_t i = at[std::size_t(c.rank())]; i < at[std::size_t(c.rank()) + 1]; i++)
          require(mine[std::size_t(i)] == want[std::size_t(i)], "element ", i, " of the scattered sum");
        c.all_gather(whole(x), cuts).wait();
        expect(x.values(), want, "what was gathered");
      }
      for (int root = 0; root < n; root++) {
        Tensor x = on(twin, of_rank(c.rank(), count));
        c.broadcast(whole(x), root).wait();
        expect(x.values(), of_rank(root, count), "the broadcast");
      }
      c.barrier().wait();
      auto half = c.split(c.rank() % 2, 0);
      Tensor x = on(twin, {double(c.rank())});
      half->all_reduce(whole(x)).wait();
      require(x.item() == (c.rank() % 2 ? (n == 4 ? 4 : 1) : n > 2 ? 2 : 0), "the half gave ", x.item());
    }));
}

TEST(Staged, LongMessagesBothWaysAtOnce) {
  for (int n : {2, 3})
    all_well(on_ranks(n, 16, [&](Communicator& c, Twin& twin) {
      const int to = (c.rank() + 1) % n, from = (c.rank() + n - 1) % n;
      Tensor out = on(twin, of_rank(c.rank(), 97)), in = on(twin, std::vector<double>(97));
      Work sent = c.send(to, whole(out)), got = c.recv(from, whole(in));
      sent.wait();  // is complete when it was received
      got.wait();
      expect(in.values(), of_rank(from, 97), "the message");
    }));
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
    const auto said = on_ranks(3, 40, [](Communicator& c, Twin& twin) {
      Tensor x = on(twin, of_rank(c.rank(), 101));
      for (int i = 0; i < 3; i++) c.all_reduce(whole(x)).wait();
    }, {.deadline = 20, .fault = {Fault::Kind::killed, at}, .outcome = &outcome});
    ASSERT_GE(outcome.faulty, 0) << "no message " << at;
    for (std::size_t r = 0; r < said.size(); r++)
      EXPECT_NE(said[r].find("rank " + std::to_string(outcome.faulty)), std::string::npos) << said[r];
  }
}

TEST(Staged, ACopyThatNeverEndsIsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  const auto said = on_ranks(2, 40, [](Communicator& c, Twin& twin) {
    Tensor x = on(twin, of_rank(c.rank(), 101));
    twin.stuck = c.rank() == 1;
    Work sum = c.all_reduce(whole(x));
    try {
      sum.wait();
    } catch (...) {
      twin.stuck = false;  // so that the rank can go
      throw;
    }
  }, {.deadline = 20}, 1);
  for (const auto& s : said) EXPECT_NE(s.find("rank 1: a copy between device and host has not ended"), std::string::npos) << s;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace tandem::test
