#include <list>
#include <string_view>

#include "core/trace/trace.h"
#include "layers/train/callbacks/callbacks.h"

namespace tandem {
namespace {

// What training keeps beside parameters and gradients.
TrainingState state_of(const Run& run) {
  TrainingState s{run.optimizer.name()};
  for (const auto& [name, vector] : run.optimizer.vectors()) s.bytes += vector.bytes();
  if (run.ema) s.name += " and the average", s.bytes += run.ema->values.bytes() + run.ema->statistics.bytes();
  return s;
}

class Profiler : public Callback {
 public:
  explicit Profiler(Run& run)
      : observer_(run.options.observe, run.backend, run.strategy.rank(), run.at.step, run.last_step), lane_(observer_.trace(), "step") {
    observer_.share(run.strategy);
  }
  void begin(Run& run) override {
    if (!run.options.observe.summary || !run.first_rank) return;
    Alone alone;
    observer_.before(run.model, run.data.train.make(0, 0).images, state_of(run));
  }
  void phase(Run& run, const char* name, bool begins) override {
    const std::string_view which = name;
    if (which == "step") {
      step_.reset();
      if (begins) observer_.step(run.at.step), step_.emplace("step", "phase", nullptr, run.at.step);
      return;
    }
    if (which == "evaluation" && begins) observer_.evaluation(true);
    if (begins)
      open_.emplace_back(observer_, name);
    else
      open_.pop_back();
    if (which == "evaluation" && !begins) observer_.evaluation(false);
    if (which == "forward" && !begins) observer_.tape(run.batch_loss);
  }
  bool looks_inside(const Run&) const override { return observer_.looks(); }
  void end(Run&) override { observer_.end(); }

 private:
  Observer observer_;
  OnLane lane_;
  std::optional<Span> step_;
  std::list<Observer::Phase> open_;
};

}  // namespace

std::shared_ptr<Callback> profile(Run& run) { return std::make_shared<Profiler>(run); }

}  // namespace tandem
