#include "layers/train/run.h"

#include <algorithm>

#include "core/build_info.h"
#include "core/machine.h"
#include "core/text.h"
#include "layers/train/options.h"

namespace tandem {
Settings recipe_of(const RunConfig& options, const Task& task, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train) {
  Settings s = settings_of(options, OptionSpec::Decides::fit);
  s.insert(s.end(), {{"--optimizer", optimizer.name()},
                     {"--lr", digits(optimizer.learning_rate())},
                     {"--clip", digits(optimizer.clip_norm)},
                     {"pictures in an epoch", std::to_string(train.pictures_per_epoch())},
                     {"batches in an epoch", std::to_string(train.batches_per_epoch())},
                     {"ranks", std::to_string(strategy.size())},
                     {"strategy", strategy.name()}});
  if (task.name != "classification") s.push_back({"task", task.name});
  for (const Settings& more : {settings_of(options, OptionSpec::Decides::program), options.settings})
    s.insert(s.end(), more.begin(), more.end());
  for (const auto& described : train.description()) s.push_back(described);
  return s;
}

// The settings in the first metrics line, by the names of the options.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch) {
  MetricFields fields{{"version", version()}, {"host", host_name()}, {"optimizer", optimizer}, {"batch", batch}};
  for (const auto& [name, value] : settings) {
    if (name == "--epochs" || name == "--seed" || name == "--batch" || name == "--optimizer" || name == "--data")
      continue;
    const std::string key = name == "--lr"                                           ? "learning_rate"
                            : name == "pictures"                                     ? "data"
                            : name == "mean" || name == "std" || name == "partition" ? name
                            : name.starts_with("--")                                 ? name.substr(2)
                                                                                     : "";
    if (key.empty() || value.empty()) continue;
    const auto number = parsed<double>(value);
    fields.push_back({key, number ? MetricValue(*number) : MetricValue(value)});
  }
  return fields;
}

void agree(Strategy& strategy, const Settings& settings, const RunConfig& options, bool resumes) {
  if (strategy.size() == 1) return;
  std::string mine = strategy.where() + "\n";
  for (const auto& [name, value] : settings)
    if (name != "--data") mine += name + " " + value + "\n";
  // Settings that decide which calls a rank makes to the others.
  const bool folder = !options.resume.empty() && !options.checkpoint.empty();
  const char* resumed = resumes ? "yes" : folder ? "no (all must see the folder of --checkpoint)" : "no";
  mine += "--stop-after " + std::to_string(options.stop_after) + "\n--resume " + resumed + "\n--trace " +
          (options.profiler.trace.empty() ? "no" : "yes") + "\n";
  std::vector<std::vector<std::string>> all;
  for (const std::string& rank : strategy.gather(mine)) all.push_back(parts_of(rank, '\n'));
  const std::vector<std::string>& first = all[0];
  for (const auto& other : all)
    for (std::size_t i = 1; i < std::min(first.size(), other.size()); i++)
      if (first[i] != other[i])
        refuse(first[0], " and ", other[0], " have different options: ", first[i], " and ", other[i]);
}

Schedule schedule_of(const RunConfig& options) {
  return options.schedule.empty() ? Schedule() : Schedule::parse(options.schedule);
}

Rates rates_of(const RunConfig& options, double given, int times, double steps_per_epoch) {
  const double base = scaled(options.lr_scale, given, times), total = steps_per_epoch * options.epochs;
  const Schedule schedule = schedule_of(options);
  const bool warms_up = schedule.warmup > 0 || schedule.kind == Schedule::Kind::one_cycle;
  const double rise = warms_up || base == given ? 0 : std::min(5 * steps_per_epoch, total / 10);
  return {given, base, total, steps_per_epoch, rise, schedule};
}

}  // namespace tandem
