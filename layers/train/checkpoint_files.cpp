#include "layers/train/checkpoint_files.h"

#include <filesystem>

#include "core/backend.h"
#include "core/files/atomic_file.h"

namespace tandem {
namespace {
std::string file(const std::string& folder, const char* name) {
  return (std::filesystem::path(folder) / name).string() + ".safetensors";
}
}  // namespace

CheckpointFiles::CheckpointFiles(const std::string& folder, const std::string& resume, bool writes)
    : from_(resume), folder_(folder), option_("--checkpoint"), speaks_(writes), automatic_(resume == "auto" || (resume == folder && !folder.empty())) {
  namespace fs = std::filesystem;
  std::error_code none;
  if (automatic_ && folder_.empty())
    refuse("--resume auto: goes on with the last checkpoint in the folder of --checkpoint: add --checkpoint FOLDER, or name the ",
           "folder to go on from");
  if (automatic_) from_ = fs::exists(last(), none) ? last() : "";
  if (!from_.empty() && fs::is_directory(from_, none)) {
    if (folder_.empty()) folder_ = from_, option_ = "--resume";
    from_ = file(from_, "last");
  }
  if (!from_.empty() && !fs::exists(from_, none)) refuse("--resume ", resume, ": there is no ", from_);
  if (!folder_.empty() && fs::exists(folder_, none) && !fs::is_directory(folder_, none))
    refuse("--checkpoint ", folder_, ": is a file, not a folder: name a folder for last.safetensors and ",
           "best.safetensors");
  check_foreign_files();
}

void CheckpointFiles::begin() {
  if (!writes()) return;
  make_folder(option_ + " " + folder_, folder_);
  lock_.take(folder_, option_ + " " + folder_, "writes its checkpoints there: wait for its end, or choose another folder");
  check_foreign_files();  // once more: the run that held the folder may have ended just now
  AtomicFile can_be_written(last());
}

std::string CheckpointFiles::last() const { return file(folder_, "last"); }
std::string CheckpointFiles::best() const { return file(folder_, "best"); }

RunPosition CheckpointFiles::load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                                  std::vector<std::string>& differences) const {
  RunPosition at = load_checkpoint(from_, training, settings, &differences);
  if (at.batch > 0 && at.batches != per_epoch)
    refuse(from_, ": was saved at batch ", at.batch, " of ", at.batches, ", and an epoch has ", per_epoch,
           " batches now: resume it with the same data, and the same batch over all ranks");
  if (!training.flat.backend().deterministic())
    differences.push_back("convolution algorithms are chosen by timing (--deterministic: by rule)");
  return at;
}

bool CheckpointFiles::take_over(const RunPosition& at) {
  if (folder_.empty()) return false;
  std::filesystem::create_directories(folder_);
  if (!std::filesystem::exists(last())) return true;
  const RunPosition there = position_in(last());
  return there.run == at.run && there.step < at.step;
}

std::string CheckpointFiles::kept(std::int64_t saved_at) const {
  if (!speaks_) return "";
  if (saved_at >= 0) return "; " + last() + " holds the run after step " + std::to_string(saved_at);
  if (resumes()) return "; " + from_ + " is as it was";
  return writes() ? "; no epoch had ended, so there is no checkpoint" : "; there is no checkpoint without --checkpoint";
}

// Nothing that another run left is overwritten.
void CheckpointFiles::check_foreign_files() const {
  std::error_code none;
  if (!writes() || automatic_) return;
  for (const std::string& there : {last(), best()})
    if (std::filesystem::exists(there, none) && (from_.empty() || !std::filesystem::equivalent(from_, last(), none)))
      refuse("--checkpoint ", folder_, ": holds another run's ", std::filesystem::path(there).filename().string(),
             ". Go on with that by --resume ", folder_, ", or choose another folder");
}

}  // namespace tandem
