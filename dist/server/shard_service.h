// ShardService: a shard at its owner. It records each worker's pushes, applies each push once, and decides which
// workers receive the weights. So it enforces how far workers may be apart. It has no network code: shard_server.h
// sends and receives.
//
// With a quorum each shard decides by itself whose pushes make a step, so the sets of workers may differ between
// shards. A worker that was late for one shard waits there for the next step. It reports to the other shards that it
// cannot push: idle().
//
// With ringmaster and rennala the shards also decide independently. A push may be dropped by one shard and taken by
// another. Its batch is trained again if the first shard dropped it. So the first shard applies every batch once, and
// another shard may apply it never, once or several times. The pushes that fedbuff and rennala have collected for a
// step are lost with their owner.
//
// Exchanges of a worker are numbered. Numbers increase, also across its rejoins; 0 is none. One thread at a time.
#pragma once
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dist/server/asynchrony.h"
#include "dist/server/shard.h"
#include "layers/train/strategy.h"

namespace tandem {

using ExchangeId = std::uint64_t;

// The result of a push. dropped: it was too late. left_out: with bsp, another gradient of its step was refused.
// refused: it was not finite.
enum class Verdict : std::uint8_t { taken, dropped, left_out, refused };

// What a worker reports after a push. waits: for other shards, and cannot push. answered: by all, so it may push again.
// idle: it has no lease. Reports on one push are sent in this order, so a late repeated message changes nothing.
enum class Pause : std::uint8_t { none, waits, answered, idle };

struct ShardCounts {
  std::uint64_t version = 0;              // updates applied
  std::int64_t pushes = 0, samples = 0;   // in these updates
  std::vector<std::int64_t> delays = {};  // delays[τ]: pushes with delay τ; the last: τ or more
  std::vector<std::int64_t> applied = {}, dropped = {}, refused = {};  // per worker
  std::int64_t left_out = 0;
  double participation() const;  // the fraction of pushes that were applied; 1 if there were none
};

// "mean_delay", "participation", and the number of pushes by delay: "delay_0" …, from 16 on by powers of two:
// "delay_16_to_31" …
Measures measures_of_delays(const ShardCounts& shard);

// The events of a shard, in order. To reproduce a shard, apply the same pushes and pulls to another one.
struct ShardEvent {
  bool push;
  int worker;
  ExchangeId exchange;
};

class ShardService {
 public:
  static constexpr std::size_t longest_delay = 1 << 16;  // longer delays are counted together

  // It uses these options: how, momentum, learning_rate and record.
  ShardService(const Rule& rule, const Tensor& first, std::vector<RuleBlock> blocks, int workers,
               ServerOptions options);

  // A whole push has arrived. The gradient must stay unchanged until the worker is answered. A repeated exchange is
  // ignored. samples = 0: the worker reports that the gradient is not finite. into: memory for the answer, valid until
  // the worker's next exchange.
  void push(int worker, ExchangeId exchange, const Tensor& gradient, std::int64_t samples, const Tensor& into);
  // Requests the weights without a push. Answered between two steps, so that the last weights contain all pushes.
  void pull(int worker, ExchangeId exchange, const Tensor& into);
  bool drops(int worker) const { return shard_.delay(worker) >= options_.how.bound; }  // if it pushed now
  // No other worker waits for one that waits or is idle.
  void idle(int worker, ExchangeId exchange, Pause pause = Pause::idle);
  void lost(int worker), returned(int worker);

  // The exchanges to be answered now; each worker occurs once. now: seconds of any clock, for the grace time of a
  // quorum.
  struct Answer {
    int worker;
    ExchangeId exchange;
    Tensor weights;
    Verdict verdict;
  };
  std::vector<Answer> answers(double now = 0);
  double due() const { return due_; }  // when answers() will return some without a further event

  // For each worker, its last exchange that is in the weights
  const std::vector<ExchangeId>& applied() const { return applied_; }
  // Continues the shard of another owner.
  void go_on(std::uint64_t version, std::int64_t pushes, const std::vector<ExchangeId>& applied);
  Shard& shard() { return shard_; }
  const ShardCounts& counts() const { return counts_; }
  const std::vector<ShardEvent>& events() const { return events_; }

 private:
  struct Worker {
    ExchangeId seen = 0, waits = 0;           // waits: the exchange that it waits for; 0: none
    bool pushes = false;                      // that exchange is a push
    bool here = true;                         // others may have to wait for it
    std::pair<ExchangeId, Pause> pause = {};  // its last report, and the exchange that it follows
    bool idle() const { return pause.second == Pause::waits || pause.second == Pause::idle; }
    Verdict verdict = Verdict::taken;
    Tensor gradient;    // bsp, quorum: kept until enough workers have pushed
    Tensor into;        // memory for the answer
    bool made = false;  // the answer is in `into`
    std::int64_t samples = 0;
    std::uint64_t clock = 0;  // its number of pushes
  };
  bool begins(int worker, ExchangeId exchange, const Tensor& into);
  bool finite(int worker, const Tensor& gradient);
  void record(bool push, int worker);
  void count(int worker, std::int64_t delay, std::int64_t samples);
  void apply(int worker), apply_mean(), collect(int worker, double weight);
  void apply_collected(int latest, double sum_of_weights);
  std::uint64_t slowest() const;  // the smallest clock of the workers that push; none: the largest number
  bool nobody_pushes() const;
  bool enough_pushed(double now);

  ServerOptions options_;
  Shard shard_;
  std::vector<Worker> workers_;
  std::vector<ExchangeId> applied_;
  struct Collected {
    int worker;
    ExchangeId exchange;
    std::int64_t delay, samples;
  };
  std::vector<Collected> collected_;  // the pushes in mean_, which is a sum until the step
  Tensor mean_;
  static constexpr double never = std::numeric_limits<double>::infinity();
  double due_ = never;
  ShardCounts counts_;
  std::vector<ShardEvent> events_;
};

}  // namespace tandem
