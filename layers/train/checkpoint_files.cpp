#include "layers/train/checkpoint.h"

#include <filesystem>

#include "core/backend.h"
#include "core/files/atomic_file.h"

namespace tandem {
namespace {
namespace fs = std::filesystem;

std::string file(const std::string& folder, const char* name) {
  return (fs::path(folder) / name).string() + ".safetensors";
}

// A file whose status cannot be read (a broken link, a failing disk) counts as existing and is not replaced.
bool is_there(const std::string& path) {
  std::error_code none;
  return fs::symlink_status(path, none).type() != fs::file_type::not_found;
}

bool is_whole(const std::string& checkpoint) {
  try {
    return position_in(checkpoint).step >= 0;
  } catch (const Error&) {
    return false;
  }
}

bool same_folder(const std::string& a, const std::string& b) {  // "run" and "./run/" are one
  return !a.empty() && !b.empty() &&
         (fs::absolute(a) / "").lexically_normal() == (fs::absolute(b) / "").lexically_normal();
}
}  // namespace

CheckpointFiles::CheckpointFiles(const std::string& folder, const std::string& resume, bool writes)
    : from_(resume),
      folder_(folder),
      option_("--checkpoint"),
      writes_(writes),
      automatic_(resume == "auto" || same_folder(resume, folder)) {
  std::error_code none;
  if (automatic_ && folder_.empty())
    refuse(
        "--resume auto: goes on with the last checkpoint in the folder of --checkpoint: add --checkpoint FOLDER, or ",
        "name the folder to go on from");
  if (automatic_) from_ = is_there(last()) ? last() : is_there(best()) ? best() : "";
  if (!from_.empty() && fs::is_directory(from_, none)) {
    if (folder_.empty()) {
      folder_ = from_;
      option_ = "--resume";
    }
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
  lock_.take(folder_, option_ + " " + folder_,
             "writes its checkpoints there: wait for its end, or choose another folder");
  check_foreign_files();  // again: the run that held the lock may have ended since the first check
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder_, none))  // left by a run that was killed while it wrote
    if (const std::string name = entry.path().filename();
        name.ends_with(".tmp") && (name.starts_with("last.") || name.starts_with("best.")))
      fs::remove(entry.path(), none);
  AtomicFile can_be_written(last());
}

std::string CheckpointFiles::last() const { return file(folder_, "last"); }
std::string CheckpointFiles::best() const { return file(folder_, "best"); }

RunPosition CheckpointFiles::load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                                  std::vector<std::string>& differences) const {
  RunPosition at;
  try {
    at = for_option("--resume", [&] { return load_checkpoint(from_, training, settings, &differences); });
  } catch (const UsageError& e) {
    if (!automatic_) throw;
    const bool damaged = from_ == last() && !is_whole(last()) && is_whole(best());
    throw UsageError(std::string(e.what()) + ". To begin anew choose another --checkpoint folder" +
                     (damaged ? "; to go on with " + best() + " remove " + last() : ""));
  }
  for (const std::string& d : differences)
    if (d.starts_with("partition ")) refuse("--resume ", from_, ": the ", d, ": give the same --partition and workers");
  if (at.batch > 0 && at.batches != per_epoch)
    refuse("--resume ", from_, ": was saved at batch ", at.batch, " of ", at.batches, ", and an epoch has ", per_epoch,
           " now: resume it with the same data, and the same batch over all ranks");
  if (!training.flat.backend().deterministic())
    differences.push_back("convolution algorithms are chosen by timing (--deterministic: by rule)");
  return at;
}

bool CheckpointFiles::take_over(const RunPosition& at) {
  if (folder_.empty()) return false;
  fs::create_directories(folder_);
  if (!fs::exists(last())) return true;
  const RunPosition there = position_in(last());
  return there.run == at.run && there.step < at.step;
}

std::string CheckpointFiles::kept(std::int64_t saved_at) const {
  if (!writes_) return "";
  if (saved_at >= 0) return "; " + last() + " holds the run after step " + std::to_string(saved_at);
  if (resumes()) return "; " + from_ + " is as it was";
  return writes() ? "; no epoch had ended, so there is no checkpoint" : "; there is no checkpoint without --checkpoint";
}

// Files of another run are not overwritten.
void CheckpointFiles::check_foreign_files() const {
  std::error_code none;
  if (!writes() || automatic_) return;
  for (const std::string& there : {last(), best()})
    if (fs::exists(there, none) && (from_.empty() || !fs::equivalent(from_, last(), none)))
      refuse("--checkpoint ", folder_, ": holds another run's ", fs::path(there).filename().string(),
             ". Go on with that by --resume ", folder_, ", or choose another folder");
}

}  // namespace tandem
