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
  if (run.ema) s.name += " and the average", s.bytes += run.ema->values.bytes() + run.ema->buffers.bytes();
  return s;
}

class ProfilerCallback : public Callback {
 public:
  explicit ProfilerCallback(Run& run)
      : profiler_(run.options.profiler, run.backend, run.strategy.rank(), run.at.step, run.last_step),
        lane_(profiler_.trace(), "step") {
    profiler_.share(run.strategy);
  }
  void begin(Run& run) override {
    if (!run.options.profiler.summary || !run.first_rank) return;
    Alone alone;
    profiler_.before(run.model, run.data.train.make(0, 0).images, state_of(run));
  }
  void phase(Run& run, const char* name, bool begins) override {
    const std::string_view which = name;
    if (which == "step") {
      step_.reset();
      if (begins) profiler_.step(run.at.step), step_.emplace("step", "phase", nullptr, run.at.step);
      return;
    }
    if (which == "evaluation" && begins) profiler_.evaluation(true);
    if (begins)
      open_.emplace_back(profiler_, name);
    else
      open_.pop_back();
    if (which == "evaluation" && !begins) profiler_.evaluation(false);
    if (which == "forward" && !begins) profiler_.tape(run.batch_loss);
  }
  bool looks_inside(const Run&) const override { return profiler_.looks(); }
  void end(Run&) override { profiler_.end(); }

 private:
  Profiler profiler_;
  OnLane lane_;
  std::optional<Span> step_;
  std::list<Profiler::Phase> open_;
};

}  // namespace

std::shared_ptr<Callback> profile(Run& run) { return std::make_shared<ProfilerCallback>(run); }

}  // namespace tandem
