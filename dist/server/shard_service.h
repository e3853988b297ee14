// ShardService: a shard in the hands of its owner. It knows what each worker has pushed, applies each push once, and
// says who may have the weights: how far workers may be apart is decided here. No network: server.cpp carries what goes
// in and out.
//
// With a quorum each shard decides by itself whose pushes make a step, so these may be others in other shards. A worker
// that was late for one of them waits there for the next step, and says to the others that it cannot push: blocked().
//
// With ringmaster and rennala too, and a push may be dropped by one shard and taken by another: its batch is trained
// again if the first shard dropped it, so that every batch is applied once there, and in other shards not at all, once
// or more often. What fedbuff and rennala have collected of a step is lost with its owner.
//
// Exchanges of a worker are numbered, ascending also over its returns; 0 is none. One thread at a time.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "dist/server/asynchrony.h"
#include "dist/server/shard.h"

namespace tandem {

using ExchangeId = std::uint64_t;

// What became of a push. dropped: it was too late. left_out: with bsp, another's gradient of its step was refused.
// refused: it was not finite.
enum class Verdict : std::uint8_t { taken, dropped, left_out, refused };

struct ShardCounts {
  std::uint64_t version = 0;              // updates applied
  std::int64_t pushes = 0, samples = 0;   // in them
  std::vector<std::int64_t> delays = {};  // delays[τ]: pushes that were so late; the last: or later
  std::vector<std::int64_t> applied = {}, dropped = {}, refused = {};  // of each worker
  std::int64_t left_out = 0;
  double participation() const;  // the share of all pushes that was applied; 1 where there were none
};

// What happened to a shard, in its order: who wants to repeat it gives another shard the same pushes and pulls.
struct ShardEvent {
  bool push;
  int worker;
  ExchangeId exchange;
};

class ShardService {
 public:
  static constexpr std::size_t longest_delay = 1 << 16;  // that is counted by itself

  struct Options {
    Asynchrony how = {};
    double momentum = 0.9;
    std::function<double(std::int64_t pushes)> learning_rate = {};  // after so many pushes were applied here
    bool record = false;
  };

  ShardService(const Rule& rule, const Tensor& first, std::vector<float> scales, int workers, Options options);

  // A whole push is here; the gradient stays as it is until the worker is answered. An exchange that was seen is passed
  // over: true when it is new. Without samples its worker knows that it is not finite. into: where the answer is to be
  // made, in memory that stays until the worker's next exchange.
  bool push(int worker, ExchangeId exchange, const Tensor& gradient, std::int64_t samples, const Tensor& into);
  // The weights alone. Answered between two steps, so that the last ones have all that was pushed.
  bool pull(int worker, ExchangeId exchange, const Tensor& into);
  bool drops(int worker) const { return shard_.delay(worker) >= options_.how.bound; }  // if it pushed now
  void idle(int worker, ExchangeId exchange);  // after that one it has nothing to push for now: nobody waits for it
  // After that one it cannot push, or can again: another shard has not answered it.
  void blocked(int worker, ExchangeId exchange, bool is);
  void lost(int worker), returned(int worker);

  // Workers whose exchange is to be answered now; each is named once. now: seconds of any clock, for the grace time of
  // a quorum.
  struct Answer {
    int worker;
    ExchangeId exchange;
    Tensor weights;
    Verdict verdict;
  };
  std::vector<Answer> answers(double now = 0);
  double due() const { return due_; }  // when answers() will have some although nothing happens until then

  // Of each worker, the last that is in the weights
  const std::vector<ExchangeId>& applied() const { return applied_; }
  // Goes on where another owner stopped.
  void go_on(std::uint64_t version, std::int64_t pushes, const std::vector<ExchangeId>& applied);
  Shard& shard() { return shard_; }
  const ShardCounts& counts() const { return counts_; }
  const std::vector<ShardEvent>& events() const { return events_; }
  const Rule& rule() const { return rule_; }

 private:
  struct Worker {
    ExchangeId seen = 0, waits = 0;                   // waits: for an answer to this one; 0: for none
    bool pushes = false;                              // and that is a push
    bool here = true, idle = false, blocked = false;  // here: others may have to wait for it
    Verdict verdict = Verdict::taken;
    Tensor gradient;         // bsp, quorum: until enough others' are there
    std::int64_t delay = 0;  // its τ
    Tensor into;             // where the answer is to be made
    bool made = false;       // it is
    std::int64_t samples = 0;
    std::uint64_t clock = 0;  // its pushes
  };
  bool finite(int worker, const Tensor& gradient);
  void count(int worker, std::int64_t delay, std::int64_t samples);
  void apply(int worker), apply_mean(), collect(int worker), apply_collected();
  bool nobody_pushes() const;
  bool enough_pushed(double now);

  const Rule& rule_;
  Options options_;
  Shard shard_;
  std::vector<Worker> workers_;
  std::vector<ExchangeId> applied_;
  struct Collected {
    int worker;
    ExchangeId exchange;
    std::int64_t delay, samples;
  };
  std::vector<Collected> collected_;  // fedbuff, rennala: in mean_, which is a sum until the step
  Tensor mean_;
  static constexpr double never = std::numeric_limits<double>::infinity();
  double due_ = never;
  ShardCounts counts_;
  std::vector<ShardEvent> events_;
};

}  // namespace tandem
