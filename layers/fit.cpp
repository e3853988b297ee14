#include "layers/fit.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/backend.h"
#include "core/elementwise.h"
#include "core/safetensors.h"
#include "layers/accumulation.h"
#include "layers/metrics.h"
#include "layers/options.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Ctrl-C and SIGTERM ask for a stop at the next step; the second of either ends the program at once.
volatile std::sig_atomic_t stop_signal = 0;
int stopped_by = 0;

double now() {  // what a handler may call
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

class StopOnSignal {
 public:
  StopOnSignal() {
    stop_signal = stopped_by = 0;
    struct sigaction action {};
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    for (auto [number, before] : {std::pair{SIGINT, &interrupt_}, {SIGTERM, &terminate_}}) {
      sigaction(number, &action, before);
      if (before->sa_handler == SIG_IGN) sigaction(number, before, nullptr);  // in the background, under nohup
    }
  }
  ~StopOnSignal() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }

 private:
  static void handle(int number) {
    static volatile double first;
    if (!stop_signal) {
      first = now();
      stop_signal = number;
    } else if (now() - first > 0.1) {  // timeout(1) sends its one signal twice
      std::signal(number, SIG_DFL);
      std::raise(number);
    }
  }
  struct sigaction interrupt_ {
  }, terminate_{};
};

// At most ten times a second on a terminal, where the line renews itself; silent otherwise until the epoch's own line.
class Progress {
 public:
  Progress(bool on, int epochs) : on_(on), terminal_(on && isatty(2)), epochs_(epochs) {}
  void step(int epoch, std::int64_t done, std::int64_t total, double loss, double accuracy, double rate,
            double learning_rate) {
    if (!terminal_ || seconds_since(last_) < 0.1) return;
    last_ = Clock::now();
    int filled = static_cast<int>(20 * done / std::max<std::int64_t>(1, total));
    std::string bar;
    for (int i = 0; i < 20; i++) bar += i < filled ? "█" : "·";
    double left = rate > 0 ? double(total - done) / double(total) *
                                 (seconds_since(begin_) / std::max(1e-9, double(done) / double(total)))
                           : 0;
    std::fprintf(stderr,
                 "\repoch %d/%d %s %3d%%  loss %.4f  accuracy %.1f %%  %.0f images/s  lr %.4g  %.0f s left \033[K",
                 epoch, epochs_, bar.c_str(), static_cast<int>(100 * done / std::max<std::int64_t>(1, total)), loss,
                 100 * accuracy, rate, learning_rate, left);
  }
  void begin() { begin_ = Clock::now(); }
  void line(const EpochReport& e) {
    if (!on_) return;
    if (terminal_) std::fprintf(stderr, "\r\033[K");
    std::fprintf(stderr, "epoch %d/%d  loss %.4f", e.epoch, epochs_, e.train_loss);
    if (e.validation_accuracy) std::fprintf(stderr, "  validation %.2f %%", 100 * *e.validation_accuracy);
    if (e.test_accuracy) std::fprintf(stderr, "  test %.2f %%", 100 * *e.test_accuracy);
    std::fprintf(stderr, "  %.0f images/s  %.1f s\n", e.images_per_second, e.seconds);
  }
  void resumed(const std::string& from, const RunPosition& at, const std::vector<std::string>& differences) {
    if (!on_) return;
    std::fprintf(stderr, "%s: %lld of %d epochs are done", from.c_str(), static_cast<long long>(at.epoch), epochs_);
    if (at.batch > 0)
      std::fprintf(stderr, " and %lld of %lld batches", static_cast<long long>(at.batch),
                   static_cast<long long>(at.batches));
    std::fprintf(stderr, ", %lld steps%s\n", static_cast<long long>(at.step),
                 at.epoch >= epochs_ ? ": nothing is left to do (a larger --epochs goes on)" : "");
    if (differences.empty()) return;
    std::fprintf(stderr, "warning: it goes on, but not bit for bit as it would have:\n");
    for (const std::string& d : differences) std::fprintf(stderr, "  %s\n", d.c_str());
  }
  void ranks(const Strategy& strategy, std::int64_t batch, double rate, double scaled) {
    if (!on_) return;
    std::fprintf(stderr, "%d ranks, %s: batch %lld = %d × %lld, lr %g", strategy.size(), strategy.name().c_str(),
                 static_cast<long long>(batch), strategy.size(), static_cast<long long>(batch / strategy.size()), rate);
    std::fprintf(stderr, scaled == rate ? "\n" : " → %g\n", scaled);
  }
  void stopped(const std::string& reason, std::int64_t steps, std::int64_t total) {
    clear();
    if (on_)
      std::fprintf(stderr, "stopped after step %lld of %lld (%s)\n", static_cast<long long>(steps),
                   static_cast<long long>(total), reason.c_str());
  }
  void clear() {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  bool on_, terminal_;
  int epochs_;
  Clock::time_point last_{}, begin_ = Clock::now();
};

MetricFields fields_of(const EpochReport& e) {
  MetricFields f{{"event", std::string("epoch")},
                 {"epoch", std::int64_t(e.epoch)},
                 {"train_loss", e.train_loss},
                 {"train_accuracy", e.train_accuracy}};
  if (e.validation_accuracy) {
    f.push_back({"val_loss", *e.validation_loss});
    f.push_back({"val_accuracy", *e.validation_accuracy});
  }
  if (e.test_accuracy) {
    f.push_back({"test_loss", *e.test_loss});
    f.push_back({"test_accuracy", *e.test_accuracy});
  }
  f.push_back({"learning_rate", e.learning_rate});
  f.push_back({"images_per_second", e.images_per_second});
  f.push_back({"seconds", e.seconds});
  return f;
}

const std::string does_not_repeat = "running the batch again gave finite values only; the failure does not repeat";

std::vector<std::pair<std::string, double>> curves_of(const EpochReport& e) {
  std::vector<std::pair<std::string, double>> values;
  for (auto& [name, value] : fields_of(e))
    if (const double* number = std::get_if<double>(&value)) values.push_back({"epoch/" + name, *number});
  return values;
}

// What mode() holds while a loop runs: where dropout finds its counters.
class Counters {
 public:
  explicit Counters(const Tensor& state) : before_(mode()) { mode().step_state = state; }
  ~Counters() {
    mode().step_state = before_.step_state;
    mode().samples = before_.samples;
  }
  void batch(const Batch& b) { mode().samples = b.samples; }

 private:
  Mode before_;
};

// The first batch of a source, again and again: `steps` of it are an epoch.
class OneBatch : public BatchSource {
 public:
  static constexpr std::int64_t steps = 300;
  static constexpr double near_zero = 0.01;  // a loss below this ends it
  explicit OneBatch(BatchSource& source) : source_(source), batch_(source.make(0, 0)) {}
  void share(int rank, int world) override {
    source_.share(rank, world);
    batch_ = source_.make(0, 0);
  }
  std::int64_t batches_per_epoch() const override { return steps; }
  std::int64_t pictures_per_epoch() const override { return steps * batch_.global; }
  void start(std::int64_t epoch, std::int64_t first) override { epoch_ = epoch, next_ = first; }
  bool next(Batch& batch) override {
    if (next_ >= steps) return false;
    batch = make(epoch_, next_++);
    return true;
  }
  Batch make(std::int64_t epoch, std::int64_t index) override {
    Batch b = batch_;
    b.epoch = epoch;
    b.index = index;
    return b;
  }
  static std::string verdict(double first, double last, std::int64_t took) {
    char text[200];
    std::snprintf(text, sizeof text, "one batch: loss %.4g → %.4g in %lld steps: %s", first, last,
                  static_cast<long long>(took),
                  last < near_zero    ? "the model can learn"
                  : last < first / 10 ? "it learns, but not to zero: dropout and label smoothing do that, or --lr"
                                      : "the model does NOT learn: look at --lr, the labels and the model");
    return text;
  }

 private:
  BatchSource& source_;
  Batch batch_;
  std::int64_t epoch_ = 0, next_ = 0;
};

// The files of a run: last.safetensors and best.safetensors in a folder.
class CheckpointFiles {
 public:
  // Nothing is written yet, but what would make that fail after hours of training fails now.
  CheckpointFiles(const FitOptions& options, bool writes) : from_(options.resume), folder_(options.checkpoint) {
    namespace fs = std::filesystem;
    std::error_code none;
    if (!from_.empty() && fs::is_directory(from_, none)) {
      if (folder_.empty()) folder_ = from_;
      from_ = file(from_, "last");
    }
    if (!from_.empty() && !fs::exists(from_, none)) refuse("--resume ", options.resume, ": there is no ", from_);
    if (folder_.empty() || !writes) return;
    if (fs::exists(last(), none) && (from_.empty() || !fs::equivalent(from_, last(), none)))
      refuse("--checkpoint ", folder_, ": holds another run's last.safetensors. Go on with that by --resume ", folder_,
             ", or choose another folder");
    fs::create_directories(folder_, none);
    if (access(folder_.c_str(), W_OK) != 0)
      refuse("--checkpoint ", folder_, ": cannot be written: ", std::strerror(errno));
    const std::string trial = file(folder_, "trial");
    SafetensorsWriter().write(trial);
    fs::remove(trial, none);
  }
  bool resumes() const { return !from_.empty(); }
  const std::string& from() const { return from_; }
  bool writes() const { return !folder_.empty(); }
  std::string last() const { return file(folder_, "last"); }
  std::string best() const { return file(folder_, "best"); }

  RunPosition load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                   std::vector<std::string>& differences) const {
    RunPosition at = load_checkpoint(from_, training, settings, &differences);
    if (at.batch > 0 && at.batches != per_epoch)
      refuse(from_, ": was saved at batch ", at.batch, " of ", at.batches, ", and an epoch has ", per_epoch,
             " batches now: resume it with the same data and --batch");
    if (!training.space.backend().deterministic())
      differences.push_back("convolution algorithms are chosen by timing (--deterministic: by rule)");
    return at;
  }

 private:
  static std::string file(const std::string& folder, const char* name) {
    return (std::filesystem::path(folder) / name).string() + ".safetensors";
  }
  std::string from_, folder_;
};

std::string text_of(double v) {
  char s[32];
  std::snprintf(s, sizeof s, "%.10g", v);
  return s;
}

// The options that decide what a step computes, as text. What fit() is told otherwise it records itself.
Settings settings_of(const Options& o) {
  auto yes = [](bool b) { return std::string(b ? "yes" : "no"); };
  return {{"--model", o.model},
          {"--data-set", o.data_set},
          {"--data", o.data},
          {"--val", std::to_string(o.val)},
          {"--batch", std::to_string(o.global_batch ? o.global_batch : o.batch)},
          {"--schedule", o.schedule},
          {"--momentum", text_of(o.momentum)},
          {"--weight-decay", text_of(o.weight_decay)},
          {"--label-smoothing", text_of(o.label_smoothing)},
          {"--augment", yes(o.augment)},
          {"--mixup", text_of(o.mixup)},
          {"--cutout", std::to_string(o.cutout)},
          {"--dtype", name_of(o.dtype)},
          {"--exact-conv", yes(o.exact_conv)}};
}

// Everything that decides what this run computes.
Settings all_settings(const FitOptions& options, const Optimizer& optimizer, const Strategy& strategy,
                      const Backend& backend, const BatchSource& train) {
  Settings s{{"--epochs", std::to_string(options.epochs)},
             {"--seed", std::to_string(options.seed)},
             {"--lr", text_of(optimizer.learning_rate())},
             {"--clip", text_of(optimizer.clip_norm)},
             {"--accumulate", std::to_string(options.accumulate)},
             {"--ema", text_of(options.ema)},
             {"pictures in an epoch", std::to_string(train.pictures_per_epoch())},
             {"batches in an epoch", std::to_string(train.batches_per_epoch())},
             {"ranks", std::to_string(strategy.size())}};
  s.insert(s.end(), options.settings.begin(), options.settings.end());
  const Settings here = surroundings(backend);
  s.insert(s.end(), here.begin(), here.end());
  return s;
}

// How good an epoch was: the larger, the better. Test pictures never choose.
std::pair<double, double> merit(const EpochReport& e) {
  if (e.validation_accuracy) return {*e.validation_accuracy, -*e.validation_loss};
  return {-e.train_loss, 0};
}

}  // namespace

int stopping_signal() { return stopped_by; }

FitOptions fit_options(const Options& o) {
  return {.epochs = o.overfit_batch ? 1 : o.epochs,
          .schedule = Schedule::parse(o.schedule),
          .scale_learning_rate = o.scale_learning_rate && o.global_batch == 0,
          .seed = o.seed,
          .metrics = o.metrics,
          .log_every = o.log_every,
          .observe = o.observe,
          .overfit_batch = o.overfit_batch,
          .exchange = o.exchange,
          .accumulate = o.accumulate,
          .ema = o.ema,
          .patience = o.patience,
          .checkpoint = o.checkpoint,
          .resume = o.resume,
          .stop_after = o.stop_after,
          .settings = settings_of(o)};
}

Loss cross_entropy_loss(double label_smoothing) {
  return [label_smoothing](const Variable& logits, const Tensor& labels, Tensor* correct) {
    return cross_entropy(logits, labels, label_smoothing, correct);
  };
}

Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy) {
  NoGrad off;
  bool training = model.training();
  model.eval();
  Score score;
  Tensor correct;
  source.start(0);
  for (Batch batch; source.next(batch);) {
    if (!correct.defined()) correct = Tensor::zeros(batch.images.backend(), {1}, DType::i32);
    Variable loss = cross_entropy(model(Variable(batch.images)), batch.labels, 0, &correct);
    score.loss += loss.item() * double(batch.size());
    score.samples += double(batch.size());
  }
  if (correct.defined()) score.correct = correct.item();
  model.train(training);
  if (strategy) score = strategy->combine(score);
  return score.samples > 0 ? Evaluation{score.loss / score.samples, score.correct / score.samples} : Evaluation{};
}

Variable batch_loss(const Loss& loss, const Variable& logits, const Batch& batch, Tensor* correct) {
  Variable l = loss(logits, batch.labels, correct);
  if (!batch.other_labels.defined()) return l;
  return batch.share * l + (1 - batch.share) * loss(logits, batch.other_labels, nullptr);
}

std::string diagnose(Module& model, const Loss& loss, ParameterSpace& space, const Batch& batch) {
  for (const Segment& s : space.segments())
    if (!all_finite(s.leaf->value)) return "the parameter " + s.name + " is not finite: an earlier update overflowed";
  if (!all_finite(batch.images)) return "the input pictures hold a value that is not finite";
  struct Checks {
    bool before = std::exchange(mode().check, true);
    ~Checks() { mode().check = before; }
  } checks;
  try {
    Variable l = batch_loss(loss, model(Variable(batch.images)), batch);
    space.zero_gradients();
    space.backward(l);
  } catch (const NotFinite& e) {
    return e.what();
  }
  // Every value is finite: then it was the sum of their squares that was not.
  const Segment* largest = nullptr;
  double most = 0, total = 0;
  for (const Segment& s : space.segments()) {
    double squares = 0;
    for (double g : s.leaf->grad.values()) squares += g * g;
    total += squares;
    if (squares >= most) most = squares, largest = &s;
  }
  if (largest && total > 3.4e38)
    return "every value is finite, but the squared norm of the gradient overflows f32 (largest: " + largest->name + ")";
  return does_not_repeat;
}

FitReport fit(Module& model, Loss loss, Optimizer& optimizer, Backend& backend, const FitData& given_data,
              const FitOptions& options, Strategy* given) {
  std::optional<OneBatch> one_batch;
  if (options.overfit_batch) one_batch.emplace(given_data.train);
  const FitData data = one_batch ? FitData{*one_batch} : given_data;
  std::unique_ptr<Strategy> from_environment = given ? nullptr : strategy_from_environment();
  Strategy& strategy = given ? *given : *from_environment;
  bool speaks = strategy.rank() == 0;  // only rank 0 writes
  if (options.patience > 0 && !data.validation)
    refuse("--patience ", options.patience, ": there is nothing to judge by: hold pictures back with --val");
  const CheckpointFiles files(options, speaks);

  for (BatchSource* source : {&data.train, data.validation, data.test})
    if (source) source->share(strategy.rank(), strategy.size());
  strategy.prepare(model, loss);
  ParameterSpace space(model, backend, options.seed, strategy.memory());
  Exchange exchange(options.exchange, model, space, data.train, speaks);
  strategy.begin(space);
  optimizer.bind(space, options.seed);
  strategy.bind(optimizer);
  std::optional<Ema> ema;
  if (options.ema > 0) ema.emplace(space, options.ema);

  const double given_rate = optimizer.learning_rate(),
               base_rate = options.scale_learning_rate ? strategy.scaled_learning_rate(given_rate) : given_rate;
  const std::int64_t per_epoch = data.train.batches_per_epoch();
  Accumulation accumulation(space, optimizer, options.accumulate, per_epoch);
  const double steps_per_epoch = double(accumulation.steps_per_epoch()), total = steps_per_epoch * options.epochs;
  const bool warms_up = options.schedule.warmup > 0 || options.schedule.kind == Schedule::Kind::one_cycle;
  const double rise = warms_up || base_rate == given_rate ? 0 : std::min(5 * steps_per_epoch, total / 10);
  auto rate_of = [&](std::int64_t step) {
    const double base = double(step) < rise ? given_rate + (base_rate - given_rate) * double(step) / rise : base_rate;
    return base * options.schedule.factor(double(step), total, steps_per_epoch);
  };

  FitReport report;
  RunPosition at;  // how far the run has come
  const Training training{space, optimizer, ema ? &*ema : nullptr};
  const Settings settings = all_settings(options, optimizer, strategy, backend, data.train);
  if (files.resumes()) at = files.load(training, settings, per_epoch, report.differences);
  if (!speaks) at.so_far = {};
  at.batches = per_epoch;
  auto save = [&](const std::string& file) {
    if (speaks && files.writes()) save_checkpoint(file, training, at, settings);
  };

  MetricsFile metrics(speaks ? options.metrics : "", files.resumes());
  metrics.write({{"event", std::string(files.resumes() ? "resume" : "start")},
                 {"parameters", space.parameters()},
                 {"epochs", std::int64_t(options.epochs)},
                 {"batches_per_epoch", per_epoch},
                 {"backend", backend.description()},
                 {"strategy", strategy.name()},
                 {"ranks", std::int64_t(strategy.size())},
                 {"seed", std::int64_t(options.seed)},
                 {"step", at.step}});
  Progress progress(options.progress && speaks, options.epochs);
  if (files.resumes()) progress.resumed(files.from(), at, report.differences);
  if (strategy.size() > 1) {
    const std::int64_t all = data.train.make(0, 0).over_ranks();
    progress.ranks(strategy, all, given_rate, base_rate);
  }
  StopOnSignal signals;
  Counters counters(optimizer.state());
  // A device is asked for its flag every few steps, since asking waits for it; on the host looking is free.
  const std::int64_t look_every = backend.on_device() ? 16 : 1;
  double first_loss = 0, last_loss = 0;
  Observer observer(options.observe, backend, strategy.rank(), std::int64_t(total));
  OnLane lane(observer.trace(), "step");
  if (options.observe.summary && speaks) observer.before(model, data.train.make(0, 0).images);
  const auto run_begin = Clock::now();
  std::string reason = "finished";
  auto stop = [&](const std::string& why) { report.stopped = true, reason = why; };

  // A step before this one, or this one, was not finite, and since then nothing was applied: its batches once more.
  auto give_up = [&](std::int64_t applied, std::int64_t batch) {
    std::int64_t k = (batch / options.accumulate - (at.step - 1 - applied)) * options.accumulate;
    const std::int64_t end = std::min(k + options.accumulate, per_epoch);
    std::string why = does_not_repeat;
    for (; k < end && why == does_not_repeat; k++) {
      Batch again = data.train.make(at.epoch, k);
      counters.batch(again);
      why = diagnose(model, loss, space, again);
    }
    progress.clear();
    metrics.write({{"event", std::string("not_finite")}, {"step", applied + 1}, {"reason", why}});
    metrics.write({{"event", std::string("end")},
                   {"steps", applied},
                   {"stopped", std::int64_t(1)},
                   {"reason", std::string("not finite")}});
    optimizer.learning_rate(given_rate);
    throw NotFinite("step " + std::to_string(applied + 1) + " (epoch " + std::to_string(at.epoch + 1) + ", batch " +
                    std::to_string(k) + "): the loss or its gradient is not finite: " + why +
                    "; the parameters are those before this step. A smaller --lr usually helps");
  };

  while (at.epoch < options.epochs && !report.stopped) {
    EpochReport e{.epoch = int(at.epoch) + 1,
                  .learning_rate = rate_of(std::max<std::int64_t>(0, at.step - 1)),
                  .validation_loss = {},
                  .validation_accuracy = {},
                  .test_loss = {},
                  .test_accuracy = {}};
    model.train();
    optimizer.epoch(static_cast<std::uint32_t>(at.epoch));
    Tensor correct = Tensor::full(backend, {1}, at.so_far.correct, DType::i32);
    double loss_sum = at.so_far.loss, seen = at.so_far.samples;
    auto begin = Clock::now();
    progress.begin();
    data.train.start(at.epoch, at.batch);
    for (Batch batch; data.train.next(batch);) {
      observer.step(at.step);
      Span step_span("step", "phase", nullptr, at.step);
      e.learning_rate = rate_of(at.step);
      optimizer.learning_rate(e.learning_rate);
      accumulation.begin(batch);
      counters.batch(batch);
      exchange.begin_step(at.step + 1, batch.index == 0);
      Variable l;
      {
        Observer::Phase phase(observer, "forward");
        l = batch_loss(loss, model(Variable(batch.images)), batch, &correct);
      }
      observer.tape(l);
      bool due = false;
      {
        Observer::Phase phase(observer, "backward");
        due = accumulation.backward(l, batch);
      }
      exchange.after_backward();
      if (due) {
        Observer::Phase phase(observer, "optimizer");
        strategy.step(optimizer, Variable(accumulation.loss()));
        if (ema) ema->update(optimizer);
        at.step++;
        at.batch = batch.index + 1;
        if (at.step % look_every == 0 || at.batch == per_epoch)
          if (StepState state = optimizer.read_state(); state.not_finite)
            give_up(static_cast<std::int64_t>(state.step), batch.index);
      }
      const double now = l.item();
      if (first_loss == 0) first_loss = now;
      last_loss = now;
      if (due && options.log_every > 0 && at.step % options.log_every == 0)
        metrics.write({{"event", std::string("step")},
                       {"step", at.step},
                       {"loss", now},
                       {"learning_rate", e.learning_rate}});
      loss_sum += now * double(batch.size());
      seen += double(batch.size());
      progress.step(e.epoch, batch.index + 1, per_epoch, loss_sum / seen, correct.item() / seen,
                    (seen - at.so_far.samples) * strategy.size() / seconds_since(begin), e.learning_rate);
      if (!due) continue;
      exchange.end_step(at.step, loss_sum / seen, correct.item() / seen, e.learning_rate,
                        (seen - at.so_far.samples) * strategy.size() / seconds_since(begin));
      if (stop_signal || (one_batch && now < OneBatch::near_zero)) strategy.request_stop();
      if (strategy.stopped()) stop("strategy");
      if (options.stop_after > 0 && at.step >= options.stop_after) stop("--stop-after");
      if (report.stopped) break;
    }
    backend.synchronize();
    e.seconds = seconds_since(begin);
    const double before = at.so_far.samples;  // were trained by the run that was resumed
    at.so_far = strategy.combine({loss_sum, correct.item(), seen});
    e.train_loss = at.so_far.loss / std::max(1.0, at.so_far.samples);
    e.train_accuracy = at.so_far.correct / std::max(1.0, at.so_far.samples);
    e.images_per_second = (at.so_far.samples - before) / e.seconds;
    strategy.end_epoch(e.epoch - 1);
    strategy.merge_statistics(space);
    if (strategy.stopped()) stop("strategy");
    if (report.stopped) {
      save(files.last());
      break;
    }
    observer.evaluation(true);
    std::optional<Observer::Phase> phase(std::in_place, observer, "evaluation");
    {
      std::optional<Ema::Shown> averages;
      if (ema) averages.emplace(*ema);
      if (data.validation) {
        Evaluation v = evaluate(model, *data.validation, &strategy);
        e.validation_loss = v.loss;
        e.validation_accuracy = v.accuracy;
      }
      if (data.test) {
        Evaluation t = evaluate(model, *data.test, &strategy);
        e.test_loss = t.loss;
        e.test_accuracy = t.accuracy;
      }
    }
    phase.reset();
    observer.evaluation(false);
    if (!one_batch) report.epochs.push_back(e);  // programs rely on the test accuracy of an epoch
    if (speaks) metrics.write(fields_of(e));
    exchange.end_epoch(at.step, curves_of(e));
    progress.line(e);

    const bool better = merit(e) > at.best;
    if (better) at.best = merit(e), at.best_epoch = e.epoch;
    at.epoch++, at.batch = 0, at.so_far = {};
    save(files.last());
    if (better) save(files.best());
    if (options.patience > 0 && e.epoch - at.best_epoch >= options.patience && at.epoch < options.epochs)
      stop("no better since epoch " + std::to_string(at.best_epoch));
  }
  stopped_by = report.stopped ? stop_signal : 0;
  if (stopped_by) reason = stopped_by == SIGINT ? "SIGINT" : "SIGTERM";
  if (report.stopped) progress.stopped(reason, at.step, std::int64_t(total));
  strategy.end();
  observer.end();
  if (one_batch && speaks && !stop_signal)
    std::printf("%s\n", OneBatch::verdict(first_loss, last_loss, at.step).c_str());
  optimizer.learning_rate(given_rate);
  if (ema) ema->swap();
  model.eval();
  exchange.end();
  report.steps = at.step;
  report.best_epoch = int(at.best_epoch);
  MetricFields end{{"event", std::string("end")},
                   {"steps", report.steps},
                   {"epochs", std::int64_t(report.epochs.size())},
                   {"stopped", std::int64_t(report.stopped)},
                   {"reason", reason},
                   {"seconds", seconds_since(run_begin)}};
  if (!report.epochs.empty() && report.epochs.back().test_accuracy)
    end.push_back({"test_accuracy", *report.epochs.back().test_accuracy});
  metrics.write(end);
  return report;
}

}  // namespace tandem
