#include "layers/train/options.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/machine.h"
#include "core/team.h"

namespace tandem {
namespace {

bool adaptive(const std::string& optimizer) {
  return optimizer == "adamw" || optimizer == "adam" || optimizer == "rmsprop";
}

int cuda_index(const std::string& device) {  // of "cuda:1"
  const auto index = parsed<int>(device.substr(5));
  if (!index || *index < 0 || *index > 1023) fail("expected cuda or cuda:INDEX, from 0");
  return *index;
}

// By default the ranks of a host share its cores: more threads than cores would only wait for each other.
int threads_for(const RunConfig& o) {
  const int ranks = local_size_from_environment();
  if (o.threads > 0 || ranks < 2 || std::getenv("OMP_NUM_THREADS")) return o.threads;
  const double cores = std::min(double(sysconf(_SC_NPROCESSORS_ONLN)), std::ceil(core_quota()));
  return threads_of_rank(ranks, int(cores), default_threads());
}

}  // namespace

RunConfig parse_options(int argc, char** argv, const std::string& description, const RunConfig& defaults,
                        const std::vector<std::string>& only, const std::vector<OptionSpec>& own) {
  RunConfig o = defaults;
  if (o.schedule.empty()) o.schedule = usual_schedule;
  std::vector<OptionSpec> specs = option_table(o);
  for (const std::string& name : only)
    require(std::ranges::count(specs, name, &OptionSpec::name), "parse_options: there is no option ", name);
  if (!only.empty()) std::erase_if(specs, [&](const OptionSpec& s) { return !std::ranges::count(only, s.name); });
  for (const OptionSpec& s : specs) o.accepted.push_back(s.name);
  specs.insert(specs.end(), own.begin(), own.end());
  if (rank_from_environment() > 0 && !std::freopen("/dev/null", "w", stdout)) fail("/dev/null cannot be opened");
  o.given = parse_command_line(argc, argv, description, specs);
  if (o.momentum == 0) o.nesterov = false;
  if (o.optimizer != defaults.optimizer) {  // the program's defaults are for its own optimizer
    if (adaptive(o.optimizer) && !o.given.count("--lr")) o.learning_rate = 1e-3;
    if (adaptive(o.optimizer) && !o.given.count("--weight-decay")) o.weight_decay = o.optimizer == "adamw" ? 1e-2 : 0;
    if (o.optimizer == "rmsprop" && !o.given.count("--momentum")) o.momentum = 0;
  }
  check_options_agree(o);
  if (o.overfit_batch) o.epochs = 1;
  return o;
}

std::unique_ptr<Optimizer> make_optimizer(const RunConfig& o) {
  std::unique_ptr<Optimizer> optimizer;
  const double rate = o.learning_rate, momentum = o.momentum, decay = o.weight_decay;
  if (o.optimizer == "adamw" || o.optimizer == "adam")
    optimizer.reset(new AdamW(
        {.learning_rate = rate, .beta1 = momentum, .weight_decay = decay, .decoupled = o.optimizer == "adamw"}));
  else if (o.optimizer == "rmsprop")
    optimizer.reset(new RMSprop({.learning_rate = rate, .momentum = momentum, .weight_decay = decay}));
  else if (o.optimizer == "lars")
    optimizer.reset(new LARS({.learning_rate = rate, .momentum = momentum, .weight_decay = decay}));
  else
    optimizer.reset(
        new SGD({.learning_rate = rate, .momentum = momentum, .nesterov = o.nesterov, .weight_decay = decay}));
  if (o.dtype == DType::f16) optimizer->loss_scaling.emplace();
  optimizer->clip_norm = o.clip;
  return optimizer;
}

int device_of_rank(int local_rank, int devices) { return devices > 0 ? local_rank % devices : 0; }

int threads_of_rank(int local_size, int cores, int allowed) {
  return std::min(allowed, std::max(1, cores / local_size));
}

std::unique_ptr<Backend> make_backend(const RunConfig& o) {
  std::unique_ptr<Backend> backend;
  try {
    if (o.device == "reference")
      backend = reference_backend(threads_for(o));
    else if (o.device == "cpu")
      backend = cpu_backend(threads_for(o));
    else
      backend = cuda_backend(o.device == "cuda" ? device_of_rank(local_rank_from_environment(), cuda_devices())
                                                : cuda_index(o.device));
  } catch (const Error& e) {
    refuse("--device ", o.device, ": ", e.what());
  }
  if (!backend->supports(o.dtype))
    refuse("--dtype ", name_of(o.dtype), ": not supported by ", backend->description(),
           o.dtype == DType::f16 ? " (f16 is for --device cuda)" : "");
  backend->deterministic(o.deterministic);
  if (o.exact_conv && backend->name() == "reference")
    refuse("--exact-conv leaves Winograd's convolution out, and the reference backend has none: leave the option out");
  backend->exact_convolution(o.exact_conv);
  if (o.tf32 && !backend->on_device()) refuse("--tf32 is for --device cuda");
  backend->tf32(o.tf32);
  if (backend->on_device()) {  // detects a second installed version of a library
    std::fprintf(stderr, "%s\n", backend->description().c_str());
    for (const std::string& file : backend->libraries()) std::fprintf(stderr, "  %s\n", file.c_str());
  }
  return backend;
}

int run_program(int argc, char** argv, const std::function<void()>& body) {
  // A file size limit then makes write() fail, with a message and clean-up
  std::signal(SIGXFSZ, SIG_IGN);
  std::string program = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "tandem";
  auto say = [&](const char* what) { std::fprintf(stderr, "%s: %s\n", program.c_str(), what); };
  try {
    // Libraries may handle SIGHUP before main() (UCX does), but a closed terminal must end the program.
    std::signal(SIGHUP, hangup_ignored() ? SIG_IGN : SIG_DFL);
    body();
    // Flushes buffered output, because the disk may be full.
    if (std::fflush(stdout) != 0 || std::ferror(stdout))
      fail("standard output could not be written: ", errno ? std::strerror(errno) : "an earlier line was lost");
    return stopping_signal() ? 128 + stopping_signal() : 0;
  } catch (const UsageError& e) {
    say(e.what());
    return 2;
  } catch (const std::bad_alloc&) {
    say("out of memory");
  } catch (const std::exception& e) {
    say(e.what());
  }
  return 1;
}

}  // namespace tandem
