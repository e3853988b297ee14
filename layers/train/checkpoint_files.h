// The files of a run: last.safetensors and best.safetensors in a folder.
#pragma once
#include <string>
#include <vector>

#include "core/files/files.h"
#include "layers/train/checkpoint.h"

namespace tandem {

class CheckpointFiles {
 public:
  // folder, resume: as in FitOptions. If resume is "auto" or the folder, the run continues from its last checkpoint, or
  // else from its best, or begins. writes: this rank writes. Throws UsageError when there is nothing to resume, or the
  // folder has another run.
  CheckpointFiles(const std::string& folder, const std::string& resume, bool writes);
  // Creates the folder, takes its lock and tries to write, so that an error shows before the training.
  void begin();
  bool resumes() const { return !from_.empty(); }
  const std::string& from() const { return from_; }
  bool writes() const { return wanted() && speaks_; }
  bool wanted() const { return !folder_.empty(); }  // on any rank
  std::string last() const;
  std::string best() const;
  RunPosition load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                   std::vector<std::string>& differences) const;
  // After rank 0 was lost: whether this rank may write its state to the folder. It may when the folder has no
  // checkpoint, or an older one of the same run. It does not take the lock: rank 0 may still hold it, and has no newer
  // state.
  bool take_over(const RunPosition& at);
  // The checkpoint from which a failed run can continue, for its error message. saved_at: the step of last(); −1: not
  // written by this run.
  std::string kept(std::int64_t saved_at) const;

 private:
  void check_foreign_files() const;
  std::string from_, folder_, option_;
  bool speaks_, automatic_;
  FileLock lock_;
};

}  // namespace tandem
