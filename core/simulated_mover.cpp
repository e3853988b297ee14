// A device's copy engines on a virtual clock (core/mover.h).
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "core/memory.h"
#include "core/mover.h"
#include "core/text.h"

namespace tandem {
namespace {

class SimulatedMover : public Mover {
 public:
  explicit SimulatedMover(const SimulatedRates& rates) : rates_(rates) {}

  CopyId out(const void* from, std::size_t bytes) override {
    Copy& c = copies_[++last_];
    if (used_ + bytes > rates_.room) {
      c.error = "the simulated device has room for " + readable_bytes(double(rates_.room)) + " outside";
      return last_;
    }
    used_ += bytes;
    c.bytes.resize(bytes);
    std::memcpy(c.bytes.data(), from, bytes);
    c.finished = carry(true, bytes, out_free_, rates_.out);
    return last_;
  }
  void in(CopyId id, void* to) override {
    Copy& c = copies_.at(id);
    std::memcpy(to, c.bytes.data(), c.bytes.size());
    c.finished = carry(false, c.bytes.size(), in_free_, rates_.in);
  }
  bool done(CopyId id) override { return copies_.at(id).finished <= clock_; }
  std::string wait(CopyId id) override {
    const Copy& c = copies_.at(id);
    clock_ = std::max(clock_, c.finished);
    return c.error;
  }
  void forget(CopyId id) override {
    used_ -= copies_.at(id).bytes.size();
    copies_.erase(id);
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
  double carry(bool out, std::size_t bytes, double& free, double rate) {  // returns the time of its end
    const double begin = std::max(free, clock_);
    free = begin + double(bytes) / rate;
    moved_.push_back({out, bytes, begin, free});
    return free;
  }
  const SimulatedRates rates_;
  std::map<CopyId, Copy> copies_;
  CopyId last_ = 0;
  std::size_t used_ = 0;
  double clock_ = 0, out_free_ = 0, in_free_ = 0;
};

}  // namespace

std::unique_ptr<Mover> simulated_mover(const SimulatedRates& rates) { return std::make_unique<SimulatedMover>(rates); }

}  // namespace tandem
