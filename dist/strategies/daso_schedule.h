// DASO's options, and its schedule of exchanges between hosts (daso.h).
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace tandem {

// As in "daso:B=4,W=1". Where the published behaviour can be improved, 1 is the improvement and `daso:faithful` sets 0.
struct DasoOptions {
  // initial values: batches between two exchanges, and from the start of an exchange to its merge
  std::int64_t B = 4, W = 1;
  std::int64_t warm_up = 4, cool_down = 4;  // epochs in which every batch blocks
  std::int64_t longest = 8;                 // the new B after a plateau at B = 1
  std::int64_t bf16 = 1;                    // blocking epochs exchange in bf16; 0: in f32
  std::int64_t keep_progress = 1;           // the merge keeps the host's whole change since it sent; 0: 2W/(2W+P) of it
  std::int64_t differences = 1;  // bf16 of the difference from the last common state, with error feedback; 0: of x
  // a pending exchange is merged before the next is sent, always after W batches; 0: after the send, and after W
  // batches only if the next batch does not send
  std::int64_t merge_first = 1;
  std::int64_t norms = 1;  // running statistics are averaged after each epoch; 0: each rank keeps its own

  // Returns nothing if the name is not of DASO. Throws UsageError.
  static std::optional<DasoOptions> parse(const std::string& text);
  std::string name() const;  // with the options that differ from the defaults: "daso:B=8"
};

// The schedule of exchanges: a function of batches, epochs and training losses, the same on all ranks.
class DasoSchedule {
 public:
  explicit DasoSchedule(const DasoOptions& options) : o_(options), B_(options.B), W_(options.W) {}
  void begin_epoch(std::int64_t epoch, std::int64_t epochs);
  struct Turn {
    bool sends = false, blocks = false, merges = false;
    std::int64_t weight = 0;  // the W of the merged exchange
  };
  Turn next(std::int64_t batch, std::int64_t last);  // after this batch of the epoch; `last` is the epoch's last batch
  void end_epoch(double loss);
  bool blocking() const { return blocking_; }  // an epoch in which every batch blocks
  std::int64_t B() const { return B_; }
  std::int64_t W() const { return W_; }
  std::string state() const;  // for a checkpoint: "B W best bad"
  void restore(const std::string& state);

  static constexpr double improvement = 0.05;  // relative; a smaller one does not count
  static constexpr int patience = 3;           // consecutive epochs without improvement that make a plateau

 private:
  DasoOptions o_;
  std::int64_t B_, W_;
  bool blocking_ = true, pending_ = false;
  std::int64_t sent_at_ = 0, weight_ = 0;
  double best_ = std::numeric_limits<double>::infinity();
  int bad_ = 0;
};

}  // namespace tandem
