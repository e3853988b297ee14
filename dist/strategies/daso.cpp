#include "dist/strategies/daso.h"

namespace tandem {
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

std::unique_ptr<RoundMethod> DasoOptions::method() const { return std::make_unique<Daso>(*this); }

}  // namespace tandem
