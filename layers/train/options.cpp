#include "layers/train/options.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "core/build_info.h"
#include "core/team.h"
#include "layers/train/fit.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

[[noreturn]] void bad(const std::string& option, const std::string& value, const std::string& expected) {
  throw UsageError(option + " " + value + ": expected " + expected);
}

template <class T>
T number(const std::string& option, const std::string& text, T low, T high, const std::string& expected) {
  T v{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size() || !(v >= low) || !(v <= high))
    bad(option, text, expected);
  return v;
}

bool adaptive(const std::string& optimizer) { return optimizer == "adamw" || optimizer == "adam" || optimizer == "rmsprop"; }

std::string text_of(double v) {
  char s[32];
  std::snprintf(s, sizeof s, "%g", v);
  return s;
}

}  // namespace

Options parse_options(int argc, char** argv, const std::string& description, const Options& defaults,
                      const std::vector<std::string>& only, const std::vector<OptionSpec>& own) {
  Options o = defaults;
  std::vector<OptionSpec> specs;
  auto text = [&](std::string name, std::string& target, std::string help) {
    specs.push_back({name, help, target, [&target](const std::string& v) { target = v; }});
  };
  auto whole = [&](std::string name, int& target, int low, std::string help) {
    specs.push_back({name, help, std::to_string(target), [name, &target, low](const std::string& v) {
                       target = number<int>(name, v, low, 1'000'000'000,
                                            "a whole number from " + std::to_string(low) + " to 1000000000");
                     }});
  };
  auto real = [&](std::string name, double& target, double high, std::string help) {
    specs.push_back({name, help, text_of(target), [name, &target, high](const std::string& v) {
                       target = number<double>(name, v, 0, high, "a number from 0 to " + text_of(high));
                     }});
  };
  auto flag = [&](std::string name, bool& target, bool value, std::string help) {
    specs.push_back({name, help, "", [&target, value](const std::string&) { target = value; }, true});
  };
  auto channels = [&](std::string name, std::vector<float>& target, float low, std::string help) {
    specs.push_back({name, help, "", [name, &target, low](const std::string& v) {
                       target.clear();
                       std::istringstream parts(v);
                       for (std::string part; std::getline(parts, part, ',');)
                         target.push_back(number<float>(name, part, low, 1e6f, "a number for all channels, or one for each: 0.49,0.48,0.45"));
                     }});
  };
  text("--data", o.data, "folder of the data sets, or 'synthetic' (default: $TANDEM_DATA, then data/)");
  if (!o.data_set.empty()) {
    text("--data-set", o.data_set, dataset_names() + ", a folder of pictures, or an .npy file");
    whole("--size", o.folder.size, 0,
          "side to which pictures of a folder are brought (0: they are squares of one size)");
    flag("--skip-broken", o.folder.skip_broken, true, "leave out pictures of a folder that cannot be decoded");
  }
  specs.push_back({"--model", model_names(), o.model, [&](const std::string& v) {
                     try {
                       check_model_name(v);
                     } catch (const Error& e) {
                       throw UsageError(std::string("--model: ") + e.what());
                     }
                     o.model = v;
                   }});
  whole("--epochs", o.epochs, 1, "passes over the training pictures");
  whole("--batch", o.batch, 1, "pictures per step, shared by the ranks (under an asynchronous strategy: per push)");
  whole("--batch-per-rank", o.batch_per_rank, 0, "instead of --batch: so many on each rank (0: --batch)");
  real("--lr", o.learning_rate, 1e6, "learning rate (the peak, with one-cycle)");
  specs.push_back({"--lr-scale", "with --batch-per-rank, --lr on n ranks: clipped, linear, sqrt or none", "clipped",
                   [&](const std::string& v) {
                     const auto scale = rate_scale_in(v);
                     if (!scale) bad("--lr-scale", v, "clipped, linear, sqrt or none");
                     o.lr_scale = *scale;
                   }});
  specs.push_back({"--schedule", "constant, cosine, one-cycle, step:30:0.1, step:100,150:0.1, warmup:5+…", o.schedule,
                   [&](const std::string& v) {
                     try {
                       Schedule::parse(v);
                     } catch (const Error& e) {
                       throw UsageError(std::string("--schedule: ") + e.what());
                     }
                     o.schedule = v;
                   }});
  specs.push_back({"--optimizer", "sgd, lars, adamw, adam or rmsprop (--lr of the last three is 0.001 if not given)",
                   o.optimizer, [&](const std::string& v) {
                     if (v != "sgd" && v != "lars" && !adaptive(v)) bad("--optimizer", v, "sgd, lars, adamw, adam or rmsprop");
                     o.optimizer = v;
                   }});
  real("--momentum", o.momentum, 0.9999, "momentum (with sgd in Nesterov's form; beta1 of adamw and adam; 0: none, rmsprop's default)");
  real("--weight-decay", o.weight_decay, 1, "weight decay, not on biases and batch norm (default of adamw 0.01, of adam and rmsprop 0)");
  real("--label-smoothing", o.label_smoothing, 0.999, "share of the target spread over all classes");
  real("--clip", o.clip, 1e9, "largest gradient norm (0: no clipping)");
  real("--ema", o.ema, 0.99999, "decay of an average of the weights, which is then evaluated (0: none)");
  whole("--accumulate", o.accumulate, 1, "batches to a step");
  flag("--sync-bn", o.sync_batch_norm, true, "batch norm over the pictures of all ranks");
  flag("--augment", o.augment, true, "random crop (4 pixels, or an eighth of the side) and horizontal flip");
  flag("--no-augment", o.augment, false, "neither");
  channels("--mean", o.mean, -1e6f, "of the channels, with pixels from 0 to 1 (default: the data set's own)");
  channels("--std", o.deviation, 1e-6f, "their standard deviation (default: the data set's own)");
  whole("--cutout", o.cutout, 0, "side of a random square that is blanked (0: none)");
  real("--mixup", o.mixup, 4, "mix pictures in pairs, in proportions from Beta(a, a) (0: not)");
  specs.push_back({"--seed", "seed of all random numbers", std::to_string(o.seed), [&](const std::string& v) {
                     o.seed = number<std::uint64_t>("--seed", v, 0, ~std::uint64_t{0},
                                                    "a whole number from 0 to 18446744073709551615");
                   }});
  specs.push_back({"--device", "cpu, reference, cuda or cuda:INDEX", o.device, [&](const std::string& v) {
                     if (v != "cpu" && v != "reference" && v != "cuda" && !v.starts_with("cuda:"))
                       bad("--device", v, "cpu, reference, cuda or cuda:INDEX");
                     o.device = v;
                   }});
  specs.push_back(
      {"--dtype", "of activations: f32, bf16, or f16 with loss scaling (cuda); parameters are f32", name_of(o.dtype), [&](const std::string& v) {
         if (v == "f32")
           o.dtype = DType::f32;
         else if (v == "bf16")
           o.dtype = DType::bf16;
         else if (v == "f16")
           o.dtype = DType::f16;
         else
           bad("--dtype", v, "f32, bf16 or f16");
       }});
  // More threads than cores only wait for each other; the bound catches the slip of a finger.
  const int most = 4 * std::max(1, int(std::thread::hardware_concurrency()));
  specs.push_back({"--threads", "threads of the CPU backend (0: OMP_NUM_THREADS, else the cores it may use, or a rank's share of them)",
                   std::to_string(o.threads), [&o, most](const std::string& v) {
                     o.threads = number<int>("--threads", v, 0, most,
                                             "a whole number from 0 to " + std::to_string(most) + " (four per core)");
                   }});
  whole("--val", o.val, 0, "training pictures to hold back for choices");
  whole("--patience", o.patience, 0, "stop after so many epochs without a better validation (needs --val; 0: never)");
  text("--checkpoint", o.checkpoint,
       "folder for last.safetensors (every epoch, and when stopped) and best.safetensors");
  text("--resume", o.resume, "go on from a checkpoint, or from the last one in a folder");
  whole("--stop-after", o.stop_after, 0, "stop after this step of the run (0: do not)");
  flag("--evaluate", o.evaluate, true, "no training: the test accuracy of the weights of --resume or --import-torch");
  text("--metrics", o.metrics,
       "file for metrics, one JSON object a line; replaces an earlier one, --resume goes on with it");
  whole("--log-every", o.log_every, 0, "steps between two step lines in the metrics (0: none)");
  flag("--summary", o.observe.summary, true, "print the table of modules first");
  text("--dot", o.observe.dot, "file for a picture of the tape (render it with dot -Tsvg)");
  flag("--profile", o.observe.profile, true, "print where the time of a step goes");
  text("--trace", o.observe.trace, "file for Chrome's trace viewer or ui.perfetto.dev");
  flag("--memory", o.observe.memory, true, "print who holds the memory in a step");
  flag("--overfit-batch", o.overfit_batch, true, "train on one batch only: can the model learn at all?");
  text("--import-torch", o.exchange.import_torch, "PyTorch weights to begin with (safetensors of a state_dict)");
  text("--export-torch", o.exchange.export_torch, "file for the trained weights, for PyTorch (safetensors)");
  text("--export-onnx", o.exchange.export_onnx, "file for the trained model as an ONNX graph");
  text("--tensorboard", o.exchange.tensorboard, "folder for TensorBoard: curves, and histograms once an epoch");
  flag("--deterministic", o.deterministic, true, "bit-identical for the same binary, device and threads");
  flag("--exact-conv", o.exact_conv, true, "no Winograd convolution");
  flag("--tf32", o.tf32, true, "f32 products with 10 bits of precision, on a GPU's tensor cores");
  for (const std::string& name : only)
    require(std::any_of(specs.begin(), specs.end(), [&](const OptionSpec& s) { return s.name == name; }),
            "parse_options: there is no option ", name);
  if (!only.empty())
    std::erase_if(specs,
                  [&](const OptionSpec& s) { return std::find(only.begin(), only.end(), s.name) == only.end(); });
  specs.insert(specs.end(), own.begin(), own.end());
  for (OptionSpec& s : specs)
    s.set = [&o, name = s.name, set = std::move(s.set)](const std::string& v) { set(v), o.given.insert(name); };
  if (rank_from_environment() > 0 && !std::freopen("/dev/null", "w", stdout)) fail("/dev/null cannot be opened");
  parse_command_line(argc, argv, description, specs);
  if (o.momentum == 0) o.nesterov = false;
  if (adaptive(o.optimizer) && !o.given.count("--lr")) o.learning_rate = 1e-3;
  if (adaptive(o.optimizer) && !o.given.count("--weight-decay")) o.weight_decay = o.optimizer == "adamw" ? 1e-2 : 0;
  if (o.optimizer == "rmsprop" && !o.given.count("--momentum")) o.momentum = 0;
  refuse_contradictions(o);
  return o;
}

std::unique_ptr<Optimizer> make_optimizer(const Options& o) {
  std::unique_ptr<Optimizer> optimizer;
  if (o.optimizer == "adamw" || o.optimizer == "adam")
    optimizer = std::make_unique<AdamW>(AdamWOptions{.learning_rate = o.learning_rate,
                                                     .beta1 = o.momentum,
                                                     .weight_decay = o.weight_decay,
                                                     .decoupled = o.optimizer == "adamw"});
  else if (o.optimizer == "rmsprop")
    optimizer = std::make_unique<RMSprop>(
        RMSpropOptions{.learning_rate = o.learning_rate, .momentum = o.momentum, .weight_decay = o.weight_decay});
  else if (o.optimizer == "lars")
    optimizer = std::make_unique<LARS>(
        LARSOptions{.learning_rate = o.learning_rate, .momentum = o.momentum, .weight_decay = o.weight_decay});
  else
    optimizer = std::make_unique<SGD>(SGDOptions{.learning_rate = o.learning_rate,
                                                 .momentum = o.momentum,
                                                 .nesterov = o.nesterov,
                                                 .weight_decay = o.weight_decay});
  if (o.dtype == DType::f16) optimizer->loss_scaling.emplace();
  optimizer->clip_norm = o.clip;
  return optimizer;
}

void end_after_help() {
  std::cout.flush();
  std::exit(std::fflush(stdout) != 0 || std::ferror(stdout) || !std::cout ? 1 : 0);
}

void refuse_value(const OptionSpec& spec) {
  throw UsageError(spec.name + (spec.flag ? " takes no value" : " needs a value"));
}

void set_options(const std::vector<OptionSpec>& specs, const CommandLine& line, std::vector<std::string>* words) {
  auto named = [&](const std::string& word) {
    return std::any_of(specs.begin(), specs.end(), [&](const OptionSpec& s) { return s.name == word; });
  };
  for (const auto& [spec, value] : line.given)  // a value left out has the next option's name put in its place
    if (!spec->flag && (value.empty() || value.starts_with("--") || named(value))) refuse_value(*spec);
  for (const std::string& word : line.unknown) {
    if (word == "--version") {
      std::printf("%s\n", build_info());
      end_after_help();
    }
    if (words && !word.starts_with("-")) {
      words->push_back(word);
      continue;
    }
    throw UsageError(
        (word.starts_with("-") ? "unknown option " + word.substr(0, word.find('=')) : "unexpected argument " + word) +
        (specs.empty() ? ": this program takes none" : " (--help lists the options)"));
  }
  std::map<std::string, std::string> seen;
  for (const auto& [spec, value] : line.given) {
    auto [first, fresh] = seen.emplace(spec->name, value);
    if (!fresh && !spec->flag)
      throw UsageError(spec->name + " is given twice (" + first->second + " and " + value + ")");
  }
  for (const auto& [name, value] : seen)
    if (name.starts_with("--no-") && seen.count("--" + name.substr(5)))
      throw UsageError("--" + name.substr(5) + " and " + name + " contradict each other");
  for (const auto& [spec, value] : line.given) spec->set(value);
}

namespace {
int cuda_index(const std::string& device) {  // of "cuda:1"
  try {
    return number<int>("--device", device.substr(5), 0, 1023, "");
  } catch (const UsageError&) {
    bad("--device", device, "cuda or cuda:INDEX, from 0");
  }
}
}  // namespace

int device_of_rank(int local_rank, int devices) { return devices > 0 ? local_rank % devices : 0; }

int threads_of_rank(int local_size, int cores, int allowed) { return std::min(allowed, std::max(1, cores / local_size)); }

namespace {
// Where nobody says, ranks of one host do not take each other's cores: threads that wait for each other there spin in vain.
int threads_for(const Options& o) {
  const int ranks = local_size_from_environment();
  if (o.threads > 0 || ranks < 2 || std::getenv("OMP_NUM_THREADS")) return o.threads;
  return threads_of_rank(ranks, int(sysconf(_SC_NPROCESSORS_ONLN)), default_threads());
}
}  // namespace

std::unique_ptr<Backend> make_backend(const Options& o) {
  std::unique_ptr<Backend> backend;
  try {
    if (o.device == "reference")
      backend = reference_backend(threads_for(o));
    else if (o.device == "cpu")
      backend = cpu_backend(threads_for(o));
    else
      backend = cuda_backend(o.device == "cuda"
                                 ? device_of_rank(local_rank_from_environment(), cuda_devices())
                                 : cuda_index(o.device));
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {
    throw UsageError("--device " + o.device + ": " + e.what());
  }
  if (!backend->supports(o.dtype))
    throw UsageError(std::string("--dtype ") + name_of(o.dtype) + ": not supported by " + backend->description() +
                     (o.dtype == DType::f16 ? " (f16 is for --device cuda)" : ""));
  backend->deterministic(o.deterministic);
  if (o.exact_conv && backend->name() == "reference")
    throw UsageError("--exact-conv leaves Winograd's convolution out, and the reference backend has none: leave the option out");
  backend->exact_convolution(o.exact_conv);
  if (o.tf32 && !backend->on_device()) throw UsageError("--tf32 is for --device cuda");
  backend->tf32(o.tf32);
  if (backend->on_device()) {  // two libraries of one name on a machine are found out here
    std::fprintf(stderr, "%s\n", backend->description().c_str());
    for (const std::string& file : backend->libraries()) std::fprintf(stderr, "  %s\n", file.c_str());
  }
  return backend;
}

int run_program(int argc, char** argv, const std::function<void()>& body) {
  std::signal(SIGXFSZ,
              SIG_IGN);  // a file that may not grow further is then an error of write(), named and cleaned up after
  std::string program = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "tandem";
  auto say = [&](const char* what) { std::fprintf(stderr, "%s: %s\n", program.c_str(), what); };
  try {
    // Libraries may have taken SIGHUP for themselves before main() (UCX does): a closed terminal must end the program.
    if (std::signal(SIGHUP, SIG_DFL) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
    body();
    // What was printed may still wait in a buffer, for a disk that is full.
    if (std::fflush(stdout) != 0 || std::ferror(stdout))
      fail("standard output could not be written: ", errno ? std::strerror(errno) : "an earlier line was lost");
    return stopping_signal() ? 128 + stopping_signal() : 0;
  } catch (const UsageError& e) {
    say(e.what());
    return 2;
  } catch (const std::bad_alloc&) {
    say("out of memory");
    return 1;
  } catch (const std::exception& e) {
    say(e.what());
    return 1;
  }
}

}  // namespace tandem
