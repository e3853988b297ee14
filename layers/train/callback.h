// Callback: work that fit() does besides training. Progress lines, metrics, checkpoints, early stopping and the rest
// are one file each in callbacks/. A program adds its own by RunConfig::callbacks (examples/own_callback.cpp).
//
//   struct PrintLoss : Callback {
//     void epoch_end(Run& run) override { std::printf("%d: %g\n", run.epoch.epoch, run.epoch.train_loss); }
//   };
//
// Every rank calls its callbacks; callbacks that write files do so only if run.first_rank is true. All are called from
// the thread that called fit(). Those of the program are called last.
#pragma once
#include <string>

namespace tandem {

class Run;

class Callback {
 public:
  virtual ~Callback() = default;
  virtual void begin(Run&) {}  // after a resumed run was loaded, before the first step
  // A part of the run begins or ends: "step", and in it "forward", "backward", "exchange", "optimizer"; "evaluation".
  // In a step that is replayed on a device only "step" and "exchange" are reported.
  virtual void phase(Run&, const char* name, bool begins) { (void)name, (void)begins; }
  virtual void step_end(Run&) {}   // after every step; run.step has its results
  virtual void epoch_end(Run&) {}  // after the evaluation; run.epoch has its results
  virtual void stopped(Run&) {}    // the run ends before its last epoch
  virtual void warning(Run&, const std::string& text) { (void)text; }  // Run::warn() was called
  virtual void end(Run&) {}                                            // the model has the evaluated weights
  // fit() ends by an exception. The callback may append text to its message.
  virtual void failed(Run&, std::string& message) { (void)message; }

  // Whether step_end() will read run.step's loss and accuracy after this step. On a device the read waits for the step.
  virtual bool reads_step(const Run&) const { return false; }
  // Whether this step must run eagerly, since phase() observes it.
  virtual bool looks_inside(const Run&) const { return false; }
};

}  // namespace tandem
