#include "layers/train/run.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/backend.h"
#include "core/clock.h"
#include "core/files/files.h"
#include "layers/export/torch_weights.h"

namespace tandem {
namespace {

void check(const RunConfig& options, const FitData& data) {
  require(options.epochs >= 0 && options.patience >= 0 && options.stop_after >= 0 && options.log_every >= 0,
          "fit: epochs, patience, stop_after and log_every must be at least 0");
  if (options.patience > 0 && !data.validation)
    refuse("--patience ", options.patience, ": there is no validation: hold pictures back with --val");
  const double warmup = schedule_of(options).warmup;
  if (warmup > options.epochs && !options.overfit_batch)
    refuse("--schedule: a warm-up of ", warmup, " epochs is longer than the run: --epochs ", options.epochs);
}

// The part of the data that this rank trains on and evaluates.
FitData share_of(Strategy& strategy, const FitData& given, BatchSource* one_batch, int accumulate) {
  BatchSource& train = one_batch ? *one_batch : given.train;
  const FitData mine{strategy.batches(train, accumulate), one_batch ? nullptr : given.validation,
                     one_batch ? nullptr : given.test};
  for (BatchSource* source : {mine.validation, mine.test}) {
    if (!source) continue;
    const Ranks& ranks = strategy.ranks();
    // Fewer pictures than ranks: each rank evaluates all of them, and the mean over ranks is the same.
    const bool all = source->pictures_per_epoch() < ranks.evaluation_shares;
    source->share(all ? 0 : ranks.evaluation_share, all ? 1 : ranks.evaluation_shares);
  }
  return mine;
}

// The mover for saved tensors that are swapped out.
std::unique_ptr<Mover> mover_of(const RunConfig& options, Backend& backend) {
  if (options.swap == SwapMode::off) return nullptr;
  const std::string& scratch = options.scratch;
  const bool gpu = backend.asynchronous(), host_memory = scratch == "pinned" || scratch == "unified";
  if (host_memory ? !gpu : gpu && !scratch.empty())
    refuse("--scratch ", scratch, ": for a GPU it is memory of the host, pinned or unified, otherwise a folder");
  if (!gpu) return file_mover(scratch);
  return scratch == "unified" ? unified_mover(backend, options.memory_budget) : pinned_mover(backend);
}

}  // namespace

// ---- before the first step ------------------------------------------------------------------------------------------
Run::Run(Module& given_model, const Task& given_task, Optimizer& given_optimizer, Backend& given_backend,
         const FitData& given, const RunConfig& given_options, Strategy& given_strategy)
    : model(given_model),
      task(given_task),
      optimizer(given_optimizer),
      backend(given_backend),
      strategy(given_strategy),
      options(given_options),
      first_rank(strategy.rank() == 0),
      files((check(options, given), options.checkpoint), options.resume, first_rank),
      one_batch(options.overfit_batch ? first_batch_of(given.train) : nullptr),
      data(share_of(strategy, given, one_batch.get(), options.accumulate)),
      settings(recipe_of(options, task, optimizer, strategy, data.train)),
      flat(model, backend, options.seed, prepare()),
      about(data.train.description()),
      clip_norm_(optimizer.clip_norm, optimizer.clip_norm),
      // The device's flag is read every few steps
      if_not_finite_(optimizer.if_not_finite, IfNotFinite::wait),
      sums_(backend) {
  if (const std::string& file = options.import_export.import_torch; !file.empty())
    for_option("--import-torch", [&] { import_torch(model, backend, picture_of(data.train), file); });
  for (const auto& [name, value] : settings)
    if (name == "--model") about["model"] = value;
  rates.given = optimizer.learning_rate();
  if (const auto named = about.find("classes"); named != about.end())  // a line each
    classes = 1 + std::count(named->second.begin(), named->second.end(), '\n');
  optimizer.bind(flat, options.seed);
  strategy.begin(flat, optimizer);
  if (options.ema != 0) ema.emplace(flat, options.ema);
  accumulation.emplace(flat, optimizer, options.accumulate, batches_per_epoch());
  const Batch first = data.train.make(0, 0);
  global_batch = first.over_ranks();
  if (data.train.grows_with_ranks()) batch_growth = strategy.ranks().per_step;
  rates = rates_of(options, rates.given, batch_growth, double(accumulation->steps_per_epoch()));
  if (batch_growth > 1 && optimizer.clip_norm == 0) optimizer.clip_norm = clip_of(options.lr_scale, batch_growth);
  resume();
  Alone alone;
  if (options.memory_budget == 0) require_memory(model, first);
}

Run::~Run() { optimizer.learning_rate(rates.given); }

FlatMemory Run::prepare() {
  agree(strategy, settings, options, files.resumes());
  strategy.prepare(model, task, {.sync_batch_norm = options.sync_batch_norm});
  const auto convolves = [](const auto& named) { return named.second->shape.rank() == 4; };  // its weight
  if (options.exact_conv && std::ranges::none_of(model.parameters(), convolves))
    refuse("--exact-conv: this model has no convolution: leave the option out");
  if (options.sync_batch_norm && model.buffers().empty())
    refuse("--sync-bn: this model has no batch norm: leave the option out");
  return strategy.memory();
}

void Run::resume() {
  position.run = run_of(settings);
  for (const auto& here : surroundings(backend)) settings.push_back(here);
  if (files.resumes()) position = files.load(training(), settings, batches_per_epoch(), report.differences);
  if (!first_rank) position.running_sums = {};
  position.batches = batches_per_epoch();
  began = position.step;
  const auto total = std::int64_t(rates.total);
  last_step = options.stop_after > 0 ? std::min(options.stop_after, total) : total;
  const std::int64_t no_better = position.epoch - position.best_epoch;
  const bool impatient = position.ended ? options.patience <= no_better
                                        : options.patience > 0 && position.batch == 0 && no_better >= options.patience;
  if (position.epoch >= options.epochs) {
    nothing_left = "a larger --epochs goes on";
  } else if (impatient) {
    stop("no better since epoch " + std::to_string(position.best_epoch));
    nothing_left = "validation was " + reason + ", a larger --patience goes on";
  } else if (options.stop_after > 0 && position.step >= options.stop_after) {
    nothing_left = "--stop-after " + std::to_string(options.stop_after) + " is behind it";
    stop("--stop-after");
  } else {
    position.ended = false;
  }
}

void Run::begin() {
  const auto checkpoints = save_checkpoints(*this);  // its errors are reported first
  // stop_on_signal() is first: it determines why the run stopped, and other callbacks write the reason.
  callbacks = {stop_on_signal(),     profile(*this),   write_exports(*this), write_metrics(*this),
               show_progress(*this), warn_of_doubts(), stop_early(),         checkpoints};
  if (one_batch) callbacks.push_back(overfit_batch());
  callbacks.insert(callbacks.end(), options.callbacks.begin(), options.callbacks.end());
  for (auto& c : callbacks) require(c != nullptr, "fit: RunConfig::callbacks holds a null pointer");
  for (auto& c : callbacks) c->begin(*this);
  counters_.emplace(optimizer.state());
  const StepState state = optimizer.read_state();
  first_count_ = known_steps_ = std::int64_t(state.step + state.skipped);
  consistent_sums_ = position.running_sums;
  plan_memory();
}

void Run::plan_memory() {
  MemoryPlanOptions o{.budget = options.memory_budget, .swap = options.swap, .batches = options.accumulate};
  bool marked = false;
  model.each([&](Module& m) { marked = marked || m.recompute; });
  if (options.memory_budget == 0 && !marked) return;
  std::unique_ptr<Mover> mover;
  if (options.memory_budget > 0) {
    mover = mover_of(options, backend);
  } else {  // the device's memory is the only limit
    o.budget = std::min(backend.memory().left(), SIZE_MAX / 2) + backend.memory().statistics().live_bytes;
    o.swap = SwapMode::recompute;
  }
  memory_plan = std::make_unique<MemoryPlan>(backend, std::move(mover), o);
}

// ---- an epoch -------------------------------------------------------------------------------------------------------
RunPlan Run::plan() {
  return {.epochs = options.epochs,
          .stop_after = options.stop_after,
          .done = began,
          .steps_per_epoch = rates.steps_per_epoch,
          .learning_rate = [rates = rates](double step) { return rates.at(step); },
          .running_sums = [this] { return sums_.read(); },
          .asked_to_stop = asked_to_stop,
          .resumed = files.resumes()};
}

void Run::begin_epoch() {
  epoch = {};
  epoch.epoch = int(position.epoch) + 1;
  epoch.learning_rate = rates.at(double(std::max<std::int64_t>(0, position.step - 1)));
  strategy.begin_epoch(position.epoch, plan());
  model.train();
  optimizer.epoch(static_cast<std::uint32_t>(position.epoch));
  resumed_ = position.running_sums;
  sums_.begin(resumed_);
  correct_before_ = resumed_.correct;
  epoch_began_ = Clock::now();
  data.train.start(position.epoch, position.batch);
}

bool Run::next_batch() {
  counters_->batch({});  // frees the memory of the last batch
  return data.train.next(batch);
}

void Run::begin_step() {
  step = {.learning_rate = rates.at(double(position.step))};
  epoch.learning_rate = step.learning_rate;
  optimizer.learning_rate(step.learning_rate);
  accumulation->begin(batch);
  counters_->batch(batch);
  sums_.count(batch.size());
  phase("step", true);
  eager = std::any_of(callbacks.begin(), callbacks.end(), [&](auto& c) { return c->looks_inside(*this); });
  if (memory_plan && !memory_plan->settled()) eager = true;
}

void Run::forward_backward() {
  std::optional<MemoryPlan::Step> planned;
  if (memory_plan) planned.emplace(*memory_plan);
  phase("forward", true);
  batch_loss = tandem::batch_loss(task.loss, model(Variable(batch.images)), batch, &sums_.correct);
  phase("forward", false);
  phase("backward", true);
  step_ends = accumulation->backward(batch_loss, optimizer.scaled(batch_loss), batch);
  phase("backward", false);
  sums_.add(batch_loss.value(), batch.size());
  batch_loss = {};
  if (planned) planned->end();
}

void Run::exchange() {
  if (!step_ends) return;
  if (strategy.emulation) strategy.emulation(true);
  phase("exchange", true);
  strategy.exchange(accumulation->loss());
  phase("exchange", false);
}

void Run::update() {
  if (!step_ends) return;
  phase("optimizer", true);
  strategy.update(optimizer, accumulation->loss());
  if (ema) ema->update(optimizer);
  phase("optimizer", false);
}

void Run::finish() {
  if (!step_ends) return;
  strategy.finish(optimizer);
  if (strategy.emulation) strategy.emulation(false);
}

void Run::end_step() {
  if (backend.records()) flat.count_writes(flat.all());  // a replay writes to them without counting
  if (step_ends) {
    position.step = strategy.steps(position.step + 1);
    position.batch = batch.index + 1;
    steps_done_++;
    unread_++;
    if (reads_step()) read_step();
    for (auto& c : callbacks) c->step_end(*this);
  }
  phase("step", false);
}

// The flag and the loss of a device are read every few steps, because reading waits for the device. On the host they
// are read every step.
bool Run::reads_step() const {
  if (!backend.records() || position.step % 16 == 0 || position.batch == batches_per_epoch() || steps_done_ == 1)
    return true;
  return std::any_of(callbacks.begin(), callbacks.end(), [&](auto& c) { return c->reads_step(*this); });
}

void Run::read_step() {
  check_finite();
  const MetricSums sums = sums_.read(&step.loss);
  step.known = true;
  step.right = sums.correct - std::exchange(correct_before_, sums.correct);
  step.mean_loss = sums.loss / sums.samples;
  step.accuracy = sums.correct / sums.samples;
  step.seconds = seconds_since(epoch_began_);
  step.images_per_second = (sums.samples - resumed_.samples) * strategy.size() / step.seconds;
  consistent_sums_ = sums;
}

void Run::end_training() {
  position.step = strategy.steps(position.step);
  ended_ = strategy.end_epoch({position.epoch + 1, position.step, sums_.read(), seconds_since(epoch_began_)});
  backend.synchronize();
  if (position.step > began) check_finite();
  trained = ended_.trained.samples > 0 ? ended_.trained : resumed_;
  consistent_sums_ = position.running_sums = trained;
  epoch.seconds = ended_.seconds;
  epoch.train_loss = trained.loss / std::max(1.0, trained.samples);
  if (task.has_accuracy) epoch.train_accuracy = trained.correct / std::max(1.0, trained.samples);
  epoch.images_per_second = (trained.samples - resumed_.samples) / std::max(1e-9, epoch.seconds);
  strategy.synchronize(Strategy::Shared::buffers, flat, optimizer);
  if (ema) {
    Ema::Shown averages(*ema);
    strategy.synchronize(Strategy::Shared::averages, flat, optimizer);
  }
  position.step = strategy.steps(position.step);
  const bool stopped_after = options.stop_after > 0 && position.step >= options.stop_after;
  if (strategy.over(position.step) && (stopped_after || position.step < std::int64_t(rates.total)))
    stop(!asked_why_.empty() ? asked_why_ : stopped_after ? "--stop-after" : "another rank was asked to stop");
}

void Run::evaluate() {
  position.epoch = ended_.epochs - 1;
  epoch.first = std::exchange(epoch.epoch, int(ended_.epochs));
  phase("evaluation", true);
  if (memory_plan) {  // frees the training batches, because evaluation needs their memory
    batch = {};
    data.train.rest();
  }
  {
    std::optional<Ema::Shown> averages;
    if (ema) averages.emplace(*ema);
    auto evaluate_on = [&](BatchSource* source, std::optional<double>& loss, std::optional<double>& accuracy) {
      if (!source || !strategy.ranks().evaluates || interrupted_) return;
      MetricSums sums = evaluate_sums(model, *source, task, flat.slice().count > 1);
      if (memory_plan) source->rest();
      if (strategy.ranks().evaluation_shares > 1) sums = strategy.sum(sums, Strategy::Among::evaluating);
      interrupted_ = sums.interrupted > 0;
      loss = mean_of(sums).loss;
      if (task.has_accuracy) accuracy = mean_of(sums).accuracy;
      epoch.class_accuracy = mean_of(sums).class_accuracy;
    };
    evaluate_on(data.validation, epoch.validation_loss, epoch.validation_accuracy);
    evaluate_on(data.test, epoch.test_loss, epoch.test_accuracy);
  }
  phase("evaluation", false);
  if (interrupted_) {  // a resumed run begins with this evaluation
    strategy.request_stop();
    stop(asked_why_.empty() ? "another rank was asked to stop" : asked_why_);
  }
}

void Run::end_epoch() {
  if (!one_batch) report.epochs.push_back(epoch);  // one_batch has no test accuracy, which programs read
  position.epoch++;
  position.batch = 0;
  consistent_sums_ = position.running_sums = {};
  position.step = ended_.steps;
  for (auto& c : callbacks) c->epoch_end(*this);
}

// ---- not finite -----------------------------------------------------------------------------------------------------
void Run::check_finite() {
  const StepState state = optimizer.read_state();
  const std::int64_t count = std::int64_t(state.step + state.skipped);
  if (const auto elsewhere = strategy.not_finite(state))
    give_up(*elsewhere, std::max<std::int64_t>(0, unread_ - 1 - (count - known_steps_)));
  if (state.not_finite != 1) {  // otherwise the strategy reports it to all ranks later
    unread_ = 0;
    known_steps_ = count;
  }
}

// The step `back` steps before this one was not finite, and no update has been applied since. Runs its batches again to
// find the operation.
void Run::give_up(const std::string& elsewhere, std::int64_t back) {
  Alone alone;          // each rank searches in its own batches and stops at the first operation that it finds
  memory_plan.reset();  // the step runs again with all checks and without a memory limit
  const std::int64_t done = position.step - 1 - back;
  std::int64_t k = (batch.index / options.accumulate - back) * options.accumulate;
  position.step = done;
  position.batch = k;
  const std::int64_t end = std::min(k + options.accumulate, batches_per_epoch());
  if (!elsewhere.empty()) not_finite = "it was so on " + elsewhere;
  for (; k < end && not_finite.empty(); k++) {
    const Batch again = data.train.make(position.epoch, k);
    counters_->batch(again);
    not_finite = diagnose(model, task.loss, flat, again);
  }
  if (not_finite.empty()) not_finite = "running the batch again gave finite values only; the failure does not repeat";
  diverged = true;
  throw NotFinite("step " + std::to_string(done + 1) + " (epoch " + std::to_string(position.epoch + 1) + ", batch " +
                  std::to_string(k) + "): the loss or its gradient is not finite: " + not_finite +
                  "; the parameters are those before this step. A smaller --lr usually helps");
}

// ---- the end --------------------------------------------------------------------------------------------------------
void Run::locate(RunPosition& p) const {
  const std::int64_t steps = accumulation->steps_per_epoch(), epoch_before = p.epoch;
  if (p.step == 0) return;
  p.epoch = std::min<std::int64_t>((p.step - 1) / steps, options.epochs - 1);
  p.batch = std::min((p.step - p.epoch * steps) * options.accumulate, batches_per_epoch());
  if (p.epoch != epoch_before) p.running_sums = {};
}

RunPosition Run::consistent_position() {
  RunPosition p = position;
  p.running_sums = consistent_sums_;
  // Parameters change only after a complete exchange. A step may have been applied before the exchange failed.
  const StepState state = optimizer.read_state();
  const bool one_more = step_ends && std::int64_t(state.step + state.skipped) - first_count_ > steps_done_;
  const std::int64_t step = strategy.steps(p.step + one_more);
  if (step != p.step || one_more) {
    p.step = step;
    locate(p);
  }
  return p;
}

void Run::request_stop(const std::string& why) {
  asked_why_ = why;
  strategy.request_stop();
}

void Run::warn(const std::string& text) {
  for (auto& c : callbacks) c->warning(*this, text);
}

void Run::phase(const char* name, bool begins) {
  for (auto& c : callbacks) c->phase(*this, name, begins);
}

std::string Run::fail(std::string message) {
  for (auto& c : callbacks) try {
      c->failed(*this, message);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "no checkpoint of what is left: %s\n", e.what());
    }
  return message;
}

// Gives all ranks rank 0's evaluation of the last epoch, because other ranks may not have evaluated.
void Run::share_evaluation() {
  EpochReport none;
  EpochReport& e = report.epochs.empty() ? none : report.epochs.back();
  for (std::optional<double>* field : {&e.validation_loss, &e.validation_accuracy, &e.test_loss, &e.test_accuracy})
    if (const auto value = gathered(strategy, *field)[0]) *field = value;
}

FitReport Run::end() {
  const Measures mine = strategy.end();
  if (report.stopped && nothing_left.empty() && !position.ended) {
    // Ranks that step independently are at different batches, so the position of the run is its number of steps.
    const std::int64_t step = strategy.steps(position.step);
    if (step != position.step || interrupted_ || !strategy.ranks().synchronous) {
      position.step = step;
      locate(position);
    }
  }
  if (report.stopped)
    for (auto& c : callbacks) c->stopped(*this);
  position.step = std::max(position.step, strategy.steps(position.step));
  std::string bytes;
  nlohmann::json::to_cbor(mine, bytes);
  for (const std::string& rank : strategy.gather(bytes))  // that of a lost rank is empty
    measures.push_back(rank.empty() ? Measures() : nlohmann::json::from_cbor(rank).get<Measures>());
  if (strategy.size() > 1) share_evaluation();
  if (ema) ema->swap();
  make_whole(model, strategy);
  model.eval();
  report.steps = position.step;
  report.best_epoch = int(position.best_epoch);
  for (auto& c : callbacks) c->end(*this);
  double exchanges = 0, refused = 0;  // of all ranks, with a parameter server
  for (const Measures& rank : measures)
    for (const auto& [name, value] : rank)
      (name == "exchanges" ? exchanges : refused) += name == "exchanges" || name == "refused" ? value : 0;
  diverged = 2 * refused > exchanges;
  if (diverged)
    throw NotFinite("most gradients of this run were not finite, and not used (" + std::to_string(int(refused)) +
                    "): it has diverged. A smaller --lr usually helps");
  return report;
}

}  // namespace tandem
