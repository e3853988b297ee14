// Checks of the options, in two tables: options that contradict each other or have no effect, and files that would
// overwrite each other. Options that depend on the pictures are checked when these are known: --size and --data in
// load_dataset(), --cutout by the Loader.
#include <filesystem>

#include "core/error.h"
#include "layers/train/options.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

void refuse_files(const RunConfig& o) {
  std::error_code none;
  // The files that this run replaces, with their options. Other names may be equal, as --checkpoint and --resume.
  std::map<fs::path, std::pair<std::string, std::string>> replaced;
  auto check = [&](const std::string& option, const std::string& path, bool replaces) {
    if (path.empty()) return;
    fs::path place = fs::weakly_canonical(fs::absolute(path), none);
    if (!place.has_filename()) place = place.parent_path();  // "run" and "run/" are one
    if (const auto there = replaced.find(place); there != replaced.end())
      refuse(there->second.first, " and ", option, " both mean ", there->second.second,
             ": choose another name for one of them");
    if (replaces) replaced[place] = {option, path};
  };
  const ImportExportFiles& f = o.import_export;
  check("--metrics", o.metrics, true);
  check("--trace", o.profiler.trace, true);
  check("--dot", o.profiler.dot, true);
  check("--export-torch", f.export_torch, true);
  check("--export-onnx", f.export_onnx, true);
  check("--import-torch", f.import_torch, false);
  check("--tensorboard", f.tensorboard, false);
  const bool folder = fs::is_directory(o.resume, none);
  for (const auto& [option, path] : {std::pair{"--checkpoint", o.checkpoint}, {"--resume", folder ? o.resume : ""}})
    for (const char* file : {"", "last.safetensors", "best.safetensors"})
      if (!path.empty()) check(option, (fs::path(path) / file).string(), false);
  if (!folder) check("--resume", o.resume, false);
}

}  // namespace

void check_options_agree(const RunConfig& o) {
  const bool one = o.overfit_batch;
  const std::string beside = "--overfit-batch trains on one batch only, 300 times: it has no use for ";
  const struct {
    bool holds;
    std::string text;
  } table[] = {
      {o.given.count("--batch") && o.batch_per_rank > 0,
       "--batch and --batch-per-rank: the second takes the place of the first, give one of them"},
      {o.given.count("--lr-scale") && o.batch_per_rank == 0,
       "--lr-scale goes with --batch-per-rank: --batch is the same on any number of ranks, and so is --lr"},
      {(o.given.count("--swap") || o.given.count("--scratch")) && o.memory_budget == 0,
       "--swap and --scratch say how a budget of memory is kept: add --memory-budget, say --memory-budget 4G"},
      {o.given.count("--scratch") && (o.swap == SwapMode::recompute || o.swap == SwapMode::off),
       "--scratch is for tensors that are swapped, and --swap recompute and off swap none: leave one of them out"},
      {o.evaluate && o.memory_budget > 0, "--evaluate saves nothing for backward: it has no use for --memory-budget"},
      {o.patience > 0 && o.val == 0, "--patience needs validation pictures: add --val, say --val 5000"},
      {o.reflect && !o.augment, "--reflect is for the crops of --augment: give both"},
      {o.mixup > 0 && (o.batch_per_rank ? o.batch_per_rank : o.batch) == 1,
       "--mixup mixes pairs of pictures: a batch of 1 has none"},
      {o.log_every > 0 && o.metrics.empty(), "--log-every adds lines to the metrics: add --metrics FILE"},
      {o.evaluate && o.resume.empty() && o.import_export.import_torch.empty(),
       "--evaluate has nothing to evaluate: name a checkpoint with --resume, or weights with --import-torch"},
      {o.evaluate && o.resume == "auto",
       "--evaluate --resume auto: name the checkpoint that is to be evaluated, or its folder"},
      {o.evaluate && one, "--evaluate trains nothing, --overfit-batch trains on one batch: choose one of them"},
      {o.evaluate && !(o.checkpoint + o.metrics + o.import_export.tensorboard + o.import_export.export_torch +
                       o.import_export.export_onnx + o.profiler.dot + o.profiler.trace)
                          .empty(),
       "--evaluate trains nothing: it writes no --checkpoint, --metrics, --tensorboard, --export-…, --dot and --trace"},
      {!o.resume.empty() && o.resume != "auto" && !o.import_export.import_torch.empty(),
       "--resume goes on with the weights of a checkpoint, --import-torch begins with others: give one of them"},
      {one && o.val > 0, beside + "--val"},
      {one && o.given.count("--epochs"), beside + "--epochs"},
      {one && !o.checkpoint.empty(), beside + "--checkpoint"},
      {one && !o.resume.empty(), beside + "--resume"},
  };
  for (const auto& row : table)
    if (row.holds) throw UsageError(row.text);
  refuse_files(o);
}

}  // namespace tandem
