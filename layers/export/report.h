// A page about runs: one self-contained HTML file made from their metrics files (layers/train/metrics.h).
#pragma once
#include <map>
#include <string>
#include <vector>

namespace tandem {

// One run, as far as its file tells. Numbers that a line lacks are NaN.
struct RunLog {
  struct Epoch {
    double epoch, train_loss, train_accuracy, val_loss, val_accuracy, test_loss, test_accuracy, learning_rate,
        images_per_second, seconds;
  };
  struct Step {
    double epoch, loss, learning_rate;  // epoch: 1.5 is half way through the second
  };
  std::string path, label;
  std::vector<Epoch> epochs;
  std::vector<Step> steps;
  std::vector<std::pair<std::string, std::string>> options;  // of the start line, in its order; what is nested, dotted
  std::map<std::string, double> end;                         // numbers of the end line
  bool ended = false, stopped = false;
  std::vector<std::string>
      remarks;  // "run.jsonl:7: …", one for each line that could not be used, and how the run ended
};

// Reads what can be read: a line that is no JSON object, or lacks what it should have, becomes a remark. Throws UsageError when
// there is no such file, or when not one of its lines is about a run.
RunLog read_run(const std::string& path);

// The shortest names that still tell the files apart: what all stems share at both ends is left out.
std::vector<std::string> labels_of(const std::vector<std::string>& paths);

// Loss, accuracy, learning rate and throughput, each by epoch and by time; final numbers and options side by side.
std::string report_page(const std::vector<RunLog>& runs, const std::string& title);

}  // namespace tandem
