#include "layers/train/run.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/backend.h"
#include "core/clock.h"
#include "layers/train/callbacks/callbacks.h"
#include "layers/train/slices.h"
#include "layers/train/step_memory.h"

namespace tandem {
namespace {

void check(const FitOptions& options, const FitData& data) {
  require(options.ema >= 0 && options.ema < 1, "fit: ema ", options.ema, " must be at least 0 and below 1");
  require(options.epochs >= 0 && options.patience >= 0 && options.stop_after >= 0 && options.log_every >= 0,
          "fit: epochs, patience, stop_after and log_every must be at least 0");
  if (options.patience > 0 && !data.validation)
    refuse("--patience ", options.patience, ": there is no validation: hold pictures back with --val");
  if (options.schedule.warmup > options.epochs && !options.overfit_batch)
    refuse("--schedule: a warm-up of ", options.schedule.warmup, " epochs is longer than the run: --epochs ",
           options.epochs);
}

// What this rank trains and evaluates of the data.
FitData share_of(Strategy& strategy, const FitData& given, OneBatch* one_batch, int accumulate) {
  BatchSource& train = one_batch ? *one_batch : given.train;
  const FitData mine{strategy.batches(train, accumulate), one_batch ? nullptr : given.validation,
                     one_batch ? nullptr : given.test};
  for (BatchSource* source : {mine.validation, mine.test}) {
    if (!source) continue;
    const auto [shares, share] = std::pair{strategy.ranks().evaluation_shares, strategy.ranks().evaluation_share};
    // Fewer pictures than ranks: each rank evaluates all of them, and the mean over ranks is the same.
    if (source->pictures_per_epoch() < shares)
      source->share(0, 1);
    else
      source->share(share, shares);
  }
  return mine;
}

// Where saved tensors go that are swapped out.
std::unique_ptr<Mover> mover_of(const FitOptions& options, Backend& backend) {
  if (options.swap == SwapMode::off) return nullptr;
  const bool of_gpu = options.scratch == "pinned" || options.scratch == "unified";
  if (!backend.asynchronous() && of_gpu) refuse("--scratch ", options.scratch, " is for a GPU: here it is a folder");
  if (!backend.asynchronous()) return file_mover(options.scratch);
  if (options.scratch == "unified") return unified_mover(backend, options.memory_budget);
  if (!options.scratch.empty() && options.scratch != "pinned")
    refuse("--scratch ", options.scratch, ": a GPU swaps to memory of the host: choose pinned or unified");
  return pinned_mover(backend);
}

std::map<std::string, std::string> about_run(const BatchSource& train, const Settings& settings) {
  std::map<std::string, std::string> about = train.description();
  for (const auto& [name, value] : settings)
    if (name == "--model") about["model"] = value;
  return about;
}

std::string text_of(const Measures& measures) {  // "sent_bytes 17\n…"
  std::ostringstream text;
  text.precision(17);
  for (const auto& [name, value] : measures) text << name << ' ' << value << '\n';
  return text.str();
}
Measures measures_in(const std::string& text) {
  Measures all;
  std::istringstream words(text);
  double value;
  for (std::string name; words >> name >> value;) all.push_back({name, value});
  return all;
}

}  // namespace

// ---- before the first step ------------------------------------------------------------------------------------------
Run::Run(Module& given_model, const Task& given_task, Optimizer& given_optimizer, Backend& given_backend,
         const FitData& given, const FitOptions& given_options, Strategy& given_strategy)
    : model(given_model),
      task(given_task),
      optimizer(given_optimizer),
      backend(given_backend),
      strategy(given_strategy),
      options(given_options),
      first_rank(strategy.rank() == 0),
      files((check(options, given), options.checkpoint), options.resume, first_rank),
      one_batch(options.overfit_batch ? std::make_unique<OneBatch>(given.train) : nullptr),
      data(share_of(strategy, given, one_batch.get(), options.accumulate)),
      settings(recipe_of(options, task, optimizer, strategy, data.train)),
      flat(model, backend, options.seed, prepare()),
      about(about_run(data.train, options.settings)),
      exports(options.import_export, model, flat, data.train, about, first_rank),
      clip_before_(optimizer.clip_norm),
      if_not_finite_before_(optimizer.if_not_finite),
      correct_(Tensor::zeros(backend, {1}, DType::i32)),
      running_loss_(backend) {
  rates.given = optimizer.learning_rate();
  if (const auto named = about.find("classes"); named != about.end())  // a line each
    classes = 1 + std::count(named->second.begin(), named->second.end(), '\n');
  optimizer.bind(flat, options.seed);
  strategy.begin(flat, optimizer);
  if (options.ema > 0) ema.emplace(flat, options.ema);
  accumulation.emplace(flat, optimizer, options.accumulate, batches_per_epoch());
  const Batch first = data.train.make(0, 0);
  global_batch = first.over_ranks();
  cutting = cutting_of(strategy, data.train, first);
  rates = rates_of(options, rates.given, cutting.times, double(accumulation->steps_per_epoch()));
  if (cutting.times > 1 && optimizer.clip_norm == 0) optimizer.clip_norm = clip_of(options.lr_scale, cutting.times);
  resume();
  Alone alone;
  if (options.memory_budget == 0) require_memory(model, first);
}

Run::~Run() {
  optimizer.clip_norm = clip_before_;
  optimizer.if_not_finite = if_not_finite_before_;
  optimizer.learning_rate(rates.given);
}

FlatMemory Run::prepare() {
  agree(strategy, settings, options, files.resumes());
  strategy.prepare(model, task, {.sync_batch_norm = options.sync_batch_norm});
  return strategy.memory();
}

void Run::resume() {
  at.run = run_of(settings);
  for (const auto& here : surroundings(backend)) settings.push_back(here);
  if (files.resumes()) at = files.load(training(), settings, batches_per_epoch(), report.differences);
  if (!first_rank) at.running_sums = {};
  at.batches = batches_per_epoch();
  began = at.step;
  const auto total = std::int64_t(rates.total);
  last_step = options.stop_after > 0 ? std::min(options.stop_after, total) : total;
  const std::int64_t no_better = at.epoch - at.best_epoch;
  const bool impatient =
      at.ended ? options.patience <= no_better : options.patience > 0 && at.batch == 0 && no_better >= options.patience;
  if (at.epoch >= options.epochs) {
    nothing_left = "a larger --epochs goes on";
  } else if (impatient) {
    nothing_left =
        "validation was no better since epoch " + std::to_string(at.best_epoch) + ", a larger --patience goes on";
    stop("no better since epoch " + std::to_string(at.best_epoch));
  } else if (options.stop_after > 0 && at.step >= options.stop_after) {
    nothing_left = "--stop-after " + std::to_string(options.stop_after) + " is behind it";
    stop("--stop-after");
  } else {
    at.ended = false;
  }
}

static bool marks_a_module(const Module& module) {
  return module.recompute || std::any_of(module.children().begin(), module.children().end(),
                                         [](const auto& child) { return marks_a_module(*child.second); });
}

void Run::begin() {
  callbacks = callbacks_of(*this);
  for (auto& c : callbacks) require(c != nullptr, "fit: FitOptions::callbacks holds a null pointer");
  for (auto& c : callbacks) c->begin(*this);
  optimizer.if_not_finite = IfNotFinite::wait;  // the device's flag is read every few steps
  counters_.emplace(optimizer.state());
  const StepState state = optimizer.read_state();
  first_count_ = known_steps_ = std::int64_t(state.step + state.skipped);
  whole_ = at.running_sums;
  if (options.memory_budget > 0) {
    memory_plan = std::make_unique<MemoryPlan>(
        backend, mover_of(options, backend),
        MemoryPlanOptions{.budget = options.memory_budget, .swap = options.swap, .batches = options.accumulate});
  } else if (marks_a_module(model)) {
    const MemoryStatistics memory = backend.memory().statistics();
    const std::size_t all = std::min(backend.memory().left(), SIZE_MAX / 2) + memory.live_bytes;  // no other limit
    memory_plan = std::make_unique<MemoryPlan>(
        backend, nullptr, MemoryPlanOptions{.budget = all, .swap = SwapMode::recompute, .batches = options.accumulate});
  }
}

// ---- an epoch -------------------------------------------------------------------------------------------------------
RunPlan Run::plan() {
  return {.epochs = options.epochs,
          .stop_after = options.stop_after,
          .done = began,
          .steps_per_epoch = rates.steps_per_epoch,
          .learning_rate = [rates = rates](double step) { return rates.at(step); },
          .running_sums =
              [this] {
                return MetricSums{running_loss_.read().loss, double(correct_.item()), seen_};
              },
          .asked_to_stop = asked_to_stop,
          .resumed = files.resumes()};
}

void Run::begin_epoch() {
  epoch = {};
  epoch.epoch = int(at.epoch) + 1;
  epoch.learning_rate = rates.at(double(std::max<std::int64_t>(0, at.step - 1)));
  strategy.begin_epoch(at.epoch, plan());
  model.train();
  optimizer.epoch(static_cast<std::uint32_t>(at.epoch));
  resumed_ = at.running_sums;
  correct_.fill(resumed_.correct);
  running_loss_.begin(resumed_.loss);
  seen_ = resumed_.samples;
  correct_before_ = resumed_.correct;
  epoch_began_ = Clock::now();
  data.train.start(at.epoch, at.batch);
}

bool Run::next_batch() {
  counters_->batch({});  // the last batch's memory is given back
  return data.train.next(batch);
}

void Run::begin_step() {
  step = {.learning_rate = rates.at(double(at.step))};
  epoch.learning_rate = step.learning_rate;
  optimizer.learning_rate(step.learning_rate);
  accumulation->begin(batch);
  counters_->batch(batch);
  seen_ += double(batch.size());
  phase("step", true);
  eager = std::any_of(callbacks.begin(), callbacks.end(), [&](auto& c) { return c->looks_inside(*this); });
  if (memory_plan && !memory_plan->settled()) eager = true;
}

void Run::forward_backward() {
  std::optional<MemoryPlan::Step> planned;
  if (memory_plan) planned.emplace(*memory_plan);
  phase("forward", true);
  batch_loss = tandem::batch_loss(task.loss, model(Variable(batch.images)), batch, &correct_);
  phase("forward", false);
  phase("backward", true);
  due = accumulation->backward(batch_loss, optimizer.scaled(batch_loss), batch);
  phase("backward", false);
  running_loss_.add(batch_loss.value(), double(batch.size()));
  batch_loss = {};
  if (planned) planned->end();
}

void Run::exchange() {
  if (!due) return;
  if (strategy.emulation) strategy.emulation(true);
  phase("exchange", true);
  strategy.exchange(accumulation->loss());
  phase("exchange", false);
}

void Run::update() {
  if (!due) return;
  phase("optimizer", true);
  strategy.update(optimizer);
  if (ema) ema->update(optimizer);
  phase("optimizer", false);
}

void Run::finish() {
  if (!due) return;
  strategy.finish(optimizer);
  if (strategy.emulation) strategy.emulation(false);
}

void Run::end_step() {
  if (backend.records()) flat.count_writes(flat.all());  // a replay wrote to them, and told nobody
  if (due) {
    at.step = strategy.steps(at.step + 1);
    at.batch = batch.index + 1;
    made_++;
    unread_++;
    if (reads_step()) read_step();
    for (auto& c : callbacks) c->step_end(*this);
  }
  phase("step", false);
}

// The flag and the loss of a device are read every few steps, since reading waits for it. On the host they are read
// every step.
bool Run::reads_step() const {
  if (!backend.records() || at.step % 16 == 0 || at.batch == batches_per_epoch() || made_ == 1) return true;
  return std::any_of(callbacks.begin(), callbacks.end(), [&](auto& c) { return c->reads_step(*this); });
}

void Run::read_step() {
  check_finite();
  const RunningMean::Sums sums = running_loss_.read();
  const double correct = correct_.item();
  step.known = true;
  step.loss = sums.last;
  step.right = correct - std::exchange(correct_before_, correct);
  step.mean_loss = sums.loss / seen_;
  step.accuracy = correct / seen_;
  step.images_per_second = (seen_ - resumed_.samples) * strategy.size() / seconds_since(epoch_began_);
  whole_ = {sums.loss, correct, seen_};
}

void Run::end_training() {
  at.step = strategy.steps(at.step);
  const EpochEnd mine{
      at.epoch + 1, at.step, {running_loss_.read().loss, double(correct_.item()), seen_}, seconds_since(epoch_began_)};
  const EpochEnd all = strategy.end_epoch(mine);
  backend.synchronize();
  if (at.step > began) check_finite();
  trained = all.trained.samples > 0 ? all.trained : resumed_;
  whole_ = at.running_sums = trained;
  finished_ = all.epochs;
  steps_at_end_ = all.steps;
  epoch.seconds = all.seconds;
  epoch.train_loss = trained.loss / std::max(1.0, trained.samples);
  if (task.has_accuracy) epoch.train_accuracy = trained.correct / std::max(1.0, trained.samples);
  epoch.images_per_second = (trained.samples - resumed_.samples) / std::max(1e-9, epoch.seconds);
  strategy.synchronize(Strategy::Shared::buffers, flat, optimizer);
  if (ema) {
    Ema::Shown averages(*ema);
    strategy.synchronize(Strategy::Shared::averages, flat, optimizer);
  }
  at.step = strategy.steps(at.step);
  const bool stopped_after = options.stop_after > 0 && at.step >= options.stop_after;
  if (strategy.over(at.step) && (stopped_after || at.step < std::int64_t(rates.total)))
    stop(!asked_why_.empty() ? asked_why_ : stopped_after ? "--stop-after" : "another rank was asked to stop");
}

Evaluation Run::evaluate_on(BatchSource& source) {
  MetricSums sums = evaluate_sums(model, source, task, flat.slice().count > 1);
  if (memory_plan) source.rest();
  if (strategy.ranks().evaluation_shares > 1) sums = strategy.sum(sums, Strategy::Among::evaluating);
  interrupted_ = interrupted_ || sums.interrupted > 0;
  return mean_of(sums);
}

void Run::evaluate() {
  at.epoch = finished_ - 1;
  epoch.first = std::exchange(epoch.epoch, int(finished_));
  phase("evaluation", true);
  if (memory_plan) {  // its memory is that of the batches of training
    batch = {};
    data.train.rest();
  }
  {
    std::optional<Ema::Shown> averages;
    if (ema) averages.emplace(*ema);
    const bool evaluates = strategy.ranks().evaluates;
    if (data.validation && evaluates) {
      const Evaluation v = evaluate_on(*data.validation);
      epoch.validation_loss = v.loss;
      if (task.has_accuracy) epoch.validation_accuracy = v.accuracy;
    }
    if (data.test && evaluates && !interrupted_) {
      const Evaluation t = evaluate_on(*data.test);
      epoch.test_loss = t.loss;
      if (task.has_accuracy) epoch.test_accuracy = t.accuracy;
    }
  }
  phase("evaluation", false);
  if (interrupted_) {  // a run that goes on begins with it
    strategy.request_stop();
    stop(asked_why_.empty() ? "another rank was asked to stop" : asked_why_);
  }
}

void Run::end_epoch() {
  if (!one_batch) report.epochs.push_back(epoch);  // programs rely on the test accuracy of an epoch
  at.epoch++, at.batch = 0, whole_ = at.running_sums = {};
  at.step = steps_at_end_;
  for (auto& c : callbacks) c->epoch_end(*this);
}

// ---- not finite -----------------------------------------------------------------------------------------------------
void Run::check_finite() {
  const StepState state = optimizer.read_state();
  const std::int64_t count = std::int64_t(state.step + state.skipped);
  if (const auto elsewhere = strategy.not_finite(state))
    give_up(*elsewhere, std::max<std::int64_t>(0, unread_ - 1 - (count - known_steps_)));
  if (state.not_finite != 1) unread_ = 0, known_steps_ = count;  // otherwise the strategy will tell all ranks later
}

// The step `back` steps before this one was not finite, and no update was applied since. Runs its batches again.
void Run::give_up(const std::string& elsewhere, std::int64_t back) {
  const std::string does_not_repeat = "running the batch again gave finite values only; the failure does not repeat";
  Alone alone;          // each rank finds what it can, and ends where it finds it
  memory_plan.reset();  // the step is run once more with all checks, in what memory it takes
  const std::int64_t done = at.step - 1 - back;
  std::int64_t k = (batch.index / options.accumulate - back) * options.accumulate;
  at.step = done;
  at.batch = k;
  const std::int64_t end = std::min(k + options.accumulate, batches_per_epoch());
  if (!elsewhere.empty()) not_finite = "it was so on " + elsewhere;
  for (; k < end && not_finite.empty(); k++) {
    const Batch again = data.train.make(at.epoch, k);
    counters_->batch(again);
    not_finite = diagnose(model, task.loss, flat, again);
  }
  if (not_finite.empty()) not_finite = does_not_repeat;
  diverged = true;
  throw NotFinite("step " + std::to_string(done + 1) + " (epoch " + std::to_string(at.epoch + 1) + ", batch " +
                  std::to_string(k) + "): the loss or its gradient is not finite: " + not_finite +
                  "; the parameters are those before this step. A smaller --lr usually helps");
}

// ---- the end --------------------------------------------------------------------------------------------------------
void Run::place(RunPosition& p) const {
  const std::int64_t steps = accumulation->steps_per_epoch(), epoch_before = p.epoch;
  if (p.step == 0) return;
  p.epoch = std::min<std::int64_t>((p.step - 1) / steps, options.epochs - 1);
  p.batch = std::min((p.step - p.epoch * steps) * options.accumulate, batches_per_epoch());
  if (p.epoch != epoch_before) p.running_sums = {};
}

RunPosition Run::whole_position() {
  RunPosition p = at;
  p.running_sums = whole_;
  // Parameters change only after a complete exchange. A step may have been applied before the exchange failed.
  const StepState state = optimizer.read_state();
  const bool one_more = due && std::int64_t(state.step + state.skipped) - first_count_ > made_;
  const std::int64_t step = strategy.steps(p.step + one_more);
  if (step != p.step || one_more) p.step = step, place(p);
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

std::string Run::fail(const std::string& error) {
  std::string notes;
  for (auto& c : callbacks) try {
      notes += c->failed(*this, error);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "no checkpoint of what is left: %s\n", e.what());
    }
  return notes;
}

// Rank 0's result of the last epoch, where it alone evaluated.
void Run::tell_result() {
  std::ostringstream text;
  text.precision(17);
  if (!report.epochs.empty()) {
    const EpochReport& e = report.epochs.back();
    for (const auto& v : {e.validation_loss, e.validation_accuracy, e.test_loss, e.test_accuracy})
      v ? text << *v << ' ' : text << "- ";
  }
  std::istringstream words(strategy.gather(text.str())[0]);
  if (first_rank || report.epochs.empty()) return;
  EpochReport& e = report.epochs.back();
  std::string word;  // a stream reads no inf and no nan, which losses may be
  for (auto* field : {&e.validation_loss, &e.validation_accuracy, &e.test_loss, &e.test_accuracy})
    if (words >> word && word != "-") *field = std::strtod(word.c_str(), nullptr);
}

FitReport Run::end() {
  const Measures mine = strategy.end();
  if (report.stopped && nothing_left.empty() && !at.ended) {
    // Of ranks that step by themselves each is at a batch of its own: where the run is, its steps say.
    const std::int64_t step = strategy.steps(at.step);
    if (step != at.step || interrupted_ || !strategy.ranks().synchronous) at.step = step, place(at);
  }
  if (report.stopped)
    for (auto& c : callbacks) c->stopped(*this);
  at.step = std::max(at.step, strategy.steps(at.step));
  for (const std::string& rank : strategy.gather(text_of(mine))) measures.push_back(measures_in(rank));
  if (strategy.size() > 1) tell_result();
  if (ema) ema->swap();
  make_whole(model, strategy);
  model.eval();
  report.steps = at.step;
  report.best_epoch = int(at.best_epoch);
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
