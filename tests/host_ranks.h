// Strategies by name for ranks that are threads of a test, some of which count as those of several hosts.
#pragma once
#include <optional>

#include "dist/strategies/local_steps.h"
#include "tests/naive.h"
#include "tests/replicas.h"

namespace tandem::test {

struct NamedOptions {
  int hosts = 2;  // of DASO
  RoundsOptions rounds = {.deadline = 30};
  AllReduceOptions all_reduce = {.deadline = 30};
  InProcessOptions wire = {.deadline = 30};  // of DASO: between hosts
};

// "all-reduce", "local-sgd:4", or "daso" and "naive-daso" with the communicators that a Job would make for them.
class NamedStrategies {
 public:
  NamedStrategies(int ranks, const std::string& name, const NamedOptions& options)
      : options_(options),
        naive_(name.starts_with("naive-")),
        all_reduce_(name == "all-reduce"),
        steps_(RoundSteps::parse(name)),
        daso_(DasoOptions::parse(naive_ ? name.substr(6) : name)),
        per_host_(ranks / options.hosts),
        everybody_(in_process(ranks, daso_ ? InProcessOptions{.deadline = 30} : options.wire)) {
    if (!daso_) return;
    for (auto* kind : {&gradients_, &host_}) *kind = in_process(ranks, {.deadline = 30});
    across_ = in_process(ranks, options.wire);
  }
  // Every rank calls it, in its own thread, and waits for all. Null: a strategy of another kind.
  std::unique_ptr<Strategy> of(int rank, const std::shared_ptr<SlicedClassifier>& classifier = nullptr) {
    const auto r = std::size_t(rank);
    RoundsOptions between = options_.rounds;
    AllReduceOptions gradients = options_.all_reduce;
    between.classifier = gradients.classifier = classifier;
    if (all_reduce_) return all_reduce(std::move(everybody_[r]), gradients);
    if (steps_) return rounds({std::move(everybody_[r])}, *steps_, between);
    if (!daso_) return nullptr;
    auto part = [&](auto& all, int color) { return std::exchange(all[r], nullptr)->split(color, rank); };
    RoundRanks ranks{.everybody = std::move(everybody_[r]),
                     .gradients = part(gradients_, rank / per_host_),
                     .host = part(host_, rank / per_host_),
                     .across = part(across_, rank % per_host_)};
    return naive_ ? naive_daso(std::move(ranks), *daso_, classifier) : rounds(std::move(ranks), *daso_, between);
  }

 private:
  NamedOptions options_;
  bool naive_, all_reduce_;
  std::optional<RoundSteps> steps_;
  std::optional<DasoOptions> daso_;
  int per_host_;
  std::vector<std::unique_ptr<Communicator>> everybody_, gradients_, host_, across_;
};

inline std::vector<Ended> on_ranks(int n, const std::string& strategy, const StrategyBody& body,
                                   const NamedOptions& options = {}) {
  NamedStrategies named(n, strategy, options);
  return with_strategies(
      n, [&](int r) { return named.of(r); }, body);
}

}  // namespace tandem::test
