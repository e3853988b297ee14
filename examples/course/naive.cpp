// The course's solutions as strategies that can be started, to compare with the framework's own.
//
//   build/tandem-run -n 4 --strategy naive-all-reduce build/naive
//
// naive-all-reduce, naive-server, naive-local-sgd:STEPS, naive-outer:H=STEPS, naive-daso and naive-hybrid.
#include <cstdio>

#include "dist/job/job.h"
#include "examples/course/cut_softmax/solution.h"
#include "examples/course/data_parallel/solution.h"
#include "examples/course/local_steps/solution.h"
#include "examples/course/server/solution.h"
#include "tandem.h"

using namespace tandem;

namespace {

std::unique_ptr<Strategy> naive_hybrid() {
  Job job;
  job.lane();  // refuses hosts with different numbers of ranks
  auto layer = std::make_shared<SlicedClassifier>(job.on_host(), SlicedClassifier::Options{.loss = naive_sliced_loss});
  return std::make_unique<NaiveAllReduce>(job.communicator(), std::move(layer));
}
std::unique_ptr<Strategy> naive_daso_of(const DasoOptions& options) {
  Job job;
  job.lane();
  return naive_daso({job.communicator(), job.on_host(), job.on_host(), job.across_hosts()}, options);
}

StrategyMaker naive(const std::string& name) {
  if (name == "naive-all-reduce") return [] { return std::make_unique<NaiveAllReduce>(Job().communicator()); };
  if (name == "naive-server") return [] { return std::make_unique<NaiveServer>(Job().communicator()); };
  if (name == "naive-hybrid") return naive_hybrid;
  if (!name.starts_with("naive-")) return {};
  const std::string of = name.substr(6);
  if (const auto how = DasoOptions::parse(of)) return [how] { return naive_daso_of(*how); };
  const auto how = RoundSteps::parse(of);
  if (!how) return {};
  if (how->kind == RoundSteps::Kind::local && how->every.alpha == 0)
    return [how] { return std::make_unique<NaiveLocalSgd>(Job().communicator(), how->every.steps); };
  if (how->kind == RoundSteps::Kind::outer && how->every.alpha == 0 && how->stream == 1 && how->overlap == 0)
    return [how] { return std::make_unique<NaiveOuter>(Job().communicator(), *how); };
  refuse(name,
         ": there are naive versions of local-sgd with a fixed number of steps, and of outer with H, momentum and lr");
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Options o = parse_options(argc, argv, "Trains a network on Fashion-MNIST by a naive strategy, under tandem-run.");
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loaders loaders(data, o, *backend);
    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    auto optimizer = make_optimizer(o);
    const std::string names =
        "naive-all-reduce, naive-server, naive-local-sgd:STEPS, naive-outer:H=STEPS, naive-daso or naive-hybrid";
    auto strategy = strategy_from_environment({{names, naive}});
    FitReport report = fit(*model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend, loaders, fit_options(o),
                           strategy.get());
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
