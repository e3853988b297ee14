#include "layers/fit.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>

#include "core/backend.h"
#include "core/elementwise.h"
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

}  // namespace

int stopping_signal() { return stopped_by; }

FitOptions fit_options(const Options& o) {
  return {.epochs = o.overfit_batch ? 1 : o.epochs,
          .schedule = Schedule::parse(o.schedule),
          .seed = o.seed,
          .metrics = o.metrics,
          .log_every = o.log_every,
          .observe = o.observe,
          .overfit_batch = o.overfit_batch};
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

std::string diagnose(Module& model, const Loss& loss, ParameterSpace& space, const Batch& batch) {
  for (const Segment& s : space.segments())
    if (!all_finite(s.leaf->value)) return "the parameter " + s.name + " is not finite: an earlier update overflowed";
  if (!all_finite(batch.images)) return "the input pictures hold a value that is not finite";
  struct Checks {
    bool before = std::exchange(mode().check, true);
    ~Checks() { mode().check = before; }
  } checks;
  try {
    Variable l = loss(model(Variable(batch.images)), batch.labels, nullptr);
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
  return "running the batch again gave finite values only; the failure does not repeat";
}

FitReport fit(Module& model, Loss loss, Optimizer& optimizer, Backend& backend, const FitData& given_data,
              const FitOptions& options, Strategy* given) {
  std::optional<OneBatch> one_batch;
  if (options.overfit_batch) one_batch.emplace(given_data.train);
  const FitData data = one_batch ? FitData{*one_batch} : given_data;
  std::unique_ptr<Strategy> from_environment = given ? nullptr : strategy_from_environment();
  Strategy& strategy = given ? *given : *from_environment;
  bool speaks = strategy.rank() == 0;  // only rank 0 writes

  for (BatchSource* source : {&data.train, data.validation, data.test})
    if (source) source->share(strategy.rank(), strategy.size());
  strategy.prepare(model, loss);
  ParameterSpace space(model, backend, options.seed, strategy.memory());
  strategy.begin(space);
  optimizer.bind(space, options.seed);
  strategy.bind(optimizer);

  const double given_rate = optimizer.learning_rate(), base_rate = strategy.scaled_learning_rate(given_rate);
  const std::int64_t per_epoch = data.train.batches_per_epoch(), total = per_epoch * options.epochs;
  MetricsFile metrics(speaks ? options.metrics : "");
  metrics.write({{"event", std::string("start")},
                 {"parameters", space.parameters()},
                 {"epochs", std::int64_t(options.epochs)},
                 {"batches_per_epoch", per_epoch},
                 {"backend", backend.description()},
                 {"strategy", strategy.name()},
                 {"ranks", std::int64_t(strategy.size())},
                 {"seed", std::int64_t(options.seed)}});
  Progress progress(options.progress && speaks, options.epochs);
  StopOnSignal signals;
  Counters counters(optimizer.state());
  FitReport report;
  // A device is asked for its flag every few steps, since asking waits for it; on the host looking is free.
  const std::int64_t look_every = backend.on_device() ? 16 : 1;
  double first_loss = 0, last_loss = 0;
  Observer observer(options.observe, backend, strategy.rank(), total);
  OnLane lane(observer.trace(), "step");
  if (options.observe.summary && speaks) observer.before(model, data.train.make(0, 0).images);
  const auto run_begin = Clock::now();

  for (int epoch = 0; epoch < options.epochs && !strategy.stopped(); epoch++) {
    EpochReport e{
        .epoch = epoch + 1, .validation_loss = {}, .validation_accuracy = {}, .test_loss = {}, .test_accuracy = {}};
    model.train();
    optimizer.epoch(static_cast<std::uint32_t>(epoch));
    Tensor correct = Tensor::zeros(backend, {1}, DType::i32);
    double loss_sum = 0;
    std::int64_t seen = 0;
    auto begin = Clock::now();
    progress.begin();
    data.train.start(epoch);
    for (Batch batch; data.train.next(batch);) {
      observer.step(report.steps);
      Span step_span("step", "phase", nullptr, report.steps);
      e.learning_rate = base_rate * options.schedule.factor(double(report.steps), double(total), double(per_epoch));
      optimizer.learning_rate(e.learning_rate);
      optimizer.stage();
      counters.batch(batch);
      space.zero_gradients();
      Variable l;
      {
        Observer::Phase phase(observer, "forward");
        l = loss(model(Variable(batch.images)), batch.labels, &correct);
      }
      observer.tape(l);
      {
        Observer::Phase phase(observer, "backward");
        space.backward(l);
      }
      {
        Observer::Phase phase(observer, "optimizer");
        strategy.step(optimizer, l);
      }
      report.steps++;

      if (report.steps % look_every == 0 || batch.index + 1 == per_epoch) {
        StepState state = optimizer.read_state();
        if (state.not_finite) {
          std::int64_t failed = static_cast<std::int64_t>(state.step);  // updates that were applied
          progress.clear();
          Batch again = data.train.make(failed / per_epoch, failed % per_epoch);
          counters.batch(again);
          std::string why = diagnose(model, loss, space, again);
          metrics.write({{"event", std::string("not_finite")}, {"step", failed + 1}, {"reason", why}});
          metrics.write({{"event", std::string("end")},
                         {"steps", failed},
                         {"stopped", std::int64_t(1)},
                         {"reason", std::string("not finite")}});
          optimizer.learning_rate(given_rate);
          throw NotFinite("step " + std::to_string(failed + 1) + " (epoch " + std::to_string(failed / per_epoch + 1) +
                          ", batch " + std::to_string(failed % per_epoch + 1) +
                          "): the loss or its gradient is not finite: " + why +
                          "; the parameters are those before this step. A smaller --lr usually helps");
        }
      }
      last_loss = l.item();
      if (report.steps == 1) first_loss = last_loss;
      if (options.log_every > 0 && report.steps % options.log_every == 0)
        metrics.write({{"event", std::string("step")},
                       {"step", report.steps},
                       {"loss", last_loss},
                       {"learning_rate", e.learning_rate}});
      loss_sum += last_loss * double(batch.size());
      seen += batch.size();
      progress.step(epoch + 1, batch.index + 1, per_epoch, loss_sum / double(seen), correct.item() / double(seen),
                    double(seen) * strategy.size() / seconds_since(begin), e.learning_rate);
      if (stop_signal || (one_batch && last_loss < OneBatch::near_zero)) strategy.request_stop();
      if (strategy.stopped()) break;
    }
    backend.synchronize();
    e.seconds = seconds_since(begin);
    Score train = strategy.combine({loss_sum, correct.item(), double(seen)});
    e.train_loss = train.loss / std::max(1.0, train.samples);
    e.train_accuracy = train.correct / std::max(1.0, train.samples);
    e.images_per_second = train.samples / e.seconds;
    strategy.end_epoch(epoch);
    if (strategy.stopped()) {
      report.stopped = true;
      break;
    }
    strategy.merge_statistics(space);
    observer.evaluation(true);
    std::optional<Observer::Phase> phase(std::in_place, observer, "evaluation");
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
    phase.reset();
    observer.evaluation(false);
    if (!one_batch) report.epochs.push_back(e);  // programs rely on the test accuracy of an epoch
    if (speaks) metrics.write(fields_of(e));
    progress.line(e);
  }
  std::string reason = "finished";
  if (report.stopped) {
    stopped_by = stop_signal;
    reason = !stopped_by ? "strategy" : stopped_by == SIGINT ? "SIGINT" : "SIGTERM";
    progress.stopped(reason, report.steps, total);
  }
  strategy.end();
  observer.end();
  if (one_batch && speaks && !stop_signal)
    std::printf("%s\n", OneBatch::verdict(first_loss, last_loss, report.steps).c_str());
  optimizer.learning_rate(given_rate);
  model.eval();
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
