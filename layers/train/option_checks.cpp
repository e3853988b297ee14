// Checks of the options, in two tables: options that contradict each other or have no effect, and files that would
// overwrite each other. Options that depend on the pictures are checked when these are known: --size and --data in
// load_dataset(), --cutout by the Loader.
#include <filesystem>

#include "core/error.h"
#include "layers/train/options.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

void refuse_options(const RunConfig& o) {
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
      {o.evaluate && o.memory_budget > 0, "--evaluate saves nothing for backward: it has no use for --memory-budget"},
      {o.patience > 0 && o.val == 0, "--patience needs validation pictures: add --val, say --val 5000"},
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
}

void refuse_files(const RunConfig& o) {
  const ImportExportFiles& f = o.import_export;
  std::vector<std::pair<std::string, std::string>> places = {{"--metrics", o.metrics},
                                                             {"--trace", o.profiler.trace},
                                                             {"--dot", o.profiler.dot},
                                                             {"--export-torch", f.export_torch},
                                                             {"--export-onnx", f.export_onnx}};
  const std::size_t replaced = places.size();  // by this run; the others may meet: checkpoints go where one was resumed
  places.insert(places.end(), {{"--import-torch", f.import_torch}, {"--tensorboard", f.tensorboard}});
  std::error_code none;
  const bool folder = fs::is_directory(o.resume, none);
  for (const auto& [option, path] : {std::pair{"--checkpoint", o.checkpoint}, {"--resume", folder ? o.resume : ""}})
    for (const char* file : {"", "last.safetensors", "best.safetensors"})
      if (!path.empty()) places.push_back({option, (fs::path(path) / file).string()});
  if (!folder) places.push_back({"--resume", o.resume});

  auto canonical = [&](const std::string& path) {  // "run" and "run/" are one
    const fs::path p = fs::weakly_canonical(fs::absolute(path), none);
    return p.has_filename() ? p : p.parent_path();
  };
  for (std::size_t a = 0; a < replaced; a++)
    for (std::size_t b = a + 1; b < places.size(); b++)
      if (!places[a].second.empty() && !places[b].second.empty() &&
          canonical(places[a].second) == canonical(places[b].second))
        refuse(places[a].first, " and ", places[b].first, " both mean ", places[a].second,
               ": choose another name for one of them");
}

}  // namespace

void check_options_agree(const RunConfig& o) {
  refuse_options(o);
  refuse_files(o);
}

}  // namespace tandem
