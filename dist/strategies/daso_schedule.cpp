#include "dist/strategies/daso_schedule.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::pair<const char*, std::int64_t DasoOptions::*> fields[] = {
    {"B", &DasoOptions::B},
    {"W", &DasoOptions::W},
    {"warm-up", &DasoOptions::warm_up},
    {"cool-down", &DasoOptions::cool_down},
    {"longest", &DasoOptions::longest},
    {"bf16", &DasoOptions::bf16},
    {"keep-progress", &DasoOptions::keep_progress},
    {"differences", &DasoOptions::differences},
    {"merge-first", &DasoOptions::merge_first},
    {"norms", &DasoOptions::norms}};
constexpr std::size_t first_switch = 5;  // from here on 0 or 1

}  // namespace

std::optional<DasoOptions> DasoOptions::parse(const std::string& text) {
  if (text != "daso" && !text.starts_with("daso:")) return {};
  DasoOptions o;
  std::istringstream words(text.size() > 4 ? text.substr(5) : "");
  for (std::string word; std::getline(words, word, ',');) {
    if (word == "faithful") {
      o.keep_progress = o.differences = o.merge_first = o.norms = 0;
      continue;
    }
    const std::size_t is = std::min(word.find('='), word.size());
    const auto* field =
        std::find_if(std::begin(fields), std::end(fields), [&](auto& f) { return word.substr(0, is) == f.first; });
    if (field == std::end(fields))
      refuse(text, ": '", word,
             "' is no option of daso: choose faithful, B=, W=, warm-up=, cool-down=, longest=, bf16=, ",
             "keep-progress=, differences=, merge-first= or norms=");
    const auto value = parsed<std::int64_t>(is < word.size() ? word.substr(is + 1) : "");
    const bool one_or_zero = field - fields >= std::ptrdiff_t(first_switch);
    const std::int64_t least = field->second == &DasoOptions::longest, most = one_or_zero ? 1 : 1000000;
    if (!value || *value < least || *value > most)
      refuse(text, ": ", field->first, " is a whole number from ", least, " to ", most);
    o.*field->second = *value;
  }
  return o;
}

std::string DasoOptions::name() const {
  DasoOptions usual;
  std::string text;
  if (keep_progress + differences + merge_first + norms == 0) {
    text = ":faithful";
    usual.keep_progress = usual.differences = usual.merge_first = usual.norms = 0;
  }
  for (const auto& [name, field] : fields)
    if (this->*field != usual.*field)
      text += (text.empty() ? ":" : ",") + std::string(name) + "=" + std::to_string(this->*field);
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
