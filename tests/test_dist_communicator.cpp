// Collectives on in-process ranks: results against sums in double, bit-identical on all ranks; a fault at every
// message.
#include <mutex>

#include "dist/collectives/in_process.h"
#include "dist/collectives/wire.h"
#include "tests/ranks.h"

namespace tandem::test {
namespace {

using Body = std::function<void(Communicator&)>;

// Runs body on every rank, in a thread each; what a rank threw, or "".
std::vector<std::string> on_ranks(int n, const InProcessOptions& options, const Body& body,
                                  std::vector<int>* culprits = nullptr) {
  auto ranks = in_process(n, options);
  if (culprits) culprits->assign(static_cast<std::size_t>(n), -2);
  return ranks_say(n, [&](int r) {
    auto mine = std::move(ranks[r]);  // at the end it leaves
    try {
      body(*mine);
    } catch (const CommunicationError& e) {
      if (culprits) (*culprits)[r] = e.rank;
      throw;
    }
  });
}
std::vector<std::string> on_ranks(int n, const Body& body) { return on_ranks(n, {}, body); }

template <class T>
std::vector<T> numbers_of(int rank, std::int64_t n) {
  return numbers_as<T>("rank " + std::to_string(rank), n);
}

ChoiceTable only(Algorithm reduce, Algorithm broadcast = Algorithm::tree) {
  return {{{~0ul, reduce}}, {{~0ul, broadcast}}};
}

const std::vector<int> sizes{2, 3, 4, 7, 8};
const std::vector<std::int64_t> counts{1, 2, 5, 64, 1000, 300000};

// One call of all_reduce on n ranks: right within the rounding of n − 1 additions, and the same bits everywhere.
template <class T>
void check_all_reduce(int n, std::int64_t count, const ChoiceTable& table, Combine combine, double unit) {
  SCOPED_TRACE(std::to_string(n) + " ranks, " + std::to_string(count) + " elements");
  std::vector<double> want(static_cast<std::size_t>(count), combine == Combine::sum ? 0 : -1e300), size = want;
  std::fill(size.begin(), size.end(), 0.0);
  for (int r = 0; r < n; r++) {
    auto x = numbers_of<T>(r, count);
    for (std::size_t i = 0; i < x.size(); i++) {
      want[i] = combine == Combine::sum ? want[i] + double(x[i]) : std::max(want[i], double(x[i]));
      size[i] += std::abs(double(x[i]));
    }
  }
  std::vector<std::vector<T>> result(static_cast<std::size_t>(n));
  all_well(on_ranks(n, {.table = table}, [&](Communicator& c) {
    auto& x = result[c.rank()] = numbers_of<T>(c.rank(), count);
    c.all_reduce(buffer(x), combine).wait();
    for (std::size_t i = 0; i < x.size(); i++)
      if (!(std::abs(double(x[i]) - want[i]) <= unit * size[i]))
        fail("element ", i, " is ", double(x[i]), " and should be ", want[i]);
  }));
  same_bits(result);
}

TEST(Communicator, AllReduceSums) {
  for (int n : sizes)
    for (std::int64_t count : counts) {
      for (Algorithm a : {Algorithm::doubling, Algorithm::halving, Algorithm::ring, Algorithm::direct}) {
        SCOPED_TRACE(name_of(a));
        check_all_reduce<float>(n, count, only(a), Combine::sum, 6e-8 * n);
        check_all_reduce<double>(n, count, only(a), Combine::sum, 1.2e-16 * n);
      }
      check_all_reduce<float>(n, count, {}, Combine::sum, 6e-8 * n);
    }
}

TEST(Communicator, LargestWins) {
  for (int n : sizes)
    for (Algorithm a : {Algorithm::doubling, Algorithm::halving, Algorithm::ring})
      check_all_reduce<float>(n, 1000, only(a), Combine::max, 0);
}

// One rounding to 8 bits by the owner (2^-8 at most), where a ring would make n − 1 of them.
TEST(Communicator, Bf16IsAddedInF32AndRoundedOnce) {
  for (int n : sizes) {
    check_all_reduce<bf16>(n, 20000, only(Algorithm::ring), Combine::sum, std::ldexp(1, -8) + 6e-8 * n);
    check_all_reduce<bf16>(n, 100, {}, Combine::sum, std::ldexp(1, -8) * (std::log2(n) + 2));
  }
}

TEST(Communicator, ANaNReachesEveryRank) {
  for (Combine combine : {Combine::sum, Combine::max})
    all_well(on_ranks(3, [&](Communicator& c) {
      std::vector<float> x{1, 2, 3};
      if (c.rank() == 1) x[2] = std::nanf("");
      c.all_reduce(buffer(x), combine).wait();
      require(x[0] == (combine == Combine::sum ? 3.f : 1.f) && std::isnan(x[2]), "got ", x[0], " and ", x[2]);
    }));
}

TEST(Communicator, ZerosOfBothSignsGiveTheSameMaximum) {
  std::vector<std::vector<float>> x{{-0.f, 0.f}, {0.f, -0.f}};
  all_well(on_ranks(2, [&](Communicator& c) { c.all_reduce(buffer(x[c.rank()]), Combine::max).wait(); }));
  same_bits(x);
}

TEST(Communicator, BroadcastFromEveryRoot) {
  for (int n : sizes)
    for (Algorithm a : {Algorithm::tree, Algorithm::scatter_gather})
      for (std::int64_t count : {std::int64_t(1), std::int64_t(5), std::int64_t(300000)})
        for (int root = 0; root < n; root++) {
          SCOPED_TRACE(std::string(name_of(a)) + ", " + std::to_string(n) + " ranks, root " + std::to_string(root));
          const auto want = numbers_of<float>(root, count);
          all_well(on_ranks(n, {.table = only(Algorithm::ring, a)}, [&](Communicator& c) {
            auto x = numbers_of<float>(c.rank(), count);
            c.broadcast(buffer(x), root).wait();
            require(x == want, "not what the root has");
          }));
        }
}

TEST(Communicator, ScatterAndGatherPieces) {
  for (int n : sizes)
    all_well(on_ranks(n, [](Communicator& c) {
      for (std::int64_t count : counts) exercise<double>(c, count);
    }));
}

TEST(Communicator, MessagesKeepTheirOrderWithinATag) {
  all_well(on_ranks(2, [&](Communicator& c) {
    std::vector<float> a{1}, b{2}, other{3};
    if (c.rank() == 0) {
      Work first = c.send(1, buffer(a)), second = c.send(1, buffer(b)), third = c.send(1, buffer(other), 7);
      first.wait(), second.wait(), third.wait();
    } else {
      std::vector<float> x(1), y(1), z(1);
      c.recv(0, buffer(z), 7).wait();
      c.recv(0, buffer(x)).wait();
      c.recv(0, buffer(y)).wait();
      require(x == a && y == b && z == other, "wrong order");
    }
  }));
}

TEST(Communicator, ManyAreUnderWayAtOnce) {
  all_well(on_ranks(4, [](Communicator& c) { many_at_once(c, 5000); }));
}

TEST(Communicator, RanksMayWaitInDifferentOrders) {
  all_well(on_ranks(4, {.deadline = 20}, [&](Communicator& c) {
    std::vector<float> x(200000, 1), y(1000, 1);
    Work a = c.all_reduce(buffer(x)), b = c.all_reduce(buffer(y));
    if (c.rank() % 2) std::swap(a, b);
    a.wait(), b.wait();
    require(x[5] == 4 && y[5] == 4, "sums ", x[5], " and ", y[5]);
  }));
}

TEST(Communicator, SplitsByColourAndKey) {
  all_well(on_ranks(7, [&](Communicator& c) {
    auto part = c.split(c.rank() % 2, -c.rank());
    require(part->size() == (c.rank() % 2 ? 3 : 4), "size ", part->size());
    require(part->rank() == (c.rank() % 2 ? (5 - c.rank()) / 2 : (6 - c.rank()) / 2), "rank ", part->rank());
    std::vector<float> x{float(c.rank())}, y{1};
    Work whole = c.all_reduce(buffer(y));  // at the same time
    part->all_reduce(buffer(x)).wait();
    whole.wait();
    require(x[0] == (c.rank() % 2 ? 9 : 12) && y[0] == 7, "sums ", x[0], " and ", y[0]);
    auto evens = c.split(c.rank() % 2 ? -1 : 0, 0);
    require(!evens == (c.rank() % 2 == 1), "no communicator for a negative colour");
    if (evens) evens->barrier().wait();
  }));
}

TEST(Communicator, OneRankHasNothingToDo) {
  exercise<float>(*alone(), 5);
  all_well(on_ranks(1, [](Communicator& one) {
    exercise<float>(one, 5);
    require(one.split(0, 0)->size() == 1, "a part of one is one");
  }));
}

TEST(Communicator, ABarrierWaitsForTheLast) {
  std::atomic<int> arrived{0};
  all_well(on_ranks(8, [&](Communicator& c) {  // so many that some neither hear from the last nor send to it
    if (c.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    arrived++;
    c.barrier().wait();
    require(arrived == 8, "went on after ", arrived.load());
  }));
}

// ---- what goes wrong ------------------------------------------------------------------------------------------------
// Every rank is told, with both calls in the text.
void disagree(std::initializer_list<std::string> parts, const Body& body) {
  const Body and_wait = [&](Communicator& c) {
    body(c);
    c.barrier().wait();  // whose part happened to be complete hears of it here
  };
  all_say(on_ranks(3, {.deadline = 20}, and_wait), parts);
}

TEST(Communicator, DisagreementIsNamed) {
  std::vector<std::vector<float>> x(3, std::vector<float>(10));
  auto mine = [&](Communicator& c) { return buffer(x[c.rank()]); };
  disagree({"rank 1", "broadcast #1 (10 f32 from rank 1)", "all_reduce #1 (sum of 10 f32)"}, [&](Communicator& c) {
    if (c.rank() == 1)
      c.broadcast(mine(c), 1).wait();
    else
      c.all_reduce(mine(c)).wait();
  });
  disagree({"rank 2", "sum of 9 f32", "sum of 10 f32"}, [&](Communicator& c) {
    Buffer b = mine(c);
    if (c.rank() == 2) b.count = 9;
    c.all_reduce(b).wait();
  });
  disagree({"from rank 0", "from rank 1"}, [&](Communicator& c) { c.broadcast(mine(c), c.rank() == 1).wait(); });
  disagree({"sum of", "maximum of"},
           [&](Communicator& c) { c.all_reduce(mine(c), c.rank() ? Combine::max : Combine::sum).wait(); });
  all_say(on_ranks(2,
                   [&](Communicator& c) {
                     Buffer b = mine(c);
                     if (c.rank() == 0) return c.send(1, b).wait();
                     b.count = 4;
                     c.recv(0, b).wait();
                   }),
          {"10 f32"});
}

TEST(Communicator, WhoLeavesIsNamed) {
  std::vector<int> culprits;
  const Body body = [](Communicator& c) {
    std::vector<float> x(100);
    if (c.rank() != 2) c.all_reduce(buffer(x)).wait();
  };
  const auto said = on_ranks(3, {.deadline = 20}, body, &culprits);
  EXPECT_TRUE(holds(said[0], {"rank 2, which has left"}));
  EXPECT_EQ(culprits[0], 2);
  EXPECT_EQ(culprits[1], 2);
}

// A rank gives up several chunks that it waits for, the last of them smaller, while its peer sends them.
TEST(Communicator, WhoGivesUpInTheMiddleIsNotTakenForADisagreement) {
  for (int attempt = 0; attempt < 300; attempt++) {
    const auto said = on_ranks(2, [](Communicator& c) {
      std::vector<float> x(100000);
      Work work = c.all_reduce(buffer(x));
      if (c.rank() == 1) throw CommunicationError(1, "gives up");
      work.wait();
    });
    EXPECT_EQ(said[0].find("calls all_reduce"), std::string::npos) << said[0];
  }
}

TEST(Communicator, AFailedOneStaysFailed) {
  on_ranks(2, {.deadline = 20}, [](Communicator& c) {
    std::vector<float> x(100);
    if (c.rank() == 1) return;
    for (int i = 0; i < 2; i++) EXPECT_THROW(c.all_reduce(buffer(x)).wait(), CommunicationError);
  });
}

// Who keeps the others waiting: the end of the chain, or across the gap in a circle.
TEST(Communicator, TheCulpritIsWhoWaitsForNobody) {
  EXPECT_EQ(culprit({{1, 5, false}, {2, 5, false}, {-1, 4, false}}, 0), 2);
  EXPECT_EQ(culprit({{1, 5, false}, {2, 5, true}, {-1, 4, false}}, 0), 1);
  EXPECT_EQ(culprit({{1, 6, false}, {2, 5, false}, {0, 7, false}}, 0), 2);  // 1 is two steps behind 2
  EXPECT_EQ(culprit({{1, 6, false}, {2, 5, false}, {1, 4, false}}, 0), 1);
}

// All the collectives that a training step uses, small and in several chunks.
void a_step(Communicator& c) {
  std::vector<float> small(7, 1), large(100000, 1);
  c.broadcast(buffer(small), 1).wait();
  Work first = c.all_reduce(buffer(large));
  c.all_reduce(buffer(small)).wait();
  first.wait();
  c.reduce_scatter(buffer(small)).wait();
  c.all_gather(buffer(small)).wait();
  c.barrier().wait();
}

struct FaultAt {
  int ranks;
  std::int64_t message;
};

// What was said wrongly when each of these messages is hit by a fault, each in a job of its own, all at the same time.
std::vector<std::string> wrong_names(const std::vector<FaultAt>& faults, Fault::Kind kind, double deadline) {
  std::vector<std::string> wrong;
  std::mutex mutex;
  all_well(ranks_say(int(faults.size()), [&](int i) {
    const FaultAt& at = faults[i];
    Outcome outcome;
    std::vector<int> culprits;
    const auto said =
        on_ranks(at.ranks, {.deadline = deadline, .fault = {kind, at.message}, .outcome = &outcome}, a_step, &culprits);
    const std::string where = std::to_string(at.ranks) + " ranks, message " + std::to_string(at.message);
    std::lock_guard lock(mutex);
    for (std::size_t r = 0; r < said.size(); r++)
      if (culprits[r] != -2 && culprits[r] != outcome.faulty)  // −2: ended well, or was killed
        wrong.push_back(where + ", rank " + std::to_string(r) + ", not " + std::to_string(outcome.faulty) + ": " +
                        said[r]);
    if (std::all_of(said.begin(), said.end(), [](const std::string& s) { return s.empty(); }))
      wrong.push_back(where + ": nobody noticed");
  }));
  return wrong;
}

// How long the same crowd of runs takes that no fault hits. On a busy machine a rank that waits for its turn to run
// looks like one that is gone, so that deadlines must be longer than this.
double seconds_of_a_calm_crowd(const std::vector<FaultAt>& faults) {
  const auto start = std::chrono::steady_clock::now();
  all_well(ranks_say(int(faults.size()), [&](int i) { all_well(on_ranks(faults[i].ranks, a_step)); }));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void fault_everywhere(Fault::Kind kind) {
  std::vector<FaultAt> faults;
  for (int n : {2, 3, 4}) {
    Outcome calm;
    all_well(on_ranks(n, {.outcome = &calm}, a_step));
    ASSERT_GT(calm.messages, 0);
    for (std::int64_t message = 0; message < calm.messages; message++) faults.push_back({n, message});
  }
  double deadline = kind == Fault::Kind::killed ? 60 : std::max(4.0, 3 * seconds_of_a_calm_crowd(faults));
  for (int attempt = 1;; attempt++, deadline *= 2) {
    const std::vector<std::string> wrong = wrong_names(faults, kind, deadline);
    const bool again = !wrong.empty() && kind != Fault::Kind::killed && attempt < 3;  // was the time too short?
    for (const std::string& w : wrong)
      if (again)
        std::printf("  with %.1f s: %s\n", deadline, w.c_str());
      else
        ADD_FAILURE() << w;
    if (!again) break;
  }
}
TEST(Communicator, AKilledRankIsNamedAtEveryMessage) { fault_everywhere(Fault::Kind::killed); }
TEST(Communicator, AStoppedRankIsNamedAtEveryMessage) { fault_everywhere(Fault::Kind::stopped); }
TEST(Communicator, ALostMessageNamesItsSender) { fault_everywhere(Fault::Kind::lost); }

// Between two looks of rank 0, rank 1 leaves, rank 2 notices, tells it, and leaves too: it is not rank 2 that is to
// blame; nor when rank 0 looks because it has waited for too long.
TEST(Communicator, WhoLeavesBecauseOfAFailureIsNotBlamed) {
  struct Between : Wire {
    mutable bool seen = false;
    int rank() const override { return 0; }
    int size() const override { return 3; }
    std::string where(int r) const override { return "rank " + std::to_string(r); }
    struct Never : Request {
      bool done() override { return false; }
    };
    std::unique_ptr<Request> send(int, const Header&, const void*, std::size_t) override {
      return std::make_unique<Never>();
    }
    std::unique_ptr<Request> recv(int, const Header&, void*, std::size_t) override { return std::make_unique<Never>(); }
    void progress() override {
      if (seen) throw CommunicationError(1, "rank 2 needs rank 1, which has left");
    }
    void rest(int) override {}
    void wake() override {}
    std::uint64_t bytes_sent() const override { return 0; }
    std::string transport() const override { return "nothing"; }
    void report_wait(const WaitForEdge&) override {}
    bool left(int r) const override {
      if (r == 2) seen = true;
      return r == 2;
    }
    int last_in_line(int) override {
      left(2);
      return 2;
    }
    void fail(int, const std::string&) override {}
    std::vector<int> survivors() override { return {}; }
  };
  const std::function<void(Communicator&)> looks[] = {[](Communicator& c) { c.group()->check(); },
                                                      [](Communicator& c) { c.barrier().wait(); }};
  for (const auto& look : looks) {
    auto c = over_messages(std::make_shared<Between>(), 0.01, {});
    try {
      look(*c);
      FAIL() << "it does not throw";
    } catch (const CommunicationError& e) {
      EXPECT_EQ(e.rank, 1) << e.what();
    }
  }
}

// Random collectives one after the other: nothing hangs and every result is right.
TEST(Communicator, RandomPrograms) {
  for (std::uint32_t seed = 0; seed < 40; seed++) {
    const int n = 2 + int(seed % 7);
    all_well(on_ranks(n, [&](Communicator& c) {
      std::uint32_t state = seed * 2654435761u + 1;  // the same on every rank
      auto draw = [&](std::uint32_t below) { return (state = state * 1664525u + 1013904223u) / 65536 % below; };
      for (int i = 0; i < 8; i++) {
        std::vector<double> x(1 + draw(3000), double(c.rank()));
        switch (draw(4)) {
          case 0:
            c.all_reduce(buffer(x)).wait();
            require(x.back() == n * (n - 1) / 2.0, "sum ", x.back());
            break;
          case 1: {
            const int root = int(draw(std::uint32_t(n)));
            c.broadcast(buffer(x), root).wait();
            require(x.back() == root, "broadcast ", x.back());
            break;
          }
          case 2:
            c.all_gather(buffer(x)).wait();
            require(x.back() == n - 1, "gather ", x.back());
            break;
          default: c.barrier().wait();
        }
      }
    }));
  }
}

}  // namespace
}  // namespace tandem::test
