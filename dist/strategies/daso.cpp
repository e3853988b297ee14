#include "dist/strategies/daso.h"

#include <vector>

#include "dist/strategies/averages.h"
#include "dist/strategies/replicas.h"

namespace tandem {
namespace {

class Daso : public DasoSchedule {
 public:
  using DasoSchedule::DasoSchedule;
  void allocate(const FlatParameters& flat) override { flat_ = &flat; }
  void release() override { common_ = error_ = narrow_ = {}; }
  void begin_epoch(std::int64_t epoch, const RunPlan& plan) override {
    DasoSchedule::begin_epoch(epoch, plan);
    if (!narrow() || !flat_) return;
    for (auto [vector, dtype] :
         {std::pair(&narrow_, DType::bf16), {&common_, flat_->values.dtype()}, {&error_, flat_->values.dtype()}})
      if (!vector->defined()) *vector = Replicas::vector(*flat_, dtype);
    error_.fill(0);
  }
  void send(Exchanged& e) override {
    if (!narrow()) return e.sum.copy_from(e.x);
    e.sum = part(narrow_, e.range);
    if (!o_.differences) return e.sum.copy_from(e.x);
    // Of the whole vector: the error is the same on all ranks of a host
    narrow_difference(narrow_, error_, flat_->values, common_);
  }
  void merge(Exchanged& e) override {
    if (!e.turn.waits) {
      if (o_.keep_progress) return join_mean(e.x, e.sent, e.sum, e.ranks);
      return stale_mean(e.x, e.sum, e.turn.weight > 0 ? 2.0 * double(e.turn.weight) : 1, e.ranks);
    }
    if (differs()) return add_mean(e.x, part(common_, e.range), e.sum, e.ranks);
    e.x.copy_from(e.sum);
    join_mean(e.x, e.x, e.x, e.ranks);
  }
  void equal(const Tensor& x) override {
    if (differs()) common_.copy_from(x);
  }

 private:
  bool narrow() const { return blocking() && o_.bf16; }
  bool differs() const { return narrow() && o_.differences; }

  const FlatParameters* flat_ = nullptr;
  Tensor common_, error_, narrow_;  // the last common state; the rounding error; the data to send
};

}  // namespace

std::vector<SpecField> DasoOptions::fields() {
  constexpr double large = 1e6;
  return {word_field("faithful", [this] { keep_progress = differences = merge_first = norms = 0; }),
          number_field("B", B, 0, large),
          number_field("W", W, 0, large),
          number_field("warm-up", warm_up, 0, large),
          number_field("cool-down", cool_down, 0, large),
          number_field("longest", longest, 1, large),
          number_field("bf16", bf16, 0, 1),
          number_field("keep-progress", keep_progress, 0, 1),
          number_field("differences", differences, 0, 1),
          number_field("merge-first", merge_first, 0, 1),
          number_field("norms", norms, 0, 1)};
}

std::optional<DasoOptions> DasoOptions::parse(const std::string& text) {
  if (spec_name(text) != "daso") return {};
  DasoOptions o;
  read_spec(text, o.fields());
  return o;
}

std::string DasoOptions::name() const {
  DasoOptions now = *this, usual;
  std::string text;
  if (keep_progress + differences + merge_first + norms == 0) {
    text = ":faithful";
    read_spec("daso" + text, usual.fields());
  }
  const auto fields = now.fields(), usually = usual.fields();
  for (std::size_t i = 0; i < fields.size(); i++)
    if (fields[i].value != usually[i].value) text += (text.empty() ? ":" : ",") + fields[i].key + "=" + fields[i].value;
  return "daso" + text;
}

std::unique_ptr<Strategy> daso(RoundRanks ranks, const DasoOptions& how, const RoundsOptions& options) {
  RoundsOptions o = options;
  o.merges_statistics = how.norms != 0;
  return rounds(
      std::move(ranks), how.name(), [how] { return std::make_unique<Daso>(how); }, o);
}

}  // namespace tandem
