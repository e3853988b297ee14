#include "layers/train/option_table.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <thread>

#include "core/files/json.h"
#include "core/text.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

[[noreturn]] void bad(const std::string& option, const std::string& value, const std::string& expected) {
  throw UsageError(option + " " + value + ": expected " + expected);
}

template <class T>
T number(const std::string& option, const std::string& text, T low, T high, const std::string& expected) {
  const auto v = parsed<T>(text);
  if (!v || !(*v >= low && *v <= high)) bad(option, text, expected);
  return *v;
}

// Rows by the type of their field. Each call appends a row and returns it.
struct Rows {
  std::vector<OptionSpec> all;

  OptionSpec& text(std::string name, std::string& field, std::string help) {
    return add({name, help, field, [&field](const std::string& v) { field = v; }}, [&field] { return field; });
  }
  // check throws Error on a bad value.
  OptionSpec& checked(std::string name, std::string& field, std::string help,
                      std::function<void(const std::string&)> check) {
    auto set = [name, &field, check](const std::string& v) {
      try {
        check(v);
      } catch (const UsageError&) {
        throw;
      } catch (const Error& e) {
        throw UsageError(name + ": " + e.what());
      }
      field = v;
    };
    return add({name, help, field, set}, [&field] { return field; });
  }
  template <class T>
  OptionSpec& whole(std::string name, T& field, T low, std::string help, T high = 1'000'000'000,
                    std::string also = "") {
    auto set = [=, &field](const std::string& v) {
      field = number<T>(name, v, low, high,
                        "a whole number from " + std::to_string(low) + " to " + std::to_string(high) + also);
    };
    return add({name, help, std::to_string(field), set}, [&field] { return std::to_string(field); });
  }
  OptionSpec& real(std::string name, double& field, double high, std::string help) {
    auto set = [=, &field](const std::string& v) {
      field = number<double>(name, v, 0, high, "a number from 0 to " + digits(high));
    };
    return add({name, help, digits(field), set}, [&field] { return digits(field); });
  }
  OptionSpec& flag(std::string name, bool& field, bool value, std::string help) {
    return add({name, help, "", [&field, value](const std::string&) { field = value; }, true},
               [&field] { return field ? "yes" : "no"; });
  }
  // One of some words: `in` gives the field's value for one, `out` the word.
  OptionSpec& bytes(std::string name, std::size_t& field, std::string help) {
    auto set = [=, &field](const std::string& v) {
      const std::string expected = "bytes, or with a unit K, M, G or T: 800M, 1.5G";
      const std::size_t digits = std::min(v.find_first_not_of("0123456789."), v.size()),
                        power = v.size() > digits ? std::string("KMGT").find(v[digits]) : 0;
      if (digits == 0 || v.size() > digits + 1 || power == std::string::npos) bad(name, v, expected);
      const auto bytes = parsed<double>(v.substr(0, digits));
      if (!bytes || *bytes > 1e15) bad(name, v, expected);
      field = std::size_t(*bytes * std::pow(1024.0, v.size() > digits ? double(power + 1) : 0.0));
    };
    return add({name, help, "0", set}, [&field] { return std::to_string(field); });
  }
  template <class T>
  OptionSpec& choice(std::string name, T& field, std::string help, std::string words,
                     std::optional<T> (*in)(const std::string&), const char* (*out)(T)) {
    auto set = [=, &field](const std::string& v) {
      const std::optional<T> chosen = in(v);
      if (!chosen) bad(name, v, words);
      field = *chosen;
    };
    return add({name, help, out(field), set}, [=, &field] { return out(field); });
  }
  OptionSpec& channels(std::string name, std::vector<float>& field, float low, std::string help) {
    auto set = [=, &field](const std::string& v) {
      field.clear();
      std::istringstream parts(v);
      for (std::string part; std::getline(parts, part, ',');)
        field.push_back(
            number<float>(name, part, low, 1e6f, "a number for all channels, or one for each: 0.49,0.48,0.45"));
    };
    return add({name, help, "", set}, {});
  }

 private:
  OptionSpec& add(OptionSpec row, std::function<std::string()> value) {
    row.value = std::move(value);
    return all.emplace_back(std::move(row));
  }
};

std::optional<SwapMode> swap_in(const std::string& v) {
  for (SwapMode s : {SwapMode::off, SwapMode::automatic, SwapMode::swap, SwapMode::recompute})
    if (v == name_of(s)) return s;
  return {};
}

std::optional<DType> dtype_in(const std::string& v) {
  if (v == "f32") return DType::f32;
  if (v == "bf16") return DType::bf16;
  if (v == "f16") return DType::f16;
  return {};
}

void training(Rows& t, Options& o) {
  t.checked("--model", o.model, model_names(), [](const std::string& v) { check_model_name(v); }).decides = true;
  t.whole("--epochs", o.fit.epochs, 1, "passes over the training pictures");
  OptionSpec& batch = t.whole("--batch", o.batch, 1,
                              "pictures per step, shared by the ranks (under an asynchronous strategy: per push)");
  batch.decides = true;
  if (o.chooses_batch) {
    batch.help += "; auto: the fastest within the memory, with --lr matched to it";
    batch.set = [&o, whole = batch.set](const std::string& v) { v == "auto" ? void(o.batch = 0) : whole(v); };
  }
  batch.value = [&o] {
    return o.batch_per_rank ? std::to_string(o.batch_per_rank) + " per rank" : std::to_string(o.batch);
  };
  t.whole("--batch-per-rank", o.batch_per_rank, 0, "pictures per step and rank, instead of --batch (0: --batch)");
  t.real("--lr", o.learning_rate, 1e6, "learning rate (the peak, with one-cycle)");
  t.choice("--lr-scale", o.fit.lr_scale,
           "how --lr grows with n ranks, with --batch-per-rank: clipped, linear, sqrt or none",
           "clipped, linear, sqrt or none", rate_scale_in, name_of);
  t.checked("--schedule", o.schedule, "constant, cosine, one-cycle, step:30:0.1, step:100,150:0.1, warmup:5+…",
            [](const std::string& v) { Schedule::parse(v); })
      .decides = true;
  t.checked("--optimizer", o.optimizer,
            "sgd, lars, adamw, adam or rmsprop (--lr of the last three is 0.001 if not given)",
            [](const std::string& v) {
              const std::vector<std::string> known = {"sgd", "lars", "adamw", "adam", "rmsprop"};
              if (std::find(known.begin(), known.end(), v) == known.end())
                bad("--optimizer", v, "sgd, lars, adamw, adam or rmsprop");
            });
  t.real("--momentum", o.momentum, 0.9999,
         "momentum (with sgd in Nesterov's form; beta1 of adamw and adam; 0: none, rmsprop's default)")
      .decides = true;
  t.real("--weight-decay", o.weight_decay, 1,
         "weight decay, not on biases and batch norm (default of adamw 0.01, of adam and rmsprop 0)")
      .decides = true;
  t.real("--label-smoothing", o.label_smoothing, 0.999, "share of the target spread over all classes").decides = true;
  t.real("--clip", o.clip, 1e9, "largest gradient norm (0: no clipping)");
  t.real("--ema", o.fit.ema, 0.99999, "decay of an average of the weights, which is then evaluated (0: none)");
  t.whole("--accumulate", o.fit.accumulate, 1, "batches per step");
  t.flag("--sync-bn", o.fit.sync_batch_norm, true, "batch norm over the pictures of all ranks");
}

void data(Rows& t, Options& o) {
  t.text("--data", o.data, "folder of the data sets, or 'synthetic' (default: $TANDEM_DATA, then data/)").decides =
      true;
  if (o.data_set.empty()) return;
  t.text("--data-set", o.data_set, dataset_names() + ", a folder of pictures, or an .npy file").decides = true;
  t.whole("--size", o.folder.size, 0,
          "side to which pictures of a folder are brought (0: they are squares of one size)");
  t.flag("--skip-broken", o.folder.skip_broken, true, "leave out pictures of a folder that cannot be decoded");
}

void pictures(Rows& t, Options& o) {
  t.flag("--augment", o.augment, true, "crop randomly (4 pixels, or an eighth of the side) and flip horizontally")
      .decides = true;
  t.flag("--no-augment", o.augment, false, "no random crops and flips");
  t.channels("--mean", o.mean, -1e6f, "mean of each channel, with pixels from 0 to 1 (default: of the data set)");
  t.channels("--std", o.std, 1e-6f, "standard deviation of each channel (default: of the data set)");
  t.whole("--cutout", o.cutout, 0, "side of a random square that is blanked (0: none)").decides = true;
  t.real("--mixup", o.mixup, 4, "a of the distribution Beta(a, a) by which pictures are mixed in pairs (0: no mixing)")
      .decides = true;
}

void machine(Rows& t, Options& o) {
  t.whole<std::uint64_t>("--seed", o.fit.seed, 0, "seed of all random numbers", ~std::uint64_t{0});
  t.checked("--device", o.device, "cpu, reference, cuda or cuda:INDEX", [](const std::string& v) {
    if (v != "cpu" && v != "reference" && v != "cuda" && !v.starts_with("cuda:"))
      bad("--device", v, "cpu, reference, cuda or cuda:INDEX");
  });
  t.choice("--dtype", o.dtype, "type of activations: f32, bf16, or f16 with loss scaling (cuda); parameters are f32",
           "f32, bf16 or f16", dtype_in, name_of)
      .decides = true;
  // More threads than cores only wait for each other; the bound catches typing errors.
  const int most = 4 * std::max(1, int(std::thread::hardware_concurrency()));
  t.whole("--threads", o.threads, 0,
          "threads of the CPU backend (0: OMP_NUM_THREADS, else the cores it may use, or a rank's share of them)", most,
          " (four per core)");
}

void memory(Rows& t, Options& o) {
  t.bytes("--memory-budget", o.fit.memory_budget,
          "bytes that the run may take on its device: 800M, 4G (0: all there are)");
  t.choice("--swap", o.fit.swap,
           "how --memory-budget is enforced: auto, swap (to --scratch), recompute, or off (only measured)",
           "auto, swap, recompute or off", swap_in, name_of);
  t.text("--scratch", o.fit.scratch,
         "where tensors are swapped to: a folder (default: $TMPDIR, then /tmp); on a GPU the host's memory: pinned "
         "(default) or "
         "unified");
}

void schedule_of_run(Rows& t, Options& o) {
  t.whole("--val", o.val, 0, "training pictures to hold back for choices").decides = true;
  t.whole("--patience", o.fit.patience, 0,
          "stop after this number of epochs without a better validation (needs --val; 0: never)");
  t.text("--checkpoint", o.fit.checkpoint,
         "folder for last.safetensors (every epoch, and when stopped) and best.safetensors");
  t.text(
      "--resume", o.fit.resume,
      "continue from a checkpoint, or from the last one in a folder; auto: from the one in --checkpoint, if it exists");
  t.whole<std::int64_t>("--stop-after", o.fit.stop_after, 0, "stop after this step of the run (0: never)");
  t.flag("--evaluate", o.fit.evaluate, true,
         "do not train; print the test accuracy of the weights of --resume or --import-torch");
}

void reports(Rows& t, Options& o) {
  t.text("--metrics", o.fit.metrics,
         "file for metrics, one JSON object a line; replaces an existing file; --resume appends");
  t.whole<std::int64_t>("--log-every", o.fit.log_every, 0,
                        "steps between two step lines in the metrics (0: no step lines)");
  t.flag("--summary", o.fit.profiler.summary, true, "print the table of modules first");
  t.text("--dot", o.fit.profiler.dot, "file for a picture of the tape (render it with dot -Tsvg)");
  t.flag("--profile", o.fit.profiler.profile, true, "print the time of each operation of a step");
  t.text("--trace", o.fit.profiler.trace, "file for Chrome's trace viewer or ui.perfetto.dev");
  t.flag("--memory", o.fit.profiler.memory, true, "print the memory use of a step");
  t.flag("--overfit-batch", o.fit.overfit_batch, true, "train on one batch only, to test whether the model can learn");
  t.text("--import-torch", o.fit.import_export.import_torch,
         "file with the first weights, from PyTorch (safetensors of a state_dict)");
  t.text("--export-torch", o.fit.import_export.export_torch, "file for the trained weights, for PyTorch (safetensors)");
  t.text("--export-onnx", o.fit.import_export.export_onnx, "file for the trained model as an ONNX graph");
  t.text("--tensorboard", o.fit.import_export.tensorboard,
         "folder for TensorBoard: curves, and histograms once an epoch");
}

void arithmetic(Rows& t, Options& o) {
  t.flag("--deterministic", o.deterministic, true, "bit-identical for the same binary, device and threads");
  t.flag("--exact-conv", o.exact_conv, true, "no Winograd convolution").decides = true;
  t.flag("--tf32", o.tf32, true, "f32 products with 10 bits of precision, on a GPU's tensor cores");
}

}  // namespace

std::vector<OptionSpec> option_table(Options& o) {
  Rows t;
  t.all.reserve(64);  // references to rows stay valid
  data(t, o), training(t, o), pictures(t, o), machine(t, o), memory(t, o), schedule_of_run(t, o), reports(t, o),
      arithmetic(t, o);
  return std::move(t.all);
}

Settings settings_of(const Options& options) {
  Options o = options;
  Settings s;
  for (const OptionSpec& row : option_table(o))
    if (row.decides &&
        (o.accepted.empty() || std::find(o.accepted.begin(), o.accepted.end(), row.name) != o.accepted.end()))
      s.push_back({row.name, plain_text(row.value())});  // a path may hold any bytes, a checkpoint UTF-8
  return s;
}

}  // namespace tandem
