#include "core/spec.h"

#include <algorithm>
#include <set>

#include "core/error.h"

namespace tandem {

Spec Spec::parse(const std::string& text) {
  const std::size_t plus = std::min(text.find('+'), text.size());
  Spec spec{.name = spec_name(text)};
  if (plus < text.size()) spec.inner = std::make_shared<Spec>(parse(text.substr(plus + 1)));
  if (spec.name.size() == plus) return spec;
  const std::string options = text.substr(spec.name.size() + 1, plus - spec.name.size() - 1);
  spec.options = options.empty() ? std::vector<std::string>{""} : parts_of(options, ',');
  return spec;
}

std::string Spec::text() const {
  const std::string all = options.empty() ? name : name + ":" + joined(options, ",");
  return inner ? all + "+" + inner->text() : all;
}

std::string Spec::take(const std::string& key) {
  std::string values = inner ? inner->take(key) : "";
  std::erase_if(options, [&](const std::string& option) {
    if (!option.starts_with(key + "=")) return false;
    if (option.size() == key.size() + 1) refuse(option, ": a value is missing: give one, or leave it out");
    values += (values.empty() ? "" : ",") + option.substr(key.size() + 1);
    return true;
  });
  return values;
}

SpecField word_field(std::string key, std::function<void()> apply) {
  return {std::move(key), "", [apply = std::move(apply)](const std::string& value) {
            if (value.empty()) apply();
            return value.empty();
          }};
}

std::string spec_name(const std::string& text) { return text.substr(0, text.find_first_of(":+")); }

std::string described(const std::vector<SpecField>& fields) {
  return joined(fields, "; ", [](const SpecField& f) {
    return "`" + f.key + "`" + (f.expects.empty() ? "" : ": " + f.expects) +
           (f.value.empty() ? "" : " (" + f.value + ")");
  });
}

static std::string keys_of(const std::vector<SpecField>& fields) {
  return joined(fields, ", ", [](const SpecField& f) { return f.key + (f.expects.empty() ? "" : "="); });
}

void read_spec(const std::string& text, const std::vector<SpecField>& fields) {
  const Spec spec = Spec::parse(text);
  if (spec.inner) refuse(text, ": ", spec.name, " stands alone: leave out what follows the '+'");
  if (fields.empty() && !spec.options.empty()) refuse(text, ": ", spec.name, " takes no options: write ", spec.name);
  std::set<std::string> given;
  for (const std::string& item : spec.options) {
    const std::size_t equals = std::min(item.find('='), item.size());
    std::string key = item.substr(0, equals), value = item.substr(std::min(equals + 1, item.size()));
    auto field = std::find_if(fields.begin(), fields.end(), [&](const SpecField& f) { return f.key == key; });
    if (field == fields.end() && given.empty() && equals == item.size() && fields.front().bare) {
      field = fields.begin();
      value = std::exchange(key, field->key);
    }
    if (field == fields.end()) refuse(text, ": '", item, "' is no option of ", spec.name, ": choose ", keys_of(fields));
    if (!given.insert(key).second) refuse(text, ": ", key, " is given twice");
    if (!field->read(value))
      refuse(text, ": '", item, "': ", key, field->expects.empty() ? " takes no value" : " is " + field->expects);
  }
}

}  // namespace tandem
