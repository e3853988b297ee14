// What several ranks stand on, as far as one device shows it: events inside of replays, and ranks that are threads,
// whose gradients go through pinned memory of the host.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <thread>

#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "dist/collectives/in_process.h"
#include "dist/collectives/staged.h"
#include "dist/strategies/all_reduce.h"
#include "layers/models/models.h"
#include "layers/train/fit.h"
#include "tests/gpu/table.h"
#include "tests/op_table.h"

namespace tandem::gpu {
namespace {

using Values = std::vector<double>;

// ---- events ---------------------------------------------------------------------------------------------------------
// A bucket is exchanged when the event that the replay marks behind it is done. Right after the launch the event still
// holds the mark of the replay before: were it called done then, the host would send the gradients of the step before.
void check_events(Backend& device, Table& table) {
  if (!device.records()) {
    table.note("events in replays: this device records nothing");
    return;
  }
  constexpr int replays = 20;
  const std::string what = std::to_string(replays) + " replays that mark an event behind 20 products: ";
  auto inside = device.new_event(), behind = device.new_event();
  Tensor a = Tensor::full(device, {2048, 2048}, 0.5), b = Tensor::full(device, {2048, 2048}, 0.5), c = Tensor::like(a);
  auto step = device.record([&] {
    for (int i = 0; i < 20; i++) device.gemm(false, true, a, b, c, false);
    device.queue().mark(*inside);
  });
  for (int i = 0; i < 4; i++) step();  // twice eagerly, once to record it
  device.synchronize();
  int early = 0, late = 0, quick = 0;
  for (int i = 0; i < replays; i++) {
    step();
    device.queue().mark(*behind);
    const bool said = inside->done(), over = behind->done();
    early += said && !over;
    quick += over;
    device.synchronize();
    late += !inside->done();
  }
  table.check(what + "done before their work", early, 0);
  table.check(what + "not done after it", late, 0);
  table.check(what + "over before the host could ask", quick, replays / 2);
}

// ---- ranks ----------------------------------------------------------------------------------------------------------
// Runs body in a thread for each rank; what the first of them threw, or nothing.
std::string on_ranks(int n, const std::function<void(std::unique_ptr<Communicator>)>& body) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<std::string> said(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); r++)
    threads.emplace_back([&, r] {
      try {
        body(std::move(ranks[r]));
      } catch (const std::exception& e) {
        said[r] = "rank " + std::to_string(r) + ": " + e.what();
      }
    });
  for (auto& t : threads) t.join();
  for (const std::string& s : said)
    if (!s.empty()) return s;
  return "";
}

// A training that a signal stopped (timeout(1) sends one) proves nothing: the program ends by it, as without a
// training.
void end_if_stopped() {
  if (const int signal = stopping_signal()) std::raise(signal);
}

// Elements of a sum over ranks, in chunks of odd sizes, that are not what they should be. Whole numbers: any order will
// do.
int wrong_sums(Communicator& host, Backend& device, std::int64_t count) {
  Values mine, want;
  for (std::int64_t i = 0; i < count; i++) {
    mine.push_back(double((i * 7 + host.rank() * 13) % 101));
    want.push_back(0);
    for (int r = 0; r < host.size(); r++) want.back() += double((i * 7 + r * 13) % 101);
  }
  Tensor x = Tensor::of(device, {count}, mine);
  device.synchronize();
  auto devices = staged(std::shared_ptr<Communicator>(&host, [](auto*) {}), device,
                        {.chunk_bytes = 4040, .chunks = 3, .deadline = 30});
  devices->all_reduce({x.raw_write(), x.numel(), x.dtype()}).wait();
  const Values got = x.values();
  int wrong = 0;
  for (std::size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i];
  return wrong;
}

Values trained(Backend& device, Strategy& strategy) {
  device.deterministic(true);
  device.exact_convolution(true);
  const Dataset data = synthetic({.side = 28, .channels = 1, .train = 192, .test = 16});
  Loader loader(data.train, {.batch = 32, .seed = 2, .prefetch = 0}, device);
  auto model = make_model("lenet5", 10, 1, 28);
  SGD sgd({.learning_rate = 0.02, .momentum = 0.9});
  fit(*model, cross_entropy_loss(), sgd, device, {loader, nullptr, nullptr}, {.epochs = 3, .progress = false},
      &strategy);
  Values all;
  for (auto& [name, p] : model->parameters())
    for (double v : p->variable.value().values()) all.push_back(v);
  return all;
}

}  // namespace

void check_ranks(const Machine& machine, Table& table) {
  if (!table.time_for("events in replays")) return;
  check_events(*machine.device(), table);
  // A rank that throws fails the line, and the next one still has its turn.
  auto check = [&](const std::string& what, const std::string& said, double value, double bound,
                   const char* unit = "") {
    if (!said.empty()) table.note(said);
    table.check(what, said.empty() ? value : NAN, bound, unit);
  };
  for (int n : {2, 3}) {
    const std::string what = std::to_string(n) + " ranks on one device, sums through pinned memory: wrong elements";
    if (!table.time_for(what)) continue;
    std::vector<int> wrong(std::size_t(n), 0);
    const std::string said = on_ranks(n, [&](std::unique_ptr<Communicator> c) {
      auto device = machine.device();
      for (std::int64_t count : {1, 1000, 40001}) wrong[std::size_t(c->rank())] += wrong_sums(*c, *device, count);
    });
    check(what, said, *std::max_element(wrong.begin(), wrong.end()), 0);
  }
  const std::string what = "2 ranks on one device, 18 steps of lenet5: ";
  if (!table.time_for(what + "parameters")) return;
  std::vector<Values> ends(2);
  const std::string said = on_ranks(2, [&](std::unique_ptr<Communicator> c) {
    auto device = machine.device();
    Values& end = ends[std::size_t(c->rank())];
    auto strategy = all_reduce(std::move(c), {.bucket_bytes = 65536, .deadline = 30});
    end = trained(*device, *strategy);
  });
  end_if_stopped();
  Strategy alone;
  const Values one = trained(*machine.device(), alone);
  end_if_stopped();
  check(what + "parameters that differ between them", said, ends[0] != ends[1], 0);
  check(what + "beside one rank", said, said.empty() ? test::difference(ends[0], one).error : 0, 1e-4,
        "of the largest");
  auto device = machine.device();
  auto single = all_reduce(std::move(in_process(1)[0]), {.bucket_bytes = 65536, .deadline = 30});
  table.check("one rank over NCCL, where the build has it, 18 steps of lenet5: parameters that differ from one machine",
              trained(*device, *single) != one, 0);
}

}  // namespace tandem::gpu
