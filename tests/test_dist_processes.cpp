// Rendezvous, liveness and UCX: ranks of one process that meet over real sockets.
#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <csignal>

#include "dist/collectives/node.h"
#include "dist/collectives/ucx.h"
#include "dist/job/control.h"
#include "dist/job/job.h"
#include "dist/job/port_guard.h"
#include "dist/job/rendezvous.h"
#include "dist/server/server.h"
#include "tests/channel_server.h"
#include "tests/ranks.h"

namespace tandem::test {
namespace {

using Set = std::map<std::string, std::string>;
Variables variables(const Set& set) {
  return [set](const char* name) {
    auto v = set.find(name);
    return v == set.end() ? "" : v->second;
  };
}

const std::string token = "0123456789abcdef0123";
std::atomic<int> jobs{0};
int free_port() {
  const int fd = bound_socket(true, 0), port = port_of(fd);
  ::close(fd);
  return port;
}

// Ranks that meet by a file (no port), or on a port with a token.
struct RendezvousOfRanks {
  int ranks;
  Set set = {};
  int port = 0;
  double start = 20;
  std::string job = "test " + std::to_string(getpid()) + " " + std::to_string(jobs++);
  Place place(int rank) const {
    Place p{.family = "test", .rank = rank, .size = ranks, .local_rank = rank, .master = "127.0.0.1", .port = port};
    p.local_size = port ? -1 : ranks;
    p.job = job;
    return p;
  }
  Deadlines deadlines() const { return {.start = start, .silence = 3, .wait = 10}; }
  // body(rank, rendezvous) when all have come; what each rank threw, or "".
  template <class Body>
  std::vector<std::string> meet(const Body& body) const {
    return ranks_say(ranks, [&](int rank) {
      Rendezvous r(place(rank), deadlines(), variables(set));
      body(rank, r);
    });
  }
};

void exchanges(Rendezvous& r) {
  Control c(r, r.membership(), {.start = 20, .silence = 3, .wait = 10});
  for (int round = 0; round < 3; round++) {
    const auto all = c.gather("from " + std::to_string(r.place().rank) + std::string(std::size_t(round) * 100000, 'x'));
    for (int k = 0; k < r.place().size; k++)
      require(all[k].starts_with("from " + std::to_string(k)), "rank ", k, " said ", all[k].substr(0, 20));
  }
}

TEST(Rendezvous, RanksOfAHostFindEachOtherWithoutBeingTold) {
  for (int n : {2, 5}) all_well(RendezvousOfRanks{.ranks = n}.meet([](int, Rendezvous& r) { exchanges(r); }));
}

TEST(Rendezvous, TheStartOfALocalJobIsSeen) {
  RendezvousOfRanks m{.ranks = 2};
  EXPECT_FALSE(has_begun(m.job));
  std::barrier all(2);
  all_well(ranks_say(m.ranks, [&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set), {.goes_on = true});
    all.arrive_and_wait();
    const bool begun = has_begun(m.job);
    all.arrive_and_wait();
    require(begun, "has not begun");
  }));
  EXPECT_FALSE(has_begun(m.job));
}

TEST(Rendezvous, RanksOfSeveralHostsFindEachOtherByToken) {
  RendezvousOfRanks m{.ranks = 3, .set = {{"TANDEM_TOKEN", token}}, .port = free_port()};
  all_well(ranks_say(m.ranks, [&](int rank) {
    if (rank == 0) usleep(300000);  // the others come first
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
    exchanges(r);
  }));
}

TEST(Rendezvous, WhatIsMissingIsSaid) {
  Place p{.family = "torchrun", .rank = 1, .size = 4, .local_size = 2, .job = "x"};
  EXPECT_REFUSED(Rendezvous r(p, {.start = 1}, variables({})), "several hosts (torchrun, 4 ranks, 2 here)",
                 "MASTER_ADDR", "TANDEM_TOKEN=$(openssl rand -hex 32)");
  p.master = "localhost", p.local_size = 4;
  EXPECT_REFUSED(Rendezvous r(p, {.start = 1}, variables({{"TANDEM_TOKEN", "short"}})), "shorter than 16");
  // Ranks that do not come are listed, with the hosts on which they should have been; those that came hear it too.
  RendezvousOfRanks m{.ranks = 5, .set = {{"TANDEM_HOSTS", "a:2,b:3"}}, .start = 0.6};
  const auto said = ranks_say(m.ranks, [&](int rank) {
    if (rank == 2 || rank == 3) return;
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set));
  });
  EXPECT_TRUE(
      holds(said[0], {"after 0.6 s these ranks are missing: 2 on b, 3 on b (here: 0, 1 from 127.0.0.1, 4 from"}));
  EXPECT_TRUE(holds(said[1], {"missing: 2 on b, 3 on b"}));
  // One that came and went is not waited for.
  RendezvousOfRanks hasty{.ranks = 3, .set = {{"TANDEM_TOKEN", token}}, .port = free_port()};
  const auto heard = ranks_say(hasty.ranks, [&](int rank) {
    if (rank == 1) return;
    while (rank == 2) try {
        ::close(connect_with_token("127.0.0.1", hasty.port, token, 2, 3, 5));
        return;
      } catch (const Error&) {  // rank 0 does not listen yet
        usleep(20000);
      }
    Rendezvous r(hasty.place(rank), hasty.deadlines(), variables(hasty.set));
  });
  EXPECT_TRUE(holds(heard[0], {"rank 2, from 127.0.0.1, ended before all ranks had come"}));
  // Nobody there at all.
  RendezvousOfRanks lonely{.ranks = 2, .set = {{"TANDEM_TOKEN", token}}, .port = free_port(), .start = 0.5};
  EXPECT_REFUSED(Rendezvous r(lonely.place(1), lonely.deadlines(), variables(lonely.set)),
                 "rank 1 does not find rank 0", "Connection refused");
}

TEST(Rendezvous, DifferentTermsAreNamed) {
  RendezvousOfRanks m{.ranks = 3};
  const auto said = ranks_say(m.ranks, [&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(), variables(m.set), {.terms = rank == 2 ? "A 1\nB 3\n" : "A 1\nB 2\n"});
  });
  all_say(said, {"rank 0 on ", " do not fit together: B 2 and B 3"});
}

TEST(Rendezvous, DifferentJobsAndDoublesAreNamed) {
  RendezvousOfRanks m{.ranks = 2, .set = {{"TANDEM_TOKEN", token}}, .port = free_port(), .start = 5};
  auto said = ranks_say(m.ranks, [&](int rank) {
    Place p = m.place(rank);
    if (rank == 1) p.size = 3;
    Rendezvous r(p, m.deadlines(), variables(m.set));
  });
  all_say(said, {"rank 1 was started as one of 3 ranks, and rank 0 as one of 2"});
  RendezvousOfRanks twice{.ranks = 3, .set = {{"TANDEM_TOKEN", token}}, .port = free_port(), .start = 5};
  said = ranks_say(twice.ranks, [&](int rank) {
    Rendezvous r(twice.place(rank == 2 ? 1 : rank), twice.deadlines(), variables(twice.set));
  });
  EXPECT_TRUE(holds(said[0], {"rank 1 has come twice"}));
}

// ---- those who do not belong ----------------------------------------------------------------------------------------
int visit(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(std::uint16_t(port));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) return fd;
  ::close(fd);
  return -1;
}

TEST(Rendezvous, UnauthenticatedPeersKeepNobodyWaitingAndDoNotGetIn) {
  RendezvousOfRanks m{.ranks = 3, .set = {{"TANDEM_TOKEN", token}}, .port = free_port(), .start = 60};
  std::atomic<bool> end{false};
  std::atomic<int> visits{0}, let_in{0};
  const std::string overheard(64, 'x');  // what a rank said to another rank 0: worth nothing here
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
        if (i % 4 == 3) said = std::string("TANDEM\0\1\1\0\0\0\3\0\0\0", 16) + overheard;
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
  const auto said = ranks_say(m.ranks, [&](int rank) {
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
  RendezvousOfRanks m{.ranks = 2, .set = {}, .port = free_port(), .start = 1.5};
  const auto said = ranks_say(m.ranks, [&](int rank) {
    Rendezvous r(m.place(rank), m.deadlines(),
                 variables({{"TANDEM_TOKEN", rank ? "aaaaaaaaaaaaaaaaaaaa" : "bbbbbbbbbbbbbbbbbbbb"}}));
  });
  EXPECT_TRUE(holds(said[0], {"missing: 1"}));
  EXPECT_TRUE(holds(said[1], {"is TANDEM_TOKEN the same"}));
}

// ---- liveness -------------------------------------------------------------------------------------------------------
Membership names(int n, bool goes_on = false) {
  Membership m{.goes_on = goes_on, .nonce = 7};
  for (int r = 0; r < n; r++) m.slots.push_back({.record = {.host = "here", .identity = "here"}});
  return m;
}

// A rank that has joined, with a control plane of its own and UCX.
struct Connected {
  Connected(const Place& place, const Deadlines& deadlines, const Variables& variables, bool goes_on = false)
      : rendezvous(place, deadlines, variables, {.goes_on = goes_on}),
        ucx(std::make_shared<Ucx>(rendezvous.membership().slots[place.rank].record.address)),
        control(std::make_shared<Control>(rendezvous, names(place.size, goes_on), deadlines)),
        addresses(control->gather(ucx->address())) {}
  std::unique_ptr<Communicator> communicator() {
    return over_messages(ucx->connect(addresses, 7, control), control->deadlines().wait, {});
  }
  std::unique_ptr<Channel> channel() { return ucx->channel(addresses, 7, control); }
  Rendezvous rendezvous;
  std::shared_ptr<Ucx> ucx;
  std::shared_ptr<Control> control;
  std::vector<std::string> addresses;
};

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
  RendezvousOfRanks m{.ranks = 4};
  const auto said = m.meet([&](int rank, Rendezvous& r) {
    Control c(r, names(4), m.deadlines());
    if (rank == 2) c.fail(1, "rank 1 on here has done it");
    throw Error(failure_of(c, 5));
  });
  for (const auto& s : said) EXPECT_EQ(s, "rank 1 on here has done it");
}

TEST(Control, AClosedConnectionAndSilenceAreADeath) {
  for (auto [dead, silent, text] :
       {std::tuple{0, 0, "has died"}, {2, 0, "has died"}, {1, 3, "has said nothing for 1.2 s"}}) {
    const auto said = RendezvousOfRanks{.ranks = 3}.meet([dead = dead, silent = silent](int rank, Rendezvous& r) {
      if (rank == dead) return void(sleep(silent));  // without a good-bye
      Control c(r, names(3), {.start = 5, .silence = 1.2, .wait = 10});
      throw Error(failure_of(c, 5));
    });
    for (int r = 0; r < 3; r++)
      EXPECT_TRUE(r == dead || holds(said[r], {"rank " + std::to_string(dead) + " on here " + text})) << said[r];
  }
}

TEST(Control, AGoodByeIsNone) {
  RendezvousOfRanks m{.ranks = 3};
  all_well(m.meet([&](int rank, Rendezvous& r) {
    Control c(r, names(3), m.deadlines());
    if (rank == 1) return;
    for (int i = 0; i < 300 && !c.gone(1); i++) usleep(10000);
    require(c.gone(1), "rank 1 has not left");
    require(failure_of(c, 0.3).empty(), "failed: ", failure_of(c, 0));
    if (rank == 0)
      while (!c.gone(2)) usleep(10000);
  }));
}

// Of all connections of this process, in the kernel.
void shrink_buffers(int bytes) {
  for (int fd = 3; fd < 1024; fd++)
    for (int buffer : {SO_SNDBUF, SO_RCVBUF}) setsockopt(fd, SOL_SOCKET, buffer, &bytes, sizeof bytes);
}

// Rank 1 reads nothing for a while: the connection is full, in the middle of a heartbeat, when rank 0 has something to
// say.
TEST(Control, AFullConnectionLosesNothing) {
  RendezvousOfRanks m{.ranks = 2};
  testing::internal::CaptureStderr();
  std::atomic<int> heard = 0;
  std::barrier all(2);
  const auto said = m.meet([&](int rank, Rendezvous& r) {
    all.arrive_and_wait();
    shrink_buffers(8192);
    all.arrive_and_wait();
    if (rank == 1) usleep(1500000);
    Control c(r, names(2), {.silence = 30, .patience = 0.004});  // a heartbeat each millisecond
    c.report_wait(&c, {.waits_for = 1 - rank});
    if (rank == 0) usleep(1200000), c.fail(0, std::string(9000, 'x'));
    const std::string failure = failure_of(c, 20);  // a busy kernel opens so small a window again after seconds
    for (heard += rank; rank == 0 && heard < 1;) usleep(1000);
    throw Error(failure);
  });
  testing::internal::GetCapturedStderr();
  for (const auto& s : said) EXPECT_EQ(s, std::string(9000, 'x'));
}

// ---- frames ---------------------------------------------------------------------------------------------------------
TEST(Frames, ArriveWholeHoweverLittleTheKernelTakes) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  shrink_buffers(1);
  FrameWriter out;
  FrameReader in(20000);
  const auto text = [](std::uint32_t i) { return std::string(i * 7919 % 20000, char('a' + i % 26)); };
  std::uint32_t heard = 0;
  for (std::uint32_t put = 0; heard < 500;) {
    for (int k = 0; k < 3 && put < 500; k++, put++) out.put(text(put));
    out.flush(ends[0]);
    const auto got = put == 500 || put % 2 ? in.receive(ends[1]) : FrameReader::Got::nothing;
    ASSERT_NE(got, FrameReader::Got::end);
    for (std::optional<std::string> f; (f = in.next()); heard++) ASSERT_EQ(*f, text(heard));
  }
  EXPECT_TRUE(out.empty());
  EXPECT_EQ(in.receive(ends[1]), FrameReader::Got::nothing);
  ::close(ends[0]);
  EXPECT_EQ(in.receive(ends[1]), FrameReader::Got::end);
  ::close(ends[1]);
}

// A rank that leaves waits until its queue is empty.
TEST(Frames, ABrokenConnectionHoldsNothingBack) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  ::close(ends[1]);
  FrameWriter out;
  out.put("goodbye");
  out.flush(ends[0]);
  EXPECT_TRUE(out.empty());
  ::close(ends[0]);
}

TEST(Frames, WhatIsTooLongIsRefused) {
  const auto through = [](std::size_t bytes) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    FrameWriter out;
    FrameReader in(100);
    out.put(std::string(bytes, 'x'));
    out.flush(ends[0]);
    in.receive(ends[1]);
    ::close(ends[0]), ::close(ends[1]);
    in.next();
  };
  through(100);
  EXPECT_REFUSED(through(101), "a frame of 101 bytes is too long");
}

// ---- UCX's port -----------------------------------------------------------------------------------------------------
int filter_of(int socket) {  // instructions; 0: none
  sock_filter program[BPF_MAXINSNS];
  socklen_t instructions = BPF_MAXINSNS;
  return getsockopt(socket, SOL_SOCKET, SO_GET_FILTER, program, &instructions) == 0 ? int(instructions) : -1;
}

TEST(PortGuard, WhatCannotBeSetIsSaid) {
  const int four = bound_socket(true, 0);
  const int six = socket(AF_INET6, SOCK_STREAM, 0);
  EXPECT_EQ(accept_only(four, {"10.0.0.1", "10.0.0.2", "10.0.0.1"}), "");
  EXPECT_EQ(filter_of(four), 6);
  EXPECT_EQ(accept_only(four, {}), "");
  EXPECT_EQ(filter_of(four), 2);
  EXPECT_EQ(accept_only(four, {"fe80::1"}), "fe80::1 is no IPv4 address");
  std::vector<std::string> many;
  for (int i = 0; i < 2100; i++) many.push_back("10.0." + std::to_string(i / 256) + "." + std::to_string(i % 256));
  EXPECT_EQ(accept_only(four, many), "2100 addresses are too many");
  EXPECT_EQ(filter_of(four), 2);
  EXPECT_TRUE(six < 0 || accept_only(six, {"10.0.0.1"}) == "it listens by IPv6");
  ::close(four), ::close(six);
  const std::string text = stderr_of([] {
    auto ucx = std::make_shared<Ucx>("127.0.0.1");
    for (int i = 0; i < 2; i++) ucx->accept_only({"127.0.0.1", "fe80::1"});
  });
  EXPECT_TRUE(holds(text, {"accepts every address, not the ranks' alone (fe80::1 is no IPv4 address)"}));
  EXPECT_EQ(text.find("warning", text.find("warning") + 1), std::string::npos) << text;
}

// ---- UCX ------------------------------------------------------------------------------------------------------------
template <class Body>
std::vector<std::string> over_ucx(int n, const Body& body) {
  RendezvousOfRanks m{.ranks = n};
  return ranks_say(m.ranks,
                   [&](int rank) { body(*Connected(m.place(rank), m.deadlines(), variables({})).communicator()); });
}

TEST(Ucx, CollectivesOfAllSizes) {
  for (int n : {2, 3, 4})
    all_well(over_ucx(n, [&](Communicator& c) {
      for (std::int64_t count : {1, 100, 5000, 70000, 1000000}) {
        exercise<float>(c, count);
        exercise<double>(c, count);
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

// Two jobs in one process, and in each of them all kinds of connections at the same time, by threads of their own.
TEST(Job, EverythingTogetherAndTwiceInOneProcess) {
  const int n = 4;
  const auto job = [](const std::string& name, int rank, bool goes_on) {
    return Job({.goes_on = goes_on,
                .variables = variables({{"RANK", std::to_string(rank)},
                                        {"WORLD_SIZE", std::to_string(n)},
                                        {"LOCAL_RANK", std::to_string(rank)},
                                        {"LOCAL_WORLD_SIZE", std::to_string(n)},
                                        {"TANDEM_JOB", name + std::to_string(getpid())}})});
  };
  all_well(ranks_say(n, [&](int rank) {
    Job one = job("one", rank, false), other = job("other", rank, true);
    require(one.rank() == rank && one.hosts() == 1 && one.local_rank() == rank && one.ranks_on(0).size() == n,
            "topology");
    auto everybody = one.communicator(), here = one.on_host(), across = one.across_hosts();
    require(here->size() == n && across->size() == 1, "of ", here->size(), " and ", across->size(), " ranks");
    auto pair = one.channel(rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
    require(pair->size() == 2 && pair->rank() == rank % 2, "rank ", pair->rank(), " of ", pair->size());
    auto all = other.channel();
    all_well(ranks_say(4, [&](int what) {
      if (what == 0) exercise<float>(*everybody, 5000);
      if (what == 1) exercise<float>(*here, 70000);
      if (what == 2) serve_or_push(*pair, 1000, 20);
      if (what == 3) serve_or_push(*all, 1000, 20);
    }));
    auto half = everybody->split(rank % 2, rank);
    require(half->size() == 2 && half->traffic().transport == "shared memory", "a part of a host speaks by ",
            half->traffic().transport);
    exercise<float>(*half, 700);
  }));
}

// As one rank of those that tests/check_hosts.sh starts.
TEST(Hosts, DISABLED_Collectives) {
  Job job;
  auto c = job.communicator(), here = job.on_host(), across = job.across_hosts();
  ASSERT_GT(c->size(), 1);
  EXPECT_EQ(here->size(), int(job.ranks_on(job.host(job.rank())).size()));
  EXPECT_EQ(across->size(), job.hosts());
  auto part = c->split(job.host(job.rank()), 0);
  EXPECT_EQ(part->traffic().transport, here->traffic().transport);
  EXPECT_EQ(part->traffic().transport == "shared memory", here->size() > 1) << part->traffic().transport;
  for (Communicator* each : {here.get(), across.get(), part.get()}) exercise<float>(*each, 70000);
  for (std::int64_t count : lengths) {
    exercise<float>(*c, count);
    exercise<double>(*c, count);
    exercise<bf16>(*c, count);
  }
  many_at_once(*c, 50000);
  if (c->size() == 2) {
    std::vector<float> x(much);
    sum_much(*c, x.data());
  }
  c->barrier().wait();
}

// As one rank of those that tests/check_hosts.sh starts behind slow links: gradients fill these for some seconds, by a
// communicator and by a channel, and no rank is silent for long.
TEST(Hosts, DISABLED_HeartbeatsUnderLoad) {
  const Place place = place_in(process_environment());
  const Deadlines deadlines = Deadlines::from();
  std::vector<float> x(std::size_t(1) << 20), room(x.size());
  const auto report = [&](const char* what, const Control& control) {
    std::printf("%s: the longest silence was %.2f s\n", what, control.longest_silence());
    EXPECT_GT(control.longest_silence(), 0.5) << "there were no heartbeats";
    EXPECT_LT(control.longest_silence(), 2.5);
  };
  {
    Connected all(place, deadlines, process_environment());
    auto c = all.communicator();
    c->all_reduce(buffer(x)).wait();
    c->barrier().wait();
    report("all-reduce", *all.control);
  }
  Connected all(place, deadlines, process_environment(), true);
  auto c = all.channel();
  int arrived = 0;
  c->on_message(into(std::as_writable_bytes(std::span(room)), [&](auto&&...) { arrived++; }));
  for (int to = 0; to < place.size; to++)
    if (to != place.rank) c->send(to, {}, std::as_bytes(std::span(x)));
  progress_until(*c, [&] { return c->sent() && arrived == place.size - 1; });
  report("channel", *all.control);
}

TEST(Ucx, DisagreementIsNamed) { expect_disagreement_named(over_ucx(2, disagree)); }

TEST(Ucx, WhoLeavesIsNamed) {
  const auto said = over_ucx(3, [&](Communicator& c) {
    std::vector<float> x(1000000);
    c.all_reduce(buffer(x)).wait();
    if (c.rank() == 1) throw Error("a full disk");
    c.all_reduce(buffer(x)).wait();
  });
  for (int r : {0, 2}) EXPECT_TRUE(holds(said[r], {"rank 1 on here"}));
}

// A rank that computes for long, longer than the deadline, is no failure: its heartbeats go on. But the others learn
// for whom they wait.
TEST(Ucx, AStandstillIsAWarning) {
  for (bool node : {false, true}) {
    RendezvousOfRanks m{.ranks = 3};
    const std::string text = stderr_of([&] {
      all_well(ranks_say(m.ranks, [&](int rank) {
        Deadlines d = m.deadlines();
        d.patience = 0.8, d.wait = 1.5;
        auto c = Connected(m.place(rank), d, variables({})).communicator();
        if (node) c = on_node(std::move(c));
        std::vector<float> x(100000, 1);
        if (rank == 1) usleep(2000000);
        Work work = c->all_reduce(buffer(x));
        if (rank == 2)  // as a thread does that has several under way
          while (!work.done()) c->rest();
        work.wait();
        c->barrier().wait();
      }));
    });
    EXPECT_TRUE(
        holds(text, {"no progress for 0.8 s: rank 1 on here keeps the others waiting; rank 0 on here waits for rank",
                     "rank 2 on here waits for rank 1 in all_reduce #1 (sum of 100000 f32)"}));
    EXPECT_EQ(text.find("warning", text.find("warning") + 1), std::string::npos) << text;
  }
}

// ---- channels between processes -------------------------------------------------------------------------------------
// Ranks that are processes, forked before this one has done anything with threads; each says in the end what it threw,
// or "".
class Processes {
 public:
  using Body = std::function<void(int rank, const Variables& variables)>;
  Processes(int ranks, Body body, Set set = {}) : ranks_(ranks), set_(std::move(set)), body_(std::move(body)) {
    set_.merge(Set{{"TANDEM_SILENCE", "2"}, {"TANDEM_START_TIMEOUT", "20"}, {"TANDEM_DEADLINE", "20"}});
    set_["TANDEM_JOB"] = "test " + std::to_string(getpid()) + " " + std::to_string(jobs++);
    for (int r = 0; r < ranks; r++) start(r);
  }
  ~Processes() {
    for (const One& one : all_)
      if (one.pid > 0) ::kill(one.pid, SIGKILL), waitpid(one.pid, nullptr, 0), ::close(one.said);
  }
  std::size_t start(int rank, const Set& more = {}) {
    Set set = set_;
    set["RANK"] = set["LOCAL_RANK"] = std::to_string(rank);
    set["WORLD_SIZE"] = set["LOCAL_WORLD_SIZE"] = std::to_string(ranks_);
    for (const auto& [name, value] : more) set[name] = value;
    int pipe[2];
    require(::pipe(pipe) == 0, "no pipe");
    const pid_t pid = fork();
    if (pid == 0) {
      std::string said;
      try {
        body_(rank, variables(set));
      } catch (const std::exception& e) {
        said = e.what();
      }
      (void)!write(pipe[1], said.data(), said.size());
      _exit(0);
    }
    ::close(pipe[1]);
    all_.push_back({pid, pipe[0]});
    return all_.size() - 1;
  }
  void signal(std::size_t which, int number) const { ::kill(all_[which].pid, number); }
  std::string said(std::size_t which) {
    One& one = all_[which];
    std::string text;
    char bytes[1000];
    for (ssize_t n; (n = read(one.said, bytes, sizeof bytes)) > 0;) text.append(bytes, std::size_t(n));
    int status = 0;
    waitpid(std::exchange(one.pid, -1), &status, 0);
    ::close(one.said);
    return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : text;
  }

 private:
  struct One {
    pid_t pid;
    int said;
  };
  int ranks_;
  Set set_;
  Body body_;
  std::vector<One> all_;
};

// Words in memory that all processes of a test see.
struct Board {
  Board() {
    words =
        static_cast<std::atomic<int>*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  ~Board() { munmap(words, 4096); }
  std::atomic<int>& operator[](int i) { return words[i]; }
  static void until(const std::function<bool()>& done, double seconds = 20) {
    for (int i = 0; i < seconds * 500 && !done(); i++) usleep(2000);
    require(done(), "waited in vain");
  }
  std::atomic<int>* words;
};

struct Channels : testing::Test {
  Board board;
};

// The rank's part of a test of channels.
template <class Body>
Processes on_channels(int ranks, const Body& body, const Set& set = {}) {
  const auto with_channel = [=](int rank, const Variables& v) {
    body(rank, Job({.goes_on = true, .variables = v}).channel());
  };
  return Processes(ranks, with_channel, set);
}

TEST_F(Channels, AServerAddsUpWhatWorkersPush) {
  for (std::size_t count : {std::size_t(1), std::size_t(1000), std::size_t(300000)}) {
    Processes p = on_channels(4, [&](int, std::unique_ptr<Channel> c) { serve_or_push(*c, count, 20); });
    for (std::size_t r = 0; r < 4; r++) EXPECT_EQ(p.said(r), "") << "rank " << r;
  }
}

TEST_F(Channels, MessagesToOneselfAndNoRoom) {
  Processes p = on_channels(2, [&](int rank, std::unique_ptr<Channel> c) {
    std::vector<std::byte> memory(8), sent(8, std::byte{7});
    int arrived = 0;
    c->on_message({.place = [&](int, const MessageHeader& n, std::size_t) { return std::span(memory).first(n[0]); },
                   .arrived = [&](int from, const MessageHeader&, std::span<std::byte>) { arrived += from == rank; }});
    deliver(*c, rank, {8}, sent);
    for (int i = 0; i < 1000 && !arrived; i++) c->progress();
    require(arrived == 1 && memory == sent, "it has not arrived");
    if (rank == 1) deliver(*c, 0, {4}, sent);
    for (int i = 0; i < 1000; i++) c->progress(), c->rest();
  });
  for (std::size_t r : {0, 1}) {
    const std::string said = p.said(r);
    EXPECT_TRUE(said.starts_with("rank 1 on ") && said.find("sends 8 bytes where rank 0 on") != std::string::npos &&
                said.ends_with("has room for 4"))
        << said;
  }
}

// Kills while messages of all sizes are under way, between all.
TEST_F(Channels, AKilledRankIsMissedByAllInOneOrder) {
  Processes p = on_channels(5, [&](int rank, std::unique_ptr<Channel> c) {
    std::vector<std::byte> large(300000), room(large.size());
    std::string told;
    Receiver receiver = into(room);
    receiver.lost = [&](int r, const std::string&) { told += std::to_string(r); };
    c->on_message(receiver);
    board[rank] = 1;
    while (told.size() < 2) {
      for (int to = 0; to < 5; to++)
        if (c->living()[to]) c->send(to, {}, std::span(large).first(std::size_t(to) * 70000));
      drain(*c);
    }
    board[10 + rank] = std::stoi(told);
    progress_until(*c, [&] { return board[10] && board[11] && board[13]; });
  });
  Board::until([&] { return board[0] + board[1] + board[2] + board[3] + board[4] == 5; });
  usleep(100000);
  p.signal(2, SIGKILL), p.signal(4, SIGKILL);
  for (std::size_t r : {0, 1, 3}) EXPECT_EQ(p.said(r), "") << "rank " << r;
  EXPECT_TRUE(board[10] == 24 || board[10] == 42) << board[10];
  EXPECT_EQ(board[11], board[10]);
  EXPECT_EQ(board[13], board[10]);
}

TEST_F(Channels, TheDeathOfRankZeroIsEverybodys) {
  Processes p = on_channels(3, [&](int rank, std::unique_ptr<Channel> c) {
    Listener l(*c);
    board[rank] = 1;
    l.until([] { return false; });
  });
  Board::until([&] { return board[0] + board[1] + board[2] == 3; });
  p.signal(0, SIGKILL);
  for (std::size_t r : {1, 2}) {
    const std::string said = p.said(r);
    EXPECT_TRUE(said.starts_with("rank 0 on ") && said.ends_with("has died: its connection is closed")) << said;
  }
}

TEST_F(Channels, WhoEndsWellIsNotLostAndWhoFailsIs) {
  Processes p = on_channels(4, [&](int rank, std::unique_ptr<Channel> c) {
    Listener l(*c);
    board[rank] = 1;
    Board::until([&] { return board[0] + board[1] + board[2] + board[3] == 4; });
    if (rank == 3) return;
    if (rank == 2) throw Error("a full disk");
    l.until([&] { return l.lost.size() == 1; });
    board[10 + rank] = l.told.ends_with(" has left with an error; ") ? 2 : 1;
    l.until([&] { return board[10] && board[11]; });
    require(c->living() == std::vector<bool>{true, true, false, true}, "others live");
  });
  for (std::size_t r : {0, 1, 3}) EXPECT_EQ(p.said(r), "") << "rank " << r;
  EXPECT_EQ(p.said(2), "a full disk");
  EXPECT_EQ(board[10], 2);
  EXPECT_EQ(board[11], 2);
}

TEST_F(Channels, WhoWakesUpAfterItWasGivenUpEndsAndDisturbsNobody) {
  Processes p = on_channels(4, [&](int rank, std::unique_ptr<Channel> c) {
    std::vector<std::byte> large(1 << 20), room(large.size());
    std::string told;
    Receiver receiver = into(room);
    receiver.lost = [&](int, const std::string& why) { told = why; };
    c->on_message(receiver);
    board[rank] = 1;
    while (!board[20]) {
      for (int to = 0; to < 4; to++) c->send(to, {}, large);
      drain(*c);
      if (!told.empty()) board[10 + rank] = told.find("has said nothing for 2 s") != std::string::npos ? 2 : 1;
    }
  });
  Board::until([&] { return board[0] + board[1] + board[2] + board[3] == 4; });
  usleep(200000);
  p.signal(2, SIGSTOP);
  Board::until([&] { return board[10] == 2 && board[11] == 2 && board[13] == 2; });
  p.signal(2, SIGCONT);
  const std::string said = p.said(2);
  EXPECT_TRUE(said.starts_with("rank 2 on ") && said.find("was given up, and the others have gone on") != said.npos)
      << said;
  usleep(500000);
  board[20] = 1;
  for (std::size_t r : {0, 1, 3}) EXPECT_EQ(p.said(r), "") << "rank " << r;
}

// The owner of shard 2 stops itself before it writes its answer to rank 1's fourth push, is given up, and goes on when
// rank 1 has the answer of the successor.
TEST_F(Channels, AStoppedOwnerThatWakesUpWritesNowhere) {
  constexpr std::int64_t count = 4 * 1024;
  Processes p(3, [&](int rank, const Variables& v) {
    std::vector<float> w(count), none(64), gradient(count, 1.f);
    const Buffer weights{w.data(), count, DType::f32}, buffers{none.data(), 0, DType::f32};
    ServerNode server_node(Job({.goes_on = true, .variables = v}).channel(), 20);
    ServerOptions options{.how = Asynchrony::parse("asgd")};
    options.learning_rate = [&, rank](std::int64_t pushes) {
      if (rank != 2 || pushes != 3) return 1.0;
      board[0] = 1;
      raise(SIGSTOP);
      return 100.0;  // what it computes from now on is not what its successor does
    };
    server_node.begin(weights, buffers, std::vector<RuleBlock>(count / 64), options, {0, 8});
    server_node.pull(weights, buffers);
    while (rank == 1 && server_node.lease()) {
      server_node.push({gradient.data(), count, DType::f32}, buffers, 1, {});
      server_node.pull(weights, buffers);
      if (!board[0] || board[1]) continue;
      const float now = w.back();
      for (float x : w) require(x == w.front(), "rank 1 was answered with ", x, " and ", w.front());
      board[1] = 1;
      Board::until([&] { return board[2] == 1; });
      server_node.pull(weights, buffers);  // the same answer, from where it lies
      require(w.back() == now, "what was ", now, " is ", w.back(), " now");
    }
    if (rank == 1) require(w.front() == -8 && w.back() == -8, "the last weights are ", w.front(), " and ", w.back());
    server_node.finish(weights, buffers);
  });
  Board::until([&] { return board[1] == 1; });
  p.signal(2, SIGCONT);
  const std::string said = p.said(2);
  EXPECT_TRUE(holds(said, {"was given up, and the others have gone on without it"}));
  board[2] = 1;
  for (std::size_t r : {0, 1}) EXPECT_EQ(p.said(r), "") << "rank " << r;
}

TEST_F(Channels, MemoryOfAHostIsSharedAndOutlivesWhoSharedIt) {
  Processes p = on_channels(2, [&](int rank, std::unique_ptr<Channel> c) {
    const auto block = c->share(5 << 20);
    int* const mine = static_cast<int*>(block.get());
    Listener l(*c);
    if (rank == 1) {
      mine[1] = 7;
      l.until([&] { return !l.headers[0].empty(); });
      deliver(*c, 0, {1}, std::as_bytes(std::span(mine, 5 << 18)));
      require(c->bytes_sent() == 0, c->bytes_sent(), " bytes were sent");
      l.until([&] { return mine[2] == 8; });
      board[0] = 1;
      l.until([] { return false; });
    }
    deliver(*c, 1, {0});
    l.until([&] { return l.headers[1].size() == 1; });
    require(l.shared.size() == 5 << 20, "a block of ", l.shared.size());
    reinterpret_cast<int*>(l.shared.data())[2] = 8;
    l.until([&] { return l.lost.count(1) > 0; });
    require(reinterpret_cast<int*>(l.shared.data())[1] == 7, "what rank 1 wrote is gone");
  });
  Board::until([&] { return board[0] == 1; });
  p.signal(1, SIGKILL);
  EXPECT_EQ(p.said(0), "");
}

// ---- and back again -------------------------------------------------------------------------------------------------
TEST_F(Channels, AKilledRankComesBackTwice) {
  Processes p = on_channels(4, [&](int rank, std::unique_ptr<Channel> c) {
    if (c->incarnation()) require(rank == 2 && c->living()[2], "rank ", rank, " has come back");
    board[20] = int(c->incarnation());
    auto block = c->share(64);
    auto* const mine = static_cast<std::uint64_t*>(block.get());
    mine[0] = c->incarnation();
    Listener l(*c);
    board[rank] = 1;
    if (rank == 2) {
      // A rank that has no block of its own receives bytes, not their place.
      l.until([&] { return board[0] && board[1] && board[3]; });
      // To all, and an answer of all: of this incarnation.
      for (int to : {0, 1, 3}) deliver(*c, to, {c->incarnation()}, std::as_bytes(std::span(mine, 8)));
      l.until([&] { return !l.headers[0].empty() && !l.headers[1].empty() && !l.headers[3].empty(); });
      for (auto& [from, headers] : l.headers)
        require(headers == std::vector<std::uint64_t>{c->incarnation()}, "rank ", from, " says ", headers[0]);
      require(l.told.empty(), "who came back was told ", l.told);
      board[30] = int(c->incarnation()) + 1;
      if (c->incarnation() < 2) l.until([] { return false; });
      for (int to : {0, 1, 3}) deliver(*c, to, {99});
      return;
    }
    for (std::uint64_t k = 0; k < 3; k++) {
      l.until([&] { return l.headers[2].size() == k + 1; });
      require(l.headers[2].back() == k, "rank 2 says ", l.headers[2].back(), " as incarnation ", k);
      require(l.shared.size() == 64 && reinterpret_cast<std::uint64_t*>(l.shared.data())[0] == k,
              "of another incarnation");
      deliver(*c, 2, {k});
    }
    l.until([&] { return l.headers[2].back() == 99; });
    require(l.told.ends_with("rank 2 is back as 2; ") && l.told.find("rank 2 is back as 1; ") != std::string::npos,
            l.told);
  });
  for (int k = 1; k < 3; k++) {
    Board::until([&] { return board[30] == k; });
    p.signal(k == 1 ? 2 : 4, SIGKILL);
    EXPECT_EQ(p.start(2, {{"TANDEM_INCARNATION", "1"}}), std::size_t(3 + k));
  }
  for (std::size_t r : {0, 1, 3, 5}) EXPECT_EQ(p.said(r), "") << "rank " << r;
}

// As on several hosts, where UCX has a port.
TEST(PortGuard, WhoComesBackHearsTheRanksAlone) {
  Board board;
  const auto body = [&](int rank, const Variables& given) {
    const Variables as_on_hosts = [&](const char* name) {
      const std::string n = name;
      return n == "LOCAL_WORLD_SIZE" ? "1" : n == "LOCAL_RANK" ? "0" : given(name);
    };
    auto c = Job({.goes_on = true, .variables = as_on_hosts}).channel();
    Listener l(*c);
    board[rank] = 1;
    if (c->incarnation() == 0) return l.until([&] { return board[10] == 1; }, 20);
    const auto ports = listening_sockets();
    require(!ports.empty(), "UCX has no port here");
    board[10] = 1;
    for (int s : ports) require(filter_of(s) == 4, "a filter of ", filter_of(s), " instructions");
  };
  const std::string port = std::to_string(free_port());
  Processes p(3, body, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}, {"TANDEM_TOKEN", token}});
  Board::until([&] { return board[0] + board[1] + board[2] == 3; });
  p.signal(2, SIGKILL);
  EXPECT_EQ(p.said(p.start(2, {{"TANDEM_INCARNATION", "1"}})), "");
}

TEST_F(Channels, WhoIsNotLostOrDoesNotFitDoesNotComeBack) {
  const auto body = [&](int rank, std::unique_ptr<Channel> c) {
    Listener l(*c);
    board[rank]++;
    l.until([&] { return board[rank == 2 ? 20 : 21] == 1; });
    if (rank == 2) throw Error("a full disk");
  };
  Processes p = on_channels(3, body, {{"TANDEM_START_TIMEOUT", "1.5"}});
  Board::until([&] { return board[0] + board[1] + board[2] == 3; });
  const auto said = [&](int rank, const Set& more) { return p.said(p.start(rank, more)); };
  EXPECT_TRUE(holds(said(2, {{"TANDEM_INCARNATION", "1"}}), {"has not been given up"}));
  EXPECT_TRUE(holds(said(0, {{"TANDEM_INCARNATION", "1"}}), {"rank 0 keeps the list"}));
  EXPECT_TRUE(holds(said(2, {}), {"has not been given up"}));
  board[20] = 1;
  EXPECT_EQ(p.said(2), "a full disk");
  usleep(200000);
  EXPECT_TRUE(holds(said(2, {}), {"TANDEM_INCARNATION=1"}));
  const std::string other = said(2, {{"TANDEM_INCARNATION", "1"}, {"TANDEM_STRATEGY", "asgd"}});
  EXPECT_TRUE(holds(other, {"rank 2 does not fit to the job: TANDEM_STRATEGY all-reduce and TANDEM_STRATEGY asgd"}));
  board[21] = 1;
  for (std::size_t r : {0, 1}) EXPECT_EQ(p.said(r), "") << "rank " << r;
}

// As one rank of those that tests/check_losses.sh starts: messages between all, until there is a file $TANDEM_TEST_END.
// What happens is printed.
TEST(Hosts, DISABLED_LossesAndReturns) {
  auto c = Job({.goes_on = true}).channel();
  std::vector<std::byte> large(1 << 20), room(large.size());
  bool end = false;
  std::map<int, int> arrived;
  auto say = [&](const std::string& text) {
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  };
  Receiver receiver = into(room, [&](int from, const MessageHeader& header, auto) {
    end = end || header[0] == 99;
    if (++arrived[from] == 3) say("hears " + c->where(from));
  });
  receiver.lost = [&](int, const std::string& why) { say("lost: " + why); };
  receiver.returned = [&](int rank, std::uint64_t incarnation) {
    arrived[rank] = 0;
    say(c->where(rank) + " is back as " + std::to_string(incarnation));
  };
  c->on_message(receiver);
  say(c->where(c->rank()) + ", process " + std::to_string(getpid()) + ", incarnation " +
      std::to_string(c->incarnation()));
  while (!end) {
    if (c->rank() == 0) end = access(std::getenv("TANDEM_TEST_END"), F_OK) == 0;
    for (int to = 0; to < c->size() && (!end || c->rank() == 0); to++)
      c->send(to, {end ? 99u : 0u}, std::span(large).first(std::size_t(to) << 16));
    drain(*c);
    for (int i = 0; i < 20; i++)
      if (!c->progress()) c->rest();
  }
  say("ends well");
}

}  // namespace
}  // namespace tandem::test
