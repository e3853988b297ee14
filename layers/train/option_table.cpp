#include <cmath>
#include <thread>

#include "core/files/files.h"
#include "core/files/json.h"
#include "datasets/partition.h"
#include "layers/models/models.h"
#include "layers/train/options.h"

namespace tandem {
namespace {

using Decides = OptionSpec::Decides;
using Rows = OptionRows;
constexpr Decides program = Decides::program, in_fit = Decides::fit;
constexpr int large = Rows::large;

// "800M", "1.5G" → bytes.
std::size_t bytes_in(const std::string& option, const std::string& text) {
  const std::size_t unit = text.empty() ? std::string::npos : std::string("KMGT").find(text.back());
  const bool plain = unit == std::string::npos;
  const double number = parsed<double>(plain ? text : text.substr(0, text.size() - 1)).value_or(-1);
  if (!(number >= 0 && number <= 1e15))
    refuse(option, " ", text, ": expected bytes, or with a unit K, M, G or T: 800M, 1.5G");
  return std::size_t(number * std::pow(1024.0, plain ? 0.0 : double(unit + 1)));
}

// A number for each channel, or one for all.
void channels(Rows& t, const std::string& name, std::vector<float>& field, float low, const std::string& help) {
  auto set = [=, &field](const std::string& v) {
    field.clear();
    for (const std::string& part : parts_of(v, ','))
      field.push_back(
          Rows::parse<float>(name, part, low, 1e6f, "a number for all channels, or one for each: 0.49,0.48,0.45"));
  };
  t.add({name, help, "", set});
}

void training(Rows& t, RunConfig& o) {
  t.text("--model", o.model, model_names(), program, check_model_name);
  t.number("--epochs", o.epochs, 1, large, "passes over the training pictures", in_fit);
  OptionSpec& batch = t.number("--batch", o.batch, 1, large,
                               "pictures per step in all, or per push of an asynchronous worker", program);
  if (o.chooses_batch) {
    batch.help += "; auto: the fastest within the memory, with --lr matched to it";
    batch.set = [&o, whole = batch.set](const std::string& v) { v == "auto" ? void(o.batch = 0) : whole(v); };
  }
  batch.value = [&o] {
    return o.batch_per_rank ? std::to_string(o.batch_per_rank) + " per rank" : std::to_string(o.batch);
  };
  t.number("--batch-per-rank", o.batch_per_rank, 0, large,
           "pictures per step and rank, instead of --batch (0: --batch)");
  t.number("--lr", o.learning_rate, 0, 1e6, "learning rate (the peak, with one-cycle)");
  t.choice("--lr-scale", o.lr_scale, {RateScale::clipped, RateScale::linear, RateScale::square_root, RateScale::none},
           "how --lr grows with n ranks, with --batch-per-rank: clipped, linear, sqrt or none", in_fit);
  t.text("--schedule", o.schedule, "constant, cosine, one-cycle, step:30:0.1, step:100,150:0.1, warmup:5+…", program,
         Schedule::parse);
  t.choice("--optimizer", o.optimizer, {"sgd", "lars", "adamw", "adam", "rmsprop"},
           "sgd (with Nesterov's momentum), lars, adamw, adam or rmsprop. Defaults of the last three: --lr 0.001, "
           "--weight-decay 0 (adamw 0.01); --momentum is the beta1 of adamw and adam, and 0 for rmsprop");
  t.number("--momentum", o.momentum, 0, 0.9999, "momentum (0: none)", program);
  t.number("--weight-decay", o.weight_decay, 0, 1, "weight decay, not on biases and batch norm", program);
  t.number("--label-smoothing", o.label_smoothing, 0, 0.999, "share of the target spread over all classes", program);
  t.number("--clip", o.clip, 0, 1e9, "largest gradient norm (0: no clipping)");
  t.number("--ema", o.ema, 0, 0.99999, "decay of an average of the weights, which is then evaluated (0: none)", in_fit);
  t.number("--accumulate", o.accumulate, 1, large, "batches per step", in_fit);
  t.flag("--sync-bn", o.sync_batch_norm, true, "batch norm over the pictures of all ranks", in_fit);
}

void data(Rows& t, RunConfig& o) {
  t.text("--data", o.data, "folder of the data sets, or 'synthetic' (default: $TANDEM_DATA, then data/)", program);
  if (o.data_set.empty()) return;
  t.text("--data-set", o.data_set, dataset_names() + ", a folder of pictures, or an .npy file", program);
  t.number("--size", o.folder.size, 0, large,
           "side to which pictures of a folder are brought (0: they are squares of one size)");
  t.flag("--skip-broken", o.folder.skip_broken, true, "leave out pictures of a folder that cannot be decoded");
}

void pictures(Rows& t, RunConfig& o) {
  t.flag("--augment", o.augment, true, "crop randomly (4 pixels, or an eighth of the side) and flip horizontally",
         program);
  t.flag("--no-augment", o.augment, false, "no random crops and flips");
  t.flag("--reflect", o.reflect, true, "crops of --augment show a reflection beyond the border, not black", program);
  channels(t, "--mean", o.mean, -1e6f, "mean of each channel, with pixels from 0 to 1 (default: of the data set)");
  channels(t, "--std", o.std, 1e-6f, "standard deviation of each channel (default: of the data set)");
  t.text("--partition", o.partition, "workers whose data differ: " + Partition::forms, {},
         [](const std::string& v) { Partition::parse(v); });
  t.number("--cutout", o.cutout, 0, large, "side of a random square that is blanked (0: none)", program);
  t.number("--mixup", o.mixup, 0, 4,
           "a of the distribution Beta(a, a) by which pictures are mixed in pairs (0: no mixing)", program);
}

void machine(Rows& t, RunConfig& o) {
  t.number("--seed", o.seed, 0, ~std::uint64_t{0}, "seed of all random numbers", in_fit);
  t.text("--device", o.device, "cpu, reference, cuda or cuda:INDEX", {}, [](const std::string& v) {
    if (v != "cpu" && v != "reference" && v != "cuda" && !v.starts_with("cuda:"))
      refuse("--device ", v, ": expected cpu, reference, cuda or cuda:INDEX");
  });
  t.choice("--dtype", o.dtype, {DType::f32, DType::bf16, DType::f16},
           "type of activations: f32, bf16, or f16 with loss scaling (cuda); parameters are f32", program);
  // More threads than cores only wait for each other; the bound catches typing errors.
  const int most = 4 * std::max(1, int(std::thread::hardware_concurrency()));
  t.number("--threads", o.threads, 0, most,
           "threads of the CPU backend (0: OMP_NUM_THREADS, else this process's share of the cores)", {},
           " (four per core)");
}

void memory(Rows& t, RunConfig& o) {
  t.add({"--memory-budget", "bytes that the run may take on its device: 800M, 4G (0: all there are)", "0",
         [&o](const std::string& v) { o.memory_budget = bytes_in("--memory-budget", v); }});
  t.choice("--swap", o.swap, {SwapMode::automatic, SwapMode::swap, SwapMode::recompute, SwapMode::off},
           "how --memory-budget is enforced: auto, swap (to --scratch), recompute, or off (only measured)");
  t.text("--scratch", o.scratch,
         "where tensors are swapped to: a folder (default: $TMPDIR, then /tmp); on a GPU the host's memory: pinned "
         "(default) or unified");
}

void schedule_of_run(Rows& t, RunConfig& o) {
  t.number("--val", o.val, 0, large, "training pictures to hold back for choices", program);
  t.number("--patience", o.patience, 0, large,
           "stop after this number of epochs without a better validation (needs --val; 0: never)");
  t.text("--checkpoint", o.checkpoint,
         "folder for last.safetensors (every epoch, and when stopped) and best.safetensors");
  t.text("--resume", o.resume,
         "continue from a checkpoint, or the last one in a folder, and append to the metrics; auto: the one in "
         "--checkpoint, if it exists");
  t.number("--stop-after", o.stop_after, 0, large, "stop after this step of the run (0: never)");
  t.flag("--evaluate", o.evaluate, true,
         "do not train; print the test accuracy of the weights of --resume or --import-torch");
}

void reports(Rows& t, RunConfig& o) {
  t.text("--metrics", o.metrics, "file for metrics, one JSON object a line; replaces an existing file");
  t.number("--log-every", o.log_every, 0, large, "steps between two step lines in the metrics (0: no step lines)");
  t.flag("--summary", o.profiler.summary, true, "print the table of modules first");
  t.text("--dot", o.profiler.dot, "file for a picture of the tape (render it with dot -Tsvg)");
  t.flag("--profile", o.profiler.profile, true, "print the time of each operation of a step");
  t.text("--trace", o.profiler.trace, "file for Chrome's trace viewer or ui.perfetto.dev");
  t.flag("--memory", o.profiler.memory, true, "print the memory use of a step");
  t.flag("--overfit-batch", o.overfit_batch, true, "train on one batch only, to test whether the model can learn");
  t.text("--import-torch", o.import_export.import_torch,
         "file with the first weights, from PyTorch (safetensors of a state_dict)");
  t.text("--export-torch", o.import_export.export_torch, "file for the trained weights, for PyTorch (safetensors)");
  t.text("--export-onnx", o.import_export.export_onnx, "file for the trained model as an ONNX graph");
  t.text("--tensorboard", o.import_export.tensorboard, "folder for TensorBoard: curves, and histograms once an epoch");
}

void arithmetic(Rows& t, RunConfig& o) {
  t.flag("--deterministic", o.deterministic, true, "bit-identical for the same binary, device and threads");
  t.flag("--exact-conv", o.exact_conv, true, "no Winograd convolution", program);
  t.flag("--tf32", o.tf32, true, "f32 products with 10 bits of precision, on a GPU's tensor cores");
}

}  // namespace

OptionSpec& OptionRows::text(const std::string& name, std::string& field, const std::string& help, Decides decides,
                             std::function<void(const std::string&)> check) {
  auto set = [name, &field, check](const std::string& v) {
    if (check) for_option(name, [&] { check(v); });
    field = v;
  };
  return add({name, help, field, set}, decides, [&field] { return field; });
}

OptionSpec& OptionRows::flag(const std::string& name, bool& field, bool value, const std::string& help,
                             Decides decides) {
  return add({name, help, "", [&field, value](const std::string&) { field = value; }, true}, decides,
             [&field] { return field ? "yes" : "no"; });
}

OptionSpec& OptionRows::add(OptionSpec row, Decides decides, std::function<std::string()> value) {
  row.decides = decides;
  row.value = std::move(value);
  return all.emplace_back(std::move(row));
}

std::vector<OptionSpec> option_table(RunConfig& o) {
  Rows t;
  t.all.reserve(64);  // references to rows stay valid
  for (const auto rows : {data, training, pictures, machine, memory, schedule_of_run, reports, arithmetic}) rows(t, o);
  return std::move(t.all);
}

Settings settings_of(const RunConfig& config, OptionSpec::Decides decides) {
  RunConfig o = config;
  Settings s;
  for (const OptionSpec& row : option_table(o))
    if (row.decides == decides && (decides == Decides::fit || std::ranges::count(o.accepted, row.name)))
      s.push_back({row.name, plain_text(row.value())});  // a path may hold any bytes, a checkpoint UTF-8
  return s;
}

}  // namespace tandem
