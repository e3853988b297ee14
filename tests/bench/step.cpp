// The training step, beside PyTorch's and beside the floor. For each model and type one table row and one JSON line:
//   ours    forward, backward and SGD with momentum on a batch of 128 pictures that lie in memory
//   peers   the same step by every PyTorch that is named, in the faster of its memory formats, same threads (peer.py)
//   floor   the same convolutions and matrix products alone, each by the fastest means found, in the order of the step
//   and on
//           tensors of their own, plus one touch of memory for the rest at the speed a plain copy reaches
// They alternate in one run, each for at least a second at a time (shorter turns begin with the other's caches and
// clock); medians. A calibration loop runs before and after each row; where it moved by more than 5 % the row is
// measured again.
//
//   build/bench_step [--threads N] [--rounds N] [--only resnet20/f32] [--jsonl FILE] [--no-peer] [--pythons "P …"]
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "autograd/recorder.h"
#include "core/cpu/convolution.h"
#include "core/launch.h"
#include "layers/train/metrics.h"
#include "layers/train/options.h"
#include "tests/bench/pictures.h"
#include "tests/bench/timing.h"

using namespace tandem;

namespace {

constexpr std::int64_t batch = 128;
Strategy alone;

// Arithmetic only, in registers: its time moves with the machine's clock and with what else runs, and with nothing of
// ours.
double calibration() {
  std::vector<double> times;
  for (int i = 0; i < 9; i++)
    times.push_back(milliseconds([] {
      volatile float sink;
      float a[16] = {};
      for (int k = 0; k < 2'000'000; k++)
        for (float& v : a) v = v * 0.999f + 1.f;
      sink = a[3];
      (void)sink;
    }));
  return median(times);
}

// ---- the floor ------------------------------------------------------------------------------------------------------
struct Layer {
  ConvShape conv;
  bool data_gradient;  // the first layer has none
  bool linear = false;
};
struct Work {
  std::vector<Layer> layers{};
  double touched = 0;  // elements of activations read or written once by everything else
  double parameters = 0;
};

Work work_of(TimedModel& ours) {
  Work w{.parameters = double(ours.flat.parameters())};
  NoGrad off;
  Recorder recorder;
  (*ours.model)(ours.images);
  for (const Operation& o : recorder.operations) {
    const Tensor& x = o.inputs[0];
    if (o.op == "conv2d") {
      const auto of = [&](const char* name, std::size_t i) { return std::int64_t(o.attribute(name, i)); };
      w.layers.push_back({{x.size(0), x.size(1), x.size(2), x.size(3), o.output.size(3), of("window", 0),
                           of("window", 1), of("stride", 0), of("stride", 1), of("padding", 0), of("padding", 1)},
                          !w.layers.empty()});
    }
    if (o.op == "linear")
      w.layers.push_back({cpu::OneDnn::linear_shape(x.size(0), o.output.size(1), x.size(1)), true, true});
    // Batch norm with ReLU: x → y forward; x, dy → dx backward. Its residual: read forward; its gradient is written,
    // and read again where the branches join. Pooling over 2×2: x → y, dy → dx.
    if (o.op == "batch_norm") w.touched += (o.inputs.size() > 3 ? 8 : 5) * double(x.numel());
    if (o.op == "max_pool2d") w.touched += 2.5 * double(x.numel());
  }
  return w;
}

struct Place {
  const Layer* layer;
  Tensor x, y, w, dw;
  cpu::Convolution* convolution[3];
};

// Every layer on tensors of its own, in the order of the step: forward through all, then both gradients back through
// all. Each pass of each shape uses the algorithm that was fastest when tried alone.
template <class T>
class Floor {
 public:
  Floor(Backend& backend, const Work& work)
      : backend_(backend), work_(work), library_(backend.memory(), backend.threads()) {
    for (const Layer& layer : work_.layers) {
      const ConvShape& s = layer.conv;
      Place p{&layer,
              Tensor::full(backend, {s.x_numel()}, 0.5, dtype_of<T>),
              Tensor::full(backend, {s.y_numel()}, 0.5, dtype_of<T>),
              Tensor::full(backend, {s.w_numel()}, 0.01),
              Tensor::full(backend, {s.w_numel()}, 0),
              {}};
      const auto same =
          std::find_if(places_.begin(), places_.end(), [&](auto& q) { return !q.layer->linear && q.layer->conv == s; });
      for (int pass = 0; pass < 3 && !layer.linear; pass++)
        p.convolution[pass] = same == places_.end() ? choose(p, pass) : same->convolution[pass];
      places_.push_back(std::move(p));
    }
    step();
  }

  double step() {  // milliseconds
    double total = milliseconds([&] {
      for (Place& p : places_) run(p, 0, p.convolution[0]);
      for (auto p = places_.rbegin(); p != places_.rend(); ++p) {
        run(*p, 2, p->convolution[2]);
        if (p->layer->data_gradient) run(*p, 1, p->convolution[1]);
      }
    });
    // One touch: bytes at the rate of a plain copy (which reads and writes), and the update: w, g, v in, w, v out.
    double per_byte =
        milliseconds([&] {
          parallel_ranges(backend_.threads(), copied, 64, [&](std::int64_t begin, std::int64_t end) {
            std::memcpy(to_.write<float>() + begin, from_.data<float>() + begin, std::size_t(end - begin) * 4);
          });
        }) /
        (2.0 * 4 * double(copied));
    return total + per_byte * (work_.touched * sizeof(T) + 5.0 * 4 * work_.parameters);
  }

 private:
  static constexpr std::int64_t copied = 4 << 20;

  void run(Place& p, int pass, cpu::Convolution* c) {
    const auto which = cpu::Pass(pass);
    T *x = p.x.write<T>(), *y = p.y.write<T>();
    float* w = (which == cpu::Pass::backward_filter ? p.dw : p.w).write<float>();
    if (p.layer->linear)
      library_.linear<T>({which, p.layer->conv, x, w, y});
    else
      c->run<T>({which, p.layer->conv, x, w, y});
  }

  cpu::Convolution* choose(Place& p, int pass) {
    const auto which = cpu::Pass(pass);
    cpu::Convolution probe(backend_.memory(), backend_.threads());
    cpu::Convolution* fastest = nullptr;
    double least = 1e30;
    for (cpu::Algorithm a : probe.applicable<T>(p.layer->conv, which)) {
      auto c = std::make_unique<cpu::Convolution>(backend_.memory(), backend_.threads());
      c->only(a);
      run(p, pass, c.get());
      double t = 1e30;
      for (int i = 0; i < 5; i++) t = std::min(t, milliseconds([&] { run(p, pass, c.get()); }));
      if (t >= least) continue;
      least = t;
      fastest = c.get();
      chosen_.push_back(std::move(c));
    }
    return fastest;
  }

  Backend& backend_;
  Work work_;
  cpu::OneDnn library_;
  std::vector<std::unique_ptr<cpu::Convolution>> chosen_;
  std::vector<Place> places_;
  Tensor from_ = Tensor::zeros(backend_, {copied}), to_ = Tensor::zeros(backend_, {copied});
};

std::function<double()> floor_of(Backend& backend, const Work& work, DType dtype) {
  if (dtype == DType::f32) return [floor = std::make_shared<Floor<float>>(backend, work)] { return floor->step(); };
  return [floor = std::make_shared<Floor<bf16>>(backend, work)] { return floor->step(); };
}

// ---- the peer -------------------------------------------------------------------------------------------------------
class Peer {
 public:
  Peer(const std::string& python, int threads) {
    int to[2], from[2];
    if (pipe(to) || pipe(from)) return;
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      for (int fd : {to[0], to[1], from[0], from[1]}) close(fd);
      std::string n = std::to_string(threads);
      execlp(python.c_str(), python.c_str(), "tests/bench/peer.py", "--threads", n.c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    out_ = fdopen(to[1], "w");
    in_ = fdopen(from[0], "r");
    hello_ = line();
  }
  ~Peer() {
    if (out_) std::fputs("quit\n", out_), std::fclose(out_);
    if (in_) std::fclose(in_);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  bool alive() const { return hello_.starts_with("torch"); }
  std::string version() const { return hello_.substr(0, hello_.find_first_of("+ ", 6)); }  // "torch 2.9.1"
  std::string ask(const std::string& what) {
    std::fprintf(out_, "%s\n", what.c_str());
    std::fflush(out_);
    return line();
  }
  double number(const std::string& what) {
    std::string a = ask(what);
    std::size_t gap = a.find(' ');
    if (a.starts_with("error") || gap == std::string::npos) fail("the peer answered: ", a);
    return std::atof(a.c_str() + gap);
  }

 private:
  std::string line() {
    char buffer[1024];
    if (!in_ || !std::fgets(buffer, sizeof buffer, in_)) return "";
    buffer[std::strcspn(buffer, "\n")] = 0;
    return buffer;
  }
  pid_t pid_ = -1;
  std::FILE *in_ = nullptr, *out_ = nullptr;
  std::string hello_;
};

// Peak resident bytes of a few steps above what the process held before the model existed; in a process of its own.
double our_memory(const std::string& self, const std::string& name, DType dtype, int threads) {
  std::string command = self + " --memory " + name + " " + name_of(dtype) + " " + std::to_string(threads);
  std::FILE* p = popen(command.c_str(), "r");
  double bytes = 0;
  if (!p || std::fscanf(p, "%lf", &bytes) != 1) bytes = 0;
  if (p) pclose(p);
  return bytes;
}

void print_memory(const std::string& name, DType dtype, int threads) {
  auto backend = cpu_backend(threads);
  {  // as the peer does: code and tables that any model needs are not counted as the model's
    TimedModel tiny(*backend, "lenet5", 8, dtype);
    tiny.step(alone);
  }
  backend->memory().trim();
  const auto before = of_this_process("VmRSS:");
  std::ofstream("/proc/self/clear_refs") << "5";
  TimedModel ours(*backend, name, batch, dtype);
  for (int i = 0; i < 4; i++) ours.step(alone);
  std::printf("%.0f\n", double(of_this_process("VmHWM:")) - double(before));
}

// ---- a row ----------------------------------------------------------------------------------------------------------
struct Contestant {  // one PyTorch
  std::string python, version, format = {};
  std::vector<double> ms = {}, ratios = {};
  double bytes = 0;
};

struct Row {
  std::string name;
  DType dtype;
  int rounds;
  std::vector<Contestant> peers;
  std::vector<double> ours_ms = {}, floor_ms = {};
  double moved = 0, bytes = 0;  // of the calibration, relatively; of our memory
  std::string text() const { return "train/" + name + "/" + name_of(dtype); }
};

// How many of what takes so long fill a second.
int in_a_second(double ms) { return std::max(1, int(std::ceil(1000 / std::max(1e-3, ms)))); }

void measure(Row& row, Backend& backend) {
  row.ours_ms.clear(), row.floor_ms.clear();
  TimedModel ours(backend, row.name, batch, row.dtype);
  for (int i = 0; i < 3; i++) ours.step(alone);
  const int own = in_a_second(milliseconds([&] { ours.step(alone); }));
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<int> steps;
  for (Contestant& c : row.peers) {
    c.ms.clear(), c.ratios.clear();
    peers.push_back(std::make_unique<Peer>(c.python, backend.threads()));
    const std::string ready = peers.back()->ask(row.name + " " + name_of(row.dtype) + " " + std::to_string(batch));
    if (!ready.starts_with("ready")) fail(c.version, " answered: ", ready);
    std::istringstream(ready.substr(std::strlen("ready "))) >> c.format;
    steps.push_back(in_a_second(peers.back()->number("step 1")));
  }
  const std::function<double()> floor = floor_of(backend, work_of(ours), row.dtype);
  const int floors = in_a_second(floor());
  const double before = calibration();
  for (int r = 0; r < row.rounds; r++) {
    for (std::size_t i = 0; i < peers.size(); i++)
      row.peers[i].ms.push_back(peers[i]->number("step " + std::to_string(steps[i])));
    row.ours_ms.push_back(milliseconds([&] { ours.step(alone); }, own));
    for (int i = 0; i < floors; i++) row.floor_ms.push_back(floor());
    for (Contestant& c : row.peers) c.ratios.push_back(c.ms.back() / row.ours_ms.back());
  }
  row.moved = std::abs(calibration() - before) / before;
}

void measure_memory(Row& row, const std::string& self, int threads) {
  row.bytes = our_memory(self, row.name, row.dtype, threads);
  for (Contestant& c : row.peers) {
    Peer fresh(c.python, threads);
    fresh.ask(row.name + " " + name_of(row.dtype) + " " + std::to_string(batch) + " " + c.format);
    fresh.ask("step 3");
    c.bytes = fresh.number("memory");
  }
}

void print(const Row& row, MetricsFile& lines) {
  const double ours = median(row.ours_ms), least = median(row.floor_ms);
  std::printf("%-22s %9.2f %9.2f %9.2f %8.1f ", row.text().c_str(), ours, least, ours / least, row.bytes / 1e6);
  MetricFields fields{{"event", std::string("bench")},
                      {"bench", row.text()},
                      {"ours_ms", ours},
                      {"floor_ms", least},
                      {"of_floor", ours / least},
                      {"ours_bytes", row.bytes},
                      {"calibration_moved", row.moved}};
  for (const Contestant& c : row.peers) {
    std::printf(" | %9.2f %6.2f %8.1f", median(c.ms), median(c.ratios), c.bytes / 1e6);
    fields.push_back({c.version + " ms", median(c.ms)});
    fields.push_back({c.version + " ratio", median(c.ratios)});
    fields.push_back({c.version + " format", c.format});
    fields.push_back({c.version + " bytes", c.bytes});
  }
  std::printf("%s\n", row.moved < 0.05 ? "" : "  (the machine's speed moved by more than 5 %)");
  std::fflush(stdout);
  lines.write(fields);
}

// The PyTorchs of these Pythons, each version once.
std::vector<Contestant> torches(const std::string& pythons, int threads) {
  std::vector<Contestant> found;
  std::istringstream words(pythons);
  for (std::string python; words >> python;) {
    const Peer probe(python, threads);
    if (!probe.alive())
      std::printf("no peer: %s has no torch (apt-get install python3-torch, or a venv with pip install torch)\n",
                  python.c_str());
    else if (std::none_of(found.begin(), found.end(), [&](auto& c) { return c.version == probe.version(); }))
      found.push_back({python, probe.version()});
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--memory") {
    print_memory(argv[2], std::string(argv[3]) == "bf16" ? DType::bf16 : DType::f32, std::atoi(argv[4]));
    return 0;
  }
  return run_program(argc, argv, [&] {
    int threads = 0, rounds = 9;
    const char* named = std::getenv("PYTHONS");
    std::string only, jsonl = "build/bench.jsonl", pythons = named ? named : "/usr/bin/python3 python3";
    parse_command_line(
        argc, argv, "The training step beside PyTorch's and the floor.",
        {{"--threads", "threads (0: all cores)", "0", [&](const std::string& v) { threads = std::atoi(v.c_str()); }},
         {"--rounds", "alternations", "9", [&](const std::string& v) { rounds = std::max(1, std::atoi(v.c_str())); }},
         {"--only", "rows whose name contains this", "", [&](const std::string& v) { only = v; }},
         {"--jsonl", "file for the results", jsonl, [&](const std::string& v) { jsonl = v; }},
         {"--pythons", "Pythons that have a torch, or $PYTHONS", pythons, [&](const std::string& v) { pythons = v; }},
         {"--no-peer", "ours and the floor only", "", [&](const std::string&) { pythons = ""; }, true}});
    auto backend = cpu_backend(threads);
    std::printf("%s\n", backend->description().c_str());
    MetricsFile lines(jsonl);
    const std::vector<Contestant> peers = torches(pythons, backend->threads());
    std::printf("%-22s %9s %9s %9s %8s ", "training step, b=128", "ours ms", "floor ms", "of floor", "our MB");
    for (const Contestant& c : peers) std::printf(" | %s ms, ratio, MB ", c.version.c_str());
    std::printf("\n");
    for (const char* name : {"lenet5", "smallcnn", "resnet20", "resnet18"})
      for (DType dtype : {DType::f32, DType::bf16}) {
        Row row{name, dtype, rounds, peers};
        if (row.text().find(only) == std::string::npos || !backend->supports(dtype)) continue;
        for (int attempt = 0; attempt < 3 && (attempt == 0 || row.moved >= 0.05); attempt++) measure(row, *backend);
        measure_memory(row, argv[0], backend->threads());
        print(row, lines);
      }
  });
}
