#include "dist/strategies/daso_schedule.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "core/spec.h"

namespace tandem {
namespace {

struct Option {
  const char* key;
  std::int64_t DasoOptions::*value;
  std::int64_t least, most;
};
constexpr Option options[] = {{"B", &DasoOptions::B, 0, 1000000},
                              {"W", &DasoOptions::W, 0, 1000000},
                              {"warm-up", &DasoOptions::warm_up, 0, 1000000},
                              {"cool-down", &DasoOptions::cool_down, 0, 1000000},
                              {"longest", &DasoOptions::longest, 1, 1000000},
                              {"bf16", &DasoOptions::bf16, 0, 1},
                              {"keep-progress", &DasoOptions::keep_progress, 0, 1},
                              {"differences", &DasoOptions::differences, 0, 1},
                              {"merge-first", &DasoOptions::merge_first, 0, 1},
                              {"norms", &DasoOptions::norms, 0, 1}};

}  // namespace

std::optional<DasoOptions> DasoOptions::parse(const std::string& text) {
  if (spec_name(text) != "daso") return {};
  DasoOptions o;
  std::vector<SpecField> fields{
      word_field("faithful", [&o] { o.keep_progress = o.differences = o.merge_first = o.norms = 0; })};
  for (const Option& option : options)
    fields.push_back(number_field(option.key, o.*option.value, double(option.least), double(option.most)));
  read_spec(text, fields);
  return o;
}

std::string DasoOptions::name() const {
  DasoOptions usual;
  std::string text;
  if (keep_progress + differences + merge_first + norms == 0) {
    text = ":faithful";
    usual.keep_progress = usual.differences = usual.merge_first = usual.norms = 0;
  }
  for (const Option& option : options)
    if (this->*option.value != usual.*option.value)
      text += (text.empty() ? ":" : ",") + std::string(option.key) + "=" + std::to_string(this->*option.value);
  return "daso" + text;
}

void DasoSchedule::begin_epoch(std::int64_t epoch, std::int64_t epochs) {
  blocking_ = epoch < o_.warm_up || epoch >= epochs - o_.cool_down;
  pending_ = false;
}

DasoSchedule::Turn DasoSchedule::next(std::int64_t batch, std::int64_t last) {
  const bool ends = batch >= last, always = blocking_ || B_ == 0;
  Turn turn{.sends = ends || always || batch % B_ == 0, .weight = weight_};
  turn.blocks = turn.sends && (ends || always || W_ == 0);
  const bool waited = pending_ && batch - sent_at_ == weight_ && (o_.merge_first || (batch + 1) % B_ != 0);
  turn.merges = waited || (pending_ && turn.sends);
  if (turn.merges) pending_ = false;
  if (turn.sends && !turn.blocks) pending_ = true, sent_at_ = batch, weight_ = std::min(W_, last - batch);
  return turn;
}

void DasoSchedule::end_epoch(double loss) {
  if (blocking_ || B_ == 0) return;
  if (loss < best_ * (1 - improvement)) {
    best_ = loss;
    bad_ = 0;
  } else if (++bad_ >= patience) {
    bad_ = 0;
    if (B_ == 1) {
      B_ = o_.longest;
      W_ = std::max<std::int64_t>(1, B_ / 4);
    } else {
      B_ = std::max<std::int64_t>(1, B_ / 2);
      W_ = std::max<std::int64_t>(1, W_ - 1);
    }
  }
}

std::string DasoSchedule::state() const {
  return std::to_string(B_) + " " + std::to_string(W_) + " " + digits(best_, 17) + " " + std::to_string(bad_);
}
void DasoSchedule::restore(const std::string& state) {
  std::istringstream words(state);
  std::string best;
  std::int64_t B = 0, W = 0;
  int bad = 0;
  if (!(words >> B >> W >> best >> bad))
    refuse("a checkpoint's state of daso is '", state, "': expected B, W, the best loss and a count");
  B_ = B;
  W_ = W;
  bad_ = bad;
  best_ = parsed<double>(best).value_or(std::numeric_limits<double>::infinity());
}

}  // namespace tandem
