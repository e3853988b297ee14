// DASO (Coquelin et al. 2021, arXiv 2104.05588): rounds (rounds.h) with slow links between hosts and fast links inside
// a host. In every batch the gradients are averaged over the ranks of a host, and all of these make the same step. Once
// in B batches the hosts exchange weights while training continues:
//
//   group k       the ranks with local index k, one of each host. One group is active; the groups take turns, one
//                 exchange each
//   an exchange   Σ x over the P hosts of the group, non-blocking, in chunks; W batches later its result is merged
//                 and broadcast inside the hosts
//   merge         x = Σ(as sent)/P + (x − x as sent): the mean, plus this host's change since; or, as published,
//                 x = (2·W·x + Σ(as sent)) / (2·W + P)
//   blocking      x = Σ x / P at once: in the last batch of an epoch, and in every batch of the first and last
//                 epochs, then with bf16 on the wire
//   plateau       three consecutive epochs without 5 % less training loss than the best: B and W are reduced; after
//                 B = 1, B becomes `longest` again
//
// If a layer is divided over the ranks of a host (hybrid.h), group k has slice k. So at every exchange each group
// averages its slice between hosts, and slices are not averaged inside a host.
//
// With B = 0 and f32 a step equals that of all-reduce if the update is linear in the gradient (SGD with momentum).
// AdamW, LARS and clipping use a host's gradient and not that of all hosts. Every host must have the same number of
// ranks. On one host DASO is all-reduce.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "core/elementwise.h"
#include "core/spec.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/replicas.h"
#include "dist/strategies/rounds.h"

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
  std::unique_ptr<RoundMethod> method() const;
  void adjust(RoundsOptions& options) const { options.merges_statistics = norms != 0; }
  std::string name() const;         // with the options that differ from the defaults: "daso:B=8"
  std::vector<SpecField> fields();  // its options, which must not outlive it
};

class Daso : public RoundMethod {
 public:
  explicit Daso(const DasoOptions& options) : o_(options), B_(options.B), W_(options.W) {}
  void begin_epoch(std::int64_t epoch, const RunPlan& plan) override {
    blocking_ = epoch < o_.warm_up || epoch >= plan.epochs - o_.cool_down;
    pending_ = false;
    if (!narrow() || !flat_) return;
    for (auto [vector, dtype] :
         {std::pair(&narrow_, DType::bf16), {&common_, flat_->values.dtype()}, {&error_, flat_->values.dtype()}})
      if (!vector->defined()) *vector = Replicas::vector(*flat_, dtype);
    error_.fill(0);
  }
  Turn next(const Moment& now) override {
    if (now.last < 0)
      refuse("daso asks how many steps an epoch has: call begin_epoch() before the first step, as fit() does");
    const bool ends = now.batch >= now.last, always = blocking_ || B_ == 0;
    Turn turn{.sends = ends || always || now.batch % B_ == 0, .merges_first = o_.merge_first != 0, .weight = weight_};
    turn.waits = turn.sends && (ends || always || W_ == 0);
    const bool waited = pending_ && now.batch - sent_at_ == weight_ && (o_.merge_first || (now.batch + 1) % B_ != 0);
    turn.merges = waited || (pending_ && turn.sends);
    if (turn.merges) pending_ = false;
    if (turn.sends && !turn.waits) {
      pending_ = true;
      sent_at_ = now.batch;
      weight_ = std::min(W_, now.last - now.batch);
    }
    return turn;
  }
  Turn end(const Moment& now) override { return next({.batch = now.last, .last = now.last}); }
  void end_epoch(double loss) override {
    if (blocking_ || B_ == 0) return;
    bad_ = loss < best_ * (1 - improvement) ? 0 : bad_ + 1;
    if (bad_ == 0) best_ = loss;
    if (bad_ < patience) return;
    bad_ = 0;
    const bool begins_anew = B_ == 1;
    B_ = begins_anew ? o_.longest : std::max<std::int64_t>(1, B_ / 2);
    W_ = std::max<std::int64_t>(1, begins_anew ? B_ / 4 : W_ - 1);
  }

  void allocate(const FlatParameters& flat) override { flat_ = &flat; }
  void release() override { common_ = error_ = narrow_ = {}; }
  void send(Exchanged& e) override {
    if (!narrow()) return e.sum.copy_from(e.x);
    e.sum = part(narrow_, e.range);
    if (!o_.differences) return e.sum.copy_from(e.x);
    // Computed for the whole vector, so that the error is the same on all ranks of a host.
    narrow_difference(narrow_, error_, flat_->values, common_);
  }
  void merge(Exchanged& e) override {
    if (!e.turn.waits) {
      if (o_.keep_progress) return join_mean(e.x, e.sent, e.sum, e.ranks);
      return stale_mean(e.x, e.sum, e.turn.weight > 0 ? 2.0 * double(e.turn.weight) : 1, e.ranks);
    }
    e.x.copy_from(e.sum);
    join_mean(e.x, e.x, e.x, e.ranks);
    if (differs()) add_into(e.x, part(common_, e.range));
  }
  void equal(const Tensor& x) override {
    if (differs() && common_.defined()) common_.copy_from(x);
  }

  void saved(StrategyState& state) override {  // "B W best bad"
    std::string best = digits(best_, 17);
    std::string text = std::to_string(B_) + " " + std::to_string(W_) + " " + best + " " + std::to_string(bad_);
    state.text("daso", text);
    std::istringstream words(text);
    Daso read = *this;
    if (!(words >> read.B_ >> read.W_ >> best >> read.bad_))
      refuse("a checkpoint's state of daso is '", text, "': expected B, W, the best loss and a count");
    read.best_ = parsed<double>(best).value_or(std::numeric_limits<double>::infinity());
    *this = read;
  }
  std::int64_t B() const { return B_; }
  std::int64_t W() const { return W_; }

  static constexpr double improvement = 0.05;  // relative; a smaller one does not count
  static constexpr int patience = 3;           // consecutive epochs without improvement that make a plateau

 protected:
  bool narrow() const { return blocking_ && o_.bf16; }
  DasoOptions o_;

 private:
  bool differs() const { return narrow() && o_.differences; }

  std::int64_t B_, W_;
  bool blocking_ = true, pending_ = false;  // blocking_: an epoch in which every batch blocks
  std::int64_t sent_at_ = 0, weight_ = 0;
  double best_ = std::numeric_limits<double>::infinity();
  int bad_ = 0;
  const FlatParameters* flat_ = nullptr;
  Tensor common_, error_, narrow_;  // the last common state; the rounding error; the data to send
};

}  // namespace tandem
