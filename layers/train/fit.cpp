#include "layers/train/fit.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "core/files/atomic_file.h"
#include "core/backend.h"
#include "core/build_info.h"
#include "core/elementwise.h"
#include "core/files/files.h"
#include "layers/optim/accumulation.h"
#include "layers/train/metrics.h"
#include "layers/train/options.h"
#include "layers/train/replay.h"
#include "layers/train/step_memory.h"
#include "layers/train/tally.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Ctrl-C, SIGTERM and a terminal that is closed (SIGHUP) ask for a stop at the next step; a second one ends the program at once.
// Ranks may be threads of one process: a signal stops them all.
std::atomic<int> stop_signal = 0, stopped_by = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a handler may write to it");

double now() {  // what a handler may call
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

class StopOnSignal {
 public:
  StopOnSignal() {
    std::lock_guard lock(mutex_);
    if (trainings_++ > 0) return;
    stop_signal = 0, stopped_by = 0;
    struct sigaction action {};
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    for (auto& [number, name, before] : handled_) {
      sigaction(number, &action, &before);
      if (before.sa_handler == SIG_IGN) sigaction(number, &before, nullptr);  // in the background, under nohup
    }
  }
  ~StopOnSignal() {
    std::lock_guard lock(mutex_);
    if (--trainings_ > 0) return;
    for (auto& [number, name, before] : handled_) sigaction(number, &before, nullptr);
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  static const char* name_of(int signal) {
    for (auto& [number, name, before] : handled_)
      if (number == signal) return name;
    return "";
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
  struct Handled {
    int number;
    const char* name;
    struct sigaction before;
  };
  static inline Handled handled_[3] = {{SIGINT, "SIGINT", {}}, {SIGTERM, "SIGTERM", {}}, {SIGHUP, "SIGHUP", {}}};
  static inline std::mutex mutex_;
  static inline int trainings_ = 0;  // in this process, now: the first takes the signals, the last gives them back
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
    std::fprintf(stderr, "%s\n", line_of(e, epochs_).c_str());
  }
  // `over`: why nothing is left to do; empty: something is.
  void resumed(const std::string& from, const RunPosition& at, const std::string& over,
               const std::vector<std::string>& differences) {
    if (!on_) return;
    std::fprintf(stderr, "%s: %lld of %d epochs are done", from.c_str(), static_cast<long long>(at.epoch), epochs_);
    if (at.batch > 0)
      std::fprintf(stderr, " and %lld of %lld batches", static_cast<long long>(at.batch),
                   static_cast<long long>(at.batches));
    std::fprintf(stderr, ", %s%s%s\n", counted(at.step, "step").c_str(),
                 over.empty() ? "" : ": nothing is left to do: ", over.c_str());
    if (differences.empty() || !over.empty()) return;
    std::fprintf(stderr, "warning: it goes on, but not bit for bit as it would have:\n");
    for (const std::string& d : differences) std::fprintf(stderr, "  %s\n", d.c_str());
  }
  void ranks(const Strategy& strategy, const std::string& batch) {
    if (on_) std::fprintf(stderr, "%d ranks, %s: %s\n", strategy.size(), strategy.name().c_str(), batch.c_str());
  }
  void warning(const std::string& text) {
    if (!on_) return;
    clear();
    std::fprintf(stderr, "warning: %s\n", text.c_str());
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

// What one rank measured, as text for another: "sent_bytes 17\n…".
using Measures = std::vector<std::pair<std::string, double>>;
std::string text_of(const Measures& measures) {
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

// With a batch that grows with the ranks, fewer steps than these were measured to end below one machine (dist/README.md).
constexpr double few_steps = 600;

const std::string does_not_repeat = "running the batch again gave finite values only; the failure does not repeat";

std::vector<std::pair<std::string, double>> curves_of(const EpochReport& e) {
  std::vector<std::pair<std::string, double>> values;
  for (auto& [name, value] : fields_of(e))
    if (const double* number = std::get_if<double>(&value)) values.push_back({"epoch/" + name, *number});
  return values;
}

// The first batch of a source, again and again: `steps` of it are an epoch.
class OneBatch : public BatchSource {
 public:
  static constexpr std::int64_t steps = 300;
  std::int64_t size() const { return batch_.size(); }
  static constexpr double near_zero = 0.01;  // a loss below this ends it
  explicit OneBatch(BatchSource& source) : source_(source), batch_(source.make(0, 0)) {}
  void share(int rank, int world) override {
    source_.share(rank, world);
    batch_ = source_.make(0, 0);
  }
  bool grows_with_ranks() const override { return source_.grows_with_ranks(); }
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
  std::map<std::string, std::string> description() const override { return source_.description(); }
  // Prints what the steps tell. Throws Error unless that is that the model learns.
  // `right`: the share of the pictures that the last step had right; with label smoothing the loss alone stays high.
  static void judge(double first, double last, double right, std::int64_t took, bool all) {
    const bool unknown = took == 0 || first < near_zero;
    const bool learns = !unknown && (last < near_zero || last < first / 10 || (right > 0.95 && last < first / 2));
    const char* verdict = unknown
                              ? "that cannot tell whether the model learns: begin with new weights, whose loss can fall"
                          : last < near_zero ? "the model can learn"
                          : learns ? "it learns, but not to zero: dropout, label smoothing and mixup do that, or --lr"
                          : !all   ? "that cannot tell whether the model learns: too few steps were made"
                                   : "the model does NOT learn: look at --lr, the labels and the model";
    char text[300];
    std::snprintf(text, sizeof text, "one batch: loss %.4g → %.4g in %s: %s", first, last,
                  counted(took, "step").c_str(), verdict);
    if (!learns) fail(text);
    std::printf("%s\n", text);
  }

 private:
  BatchSource& source_;
  Batch batch_;
  std::int64_t epoch_ = 0, next_ = 0;
};

// fit() looks at the device's flag every few steps, and says which batch set it.
class LooksAtTimes {
 public:
  explicit LooksAtTimes(Optimizer& optimizer)
      : optimizer_(optimizer), before_(std::exchange(optimizer.if_not_finite, IfNotFinite::wait)) {}
  ~LooksAtTimes() { optimizer_.if_not_finite = before_; }
  LooksAtTimes(const LooksAtTimes&) = delete;

 private:
  Optimizer& optimizer_;
  IfNotFinite before_;
};

// Calls `save` when its scope is left by an exception.
class OnFailure {
 public:
  explicit OnFailure(std::function<void()> save) : save_(std::move(save)) {}
  ~OnFailure() {
    if (std::uncaught_exceptions() > before_) try {
        save_();
      } catch (const std::exception& e) {
        std::fprintf(stderr, "no checkpoint of what is left: %s\n", e.what());
      }
  }

 private:
  std::function<void()> save_;
  int before_ = std::uncaught_exceptions();
};

// The files of a run: last.safetensors and best.safetensors in a folder.
class CheckpointFiles {
 public:
  CheckpointFiles(const FitOptions& options, bool writes)
      : from_(options.resume), folder_(options.checkpoint), option_("--checkpoint"), speaks_(writes) {
    namespace fs = std::filesystem;
    std::error_code none;
    if (!from_.empty() && fs::is_directory(from_, none)) {
      if (folder_.empty()) folder_ = from_, option_ = "--resume";
      from_ = file(from_, "last");
    }
    if (!from_.empty() && !fs::exists(from_, none)) refuse("--resume ", options.resume, ": there is no ", from_);
    if (!folder_.empty() && fs::exists(folder_, none) && !fs::is_directory(folder_, none))
      refuse("--checkpoint ", folder_, ": is a file, not a folder: name a folder for last.safetensors and ",
             "best.safetensors");
    check_strangers();
  }
  // Something will be written: what would make that fail after hours of training fails now.
  void begin() {
    if (!writes()) return;
    make_folder(option_ + " " + folder_, folder_);
    lock_.take(folder_, option_ + " " + folder_, "writes its checkpoints there: wait for its end, or choose another folder");
    check_strangers();  // once more: the run that held the folder may have ended just now
    AtomicFile can_be_written(last());
  }
  bool resumes() const { return !from_.empty(); }
  const std::string& from() const { return from_; }
  bool writes() const { return !folder_.empty() && speaks_; }
  std::string last() const { return file(folder_, "last"); }
  std::string best() const { return file(folder_, "best"); }

  RunPosition load(const Training& training, const Settings& settings, std::int64_t per_epoch,
                   std::vector<std::string>& differences) const {
    RunPosition at = load_checkpoint(from_, training, settings, &differences);
    if (at.batch > 0 && at.batches != per_epoch)
      refuse(from_, ": was saved at batch ", at.batch, " of ", at.batches, ", and an epoch has ", per_epoch,
             " batches now: resume it with the same data, and the same batch over all ranks");
    if (!training.space.backend().deterministic())
      differences.push_back("convolution algorithms are chosen by timing (--deterministic: by rule)");
    return at;
  }
  // Rank 0 is lost, or could be, and this rank writes what is left, unless there is something newer. Rank 0 may still hold the
  // folder's lock, stopped; what it would write is no newer either.
  bool take_over(const RunPosition& at) {
    if (folder_.empty()) return false;
    std::filesystem::create_directories(folder_);
    if (!std::filesystem::exists(last())) return true;
    const RunPosition there = position_in(last());
    return there.run == at.run && there.step < at.step;
  }
  // The checkpoint from which a failed run can go on, for its error.
  std::string kept(std::int64_t saved_at) const {
    if (!speaks_) return "";
    if (saved_at >= 0) return "; " + last() + " holds the run after step " + std::to_string(saved_at);
    if (resumes()) return "; " + from_ + " is as it was";
    return writes() ? "; no epoch had ended, so there is no checkpoint" : "; there is no checkpoint without --checkpoint";
  }

 private:
  // Nothing that another run left is overwritten.
  void check_strangers() const {
    std::error_code none;
    if (!writes()) return;
    for (const std::string& there : {last(), best()})
      if (std::filesystem::exists(there, none) && (from_.empty() || !std::filesystem::equivalent(from_, last(), none)))
        refuse("--checkpoint ", folder_, ": holds another run's ", std::filesystem::path(there).filename().string(),
               ". Go on with that by --resume ", folder_, ", or choose another folder");
  }
  static std::string file(const std::string& folder, const char* name) {
    return (std::filesystem::path(folder) / name).string() + ".safetensors";
  }
  std::string from_, folder_, option_;
  bool speaks_;
  FileLock lock_;
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
          {"--batch", o.batch_per_rank ? std::to_string(o.batch_per_rank) + " per rank" : std::to_string(o.batch)},
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

// What was asked for: all that decides what this run computes beside the machine and the program.
Settings recipe_of(const FitOptions& options, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train) {
  Settings s{{"--epochs", std::to_string(options.epochs)},
             {"--seed", std::to_string(options.seed)},
             {"--optimizer", optimizer.name()},
             {"--lr", text_of(optimizer.learning_rate())},
             {"--lr-scale", name_of(options.lr_scale)},
             {"--clip", text_of(optimizer.clip_norm)},
             {"--accumulate", std::to_string(options.accumulate)},
             {"--ema", text_of(options.ema)},
             {"--sync-bn", options.sync_batch_norm ? "yes" : "no"},
             {"pictures in an epoch", std::to_string(train.pictures_per_epoch())},
             {"batches in an epoch", std::to_string(train.batches_per_epoch())},
             {"ranks", std::to_string(strategy.size())}};
  s.insert(s.end(), options.settings.begin(), options.settings.end());
  for (const auto& described : train.description()) s.push_back(described);
  return s;
}

// Ranks that were told different things would train what nobody asked for. Where the data lie may differ from host to host.
void agree(Strategy& strategy, const Settings& settings) {
  if (strategy.size() == 1) return;
  std::string mine = strategy.where() + "\n";
  for (const auto& [name, value] : settings)
    if (name != "--data") mine += name + " " + value + "\n";
  const std::vector<std::string> all = strategy.gather(mine);
  for (std::size_t r = 1; r < all.size(); r++) {
    std::istringstream a(all[0]), b(all[r]);
    std::string first, other, x, y;
    std::getline(a, first), std::getline(b, other);
    while (std::getline(a, x) && std::getline(b, y))
      if (x != y) refuse(first, " and ", other, " were told different things: ", x, " and ", y);
  }
}

// How the ranks share a batch.
struct Cutting {
  std::int64_t pictures = 0;  // of all ranks
  int shares = 1;
  bool one_step = true;  // the shares' gradients make one step; otherwise each rank's makes one
  int times = 1;         // larger than one machine's
  std::int64_t smallest() const { return pictures / shares; }
};
Cutting cutting_of(const Strategy& strategy, const BatchSource& train, const Batch& first) {
  if (strategy.size() == 1) return {};
  const int together = strategy.ranks_to_a_step();
  return {.pictures = first.over_ranks(),
          .shares = strategy.apart() ? together : strategy.size(),
          .one_step = together > 1,
          .times = train.grows_with_ranks() ? together : 1};
}

// "batch 128 = 4 × 32, as on one machine".
std::string text_of(const Cutting& c, const Strategy& strategy, RateScale scale, double rate) {
  const std::string lr = ", lr " + text_of(rate), batch = "batch " + std::to_string(c.pictures);
  if (strategy.asynchronous()) return batch + " a push" + lr;
  std::string shares = batch + " = " + std::to_string(c.shares) + " × " + std::to_string(c.smallest());
  if (c.pictures % c.shares) shares += " or " + std::to_string(c.smallest() + 1);
  if (c.times == 1) return shares + (c.one_step ? ", as on one machine" : lr);
  return shares + lr + " → " + text_of(scaled(scale, rate, c.times)) + " (" + name_of(scale) + ")";
}

// What the first lines warn of: a run that will probably be worse than on one machine.
std::vector<std::string> doubts(const Cutting& c, Module& model, const FitOptions& options, double steps) {
  std::vector<std::string> all;
  if (c.shares > 1 && c.smallest() < 16 && !options.sync_batch_norm && !model.statistics().empty())
    all.push_back("batch norm has only " + std::to_string(c.smallest()) +
                  " pictures of a batch on each rank: --sync-bn takes all of them (under all-reduce); or a larger --batch, or fewer ranks");
  if (c.times > 1 && steps < few_steps)
    all.push_back(std::to_string(std::int64_t(steps)) + " steps are few for a batch of " + std::to_string(c.pictures) +
                  ": more --epochs, or --batch " + std::to_string(c.smallest()) + " for the steps of one machine");
  return all;
}

// Whether this is the accuracy of guessing among so many classes: less than three standard errors above 1/classes. Of few
// pictures nobody can tell: where those are more than a third of it.
bool guesses(const Score& trained, std::int64_t classes) {
  if (classes < 2 || trained.samples < 1) return false;
  const double p = 1 / double(classes), error = std::sqrt(p * (1 - p) / trained.samples);
  return 3 * error < p / 3 && trained.correct / trained.samples < p + 3 * error;
}

// What training keeps beside parameters and gradients.
TrainingState state_of(const Training& t) {
  TrainingState s{t.optimizer.name()};
  for (const auto& [name, vector] : t.optimizer.vectors()) s.bytes += vector.bytes();
  if (t.ema) s.name += " and the average", s.bytes += t.ema->values.bytes() + t.ema->statistics.bytes();
  return s;
}

// Rank 0's word on the last epoch, where it alone evaluated.
void tell_all(Strategy& strategy, FitReport& report) {
  std::ostringstream text;
  text.precision(17);
  if (!report.epochs.empty()) {
    const EpochReport& e = report.epochs.back();
    for (const auto& v : {e.validation_loss, e.validation_accuracy, e.test_loss, e.test_accuracy})
      v ? text << *v << ' ' : text << "- ";
  }
  std::istringstream words(strategy.gather(text.str())[0]);
  if (strategy.rank() == 0 || report.epochs.empty()) return;
  EpochReport& e = report.epochs.back();
  std::string word;  // a stream reads no inf and no nan, which losses may be
  for (auto* field : {&e.validation_loss, &e.validation_accuracy, &e.test_loss, &e.test_accuracy})
    if (words >> word && word != "-") *field = std::strtod(word.c_str(), nullptr);
}

// How good an epoch was: the larger, the better. Test pictures never choose.
std::pair<double, double> merit(const EpochReport& e) {
  if (e.validation_accuracy) return {*e.validation_accuracy, -*e.validation_loss};
  return {-e.train_loss, 0};
}

}  // namespace

MetricFields fields_of(const EpochReport& e) {
  MetricFields f{{"event", std::string("epoch")},
                 {"epoch", std::int64_t(e.epoch)},
                 {"train_loss", e.train_loss},
                 {"train_accuracy", e.train_accuracy}};
  if (e.several()) f.push_back({"first_epoch", std::int64_t(e.first)});
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

std::string line_of(const EpochReport& e, int epochs) {
  char text[200];
  const std::string from = e.several() ? std::to_string(e.first) + "-" : "";
  int n = std::snprintf(text, sizeof text, "epoch %s%d/%d  loss %.4f", from.c_str(), e.epoch, epochs, e.train_loss);
  auto add = [&](const char* format, auto... values) {
    n += std::snprintf(text + n, sizeof text - std::size_t(n), format, values...);
  };
  if (e.validation_accuracy) add("  validation %.2f %%", 100 * *e.validation_accuracy);
  if (e.test_accuracy) add("  test %.2f %%", 100 * *e.test_accuracy);
  add("  %.0f images/s  %.1f s", e.images_per_second, e.seconds);
  return text;
}

int stopping_signal() { return stopped_by; }

FitOptions fit_options(const Options& o) {
  return {.epochs = o.overfit_batch ? 1 : o.epochs,
          .schedule = Schedule::parse(o.schedule),
          .lr_scale = o.lr_scale,
          .seed = o.seed,
          .metrics = o.metrics,
          .log_every = o.log_every,
          .observe = o.observe,
          .overfit_batch = o.overfit_batch,
          .exchange = o.exchange,
          .accumulate = o.accumulate,
          .sync_batch_norm = o.sync_batch_norm,
          .ema = o.ema,
          .patience = o.patience,
          .checkpoint = o.checkpoint,
          .evaluate = o.evaluate,
          .resume = o.resume,
          .stop_after = o.stop_after,
          .settings = settings_of(o)};
}

Loss cross_entropy_loss(double label_smoothing) {
  return [label_smoothing](const Variable& logits, const Tensor& labels, Tensor* correct) {
    return cross_entropy(logits, labels, label_smoothing, correct);
  };
}

namespace {

// `stop`, if given, ends it early, with numbers that mean nothing.
Evaluation evaluate_unless(const std::atomic<int>* stop, Module& model, BatchSource& source,
                           Strategy* strategy) {
  NoGrad off;
  bool training = model.training();
  model.eval();
  Score score;
  Tensor correct;
  source.start(0);
  for (Batch batch; !(stop && *stop) && source.next(batch);) {
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

}  // namespace

Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy) {
  return evaluate_unless(nullptr, model, source, strategy);
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

namespace {

// --evaluate. Every rank evaluates all test pictures: there is nothing to exchange.
FitReport evaluated(Module& model, Backend& backend, const FitData& data, const FitOptions& options) {
  if (!data.test) refuse("--evaluate: there are no test pictures");
  ParameterSpace space(model, backend, options.seed);
  if (!options.resume.empty())
    load_weights(CheckpointFiles(options, false).from(), space);
  else
    Exchange(options.exchange, model, space, *data.test, {}, true).end();
  const Evaluation e = evaluate(model, *data.test);
  FitReport report;
  report.epochs.push_back(
      {.validation_loss = {}, .validation_accuracy = {}, .test_loss = e.loss, .test_accuracy = e.accuracy});
  return report;
}

// What the first line of the metrics tells besides the run's size: all that was asked for, by the options' names.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch) {
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  MetricFields fields{{"version", version()}, {"host", std::string(host)}, {"optimizer", optimizer}, {"batch", batch}};
  for (const auto& [name, value] : settings) {
    if (name == "--epochs" || name == "--seed" || name == "--batch" || name == "--optimizer" || name == "--data") continue;
    const std::string key = name == "--lr" ? "learning_rate" : name == "pictures" ? "data" : name.starts_with("--") ? name.substr(2) : "";
    if (key.empty() || value.empty()) continue;
    double number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    const bool whole = error == std::errc() && end == value.data() + value.size();
    fields.push_back({key, whole ? MetricValue(number) : MetricValue(value)});
  }
  return fields;
}

}  // namespace

FitReport fit(Module& model, Loss loss, Optimizer& optimizer, Backend& backend, const FitData& given_data,
              const FitOptions& options, Strategy* given) {
  if (options.evaluate) return evaluated(model, backend, given_data, options);
  std::optional<OneBatch> one_batch;
  if (options.overfit_batch) one_batch.emplace(given_data.train);
  std::unique_ptr<Strategy> from_environment = given ? nullptr : strategy_from_environment();
  Strategy& strategy = given ? *given : *from_environment;
  bool speaks = strategy.rank() == 0;  // only rank 0 writes
  require(options.ema >= 0 && options.ema < 1, "fit: ema ", options.ema, " must be at least 0 and below 1");
  require(options.epochs >= 0 && options.patience >= 0 && options.stop_after >= 0 && options.log_every >= 0,
          "fit: epochs, patience, stop_after and log_every must be at least 0");
  if (options.patience > 0 && !given_data.validation)
    refuse("--patience ", options.patience, ": there is nothing to judge by: hold pictures back with --val");
  if (options.schedule.warmup > options.epochs && !one_batch)
    refuse("--schedule: a warm-up of ", options.schedule.warmup, " epochs is longer than the run: --epochs ", options.epochs);
  CheckpointFiles files(options, speaks);

  const bool apart = strategy.apart(), judges = !apart || speaks;
  BatchSource& given_train = one_batch ? static_cast<BatchSource&>(*one_batch) : given_data.train;
  const FitData data{strategy.batches(given_train, options.accumulate), one_batch ? nullptr : given_data.validation,
                     one_batch ? nullptr : given_data.test};
  for (BatchSource* source : {data.validation, data.test})
    if (source) source->share(apart ? 0 : strategy.rank(), apart ? 1 : strategy.size());
  Settings settings = recipe_of(options, optimizer, strategy, data.train);
  agree(strategy, settings);
  strategy.prepare(model, loss);
  if (options.sync_batch_norm) strategy.sync_batch_norm(model);
  ParameterSpace space(model, backend, options.seed, strategy.memory());
  std::map<std::string, std::string> about = data.train.description();
  for (const auto& [name, value] : options.settings)
    if (name == "--model") about["model"] = value;
  const auto named = about.find("classes");  // a line each; nothing where a source does not say
  const std::int64_t classes = named == about.end() ? 0 : 1 + std::count(named->second.begin(), named->second.end(), '\n');
  Exchange exchange(options.exchange, model, space, data.train, about, speaks);
  strategy.begin(space);
  optimizer.bind(space, options.seed);
  strategy.bind(optimizer);
  std::optional<Ema> ema;
  if (options.ema > 0) ema.emplace(space, options.ema);

  std::optional<Batch> first(data.train.make(0, 0));  // to look at, until training begins
  const Cutting cut = cutting_of(strategy, data.train, *first);
  struct Clip {  // while fit() runs
    Optimizer& optimizer;
    double before = optimizer.clip_norm;
    ~Clip() { optimizer.clip_norm = before; }
  } clip{optimizer};
  if (cut.times > 1 && clip.before == 0) optimizer.clip_norm = clip_of(options.lr_scale, cut.times);
  const double given_rate = optimizer.learning_rate(),
               base_rate = scaled(options.lr_scale, given_rate, cut.times);
  const std::int64_t per_epoch = data.train.batches_per_epoch();
  Accumulation accumulation(space, optimizer, options.accumulate, per_epoch);
  const double steps_per_epoch = double(accumulation.steps_per_epoch()), total = steps_per_epoch * options.epochs;
  const bool warms_up = options.schedule.warmup > 0 || options.schedule.kind == Schedule::Kind::one_cycle;
  const double rise = warms_up || base_rate == given_rate ? 0 : std::min(5 * steps_per_epoch, total / 10);
  // By value: servers ask it in a thread of their own.
  auto rate_of = [given_rate, base_rate, rise, total, steps_per_epoch, schedule = options.schedule](double step) {
    const double base = step < rise ? given_rate + (base_rate - given_rate) * step / rise : base_rate;
    return base * schedule.factor(step, total, steps_per_epoch);
  };

  FitReport report;
  RunPosition at;  // how far the run has come
  const Training training{space, optimizer, ema ? &*ema : nullptr};
  at.run = run_of(settings);
  for (const auto& here : surroundings(backend)) settings.push_back(here);
  if (files.resumes()) at = files.load(training, settings, per_epoch, report.differences);
  if (!speaks) at.so_far = {};
  at.batches = per_epoch;
  std::int64_t saved_at = -1;  // the step of last.safetensors, once it is this run's
  auto save = [&](const std::string& file) {
    if (!files.writes()) return;
    strategy.collect(optimizer);
    save_checkpoint(file, training, at, settings);
    saved_at = at.step;
  };
  // Why no step is to be made, of a run that was resumed.
  const std::int64_t no_better = at.epoch - at.best_epoch;
  const bool impatient =
      at.ended ? options.patience <= no_better : options.patience > 0 && at.batch == 0 && no_better >= options.patience;
  std::string over;
  if (at.epoch >= options.epochs)
    over = "a larger --epochs goes on";
  else if (impatient)
    over = "validation was no better since epoch " + std::to_string(at.best_epoch) + ", a larger --patience goes on";
  else if (options.stop_after > 0 && at.step >= options.stop_after)
    over = "--stop-after " + std::to_string(options.stop_after) + " is behind it";
  else {
    at.ended = false;
    files.begin();
  }
  const std::int64_t began = at.step;

  strategy.by_itself(true);
  require_memory(model, *first);
  strategy.by_itself(false);

  // What may still be refused comes before the first line is written; a run with nothing left to do writes none.
  const std::int64_t last_step =
      options.stop_after > 0 ? std::min(options.stop_after, std::int64_t(total)) : std::int64_t(total);
  Observer observer(options.observe, backend, strategy.rank(), at.step, last_step);
  observer.share(strategy);
  MetricsFile metrics(speaks && over.empty() ? options.metrics : "", files.resumes(), at.run);
  MetricFields start{{"event", std::string(files.resumes() ? "resume" : "start")},
                 {"run", at.run},
                 {"parameters", space.parameters()},
                 {"epochs", std::int64_t(options.epochs)},
                 {"batches_per_epoch", per_epoch},
                 {"backend", backend.description()},
                 {"strategy", strategy.name()},
                 {"ranks", std::int64_t(strategy.size())},
                 {"seed", std::int64_t(options.seed)},
                 {"step", at.step}};
  for (auto& field : recipe_fields(settings, optimizer.name(), first->over_ranks())) start.push_back(field);
  metrics.write(start);
  Progress progress(options.progress && speaks, options.epochs);
  if (files.resumes()) progress.resumed(files.from(), at, over, report.differences);
  if (strategy.size() > 1) {
    progress.ranks(strategy, text_of(cut, strategy, options.lr_scale, given_rate));
    for (const std::string& doubt : doubts(cut, model, options, total)) progress.warning(doubt);
  }
  StopOnSignal signals;
  Counters counters(optimizer.state());
  LooksAtTimes looks_at_times(optimizer);
  // A device is asked for its flag and its loss every few steps, since asking waits for it; on the host looking is free.
  const std::int64_t look_every = backend.records() && !one_batch ? 16 : 1;
  double first_loss = 0, last_loss = 0, last_correct = 0;
  OnLane lane(observer.trace(), "step");
  if (options.observe.summary && speaks) {
    strategy.by_itself(true);
    observer.before(model, first->images, state_of(training));
    strategy.by_itself(false);
  }
  first.reset();
  const auto run_begin = Clock::now();
  std::string reason = "finished";
  auto stop = [&](const std::string& why) { report.stopped = true, reason = why; };
  if (!over.empty() && at.epoch < options.epochs)
    stop(impatient ? "no better since epoch " + std::to_string(at.best_epoch) : "--stop-after");
  bool learnt = false;  // the one batch

  // A step before this one, or this one, was not finite, and since then nothing was applied: its batches once more.
  auto give_up = [&](std::int64_t done, std::int64_t batch) {
    strategy.by_itself(true);  // each rank finds what it can, and ends where it finds it
    const std::int64_t since = apart ? 0 : at.step - 1 - done;  // apart, every step is looked at
    std::int64_t k = (batch / options.accumulate - since) * options.accumulate;
    const std::int64_t end = std::min(k + options.accumulate, per_epoch);
    const std::string elsewhere = strategy.not_finite_on();
    std::string why = elsewhere.empty() ? does_not_repeat : "it was so on " + elsewhere;
    for (; k < end && why == does_not_repeat; k++) {
      Batch again = data.train.make(at.epoch, k);
      counters.batch(again);
      why = diagnose(model, loss, space, again);
    }
    progress.clear();
    metrics.write({{"event", std::string("not_finite")}, {"step", done + 1}, {"reason", why}});
    metrics.write({{"event", std::string("end")},
                   {"steps", done},
                   {"stopped", std::int64_t(1)},
                   {"reason", std::string("not finite")}});
    optimizer.learning_rate(given_rate);
    throw NotFinite("step " + std::to_string(done + 1) + " (epoch " + std::to_string(at.epoch + 1) + ", batch " +
                    std::to_string(k) + "): the loss or its gradient is not finite: " + why +
                    "; the parameters are those before this step. A smaller --lr usually helps" + files.kept(saved_at));
  };

  auto give_up_if_so = [&](std::int64_t batch) {
    if (const StepState state = optimizer.read_state(); strategy.gives_up(state))
      give_up(std::min(static_cast<std::int64_t>(state.step + state.skipped), at.step - 1), batch);
  };

  // What a batch is for, from pictures to parameters. On a device it is recorded, so what the host does in it must not matter
  // in a replay: what varies is in StepState.
  Batch batch;
  bool due = false;
  Tensor correct = Tensor::zeros(backend, {1}, DType::i32);
  Tally tally(backend);
  const bool parts = strategy.in_parts();
  const std::function<void()> update = [&] {
    if (!due) return;
    Observer::Phase phase(observer, "optimizer");
    if (parts)
      strategy.update(optimizer);
    else
      strategy.step(optimizer, Variable(accumulation.loss()));
    if (ema) ema->update(optimizer);
  };
  Replay step(
      backend,
      [&] {
        Variable l;
        {
          Observer::Phase phase(observer, "forward");
          l = batch_loss(loss, model(Variable(batch.images)), batch, &correct);
        }
        observer.tape(l);
        {
          Observer::Phase phase(observer, "backward");
          due = accumulation.backward(l, optimizer.scaled(l), batch);
        }
        exchange.after_backward();
        tally.add(l.value(), double(batch.size()));
        if (!parts) return update();
        if (due) strategy.hand_over(accumulation.loss());
      },
      !parts ? std::function<void()>() : [&] {
        Observer::Phase phase(observer, "exchange");
        if (due) strategy.exchange();
      },
      parts ? update : std::function<void()>(),
      strategy.size() > 1 && !parts ? "several ranks exchange gradients in it"
      : options.accumulate > 1      ? "--accumulate makes it of several batches"
      : strategy.size() > 1 && options.sync_batch_norm ? "batch norm exchanges its sums in it"
                                    : "");

  // When another rank is lost. What is here is a whole step's: parameters change only when all that it needs has arrived.
  Score whole = at.so_far;  // of the running epoch, after that step
  // Apart, the run's place is that of all ranks.
  auto place = [&] {
    at.step = strategy.steps(0);
    const std::int64_t epoch = at.epoch, steps = accumulation.steps_per_epoch();
    at.epoch = std::min<std::int64_t>(at.step / steps, options.epochs);
    at.batch = at.epoch < options.epochs ? at.step % steps * options.accumulate : 0;
    if (at.epoch != epoch) at.so_far = {};
  };
  OnFailure keep([&] {
    if (at.step == began || !strategy.saves_after_failure()) return;
    at.so_far = whole;
    // A step that was made before its exchange failed.
    if (apart)
      place();
    else if (const StepState made = optimizer.read_state(); due && std::int64_t(made.step + made.skipped) > at.step)
      at.step++, at.batch = batch.index + 1;
    if (!files.take_over(at)) return;
    save_checkpoint(files.last(), training, at, settings);
    std::fprintf(stderr, "%s has written %s: the run after step %lld; --resume goes on with it\n",
                 strategy.where().c_str(), files.last().c_str(), static_cast<long long>(at.step));
  });
  double seen = 0;
  strategy.follow({.epochs = options.epochs,
                   .stop_after = options.stop_after,
                   .done = at.step,
                   .steps_per_epoch = steps_per_epoch,
                   .learning_rate = rate_of,
                   .so_far = [&] { return Score{tally.read().loss, double(correct.item()), seen}; },
                   .asked_to_stop = [] { return stop_signal != 0; },
                   .resumed = files.resumes()});
  auto judged = Clock::now();  // the epoch before; apart, others train while one evaluates
  while (at.epoch < options.epochs && !report.stopped) {
    EpochReport e{.epoch = int(at.epoch) + 1,
                  .learning_rate = rate_of(std::max<std::int64_t>(0, at.step - 1)),
                  .validation_loss = {},
                  .validation_accuracy = {},
                  .test_loss = {},
                  .test_accuracy = {}};
    strategy.begin_epoch(e.epoch - 1);
    model.train();
    optimizer.epoch(static_cast<std::uint32_t>(at.epoch));
    const Score resumed = apart ? Score() : at.so_far;  // apart, what was trained is counted by the strategy
    correct.fill(resumed.correct);
    tally.begin(resumed.loss);
    seen = resumed.samples;
    double correct_before = resumed.correct;
    auto begin = Clock::now();
    progress.begin();
    data.train.start(at.epoch, at.batch);
    while (data.train.next(batch)) {
      observer.step(at.step);
      Span step_span("step", "phase", nullptr, at.step);
      e.learning_rate = rate_of(at.step);
      optimizer.learning_rate(e.learning_rate);
      accumulation.begin(batch);
      counters.batch(batch);
      exchange.begin_step(at.step + 1, batch.index == 0);
      step(batch, observer.looks() || exchange.watching());
      if (backend.records()) space.count_writes(space.all());  // a replay wrote to them, and told nobody
      const std::int64_t before = at.step;
      if (due) {
        at.step = apart ? strategy.steps(0) : at.step + 1;
        at.batch = batch.index + 1;
      }
      seen += double(batch.size());
      const bool logs = due && options.log_every > 0 && at.step / options.log_every > before / options.log_every;
      const bool looks = apart || at.step % look_every == 0 || at.batch == per_epoch || at.step == 1 || logs ||
                         exchange.due(at.step);
      Tally::Sums sums;
      if (looks) {
        if (due) give_up_if_so(batch.index);
        sums = tally.read();
        if (first_loss == 0) first_loss = sums.last;
        last_loss = sums.last;
        if (logs)
          metrics.write({{"event", std::string("step")},
                         {"step", at.step},
                         {"loss", sums.last},
                         {"learning_rate", e.learning_rate}});
        const double accuracy = correct.item() / seen;
        const double rate = (seen - resumed.samples) * strategy.size() / seconds_since(begin);
        progress.step(e.epoch, batch.index + 1, per_epoch, sums.loss / seen, accuracy, rate, e.learning_rate);
        if (due) exchange.end_step(at.step, sums.loss / seen, accuracy, e.learning_rate, rate);
        if (one_batch) last_correct = correct.item() - std::exchange(correct_before, correct.item());
        learnt = learnt || (due && one_batch && sums.last < OneBatch::near_zero);
        if (due && !apart) whole = {sums.loss, correct.item(), seen};
      }
      if (!due) continue;
      if (stop_signal || learnt) strategy.request_stop();
      if (apart) continue;  // its batches end when all have ended
      if (strategy.stopped()) stop(learnt ? "loss below 0.01" : "strategy");
      if (options.stop_after > 0 && at.step >= options.stop_after) stop("--stop-after");
      if (report.stopped) break;
    }
    strategy.end_epoch(e.epoch - 1);
    backend.synchronize();
    e.seconds = seconds_since(begin);
    if (at.step > began) give_up_if_so(batch.index);
    const Score before = at.so_far;  // was trained by the run that was resumed
    at.so_far = strategy.trained({tally.read().loss, double(correct.item()), seen});
    if (apart) {
      const double meanwhile = seconds_since(std::exchange(judged, Clock::now()));
      if (at.so_far.samples > seen) e.seconds = meanwhile;
      at.so_far = before + at.so_far;
    }
    whole = at.so_far;
    e.train_loss = at.so_far.loss / std::max(1.0, at.so_far.samples);
    e.train_accuracy = at.so_far.correct / std::max(1.0, at.so_far.samples);
    e.images_per_second = (at.so_far.samples - before.samples) / std::max(1e-9, e.seconds);
    strategy.merge_statistics(space);
    if (ema) {
      Ema::Shown averages(*ema);
      strategy.merge_averages(space);
    }
    if (strategy.stopped() && !report.stopped)
      stop(learnt ? "loss below 0.01" : apart ? "a rank was asked to stop" : "strategy");
    if (apart && options.stop_after > 0 && strategy.steps(0) >= options.stop_after) stop("--stop-after");
    if (report.stopped) {
      if (apart) place();
      save(files.last());
      break;
    }
    at.epoch = strategy.epochs_behind(at.epoch) - 1;
    e.first = std::exchange(e.epoch, int(at.epoch) + 1);
    observer.evaluation(true);
    std::optional<Observer::Phase> phase(std::in_place, observer, "evaluation");
    {
      std::optional<Ema::Shown> averages;
      if (ema) averages.emplace(*ema);
      if (data.validation && judges) {
        Evaluation v = evaluate_unless(&stop_signal, model, *data.validation, apart ? nullptr : &strategy);
        e.validation_loss = v.loss;
        e.validation_accuracy = v.accuracy;
      }
      if (data.test && judges) {
        Evaluation t = evaluate_unless(&stop_signal, model, *data.test, apart ? nullptr : &strategy);
        e.test_loss = t.loss;
        e.test_accuracy = t.accuracy;
      }
    }
    phase.reset();
    observer.evaluation(false);
    // A signal ends an evaluation too, on all ranks; a run that goes on begins with it.
    if (apart ? stop_signal && judges : strategy.combine({double(stop_signal != 0), 0, 0}).loss > 0) {
      stop("strategy");
      if (apart) strategy.end(), place(), at.so_far = strategy.trained({});
      save(files.last());
      break;
    }
    if (!one_batch) report.epochs.push_back(e);  // programs rely on the test accuracy of an epoch
    if (speaks) metrics.write(fields_of(e));
    exchange.end_epoch(at.step, curves_of(e));
    progress.line(e);
    if (!one_batch && guesses(at.so_far, classes)) {
      const std::string text = "the training accuracy of epoch " + std::to_string(e.epoch) + " is that of guessing among " +
                               std::to_string(classes) + " classes: try a smaller --lr, and --overfit-batch";
      progress.warning(text);
      metrics.write({{"event", std::string("warning")}, {"epoch", std::int64_t(e.epoch)}, {"text", text}});
    }

    const bool better = merit(e) > at.best;
    if (better) at.best = merit(e), at.best_epoch = e.epoch;
    at.epoch++, at.batch = 0, whole = at.so_far = {};
    if (apart) at.step = at.epoch * std::int64_t(steps_per_epoch);
    at.ended = judges && options.patience > 0 && at.epoch - at.best_epoch >= options.patience && at.epoch < options.epochs;
    save(files.last());
    if (better) save(files.best());
    if (at.ended) stop("no better since epoch " + std::to_string(at.best_epoch));
  }
  stopped_by = report.stopped ? stop_signal.load() : 0;
  if (stopped_by) reason = StopOnSignal::name_of(stopped_by);
  if (report.stopped && over.empty()) progress.stopped(reason, at.step, std::int64_t(total));
  strategy.end();
  if (apart) at.step = std::max(at.step, strategy.steps(0)), tell_all(strategy, report);
  observer.end();
  optimizer.learning_rate(given_rate);
  if (ema) ema->swap();
  model.eval();
  exchange.end();
  report.steps = at.step;
  report.best_epoch = int(at.best_epoch);
  double exchanges = 0, refused = 0;  // of all ranks, with a parameter server
  if (strategy.size() > 1) {
    const std::vector<std::string> all = strategy.gather(text_of(strategy.measures()));
    for (std::size_t r = 0; r < all.size(); r++) {
      MetricFields rank{{"event", std::string("rank")}, {"rank", std::int64_t(r)}};
      for (const auto& [name, value] : measures_in(all[r])) {
        rank.push_back({name, value});
        if (name == "exchanges") exchanges += value;
        if (name == "refused") refused += value;
      }
      metrics.write(rank);
    }
  }
  MetricFields end{{"event", std::string("end")},
                   {"steps", report.steps},
                   {"epochs", std::int64_t(report.epochs.size())},
                   {"stopped", std::int64_t(report.stopped)},
                   {"reason", reason},
                   {"seconds", seconds_since(run_begin)}};
  for (const auto& [name, value] : strategy.measures()) end.push_back({name, value});
  if (!report.epochs.empty() && report.epochs.back().test_accuracy)
    end.push_back({"test_accuracy", *report.epochs.back().test_accuracy});
  metrics.write(end);
  if (2 * refused > exchanges)
    throw NotFinite("most gradients of this run were not finite, and not used (" + std::to_string(int(refused)) +
                    "): it has diverged. A smaller --lr usually helps" + files.kept(saved_at));
  if (one_batch && speaks && !stopped_by)
    OneBatch::judge(first_loss, last_loss, last_correct / double(one_batch->size()), at.step - began,
                    at.step == std::int64_t(total));
  return report;
}

}  // namespace tandem
