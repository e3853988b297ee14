// Rendezvous, liveness and UCX: ranks of one process that meet over real sockets.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <thread>

#include "dist/control.h"
#include "dist/node.h"
#include "dist/rendezvous.h"
#include "dist/start.h"
#include "dist/ucx.h"
#include "tests/channel_server.h"
#include "tests/ranks.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

using Set = std::map<std::string, std::string>;
Variables variables(const Set& set) {
  return [set](const char* name) -> const char* {
    auto v = set.find(name);
    return v == set.end() ? nullptr : v->second.c_str();
  };
}

std::atomic<int> jobs{0};
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof a;
  require(bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0, "no port");
  getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length);
  ::close(fd);
  return ntohs(a.sin_port);
}

// Ranks that meet by a file (no port), or on a port with a token.
struct Meeting {
  int ranks;
  Set set;
  int port = 0;
  double start = 20;
  std::string job = "test " + std::to_string(getpid()) + " " + std::to_string(jobs++);
  Place place(int rank) const {
    return {.family = "test",
            .rank = rank,
            .size = ranks,
            .local_rank = rank,
            .local_size = port ? -1 : ranks,
            .master = "127.0.0.1",
            .port = port,
            .job = job};
  }
  Deadlines deadlines() const { return {.start = start, .silence = 3, .wait = 10}; }
  // What each rank threw, or "".
  template <class Body>
  std::vector<std::string> run(const Body& body) const {
    return ranks_say(ranks, body);
  }
};

void exchanges(Rendezvous& r) {
  for (int round = 0; round < 3; round++) {
    const auto all =
        r.exchange("from " + std::to_string(r.place().rank) + std::string(std::size_t(round) * 100000, 'x'));
    for (int k = 0; k < r.place().size; k++)
      require(all[std::size_t(k)].starts_with("from " + std::to_string(k)), "rank ", k, " said ",
              all[std::size_t(k)].substr(0, 20));
  }
}

TEST(Rendezvous, RanksOfAHostMeetWithoutBeingTold) {
  for (int n : {2, 5}) {
    Meeting m{.ranks = n, .set = {}};
    all_well(m.run([&](int rank) {
      Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
      exchanges(r);
    }));
  }
}

TEST(Rendezvous, RanksOfSeveralHostsMeetByToken) {
  Meeting m{.ranks = 3, .set = {{"TANDEM_TOKEN", "0123456789abcdef0123"}}, .port = free_port()};
  all_well(m.run([&](int rank) {
    if (rank == 0) usleep(300000);  // the others come first
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
    exchanges(r);
  }));
}

TEST(Rendezvous, WhatIsMissingIsSaid) {
  Place p{.family = "torchrun", .rank = 1, .size = 4, .local_size = 2, .job = "x"};
  EXPECT_TRUE(
      refused([&] { Rendezvous r(p, {.start = 1}, variables({})); },
              {"several hosts (torchrun, 4 ranks, 2 here)", "MASTER_ADDR", "TANDEM_TOKEN=$(openssl rand -hex 32)"}));
  p.master = "localhost", p.local_size = 4;
  EXPECT_TRUE(refused(
      [&] {
        Rendezvous r(p, {.start = 1}, variables({{"TANDEM_TOKEN", "short"}}));
      },
      {"shorter than 16"}));
  // Ranks that do not come are listed, with the hosts on which they should have been; those that came hear it too.
  Meeting m{.ranks = 5, .set = {{"TANDEM_HOSTS", "a:2,b:3"}}, .start = 0.6};
  const auto said = m.run([&](int rank) {
    if (rank == 2 || rank == 3) return;
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
  });
  EXPECT_NE(said[0].find("after 0.6 s these ranks are missing: 2 on b, 3 on b (here: 0, 1 from 127.0.0.1, 4 from"),
            std::string::npos)
      << said[0];
  EXPECT_NE(said[1].find("missing: 2 on b, 3 on b"), std::string::npos) << said[1];
  // Nobody there at all.
  Meeting lonely{.ranks = 2, .set = {{"TANDEM_TOKEN", "0123456789abcdef0123"}}, .port = free_port(), .start = 0.5};
  EXPECT_TRUE(refused([&] { Rendezvous r(lonely.place(1), lonely.deadlines(), variables(lonely.set)); },
                      {"rank 1 does not find rank 0", "Connection refused"}));
}

TEST(Rendezvous, DifferentJobsAndDoublesAreNamed) {
  Meeting m{.ranks = 2, .set = {{"TANDEM_TOKEN", "0123456789abcdef0123"}}, .port = free_port(), .start = 5};
  auto said = m.run([&](int rank) {
    Place p = m.place(rank);
    if (rank == 1) p.size = 3;
    Rendezvous r(p, m.deadlines(), variables(m.set));
  });
  for (const auto& s : said)
    EXPECT_NE(s.find("rank 1 was started as one of 3 ranks, and rank 0 as one of 2"), std::string::npos) << s;
  Meeting twice{.ranks = 3, .set = {{"TANDEM_TOKEN", "0123456789abcdef0123"}}, .port = free_port(), .start = 5};
  said = twice.run(
      [&](int rank) { Rendezvous r(twice.place(rank == 2 ? 1 : rank), twice.deadlines(), variables(twice.set)); });
  EXPECT_NE(said[0].find("rank 1 has come twice"), std::string::npos) << said[0];
}

// ---- those who do not belong ---------------------------------------------------------------------------------------------
int visit(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(std::uint16_t(port));
  if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0) return fd;
  ::close(fd);
  return -1;
}

TEST(Rendezvous, StrangersKeepNobodyWaitingAndDoNotGetIn) {
  Meeting m{.ranks = 3, .set = {{"TANDEM_TOKEN", "0123456789abcdef0123"}}, .port = free_port(), .start = 60};
  std::atomic<bool> end{false};
  std::atomic<int> visits{0}, let_in{0};
  std::string overheard(112, 'x');  // what a rank said to another rank 0: worth nothing here
  std::vector<std::thread> strangers;
  for (int k = 0; k < 4; k++)
    strangers.emplace_back([&, k] {
      std::vector<int> half_open;
      for (int i = 0; !end; i++) {
        const int fd = visit(m.port);
        if (fd < 0) {
          usleep(1000);
          continue;
        }
        visits++;
        if (i % 4 == 0) {
          half_open.push_back(fd);  // says nothing, and stays
          if (half_open.size() > 50) ::close(half_open.front()), half_open.erase(half_open.begin());
          continue;
        }
        std::string said(std::size_t(1 + i * 37 % 200), char(i));
        if (i % 4 == 2) said = std::string("TANDEM\0\1", 8) + std::string(72, char(i));
        if (i % 4 == 3) said = std::string("TANDEM\0\1\1\0\0\0\3\0\0\0", 16) + overheard.substr(0, 64);
        (void)!::send(fd, said.data(), said.size(), MSG_NOSIGNAL);
        if (k == 0) {
          char answer[256];
          timeval t{0, 200000};
          setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
          ssize_t n, all = 0;
          while ((n = recv(fd, answer, sizeof answer, 0)) > 0) all += n;
          if (all > 40) let_in++;  // more than the greeting
        }
        ::close(fd);
      }
      for (int fd : half_open) ::close(fd);
    });
  const auto said = m.run([&](int rank) {
    if (rank != 0) {
      while (visits < 2000) usleep(10000);
      usleep(useconds_t(rank) * 100000);
    }
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
    exchanges(r);
  });
  end = true;
  for (auto& t : strangers) t.join();
  all_well(said);
  EXPECT_EQ(let_in, 0);
}

TEST(Rendezvous, WhoHasAnotherTokenDoesNotGetIn) {
  Meeting m{.ranks = 2, .set = {}, .port = free_port(), .start = 1.5};
  const auto said = m.run([&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(),
                 variables({{"TANDEM_TOKEN", rank ? "aaaaaaaaaaaaaaaaaaaa" : "bbbbbbbbbbbbbbbbbbbb"}}));
  });
  EXPECT_NE(said[0].find("missing: 1"), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("is TANDEM_TOKEN the same"), std::string::npos) << said[1];
}

// ---- liveness ------------------------------------------------------------------------------------------------------------
std::vector<std::string> names(int n) {
  std::vector<std::string> all;
  for (int r = 0; r < n; r++) all.push_back("rank " + std::to_string(r) + " on here");
  return all;
}

std::string failure_of(const Control& c, double seconds) {
  for (int i = 0; i < seconds * 100; i++) {
    try {
      c.check();
    } catch (const CommunicationError& e) {
      return e.what();
    }
    usleep(10000);
  }
  return "";
}

TEST(Control, AFailureReachesEveryRank) {
  Meeting m{.ranks = 4, .set = {}};
  const auto said = m.run([&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables({}));
    Control c(r, names(4), m.deadlines());
    if (rank == 2) c.fail(1, "rank 1 on here has done it");
    throw Error(failure_of(c, 5));
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 1 on here has done it");
}

TEST(Control, AClosedConnectionIsADeath) {
  for (int dead : {0, 2}) {
    Meeting m{.ranks = 3, .set = {}};
    const auto said = m.run([&](int rank) {
      Rendezvous r(m.place(rank), m.deadlines(), variables({}));
      if (rank == dead) {
        r.exchange("");
        return;  // without a good-bye
      }
      r.exchange("");
      Control c(r, names(3), m.deadlines());
      throw Error(failure_of(c, 5));
    });
    for (int r = 0; r < 3; r++) {
      if (r == dead) continue;
      EXPECT_NE(said[std::size_t(r)].find("rank " + std::to_string(dead) + " on here has died"), std::string::npos)
          << said[std::size_t(r)];
    }
  }
}

TEST(Control, SilenceIsADeath) {
  Meeting m{.ranks = 3, .set = {}};
  const auto said = m.run([&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables({}));
    if (rank == 1) {
      sleep(3);
      return;
    }
    Control c(r, names(3), {.start = 5, .silence = 1.2, .wait = 10});
    throw Error(failure_of(c, 5));
  });
  EXPECT_NE(said[0].find("rank 1 on here has said nothing for 1.2 s"), std::string::npos) << said[0];
  EXPECT_NE(said[2].find("rank 1 on here has said nothing for 1.2 s"), std::string::npos) << said[2];
}

TEST(Control, AGoodByeIsNone) {
  Meeting m{.ranks = 3, .set = {}};
  all_well(m.run([&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables({}));
    Control c(r, names(3), m.deadlines());
    if (rank == 1) return;
    for (int i = 0; i < 300 && !c.gone(1); i++) usleep(10000);
    require(c.gone(1), "rank 1 has not left");
    require(failure_of(c, 0.3).empty(), "failed: ", failure_of(c, 0));
    if (rank == 0)
      while (!c.gone(2)) usleep(10000);
  }));
}

// ---- UCX -----------------------------------------------------------------------------------------------------------------
template <class Body>
std::vector<std::string> over_ucx(int n, const Body& body) {
  Meeting m{.ranks = n, .set = {}};
  return m.run([&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables({}));
    auto ucx = Ucx::open(r.interface_address());
    const auto addresses = r.exchange(ucx->address());
    auto control = std::make_shared<Control>(r, names(n), m.deadlines());
    auto c = over_messages(ucx->connect(addresses, 7, control), m.deadlines().wait, {});
    body(*c);
  });
}

TEST(Ucx, CollectivesOfAllSizes) {
  for (int n : {2, 3, 4})
    all_well(over_ucx(n, [&](Communicator& c) {
      for (std::int64_t count : {1, 100, 5000, 70000, 1000000}) {
        std::vector<float> x(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < x.size(); i++) x[i] = float(int(i % 1000) * (c.rank() + 1));
        c.all_reduce(buffer(x)).wait();
        for (std::size_t i = 0; i < x.size(); i++)
          require(x[i] == float(int(i % 1000) * n * (n + 1) / 2), count, " elements: element ", i, " is ", x[i]);
        std::vector<double> y(static_cast<std::size_t>(count), c.rank());
        c.broadcast(buffer(y), n - 1).wait();
        require(y.back() == n - 1, "broadcast gave ", y.back());
        std::fill(y.begin(), y.end(), c.rank());
        c.all_gather(buffer(y)).wait();
        require(y.back() == n - 1, "all_gather gave ", y.back());
      }
      // Both send much before they receive.
      std::vector<float> out(3000000, float(c.rank())), in(out.size());
      Work s = c.send((c.rank() + 1) % n, buffer(out));
      c.recv((c.rank() + n - 1) % n, buffer(in)).wait();
      s.wait();
      require(in.back() == float((c.rank() + n - 1) % n), "received ", in.back());
      c.barrier().wait();
    }));
}

// As one rank of those that tests/check_hosts.sh starts.
TEST(Hosts, DISABLED_Collectives) {
  auto c = communicator_from_environment();
  ASSERT_GT(c->size(), 1);
  for (std::int64_t count : lengths) {
    std::vector<float> f(static_cast<std::size_t>(count));
    exercise(*c, f.data(), count);
    std::vector<double> d(f.size());
    exercise(*c, d.data(), count);
    std::vector<bf16> h(f.size());
    exercise(*c, h.data(), count);
  }
  many_at_once(*c, 50000);
  if (c->size() == 2) {
    std::vector<float> x(much);
    sum_much(*c, x.data());
  }
  c->barrier().wait();
}

TEST(Ucx, DisagreementIsNamed) { expect_disagreement_named(over_ucx(2, disagree)); }

TEST(Ucx, WhoLeavesIsNamed) {
  const auto said = over_ucx(3, [&](Communicator& c) {
    std::vector<float> x(1000000);
    c.all_reduce(buffer(x)).wait();
    if (c.rank() == 1) throw Error("a full disk");
    c.all_reduce(buffer(x)).wait();
  });
  EXPECT_NE(said[0].find("rank 1 on here"), std::string::npos) << said[0];
  EXPECT_NE(said[2].find("rank 1 on here"), std::string::npos) << said[2];
}

// A rank that computes for long is no failure: its heartbeats go on. But the others learn for whom they wait.
TEST(Ucx, AStandstillIsAWarning) {
  for (bool node : {false, true}) {
    testing::internal::CaptureStderr();
    Meeting m{.ranks = 3, .set = {}};
    const auto said = m.run([&](int rank) {
      Rendezvous r(m.place(rank), m.deadlines(), variables({}));
      auto ucx = Ucx::open(r.interface_address());
      const auto addresses = r.exchange(ucx->address());
      Deadlines d = m.deadlines();
      d.patience = 0.8;
      auto control = std::make_shared<Control>(r, names(3), d);
      auto c = over_messages(ucx->connect(addresses, 7, control), d.wait, {});
      if (node) c = on_node(std::move(c));
      std::vector<float> x(100000, 1);
      if (rank == 1) sleep(3);
      Work work = c->all_reduce(buffer(x));
      if (rank == 2)  // as a thread does that has several under way
        while (!work.done()) c->rest();
      work.wait();
      c->barrier().wait();
    });
    const std::string text = testing::internal::GetCapturedStderr();
    all_well(said);
    EXPECT_NE(
        text.find("no progress for 0.8 s: rank 1 on here keeps the others waiting; rank 0 on here waits for rank"),
        std::string::npos)
        << text;
    EXPECT_NE(text.find("rank 2 on here waits for rank 1 in all_reduce #1 (sum of 100000 f32)"), std::string::npos)
        << text;
    EXPECT_EQ(text.find("warning", text.find("warning") + 1), std::string::npos) << text;
  }
}

TEST(Ucx, AServerAddsUpWhatWorkersPush) {
  for (std::size_t count : {std::size_t(1), std::size_t(1000), std::size_t(300000)}) {
    Meeting m{.ranks = 3, .set = {}};
    all_well(m.run([&](int rank) {
      Rendezvous r(m.place(rank), m.deadlines(), variables({}));
      auto ucx = Ucx::open(r.interface_address());
      const auto addresses = r.exchange(ucx->address());
      auto control = std::make_shared<Control>(r, names(3), m.deadlines());
      auto c = ucx->channel(addresses, 7, control);
      serve_or_push(*c, count, 20);
    }));
  }
}

}  // namespace
}  // namespace tandem::test
