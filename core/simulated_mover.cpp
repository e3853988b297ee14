// A device's copy engines on a virtual clock (core/mover.h).
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "core/text.h"
#include "core/memory.h"
#include "core/mover.h"

namespace tandem {
namespace {

class SimulatedMover : public Mover {
 public:
  explicit SimulatedMover(const SimulatedRates& rates) : rates_(rates) {}

  WorkLease out(const void* from, std::size_t bytes) override {
    Copy& c = copies_[++last_];
    if (used_ + bytes > rates_.room) {
      c.error = "the simulated device has room for " + readable_bytes(double(rates_.room)) + " outside";
      return last_;
    }
    used_ += bytes;
    c.bytes.resize(bytes);
    std::memcpy(c.bytes.data(), from, bytes);
    c.finished = out_free_ = std::max(out_free_, clock_) + double(bytes) / rates_.out;
    return last_;
  }
  void in(WorkLease lease, void* to) override {
    Copy& c = copies_.at(lease);
    std::memcpy(to, c.bytes.data(), c.bytes.size());
    c.finished = in_free_ = std::max(in_free_, clock_) + double(c.bytes.size()) / rates_.in;
  }
  bool done(WorkLease lease) override { return copies_.at(lease).finished <= clock_; }
  std::string wait(WorkLease lease) override {
    const Copy& c = copies_.at(lease);
    clock_ = std::max(clock_, c.finished);
    return c.error;
  }
  void forget(WorkLease lease) override {
    used_ -= copies_.at(lease).bytes.size();
    copies_.erase(lease);
  }
  double now() override { return clock_; }
  void ran(double flops, double bytes) override { clock_ += std::max(flops / rates_.flops, bytes / rates_.memory); }
  MoverRates rates() const override { return {rates_.out, rates_.in}; }
  std::string description() const override { return "a simulated device"; }

 private:
  struct Copy {
    std::vector<std::byte> bytes;
    double finished = 0;
    std::string error;
  };
  const SimulatedRates rates_;
  std::map<WorkLease, Copy> copies_;
  WorkLease last_ = 0;
  std::size_t used_ = 0;
  double clock_ = 0, out_free_ = 0, in_free_ = 0;
};

}  // namespace

std::unique_ptr<Mover> simulated_mover(const SimulatedRates& rates) { return std::make_unique<SimulatedMover>(rates); }

}  // namespace tandem
