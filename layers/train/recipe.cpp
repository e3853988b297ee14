#include "layers/train/recipe.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/build_info.h"
#include "core/text.h"
#include "layers/train/option_table.h"

namespace tandem {
namespace {

// With a batch that grows with the ranks, fewer steps than these were measured to end below one machine
// (dist/REFERENCE.md).
constexpr double few_steps = 600;

}  // namespace

FitOptions fit_options(const Options& o) {
  FitOptions fit = o.fit;
  if (fit.overfit_batch) fit.epochs = 1;
  fit.schedule = Schedule::parse(o.schedule);
  fit.settings = settings_of(o);
  return fit;
}

Settings recipe_of(const FitOptions& options, const Task& task, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train) {
  Settings s{{"--epochs", std::to_string(options.epochs)},
             {"--seed", std::to_string(options.seed)},
             {"--optimizer", optimizer.name()},
             {"--lr", digits(optimizer.learning_rate())},
             {"--lr-scale", name_of(options.lr_scale)},
             {"--clip", digits(optimizer.clip_norm)},
             {"--accumulate", std::to_string(options.accumulate)},
             {"--ema", digits(options.ema)},
             {"--sync-bn", options.sync_batch_norm ? "yes" : "no"},
             {"pictures in an epoch", std::to_string(train.pictures_per_epoch())},
             {"batches in an epoch", std::to_string(train.batches_per_epoch())},
             {"ranks", std::to_string(strategy.size())},
             {"strategy", strategy.name()}};
  if (task.name != "classification") s.push_back({"task", task.name});
  s.insert(s.end(), options.settings.begin(), options.settings.end());
  for (const auto& described : train.description()) s.push_back(described);
  return s;
}

// What the first line of the metrics tells besides the run's size: all that was asked for, by the options' names.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch) {
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  MetricFields fields{{"version", version()}, {"host", std::string(host)}, {"optimizer", optimizer}, {"batch", batch}};
  for (const auto& [name, value] : settings) {
    if (name == "--epochs" || name == "--seed" || name == "--batch" || name == "--optimizer" || name == "--data")
      continue;
    const std::string key = name == "--lr"                    ? "learning_rate"
                            : name == "pictures"              ? "data"
                            : name == "mean" || name == "std" ? name
                            : name.starts_with("--")          ? name.substr(2)
                                                              : "";
    if (key.empty() || value.empty()) continue;
    const auto number = parsed<double>(value);
    fields.push_back({key, number ? MetricValue(*number) : MetricValue(value)});
  }
  return fields;
}

void agree(Strategy& strategy, const Settings& settings, const FitOptions& options, bool resumes) {
  if (strategy.size() == 1) return;
  std::string mine = strategy.where() + "\n";
  for (const auto& [name, value] : settings)
    if (name != "--data") mine += name + " " + value + "\n";
  // Settings that decide which calls a rank makes to the others.
  mine += "--stop-after " + std::to_string(options.stop_after) + "\n";
  const bool folder = !options.resume.empty() && !options.checkpoint.empty();
  mine += "--resume " +
          std::string(resumes  ? "yes"
                      : folder ? "no (all must see the folder of --checkpoint)"
                               : "no") +
          "\n";
  mine += "--trace " + std::string(options.profiler.trace.empty() ? "no" : "yes") + "\n";
  const std::vector<std::string> all = strategy.gather(mine);
  for (std::size_t r = 1; r < all.size(); r++) {
    std::istringstream a(all[0]), b(all[r]);
    std::string first, other, x, y;
    std::getline(a, first), std::getline(b, other);
    while (std::getline(a, x) && std::getline(b, y))
      if (x != y) refuse(first, " and ", other, " were told different things: ", x, " and ", y);
  }
}

Cutting cutting_of(const Strategy& strategy, const BatchSource& train, const Batch& first) {
  const Ranks& ranks = strategy.ranks();
  if (ranks.size == 1) return {};
  return {.pictures = first.over_ranks(),
          .shares = ranks.batch_shares,
          .one_step = ranks.synchronous,
          .times = train.grows_with_ranks() ? ranks.per_step : 1};
}

std::string text_of(const Cutting& c, Module& model, const Strategy& strategy, const FitOptions& options, double rate) {
  const std::string lr = ", lr " + digits(rate);
  if (strategy.ranks().batch_shares == 1)
    return "batch " + std::to_string(c.pictures * options.accumulate) + " a push" + lr;
  std::string shares =
      "batch " + std::to_string(c.pictures) + " = " + std::to_string(c.shares) + " × " + std::to_string(c.smallest());
  if (c.pictures % c.shares) shares += " or " + std::to_string(c.smallest() + 1);
  const bool parts = !options.sync_batch_norm && !model.buffers().empty();
  if (c.times == 1) return shares + (!c.one_step ? lr : parts ? ", steps as on one machine" : ", as on one machine");
  return shares + lr + " → " + digits(scaled(options.lr_scale, rate, c.times)) + " (" + name_of(options.lr_scale) + ")";
}

std::vector<std::string> doubts(const Cutting& c, Module& model, const FitOptions& options, double steps,
                                std::int64_t batches) {
  std::vector<std::string> all;
  if (c.shares > 1 && c.smallest() < 16 && !options.sync_batch_norm && !model.buffers().empty())
    all.push_back("batch norm has only " + std::to_string(c.smallest()) +
                  " pictures of a batch on each rank: --sync-bn takes all of them (under all-reduce); or a larger "
                  "--batch, or fewer ranks");
  if (c.times > 1 && steps < few_steps)
    all.push_back(std::to_string(std::int64_t(steps)) + " steps are few for a batch of " + std::to_string(c.pictures) +
                  ": more --epochs, or --batch " + std::to_string(c.smallest()) + " for the steps of one machine");
  if (options.accumulate > batches)
    all.push_back("--accumulate " + std::to_string(options.accumulate) + ": an epoch has " + std::to_string(batches) +
                  " batches, so each epoch makes one smaller step");
  const double first_change =
      options.schedule.milestones.empty() ? options.schedule.every : options.schedule.milestones.front();
  if (options.schedule.kind == Schedule::Kind::step && options.schedule.warmup + first_change >= options.epochs &&
      options.epochs > 0)
    all.push_back("--schedule: its first change, after epoch " + digits(options.schedule.warmup + first_change) +
                  ", is not within the run: --epochs " + std::to_string(options.epochs));
  return all;
}

Rates rates_of(const FitOptions& options, double given, int times, double steps_per_epoch) {
  const double base = scaled(options.lr_scale, given, times), total = steps_per_epoch * options.epochs;
  const bool warms_up = options.schedule.warmup > 0 || options.schedule.kind == Schedule::Kind::one_cycle;
  const double rise = warms_up || base == given ? 0 : std::min(5 * steps_per_epoch, total / 10);
  return {.given = given,
          .base = base,
          .total = total,
          .steps_per_epoch = steps_per_epoch,
          .rise = rise,
          .schedule = options.schedule};
}

}  // namespace tandem
